"""The playground's sequences under contiguous reservation, for comparison (PagedAttention paper, section 3.1).

Each sequence reserves a contiguous region for the maximum length, since its final length is not known. A fork is a copy
with a region of its own. A sequence that finds no region waits until one is free.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Contiguous:
    """`num_slots` slots. Each sequence reserves `max_len` of them at the lowest free place."""

    num_slots: int
    max_len: int
    starts: dict[str, int] = field(default_factory=dict)  # name -> the first slot of its region
    waiting: list[str] = field(default_factory=list)  # names, in order

    def add(self, name: str) -> None:
        self.waiting.append(name)
        self._place_waiting()

    def remove(self, name: str) -> None:
        self.starts.pop(name, None)
        if name in self.waiting:
            self.waiting.remove(name)
        self._place_waiting()

    def _place_waiting(self) -> None:
        while self.waiting and (start := self._find_gap()) is not None:
            self.starts[self.waiting.pop(0)] = start

    def _find_gap(self) -> int | None:
        return next((start for start, size in self.gaps() if size >= self.max_len), None)

    def gaps(self) -> list[tuple[int, int]]:
        """The unreserved regions: first slot and size."""
        found, end = [], 0
        for start in [*sorted(self.starts.values()), self.num_slots]:
            if start > end:
                found.append((end, start - end))
            end = start + self.max_len
        return found

    @property
    def num_external_slots(self) -> int:
        """External fragmentation: free slots at the ends of gaps, too few for a region."""
        return sum(size % self.max_len for _, size in self.gaps())
