"""Everything that a sequence does to blocks: the one facade over the pool, the swap space and the rows.

The scheduler asks first whether there is room (`blocks_needed`, `blocks_to_admit`, `find_swap_in_blocks`), then acts. A
question changes nothing, and an action that was asked about cannot fail: all or nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from octavo.core.block_pool import BlockPool, Key
from octavo.core.events import Copied, EventStream
from octavo.core.plan import BlockCopy, StepPlan, SwapIn, SwapOut
from octavo.core.request import Request, Sequence, Status
from octavo.core.row_table import RowTable
from octavo.core.swap_space import SwapSpace
from octavo.core.types import NULL_BLOCK, BlockId, HostBlockId, SealId

NEVER = 1 << 62
"""`Sequence.seal_at` where nothing is sealed."""


class Prefix(NamedTuple):
    """Blocks that hold the beginning of a sequence, the seal ids of those that are sealed, and how long it is: the last
    block is full, but for that of a pin."""

    block_ids: list[BlockId]
    seal_ids: list[SealId]
    num_positions: int


class SwapInBlocks(NamedTuple):
    """What bringing a request back takes."""

    shared_on_device: list[BlockId]  # still on the device, to be shared again
    host_ids: list[HostBlockId]  # to be copied back
    num_needed: int  # blocks: those copied, and those left behind that are in no use now


@dataclass(frozen=True, slots=True)
class KVStats:
    """The state of the cache, in blocks unless a name says otherwise.

    num_hits, num_misses   blocks of prompts found in the prefix cache at first admission, and not found
    hit_rate               hits / (hits + misses), 0 when nothing was looked up
    num_saved_by_sharing   table entries beyond the first of each used block: what a copy for everybody would take more
    num_unfilled_slots     slots of used blocks that hold no token (yet); fewer than block_size a sequence
    num_corrupt            came back from the host with another content than they left with, and were recomputed
    num_dropped            given up by sequences that run on, behind the attention window
    num_pinned             kept by pins, or for those that are being computed
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
    """How many tokens they have in common at the beginning."""
    num = min(len(a), len(b))
    if a[:num] == b[:num]:
        return num
    return next(i for i in range(num) if a[i] != b[i])


class KVCacheManager:
    """Blocks of `block_size` tokens: `num_blocks` on the device, `num_host_blocks` in the swap space.

    `num_rows` are the lines of the device's tables. `attention_window` is the number of keys that a query sees at most,
    its own included, in the layer that sees the most; 0: all. Counters of what happened are kept here and nowhere else.
    """

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
        assert 0 <= num_host_blocks <= num_blocks, "the swap space is never larger than the pool"
        self.events = EventStream()
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, self.events)
        self.swap_space = SwapSpace(num_host_blocks)
        self.rows = RowTable(num_rows, self.events)
        self.enable_prefix_caching = enable_prefix_caching
        self.attention_window = attention_window
        self.num_hits = self.num_misses = 0
        self.num_hit_tokens = self.num_queried_tokens = 0
        self.num_copied = self.num_dropped = self.num_swapped_out = self.num_swapped_in = self.num_corrupt = 0
        self.pins: dict[str, Sequence] = {}  # parked: their prompts are computed, and their blocks stay
        self.num_pinned = 0  # blocks of pins, and of those to come
        self._holders: dict[Sequence, None] = {}  # sequences with blocks on the device

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def blocks_at_max_length(self, num_prompt: int, max_tokens: int, width: int = 1) -> int:
        """Blocks of a request alone at its longest. Its sequences share the prompt's full blocks and no more; the last
        token is never computed."""
        shared = num_prompt // self.block_size
        return shared + width * (self.blocks_for(num_prompt + max_tokens - 1) - shared)

    @property
    def num_unpinned_blocks(self) -> int:
        """Blocks that a request may have when it is alone."""
        return self.pool.num_blocks - self.num_pinned

    def max_output_tokens(self, num_prompt: int, width: int = 1) -> int:
        """The largest `max_tokens` that fits: the inverse of `blocks_at_max_length`. Below 1 when nothing does."""
        shared = num_prompt // self.block_size
        return (shared + (self.num_unpinned_blocks - shared) // width) * self.block_size - num_prompt + 1

    # -- prefixes ------------------------------------------------------------------------------------------------------

    def lookup(self, sequence: Sequence) -> Prefix:
        """The longest run of sealed blocks from the start, or what a pin has of it if that is longer.

        It leaves at least one token to compute, for its logits.
        """
        if not self._uses_prefix_cache(sequence):
            return self._extend_by_pin(sequence, Prefix([], [], 0))
        num_blocks = (len(sequence.token_ids) - 1) // self.block_size
        return self._extend_by_pin(sequence, self._find_sealed_prefix(sequence, num_blocks))

    def _find_sealed_prefix(self, sequence: Sequence, num_blocks: int) -> Prefix:
        """The longest run of sealed blocks from the start, so many at most."""
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
        """What a pin has of it, the partial tail included, or what was found if that is no less.

        pin       | full | full | tail . . |      Where they part within the tail, the sequence gets a copy of it, to
        sequence  | same | same | same x y | ...  write on from there; of a full block never: that is computed anew.
        """
        size, request, best = self.block_size, sequence.request, found
        if request.sampling_params.skip_reading_prefix_cache:
            return found
        for pin in self.pins.values():
            if pin.request.salt == request.salt:
                num = min(
                    common_prefix_length(pin.request.prompt_token_ids, sequence.token_ids), len(sequence.token_ids) - 1
                )
                if num < pin.num_computed // size * size:
                    num = num // size * size
                if num > best.num_positions:
                    best = Prefix(pin.block_ids[: self.blocks_for(num)], pin.seal_ids[: num // size], num)
        return best

    def _uses_prefix_cache(self, sequence: Sequence) -> bool:
        """Whether it may begin with blocks found in the index."""
        return self.enable_prefix_caching and not sequence.request.sampling_params.skip_reading_prefix_cache

    def next_key(self, sequence: Sequence, seal_ids: list[SealId]) -> Key:
        """The content of the block after those of `seal_ids`; the known tokens fill it."""
        parent = seal_ids[-1] if seal_ids else sequence.request.salt
        return parent, self._tokens_of(sequence, len(seal_ids))

    def is_next_block_in(self, keys: Container[Key], sequence: Sequence, prefix: Prefix) -> bool:
        """Whether the block that a lookup missed first is among these."""
        found = len(prefix.seal_ids)
        return (
            self._uses_prefix_cache(sequence)
            and found < (len(sequence.token_ids) - 1) // self.block_size
            and (self.next_key(sequence, prefix.seal_ids) in keys)
        )

    def sibling_prefix(self, sequence: Sequence) -> Prefix:
        """The longest run of full blocks that an earlier sequence of the same request has computed and this one shares.

        A request of several sequences is rebuilt one by one with these, straight from the sibling: through the index
        it would find nothing with the prefix cache off, or where an equal block elsewhere is the canonical one.
        """
        size, tokens = self.block_size, sequence.token_ids
        best = Prefix([], [], 0)
        for sibling in sequence.request.sequences:
            if sibling is sequence:
                break
            most = min(sibling.num_computed, len(tokens) - 1) // size
            n = 0
            while n < most and sibling.token_ids[n * size : (n + 1) * size] == tokens[n * size : (n + 1) * size]:
                n += 1
            if n > len(best.block_ids):
                best = Prefix(sibling.block_ids[:n], sibling.seal_ids[:n], n * size)
        return best

    def blocks_to_admit(self, sequence: Sequence, prefix: Prefix) -> int:
        """Blocks for all its known tokens, less the hits, plus those hits that are in no use now, and the copy of a
        tail that it shares."""
        revived = sum(not self.pool.refs[b] for b in prefix.block_ids)
        copied = prefix.num_positions < len(prefix.block_ids) * self.block_size
        return self.blocks_for(len(sequence.token_ids)) - len(prefix.block_ids) + revived + copied

    def attach(self, sequence: Sequence, prefix: Prefix) -> None:
        """Begin a table with blocks that others computed."""
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
        """Blocks that computing so many more positions of these sequences takes, all of them together.

        A tail that several of them share is copied for each but the last, so the references are counted down.
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
        """Make room to write `count` more positions, the tail included: a shared one is copied first.

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

    def _copy_on_write(self, sequence: Sequence, index: int, src: BlockId, plan: StepPlan) -> None:
        """A writer gets its own copy of a shared tail. The last sharer writes in place: it finds refs at 1."""
        dst = sequence.block_ids[index] = self.pool.allocate()
        self.pool.release(src)
        plan.copies.append(BlockCopy(src, dst))
        self.num_copied += 1
        if self.events.blocks:
            self.events.emit_block(Copied(src, dst))
        self.rows.write(sequence, index, [dst], plan)

    def drop_out_of_window(self, sequence: Sequence, plan: StepPlan) -> None:
        """Give up the leading blocks that no position from `num_computed` on looks at; their entries become null.

        blocks  | null | null | . . k k | k k k k | q       q: the next query    k: keys within the window
                                 ^ num_computed - attention_window + 1

        What an earlier plan in flight still reads there is safe: whoever takes the block writes it in a later plan.
        A block that is yet to be sealed stays until it is.
        """
        if sequence.request.pin:
            return
        first, size = sequence.num_dropped, self.block_size
        unseen = (sequence.num_computed - self.attention_window + 1) // size
        if self.enable_prefix_caching:
            unseen = min(unseen, len(sequence.seal_ids))
        if unseen <= first:
            return
        for block in reversed(sequence.block_ids[first:unseen]):  # a head outlives its tail in the cache
            self.pool.release(block)
        nulls = [NULL_BLOCK] * (unseen - first)
        sequence.block_ids[first:unseen] = nulls
        sequence.num_dropped = unseen
        self.num_dropped += unseen - first
        self.rows.write(sequence, first, nulls, plan)

    def seal(self, sequence: Sequence) -> None:
        """Seal the leading blocks that are full of tokens known here and computed, or planned, on the device.

        A stop token is not counted: the device may have stopped before it wrote that position.
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
        """Take back every seal younger than `mark`. Returns the sequences that counted on one of them.

        A sequence that goes on seals its blocks anew. What it gave up behind the attention window it cannot seal: its
        chain goes on from there, under a parent that is not found any more.
        """
        for block in self.pool.sealed_after(mark):
            self.pool.unseal(block)
        affected = []
        for sequence in self._holders:
            ids = sequence.seal_ids
            good = next((i for i, seal in enumerate(ids) if seal > mark), len(ids))
            if good < len(ids):
                self._set_seals(sequence, ids[: max(good, sequence.num_dropped)])
                affected.append(sequence)
        return affected

    def _set_seals(self, sequence: Sequence, seal_ids: list[SealId]) -> None:
        sequence.seal_ids = seal_ids
        sequence.seal_at = (len(seal_ids) + 1) * self.block_size if self.enable_prefix_caching else NEVER

    def _tokens_of(self, sequence: Sequence, index: int) -> bytes:
        size = self.block_size
        return sequence.token_ids[index * size : (index + 1) * size].tobytes()

    # -- sharing and giving up -----------------------------------------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` shares all of the parent's blocks, the partial tail too, in the tier where the request is now."""
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
        """Release its blocks, the tail first so that a head outlives it in the cache. A second call does nothing."""
        tier = self.swap_space if sequence.request.status is Status.SWAPPED else self.pool
        for block in reversed(sequence.block_ids):
            if block > 0:
                tier.release(block)
        sequence.block_ids, sequence.room, sequence.num_computed, sequence.num_dropped = [], 0, 0, 0
        self._holders.pop(sequence, None)
        self._set_seals(sequence, [])

    def pin(self, sequence: Sequence) -> None:
        """Keep the blocks of a prompt that is computed, for others to begin with, until `unpin`."""
        assert sequence.num_computed == len(sequence.request.prompt_token_ids), sequence
        self.pins[sequence.request.request_id] = sequence

    def unpin(self, name: str) -> int:
        """Give a pin up; how many blocks it kept. Who began with it keeps them."""
        sequence = self.pins.pop(name)
        num_blocks = len(sequence.block_ids)
        self.num_pinned -= num_blocks
        self.free(sequence)
        return num_blocks

    def discard(self, sequence: Sequence) -> None:
        """Its numbers are not to be trusted: take back the seals of what only this sequence uses, and of what it left
        in the cache: after a preemption all of it, while it runs what lies behind the attention window. That is found
        whatever the request itself may read, and up to the last full block, unlike by `lookup`."""
        own = dict.fromkeys(sequence.block_ids if sequence.request.status is Status.RUNNING else ())
        left = self._find_sealed_prefix(sequence, len(sequence.token_ids) // self.block_size).block_ids
        for block in own | dict.fromkeys(left):
            if self.pool.refs[block] == (block in own) and self.pool.seal_id[block]:
                self.pool.unseal(block)

    def reset_prefix_cache(self) -> int:
        """Forget every cached block; returns how many there were. What is in use stays findable."""
        num_cached = self.pool.num_cached
        self.pool.evict_all_cached()
        return num_cached

    def count_private_blocks(self, request: Request) -> tuple[int, int]:
        """Blocks of a running request that go with it when it gives way, and the positions in them."""
        own, _ = self._split_blocks(request)
        return len(own), sum(own.values())

    def _split_blocks(self, request: Request) -> tuple[dict[BlockId, int], dict[BlockId, SealId]]:
        """Its distinct blocks: its own, with the positions in each; and sealed ones that others use too, with seals."""
        pool, size = self.pool, self.block_size
        refs_within: dict[BlockId, int] = {}
        filled: dict[BlockId, int] = {}
        for sequence in request.sequences:
            for i in range(sequence.num_dropped, len(sequence.block_ids)):
                block = sequence.block_ids[i]
                refs_within[block] = refs_within.get(block, 0) + 1
                filled[block] = min(size, sequence.num_computed - i * size)  # whoever shares it has as much in it
        shared = {b: pool.seal_id[b] for b, n in refs_within.items() if pool.seal_id[b] and pool.refs[b] > n}
        return {b: n for b, n in filled.items() if b not in shared}, shared

    # -- the swap space ------------------------------------------------------------------------------------------------

    def swap_out(self, request: Request, plan: StepPlan) -> bool:
        """Move a running request to the host; False, and nothing happened, without room for all of it there.

        Each distinct block moves once, and its references are counted again on the other side. A sealed block with
        owners outside the request stays on the device: it costs nothing there, is not pinned by us, and is remembered
        with its seal id, so that it is known on return whether it is still the same.
        """
        pool = self.pool
        own, stays = self._split_blocks(request)
        if len(own) > self.swap_space.num_free:
            return False
        moved: dict[BlockId, HostBlockId] = {}
        for sequence in request.sequences:
            dropped, old = sequence.block_ids[: sequence.num_dropped], sequence.block_ids[sequence.num_dropped :]
            sequence.block_ids = dropped + [-b if b in stays else self._to_host(b, moved) for b in old]
            for block in reversed(old):
                pool.release(block)
            self._holders.pop(sequence, None)
        plan.swap_outs += [SwapOut(src, dst) for src, dst in moved.items()]
        plan.swapped_requests.append(request)
        self.num_swapped_out += len(moved)
        request.shared_on_device = stays
        return True

    def _to_host(self, block: BlockId, moved: dict[BlockId, HostBlockId]) -> HostBlockId:
        if block in moved:
            self.swap_space.share(moved[block])
        else:
            moved[block] = self.swap_space.allocate()
        return moved[block]

    def find_swap_in_blocks(self, request: Request) -> SwapInBlocks | None:
        """What bringing it back takes; None when a block left behind is gone (seal ids are never used twice: exact)."""
        pool = self.pool
        host_ids: dict[HostBlockId, None] = {}
        for sequence in request.sequences:
            for block in sequence.block_ids:
                if block > 0:
                    host_ids[block] = None
        left = list(request.shared_on_device.items())
        if any(pool.seal_id[b] != seal for b, seal in left):
            return None
        revived = sum(not pool.refs[b] for b, _ in left)
        return SwapInBlocks([b for b, _ in left], list(host_ids), len(host_ids) + revived)

    def swap_in(self, request: Request, found: SwapInBlocks, plan: StepPlan) -> None:
        """Bring it back. What was left behind is shared first: taking blocks might evict it."""
        pool, host = self.pool, self.swap_space
        for sequence in request.sequences:
            for block in sequence.block_ids:
                if block < 0:
                    pool.share(-block)
        to = {h: pool.allocate() for h in found.host_ids}
        fresh = set(found.host_ids)
        plan.swap_ins += [SwapIn(src, dst) for src, dst in to.items()]
        plan.swapped_requests.append(request)
        plan.swap_in_requests.update(dict.fromkeys(to, request))
        self.num_swapped_in += len(to)
        for sequence in request.sequences:
            num_kept = 0
            table: list[BlockId] = []
            for i, block in enumerate(sequence.block_ids):
                if block <= 0:  # left behind, or null
                    table.append(-block)
                    num_kept += i == num_kept
                    continue
                if block in fresh:
                    fresh.remove(block)  # `take` counted its first owner
                else:
                    pool.share(to[block])
                host.release(block)
                table.append(to[block])
            sequence.block_ids = table
            self._holders[sequence] = None
            self._set_seals(sequence, sequence.seal_ids[:num_kept])  # what came back is sealed anew
        request.shared_on_device = {}

    # -- what it looks like --------------------------------------------------------------------------------------------

    def counters(self) -> tuple[int, int, int, int, int, int, int]:
        """The counters that a `Step` event tells the growth of: hits, misses, evicted, copied, out, in, sealed."""
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
        filled: dict[BlockId, int] = {}  # of partly filled blocks; shared tails are counted once
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
