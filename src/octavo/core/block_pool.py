"""The device's blocks: who uses them, which of them are cached, and where content is to be found.

Three states partition the pool:

    used    refs > 0
    cached  refs == 0, sealed: findable, in order of release, the oldest evicted first
    free    refs == 0, no content

Flat arrays and O(1) operations; no object a block. Free blocks are a stack and a high-water mark, so that starting with
a million of them fills nothing. The links of the cached blocks lie in two arrays with the null block as sentinel.

The index is many small dicts, keyed by bytes. One large one would stop everything for 50 ms when it grows past half a
million entries; and tuples as keys would have the garbage collector look at every entry now and then, another 30 ms.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TypeAlias

from octavo.core.events import Allocated, EventStream, Evicted, Released, Sealed, Shared
from octavo.core.types import NULL_BLOCK, BlockId, SealId

Key: TypeAlias = tuple[SealId | bytes, bytes]
"""The content of a block: the seal id of the block before it, or the salt where there is none, and its tokens as int32.
Exact, no digest."""

BLOCKS_PER_SHARD = 4096
"""Blocks for each dict of the index. Growing one of this size takes about 0.2 ms."""


class BlockPool:
    """`num_blocks` usable blocks, ids 1 to num_blocks. A misuse (double release, an id out of range) is our own bug."""

    __slots__ = (
        "_freed",
        "_next",
        "_packed_of",
        "_prev",
        "_shards",
        "_untouched",
        "events",
        "last_seal_id",
        "num_blocks",
        "num_cached",
        "num_evicted",
        "num_free",
        "num_refs",
        "num_sealed",
        "refs",
        "seal_id",
    )

    def __init__(self, num_blocks: int, events: EventStream | None = None) -> None:
        n = num_blocks + 1
        self.num_blocks = num_blocks
        self.events = events or EventStream()
        self.refs = array("i", bytes(4 * n))
        self.seal_id = array("q", bytes(8 * n))  # 0: not sealed
        self._prev, self._next = array("i", bytes(4 * n)), array("i", bytes(4 * n))  # oldest cached at _next[0]
        self._packed_of: list[bytes | None] = [None] * n
        num_shards = 1 << (num_blocks // BLOCKS_PER_SHARD).bit_length()
        self._shards: list[dict[bytes, BlockId]] = [{} for _ in range(num_shards)]
        self._untouched = 1  # ids from here on were never used
        self._freed: list[BlockId] = []
        self.num_free, self.num_cached = num_blocks, 0
        self.num_refs = 0  # references over all blocks: minus `num_used`, the blocks that sharing saves
        self.last_seal_id = 0
        self.num_sealed, self.num_evicted = 0, 0

    @property
    def num_available(self) -> int:
        """What `take` can give: free, then cached."""
        return self.num_free + self.num_cached

    @property
    def num_indexed(self) -> int:
        """Blocks that the index knows."""
        return sum(map(len, self._shards))

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    # -- references ----------------------------------------------------------------------------------------------------

    def allocate(self) -> BlockId:
        """A block of one's own: a free one, else the oldest cached one, which is evicted."""
        if self.num_free:
            self.num_free -= 1
            if self._freed:
                block = self._freed.pop()
            else:
                block = self._untouched
                self._untouched = block + 1
        else:
            block = self._next[NULL_BLOCK]
            assert block, "taking from an empty pool: room is checked first"
            self._unlink(block)
            self._evict(block, "room")
        self.refs[block] = 1
        self.num_refs += 1
        if self.events.blocks:
            self.events.emit_block(Allocated(block))
        return block

    def share(self, block: BlockId) -> None:
        assert 0 < block <= self.num_blocks, block
        if not self.refs[block]:
            self._unlink(block)
        self.refs[block] += 1
        self.num_refs += 1
        if self.events.blocks:
            self.events.emit_block(Shared(block, self.refs[block]))

    def release(self, block: BlockId) -> None:
        """One reference fewer. The last one leaves a sealed block cached, the newest in line, and frees another."""
        refs = self.refs[block] - 1
        assert refs >= 0, f"block {block} released more often than shared"
        self.refs[block] = refs
        self.num_refs -= 1
        if self.events.blocks:
            self.events.emit_block(Released(block, refs, not refs and self.seal_id[block] != 0))
        if refs:
            return
        if self.seal_id[block]:
            self._link(block)
        else:
            self._freed.append(block)
            self.num_free += 1

    # -- content -------------------------------------------------------------------------------------------------------

    def find(self, key: Key) -> BlockId:
        """The block with this content, `NULL_BLOCK` if there is none."""
        packed = _pack(key)
        return self._shard(packed).get(packed, NULL_BLOCK)

    def key_of(self, block: BlockId) -> Key | None:
        """The content that a block is sealed under."""
        packed = self._packed_of[block]
        return None if packed is None else _unpack(packed)

    def _shard(self, packed: bytes) -> dict[bytes, BlockId]:
        return self._shards[hash(packed) & (len(self._shards) - 1)]

    def seal(self, block: BlockId, key: Key) -> SealId:
        """Make a full block findable. Returns the canonical seal id of its content.

        That is the id of an older equal block, if there is one: then this block is not indexed, becomes free when it
        is released, and its sequence's chain goes on under the older one's id. A block that is sealed already (left
        on the device by a swap, its parent evicted and sealed anew) keeps its seal: it is indexed once.
        """
        packed = _pack(key)
        index = self._shard(packed)
        if other := index.get(packed, NULL_BLOCK):
            return self.seal_id[other]
        if self.seal_id[block]:
            return self.seal_id[block]
        self.last_seal_id = seal_id = self.last_seal_id + 1
        index[packed], self._packed_of[block], self.seal_id[block] = block, packed, seal_id
        self.num_sealed += 1
        if self.events.blocks:
            parent, tokens = key
            self.events.emit_block(Sealed(block, seal_id, 0 if isinstance(parent, bytes) else parent, tokens))
        return seal_id

    def unseal(self, block: BlockId, why: str = "void") -> None:
        """Take back a seal: the content is not what it was to be (a failed step). A cached block becomes free."""
        if not self.refs[block]:
            self._unlink(block)
            self._freed.append(block)
            self.num_free += 1
        self._evict(block, why)

    def sealed_after(self, mark: SealId) -> list[BlockId]:
        """Blocks whose seal is younger than `mark`. Looks at every block: for rare occasions."""
        return [b for b, seal in enumerate(self.seal_id) if seal > mark]

    def evict_all_cached(self) -> None:
        """Evict all cached blocks."""
        while block := self._next[NULL_BLOCK]:
            self.unseal(block, "reset")

    def cached(self) -> Iterator[BlockId]:
        """The cached blocks, the next to be evicted first."""
        block = self._next[NULL_BLOCK]
        while block:
            yield block
            block = self._next[block]

    def _evict(self, block: BlockId, why: str) -> None:
        if self.events.blocks:
            self.events.emit_block(Evicted(block, self.seal_id[block], why, self.num_cached))
        packed = self._packed_of[block]
        assert packed is not None, f"block {block} is not sealed"
        del self._shard(packed)[packed]
        self._packed_of[block], self.seal_id[block] = None, 0
        self.num_evicted += 1

    def _link(self, block: BlockId) -> None:
        newest = self._prev[NULL_BLOCK]
        self._next[newest], self._prev[block] = block, newest
        self._next[block], self._prev[NULL_BLOCK] = NULL_BLOCK, block
        self.num_cached += 1

    def _unlink(self, block: BlockId) -> None:
        older, newer = self._prev[block], self._next[block]
        self._next[older], self._prev[newer] = newer, older
        self.num_cached -= 1


def _pack(key: Key) -> bytes:
    """Eight bytes that are the parent, or below 0 and tell the length of the salt behind them; then the tokens."""
    parent, tokens = key
    if isinstance(parent, bytes):
        return (-1 - len(parent)).to_bytes(8, "little", signed=True) + parent + tokens
    return parent.to_bytes(8, "little", signed=True) + tokens


def _unpack(packed: bytes) -> Key:
    parent = int.from_bytes(packed[:8], "little", signed=True)
    if parent >= 0:
        return parent, packed[8:]
    end = 8 - 1 - parent
    return packed[8:end], packed[end:]
