"""Commands: everything that changes the core from outside, with its arguments, reported before the core acts.

The state of a scheduler follows from a snapshot and the commands after it. A command that is refused, or that changes
nothing, such as the abort of an unknown request, is not reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from octavo.core.in_flight import InFlightStep
    from octavo.core.plan import StepResult
    from octavo.core.request import Request, Sequence


class Add(NamedTuple):
    """`max_tokens` is a number even if the request has none: as many as fit."""

    request: Request
    max_tokens: int


class Abort(NamedTuple):
    request: Request
    reason: str


class Stop(NamedTuple):
    sequence: Sequence
    reason: str


class Unpin(NamedTuple):
    """`sequence` holds the pinned blocks."""

    sequence: Sequence


class Schedule(NamedTuple):
    """The policy's measured costs, which the plan depends on, may have changed since the last one."""


class Update(NamedTuple):
    step: InFlightStep
    result: StepResult
    last: bool


class BeamsSelected(NamedTuple):
    """The answer of a request's `select_beams` during an `Update`: a command, because the callback is outside the core.

    parents   the live sequences, in the order in which the callback got them
    selected  pairs of (parent, token)
    """

    request: Request
    parents: list[Sequence]
    selected: list[tuple[Sequence, int]]


class Fail(NamedTuple):
    step: InFlightStep
    limit: int


class Confine(NamedTuple):
    requests: tuple[Request, ...]


class LimitSteps(NamedTuple):
    limit: int


class ResetPrefixCache(NamedTuple):
    pass


Command: TypeAlias = (
    Add | Abort | Stop | Unpin | Schedule | Update | BeamsSelected | Fail | Confine | LimitSteps | ResetPrefixCache
)
CommandListener: TypeAlias = Callable[[Any], None]
"""Called with a `Command`. It must not raise, and must not call back into the core except for a snapshot."""


class CommandTee:
    """Calls its listeners for each command. Check `active` before building a command."""

    __slots__ = ("_listeners", "active")

    def __init__(self) -> None:
        self._listeners: list[CommandListener] = []
        self.active = False

    def attach(self, listener: CommandListener) -> Callable[[], None]:
        """Add a listener. Returns a function that removes it."""
        self._listeners.append(listener)
        self.active = True

        def detach() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)
            self.active = bool(self._listeners)

        return detach

    def emit(self, command: Command) -> None:
        for listener in self._listeners:
            listener(command)
