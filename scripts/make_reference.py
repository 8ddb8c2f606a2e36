"""Writes docs/reference/ from the code. `--check` only compares, and fails if a page is out of date."""

from __future__ import annotations

import argparse
import collections.abc
import dataclasses
import enum
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from prometheus_client import Metric

import octavo
from octavo import errors
from octavo.cli import environment as variables
from octavo.cli.app import app
from octavo.cli.options import field_texts
from octavo.config import EngineArgs, KVEventsConfig, SpeculativeConfig
from octavo.core.cache.kv_stats import KVStats
from octavo.engine.executor import RankPlace
from octavo.engine.stats import EngineStats, Health, StatsSnapshot
from octavo.params.sampling_params import SamplingParams
from octavo.params.validation import ValidatedParams
from octavo.router.router import REASONS, Router
from octavo.serve.args import ServeArgs
from octavo.serve.metrics import EngineState, Metrics

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- Written by scripts/make_reference.py from the code: change the code, and run it again. -->"

ENGINE_GROUPS = {
    "Model": "model revision skip_tokenizer_init chat_template generation_config load_format quantization dtype "
    "batch_invariant",
    "Device": "device tensor_parallel_size seed enforce_eager decode_window async_scheduling",
    "Memory": "block_size kv_cache_dtype num_gpu_blocks_override kv_cache_memory_bytes gpu_memory_utilization "
    "swap_space enable_prefix_caching mamba_block_size disable_hybrid_kv_cache_manager watermark",
    "Scheduling": "max_model_len max_num_batched_tokens max_num_seqs max_logprobs scheduling_policy priority_ageing "
    "long_prefill_token_threshold max_long_partial_prefills preemption_mode preemption_victim",
    "Speculation": "speculative_config spec_method spec_model spec_tokens",
    "Recording": "flight_recorder kv_events_config",
}
SERVER_GROUPS = {
    "Address": "host port uds root_path allowed_hosts allowed_origins ssl_keyfile ssl_certfile ssl_ca_certs",
    "Keys": "api_key api_key_file admin_key admin_key_file insecure metrics_public view_text",
    "Replicas": "data_parallel_size dp_router",
    "Limits": "max_num_queued_reqs max_num_queued_tokens max_request_sequences max_request_tokens max_request_logprobs "
    "max_body_bytes queue_timeout shutdown_timeout sse_keep_alive_interval",
    "Requests and responses": "served_model_name unknown_params strict_openai return_tokens_as_token_ids "
    "enable_force_include_usage enable_tokenizer_info_endpoint trust_request_chat_template "
    "default_chat_template_kwargs tool_call_parser reasoning_parser pin_prefix max_json_whitespace",
    "Logs and traces": "enable_log_requests disable_log_stats disable_access_log_for_endpoints uvicorn_log_level "
    "otlp_traces_endpoint",
}
API_GROUPS = {
    "Engines": "LLM AsyncLLM AsyncLLMEngine EngineArgs AsyncEngineArgs",
    "Parameters of a request": "SamplingParams BeamSearchParams StructuredOutputsParams RequestOutputKind",
    "Prompts": "PromptType TextPrompt TokensPrompt",
    "Outputs": "RequestOutput CompletionOutput Logprob",
}
# fmt: off
INTERNAL = {
    "resolved", "resolved_dtype", "resolved_kv_dtype", "kv_events", "policy", "speculation",
    "num_speculative_tokens", "validated", "greedy", "has_filters", "width", "stop_ids", "selects_best_of",
    "has_penalties", "needs_history", "sampling_params", "kind", "schema", "query", "debug_request", "debug_kv",
}
# fmt: on
"""Members for Octavo's own code."""

# -- Markdown --------------------------------------------------------------------------------------------------------


def table(header: str, rows: Iterable[Iterable[str]]) -> str:
    """A table. A cell must not have a | in code, where git hosts and mkdocs disagree about escapes."""
    lines = [f"| {header} |", "|" + "---|" * (header.count("|") + 1)]
    for row in rows:
        cells = [" ".join(cell.split()) for cell in row]
        assert not any("|" in code for cell in cells for code in re.findall(r"`[^`]*`", cell)), cells
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |")
    return "\n".join(lines).replace("&lt;br>", "<br>")


def code(text: str, language: str = "") -> str:
    return f"```{language}\n{text}\n```"


def kind(hint: Any) -> str:
    """A type in words; None is not one of its values."""
    origin, args = typing.get_origin(hint), [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if origin is typing.Annotated:
        return kind(args[0])
    if origin is typing.Literal:
        return ", ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(kind, args)))
    if origin in (list, tuple, collections.abc.Sequence):
        return f"list of {kind(args[0])}"
    if origin in (collections.abc.Mapping, dict) or hint is dict:
        return "dict" if not args or args[1] is Any else f"dict of {kind(args[0])} to {kind(args[1])}"
    return getattr(hint, "__name__", str(hint))


def value(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "required"
    if default is None or default == () or default == "":
        return ""
    return f"`{default}`"


# -- Pages -----------------------------------------------------------------------------------------------------------


def commands(command: Any, name: str = "octavo") -> Iterator[tuple[str, Any]]:
    """Every command with its full name; a group only if it does something by itself."""
    subcommands = getattr(command, "commands", {})
    if not subcommands or command.invoke_without_command:
        yield name, command
    for word, subcommand in subcommands.items():
        yield from commands(subcommand, f"{name} {word}")


ROOT: Any = typer.main.get_command(app)
COMMANDS = dict(commands(ROOT))


def flags(name: str, command: Any) -> list[str]:
    options = [param for param in command.params if param.name == name]
    return [option for param in options for option in (*param.opts, *param.secondary_opts)]


def fields_table(settings: type[Any], names: Iterable[str], command: Any = None) -> str:
    texts, hints = field_texts(settings), typing.get_type_hints(settings)
    fields = {field.name: field for field in dataclasses.fields(settings)}
    rows = []
    for name in names:
        options = flags(name, command) if command is not None else []
        label = "<br>".join(f"`{text}`" for text in dict.fromkeys((name, *(o for o in options if o.startswith("--")))))
        values, text = kind(hints[name]), texts[name]
        if not text.startswith(tuple(values.split(", "))):
            text = text[0].upper() + text[1:]
        rows.append([label, values, value(fields[name].default), text])
    return table("name | type | default | what it does", rows)


def grouped(settings: type[Any], groups: dict[str, str], title: str) -> Iterator[str]:
    names = [name for group in groups.values() for name in group.split()]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(settings)), f"{settings}: a group lacks"
    for group, members in groups.items():
        yield f"### {title}: {group[0].lower()}{group[1:]}"
        yield fields_table(settings, members.split(), COMMANDS["octavo serve"])


def configuration() -> Iterator[str]:
    yield "# Configuration"
    yield (
        "Every option has one name. In Python it is an argument of `LLM`, `AsyncLLM.from_options` and `EngineArgs`. "
        "On the command line it is a flag, where `_` and `-` are equal. An empty default means that the option is "
        "not set."
    )
    yield "## Engine"
    yield from grouped(EngineArgs, ENGINE_GROUPS, "Engine")
    for config in (SpeculativeConfig, KVEventsConfig):
        yield f"### Fields of {config.TITLE}"
        yield fields_table(config, [field.name for field in dataclasses.fields(config)])
    yield "## Server"
    yield "`octavo serve` also takes every engine option above that has a flag."
    yield from grouped(ServeArgs, SERVER_GROUPS, "Server")


SHARED = {
    "Engine options": (EngineArgs, "configuration.md#engine"),
    "Server options": (ServeArgs, "configuration.md#server"),
    "Sampling parameters": (SamplingParams, "api.md#samplingparams"),
}
"""Options that several commands have, and where they are described."""


def cli() -> Iterator[str]:
    yield "# Command line"
    yield (
        "`octavo COMMAND --help` prints the same. `_` and `-` are equal in names of options. "
        "[Configuration](configuration.md) describes the options of the engine and the server."
    )
    shared_with = COMMANDS["octavo serve"], COMMANDS["octavo generate"]
    described = {(param.name, param.help) for command in shared_with for param in command.params}
    for name, command in COMMANDS.items():
        yield f"## {name}"
        yield inspect.cleandoc(command.help or "")
        hints = inspect.signature(command.callback, eval_str=True).parameters
        rows, shared = [], collections.defaultdict[str, list[str]](list)
        for param in command.params:
            if getattr(param, "hidden", False):
                continue
            is_option = param.param_type_name == "option"
            names = (*param.opts, *param.secondary_opts) if is_option else (param.name,)
            label = ", ".join(f"`{name}`" for name in names)
            owner = next((o for o, (s, _) in SHARED.items() if param.name in field_texts(s)), None)
            if is_option and owner and (param.name, param.help) in described and param.name != "model":
                shared[owner].append(f"`{param.opts[0]}`")
            else:
                metavar = param.metavar or kind(hints[param.name].annotation)
                shown = getattr(param, "show_default", None)
                default = value(shown if isinstance(shown, str) else param.default)
                default = {"`True`": "on", "`False`": "off"}.get(default, default)
                default = "required" if param.required else default
                rows.append([label, "" if metavar == "bool" else metavar, default, param.help or ""])
        if rows:
            yield table("argument or option | value | default | what it does", rows)
        for owner, names in shared.items():
            yield f"[{owner}]({SHARED[owner][1]}): {', '.join(names)}"


def signature(function: Any, name: str) -> str:
    """As in the source, one parameter a line if it is long."""
    found = inspect.signature(function)
    returns = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
    parts, kinds = [], [p.kind for p in found.parameters.values()]
    for i, p in enumerate(found.parameters.values()):
        if p.kind is p.KEYWORD_ONLY and p.VAR_POSITIONAL not in kinds and kinds.index(p.kind) == i:
            parts.append("*")
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        hint = "" if p.annotation is p.empty else f": {p.annotation}"
        default = str(p.default) if isinstance(p.default, enum.Enum) else repr(p.default).replace("'", '"')
        parts.append(f"{stars}{p.name}{hint}" + ("" if p.default is p.empty else f"{' = ' if hint else '='}{default}"))
    line = f"{name}({', '.join(parts)}){returns}: ..."
    if len(line) > 96:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}: ..."
    return line


def prose(text: str, language: str = "python") -> Iterator[str]:
    """A docstring as Markdown: its indented code, its entries (`name  text`) as a list, its paragraphs."""
    for part in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if part.startswith("    "):
            yield code(textwrap.dedent(part), language)
        elif re.match(r"\w+(, \w+)*  +\S", part):
            yield "\n".join(f"* `{m[0]}`: {m[1]}" for m in entries(part))
        else:
            text = " ".join(part.split()).replace("<", "&lt;")
            yield re.sub(r"\bdocs/([\w-]+\.md)", r"[\1](../\1)", text)


def entries(part: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for line in part.splitlines():
        if entry := re.fullmatch(r"(\w+(?:, \w+)*)  +(\S.*)", line):
            found.append((entry[1].replace(", ", "`, `"), entry[2]))
        else:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
    return found


def members(cls: type[Any]) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, inherited ones of Octavo's classes included."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("octavo.") or base is ValidatedParams:
            continue
        for name, member in vars(base).items():
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            is_public = not name.startswith("_") and name not in seen | INTERNAL
            if is_public and isinstance(function, types.FunctionType | property):
                seen.add(name)
                yield name, member


def described(name: str, cls: Any) -> Iterator[str]:
    yield f"### {name}"
    if isinstance(cls, type) and cls.__name__ != name:
        yield f"Another name of [`{cls.__name__}`](#{cls.__name__.lower()})."
        return
    if isinstance(cls, types.UnionType):
        yield f"`{name}` is one of: " + ", ".join(kind(arg) for arg in typing.get_args(cls)) + "."
        return
    if typing.is_typeddict(cls):
        yield "A dict. " + ", ".join(f"`{key}`: {kind(hint)}" for key, hint in typing.get_type_hints(cls).items()) + "."
        return
    if cls is octavo.EngineArgs:
        yield "Its fields: the [engine's options](configuration.md#engine). Unknown names raise `UnknownOptionError`."
    elif issubclass(cls, enum.Enum):
        yield from prose(cls.__doc__ or "")
        yield ", ".join(f"`{name}.{member.name}`" for member in cls) + "."
        return
    elif dataclasses.is_dataclass(cls):
        texts, hints = field_texts(cls), typing.get_type_hints(cls)
        parts = list(prose(cls.__doc__ or ""))
        yield from (part for part in parts if not part.startswith("* "))
        rows = []
        for field in dataclasses.fields(cls):
            default = "" if field.default_factory is not dataclasses.MISSING else value(field.default)
            if field.init:
                rows.append([f"`{field.name}`", kind(hints[field.name]), default, texts.get(field.name, "")])
        yield table("field | type | default | what it is", rows)
    else:
        yield from prose(cls.__doc__ or "")
        if "__init__" in vars(cls):
            init = textwrap.indent(signature(cls.__init__, "def __init__"), "    ")
            yield code(f"class {name}:\n{init}", "python")
    for method, member in members(cls):
        yield f"#### {name}.{method}"
        function: Callable[..., Any] = member.fget if isinstance(member, property) else getattr(cls, method)
        decorator = {property: "@property\n", classmethod: "@classmethod\n"}.get(type(member), "")
        prefix = "async def" if inspect.iscoroutinefunction(function) else "def"
        yield code(decorator + signature(function, f"{prefix} {method}"), "python")
        doc = function.__doc__
        yield from prose(doc or "")


def api() -> Iterator[str]:
    yield "# Python API"
    yield "All of it is imported from `octavo`; further errors are in `octavo.errors`. Importing them loads no torch."
    names = [name for group in API_GROUPS.values() for name in group.split()]
    assert {*names, "__version__"} == set(octavo.__all__) - set(vars(errors)), "API_GROUPS lacks a public name"
    for group, members_ in API_GROUPS.items():
        yield f"## {group}"
        for name in members_.split():
            yield from described(name, getattr(octavo, name))
    yield "## Errors"
    tree, *rest = re.split(r"\n\s*\n(?!OctavoError)", (errors.__doc__ or "").partition("\n\n")[2])
    yield code(tree.strip())
    yield from (" ".join(part.split()) for part in rest)
    yield "`code` of an error is a stable name for programs; `param` is the argument at fault, or None."


def metrics() -> Iterator[str]:
    yield "# Metrics"
    yield (
        "`GET /metrics` answers in Prometheus's text format. Names without `octavo:` are vLLM's. "
        "[For operators](../operators.md) says which to watch."
    )
    registry = Metrics("MODEL", 8192)
    zeros: Any = dict.fromkeys((field.name for field in dataclasses.fields(KVStats)), 0)
    registry.set_cache_config([KVStats(**zeros)])
    router = Router()
    router.stats.num_requests.update((0, why) for why in REASONS)
    registry.add_router(router)
    registry.http_requests.labels("GET", "200", "/health")
    registry.http_seconds.labels("GET", "/health")
    engine, ranks = EngineStats(num_accepted_per_position=[0]), (RankPlace(0, 0, False, 0.0, False),) * 2
    registry.render([EngineState(0, StatsSnapshot(engine, KVStats(**zeros)), Health("running", 0.0, ranks=ranks))])
    families: list[Metric] = sorted(registry.registry.collect(), key=lambda family: family.name)
    rows = []
    for family in families:
        labels: dict[str, set[str]] = collections.defaultdict(set)
        for sample in family.samples:
            for label, text in sample.labels.items():
                labels[label].add(text)
        named = (
            f"`{label}` ({', '.join(sorted(values))})" if label in VALUES and len(values) > 1 else f"`{label}`"
            for label, values in labels.items()
            if label not in ("le", "model_name", "engine")
        )
        suffix = "_total" if family.type == "counter" else ""
        rows.append([f"`{family.name}{suffix}`", family.type, ", ".join(named), family.documentation])
    yield (
        "Metrics that begin with `vllm:` or `octavo:` also have the labels `model_name` and `engine`. "
        "The router's, of a server with several engines, have `engine` alone; its totals have no label."
    )
    yield table("name | type | further labels | what it is", rows)


VALUES = {"reason", "source", "state", "finished_reason"}
"""Labels whose values are listed."""


def environment() -> Iterator[str]:
    yield "# Environment variables"
    yield table("variable | what it does", ([f"`{name}`", text] for name, text in field_texts(variables).items()))
    yield (
        "`octavo serve` refuses to start if a variable's name resembles one of these (`OCTAVO_API_KEYS`, "
        "`VLLM_API_KYE`), or if a key is empty: a key was probably intended. Other commands warn."
    )


PAGES = (configuration, cli, api, metrics, environment)


def main(folder: Path = FOLDER, args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    check = parser.parse_args(args).check
    folder.mkdir(exist_ok=True)
    stale = []
    for page in PAGES:
        path, text = folder / f"{page.__name__}.md", "\n\n".join((NOTE, *filter(None, page()))) + "\n"
        if not path.exists() or path.read_text() != text:
            stale.append(path.name)
            if not check:
                path.write_text(text)
    if check and stale:
        print(f"docs/reference: {', '.join(stale)} out of date; run python scripts/make_reference.py", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
