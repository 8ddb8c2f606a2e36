"""What the playground's history takes where each sequence gets one contiguous piece of memory (paper, section 3.1).

The piece is reserved for as many tokens as there can be, as long as nobody knows how many there will be. A fork is a
copy with a piece of its own. Who finds no piece waits until one comes free.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Contiguous:
    """`num_slots` slots, of which each sequence reserves `max_len`; the lowest place that is free is taken."""

    num_slots: int
    max_len: int
    starts: dict[str, int] = field(default_factory=dict)  # name -> its piece's first slot
    waiting: list[str] = field(default_factory=list)  # names, in line

    def add(self, name: str) -> None:
        self.waiting.append(name)
        self._place()

    def remove(self, name: str) -> None:
        self.starts.pop(name, None)
        if name in self.waiting:
            self.waiting.remove(name)
        self._place()

    def _place(self) -> None:
        while self.waiting and (start := self._gap()) is not None:
            self.starts[self.waiting.pop(0)] = start

    def _gap(self) -> int | None:
        return next((start for start, size in self.gaps() if size >= self.max_len), None)

    def gaps(self) -> list[tuple[int, int]]:
        """Where nothing is reserved: first slots and sizes."""
        found, at = [], 0
        for start in [*sorted(self.starts.values()), self.num_slots]:
            if start > at:
                found.append((at, start - at))
            at = start + self.max_len
        return found

    @property
    def num_external_slots(self) -> int:
        """Free, and of use to nobody: a piece is larger than what is left of the gap."""
        return sum(size % self.max_len for _, size in self.gaps())
