"""The KV cache manager: all operations of sequences on blocks, over the block pool, the swap space and the rows.

The scheduler first queries whether there is room (`blocks_needed`, `blocks_to_admit`, `find_swap_in_blocks`) and then
acts. A query changes no state. An action after a successful query cannot fail.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from octavo.core.block_pool import BlockPool, Key, SwapSpace
from octavo.core.commands import CommandTee, ResetPrefixCache
from octavo.core.events import Copied, EventStream
from octavo.core.plan import BlockCopy, StepPlan, SwapIn, SwapOut
from octavo.core.request import Request, Sequence, Status
from octavo.core.row_table import RowTable
from octavo.core.snapshot import Fields, Roster, State
from octavo.core.types import NULL_BLOCK, BlockId, HostBlockId, SealId
from octavo.integers import cdiv

NEVER = 1 << 62
"""`Sequence.seal_at` where nothing is sealed."""


class Prefix(NamedTuple):
    """A computed prefix of a sequence: its blocks, the seal ids of the sealed ones, and its length.

    The last block is full, except where the prefix comes from a pin.
    """

    block_ids: list[BlockId]
    seal_ids: list[SealId]
    num_positions: int


class SwapInBlocks(NamedTuple):
    """The blocks that swapping a request in takes."""

    shared_on_device: list[BlockId]  # stayed on the device; shared again
    host_ids: list[HostBlockId]  # copied back
    num_needed: int  # device blocks: the copied ones, and the shared ones that have no user now


@dataclass(frozen=True, slots=True)
class KVStats:
    """Statistics of the KV cache, in blocks unless the name states otherwise.

    num_hits, num_misses   prompt blocks found, or not found, in the prefix cache at a request's first admission
    hit_rate               hits / (hits + misses), 0 before the first lookup
    num_saved_by_sharing   block table entries beyond the first of each used block: blocks that copies would take
    num_unfilled_slots     slots of used blocks without a token; fewer than block_size per sequence
    num_corrupt            swapped-in blocks whose content had changed on the host; they were recomputed
    num_dropped            released by running sequences because they left the attention window
    num_pinned             kept by pins, or reserved for pins that are being computed
    """

    num_blocks: int
    block_size: int
    num_used: int
    num_cached: int
    num_free: int
    num_hits: int
    num_misses: int
    num_hit_tokens: int
    num_queried_tokens: int
    hit_rate: float
    num_saved_by_sharing: int
    num_unfilled_slots: int
    num_sealed: int
    num_evicted: int
    num_copied: int
    num_dropped: int
    num_swapped_out: int
    num_swapped_in: int
    num_corrupt: int
    num_host_blocks: int
    num_host_used: int
    num_pinned: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def common_prefix_length(a: array[int], b: array[int]) -> int:
    """Return the number of equal tokens at the start of `a` and `b`."""
    num = min(len(a), len(b))
    if a[:num] == b[:num]:
        return num
    return next(i for i in range(num) if a[i] != b[i])


class KVCacheManager:
    """Manages blocks of `block_size` tokens: `num_blocks` on the device, `num_host_blocks` in the swap space.

    num_rows          rows of the device's block tables
    attention_window  most keys that a query attends to, its own included, in the layer that attends to the most; 0: all

    All counters of cache events are kept here.
    """

    SAVED = Fields(
        "num_hits num_misses num_hit_tokens num_queried_tokens num_copied num_dropped num_swapped_out "
        "num_swapped_in num_corrupt num_pinned"
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        *,
        num_rows: int = 0,
        enable_prefix_caching: bool = True,
        attention_window: int = 0,
    ) -> None:
        assert num_blocks > 0 and block_size > 0, (num_blocks, block_size)
        assert 0 <= num_host_blocks <= num_blocks, "the swap space is at most as large as the pool"
        self.events = EventStream()
        self.tee = CommandTee()  # the scheduler's commands
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, self.events)
        self.swap_space = SwapSpace(num_host_blocks)
        self.rows = RowTable(num_rows, self.events)
        self.enable_prefix_caching = enable_prefix_caching
        self.attention_window = attention_window
        self.num_hits = self.num_misses = 0
        self.num_hit_tokens = self.num_queried_tokens = 0
        self.num_copied = self.num_dropped = self.num_swapped_out = self.num_swapped_in = self.num_corrupt = 0
        self.pins: dict[str, Sequence] = {}  # pinned prompts by name: computed, blocks kept
        self.num_pinned = 0  # blocks of pins, and blocks reserved for pins that are being computed
        self._holders: dict[Sequence, None] = {}  # sequences with blocks on the device

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def blocks_for(self, num_positions: int) -> int:
        return cdiv(num_positions, self.block_size)

    def blocks_at_max_length(self, num_prompt: int, max_tokens: int, width: int = 1) -> int:
        """Return the blocks that a request holds at its maximum length.

        Its sequences share the full blocks of the prompt and no others. The last token is never computed.
        """
        shared = num_prompt // self.block_size
        return shared + width * (self.blocks_for(num_prompt + max_tokens - 1) - shared)

    @property
    def num_unpinned_blocks(self) -> int:
        """Blocks available to a request that runs alone."""
        return self.pool.num_blocks - self.num_pinned

    def max_output_tokens(self, num_prompt: int, width: int = 1) -> int:
        """Return the largest `max_tokens` that fits: the inverse of `blocks_at_max_length`. Below 1 if none fits."""
        shared = num_prompt // self.block_size
        return (shared + (self.num_unpinned_blocks - shared) // width) * self.block_size - num_prompt + 1

    # -- prefix cache and pins -----------------------------------------------------------------------------------------

    def lookup(self, sequence: Sequence) -> Prefix:
        """Return the longest cached prefix: a run of sealed blocks from the start, or a pin's if that is longer.

        It excludes the last token, which must be computed for its logits.
        """
        if not self._uses_prefix_cache(sequence):
            return self._extend_by_pin(sequence, Prefix([], [], 0))
        num_blocks = (len(sequence.token_ids) - 1) // self.block_size
        return self._extend_by_pin(sequence, self._find_sealed_prefix(sequence, num_blocks))

    def _find_sealed_prefix(self, sequence: Sequence, num_blocks: int) -> Prefix:
        """Return the longest run of sealed blocks from the start, at most `num_blocks`."""
        block_ids: list[BlockId] = []
        seal_ids: list[SealId] = []
        find, seal_id = self.pool.find, self.pool.seal_id
        parent: SealId | bytes = sequence.request.salt
        for i in range(num_blocks):
            block = find((parent, self._tokens_of(sequence, i)))
            if not block:
                break
            parent = seal_id[block]
            block_ids.append(block)
            seal_ids.append(seal_id[block])
        return Prefix(block_ids, seal_ids, len(block_ids) * self.block_size)

    def _extend_by_pin(self, sequence: Sequence, found: Prefix) -> Prefix:
        """Return the prefix that a pin has of the sequence, partial tail included, or `found` if no pin has more.

        pin       | full | full | tail . . |      Where they differ within the tail, the sequence gets a copy of the
        sequence  | same | same | same x y | ...  tail to continue from. A full block is not copied but recomputed.
        """
        size, request, best = self.block_size, sequence.request, found
        if request.sampling_params.skip_reading_prefix_cache:
            return found
        for pin in self.pins.values():
            if pin.request.salt == request.salt:
                num = common_prefix_length(pin.request.prompt_token_ids, sequence.token_ids)
                num = min(num, len(sequence.token_ids) - 1)
                if num < pin.num_computed // size * size:
                    num = num // size * size
                if num > best.num_positions:
                    best = Prefix(pin.block_ids[: self.blocks_for(num)], pin.seal_ids[: num // size], num)
        return best

    def _uses_prefix_cache(self, sequence: Sequence) -> bool:
        """True if the sequence may begin with blocks found in the index."""
        return self.enable_prefix_caching and not sequence.request.sampling_params.skip_reading_prefix_cache

    def next_key(self, sequence: Sequence, seal_ids: list[SealId]) -> Key:
        """Return the key of the block after those of `seal_ids`. The known tokens must fill it."""
        parent = seal_ids[-1] if seal_ids else sequence.request.salt
        return parent, self._tokens_of(sequence, len(seal_ids))

    def is_next_block_in(self, keys: Container[Key], sequence: Sequence, prefix: Prefix) -> bool:
        """True if the first block that `lookup` did not find is in `keys`."""
        found = len(prefix.seal_ids)
        return (
            self._uses_prefix_cache(sequence)
            and found < (len(sequence.token_ids) - 1) // self.block_size
            and (self.next_key(sequence, prefix.seal_ids) in keys)
        )

    def sibling_prefix(self, sequence: Sequence) -> Prefix:
        """Return the longest run of full blocks that an earlier sequence of the same request has in common with this.

        A preempted group is recomputed one sequence at a time and takes these blocks from the sibling itself. The index
        has none of them when prefix caching is off, or where an equal block elsewhere is the canonical one.
        """
        size, tokens = self.block_size, sequence.token_ids
        best = Prefix([], [], 0)
        for sibling in sequence.request.sequences:
            if sibling is sequence:
                break
            max_blocks = min(sibling.num_computed, len(tokens) - 1) // size
            n = 0
            while n < max_blocks and sibling.token_ids[n * size : (n + 1) * size] == tokens[n * size : (n + 1) * size]:
                n += 1
            if n > len(best.block_ids):
                best = Prefix(sibling.block_ids[:n], sibling.seal_ids[:n], n * size)
        return best

    def blocks_to_admit(self, sequence: Sequence, prefix: Prefix) -> int:
        """Return the free or cached blocks that admission takes.

        These are the blocks of all known tokens less the hits, the hits that leave the LRU queue, and a copy of a
        shared tail.
        """
        revived = sum(not self.pool.refs[b] for b in prefix.block_ids)
        copied = prefix.num_positions < len(prefix.block_ids) * self.block_size
        return self.blocks_for(len(sequence.token_ids)) - len(prefix.block_ids) + revived + copied

    def attach(self, sequence: Sequence, prefix: Prefix) -> None:
        """Start the sequence's block table with a prefix that is already computed."""
        assert not sequence.block_ids
        for block in prefix.block_ids:
            self.pool.share(block)
        sequence.block_ids = list(prefix.block_ids)
        sequence.room = len(prefix.block_ids) * self.block_size
        sequence.num_computed = prefix.num_positions
        sequence.request.newest_prefix_seal = max(sequence.request.newest_prefix_seal, *prefix.seal_ids, 0)
        self._holders[sequence] = None
        self._set_seals(sequence, list(prefix.seal_ids))

    def count_lookup(self, sequence: Sequence, prefix: Prefix) -> None:
        self.num_hits += len(prefix.block_ids)
        self.num_misses += self.blocks_for(len(sequence.token_ids)) - len(prefix.block_ids)
        self.num_hit_tokens += prefix.num_positions
        self.num_queried_tokens += len(sequence.token_ids)

    # -- growing and sealing -------------------------------------------------------------------------------------------

    def blocks_needed(self, growth: Iterable[tuple[Sequence, int]], *, swapped: bool = False) -> int:
        """Return the blocks that these sequences together need to compute `count` more positions each.

        A tail that several of them share is copied for each but the last, so references are counted down.
        """
        refs = self.swap_space.refs if swapped else self.pool.refs
        total = 0
        left: dict[BlockId, int] = {}
        for sequence, count in growth:
            held = len(sequence.block_ids)
            total += max(0, self.blocks_for(sequence.num_computed + count) - held)
            tail = sequence.num_computed // self.block_size
            if tail < held and (block := sequence.block_ids[tail]) > 0:
                sharers = left.get(block, refs[block])
                if sharers > 1:
                    total += 1
                    left[block] = sharers - 1
        return total

    def grow(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        """Extend the sequence's block table for `count` more positions. A shared tail block is copied first.

        blocks  | full | full | tail . . |  new  |  new  |
                                ^ num_computed        ^ num_computed + count
        """
        tail, held = sequence.num_computed // self.block_size, len(sequence.block_ids)
        if tail < held and self.pool.refs[src := sequence.block_ids[tail]] > 1:
            self._copy_on_write(sequence, tail, src, plan)
        num_new = self.blocks_for(sequence.num_computed + count) - held
        if num_new > 0:
            allocate = self.pool.allocate
            new = [allocate() for _ in range(num_new)]
            sequence.block_ids += new
            sequence.room += num_new * self.block_size
            self.rows.write(sequence, held, new, plan)

    def shrink(self, sequence: Sequence, count: int) -> None:
        """Take back the last `count` planned positions: their drafts were rejected.

        blocks  | full | full | kept . . | x x x x | x x     Whole blocks after `num_computed` are released, in the tier
                                    ^ num_computed after it  where the request is. They were never shared nor sealed.

        Does nothing for a waiting request: it has no blocks, and is computed again from its known tokens.
        """
        if sequence.request.status is Status.WAITING:
            return
        sequence.num_computed -= count
        num_kept = self.blocks_for(sequence.num_computed)
        if num_kept < len(sequence.block_ids):
            tier = self.swap_space if sequence.request.status is Status.SWAPPED else self.pool
            for block in reversed(sequence.block_ids[num_kept:]):
                assert tier.refs[block] == 1, (sequence, block)
                tier.release(block)
            del sequence.block_ids[num_kept:]
            sequence.room = num_kept * self.block_size

    def _copy_on_write(self, sequence: Sequence, index: int, src: BlockId, plan: StepPlan) -> None:
        """Copy a shared tail block for its writer. The last sharer writes in place, because it finds refs at 1."""
        dst = sequence.block_ids[index] = self.pool.allocate()
        self.pool.release(src)
        plan.copies.append(BlockCopy(src, dst))
        self.num_copied += 1
        if self.events.blocks:
            self.events.emit_block(Copied(src, dst))
        self.rows.write(sequence, index, [dst], plan)

    def drop_out_of_window(self, sequence: Sequence, plan: StepPlan) -> None:
        """Release the leading blocks that no position from the next query on attends to. Their entries become null.

        blocks  | null | null | . . k k | k k k k | q       q: the next query, at `num_computed` or, if drafts in flight
                                 ^ q - attention_window + 1    are rejected, up to `num_unverified` positions before it

        An earlier plan in flight may still read them safely: their next owner writes them in a later plan. A block that
        is not sealed yet is kept until it is.
        """
        if sequence.request.pin:
            return
        first, size = sequence.num_dropped, self.block_size
        end = (sequence.num_computed - sequence.num_unverified - self.attention_window + 1) // size
        if self.enable_prefix_caching:
            end = min(end, len(sequence.seal_ids))
        if end <= first:
            return
        for block in reversed(sequence.block_ids[first:end]):  # tail first: the head is evicted last
            self.pool.release(block)
        nulls = [NULL_BLOCK] * (end - first)
        sequence.block_ids[first:end] = nulls
        sequence.num_dropped = end
        self.num_dropped += end - first
        self.rows.write(sequence, first, nulls, plan)

    def seal(self, sequence: Sequence) -> None:
        """Seal the leading blocks whose tokens are all known to the host and computed or planned on the device.

        A stop token does not count: the device may have stopped before it wrote that position.
        """
        if not self.enable_prefix_caching:
            return
        known = len(sequence.token_ids) - (sequence.stop_token is not None)
        num_full = min(known, sequence.num_computed) // self.block_size
        seal_ids = sequence.seal_ids
        for i in range(len(seal_ids), num_full):
            seal_ids.append(self.pool.seal(sequence.block_ids[i], self.next_key(sequence, seal_ids)))
        self._set_seals(sequence, seal_ids)

    def unseal_after(self, mark: SealId) -> list[Sequence]:
        """Remove every seal newer than `mark`. Returns the sequences that had one of them.

        A sequence that continues seals its blocks again. It cannot seal blocks that it dropped from the attention
        window: its chain continues after them, under a parent that is no longer in the index.
        """
        for block in self.pool.sealed_after(mark):
            self.pool.unseal(block)
        affected = []
        for sequence in self._holders:
            ids = sequence.seal_ids
            num_valid = next((i for i, seal in enumerate(ids) if seal > mark), len(ids))
            if num_valid < len(ids):
                self._set_seals(sequence, ids[: max(num_valid, sequence.num_dropped)])
                affected.append(sequence)
        return affected

    def _set_seals(self, sequence: Sequence, seal_ids: list[SealId]) -> None:
        sequence.seal_ids = seal_ids
        sequence.seal_at = (len(seal_ids) + 1) * self.block_size if self.enable_prefix_caching else NEVER

    def _tokens_of(self, sequence: Sequence, index: int) -> bytes:
        size = self.block_size
        return sequence.token_ids[index * size : (index + 1) * size].tobytes()

    # -- sharing and releasing -----------------------------------------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all blocks of `parent`, the partial tail included, in the tier where the request is."""
        swapped = parent.request.status is Status.SWAPPED
        child.num_computed, child.block_ids, child.room = parent.num_computed, list(parent.block_ids), parent.room
        child.num_dropped = parent.num_dropped
        self._set_seals(child, list(parent.seal_ids))
        tier = self.swap_space if swapped else self.pool
        for block in child.block_ids:
            if block > 0:
                tier.share(block)
        if child.block_ids and not swapped:
            self._holders[child] = None

    def free(self, sequence: Sequence) -> None:
        """Release the sequence's blocks, the tail first so that the head is evicted last. Idempotent."""
        tier = self.swap_space if sequence.request.status is Status.SWAPPED else self.pool
        for block in reversed(sequence.block_ids):
            if block > 0:
                tier.release(block)
        sequence.block_ids, sequence.room, sequence.num_computed, sequence.num_dropped = [], 0, 0, 0
        self._holders.pop(sequence, None)
        self._set_seals(sequence, [])

    def pin(self, sequence: Sequence) -> None:
        """Keep the blocks of a computed prompt, for requests that begin with it, until `unpin`."""
        assert sequence.num_computed == len(sequence.request.prompt_token_ids), sequence
        self.pins[sequence.request.request_id] = sequence

    def unpin(self, name: str) -> int:
        """Release a pin and return its number of blocks. Running requests that began with it keep theirs."""
        sequence = self.pins.pop(name)
        num_blocks = len(sequence.block_ids)
        self.num_pinned -= num_blocks
        self.free(sequence)
        return num_blocks

    def discard(self, sequence: Sequence) -> None:
        """Unseal the blocks of a sequence with invalid values, both those it uses alone and those it left in the cache.

        Cached ones are all of its blocks after a preemption, and those it dropped from the attention window while it
        runs. Unlike `lookup`, the search ignores `skip_reading_prefix_cache` and includes the last full block.
        """
        held = dict.fromkeys(sequence.block_ids if sequence.request.status is Status.RUNNING else ())
        cached = self._find_sealed_prefix(sequence, len(sequence.token_ids) // self.block_size).block_ids
        for block in held | dict.fromkeys(cached):
            if self.pool.refs[block] == (block in held) and self.pool.seal_id[block]:
                self.pool.unseal(block)

    def reset_prefix_cache(self) -> int:
        """Evict every cached block and return their number. Blocks in use stay in the index."""
        if self.tee.active:
            self.tee.emit(ResetPrefixCache())
        num_cached = self.pool.num_cached
        self.pool.evict_all_cached()
        return num_cached

    def count_private_blocks(self, request: Request) -> tuple[int, int]:
        """Return the blocks that preempting a running request would free, and the positions in them."""
        private, _ = self._split_blocks(request)
        return len(private), sum(private.values())

    def _split_blocks(self, request: Request) -> tuple[dict[BlockId, int], dict[BlockId, SealId]]:
        """Split a request's distinct blocks in two.

        Returns its private blocks with the positions in each, and the sealed blocks that other requests use too with
        their seal ids.
        """
        pool, size = self.pool, self.block_size
        refs_within: dict[BlockId, int] = {}
        filled: dict[BlockId, int] = {}
        for sequence in request.sequences:
            for i in range(sequence.num_dropped, len(sequence.block_ids)):
                block = sequence.block_ids[i]
                refs_within[block] = refs_within.get(block, 0) + 1
                filled[block] = min(size, sequence.num_computed - i * size)  # the same for every sharer
        shared = {b: pool.seal_id[b] for b, n in refs_within.items() if pool.seal_id[b] and pool.refs[b] > n}
        return {b: n for b, n in filled.items() if b not in shared}, shared

    # -- the swap space ------------------------------------------------------------------------------------------------

    def swap_out(self, request: Request, plan: StepPlan) -> bool:
        """Move a running request to the host. Returns False, without any change, if the swap space has no room for it.

        Each distinct block moves once, and its references are counted again on the host. A sealed block that other
        requests use too stays on the device at no cost. The request holds no reference to it, only its seal id, which
        shows at swap-in whether the block is still the same.
        """
        pool = self.pool
        private, shared = self._split_blocks(request)
        if len(private) > self.swap_space.num_free:
            return False
        moved: dict[BlockId, HostBlockId] = {}
        for sequence in request.sequences:
            dropped, old = sequence.block_ids[: sequence.num_dropped], sequence.block_ids[sequence.num_dropped :]
            sequence.block_ids = dropped + [-b if b in shared else self._to_host(b, moved) for b in old]
            for block in reversed(old):
                pool.release(block)
            self._holders.pop(sequence, None)
        plan.swap_outs += [SwapOut(src, dst) for src, dst in moved.items()]
        self.num_swapped_out += len(moved)
        request.shared_on_device = shared
        return True

    def _to_host(self, block: BlockId, moved: dict[BlockId, HostBlockId]) -> HostBlockId:
        if block in moved:
            self.swap_space.share(moved[block])
        else:
            moved[block] = self.swap_space.allocate()
        return moved[block]

    def find_swap_in_blocks(self, request: Request) -> SwapInBlocks | None:
        """Return the blocks that swapping in takes, None if a block shared on the device was evicted.

        The test is exact: seal ids are never used twice.
        """
        pool = self.pool
        host_ids: dict[HostBlockId, None] = {}
        for sequence in request.sequences:
            for block in sequence.block_ids:
                if block > 0:
                    host_ids[block] = None
        shared = request.shared_on_device
        if any(pool.seal_id[b] != seal for b, seal in shared.items()):
            return None
        revived = sum(not pool.refs[b] for b in shared)
        return SwapInBlocks(list(shared), list(host_ids), len(host_ids) + revived)

    def swap_in(self, request: Request, found: SwapInBlocks, plan: StepPlan) -> None:
        """Move a swapped request back. Blocks shared on the device come first: allocation might evict them."""
        pool, host = self.pool, self.swap_space
        for sequence in request.sequences:
            for block in sequence.block_ids:
                if block < 0:
                    pool.share(-block)
        to = {h: pool.allocate() for h in found.host_ids}
        fresh = set(found.host_ids)
        plan.swap_ins += [SwapIn(src, dst) for src, dst in to.items()]
        self.num_swapped_in += len(to)
        for sequence in request.sequences:
            num_kept = 0
            table: list[BlockId] = []
            for i, block in enumerate(sequence.block_ids):
                if block <= 0:  # shared on the device, or null
                    table.append(-block)
                    num_kept += i == num_kept
                    continue
                if block in fresh:
                    fresh.remove(block)  # `allocate` counted the first reference
                else:
                    pool.share(to[block])
                host.release(block)
                table.append(to[block])
            sequence.block_ids = table
            self._holders[sequence] = None
            self._set_seals(sequence, sequence.seal_ids[:num_kept])  # swapped-in blocks are sealed again
        request.shared_on_device = {}

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def settings(self) -> State:
        """The arguments that the manager is made with."""
        return {
            "num_blocks": self.pool.num_blocks,
            "block_size": self.block_size,
            "num_host_blocks": self.swap_space.num_blocks,
            "num_rows": self.rows.num_rows,
            "enable_prefix_caching": self.enable_prefix_caching,
            "attention_window": self.attention_window,
        }

    @classmethod
    def from_settings(cls, settings: State) -> KVCacheManager:
        return cls(
            settings["num_blocks"],
            settings["block_size"],
            settings["num_host_blocks"],
            num_rows=settings["num_rows"],
            enable_prefix_caching=settings["enable_prefix_caching"],
            attention_window=settings["attention_window"],
        )

    def snapshot(self, roster: Roster) -> State:
        return {
            "pool": self.pool.snapshot(),
            "keys": self.pool.packed_keys(),
            "host": self.swap_space.snapshot(),
            "free_rows": self.rows.snapshot(),
            "cache": self.SAVED.save(self),
            "holders": roster.indices(self._holders),
            "pins": roster.indices(self.pins.values()),
        }

    def restore(self, state: State, roster: Roster) -> None:
        """Take the state of a manager with the same settings."""
        self.pool.restore(state["pool"], state["keys"])
        self.swap_space.restore(state["host"])
        self.rows.restore(state["free_rows"])
        self.SAVED.load(self, state["cache"])
        self._holders = dict.fromkeys(roster.sequences_at(state["holders"]))
        self.pins = {seq.request.request_id: seq for seq in roster.sequences_at(state["pins"])}

    # -- statistics ----------------------------------------------------------------------------------------------------

    def counters(self) -> tuple[int, int, int, int, int, int, int]:
        """Return the counters whose increase a `Step` event carries.

        They are hits, misses, evicted, copied, swapped out, swapped in and sealed blocks.
        """
        pool = self.pool
        return (
            self.num_hits,
            self.num_misses,
            pool.num_evicted,
            self.num_copied,
            self.num_swapped_out,
            self.num_swapped_in,
            pool.num_sealed,
        )

    def stats(self) -> KVStats:
        pool, looked_up = self.pool, self.num_hits + self.num_misses
        filled: dict[BlockId, int] = {}  # partly filled blocks; a shared tail counts once
        for s in self._holders:
            if s.num_computed < s.room:
                filled[s.block_ids[-1]] = max(filled.get(s.block_ids[-1], 0), s.num_computed % self.block_size)
        return KVStats(
            num_blocks=pool.num_blocks,
            block_size=self.block_size,
            num_used=pool.num_used,
            num_cached=pool.num_cached,
            num_free=pool.num_free,
            num_hits=self.num_hits,
            num_misses=self.num_misses,
            num_hit_tokens=self.num_hit_tokens,
            num_queried_tokens=self.num_queried_tokens,
            hit_rate=self.num_hits / looked_up if looked_up else 0.0,
            num_saved_by_sharing=pool.num_refs - pool.num_used,
            num_unfilled_slots=len(filled) * self.block_size - sum(filled.values()),
            num_sealed=pool.num_sealed,
            num_evicted=pool.num_evicted,
            num_copied=self.num_copied,
            num_dropped=self.num_dropped,
            num_swapped_out=self.num_swapped_out,
            num_swapped_in=self.num_swapped_in,
            num_corrupt=self.num_corrupt,
            num_host_blocks=self.swap_space.num_blocks,
            num_host_used=self.swap_space.num_used,
            num_pinned=self.num_pinned,
        )
