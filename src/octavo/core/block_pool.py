"""The pool of device blocks: reference counts, the LRU queue of cached blocks, and the prefix index. And swap space.

Every block is in one of three states:

    used    refs > 0
    cached  refs == 0, sealed: in the index, evicted in order of release, the oldest first
    free    refs == 0, no content

A window group's block is sealed under the full block over the same positions. Its key is that block's seal id and the
group's number. A lookup finds it through the full block alone, so it is unsealed when the full block is evicted.

A checkpoint is the state of a recurrent model after the positions of some full blocks. Its blocks are sealed in a
chain: the head under the last of those full blocks, each other one under the block before it. Their seal ids follow one
another. They are used, cached and unsealed together. Of cached ones the head is the oldest, and takes the others along:

    full block  <-  head  <-  block  <-  block

All state is in flat arrays with O(1) operations, without an object per block. Free blocks are a stack and a high-water
mark, so a new pool of a million blocks fills no list. The LRU links are two arrays with the null block as sentinel.

The index is split into many small dicts with bytes as keys. A single dict would pause everything for 50 ms when it
grows past half a million entries. Tuples as keys would make the garbage collector visit every entry: another 30 ms.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TypeAlias

from octavo.core.events import Allocated, EventStream, Evicted, Released, Sealed, Shared
from octavo.core.snapshot import Fields, State
from octavo.core.types import NULL_BLOCK, BlockId, HostBlockId, SealId

Key: TypeAlias = tuple[SealId | bytes, bytes]
"""The content of a block: the seal id of the previous block, or the salt for a first block; and its tokens as int32.
It is exact, not a digest."""

GROUP_KEY_BYTES = 9
"""Bytes of a packed `group_key`. Those of other keys are a multiple of 4 longer than their salt, and at least 12."""
BLOCKS_PER_SHARD = 4096
"""Blocks per dict of the index. Growing a dict of this size takes about 0.2 ms."""


class BlockPool:
    """`num_blocks` usable blocks with the ids 1 to num_blocks, for the full group, `num_windows` window groups and
    states of `state_blocks` blocks.

    num_finders  of each head of a checkpoint: sequences that began with it; 2 more where sequences part
    mates        of the heads of two checkpoints of one request, at the end of its prompt and in its output: the other.
                 Its session goes on from one of them

    Misuse, such as a double release or an id out of range, is a bug of the core and fails an assertion.
    """

    __slots__ = (
        "_freed",
        "_next",
        "_num_below",
        "_packed_of",
        "_prev",
        "_shards",
        "_untouched",
        "events",
        "last_seal_id",
        "mates",
        "num_blocks",
        "num_cached",
        "num_evicted",
        "num_finders",
        "num_free",
        "num_refs",
        "num_sealed",
        "num_windows",
        "refs",
        "seal_id",
        "state_blocks",
    )

    SAVED = Fields(
        "refs seal_id _prev _next _untouched num_free num_cached num_refs last_seal_id num_sealed num_evicted "
        "num_finders mates freed=_freed"
    )

    def __init__(
        self, num_blocks: int, events: EventStream | None = None, *, num_windows: int = 0, state_blocks: int = 0
    ) -> None:
        n = num_blocks + 1
        self.num_blocks = num_blocks
        self.num_windows, self.state_blocks = num_windows, state_blocks
        self._num_below = num_windows + (state_blocks > 0)  # blocks that may be sealed under a full one
        self.events = events or EventStream()
        self.refs = array("i", bytes(4 * n))
        self.seal_id = array("q", bytes(8 * n))  # 0: not sealed
        self._prev, self._next = array("i", bytes(4 * n)), array("i", bytes(4 * n))  # oldest cached at _next[0]
        self._packed_of: list[bytes | None] = [None] * n
        num_shards = 1 << (num_blocks // BLOCKS_PER_SHARD).bit_length()
        self._shards: list[dict[bytes, BlockId]] = [{} for _ in range(num_shards)]
        self._untouched = 1  # high-water mark: ids from here on were never allocated
        self._freed: list[BlockId] = []
        self.num_free, self.num_cached = num_blocks, 0
        self.num_refs = 0  # references to all blocks; num_refs - num_used is the number of blocks that sharing saves
        self.last_seal_id = 0
        self.num_sealed, self.num_evicted = 0, 0
        self.num_finders, self.mates = (array("i", bytes(4 * n if state_blocks else 0)) for _ in range(2))

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can return: free and cached ones."""
        return self.num_free + self.num_cached

    @property
    def num_indexed(self) -> int:
        """Blocks in the index."""
        return sum(map(len, self._shards))

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    # -- references ----------------------------------------------------------------------------------------------------

    def allocate(self) -> BlockId:
        """Return a block with one reference: a free one, else the oldest cached one, which is evicted."""
        if self.num_free:
            self.num_free -= 1
            if self._freed:
                block = self._freed.pop()
            else:
                block = self._untouched
                self._untouched = block + 1
        else:
            block = self._next[NULL_BLOCK]
            assert block, "the pool is empty: callers check `num_available` first"
            self._unlink(block)
            self._evict(block, "room")
        self.refs[block] = 1
        self.num_refs += 1
        if self.events.blocks:
            self.events.emit_block(Allocated(block))
        return block

    def share(self, block: BlockId) -> None:
        """Add a reference. A cached block leaves the LRU queue."""
        assert 0 < block <= self.num_blocks, block
        if not self.refs[block]:
            self._unlink(block)
        self.refs[block] += 1
        self.num_refs += 1
        if self.events.blocks:
            self.events.emit_block(Shared(block, self.refs[block]))

    def release(self, block: BlockId, *, as_oldest: bool = False) -> None:
        """Remove a reference. Without references a sealed block becomes the newest cached one, or the oldest if it is
        worth less than all others; any other block becomes free."""
        refs = self.refs[block] - 1
        assert refs >= 0, f"block {block} released more often than shared"
        self.refs[block] = refs
        self.num_refs -= 1
        if self.events.blocks:
            self.events.emit_block(Released(block, refs, not refs and self.seal_id[block] != 0))
        if refs:
            return
        if self.seal_id[block]:
            if as_oldest:
                self._link(block, self._next[NULL_BLOCK])
            else:
                self._link(block)
        else:
            self._freed.append(block)
            self.num_free += 1

    # -- content -------------------------------------------------------------------------------------------------------

    def find(self, key: Key) -> BlockId:
        """Return the block with this content, `NULL_BLOCK` if there is none."""
        packed = pack_key(key)
        return self._shard(packed).get(packed, NULL_BLOCK)

    def key_of(self, block: BlockId) -> Key | None:
        """Return the content that the block is sealed with, None if it is not sealed."""
        packed = self._packed_of[block]
        return None if packed is None else unpack_key(packed)

    def _shard(self, packed: bytes) -> dict[bytes, BlockId]:
        return self._shards[hash(packed) & (len(self._shards) - 1)]

    def seal(self, block: BlockId, key: Key) -> SealId:
        """Add a full block to the index and return the canonical seal id of its content.

        If an older block has the same content, its id is returned and this block is not indexed: it becomes free when
        it is released, and the chain of its sequence continues with the older id. A block that is already sealed keeps
        its seal and its one index entry. That happens to a block that a swap left on the device, when its parent was
        evicted and sealed again.
        """
        packed = pack_key(key)
        index = self._shard(packed)
        if other := index.get(packed, NULL_BLOCK):
            if self._num_below and not self.refs[other]:  # what is sealed under it from now on needs it
                self.renew(other)
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
        """Remove a block from the index, for example because its step failed. A cached block becomes free."""
        if not self.refs[block]:
            self._unlink(block)
            self._freed.append(block)
            self.num_free += 1
        self._evict(block, why)

    def renew(self, block: BlockId) -> None:
        """Make a cached block the newest."""
        self._unlink(block)
        self._link(block)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def find_state(self, seal_id: SealId) -> list[BlockId]:
        """Return the checkpoint under the full block with this seal id, its head last; [] if there is none."""
        head = self.find(group_key(seal_id, self.num_windows))
        return self._blocks_of(head) if head else []

    def _blocks_of(self, head: BlockId) -> list[BlockId]:
        """Return the blocks of a checkpoint, its head last."""
        seal_id = self.seal_id[head]
        parents = range(seal_id + self.state_blocks - 2, seal_id - 1, -1)
        return [*(self.find(group_key(parent, self.num_windows)) for parent in parents), head]

    def seal_state(self, blocks: list[BlockId], seal_id: SealId, *, parts: bool) -> None:
        """Seal a state, its head last, under the full block with this seal id. Does nothing if there is a checkpoint.

        parts  sequences part here: no single one goes beyond it
        """
        if self.find(group_key(seal_id, self.num_windows)):
            return
        *others, head = blocks
        self.num_finders[head] = 2 * parts
        seal_id = self.seal(head, group_key(seal_id, self.num_windows))
        for block in reversed(others):  # as `seal` does it; 192 blocks are not rare
            parent, tokens = seal_id, bytes((self.num_windows,))
            packed = pack_key((parent, tokens))
            self.last_seal_id = seal_id = parent + 1
            self._shard(packed)[packed], self._packed_of[block], self.seal_id[block] = block, packed, seal_id
            if self.events.blocks:
                self.events.emit_block(Sealed(block, seal_id, parent, tokens))
        self.num_sealed += len(others)

    def pass_state(self, head: BlockId) -> None:
        """Let a checkpoint be evicted before all else, if it is cached and at most one sequence began with it: that one
        has left a later one."""
        if not self.refs[head] and self.num_finders[head] < 2:
            for block in self._blocks_of(head):  # the head last: it becomes the oldest
                self._unlink(block)
                self._link(block, self._next[NULL_BLOCK])

    def mate(self, head: BlockId, other: BlockId) -> None:
        """Make two checkpoints mates. Former ones have none then."""
        for block in (head, other):
            self.mates[self.mates[block]] = NULL_BLOCK
        self.mates[head], self.mates[other] = other, head

    def sealed_after(self, mark: SealId) -> list[BlockId]:
        """Return the blocks whose seal id is greater than `mark`, heads of checkpoints before their other blocks.

        Scans the whole pool: for rare events only.
        """
        newer = [block for block, seal in enumerate(self.seal_id) if seal > mark]
        return sorted(newer, key=self.seal_id.__getitem__) if self.state_blocks else newer

    def evict_all_cached(self) -> None:
        """Evict all cached blocks."""
        while block := self._next[NULL_BLOCK]:
            self.unseal(block, "reset")

    def cached(self) -> Iterator[BlockId]:
        """Yield the cached blocks in order of eviction."""
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
        seal_id = self.seal_id[block]
        self._packed_of[block], self.seal_id[block] = None, 0
        self.num_evicted += 1
        if len(packed) != GROUP_KEY_BYTES:
            for group in range(self._num_below):
                if below := self.find(group_key(seal_id, group)):
                    self.unseal(below, why)
        elif packed[-1] == self.num_windows:
            self._evict_others(seal_id, why)
            self.mates[self.mates[block]] = self.mates[block] = NULL_BLOCK

    def _evict_others(self, seal_id: SealId, why: str) -> None:
        """Unseal the blocks of a checkpoint whose head had this seal id."""
        for parent in range(seal_id, seal_id + self.state_blocks - 1):
            packed = pack_key(group_key(parent, self.num_windows))
            block = self._shard(packed).pop(packed)
            if not self.refs[block]:
                self._unlink(block)
                self._freed.append(block)
                self.num_free += 1
            if self.events.blocks:
                self.events.emit_block(Evicted(block, parent + 1, why, self.num_cached))
            self._packed_of[block], self.seal_id[block] = None, 0
        self.num_evicted += self.state_blocks - 1

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> State:
        return self.SAVED.save(self)

    def packed_keys(self) -> list[bytes | None]:
        """The content of each block as `pack_key` returns it, None for a block that is not sealed."""
        return self._packed_of[:]

    def restore(self, state: State, packed_keys: list[bytes | None]) -> None:
        """Take the state of a pool of the same size."""
        self.SAVED.load(self, state)
        self._packed_of = packed_keys[:]
        for block, packed in enumerate(packed_keys):
            if packed is not None:
                self._shard(packed)[packed] = block

    # -- the LRU queue -------------------------------------------------------------------------------------------------

    def _link(self, block: BlockId, newer: BlockId = NULL_BLOCK) -> None:
        """Insert a block before `newer`; by default as the newest."""
        older = self._prev[newer]
        self._next[older], self._prev[block] = block, older
        self._next[block], self._prev[newer] = newer, block
        self.num_cached += 1

    def _unlink(self, block: BlockId) -> None:
        older, newer = self._prev[block], self._next[block]
        self._next[older], self._prev[newer] = newer, older
        self.num_cached -= 1


def group_key(seal_id: SealId, group: int) -> Key:
    """The key of a block under the one with this seal id: a window group's, over the same positions, or a state's."""
    return seal_id, bytes((group,))


def group_of(content: bytes) -> int:
    """The group of a block, from the second part of its key; 0: the full one."""
    return content[0] + 1 if len(content) == 1 else 0


def pack_key(key: Key) -> bytes:
    """A key as bytes: eight bytes for the parent, then the tokens.

    For a first block the eight bytes are -1 - len(salt), and the salt stands between them and the tokens.
    """
    parent, tokens = key
    if isinstance(parent, bytes):
        return (-1 - len(parent)).to_bytes(8, "little", signed=True) + parent + tokens
    return parent.to_bytes(8, "little", signed=True) + tokens


def unpack_key(packed: bytes) -> Key:
    parent = int.from_bytes(packed[:8], "little", signed=True)
    if parent >= 0:
        return parent, packed[8:]
    end = 8 - 1 - parent
    return packed[8:end], packed[end:]


class SwapSpace:
    """`num_blocks` reference-counted blocks of the host, with the ids 1 to num_blocks. None is cached or sealed."""

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
