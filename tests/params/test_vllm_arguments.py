"""Every argument of vLLM, through Python; `tests/cli/test_vllm_flags.py` walks the same table through the command line.

`python -m tests.params.test_vllm_arguments` writes the table into docs/vllm.md.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo.config import EngineArgs, SpeculativeConfig
from octavo.errors import ParameterError, UnknownOptionError
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams
from octavo.params.vllm_arguments import (
    ANY,
    BEAM_SEARCH,
    CALL,
    ENGINE,
    RENAMED,
    SAMPLING,
    SERVER,
    SPECULATION,
    Argument,
    arguments,
    check_call,
    flag_name,
    parse_value,
)
from octavo.serve.args import ServeArgs

PAGE = Path(octavo.__file__).parents[2] / "docs" / "vllm.md"
NEEDED: dict[str, tuple[Any, dict[str, Any]]] = {
    "engine": (EngineArgs, {"model": "m"}),
    "server": (ServeArgs, {}),
    "sampling": (SamplingParams, {}),
    "beam search": (BeamSearchParams, {"beam_width": 2, "max_tokens": 2}),
    "speculation": (SpeculativeConfig, {}),
}
"""Class and required options by owner."""
ALWAYS_ON = {"enable_auto_tool_choice", "enable_prompt_tokens_details", "enable_request_id_headers"}
"""Taken flags of `octavo serve` that are no field."""
TABLES = {
    "LLM and its engine": ENGINE,
    "octavo serve": SERVER,
    "SamplingParams": SAMPLING,
    "BeamSearchParams": BEAM_SEARCH,
    "LLM.generate, chat and beam_search": CALL,
    "speculative_config": SPECULATION,
}
CASES = [pytest.param(a, id=a.name) for table in TABLES.values() for a in table if a.owner != "call"]
OTHER_VALUES = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v + 1, str: lambda v: v + "x"}


def page_table() -> str:
    """The tables of docs/vllm.md."""
    lines: list[str] = []
    for title, table in TABLES.items():
        taken = ", ".join(f"`{a.name}`" for a in table if a.is_taken) or "those of their signatures"
        lines += [f"### {title}", "", f"Taken: {taken}.", "", "| argument | effect |", "|---|---|"]
        effects: dict[str, list[str]] = {}
        for argument in table:
            if not argument.is_taken:
                effects.setdefault(argument.effect, []).append(f"`{argument.name}`")
        lines += [f"| {', '.join(names)} | {effect} |" for effect, names in effects.items()]
        lines.append("")
    return "\n".join(lines)


def make(argument: Argument, value: Any) -> Any:
    kind, needed = NEEDED[argument.owner]
    return kind(**{**needed, argument.name: value})


@pytest.mark.parametrize("argument", CASES)
def test_argument_has_its_effect(argument: Argument, caplog: pytest.LogCaptureFixture) -> None:
    kind, _ = NEEDED[argument.owner]
    if argument.is_taken:
        names = {f.name for f in fields(kind)} | ALWAYS_ON
        assert RENAMED.get(argument.name, argument.name) in names
        return
    plain = make(argument, None)  # not set
    assert make(argument, {}) == make(argument, "") == plain and not caplog.records
    if not isinstance(argument.accepted, tuple):
        assert make(argument, object()) == plain and bool(caplog.records) is argument.warns
        return
    for value in argument.accepted:
        assert make(argument, value) == plain
    assert bool(caplog.records) is argument.warns
    for other in [OTHER_VALUES[type(v)](v) for v in argument.accepted] or [7, "x", {"x": 1}]:
        if other in argument.accepted:
            continue
        with pytest.raises(ParameterError) as caught:
            make(argument, other)
        text = str(caught.value)
        assert caught.value.param == argument.name and argument.reason in text and repr(other) in text
        assert text.endswith("; leave it out" if not argument.accepted else " or ".join(map(repr, argument.accepted)))


def test_a_name_has_one_row() -> None:
    for table in ((*ENGINE, *SERVER), SAMPLING, BEAM_SEARCH):
        names = [a.name for a in table if (a.name, a.owner) != ("data_parallel_size", "server")]  # both have one
        assert len(names) == len({*names})
    assert all(
        a.reason and (a.accepted is ANY or isinstance(a.accepted, tuple))
        for a in arguments().values()
        if not a.is_taken
    )


def test_values_of_another_argument(caplog: pytest.LogCaptureFixture) -> None:
    """tokenizer=<the model's> asks for what there is."""
    args = EngineArgs(model="m", revision="r", tokenizer="m", tokenizer_revision="r", served_model_name="m")
    assert args == EngineArgs(model="m", revision="r")
    with pytest.raises(ParameterError, match="tokenizer is 'n': the model's own tokenizer is used; leave it out"):
        EngineArgs(model="m", tokenizer="n")  # type: ignore[call-arg]


def test_true_is_not_one() -> None:
    with pytest.raises(ParameterError, match="pipeline_parallel_size is True"):
        EngineArgs(model="m", pipeline_parallel_size=True)  # type: ignore[call-arg]


def test_options_of_the_server_are_refused_by_the_engine() -> None:
    off = EngineArgs(model="m", enable_log_requests=False, shutdown_timeout=0, otlp_traces_endpoint=None)  # type: ignore[call-arg]
    assert off == EngineArgs(model="m")
    with pytest.raises(ParameterError, match="reasoning_parser is an option of the server; pass it to `octavo serve`"):
        EngineArgs(model="m", reasoning_parser="think")  # type: ignore[call-arg]
    with pytest.raises(UnknownOptionError, match="no option 'tensor_paralel_size'"):
        EngineArgs(model="m", tensor_paralel_size=1)  # type: ignore[call-arg]


def test_values_with_another_name() -> None:
    class TorchDType:
        def __str__(self) -> str:
            return "torch.bfloat16"

    dtypes = [EngineArgs(model="m", dtype=d).dtype for d in ("half", "float", "auto", TorchDType())]  # type: ignore[arg-type]
    assert dtypes == ["float16", "float32", "auto", "bfloat16"]
    assert EngineArgs(model="m", kv_offloading_size=2.5).swap_space == 2.5  # type: ignore[call-arg]
    with pytest.raises(ParameterError, match="kv_offloading_size is the same as swap_space; pass one of them"):
        EngineArgs(model="m", kv_offloading_size=2.5, swap_space=1.0)  # type: ignore[call-arg]
    unset = EngineArgs(model="m", seed=None, block_size=None, enable_prefix_caching=None)  # type: ignore[arg-type]
    assert unset == EngineArgs(model="m")
    assert EngineArgs(model=Path("m")).model == "m"  # type: ignore[arg-type]


def test_trust_remote_code_warns_that_no_code_is_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        EngineArgs(model="m", trust_remote_code=False)  # type: ignore[call-arg]
        assert not caplog.records
        EngineArgs(model="m", trust_remote_code=True)  # type: ignore[call-arg]
    assert "no effect: nothing from a model's directory is ever run as code" in caplog.text


def test_taken_argument_with_another_name_may_be_unset() -> None:
    assert EngineArgs(model="m", kv_offloading_size=None) == EngineArgs(model="m")  # type: ignore[call-arg]
    arguments()["kv_offloading_size"].check(2.5)  # a taken argument has no refused value
    assert arguments()["kv_offloading_size"].effect == "taken"


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("--tensor-parallel-size", "tensor_parallel_size"),
        ("--tensor_parallel_size=2", "tensor_parallel_size"),
        ("--no-enable-lora", "enable_lora"),
        ("--speculative-config.method", "speculative_config"),
        ("-tp", "tensor_parallel_size"),
        ("--tensor", None),
        ("tensor_parallel_size", None),
    ],
)
def test_argument_of_a_word(word: str, name: str | None) -> None:
    assert flag_name(word) == name


def test_values_on_a_command_line_are_json_or_text() -> None:
    assert [parse_value(text) for text in ('{"a": [1]}', "2.5", "half", "[" * 100_000)] == [
        {"a": [1]},
        2.5,
        "half",
        "[" * 100_000,
    ]
    assert [arguments()[name].is_flag for name in ("enable_lora", "runner", "tokenizer", "max_loras")] == [
        True,
        False,
        False,
        False,
    ]


def test_arguments_of_a_call() -> None:
    check_call("generate", {"lora_request": None})
    with pytest.raises(ParameterError, match="lora_request is"):
        check_call("generate", {"lora_request": 1})
    with pytest.raises(UnknownOptionError, match="no option 'use_tdqm'"):
        check_call("generate", {"use_tdqm": True})


def test_page_has_the_table() -> None:
    """If this fails: python -m tests.params.test_vllm_arguments"""
    assert page_table() in PAGE.read_text()


if __name__ == "__main__":
    before, begin, rest = PAGE.read_text().partition("<!-- table -->\n\n")
    PAGE.write_text(before + begin + page_table() + "<!-- end -->" + rest.partition("<!-- end -->")[2])
