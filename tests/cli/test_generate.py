"""`octavo generate`: where prompts come from, what is printed, and what reaches the engine."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.generate import read_prompts
from octavo.cli.options import parse_length
from octavo.errors import PromptError
from tests.cli.conftest import Call
from tests.cli.fake_llm import FakeLLM

KEYS = ["prompt", "text", "token_ids", "finish_reason", "num_cached_tokens"]


def test_one_prompt_prints_its_completion_and_nothing_else(call: Call, fake: type[FakeLLM]) -> None:
    done = call("generate", "--prompt", "one two three")
    assert (done.code, done.out, done.err) == (0, "three two one\n", "")
    assert fake.made[0].closed


def test_several_prompts_stand_over_their_completions(call: Call, fake: type[FakeLLM]) -> None:
    assert call("generate", "-p", "a b", "-p", "c").out == ">>> a b\nb a\n\n>>> c\nc\n\n"


def test_json_is_one_object_a_line_in_the_order_of_the_prompts(call: Call, fake: type[FakeLLM]) -> None:
    done = call("generate", "--json", "-p", "a b c", "-p", "d", "--max-tokens", "2")
    first, second = map(json.loads, done.lines)
    assert list(first) == list(second) == KEYS
    assert first["prompt"] == "a b c"
    assert first["text"] == "c b"
    assert len(first["token_ids"]) == 2
    assert first["finish_reason"] == "length"
    assert first["num_cached_tokens"] == 1
    assert (second["prompt"], second["text"], second["finish_reason"]) == ("d", "d", "stop")


def test_json_numbers_the_samples_of_a_prompt(call: Call, fake: type[FakeLLM]) -> None:
    records = [json.loads(line) for line in call("generate", "--json", "-p", "a b", "--n", "3").lines]
    assert [record["index"] for record in records] == [0, 1, 2]
    assert [record["prompt"] for record in records] == ["a b"] * 3


def test_one_prompt_on_a_terminal_is_streamed(call: Call, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        flushed: list[str]

        def isatty(self) -> bool:
            return True

        def flush(self) -> None:
            self.flushed.append(self.getvalue())

    terminal = Terminal()
    terminal.flushed = []
    monkeypatch.setattr(sys, "stdout", terminal)
    assert call("generate", "-p", "one \x1b[31mtwo three").code == 0
    assert terminal.getvalue() == "three [31mtwo one\n"  # the escape character is gone
    assert terminal.flushed[:3] == ["three", "three [31mtwo", "three [31mtwo one"]


def test_only_what_was_given_reaches_the_engine(call: Call, fake: type[FakeLLM]) -> None:
    assert call("generate", "-p", "a", "--model", "dir").code == 0
    assert (fake.made[0].model, fake.made[0].engine) == ("dir", {})


def test_engine_options(call: Call, fake: type[FakeLLM]) -> None:
    done = call(
        *("generate", "-p", "a", "--dtype", "float32", "--device", "cpu", "--block-size", "8", "--max-model-len", "4k"),
        *("--num-gpu-blocks-override", "99", "--max-num-batched-tokens", "512", "--max-num-seqs", "3", "--swap-space"),
        *("0.5", "--no-enable-prefix-caching", "--preemption-mode", "swap", "--scheduling-policy", "priority"),
        *("--decode-window", "8"),
    )
    assert done.code == 0, done.err
    assert fake.made[0].engine == {
        "dtype": "float32",
        "device": "cpu",
        "block_size": 8,
        "max_model_len": 4000,
        "num_gpu_blocks_override": 99,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 3,
        "swap_space": 0.5,
        "enable_prefix_caching": False,
        "preemption_mode": "swap",
        "scheduling_policy": "priority",
        "decode_window": 8,
    }


def test_sampling_options(call: Call, fake: type[FakeLLM]) -> None:
    done = call(
        *("generate", "-p", "a", "--max-tokens", "7", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "5"),
        *("--min-p", "0.1", "--seed", "3", "--stop", "x", "--stop", "y z"),
    )
    assert done.code == 0, done.err
    _, params = fake.made[0].asked[0]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.9, 5)
    assert (params.min_p, params.seed, params.stop_strings) == (0.1, 3, ("x", "y z"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--max-tokens", "-1"), "max_tokens is -1"),
        (("--max-tokens", "0"), "max_tokens is 0"),
        (("--temperature", "nan"), "temperature must be a finite number"),
        (("--temperature", "inf"), "temperature must be a finite number"),
        (("--temperature", "-0.1"), "temperature is -0.1"),
        (("--top-p", "2"), "top_p is 2"),
        (("--n", "0"), "n is 0"),
        (("--stop", ""), "stop must be non-empty"),
        (("--max-model-len", "lots"), "'lots' is not a number of tokens"),
    ],
)
def test_a_bad_value_is_refused_before_the_model_is_loaded(
    call: Call, fake: type[FakeLLM], args: tuple[str, ...], message: str
) -> None:
    done = call("generate", "-p", "a", *args)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not fake.made


def test_no_prompt(call: Call, fake: type[FakeLLM]) -> None:
    done = call("generate")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: no prompt; give --prompt TEXT or --prompts-file FILE\n"


def test_no_such_model(call: Call, fake: type[FakeLLM]) -> None:
    done = call("generate", "-p", "a", "--model", "absent/model")
    assert (done.code, done.out, done.err) == (1, "", "error: no model 'absent/model'\n")


def test_a_prompt_that_is_too_long(call: Call, fake: type[FakeLLM]) -> None:
    done = call("generate", "-p", "TOO LONG")
    assert done.code == 2
    assert done.err.startswith("error: This model's maximum context length is 7 tokens.")
    assert fake.made[0].closed


def test_a_request_that_fails_harms_no_other(call: Call, fake: type[FakeLLM]) -> None:
    done = call("generate", "--json", "-p", "a b", "-p", "FAIL", "-p", "c")
    assert done.code == 1
    assert [json.loads(line)["finish_reason"] for line in done.lines] == ["stop", "error", "stop"]
    assert done.err == "error: request 1 failed: numbers that are not finite\n"


def test_prompts_of_options_come_before_those_of_a_file(call: Call, fake: type[FakeLLM], tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("b\nc\n")
    done = call("generate", "--json", "--prompts-file", str(file), "-p", "a")
    assert [json.loads(line)["prompt"] for line in done.lines] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        (b"one\ntwo", ["one", "two"]),
        (b"one\r\n\r\n  two \r\n", ["one", "  two "]),
        (b"\xef\xbb\xbfone\n", ["one"]),
        ("a\u2028b\x0cc\n".encode(), ["a\u2028b\x0cc"]),
        (b'"a string"\n', ['"a string"']),
        (b"{not json}\n", ["{not json}"]),
        (b'{"prompt": "a\\nb"}\n\n{"prompt_token_ids": [1, 2], "x": 1}\n', ["a\nb", {"prompt_token_ids": [1, 2]}]),
    ],
)
def test_prompts_of_a_file(tmp_path: Path, text: bytes, prompts: list[object]) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(text)
    assert read_prompts(file) == prompts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "has no prompt"),
        (b" \n\n", "has no prompt"),
        (b"ab\xff\n", "not UTF-8 (byte 2)"),
        (b'{"prompt": "a"}\n{"prompt": 1}\n', 'line 2 has neither a "prompt"'),
        (b'{"prompt": "a"}\n\n[1]\n', "line 3 has neither"),
        (b'{"text": "a"}\n', "line 1 has neither"),
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2 is no JSON"),
    ],
)
def test_a_file_without_proper_prompts(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(text)
    with pytest.raises(PromptError, match="prompts") as caught:
        read_prompts(file)
    assert message in str(caught.value)


def test_a_file_that_is_absent(call: Call, fake: type[FakeLLM], tmp_path: Path) -> None:
    done = call("generate", "--prompts-file", str(tmp_path / "absent"))
    assert done.code == 2
    assert "absent: No such file or directory" in done.err


def test_prompts_from_stdin() -> None:
    probe = "from octavo.cli.generate import read_prompts; from pathlib import Path; print(read_prompts(Path('-')))"
    done = subprocess.run([sys.executable, "-c", probe], input="a b\nc\n", capture_output=True, text=True, check=True)
    assert done.stdout == "['a b', 'c']\n"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("0.5K", 512), ("1M", 1 << 20), ("auto", -1), ("-1", -1)],
)
def test_lengths(text: str, tokens: int) -> None:
    assert parse_length(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "4kk", "1e400k", "nank", "4.5", "four"])
def test_what_is_no_length(text: str) -> None:
    import typer

    with pytest.raises(typer.BadParameter, match="not a number of tokens"):
        parse_length(text)
