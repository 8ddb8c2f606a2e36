"""Options that several commands share. Names, types and defaults come from the fields of `EngineArgs`, `SamplingParams`
and the like, help texts from their docstrings.

`options_of` replaces one dict parameter of a command by such options. The dict holds only options that are on the
command line: defaults stay in the dataclasses.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from octavo.cli.single_options import GIVEN
from octavo.config import EngineArgs
from octavo.errors import UsageError
from octavo.params.sampling_params import SamplingParams
from octavo.params.vllm_arguments import adopt, arguments

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


def parse_speculation(text: str) -> dict[str, Any]:
    return parse_object(text, '{"method": "ngram"}')


Variables = Annotated[
    dict | None,  # type: ignore[type-arg]  # typer needs a plain class
    typer.Option(
        "--chat-template-kwargs",
        parser=parse_variables,
        metavar="JSON",
        help='Chat template variables, such as {"enable_thinking": false}.',
    ),
]

NO_OPTIONS: Mapping[type, set[str]] = collections.defaultdict(
    set,
    {
        EngineArgs: {"model", "seed", "skip_tokenizer_init", "flight_recorder"},
        SamplingParams: {"bad_words_token_ids", "detokenize", "output_kind", "skip_reading_prefix_cache"},
    },
)
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


PARSERS: dict[str, Callable[[str], Any]] = {
    "max_model_len": parse_length,
    "kv_events_config": parse_kv_events,
    "speculative_config": parse_speculation,
    "spec_method": str,  # the engine's refusal of other methods names a remedy
    "logit_bias": parse_bias,
    "structured_outputs": parse_structure,
}
# fmt: off
METAVARS = {
    "max_model_len": "TOKENS", "flight_recorder": "DIR", "goodput": "METRIC:MS", "header": "NAME=VALUE",
    "metadata": "NAME=VALUE", "chat_template": "FILE", "served_model_name": "NAME", "api_key": "KEY",
    "admin_key": "KEY", "allowed_origins": "ORIGIN", "allowed_hosts": "NAME", "pin_prefix": "FILE",
    "otlp_traces_endpoint": "URL", "disable_access_log_for_endpoints": "PATH", "logit_bias": "ID=BIAS",
    "bad_words": "TEXT", "stop": "TEXT", "allowed_token_ids": "ID", "stop_token_ids": "ID",
    "spec_method": "suffix|draft_model|ngram",
}
# fmt: on
COMBINE: dict[str, Callable[..., Any]] = {"logit_bias": merge_biases}
# fmt: off
GROUPS = {
    "Model": "revision chat_template device tensor_parallel_size dtype batch_invariant load_format quantization"
        " generation_config enforce_eager",
    "KV cache": "block_size kv_cache_dtype num_gpu_blocks_override kv_cache_memory_bytes gpu_memory_utilization"
        " max_model_len enable_prefix_caching mamba_block_size swap_space watermark kv_events_config"
        " disable_hybrid_kv_cache_manager",
    "Speculation": "speculative_config spec_method spec_model spec_tokens",
    "Keys, TLS and access": "api_key api_key_file admin_key admin_key_file insecure ssl_keyfile ssl_certfile"
        " ssl_ca_certs allowed_origins allowed_hosts trust_request_chat_template metrics_public view_text",
    "Replicas": "data_parallel_size dp_router",
    "Limits of requests": "max_num_queued_reqs max_num_queued_tokens max_request_sequences max_request_tokens"
        " max_request_logprobs queue_timeout max_body_bytes unknown_params strict_openai max_json_whitespace",
    "Logs and tracing": "otlp_traces_endpoint enable_log_requests disable_log_stats uvicorn_log_level"
        " disable_access_log_for_endpoints flight_recorder",
}
"""Groups of options in --help; the group of the others is by their class, in `GROUP_OF_REST`."""
# fmt: on
GROUP_OF_REST = {
    "SamplingParams": "Sampling",
    "the engine": "Scheduling",
    "the server": "Server",
    "bench serve": "Load and report",
}
ALIASES = {
    "swap_space": ["--kv-offloading-size"],
    "gpu_memory_utilization": ["--device-memory-utilization"],
    "data_parallel_size": ["-dp"],
    "tensor_parallel_size": ["-tp"],
    "speculative_config": ["-sc"],
}
"""Other names that vLLM has for these options."""


def options_of(
    settings: type[Any],
    *,
    into: str,
    only: Sequence[str] = (),
    also: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that adds an option for each field of `settings` and collects the values in `into`.

    only      the fields; default: all but those of `NO_OPTIONS`      also  further fields
    defaults  this command's own defaults for --help; the command applies them
    """
    names = only or [f.name for f in dataclasses.fields(settings) if f.init and f.name not in NO_OPTIONS[settings]]
    names = [*names, *also]
    help_texts, hints = field_texts(settings), typing.get_type_hints(settings)
    fields = {field.name: field for field in dataclasses.fields(settings)}
    declared = [
        _option_of(
            fields[name],
            hints[name],
            help_texts[name],
            (defaults or {}).get(name, fields[name].default),
            group_of(name, settings),
        )
        for name in names
    ]
    owner = getattr(settings, "ARGUMENT_OWNER", None)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        parameters = [*(p for name, p in signature.parameters.items() if name != into), *declared]

        @functools.wraps(command)
        def wrapped(**values: Any) -> Any:
            own = {name: value for name, value in GIVEN.get({}).items() if owner and name in arguments(owner)}
            given = {name: values.pop(name) for name in names}
            given = {k: COMBINE[k](v) if k in COMBINE else v for k, v in given.items() if v not in (None, [])}
            try:
                if owner and own:
                    adopted = adopt(owner, {"model": values.get("model"), **given, **own})
                    given = {name: value for name, value in adopted.items() if name != "model"}
                return command(**values, **{into: given})
            except UsageError as error:
                if error.param in given.keys() | own.keys():  # name the option, not the field
                    error.args = (f"{flag(str(error.param))}: {error}",)
                raise

        # typer reads a command's options from its signature and annotations.
        wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        if owner is not None:
            wrapped.vllm_owners = (*getattr(command, "vllm_owners", ()), owner)  # type: ignore[attr-defined]
        return wrapped

    return decorate


def group_of(name: str, settings: type[Any]) -> str:
    """The group of an option in --help."""
    return next((group for group, names in GROUPS.items() if name in names.split()), GROUP_OF_REST[settings.TITLE])


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def field_texts(settings: Any) -> dict[str, str]:
    """The docstring's text of each field: lines of `name  text`, or `name, name  text`, that may continue indented."""
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in (inspect.getdoc(settings) or "").splitlines():
        if entry := re.fullmatch(r"(\w+(?:, \w+)*)  +(\S.*)", line):
            names = entry[1].split(", ")
            texts |= dict.fromkeys(names, entry[2])
        elif not line.startswith("  "):
            names = []
        texts |= {name: f"{texts[name]} {line.strip()}" for name in names if not entry}
    return texts


def _option_of(field: dataclasses.Field[Any], hint: Any, text: str, default: Any, group: str) -> inspect.Parameter:
    """The field as a keyword parameter. Without the option its value is None or [], whatever `default` --help shows."""
    name, kind = field.name, _kind_of(hint)
    names = [flag(name), *ALIASES.get(name, [])]
    settings: dict[str, Any] = {"metavar": METAVARS.get(name)}
    if kind is dict or name in PARSERS:
        settings = {"parser": PARSERS.get(name, parse_variables), "metavar": METAVARS.get(name, "JSON")}
    if name in COMBINE:
        kind = list[dict]  # type: ignore[type-arg]  # typer needs a plain class
    if typing.get_origin(kind) is list:
        text += "; may be repeated"
    if isinstance(field.default, bool):
        names, default = [f"{flag(name)}/--no-{flag(name)[2:]}"], "on" if default else "off"
    shown = "" if default is None or default == () else f"  [default: {default}]"
    text = text.replace("None:", "default:") if default is None else re.sub(r"; None: [^.;]*", "", text)
    text = text if re.match(r"\S+:", text) else text[0].upper() + text[1:]
    return _keyword(
        name, kind, typer.Option(*names, help=f"{text}.{shown}", show_default=False, rich_help_panel=group, **settings)
    )


def _kind_of(hint: Any) -> Any:
    """The option's type: a list for any sequence, a dict for a mapping or an object, else the plain type."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    kinds = kinds if typing.get_origin(hint) in (typing.Union, types.UnionType) else [hint]
    for kind in kinds:
        origin = typing.get_origin(kind)
        if origin in (list, tuple, Sequence):
            return list[typing.get_args(kind)[0]]  # type: ignore[misc]
        if origin is Mapping or dataclasses.is_dataclass(kind):
            return dict
    return kinds[0]


def _keyword(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
