"""The options that several commands share. Their names, types and defaults are those of `EngineArgs` and
`SamplingParams`; here stands only what is said about them.

`options_of` gives a command such options in the place of one dict parameter. The dict holds what was said on the
command line and nothing else, so that defaults live in one place.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

Model = Annotated[
    str,
    typer.Option("--model", "-m", metavar="NAME", help="Directory, .gguf file, name in `octavo models`, or hub id."),
]
DEFAULT_MODEL = "smollm2"

ENGINE = {
    "revision": "Branch, tag or commit of a hub repository.",
    "device": "Where the model runs.",
    "dtype": "What it computes in.",
    "block_size": "Tokens a block, a power of two.",
    "num_gpu_blocks_override": "Usable KV blocks, on whatever device; else as many as fit.",
    "kv_cache_memory_bytes": "Memory for KV blocks; else what fits.",
    "max_model_len": "Longest sequence, such as 4096 or 4k; auto: as long as fits.",
    "max_num_batched_tokens": "Tokens that a step computes at most.",
    "max_num_seqs": "Sequences that run at most.",
    "enable_prefix_caching": "Find the beginnings of prompts among the blocks computed before.",
    "preemption_mode": "How a request makes room for others.",
    "swap_space": "GiB of host memory for what is swapped out; else as much as the pool, at most 4.",
    "scheduling_policy": "Who goes first.",
    "watermark": "Share of the blocks that an admission leaves free.",
    "decode_window": "Positions that the device decodes by itself in one step.",
    "async_scheduling": "Plan the next step while the device computes this one.",
}
SAMPLING = {
    "max_tokens": "Tokens to generate at most.",
    "temperature": "0 is greedy; up to 2.",
    "top_p": "Keep the likeliest tokens of this total probability.",
    "top_k": "Keep that many tokens; 0 keeps all.",
    "min_p": "Keep tokens at least this likely, relative to the likeliest.",
    "seed": "Makes sampling reproducible.",
    "stop": "End before this text; may be repeated.",
    "stop_token_ids": "End with this token; may be repeated.",
    "ignore_eos": "Go on after the model's own end.",
    "n": "Samples of each prompt.",
}


def parse_length(text: str) -> int:
    """A number of tokens: 4096, 4k (4,000), 4K (4,096); auto or -1 for the largest that fits."""
    if text == "auto":
        return -1
    scale = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}.get(text[-1:], 1)
    try:
        return round(float(text[:-1]) * scale) if scale > 1 else int(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a number of tokens such as 4096 or 4k, nor auto") from None


SETTINGS: dict[str, dict[str, Any]] = {
    "max_model_len": {"parser": parse_length, "metavar": "TOKENS"},
    "stop": {"metavar": "TEXT"},
    "stop_token_ids": {"metavar": "ID"},
}
TYPES: dict[str, Any] = {"stop": list[str], "stop_token_ids": list[int]}


def options_of(
    settings: type[Any], said: Mapping[str, str], *, into: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command with an option for each field of `settings` that something is `said` about."""
    declared = [_option_of(settings, name, text) for name, text in said.items()]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        parameters = [*(p for name, p in signature.parameters.items() if name != into), *declared]

        @functools.wraps(command)
        def wrapped(**values: Any) -> Any:
            given = {name: values.pop(name) for name in said}
            return command(**values, **{into: {k: v for k, v in given.items() if v not in (None, [])}})

        # What typer reads: it has no other way to take options from elsewhere.
        wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate


def _option_of(settings: type[Any], name: str, text: str) -> inspect.Parameter:
    """The field as a keyword parameter; None or [], whatever the field's default is, when it is not on the line."""
    field = next(f for f in dataclasses.fields(settings) if f.name == name)
    kind = TYPES.get(name) or typing.get_type_hints(settings)[name]
    flag, default = f"--{name.replace('_', '-')}", field.default
    names = [flag]
    if isinstance(default, bool):
        names, default = [f"{flag}/--no-{flag[2:]}"], "on" if default else "off"
    shown = False if default is None else str(default)
    option = typer.Option(*names, help=text, show_default=shown, **SETTINGS.get(name, {}))
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
