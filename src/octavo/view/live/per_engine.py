"""`PerEngine`: an object for each engine of a server, of which there may be more later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from octavo.view.live.hub import AskQuery

T = TypeVar("T")


class PerEngine(Sequence[T]):
    """What `make` returns for each engine, made once.

    engines   grows when a cluster starts a replica more than ever before
    """

    def __init__(self, engines: Sequence[AskQuery], make: Callable[[AskQuery], T]) -> None:
        self._engines, self._make = engines, make
        self._made: list[T] = []

    def __len__(self) -> int:
        return len(self._engines)

    def __getitem__(self, index: Any) -> Any:
        self._made += [self._make(engine) for engine in self._engines[len(self._made) :]]
        return self._made[index]
