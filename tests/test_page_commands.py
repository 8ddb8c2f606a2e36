"""Every `octavo ...` command in a shell block of a page runs, on a tiny model and with a short load.

The folder of a test holds what the pages name: models, traces, recordings, keys. So a command runs as it is written,
but for what `SHORT` and `OTHER` change. One that serves runs in a process of its own and has to answer.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from octavo.checkpoint.catalog import cache_dir
from octavo.cli.main import run
from tests.engine.models import make_talking_checkpoint
from tests.test_docs import PAGES, ROOT, SHELL, tokens_of

SHORT: dict[str, dict[str, str]] = {
    "bench serve": {"--num-prompts": "2", "--random-input-len": "8", "--random-output-len": "4"},
    "bench serve --dataset-name timed_trace": {"--num-prompts": "2"},
    "calibrate": {"--repeats": "1", "--max-num-seqs": "4", "--max-model-len": "512"},
    "chat": {"--max-tokens": "4"},
    "plan": {"--requests": "20"},
    "reproduce": {"--time": "0.01"},
    "reproduce fig12": {"--time": "0.002"},
    "serve": {"--port": "0", "--num-gpu-blocks-override": "256"},
    "simulate sharegpt": {"--requests": "20"},
}
"""First words of a command -> options that get another value, or are added."""
OTHER = {
    "bench serve": "bench serve --port PORT",
    "http://localhost:8000": "http://127.0.0.1:PORT",
    "reproduce --all": "reproduce fig2",  # all take a minute at their shortest
    "reproduce fig2 fig12": "reproduce fig2 fig18",  # another line has fig12
    "tcp://127.0.0.1:": "ipc://",  # a port may be another program's
}
"""Part of a command -> what takes its place; PORT is that of a server with the tiny model."""
EXCUSED: dict[str, str] = {"octavo cluster": "it needs Ray, an extra; tests/cluster runs it"}
"""Part of a command -> why it cannot run here."""
FAILS = {
    "octavo doctor ./llama-3.1-8b --gpu l4 --max-model-len 32768": (1, "This makes it fit: --max-num-batched-tokens"),
    "octavo doctor llama-3.1-8b --gpu l4 --max-model-len 32768": (1, "This makes it fit: --max-num-batched-tokens"),
    "octavo doctor llama-3.1-70b --gpu h100": (1, "This makes it fit: --tensor-parallel-size 2;"),
    "octavo serve smollm2-135m-instruct -pp 2": (2, "pipeline_parallel_size is 2: processes of one machine share"),
}
"""Command that fails, as its page says -> its exit status, and a part of its message."""
MODELS = (
    "smollm2-135m-instruct",
    "smollm2",
    "MODEL",
    ".cache/octavo/models/SmolLM2-135M-Instruct.Q4_1.gguf",
)
"""Names of models on the pages: folders, which come before the catalogue's names."""
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OCTAVO_CACHE": str(cache_dir()), "HF_HUB_OFFLINE": "1"}
"""Compiled kernels stay where they are, while the home is another folder."""
FRAMES = "busy.frames"


# -- the pages' commands -----------------------------------------------------------------------------------------------


def commands_of(line: str) -> Iterator[str]:
    """The commands of a line of a shell block, without a prompt, a comment and `&`."""
    for part in re.split(r" && ", line):
        if found := re.match(r"(?:\$ )?((?:[A-Z_]+=\S* )*octavo\b(?!:).*?)(?: +#.*| +&)?$", part.strip()):
            yield re.sub(r" +", " ", found[1])


def lines_of(pages: Iterable[Path]) -> list[str]:
    """The distinct lines of shell blocks that have a command; commands of one line need each other."""
    found: dict[str, None] = {}
    for page in pages:
        for token in tokens_of(page):
            if token.type in ("fence", "code_block") and token.info.strip() in SHELL:
                for line in token.content.replace("\\\n", " ").splitlines():
                    found |= {" && ".join(commands): None for commands in [list(commands_of(line))] if commands}
    return list(found)


LINES = lines_of(PAGES)


def shortened(command: str) -> str:
    """The command with a short load, still with PORT."""
    start = command.partition("octavo ")[2]
    for first, options in SHORT.items():
        for name, value in options.items() if f"{start} ".startswith(f"{first} ") else ():
            with_value = re.compile(rf"{name}[ =]\S+")
            command = with_value.sub(f"{name} {value}", command) if name in command else f"{command} {name} {value}"
    for text, other in OTHER.items():
        command = command.replace(text, other)
    return command


def reason(line: str) -> str | None:
    return next((why for text, why in EXCUSED.items() if text in line), None)


def test_commands_are_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "`octavo top`\n\n```sh\n$ A=1 octavo serve M \\\n  --port 1 &\noctavo a   # b\noctavo c && octavo d\n```\n"
        "```\nx octavo e\noctavo:up 1\noctavo a\n```\n```python\noctavo f\n```\n"
    )
    assert lines_of([page]) == ["A=1 octavo serve M --port 1", "octavo a", "octavo c && octavo d"]


def test_commands_are_shortened() -> None:
    assert shortened("octavo plan --requests 400 --gpu l4") == "octavo plan --requests 20 --gpu l4"
    assert shortened("A=1 octavo chat") == "A=1 octavo chat --max-tokens 4"


def test_every_line_of_the_tables_is_of_use() -> None:
    assert len(LINES) > 30
    commands = [command for line in LINES for command in line.split(" && ")]
    text = "\n".join(commands)
    assert {first for first in SHORT if f"octavo {first} " not in f"{text} ".replace("\n", " \n")} == set()
    assert {part for part in (*OTHER, *EXCUSED) if part not in text} == set()
    assert set(FAILS) <= set(commands)
    assert all(name in text for name in MODELS)


# -- what they read ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages name."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in MODELS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        model = make_talking_checkpoint(folder / name, max_position_embeddings=4096, intermediate_size=48)
        (model / "chat_template.jinja").write_text((ROOT / "examples" / "tools.jinja").read_text())
    (folder / "llama-3.1-8b").mkdir()
    (folder / "llama-3.1-8b" / "config.json").write_text(json.dumps(LLAMA_8B))
    (folder / "tools.jinja").write_text((ROOT / "examples" / "tools.jinja").read_text())
    (folder / "system.json").write_text(json.dumps([{"role": "system", "content": "Answer in one sentence. " * 4}]))
    (folder / "keys").write_text("a-key-of-some-length\n")
    (folder / "text.txt").write_text("The sea is calm today, and the ships stay in the harbour. " * 20)
    (folder / "keys").chmod(0o600)
    (folder / "prices.json").write_text('{"h200": 3.5, "h100": 2.5}')
    write_traces(folder)
    dump = ROOT / "tests" / "view" / "recording" / "data" / "version6.flight"
    for name in ("20261121-170501.flight", "DIR/20261121-180809-22974-1-asked.flight"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(dump.read_bytes())
    assert run(["view", str(folder / "trace.jsonl"), "--save", str(folder / FRAMES)]) == 0
    return folder


def write_traces(folder: Path) -> None:
    rows = [{"timestamp": 100 * i, "input_length": 600, "output_length": 64, "hash_ids": [0, i + 1]} for i in range(6)]
    trace = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "trace.jsonl").write_text(trace)
    for name in ("trace.jsonl.gz", "mooncake.jsonl.gz", "mooncake_conversation.jsonl.gz"):
        (folder / name).write_bytes(gzip.compress(trace.encode()))
    lengths = np.arange(20, 120)
    np.savez(folder / "sharegpt_opt_lengths.npz", input_len=lengths, output_len=lengths)


@pytest.fixture
def folder(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home with links to the inputs, and the current folder."""
    for path in inputs.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    for name, value in {**ENVIRONMENT, "HOME": str(tmp_path), "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


class Server:
    """`octavo serve` or `octavo view` in a process of its own."""

    def __init__(self, words: list[str], folder: Path, **environment: str) -> None:
        self.log = folder / "log"
        command = [sys.executable, "-m", "octavo", *words]
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=folder, env={**os.environ, **ENVIRONMENT, **environment}, stdout=file, stderr=file
            )
        while (found := re.search(r"http://[\w.]+:(\d+)\S*", self.log.read_text())) is None:
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.port = found[1] if found is not None else ""

    def answers(self, path: str) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=20) as response:
            return bool(response.status == 200)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)


@pytest.fixture(scope="module")
def port(inputs: Path) -> Iterator[str]:
    """Of a server that the pages' clients ask."""
    server = Server(["serve", "smollm2-135m-instruct", "--port", "0"], inputs)
    try:
        yield server.port
    finally:
        assert server.stop() == 0, server.log.read_text()


# -- running them ------------------------------------------------------------------------------------------------------


def served(words: list[str], folder: Path, **environment: str) -> tuple[int, str]:
    """Start a server, ask it, stop it: its exit status and its log."""
    server = Server(words, folder, **environment)
    try:
        assert not server.port or server.answers("/health" if words[0] == "serve" else "/view/")
    finally:
        status = server.stop()
    return status, server.log.read_text()


@pytest.mark.proof
@pytest.mark.parametrize("line", LINES, ids=[re.sub(r"[^\w.-]+", "-", line)[:60] for line in LINES])
def test_command_runs(
    line: str,
    folder: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if (why := reason(line)) is not None:
        pytest.skip(why)
    for command in line.split(" && "):
        text = shortened(command)
        if "PORT" in text:
            text = text.replace("PORT", request.getfixturevalue("port"))
        before, _, rest = text.partition("octavo ")
        words = [os.path.expanduser(word) for word in shlex.split(rest)]
        if words[0] in ("serve", "view"):
            status, printed = served(words, folder, **dict(each.split("=") for each in before.split()))
        else:
            monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
            status = run(words)
            printed = "".join(capfd.readouterr())
        wanted, message = FAILS.get(command, (0, ""))
        assert status == wanted and message in printed, printed
        assert "Traceback" not in printed
