"""Swap space: host blocks in pinned memory for swapped-out requests. They are neither cached nor sealed."""

from __future__ import annotations

from array import array

from octavo.core.snapshot import Fields, State
from octavo.core.types import HostBlockId


class SwapSpace:
    """`num_blocks` reference-counted host blocks with the ids 1 to num_blocks."""

    __slots__ = ("_freed", "_untouched", "num_blocks", "num_free", "refs")

    SAVED = Fields("refs _untouched num_free freed=_freed")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = array("i", bytes(4 * (num_blocks + 1)))
        self.num_free = num_blocks
        self._untouched = 1
        self._freed: list[HostBlockId] = []

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self) -> HostBlockId:
        assert self.num_free, "the swap space is full: callers check `num_free` first"
        self.num_free -= 1
        if self._freed:
            block = self._freed.pop()
        else:
            block = self._untouched
            self._untouched = block + 1
        self.refs[block] = 1
        return block

    def share(self, block: HostBlockId) -> None:
        assert self.refs[block] > 0, block
        self.refs[block] += 1

    def release(self, block: HostBlockId) -> None:
        refs = self.refs[block] - 1
        assert refs >= 0, f"host block {block} released more often than shared"
        self.refs[block] = refs
        if not refs:
            self._freed.append(block)
            self.num_free += 1

    def snapshot(self) -> State:
        return self.SAVED.save(self)

    def restore(self, state: State) -> None:
        """Take the state of a swap space of the same size."""
        self.SAVED.load(self, state)
