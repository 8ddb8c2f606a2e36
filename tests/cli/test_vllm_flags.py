"""Every argument of vLLM, through the command line's parser; `tests/params/test_vllm_arguments.py` has the table."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from octavo.cli import options
from octavo.cli.main import run
from octavo.cli.options import flag
from octavo.config import EngineArgs
from octavo.params.vllm_arguments import BENCHMARK, ENGINE, SERVER, SHORT_FLAGS, Argument, arguments
from octavo.serve.args import ServeArgs
from tests.cli.conftest import Call
from tests.cli.fake_llm import FakeLLM
from tests.cli.test_options import TREE, Given, launched

__all__ = ["launched"]
MODEL_METHODS = ("eagle", "eagle3", "mtp", "deepseek_mtp", "medusa", "mlp_speculator", "ngram_gpu")
"""Methods of vLLM's speculation that are not here."""
INNER = {"_api_process_count", "_api_process_rank"}
"""Arguments without a flag."""
CASES = [
    pytest.param(a, id=a.name)
    for a in (*ENGINE, *SERVER)
    if not a.is_taken and a.name not in INNER and not hasattr(ServeArgs, a.name)
]
DEFAULTS = {
    f.name: list(f.default) if f.default == () else f.default  # `launched` has lists
    for kind in (EngineArgs, ServeArgs)
    for f in fields(kind)
    if f.name != "model"
}


def words_of(argument: Argument, value: Any) -> list[str]:
    """A value on the command line."""
    if isinstance(value, bool):
        return [flag(argument.name) if value else f"--no-{flag(argument.name)[2:]}"]
    return [flag(argument.name), value if isinstance(value, str) else json.dumps(value)]


@pytest.mark.parametrize("argument", CASES)
def test_flag_has_its_effect(
    argument: Argument, launched: Given, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted values start a server with the defaults; a refused one is named with its reason."""
    monkeypatch.setattr("typer.main.get_command", lambda app: TREE)
    values = argument.accepted if isinstance(argument.accepted, tuple) else ("x", 7, [1])
    for value in values:
        launched.clear()
        assert run(["serve", "m", *words_of(argument, value)]) == 0, capfd.readouterr().err
        assert launched["model"] == "m"
        assert {name for name, default in DEFAULTS.items() if launched[name] != default} == set()
    if isinstance(argument.accepted, tuple) and {*argument.accepted} != {True, False}:
        capfd.readouterr()
        refused = not argument.accepted[0] if argument.is_flag else "other"
        assert run(["serve", "m", *words_of(argument, refused)]) == 2
        assert (
            f"error: {flag(argument.name)}: {argument.name} is {refused!r}: {argument.reason}" in capfd.readouterr().err
        )


def test_every_taken_argument_is_an_option() -> None:
    serve = TREE.commands["serve"]
    names = {name for param in serve.params for name in (*param.opts, *param.secondary_opts)}
    taken = {flag(a.name) for a in (*ENGINE, *SERVER) if a.is_taken}
    assert taken - names == {"--model", "--skip-tokenizer-init"}  # the first is an argument, a server needs the second


def test_spellings(call: Call, fake: type[FakeLLM]) -> None:
    line = ["generate", "-p", "a"]
    for words in (["-tp", "1"], ["--pipeline_parallel_size=1"], ["--tensor-parallel-size", "1"], ["--no-enable-lora"]):
        done = call(*line, *words)
        assert (done.code, done.out) == (0, "a\n"), done.err
    for words, param in (
        (["-pp", "2"], "pipeline_parallel_size is 2"),
        (["--pipeline_parallel_size=2"], "pipeline_parallel_size is 2"),
        (["--compilation-config.mode", "3", "--compilation-config", "3"], "--compilation-config is given again"),
        (["--eplb-config.size", "2", "--eplb-config.steps", "3"], "eplb_config is {'size': 2, 'steps': 3}"),
        (["--enable-lora"], "enable_lora is True"),
        (["--kv-cache-dtype-skip-layers"], "kv_cache_dtype_skip_layers is True"),
        (["-pp", "2", "--pipeline-parallel-size", "1"], "--pipeline-parallel-size is given again; give it once"),
    ):
        done = call(*line, *words)
        assert (done.code, done.out) == (2, "") and param in done.err, done.err
        assert done.err.count("\n") == 1
    assert len(fake.made) == 4
    assert set(SHORT_FLAGS.values()) <= {a.name for a in ENGINE}


def test_speculation_is_spelt_as_in_vllm(call: Call, launched: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.main.get_command", lambda app: TREE)
    line = ["serve", "m"]
    config = {"method": "ngram", "num_speculative_tokens": 4}
    for words in (
        ["--speculative-config", json.dumps(config)],
        ["-sc", json.dumps(config)],
        ["--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens=4"],
        ["-sc.method", "ngram", "-sc.num_speculative_tokens", "4"],
    ):
        done = call(*line, *words)
        assert done.code == 0 and launched["speculative_config"] == config, done.err
    assert call(*line, "--spec-method", "ngram", "--spec-tokens", "4").code == 0
    assert (launched["spec_method"], launched["spec_tokens"]) == ("ngram", 4)
    assert call(*line, "-sc.method", "ngram", "-sc.prompt_lookup_max", "4").code == 0
    assert launched["speculative_config"] == {"method": "ngram"}
    model = {"method": "draft_model", "model": "d", "num_speculative_tokens": 4}
    assert call(*line, "-sc", json.dumps(model)).code == 0 and launched["speculative_config"] == model
    assert call(*line, "--spec-model", "d").code == 0 and launched["spec_model"] == "d"
    assert call(*line, "-sc.model", "d").code == 0 and launched["speculative_config"] == {"model": "d"}
    reason = "drafts come from earlier text or a draft model"
    for words, text in (
        *((["-sc.method", name], f"--speculative-config: method is '{name}': {reason}") for name in MODEL_METHODS),
        *((["--spec-method", name], f"--spec-method: method is '{name}': {reason}") for name in MODEL_METHODS),
        (
            ["--spec-model", "m", "-sc.method", "ngram"],
            "--spec-model: model is 'm' with the method ngram; leave it out",
        ),
        (["-sc.model", "m", "-sc.quantization", "fp8"], "quantization is 'fp8': a draft model runs as the engine's"),
        (["--spec-method", "draft_model"], "model is None with the method draft_model; name one with spec_model"),
        (
            ["-sc.methud", "m"],
            "--speculative-config: speculative_config has no option 'methud'; did you mean 'method'?",
        ),
        (["--spec-tokens", "16"], "--spec-tokens: num_speculative_tokens is 16, it must be from 1 to 15"),
        (["-sc.method", "ngram", "-sc.method", "suffix"], "-sc.method is given again; give it once"),
        (["-sc", "{}", "-sc.method", "ngram"], "--speculative-config is given 2 times; give it once"),
        (["-sc", "ngram"], '\'ngram\' is not a JSON object such as {"method": "ngram"}'),
    ):
        done = call(*line, *words)
        assert done.code == 2 and text in done.err, (words, done.err)


def test_model_is_an_option_too(call: Call, launched: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.main.get_command", lambda app: TREE)
    for words in (["m"], ["--model", "m"], ["--model=m"], ["-m", "m"], ["--dtype", "auto", "--model", "m", "--port=1"]):
        launched.clear()
        assert call("serve", *words).code == 0 and launched["model"] == "m", words
    for words in (["m", "--model", "n"], ["--model"], ["--model="]):
        assert call("serve", *words).code == 2, words


def test_a_value_that_spells_a_flag_stays_a_value(call: Call, fake: type[FakeLLM]) -> None:
    assert call("generate", "-p", "--enable-lora").out == "--enable-lora\n"
    assert fake.made[0].requests[0][0] == ["--enable-lora"]


def test_warnings(call: Call, fake: type[FakeLLM], caplog: pytest.LogCaptureFixture) -> None:
    done = call("generate", "-p", "a", "--trust-remote-code", "--disable-log-requests", "--num-lookahead-slots", "3")
    assert (done.code, done.out) == (0, "a\n")
    names = [record.getMessage().partition(" has no effect: ")[0] for record in caplog.records]
    assert names == ["trust_remote_code", "disable_log_requests", "num_lookahead_slots"]  # once each


def test_flags_of_other_commands_are_named(call: Call, fake: type[FakeLLM]) -> None:
    for option in ("--lora-modules", "--no-enable-log-requests", *(flag(a.name) for a in BENCHMARK)):
        done = call("generate", "-p", "a", option, "2")
        assert (done.code, done.out) == (2, "")
        assert done.err == f"error: vLLM flag {option} is not supported here; see octavo generate --help\n"
    assert call("models", "--tensor-parallel-size", "1").code == 2
    assert not fake.made


def test_flags_are_no_parameters_of_commands() -> None:
    """Hundreds of parameters for each command would slow every start."""
    assert not hasattr(options, "OBSOLETE") and len(arguments()) > 300
    assert len(TREE.commands["serve"].params) < 100
