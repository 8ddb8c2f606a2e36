"""Which of many makes everything fail that it takes part in: found by halves, so that no other is given up."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class FailureBisection(Generic[T]):
    """Groups of suspects, of which one at a time is tried: `on_trial`. The user runs those and no other suspects.

    A group that fails is tried in halves, and one that gets on makes room for the next. A suspect is guilty when it has
    failed alone; that is for the user to see, who then says that it is `cleared` away.
    """

    def __init__(self) -> None:
        self._groups: list[dict[T, None]] = []  # the next one last

    @property
    def on_trial(self) -> tuple[T, ...]:
        return tuple(self._groups[-1]) if self._groups else ()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def failed(self, items: Sequence[T]) -> None:
        """These failed together: their first half is tried next, then the other, and then who waited before."""
        self.cleared(items)
        half = (len(items) + 1) // 2
        self._groups += [dict.fromkeys(group) for group in (items[half:], items[:half]) if group]

    def cleared(self, items: Iterable[T]) -> bool:
        """These got on, or have gone. Whether the next group is on trial now, or none is left."""
        num_groups, items = len(self._groups), list(items)
        for group in self._groups:
            for item in items:
                group.pop(item, None)
        self._groups = [group for group in self._groups if group]
        return len(self._groups) < num_groups
