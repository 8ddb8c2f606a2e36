"""Bisection of failing steps: finds the request that makes its steps fail, without failing the others."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class FailureBisection(Generic[T]):
    """Groups of suspects. Only the suspects in `active` may run; all other suspects wait.

    A group that fails again is split in halves; when a group succeeds, the next one becomes active. A suspect that
    fails alone is the culprit: the user of this class detects that and removes it with `clear`.
    """

    def __init__(self) -> None:
        self._groups: list[dict[T, None]] = []  # the active one last

    @property
    def active(self) -> tuple[T, ...]:
        return tuple(self._groups[-1]) if self._groups else ()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def split(self, items: Sequence[T]) -> None:
        """Record that these failed together: their first half becomes active, then the other, then earlier groups."""
        self.clear(items)
        half = (len(items) + 1) // 2
        self._groups += [dict.fromkeys(group) for group in (items[half:], items[:half]) if group]

    def clear(self, items: Iterable[T]) -> bool:
        """Remove suspects that succeeded or ended. True if a group became empty: another one, or none, is active."""
        num_groups, items = len(self._groups), list(items)
        for group in self._groups:
            for item in items:
                group.pop(item, None)
        self._groups = [group for group in self._groups if group]
        return len(self._groups) < num_groups
