"""The commands with a real engine and a tiny random model."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tokenizers

from octavo.cli.commands.demo import LIBRARIAN, QUESTIONS
from tests.cli.conftest import Call, started
from tests.engine.models import make_talking_checkpoint
from tests.models.tiny import VOCAB_SIZE, make_tiny_checkpoint

ENDLESS = ("--max-tokens", "30000", "--ignore-eos", "--num-gpu-blocks-override", "4000")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama with one token per character, a chat template, and a long context."""
    folder = make_tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=40_000)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(32 + i): 3 + i for i in range(VOCAB_SIZE - 3)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = tokenizers.decoders.Fuse()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": template}))
    return str(folder)


def test_json_output_equals_the_library_output(call: Call, model: str) -> None:
    from octavo import LLM, SamplingParams

    prompts = ["three four", "six", "three four seven"]
    done = call(
        *("generate", "--model", model, "--json", "--temperature", "0", "--max-tokens", "9"),
        *(part for prompt in prompts for part in ("-p", prompt)),
    )
    assert done.code == 0, done.err
    with LLM(model) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=9), use_tqdm=False)
    records = sorted(map(json.loads, done.lines), key=lambda record: record["prompt_index"])
    assert records == [
        {
            "prompt": output.prompt,
            "text": output.outputs[0].text,
            "token_ids": output.outputs[0].token_ids,
            "finish_reason": output.outputs[0].finish_reason,
            "num_cached_tokens": 0,
            "prompt_index": i,
        }
        for i, output in enumerate(outputs)
    ]


def test_prefix_cache_hits_are_reported_and_can_be_disabled(call: Call, model: str) -> None:
    prompt = "seventeen letters"
    args = ["generate", "--model", model, "--json", "--max-tokens", "1", "--block-size", "8"]
    args += ["-p", prompt, "-p", prompt]
    assert [json.loads(line)["num_cached_tokens"] for line in call(*args).lines] == [0, 16]
    done = call(*args, "--no-enable-prefix-caching")
    assert [json.loads(line)["num_cached_tokens"] for line in done.lines] == [0, 0]


def test_seed_makes_sampling_reproducible(call: Call, model: str) -> None:
    args = ("generate", "--model", model, "-p", "once", "--temperature", "1", "--seed")
    first, again, other = call(*args, "7"), call(*args, "7"), call(*args, "8")
    assert first.code == other.code == 0
    assert first.out == again.out != other.out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--model", "/absent"), 1, "/absent"),
        (("--model", "EMPTY"), 1, "config.json"),
        (("-p", ""), 2, "the prompt is empty"),
        (("-p", "x" * 40_000), 2, "maximum context length is"),
        (("--num-gpu-blocks-override", "2", "-p", "x" * 99), 2, "99"),
        (("--num-gpu-blocks-override", "2", "--max-model-len", "64"), 1, "max_model_len"),
        (("--logit-bias", "99999=1"), 2, "--logit-bias: logit_bias has token 99999, the vocabulary has 97 tokens"),
        (("--logprobs", "21"), 2, "--logprobs: logprobs is 21, and the limit is 20; raise max_logprobs"),
        (("--chat-template", "/absent.jinja"), 1, "cannot read the chat template /absent.jinja: No such file"),
    ],
)
def test_invalid_input_is_a_one_line_error(
    call: Call, model: str, tmp_path: Path, args: tuple[str, ...], code: int, message: str
) -> None:
    given = [str(tmp_path) if arg == "EMPTY" else arg for arg in args]
    named = [] if "--model" in args else ["--model", model]
    prompt = [] if "-p" in args else ["-p", "once"]
    done = call("generate", *named, *prompt, *given)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ")
    assert message in done.err
    assert done.err.rstrip("\n").count("\n") == 0


def test_demo_shares_the_system_prompt_of_simultaneous_requests(call: Call, model: str) -> None:
    done = call("demo", "--model", model, "--max-tokens", "4", "--num-gpu-blocks-override", "200")
    assert done.code == 0, done.err
    rows = {line[:25].strip(): line[25:].strip() for line in done.lines[-8:]}
    blocks = len(LIBRARIAN) // 16  # a token is a character; the questions after it begin with different ones
    assert rows["prefix-cache hit rate"].split("; ")[1].startswith(f"{2 * blocks * 16} of ")
    assert int(rows["blocks used at peak"].split(" of ")[0]) > blocks + len(QUESTIONS)
    assert rows["blocks saved by sharing"] == f"{2 * blocks}, at that peak"
    assert rows["blocks used now"].startswith("0, ")


# -- signals --------------------------------------------------------------------------------------------------------


def read_some(fd: int, num_bytes: int = 40) -> bytes:
    """Read at least `num_bytes` of output, less at its end."""
    seen = b""
    while len(seen) < num_bytes and (more := os.read(fd, 1024)):
        seen += more
    return seen


def test_results_are_written_at_once_and_kept_after_ctrl_c(model: str, tmp_path: Path) -> None:
    prompts, results = tmp_path / "prompts", tmp_path / "results"
    prompts.write_text('{"prompt_token_ids": [1, 2, 3]}\n' + '{"prompt_token_ids": [5, 6, 7]}\n' * 7)
    args = ["--prompts-file", str(prompts), "--json", "--max-num-seqs", "1", "--max-tokens", "1000", "--ignore-eos"]
    with results.open("wb") as out, started("generate", "--model", model, *args, stdout=out) as process:
        deadline = time.monotonic() + 100
        while not results.read_bytes().endswith(b"\n") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.poll() is None  # seven requests are unfinished
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert (process.returncode, err) == (130, b"")
    assert 1 <= len(records) < 8
    assert [record["prompt_index"] for record in records] == list(range(len(records)))
    assert records[0]["prompt"] == [1, 2, 3]


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(model: str) -> None:
    with started("chat", "--model", model, *ENDLESS) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        counts: list[tuple[str, str]] = []
        for line in (b"hello\n", b"bye\n"):
            process.stdin.write(line)
            process.stdin.flush()
            read_some(process.stdout.fileno(), 200)
            process.send_signal(signal.SIGINT)
            stats = process.stderr.readline().decode()  # printed after the stopped answer
            counts.append(re.findall(r"(\d+) of (\d+) prompt tokens cached", stats)[0])
        assert counts[0] == ("0", "6")
        assert 16 <= int(counts[1][0]) < int(counts[1][1])  # a cache hit for the first turn
        process.communicate(timeout=60)  # closes its input
        assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_while_running_leaves_no_process_or_shared_memory(model: str, number: signal.Signals) -> None:
    """Also when it is sent twice: stderr stays empty."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored in this process, as under nohup, and its children inherit that")
    shared = set(os.listdir("/dev/shm"))
    ours, theirs = pty.openpty()
    with started("generate", "--model", model, "-p", "once", *ENDLESS, stdout=theirs, process_group=0) as process:
        os.close(theirs)
        read_some(ours)
        begun = time.monotonic()
        for _ in range(2):
            process.send_signal(number)
            time.sleep(0.05)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (130 if number is signal.SIGINT else -number, -number) and err == b""
        assert time.monotonic() - begun < 50
        with pytest.raises(ProcessLookupError):  # its process group is empty
            os.killpg(process.pid, 0)
    os.close(ours)
    new = set(os.listdir("/dev/shm")) - shared
    assert not [name for name in new if str(process.pid) in name or "octavo" in name]


def test_closed_stdout(model: str) -> None:
    command = f'"{sys.executable}" -m octavo.cli.main generate --model "{model}" -p once --max-tokens 3 >&-'
    done = subprocess.run(["/bin/sh", "-c", command], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_in_a_weak_reference_callback() -> None:
    """Python drops the exception there; the command repeats the signal. Imports run such callbacks."""
    program = """
import os, signal, sys, time, weakref
import octavo.cli.app
from octavo.cli.main import main

class Lock:
    pass

def call(args):
    lock = Lock()
    watch = weakref.ref(lock, lambda gone: os.kill(os.getpid(), signal.SIGINT))
    del lock
    time.sleep(60)

octavo.cli.app.call = call
sys.argv[1:] = ["models"]
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_asyncio_recognises_the_default_sigint_handler() -> None:
    """It cancels its tasks."""
    program = """
import asyncio, os, signal, sys
import octavo.cli.app
from octavo.cli.main import main

async def wait():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        print("cancelled")
        raise

def call(args):
    asyncio.run(wait())

octavo.cli.app.call = call
sys.argv[1:] = ["models"]
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (130, b"")
    assert done.stdout.splitlines() == [b"cancelled"]


def test_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    """An exception in torch's C++ code would abort the process."""
    program = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
finally:
    os.abort()
"""
    (tmp_path / "torch.py").write_text(program)
    model = make_talking_checkpoint(tmp_path / "model")
    command = [sys.executable, "-m", "octavo.cli.main", "generate", "--model", str(model), "-p", "once"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize(("after_s", "times"), [(0.3, 2), (0.9, 1)])
def test_ctrl_c_while_the_model_loads(model: str, after_s: float, times: int) -> None:
    with started("generate", "--model", model, "-p", "once", *ENDLESS) as process:
        time.sleep(after_s)
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        out, err = process.communicate(timeout=60)
        # Before Python itself has started, the signal ends the process; that is quiet too.
        assert process.returncode in (130, -signal.SIGINT)
        assert (out, err) == (b"", b"")
