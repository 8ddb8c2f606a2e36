"""Commands that refuse a repeated option, and take vLLM's flags.

For `--port 1 --port 2`, typer would silently use the last value. vLLM's flags are many, so they are no parameters of
the commands, which would slow every start.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup

from octavo.errors import UsageError
from octavo.params.vllm_arguments import Argument, arguments, flag_name, parse_value

if TYPE_CHECKING:
    import typer

GIVEN: ContextVar[dict[str, Any]] = ContextVar("GIVEN")
"""The arguments of vLLM on the command line that are no options of the command."""


def check_once(command: Any, context: typer.Context, args: list[str]) -> None:
    """Raises `UsageError` for a single-valued option that is given more than once."""
    _, _, order = command.make_parser(context).parse_args(args=list(args))
    counts = Counter(param.name for param in order)
    for param in command.get_params(context):
        if param.param_type_name == "option" and not param.multiple and counts[param.name] > 1:
            raise UsageError(f"{param.opts[0]} is given {counts[param.name]} times; give it once")


def take_vllm_flags(command: Any, words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The command line without vLLM's flags that are no options of the command, and the values of these flags.

    `--model X` becomes X for a command whose model is an argument. The keys of one of its options, as in
    `--speculative-config.method x`, become one object.
    """
    table = arguments(*getattr(command.callback, "vllm_owners", ("none",)))
    options = {name: param for param in command.params for name in (*param.opts, *param.secondary_opts)}
    takes_model = any(param.name == "model" and param.param_type_name == "argument" for param in command.params)
    rest: list[str] = []
    given: dict[str, Any] = {}
    objects: dict[str, dict[str, Any]] = {}
    after = iter(words)
    for word in after:
        name = word.partition("=")[0].replace("_", "-")
        argument = table.get(flag_name(word) or "")
        if word == "--":
            rest += [word, *after]
        elif name in ("--model", "-m") and takes_model:
            value = word.partition("=")[2] or next(after, "")
            if not value:
                raise UsageError(f"{name} needs a model's name or path")
            rest.append(value)
        elif argument is not None and not argument.is_taken and name not in options:
            value, earlier = _value_of(argument, word, after), given.get(argument.name, {})
            if argument.name in given and not (isinstance(value, dict) and isinstance(earlier, dict)):
                raise UsageError(f"{word.partition('=')[0]} is given again; give it once")
            given[argument.name] = earlier | value if earlier else value
        elif argument is not None and "." in name and f"--{argument.name.replace('_', '-')}" in options:
            value, parts = _value_of(argument, word, after), objects.setdefault(argument.name, {})
            if parts.keys() & value.keys():
                raise UsageError(f"{word.partition('=')[0]} is given again; give it once")
            parts.update(value)
        else:
            rest.append(word)
            if name in options and "=" not in word and not getattr(options[name], "is_flag", False):
                rest += [value for value in [next(after, None)] if value is not None]
    keyed = [word for name, value in objects.items() for word in (f"--{name.replace('_', '-')}", json.dumps(value))]
    return [*keyed, *rest], given


def _value_of(argument: Argument, word: str, after: Iterator[str]) -> Any:
    """The value of a flag: JSON, else text. `--speculative-config.method x` is {"method": "x"}."""
    if argument.is_flag:
        return not word.startswith("--no-")
    name, equals, text = word.partition("=")
    value = parse_value(text if equals else next(after, "true"))
    _, dot, key = name.partition(".")
    return {key: value} if dot else value


class Command(TyperCommand):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The options of --help, by their group."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            if (row := param.get_help_record(ctx)) is not None:
                group = "Arguments" if param.param_type_name == "argument" else getattr(param, "rich_help_panel", None)
                groups.setdefault(group or "Options", []).append(row)
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args, given = take_vllm_flags(self, args)
        GIVEN.set(given)
        check_once(self, ctx, args)
        return super().parse_args(ctx, args)


class Group(TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The commands of --help with their whole first sentence; typer cuts it."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(1000)) for name, command in commands if command])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        check_once(self, ctx, args)
        return super().parse_args(ctx, args)
