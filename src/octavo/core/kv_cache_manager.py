"""The KV cache manager: the block tables of sequences, over the block pool and the rows.

A sequence has a table for each group of layers:

    full      | 0 | 1 | 2 | 3 | 4 |     keys of all positions. It carries the chain of seals
    window    | . | . | 2 | 3 | 4 |     of the last `window` positions; there may be several such groups

    state     | s | s |                 what came of all positions: as many blocks at any length. Nothing is copied:
              | r | r |                 a slice may read it from other blocks than those that it writes

All tables of a sequence but the last are equally long, and all blocks are of one pool. A model whose layers are alike
has one group and no state.

What a sequence may begin with is `prefixes`, and what moves to the host and back is `swapping`. The scheduler first
queries whether there is room (`blocks_needed`, `blocks_to_admit`, `find_swap_in_blocks`) and then acts. A query changes
no state. An action after a successful query cannot fail.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import partial

from octavo.core.block_pool import BlockPool, SwapSpace
from octavo.core.cache.checkpoints import Checkpoints
from octavo.core.cache.kv_stats import KVStats
from octavo.core.cache.prefix_index import Prefix, PrefixIndex
from octavo.core.cache.swapping import Swapping
from octavo.core.commands import CommandTee, ResetPrefixCache
from octavo.core.events import Copied, EventStream
from octavo.core.plan import BlockCopy, StepPlan
from octavo.core.request import Request, Sequence, Status
from octavo.core.row_table import RowTable
from octavo.core.snapshot import Fields, Roster, State
from octavo.core.types import NEVER, NULL_BLOCK, BlockId, SealId
from octavo.integers import cdiv


class KVCacheManager:
    """Manages blocks of `block_size` tokens: `num_blocks` on the device, `num_host_blocks` in the swap space.

    num_rows          rows of the device's block tables
    attention_window  most keys that a query attends to in the full group, its own included; 0: all
    windows           the same of each window group
    max_chunk         positions of a sequence in a step at most; it bounds what a window group holds
    state_blocks      blocks of a sequence's state; 0: the model has none
    checkpoint_interval  tokens between checkpoints of a state, as in `Checkpoints`
    holders           sequences with blocks on the device
    """

    SAVED = Fields("num_copied num_dropped num_corrupt num_pinned")

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        *,
        num_rows: int = 0,
        enable_prefix_caching: bool = True,
        attention_window: int = 0,
        windows: Seq[int] = (),
        max_chunk: int = 0,
        state_blocks: int = 0,
        checkpoint_interval: int = 0,
    ) -> None:
        assert not (state_blocks and attention_window), "a model with states has no window in its full group"
        assert num_blocks > 0 and block_size > 0, (num_blocks, block_size)
        assert 0 <= num_host_blocks <= num_blocks, "the swap space is at most as large as the pool"
        self.events = EventStream()
        self.tee = CommandTee()  # the scheduler's commands
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, self.events, num_windows=len(windows), state_blocks=state_blocks)
        self.swap_space = SwapSpace(num_host_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self.attention_window = attention_window
        self.windows, self.num_groups = tuple(windows), 1 + len(windows)
        self.max_chunk = max_chunk or NEVER
        self.state_blocks, self.checkpoint_interval = state_blocks, checkpoint_interval
        self.rows = RowTable(num_rows, self.events, self.num_groups + 2 * (state_blocks > 0))
        self.has_windows = bool(attention_window or windows)
        self.holders: dict[Sequence, None] = {}
        self.checkpoints = Checkpoints(block_size, checkpoint_interval if state_blocks and enable_prefix_caching else 0)
        self.prefixes = PrefixIndex(
            self.pool, block_size, self.checkpoints, enabled=enable_prefix_caching, windows=self.windows
        )
        self.swapping = Swapping(self.pool, self.swap_space, self.prefixes, self.holders)
        self.pins = self.prefixes.pins
        self.num_pinned = 0  # blocks of pins, and blocks reserved for pins that are being computed
        self.num_copied = self.num_dropped = self.num_corrupt = 0
        self._unsettled: list[Sequence] = []  # sequences with slices of the plan being made, whose states are sealed
        self.reads: dict[Sequence, list[BlockId]] = {}  # states that the plan's slices read and do not write

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def blocks_for(self, num_positions: int) -> int:
        return cdiv(num_positions, self.block_size)

    def blocks_at_max_length(self, num_prompt: int, max_tokens: int, width: int = 1, *, drops: bool = True) -> int:
        """Return the blocks that a request holds at its maximum length.

        Its sequences share the full blocks of the prompt and no others. The last token is never computed. Where two or
        more share a state, all of them write new ones while the shared one is read.

        drops  it drops what leaves its windows; see `drop_out_of_window`
        """
        shared, blocks = num_prompt // self.block_size, self.blocks_for(num_prompt + max_tokens - 1)
        in_states = self._most_in_states(width)
        if drops and self.windows:
            return blocks + self._blocks_in_windows(blocks) + in_states
        return (shared + width * (blocks - shared)) * self.num_groups + in_states

    def _most_in_states(self, width: int) -> int:
        """Return the most blocks of states that a plan reads and writes: beams that share them by twos have most."""
        return (width + width // 2) * self.state_blocks

    def _blocks_in_windows(self, blocks: int) -> int:
        """Return the most that the window groups of a sequence of up to `blocks` blocks hold: the window and a step."""
        return sum(min(blocks, 1 + self.blocks_for(window + self.max_chunk - 2)) for window in self.windows)

    def blocks_to_pin(self, num_prompt: int) -> int:
        """Return the blocks of a pinned prompt, which keeps all."""
        return self.num_groups * self.blocks_for(num_prompt) + self.state_blocks

    @property
    def num_unpinned_blocks(self) -> int:
        """Blocks available to a request that runs alone."""
        return self.pool.num_blocks - self.num_pinned

    def max_output_tokens(self, num_prompt: int, width: int = 1, *, drops: bool = True) -> int:
        """Return the largest `max_tokens` that fits: the inverse of `blocks_at_max_length`. Below 1 if none fits."""
        shared, num_blocks = num_prompt // self.block_size, self.num_unpinned_blocks - self._most_in_states(width)
        most = (shared + (num_blocks - shared) // width) * self.block_size - num_prompt + 1
        if not self.windows:
            return most
        needs = partial(self.blocks_at_max_length, num_prompt, width=width, drops=drops)
        return bisect_right(range(1, most + 1), self.num_unpinned_blocks, key=needs)

    # -- block tables --------------------------------------------------------------------------------------------------

    def blocks_to_admit(self, sequence: Sequence, prefix: Prefix) -> int:
        """Return the free or cached blocks that admission takes.

        These are the blocks of all known tokens less the hits, the hits that leave the LRU queue, a copy of a shared
        tail, and states.
        """
        revived = sum(not self.pool.refs[b] for b in prefix.block_ids)
        copied = prefix.num_positions < len(prefix.block_ids) * self.block_size
        full = self.blocks_for(len(sequence.token_ids)) - len(prefix.block_ids) + revived + copied
        return full + self.window_blocks_to_admit(sequence, prefix) + self.state_blocks_to_admit(prefix)

    def blocks_due(self, requests: Iterable[Request]) -> int:
        """Return the blocks that running requests still take for their known tokens, beside those that they hold.

        None but with window groups and states, whose prompts are computed a chunk a step: others would be admitted
        meanwhile, only to be preempted.
        """
        total = 0
        for request in requests if self.windows or self.state_blocks else ():
            for sequence in request.sequences:
                if len(sequence.token_ids) - sequence.num_computed > 1:
                    blocks = self.blocks_for(len(sequence.token_ids))
                    held = [len(ids) - num_dropped for ids, num_dropped in sequence.tables]
                    in_windows = self._blocks_in_windows(blocks) if request.drops else blocks * len(self.windows)
                    total += max(0, blocks - held[0]) + max(0, in_windows - sum(held[1:]))
                    total += self.state_blocks - len(sequence.state)
        return total

    def window_blocks_to_admit(self, sequence: Sequence, prefix: Prefix) -> int:
        """Return how many of `blocks_to_admit` are for window groups."""
        if not self.windows:
            return 0
        blocks, refs = self.blocks_for(len(sequence.token_ids)), self.pool.refs
        in_windows = self._blocks_in_windows(blocks) if sequence.request.drops else blocks * len(self.windows)
        copied = prefix.num_positions < len(prefix.block_ids) * self.block_size
        shared = sum(refs[b] > 0 for table in prefix.windows for b in table.block_ids[table.num_dropped :])
        return in_windows - shared + copied * len(self.windows)

    def state_blocks_to_admit(self, prefix: Prefix) -> int:
        """Return how many of `blocks_to_admit` are for states.

        The sequence writes a new one, or one that leaves the queue. Who was to write in place what it reads writes a
        new one, too.
        """
        moved = bool(prefix.state) and any(other.state[-1] == prefix.state[-1] for other in self._unsettled)
        return self.state_blocks * (1 + moved)

    def attach(self, sequence: Sequence, prefix: Prefix) -> None:
        """Start the sequence's block table with a prefix that is already computed."""
        assert not sequence.block_ids
        for block in prefix.held:
            self.pool.share(block)
        sequence.block_ids, sequence.windows = list(prefix.block_ids), [table.copy() for table in prefix.windows]
        sequence.room = len(prefix.block_ids) * self.block_size
        sequence.num_computed = prefix.num_positions
        newest = max(prefix.seal_ids, default=0)
        if self.windows or self.state_blocks:  # their blocks may be sealed later than the full ones
            newest = max(newest, *(self.pool.seal_id[block] for block in prefix.held), 0)
        sequence.state, sequence.checkpoint = list(prefix.state), (0, NULL_BLOCK, 0)
        sequence.marks = self.checkpoints.marks(sequence, prefix)
        if prefix.state:
            head = prefix.state[-1]
            sequence.checkpoint = prefix.num_positions, head, self.pool.seal_id[head]
            self.pool.num_finders[head] += 1
        sequence.request.newest_prefix_seal = max(sequence.request.newest_prefix_seal, newest)
        self.holders[sequence] = None
        self.prefixes.set_seals(sequence, list(prefix.seal_ids))

    # -- growing -------------------------------------------------------------------------------------------------------

    def blocks_needed(self, growth: Iterable[tuple[Sequence, int]], *, swapped: bool = False) -> int:
        """Return the blocks that these sequences together need to compute `count` more positions each.

        A tail that several of them share is copied for each but the last, so references are counted down. A shared
        state is read by all of them, and each writes a new one.
        """
        refs = self.swap_space.refs if swapped else self.pool.refs
        total = 0
        left: dict[BlockId, int] = {}
        for sequence, count in growth:
            held = len(sequence.block_ids)
            total += max(0, self.blocks_for(sequence.num_computed + count) - held) * self.num_groups
            tail = sequence.num_computed // self.block_size
            if tail < held and (block := sequence.block_ids[tail]) > 0:
                sharers = left.get(block, refs[block])
                if sharers > 1:  # of the tails in all groups
                    total += self.num_groups
                    left[block] = sharers - 1
            if self.state_blocks and (not sequence.state or refs[sequence.state[-1]] > 1):
                total += self.state_blocks
        return total

    def grow(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        """Extend the sequence's block table for `count` more positions. A shared tail block is copied first.

        blocks  | full | full | tail . . |  new  |  new  |
                                ^ num_computed        ^ num_computed + count
        """
        tail, held = sequence.num_computed // self.block_size, len(sequence.block_ids)
        if tail < held and self.pool.refs[sequence.block_ids[tail]] > 1:
            for group, (block_ids, _) in enumerate(sequence.tables):
                self._copy_on_write(sequence, group, block_ids, tail, plan)
        num_new = self.blocks_for(sequence.num_computed + count) - held
        if num_new > 0:
            allocate = self.pool.allocate
            new = [allocate() for _ in range(num_new)]
            sequence.block_ids += new
            sequence.room += num_new * self.block_size
            self.rows.write(sequence, held, new, plan)
            for group, table in enumerate(sequence.windows, 1):
                new = [allocate() for _ in range(num_new)]
                table.block_ids += new
                self.rows.write(sequence, held, new, plan, group)
        if self.state_blocks:
            self._own_state(sequence, plan)

    # -- states --------------------------------------------------------------------------------------------------------

    def _own_state(self, sequence: Sequence, plan: StepPlan) -> None:
        """Give a sequence a state that it may write in this plan: of a shared one a new one. Sealed ones: `settle`."""
        if not sequence.state:
            sequence.state = [self.pool.allocate() for _ in range(self.state_blocks)]
            return
        head = sequence.state[-1]
        if self.pool.refs[head] > 1:  # those that read it in this plan still count
            for sharer in (sequence, *(other for other in self._unsettled if other.state[-1] == head)):
                self._move_state(sharer, plan)
        elif self.pool.seal_id[head]:
            self._unsettled.append(sequence)

    def _move_state(self, sequence: Sequence, plan: StepPlan) -> None:
        """Let a sequence write a new state and read the old one, which is released with the plan.

        A slice leaves the row's read line where it wrote, so only the other line is planned: see `RowState`.
        """
        self.reads[sequence] = sequence.state
        sequence.state = [self.pool.allocate() for _ in range(self.state_blocks)]
        self.rows.write(sequence, 0, sequence.state, plan, self.num_groups)

    def settle(self, plan: StepPlan) -> None:
        """Keep the checkpoints that the plan's slices continue from: while there is room, each writes a new state. Else
        the checkpoint is unsealed and written in place. Nobody else reads it in this plan: see `_own_state`.

        The plan has all its blocks by now, so a checkpoint displaces nothing but older cached blocks.
        """
        for sequence in self._unsettled:
            if not self.pool.seal_id[sequence.state[-1]]:  # it has moved, or its full block was evicted meanwhile
                continue
            if self.pool.num_available >= self.state_blocks:
                self._move_state(sequence, plan)
            else:
                self.pool.unseal(sequence.state[-1], "written")
        for old in self.reads.values():
            for block in reversed(old):
                self.pool.release(block)
        self._unsettled.clear()
        self.reads.clear()

    # -- giving back ---------------------------------------------------------------------------------------------------

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
            for block_ids, num_dropped in sequence.tables:
                # A stop token may end a slice before positions that were certain: a window has left some by then.
                for block in reversed(block_ids[max(num_kept, num_dropped) :]):
                    assert tier.refs[block] == 1, (sequence, block)
                    tier.release(block)
                del block_ids[num_kept:]
            sequence.room = num_kept * self.block_size

    def _copy_on_write(
        self, sequence: Sequence, group: int, block_ids: list[BlockId], index: int, plan: StepPlan
    ) -> None:
        """Copy a shared tail block for its writer. The last sharer writes in place, because it finds refs at 1."""
        src = block_ids[index]
        dst = block_ids[index] = self.pool.allocate()
        self.pool.release(src)
        plan.copies.append(BlockCopy(src, dst))
        self.num_copied += 1
        if self.events.blocks:
            self.events.emit_block(Copied(src, dst))
        self.rows.write(sequence, index, [dst], plan, group)

    def drop_out_of_window(self, sequence: Sequence, plan: StepPlan) -> None:
        """Release the leading blocks that no position from the next query on attends to. Their entries become null.

        blocks  | null | null | . . k k | k k k k | q       q: the next query, at `num_computed` or, if drafts in flight
                                 ^ q - attention_window + 1    are rejected, up to `num_unverified` positions before it

        An earlier plan in flight may still read them safely: their next owner writes them in a later plan. In the full
        group a block that is not sealed yet is kept until it is: later seals need it. A window group keeps none, so
        what it holds has a bound. The sequences of a request with several drop none: when they are computed again, one
        begins with blocks of another, which that one may no longer attend to.
        """
        if not sequence.request.drops:
            return
        position = sequence.num_computed - sequence.num_unverified  # of the next query, or before it
        if self.attention_window:
            end = (position - self.attention_window + 1) // self.block_size
            if self.enable_prefix_caching:
                end = min(end, len(sequence.seal_ids))
            if end > sequence.num_dropped:
                self._drop(sequence, 0, sequence.block_ids, sequence.num_dropped, end, plan)
                sequence.num_dropped = end
        for group, table in enumerate(sequence.windows):
            end = self.prefixes.first_in_window(group, position)
            if end > table.num_dropped:
                self._drop(sequence, group + 1, table.block_ids, table.num_dropped, end, plan, table.num_found)
                table.num_dropped = end

    def _drop(
        self,
        sequence: Sequence,
        group: int,
        block_ids: list[BlockId],
        first: int,
        end: int,
        plan: StepPlan,
        num_kept: int = NEVER,
    ) -> None:
        """num_kept: leading blocks that others are likely to look for; the rest is evicted before all else"""
        for i in range(end - 1, first - 1, -1):  # tail first: the head is evicted last
            self.pool.release(block_ids[i], as_oldest=i >= num_kept)
        nulls = [NULL_BLOCK] * (end - first)
        block_ids[first:end] = nulls
        self.num_dropped += end - first
        self.rows.write(sequence, first, nulls, plan, group)

    def unseal_after(self, mark: SealId) -> list[Sequence]:
        """Remove every seal newer than `mark`. Returns the sequences that had one of them, or such a block of a window.

        A sequence that continues seals its blocks again. It cannot seal blocks that it dropped from the attention
        window: its chain continues after them, under a parent that is no longer in the index.
        """
        newer = self.pool.sealed_after(mark)
        for block in newer:
            if self.pool.seal_id[block]:  # one of a window group is unsealed with its full block
                self.pool.unseal(block)
        affected, read = [], set(newer)
        for sequence in self.holders:
            ids = sequence.seal_ids
            num_valid = next((i for i, seal in enumerate(ids) if seal > mark), len(ids))
            if num_valid < len(ids):
                self.prefixes.set_seals(sequence, ids[: max(num_valid, sequence.num_dropped)])
            of_groups = [*(table.block_ids for table in sequence.windows), sequence.state]
            if num_valid < len(ids) or not all(map(read.isdisjoint, of_groups)):
                affected.append(sequence)
        return affected

    # -- sharing and releasing -----------------------------------------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all blocks of `parent`, the partial tail included, in the tier where the request is."""
        swapped = parent.request.status is Status.SWAPPED
        child.num_computed, child.block_ids, child.room = parent.num_computed, list(parent.block_ids), parent.room
        child.num_dropped, child.windows = parent.num_dropped, [table.copy() for table in parent.windows]
        child.state = parent.state[:]
        self.prefixes.set_seals(child, list(parent.seal_ids))
        tier = self.swap_space if swapped else self.pool
        for block_ids, num_dropped in child.holdings:
            for block in block_ids[num_dropped:]:
                if block > 0:
                    tier.share(block)
        if child.block_ids and not swapped:
            self.holders[child] = None

    def free(self, sequence: Sequence) -> None:
        """Release the sequence's blocks, the tail first so that the head is evicted last. Idempotent."""
        tier = self.swap_space if sequence.request.status is Status.SWAPPED else self.pool
        for block_ids, num_dropped in reversed([*sequence.holdings]):  # the full group, which others hang on, last
            for block in reversed(block_ids[num_dropped:]):
                if block > 0:
                    tier.release(block)
        sequence.block_ids, sequence.room, sequence.num_computed, sequence.num_dropped = [], 0, 0, 0
        sequence.windows, sequence.state, sequence.marks = self.prefixes.empty_tables(), [], []
        self.holders.pop(sequence, None)
        self.prefixes.set_seals(sequence, [])

    def pin(self, sequence: Sequence) -> None:
        """Keep the blocks of a computed prompt, for requests that begin with it, until `unpin`."""
        assert sequence.num_computed == len(sequence.request.prompt_token_ids), sequence
        self.pins[sequence.request.request_id] = sequence

    def unpin(self, name: str) -> int:
        """Release a pin and return its number of blocks. Running requests that began with it keep theirs."""
        sequence = self.pins.pop(name)
        num_blocks = len(sequence.block_ids) * self.num_groups + len(sequence.state)
        self.num_pinned -= num_blocks
        self.free(sequence)
        return num_blocks

    def reset_prefix_cache(self) -> int:
        """Evict every cached block and return their number. Blocks in use stay in the index."""
        if self.tee.active:
            self.tee.emit(ResetPrefixCache())
        num_cached = self.pool.num_cached
        self.pool.evict_all_cached()
        return num_cached

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def _parts(self) -> tuple[KVCacheManager, PrefixIndex, Swapping]:
        return self, self.prefixes, self.swapping

    def settings(self) -> State:
        """The arguments that the manager is made with."""
        return {
            "num_blocks": self.pool.num_blocks,
            "block_size": self.block_size,
            "num_host_blocks": self.swap_space.num_blocks,
            "num_rows": self.rows.num_rows,
            "enable_prefix_caching": self.enable_prefix_caching,
            "attention_window": self.attention_window,
            "windows": list(self.windows),
            "max_chunk": self.max_chunk,
            "state_blocks": self.state_blocks,
            "checkpoint_interval": self.checkpoint_interval,
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
            windows=settings.get("windows", ()),  # older recordings have none
            max_chunk=settings.get("max_chunk", 0),
            state_blocks=settings.get("state_blocks", 0),
            checkpoint_interval=settings.get("checkpoint_interval", 0),
        )

    def snapshot(self, roster: Roster) -> State:
        return {
            "pool": self.pool.snapshot(),
            "keys": self.pool.packed_keys(),
            "host": self.swap_space.snapshot(),
            "free_rows": self.rows.snapshot(),
            "cache": {key: value for part in self._parts() for key, value in part.SAVED.save(part).items()},
            "holders": roster.indices(self.holders),
            "pins": roster.indices(self.pins.values()),
        }

    def restore(self, state: State, roster: Roster) -> None:
        """Take the state of a manager with the same settings."""
        self.pool.restore(state["pool"], state["keys"])
        self.swap_space.restore(state["host"])
        self.rows.restore(state["free_rows"])
        for part in self._parts():
            part.SAVED.load(part, state["cache"])
        self.holders.update(dict.fromkeys(roster.sequences_at(state["holders"])))
        self.pins.update((seq.request.request_id, seq) for seq in roster.sequences_at(state["pins"]))

    # -- statistics ----------------------------------------------------------------------------------------------------

    def counters(self) -> tuple[int, int, int, int, int, int, int]:
        """Return the counters whose increase a `Step` event carries.

        They are hits, misses, evicted, copied, swapped out, swapped in and sealed blocks.
        """
        pool = self.pool
        return (
            self.prefixes.num_hits,
            self.prefixes.num_misses,
            pool.num_evicted,
            self.num_copied,
            self.swapping.num_swapped_out,
            self.swapping.num_swapped_in,
            pool.num_sealed,
        )

    def stats(self) -> KVStats:
        pool, prefixes = self.pool, self.prefixes
        looked_up = prefixes.num_hits + prefixes.num_misses
        filled: dict[BlockId, int] = {}  # partly filled blocks; a shared tail counts once
        for s in self.holders:
            if s.num_computed < s.room:
                filled[s.block_ids[-1]] = max(filled.get(s.block_ids[-1], 0), s.num_computed % self.block_size)
        return KVStats(
            num_blocks=pool.num_blocks,
            block_size=self.block_size,
            num_used=pool.num_used,
            num_cached=pool.num_cached,
            num_free=pool.num_free,
            num_hits=prefixes.num_hits,
            num_misses=prefixes.num_misses,
            num_hit_tokens=prefixes.num_hit_tokens,
            num_queried_tokens=prefixes.num_queried_tokens,
            hit_rate=prefixes.num_hits / looked_up if looked_up else 0.0,
            num_saved_by_sharing=pool.num_refs - pool.num_used,
            num_unfilled_slots=(len(filled) * self.block_size - sum(filled.values())) * self.num_groups,
            num_sealed=pool.num_sealed,
            num_evicted=pool.num_evicted,
            num_copied=self.num_copied,
            num_dropped=self.num_dropped,
            num_swapped_out=self.swapping.num_swapped_out,
            num_swapped_in=self.swapping.num_swapped_in,
            num_corrupt=self.num_corrupt,
            num_host_blocks=self.swap_space.num_blocks,
            num_host_used=self.swap_space.num_used,
            num_pinned=self.num_pinned,
        )
