"""`octavo generate`: sources of prompts, output, and the options that reach the engine."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint.generation_config import SamplingDefaults
from octavo.cli.commands.generate import read_prompts
from octavo.cli.options import NO_OPTIONS, flag, parse_length
from octavo.config import EngineArgs
from octavo.errors import PromptError
from octavo.params.sampling_params import SamplingParams
from octavo.params.structured_outputs import StructuredOutputsParams
from tests.cli.conftest import Call
from tests.cli.fake_llm import FakeLLM, decode, encode

KEYS = ["prompt", "text", "token_ids", "finish_reason", "num_cached_tokens"]


def test_single_prompt_prints_only_its_completion(call: Call, fake: type[FakeLLM]) -> None:
    done = call("generate", "--prompt", "one two three")
    assert (done.code, done.out, done.err) == (0, "three two one\n", "")
    assert fake.made[0].closed


def test_several_completions_are_printed_below_their_prompts(call: Call, fake: type[FakeLLM]) -> None:
    assert call("generate", "-p", "a b", "-p", "c d").out == ">>> a b\nb a\n\n>>> c d\nd c\n\n"


def test_json_is_one_object_per_line_with_the_prompt_index(call: Call, fake: type[FakeLLM]) -> None:
    done = call("generate", "--json", "-p", "a b c", "-p", "d", "--max-tokens", "2")
    second, first = map(json.loads, done.lines)  # the shorter prompt finishes first
    assert list(first) == list(second) == [*KEYS, "prompt_index"]
    assert (first["prompt_index"], second["prompt_index"]) == (0, 1)
    assert first["prompt"] == "a b c"
    assert first["text"] == "c b"
    assert len(first["token_ids"]) == 2
    assert first["finish_reason"] == "length"
    assert first["num_cached_tokens"] == 1
    assert (second["prompt"], second["text"], second["finish_reason"]) == ("d", "d", "stop")


def test_json_has_the_index_of_each_sample(call: Call, fake: type[FakeLLM]) -> None:
    records = [json.loads(line) for line in call("generate", "--json", "-p", "a b", "--n", "3").lines]
    assert [record["index"] for record in records] == [0, 1, 2]
    assert [record["prompt"] for record in records] == ["a b"] * 3


def test_single_prompt_is_streamed_to_a_terminal(
    call: Call, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert terminal.getvalue() == "three [31mtwo one\n"  # without the escape character
    assert terminal.flushed[:3] == ["three", "three [31mtwo", "three [31mtwo one"]


def test_only_given_options_reach_the_engine(call: Call, fake: type[FakeLLM]) -> None:
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
    _, params = fake.made[0].requests[0]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.9, 5)
    assert (params.min_p, params.seed, params.stop_strings) == (0.1, 3, ("x", "y z"))


def test_more_sampling_options(call: Call, fake: type[FakeLLM]) -> None:
    done = call(
        *("generate", "-p", "a", "--repetition-penalty", "1.2", "--presence-penalty", "-1", "--frequency-penalty", "2"),
        *("--logit-bias", "3=-5", "--logit-bias", '{"4": 1.5, "5": 2}', "--min-tokens", "2", "--bad-words", "x y"),
        *("--allowed-token-ids", "3", "--allowed-token-ids", "4", "--ignore-eos", "--echo", "--logprobs", "0"),
        *("--prompt-logprobs", "2", "--no-skip-special-tokens", "--include-stop-str-in-output"),
    )
    assert done.code == 0, done.err
    _, params = fake.made[0].requests[0]
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, -1.0, 2.0)
    assert dict(params.logit_bias or {}) == {3: -5.0, 4: 1.5, 5: 2.0}
    assert (params.min_tokens, params.bad_words, params.allowed_token_ids) == (2, ("x y",), (3, 4))
    assert params.ignore_eos and params.echo and not params.skip_special_tokens and params.include_stop_str_in_output
    assert (params.logprobs, params.prompt_logprobs) == (0, 2)


def test_sampling_defaults_are_printed_and_overridden_by_options(
    call: Call, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"temperature": 0.6, "top_p": 0.95}
    monkeypatch.setattr(fake, "sampling_defaults", SamplingDefaults(SamplingParams(**values), values, "x.json"))
    done = call("generate", "-p", "a", "--top-p", "0.5", "--max-tokens", "3")
    assert done.err == "sampling defaults from x.json: temperature 0.6, top_p 0.95\n"
    _, params = fake.made[0].requests[0]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.5, 3)


@pytest.mark.parametrize("settings", [EngineArgs, SamplingParams])
def test_every_field_but_those_listed_is_an_option(settings: type[Any], call: Call) -> None:
    fields = {field.name for field in dataclasses.fields(settings) if field.init}
    flags = {flag(name) for name in fields - NO_OPTIONS[settings]}
    assert NO_OPTIONS[settings] <= fields
    assert flags <= set(re.findall(r"--[a-z-]+", call("generate", "--help").out))


def test_structured_outputs(call: Call, fake: type[FakeLLM]) -> None:
    call("generate", "-p", "a", "--structured-outputs", '{"choice": ["yes", "no"]}')
    _, params = fake.made[0].requests[0]
    assert params.structured_outputs == StructuredOutputsParams(choice=["yes", "no"])
    for text, message in (("yes", "is not a JSON object such as"), ('{"regex": ""}', "--structured-outputs: ")):
        done = call("generate", "-p", "a", "--structured-outputs", text)
        assert done.code == 2 and message in done.err.replace("\n", " ")
    assert len(fake.made) == 1


def test_parse_special(call: Call, fake: type[FakeLLM]) -> None:
    call("generate", "-p", "a", "--parse-special")
    assert fake.made[0].requests[0][0] == [{"prompt": "a", "parse_special": True}]


def test_logprobs_are_printed_as_a_table(call: Call, fake: type[FakeLLM]) -> None:
    first, second = "a", "bb"
    done = call("generate", "-p", f"{first} {second}", "--logprobs", "1", "--prompt-logprobs", "0")
    assert done.code == 0, done.err
    table = [line.split() for line in done.lines]
    start = next(i for i, row in enumerate(table) if row[:1] == ["token"])
    top = decode([0])
    assert done.lines[start - 1] == "bb a" and table[start] == ["token", "logprob", "rank", "top"]
    assert table[start + 1] == ['"bb"', "-1.500", "2", f'"{top}"', "-0.250", '"bb"', "-1.500"]
    assert ["prompt"] in table and table[-1] == ['"bb"', "-1.500", "2"]


def test_logprobs_in_json(call: Call, fake: type[FakeLLM]) -> None:
    decode([*encode("first a bb")])
    (line,) = call("generate", "--json", "-p", "a bb", "--logprobs", "1", "--prompt-logprobs", "0").lines
    record = json.loads(line)
    ids = record["token_ids"]
    assert [entry["token_id"] for entry in record["logprobs"]] == ids
    assert record["logprobs"][0] == {
        "token_id": ids[0],
        "token": "bb",
        "logprob": -1.5,
        "rank": 2,
        "top": [
            {"token_id": 0, "token": decode([0]), "logprob": -0.25},
            {"token_id": ids[0], "token": "bb", "logprob": -1.5},
        ],
    }
    assert record["prompt_logprobs"][0]["logprob"] is None
    assert "top" not in record["prompt_logprobs"][1]
    (line,) = call("generate", "--json", "-p", "a bb").lines
    assert list(json.loads(line)) == KEYS


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--max-tokens", "0"), "max_tokens is 0"),
        (("--temperature", "nan"), "temperature must be a finite number"),
        (("--stop", ""), "stop must be non-empty"),
        (("--max-model-len", "lots"), "'lots' is not a number of tokens"),
        (("--top-p", "2"), "error: --top-p: top_p is 2"),
        (("--presence-penalty", "-3"), "--presence-penalty: presence_penalty is -3.0, it must be from -2 to 2"),
        (("--repetition-penalty", "0"), "--repetition-penalty: repetition_penalty is 0"),
        (("--logit-bias", "5=101"), "--logit-bias: logit_bias"),
        (("--logit-bias", "x=1"), "'x=1' is not ID=BIAS"),
        (("--logit-bias", "5"), "'5' is not ID=BIAS"),
        (("--logit-bias", "[1]"), "'[1]' is not ID=BIAS"),
        (("--logit-bias", '{"a": 1}'), "is not ID=BIAS"),
        (("--min-tokens", "20", "--max-tokens", "10"), "--min-tokens: min_tokens is 20"),
        (("--allowed-token-ids", "-1"), "--allowed-token-ids: allowed_token_ids"),
        (("--bad-words", ""), "--bad-words: bad_words"),
        (("--logprobs", "-2"), "--logprobs: logprobs is -2"),
        (("--block-size", "3"), "--block-size: block_size is 3, it must be a power of two from 1 to 256"),
        (("--max-model-len", "0"), "--max-model-len: max_model_len is 0"),
        (("--gpu-memory-utilization", "1.5"), "--gpu-memory-utilization: gpu_memory_utilization is 1.5"),
        (("--device-memory-utilization", "nan"), "gpu_memory_utilization must be a finite number"),
        (("--max-num-seqs", "0"), "--max-num-seqs: max_num_seqs is 0"),
        (("--kv-offloading-size", "-1"), "--swap-space: swap_space is -1"),
        (("--chat-template", ""), "--chat-template: chat_template must be a file"),
    ],
)
def test_invalid_value_is_refused_before_the_model_is_loaded(
    call: Call, fake: type[FakeLLM], args: tuple[str, ...], message: str
) -> None:
    done = call("generate", "-p", "a", *args)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not fake.made


def test_option_with_vllms_name(call: Call, fake: type[FakeLLM]) -> None:
    assert call("generate", "-p", "a", "--kv-offloading-size", "0.5").out == "a\n"
    assert fake.made[0].engine == {"swap_space": 0.5}


def test_no_prompt(call: Call, fake: type[FakeLLM]) -> None:
    done = call("generate")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: no prompt; give --prompt TEXT or --prompts-file FILE\n"


def test_no_such_model(call: Call, fake: type[FakeLLM]) -> None:
    done = call("generate", "-p", "a", "--model", "absent/model")
    assert (done.code, done.out, done.err) == (1, "", "error: no model 'absent/model'\n")


def test_prompt_that_is_too_long(call: Call, fake: type[FakeLLM]) -> None:
    done = call("generate", "-p", "TOO LONG")
    assert done.code == 2
    assert done.err.startswith("error: This model's maximum context length is 7 tokens.")
    assert fake.made[0].closed


def test_failed_request_does_not_affect_others(call: Call, fake: type[FakeLLM]) -> None:
    done = call("generate", "--json", "-p", "a b", "-p", "FAIL", "-p", "c")
    assert done.code == 1
    reasons = {record["prompt_index"]: record["finish_reason"] for record in map(json.loads, done.lines)}
    assert reasons == {0: "stop", 1: "error", 2: "stop"}
    assert done.err == "error: request 1 failed: numbers that are not finite\n"


def test_results_are_written_as_they_finish_and_kept_on_ctrl_c(
    call: Call, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    step = FakeLLM._step

    def watched(self: FakeLLM, output: Any, params: SamplingParams) -> None:
        seen.append(capfd.readouterr().out)
        if "c b" in output.outputs[0].text:  # the longest completion has two tokens
            raise KeyboardInterrupt
        step(self, output, params)

    monkeypatch.setattr(FakeLLM, "_step", watched)
    done = call("generate", "--json", "-p", "a b c", "-p", "d", "-p", "e f")
    assert (done.code, done.err) == (130, "")
    written = [json.loads(line)["prompt"] for text in [*seen, done.out] for line in text.splitlines()]
    assert written == ["d", "e f"]
    assert '"d"' in "".join(seen[:4])  # written before the second tokens of the others
    assert fake.made[0].closed


def test_prompts_of_options_precede_prompts_of_a_file(call: Call, fake: type[FakeLLM], tmp_path: Path) -> None:
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
def test_read_prompts(tmp_path: Path, text: bytes, prompts: list[object]) -> None:
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
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
        (b'\n# a title\nb\n{"prompt": "a"}\n', "line 4 is a JSON object, but line 2 is text"),
    ],
)
def test_invalid_prompts_file(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(text)
    with pytest.raises(PromptError, match="prompts") as caught:
        read_prompts(file)
    assert message in str(caught.value)


def test_missing_prompts_file(call: Call, fake: type[FakeLLM], tmp_path: Path) -> None:
    done = call("generate", "--prompts-file", str(tmp_path / "absent"))
    assert done.code == 2
    assert "absent: No such file or directory" in done.err


def test_prompts_from_stdin() -> None:
    probe = "from pathlib import Path; import octavo.cli.commands.generate as g; print(g.read_prompts(Path('-')))"
    done = subprocess.run([sys.executable, "-c", probe], input="a b\nc\n", capture_output=True, text=True, check=True)
    assert done.stdout == "['a b', 'c']\n"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("0.5K", 512), ("1M", 1 << 20), ("auto", -1), ("-1", -1)],
)
def test_parse_length(text: str, tokens: int) -> None:
    assert parse_length(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "4kk", "1e400k", "nank", "4.5", "four"])
def test_invalid_lengths(text: str) -> None:
    import typer

    with pytest.raises(typer.BadParameter, match="not a number of tokens"):
        parse_length(text)
