"""The options that several commands share. Their names, types and defaults are those of `EngineArgs` and
`SamplingParams`; here stands only what is said about them.

`options_of` gives a command such options in the place of one dict parameter. The dict holds what was said on the
command line and nothing else, so that defaults live in one place.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer

from octavo.config import EngineArgs
from octavo.errors import UsageError
from octavo.params.sampling_params import SamplingParams

Model = Annotated[
    str,
    typer.Option("--model", "-m", metavar="NAME", help="Directory, .gguf file, name in `octavo models`, or hub id."),
]
DEFAULT_MODEL = "smollm2"


def refuse_idle(context: typer.Context, names: Iterable[str], beside: str) -> None:
    """`UsageError` for the first of these parameters of a command that was said, though it has no part there."""
    options = {param.name: param.opts[0] for param in context.command.params}
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{options[name]} has no part in {beside}; leave it out")


def parse_object(text: str, example: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is no JSON object such as {example}")
    return value


def parse_variables(text: str) -> dict[str, Any]:
    return parse_object(text, '{"enable_thinking": false}')


def parse_kv_events(text: str) -> dict[str, Any]:
    return parse_object(text, '{"enable_kv_cache_events": true}')


Variables = Annotated[
    dict | None,  # type: ignore[type-arg]  # typer asks for a plain class
    typer.Option(
        "--chat-template-kwargs",
        parser=parse_variables,
        metavar="JSON",
        help='Further variables of the template, such as {"enable_thinking": false}.',
    ),
]

ENGINE = {
    "revision": "Branch, tag or commit of a hub repository.",
    "chat_template": "A file, or the template itself, in the place of the model's.",
    "device": "Where the model runs.",
    "dtype": "What it computes in.",
    "load_format": "dummy: random weights, for measuring speed without a download.",
    "quantization": "int8: matrix products in 8 bits, on a CPU.",
    "block_size": "Tokens a block, a power of two.",
    "num_gpu_blocks_override": "Usable KV blocks, on whatever device; else as many as fit.",
    "kv_cache_memory_bytes": "Memory for KV blocks; else what fits.",
    "gpu_memory_utilization": "Share of the memory, of whatever device, for weights and KV blocks.",
    "max_model_len": "Longest sequence, such as 4096 or 4k; auto: as long as fits.",
    "max_num_batched_tokens": "Tokens that a step computes at most.",
    "max_num_seqs": "Sequences that run at most.",
    "enable_prefix_caching": "Find the beginnings of prompts among the blocks computed before.",
    "preemption_mode": "How a request makes room for others; auto: by what takes less time to undo.",
    "preemption_victim": "Who makes room: the last in line, or whose return takes the least time.",
    "swap_space": "GiB of host memory for what is swapped out; else as much as the pool, at most 4.",
    "generation_config": "Where sampling defaults come from: auto (the model), vllm (not from a file), or a path.",
    "max_logprobs": "The most that --logprobs may be; -1: the whole vocabulary.",
    "scheduling_policy": "Who goes first.",
    "priority_ageing": "Later arrivals that may overtake a request for each step of priority between them; 0: any.",
    "long_prefill_token_threshold": "A prompt of more tokens computes so many a step at most; 0: as many as fit.",
    "max_long_partial_prefills": "Long prompts of one API key that are computed at a time; short ones pass the next.",
    "watermark": "Share of the blocks that an admission leaves free.",
    "decode_window": "Positions that the device decodes by itself in one step.",
    "enforce_eager": "Launch kernels one by one, without CUDA graphs.",
    "async_scheduling": "Plan the next step while the device computes this one.",
    "kv_events_config": "What routers are told of cached blocks, as JSON.",
}
SAMPLING = {
    "max_tokens": "Tokens to generate at most.",
    "min_tokens": "Tokens to generate before anything may end it.",
    "temperature": "0 is greedy; up to 2.",
    "top_p": "Keep the likeliest tokens of this total probability.",
    "top_k": "Keep that many tokens; 0 keeps all.",
    "min_p": "Keep tokens at least this likely, relative to the likeliest.",
    "repetition_penalty": "Above 1, tokens of prompt and output become less likely.",
    "presence_penalty": "Taken off the logits of tokens that the output has; -2 to 2.",
    "frequency_penalty": "The same, for each time that it has them.",
    "logit_bias": "Add to a token's logit, -100 to 100; may be repeated, or a JSON object.",
    "allowed_token_ids": "Sample only this token; may be repeated.",
    "bad_words": "A text that must not come up; may be repeated.",
    "structured_outputs": "The form of the output: an object with json, json_object, regex, choice or grammar.",
    "seed": "Makes sampling reproducible.",
    "stop": "End before this text; may be repeated.",
    "stop_token_ids": "End with this token; may be repeated.",
    "include_stop_str_in_output": "Keep the stop text.",
    "ignore_eos": "Go on after the model's own end.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "spaces_between_special_tokens": "Also put spaces there, where the tokenizer puts some between words.",
    "logprobs": "Show each token's log-probability, and so many of the likeliest.",
    "prompt_logprobs": "The same for the prompt's tokens.",
    "echo": "Begin with the prompt.",
    "n": "Samples of each prompt.",
    "best_of": "Samples generated, of which the n likeliest are told.",
}
UNSAID = {
    EngineArgs: {"model", "seed", "skip_tokenizer_init", "flight_recorder"},
    SamplingParams: {"bad_words_token_ids", "detokenize", "output_kind", "skip_reading_prefix_cache"},
}
"""Fields that are no options: --model is each command's own, --seed the request's, and the rest is for programs."""


def parse_length(text: str) -> int:
    """A number of tokens: 4096, 4k (4,000), 4K (4,096); auto or -1 for the largest that fits."""
    if text == "auto":
        return -1
    scale = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}.get(text[-1:], 1)
    try:
        return round(float(text[:-1]) * scale) if scale > 1 else int(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a number of tokens such as 4096 or 4k, nor auto") from None


def parse_bias(text: str) -> dict[int, float]:
    """`ID=BIAS`, or a JSON object of such pairs."""
    try:
        pairs = json.loads(text).items() if text.lstrip().startswith("{") else [text.split("=", 1)]
        return {int(token): float(bias) for token, bias in pairs}
    except (ValueError, TypeError, AttributeError):
        raise typer.BadParameter(f"{text!r} is not ID=BIAS, such as 198=-5, nor a JSON object of such pairs") from None


def parse_structure(text: str) -> dict[str, Any]:
    """A JSON object with the fields of `StructuredOutputsParams`."""
    return parse_object(text, '{"choice": ["yes", "no"]}')


def merge(parts: Iterable[Mapping[int, float]]) -> dict[int, float]:
    return {token: bias for part in parts for token, bias in part.items()}


SETTINGS: dict[str, dict[str, Any]] = {
    "max_model_len": {"parser": parse_length, "metavar": "TOKENS"},
    "flight_recorder": {"metavar": "DIR"},
    "kv_events_config": {"parser": parse_kv_events, "metavar": "JSON"},
    "extra_body": {"parser": parse_variables, "metavar": "JSON"},
    "goodput": {"metavar": "METRIC:MS"},
    "header": {"metavar": "NAME=VALUE"},
    "metadata": {"metavar": "NAME=VALUE"},
    "chat_template": {"metavar": "FILE"},
    "default_chat_template_kwargs": {"parser": parse_variables, "metavar": "JSON"},
    "served_model_name": {"metavar": "NAME"},
    "api_key": {"metavar": "KEY"},
    "allowed_origins": {"metavar": "ORIGIN"},
    "allowed_hosts": {"metavar": "NAME"},
    "pin_prefix": {"metavar": "FILE"},
    "otlp_traces_endpoint": {"metavar": "URL"},
    "disable_access_log_for_endpoints": {"metavar": "PATH"},
    "logit_bias": {"parser": parse_bias, "metavar": "ID=BIAS"},
    "allowed_token_ids": {"metavar": "ID"},
    "bad_words": {"metavar": "TEXT"},
    "structured_outputs": {"parser": parse_structure, "metavar": "JSON"},
    "stop": {"metavar": "TEXT"},
    "stop_token_ids": {"metavar": "ID"},
}
TYPES: dict[str, Any] = {
    "logit_bias": list[dict],  # type: ignore[type-arg]  # what parse_bias gives; typer asks for a plain class
    "allowed_token_ids": list[int],
    "bad_words": list[str],
    "structured_outputs": dict,
    "stop": list[str],
    "stop_token_ids": list[int],
    "served_model_name": list[str],
    "api_key": list[str],
    "allowed_origins": list[str],
    "allowed_hosts": list[str],
    "pin_prefix": list[str],
    "disable_access_log_for_endpoints": list[str],
    "default_chat_template_kwargs": dict,
    "kv_events_config": dict,
    "extra_body": dict,
    "goodput": list[str],
    "header": list[str],
    "metadata": list[str],
}
GATHER: dict[str, Callable[..., Any]] = {"logit_bias": merge}
ALIASES = {"swap_space": ["--kv-offloading-size"], "gpu_memory_utilization": ["--device-memory-utilization"]}
"""vLLM's other names."""
REMOVED = {
    "enable_chunked_prefill": bool,
    "disable_log_requests": bool,
    "use_v2_block_manager": bool,
    "guided_decoding_backend": str,
    "num_lookahead_slots": int,
}
"""Flags of vLLM that copied commands still have, and that mean nothing any more: taken with a warning."""


def options_of(
    settings: type[Any], said: Mapping[str, str], *, into: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command with an option for each field of `settings` that something is `said` about."""
    declared = [_option_of(settings, name, text) for name, text in said.items()]
    removed = REMOVED if settings is EngineArgs else {}
    declared += [_removed_option(name, kind) for name, kind in removed.items()]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        parameters = [*(p for name, p in signature.parameters.items() if name != into), *declared]

        @functools.wraps(command)
        def wrapped(**values: Any) -> Any:
            for name in removed:
                if values.pop(name) is not None:
                    print(f"warning: vLLM flag {flag(name)} means nothing any more and is ignored", file=sys.stderr)
            given = {name: values.pop(name) for name in said}
            given = {k: GATHER[k](v) if k in GATHER else v for k, v in given.items() if v not in (None, [])}
            try:
                return command(**values, **{into: given})
            except UsageError as error:
                if error.param in given:  # in the words of whoever typed it
                    error.args = (f"{flag(str(error.param))}: {error}",)
                raise

        # What typer reads: it has no other way to take options from elsewhere.
        wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _option_of(settings: type[Any], name: str, text: str) -> inspect.Parameter:
    """The field as a keyword parameter; None or [], whatever the field's default is, when it is not on the line."""
    field = next(f for f in dataclasses.fields(settings) if f.name == name)
    kind = TYPES.get(name) or typing.get_type_hints(settings)[name]
    default = field.default
    names = [flag(name), *ALIASES.get(name, [])]
    if isinstance(default, bool):
        names, default = [f"{flag(name)}/--no-{flag(name)[2:]}"], "on" if default else "off"
    shown = False if default is None or default == () else str(default)
    option = typer.Option(*names, help=text, show_default=shown, **SETTINGS.get(name, {}))
    return _keyword(name, kind, option)


def _removed_option(name: str, kind: type) -> inspect.Parameter:
    names = f"{flag(name)}/--no-{flag(name)[2:]}" if kind is bool else flag(name)
    return _keyword(name, kind, typer.Option(names, hidden=True))


def _keyword(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
