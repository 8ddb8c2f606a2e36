"""Commands that refuse a repeated option. For `--port 1 --port 2`, typer would silently use the last value."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup

from octavo.errors import UsageError

if TYPE_CHECKING:
    import typer


def check_once(command: Any, context: typer.Context, args: list[str]) -> None:
    """Raises `UsageError` for a single-valued option that is given more than once."""
    _, _, order = command.make_parser(context).parse_args(args=list(args))
    counts = Counter(param.name for param in order)
    for param in command.get_params(context):
        if param.param_type_name == "option" and not param.multiple and counts[param.name] > 1:
            raise UsageError(f"{param.opts[0]} is given {counts[param.name]} times; give it once")


class Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        check_once(self, ctx, args)
        return super().parse_args(ctx, args)


class Group(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        check_once(self, ctx, args)
        return super().parse_args(ctx, args)
