"""The core's own lines, as the page shows them, and which of them ran.

The text is read from the installed source, so it cannot differ from what runs. Docstrings, assertions and events are
left out: they change no block.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from octavo.core.block_pool import BlockPool
from octavo.core.kv_cache_manager import KVCacheManager

SHOWN = {KVCacheManager: ("grow", "_copy_on_write"), BlockPool: ("share", "allocate", "release")}
"""Names, since a part of `grow` is private: it is read here, never called."""
FUNCTIONS: list[Callable[..., Any]] = [getattr(of, name) for of, names in SHOWN.items() for name in names]
MAX_TRACED = 10_000
"""Lines of an action that are recorded, at most. Recording makes a line a few times slower."""


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.Expr(ast.Constant(str())):
            return True
        case ast.If(test):
            return ast.unparse(test) == "self.events.blocks"
    return False


def lines_of(function: Callable[..., Any]) -> Iterator[tuple[int, str]]:
    """The function's lines with their numbers in its file. There are none if the source is not installed."""
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError:
        return
    text = textwrap.dedent("".join(lines))
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and _is_left_out(node):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for i, line in enumerate(text.splitlines(), 1):
        if i not in left_out:
            yield first + i - 1, line


LINES: list[str] = []
"""The lines of all functions, one after the other."""
_PLACES: dict[CodeType, dict[int, int]] = {}  # the place in LINES by line number
for _function in FUNCTIONS:
    _places = _PLACES[_function.__code__] = {}
    for _number, _line in lines_of(_function):
        _places[_number] = len(LINES)
        LINES.append(_line)


class LineTrace:
    """Records the shown lines that this thread runs while the trace is entered."""

    def __init__(self) -> None:
        self._ran: set[int] = set()
        self._latest: list[int] = []
        self._left = 0

    def __enter__(self) -> None:
        self._ran.clear()
        self._left, self._outer = MAX_TRACED, sys.gettrace()
        sys.settrace(self._on_call)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._outer)

    def take(self) -> list[int]:
        """The places since the last call. What the pool's current function still runs is added to the list."""
        self._latest = sorted(self._ran)
        self._ran.clear()
        return self._latest

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Any:
        if self._left and frame.f_code in _PLACES:
            return self._on_line(frame, event, argument)
        return None

    def _on_line(self, frame: FrameType, event: str, argument: object) -> Any:
        place = _PLACES[frame.f_code].get(frame.f_lineno)
        if place is not None and self._left:
            self._left -= 1
            self._ran.add(place)
        if event == "return" and frame.f_code.co_qualname.startswith("BlockPool."):
            self._latest += sorted(self._ran - {*self._latest})
            self._ran.clear()
        return self._on_line
