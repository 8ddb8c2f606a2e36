"""Options that several commands share, and their help texts. Names, types and defaults come from the fields of
`EngineArgs`, `SamplingParams` and the like.

`options_of` replaces one dict parameter of a command by such options. The dict holds only options that are on the
command line: defaults stay in the dataclasses.
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


def refuse_unused_options(context: typer.Context, names: Iterable[str], mode: str) -> None:
    """Raises `UsageError` if one of these parameters is on the command line, since it has no effect in this mode."""
    options = {param.name: param.opts[0] for param in context.command.params}
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{options[name]} has no effect with {mode}; remove it")


def parse_object(text: str, example: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object such as {example}")
    return value


def parse_variables(text: str) -> dict[str, Any]:
    return parse_object(text, '{"enable_thinking": false}')


def parse_kv_events(text: str) -> dict[str, Any]:
    return parse_object(text, '{"enable_kv_cache_events": true}')


Variables = Annotated[
    dict | None,  # type: ignore[type-arg]  # typer needs a plain class
    typer.Option(
        "--chat-template-kwargs",
        parser=parse_variables,
        metavar="JSON",
        help='Chat template variables, such as {"enable_thinking": false}.',
    ),
]

ENGINE = {
    "revision": "Branch, tag or commit of a hub repository.",
    "chat_template": "File with a chat template, or the template itself. Default: the model's.",
    "device": "Device that runs the model.",
    "dtype": "Data type of weights and activations.",
    "load_format": "dummy: random weights, to measure speed without a download.",
    "quantization": "int8: int8 weights and activations in matrix products, on a CPU.",
    "block_size": "Tokens per block, a power of two.",
    "num_gpu_blocks_override": "Usable KV blocks, on any device. Default: as many as fit.",
    "kv_cache_memory_bytes": "Bytes for the KV pool. Default: as much as fits.",
    "gpu_memory_utilization": "Share of the device's memory for weights and KV pool, on a GPU or a CPU.",
    "max_model_len": "Maximum length of a sequence, such as 4096 or 4k; auto: as long as fits.",
    "max_num_batched_tokens": "Maximum tokens per step.",
    "max_num_seqs": "Maximum running sequences.",
    "enable_prefix_caching": "Reuse cached blocks for prompt prefixes computed before.",
    "preemption_mode": "How a preempted request frees its blocks; auto: the one that is cheaper to undo.",
    "preemption_victim": "Request to preempt: the last in line (latest), or the cheapest to resume (least_lost).",
    "swap_space": "GiB of host memory for swapped blocks. Default: as much as the pool, at most 4.",
    "generation_config": "Source of the sampling defaults: auto (the model's file), vllm (none), or a path.",
    "max_logprobs": "Maximum of --logprobs; -1: the whole vocabulary.",
    "scheduling_policy": "Order of requests: first come, first served, or by priority (lower first).",
    "priority_ageing": "Later arrivals that may overtake a request per step of priority between them; 0: any number.",
    "long_prefill_token_threshold": "Longer prompts prefill at most this many tokens per step; 0: no limit.",
    "max_long_partial_prefills": "Long prompts of one API key that prefill concurrently; short prompts may pass them.",
    "watermark": "Share of the blocks that an admission must leave free.",
    "decode_window": "Tokens that the device decodes per sequence in one step.",
    "enforce_eager": "Launch kernels one by one, without CUDA graphs.",
    "async_scheduling": "Plan the next step while the device computes the current one.",
    "kv_events_config": "Prefix cache events for routers (vLLM's KV events), as JSON.",
}
SAMPLING = {
    "max_tokens": "Maximum tokens to generate.",
    "min_tokens": "Tokens to generate before a stop condition applies.",
    "temperature": "0 is greedy; up to 2.",
    "top_p": "Keep the most likely tokens up to this total probability.",
    "top_k": "Keep this many of the most likely tokens; 0 keeps all.",
    "min_p": "Keep tokens with at least this share of the top token's probability.",
    "repetition_penalty": "Above 1, tokens of prompt and output become less likely.",
    "presence_penalty": "Subtracted from the logits of tokens in the output; -2 to 2.",
    "frequency_penalty": "Subtracted once for each time that a token is in the output; -2 to 2.",
    "logit_bias": "Add to a token's logit, -100 to 100; may be repeated, or a JSON object.",
    "allowed_token_ids": "Sample only this token; may be repeated.",
    "bad_words": "Text that the output must not contain; may be repeated.",
    "structured_outputs": "Constrain the output: an object with json, json_object, regex, choice or grammar.",
    "seed": "Seed for reproducible sampling.",
    "stop": "Stop before this text; may be repeated.",
    "stop_token_ids": "Stop at this token; may be repeated.",
    "include_stop_str_in_output": "Keep the stop text in the output.",
    "ignore_eos": "Do not stop at the model's end-of-sequence token.",
    "skip_special_tokens": "Omit special tokens from the text.",
    "spaces_between_special_tokens": "Put spaces between special tokens, if the tokenizer puts them between words.",
    "logprobs": "Print each token's log-probability, and this many top tokens.",
    "prompt_logprobs": "The same for the prompt's tokens.",
    "echo": "Begin the output with the prompt.",
    "n": "Samples per prompt.",
    "best_of": "Samples to generate; the n with the highest log-probability are returned.",
}
NO_OPTIONS = {
    EngineArgs: {"model", "seed", "skip_tokenizer_init", "flight_recorder"},
    SamplingParams: {"bad_words_token_ids", "detokenize", "output_kind", "skip_reading_prefix_cache"},
}
"""Fields without an option: commands declare --model themselves, --seed belongs to requests, the rest is API only."""


def parse_length(text: str) -> int:
    """Parse a number of tokens: 4096, 4k (4,000), 4K (4,096); auto or -1: as many as fit."""
    if text == "auto":
        return -1
    scale = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}.get(text[-1:], 1)
    try:
        return round(float(text[:-1]) * scale) if scale > 1 else int(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a number of tokens such as 4096 or 4k, nor auto") from None


def parse_bias(text: str) -> dict[int, float]:
    """Parse `ID=BIAS`, or a JSON object of such pairs."""
    try:
        pairs = json.loads(text).items() if text.lstrip().startswith("{") else [text.split("=", 1)]
        return {int(token): float(bias) for token, bias in pairs}
    except (ValueError, TypeError, AttributeError):
        raise typer.BadParameter(f"{text!r} is not ID=BIAS, such as 198=-5, nor a JSON object of such pairs") from None


def parse_structure(text: str) -> dict[str, Any]:
    """Parse a JSON object with the fields of `StructuredOutputsParams`."""
    return parse_object(text, '{"choice": ["yes", "no"]}')


def merge_biases(parts: Iterable[Mapping[int, float]]) -> dict[int, float]:
    return {token: bias for part in parts for token, bias in part.items()}


OPTION_SETTINGS: dict[str, dict[str, Any]] = {
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
OPTION_TYPES: dict[str, Any] = {
    "logit_bias": list[dict],  # type: ignore[type-arg]  # the type of parse_bias; typer needs a plain class
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
COMBINE: dict[str, Callable[..., Any]] = {"logit_bias": merge_biases}
ALIASES = {"swap_space": ["--kv-offloading-size"], "gpu_memory_utilization": ["--device-memory-utilization"]}
"""Other names that vLLM has for these options."""
OBSOLETE = {
    "enable_chunked_prefill": bool,
    "disable_log_requests": bool,
    "use_v2_block_manager": bool,
    "guided_decoding_backend": str,
    "num_lookahead_slots": int,
}
"""Obsolete flags of vLLM with no effect: accepted with a warning, for copied command lines."""


def options_of(
    settings: type[Any], help_texts: Mapping[str, str], *, into: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that adds an option for each field of `settings` in `help_texts` and collects the values in `into`."""
    declared = [_option_of(settings, name, text) for name, text in help_texts.items()]
    obsolete = OBSOLETE if settings is EngineArgs else {}
    declared += [_obsolete_option(name, kind) for name, kind in obsolete.items()]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        parameters = [*(p for name, p in signature.parameters.items() if name != into), *declared]

        @functools.wraps(command)
        def wrapped(**values: Any) -> Any:
            for name in obsolete:
                if values.pop(name) is not None:
                    print(f"warning: vLLM flag {flag(name)} has no effect any more and is ignored", file=sys.stderr)
            given = {name: values.pop(name) for name in help_texts}
            given = {k: COMBINE[k](v) if k in COMBINE else v for k, v in given.items() if v not in (None, [])}
            try:
                return command(**values, **{into: given})
            except UsageError as error:
                if error.param in given:  # name the option, not the field
                    error.args = (f"{flag(str(error.param))}: {error}",)
                raise

        # typer reads a command's options from its signature and annotations.
        wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _option_of(settings: type[Any], name: str, text: str) -> inspect.Parameter:
    """The field as a keyword parameter. Without the option its value is None or [], whatever the field's default is."""
    field = next(f for f in dataclasses.fields(settings) if f.name == name)
    kind = OPTION_TYPES.get(name) or typing.get_type_hints(settings)[name]
    default = field.default
    names = [flag(name), *ALIASES.get(name, [])]
    if isinstance(default, bool):
        names, default = [f"{flag(name)}/--no-{flag(name)[2:]}"], "on" if default else "off"
    shown = False if default is None or default == () else str(default)
    option = typer.Option(*names, help=text, show_default=shown, **OPTION_SETTINGS.get(name, {}))
    return _keyword(name, kind, option)


def _obsolete_option(name: str, kind: type) -> inspect.Parameter:
    names = f"{flag(name)}/--no-{flag(name)[2:]}" if kind is bool else flag(name)
    return _keyword(name, kind, typer.Option(names, hidden=True))


def _keyword(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
