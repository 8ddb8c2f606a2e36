"""`KVCacheManager` alone, driven by hypothesis: all of its operations in random order.

Two models check it. One holds the content of every slot in both tiers as the whole prefix that was written there, and
moves it with copies and swaps like a device. A state is that of its last position, in every slot of its blocks. The
other is a brute-force prefix cache of sealed blocks and their content. A hit is right exactly if the content is equal,
and no cached block may be missed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan
from octavo.core.request import Request, Sequence, Status
from octavo.core.snapshot import Roster
from tests.core.lab import make, state_of
from tests.proof import oracle as o

Content = tuple[bytes, tuple[int, ...]]
"""Content of a slot: the salt, with a mark for each window group, and all tokens up to this one.

In a state it is the same in every slot of a block, with another mark, once more for each block before it."""

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
WHICH = st.integers(0, 1 << 16)


class Memory(RuleBasedStateMachine):
    @initialize(
        size=st.sampled_from([1, 2, 3]),
        num_blocks=st.integers(3, 9),
        num_host=st.integers(0, 9),
        caching=st.sampled_from([True, True, True, False]),
        attention_window=st.integers(1, 5),
        windows=st.sampled_from([(), (), (1,), (3,), (4, 2)]),
        state_blocks=st.sampled_from([0, 0, 1, 2, 3]),
        interval=st.integers(1, 2),
    )
    def begin(
        self,
        size: int,
        num_blocks: int,
        num_host: int,
        caching: bool,
        attention_window: int,
        windows: tuple[int, ...] = (),
        state_blocks: int = 0,
        interval: int = 1,
    ) -> None:
        num_blocks = num_blocks * (1 + len(windows)) + (9 + 3 * state_blocks if state_blocks else 0)
        num_host = min(num_host * (1 + len(windows) + state_blocks), num_blocks)
        self.cache = KVCacheManager(
            num_blocks,
            size,
            num_host,
            num_rows=4,
            enable_prefix_caching=caching,
            attention_window=0 if windows or state_blocks else attention_window,
            windows=windows,
            state_blocks=state_blocks,
            checkpoint_interval=interval * size if state_blocks else 0,
        )
        self.state_blocks, self.num_lines = state_blocks, self.cache.rows.num_lines
        self.num_groups, self.windows = 1 + len(windows), [self.cache.attention_window, *windows]
        self.pool, self.host, self.size = self.cache.pool, self.cache.swap_space, size
        self.kv: dict[tuple[int, int], Content] = {}
        self.host_kv: dict[tuple[int, int], Content] = {}
        self.sealed: dict[int, tuple[int, Content]] = {}  # block -> its seal id, and its content when it was sealed
        self.tables: list[list[int]] = [[] for _ in range(4 * self.num_lines)]
        self.arriving: dict[Sequence, list[int]] = {}  # sampled on the device, not yet known to the host
        self.requests: list[Request] = []
        self.line: list[int] = []  # cached blocks, the oldest first
        self.marks = [0]
        self.num_pins = 0
        o.watch_eviction(self.cache)

    # -- what a device would do ----------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan) -> None:
        for line, start, ids in plan.table_writes:
            assert start <= len(self.tables[line]) or start == 0
            self.tables[line][start : start + len(ids)] = ids
            if start == 0 and any(setup.row == line // self.num_lines for setup in plan.row_setups):
                del self.tables[line][len(ids) :]
        for kv, other, moves in (
            (self.kv, self.host_kv, plan.swap_outs),
            (self.host_kv, self.kv, plan.swap_ins),
            (self.kv, self.kv, plan.copies),
        ):
            assert not {m[0] for m in moves} & {m[1] for m in moves} or kv is not other
            for src, dst in moves:
                for offset in range(self.size):
                    other.pop((dst, offset), None)
                    if (src, offset) in kv:
                        other[dst, offset] = kv[src, offset]

    def everything(self, seq: Sequence) -> list[int]:
        """Return the sequence's tokens, those in flight included."""
        return [*seq.token_ids, *self.arriving.get(seq, [])]

    def content(self, seq: Sequence, position: int, group: int = 0) -> Content:
        return seq.request.salt + b"!" * group, tuple(self.everything(seq)[: position + 1])

    def state(self, seq: Sequence, block: int) -> Content:
        """The content of a block of a sequence's state."""
        return seq.request.salt + b"?" * (1 + block), tuple(self.everything(seq)[: seq.num_computed])

    def holds(self, seq: Sequence, blocks: Any, kv: dict[tuple[int, int], Content]) -> bool:
        """True if these blocks hold the sequence's state."""
        slots = [(i, block, offset) for i, block in enumerate(blocks) for offset in range(self.size)]
        return all(kv[block, offset] == self.state(seq, i) for i, block, offset in slots)

    def reads(self, seq: Sequence, before: list[int]) -> list[int]:
        """The blocks of the state that a slice reads. Without a row they are those that its sequence had before."""
        return self.tables[(seq.row + 1) * self.num_lines - 1] if self.state_blocks and seq.row >= 0 else before

    def write_state(self, seq: Sequence) -> None:
        self.reads(seq, [])[:] = seq.state
        assert len(seq.state) == self.state_blocks
        for i, block in enumerate(seq.state):
            assert self.pool.refs[block] == 1, "a write into a shared state"
            assert not self.pool.seal_id[block], "a write into a checkpoint"
            self.kv |= {(block, offset): self.state(seq, i) for offset in range(self.size)}

    def compute(self, seq: Sequence, count: int, plan: StepPlan) -> None:
        before = seq.state
        self.cache.grow(seq, count, plan)
        self.cache.settle(plan)
        self.apply(plan)
        assert not seq.num_computed or self.holds(seq, self.reads(seq, before), self.kv)
        for group, (block_ids, _) in enumerate(seq.tables):
            for p in range(seq.num_computed, seq.num_computed + count):
                block = block_ids[p // self.size]
                assert self.pool.refs[block] == 1, "a write into a shared block"
                assert not self.pool.seal_id[block], "a write into a sealed block"
                self.kv[block, p % self.size] = self.content(seq, p, group)
        seq.num_computed += count
        self.write_state(seq)

    def note_seals(self) -> None:
        """Record the blocks that the previous call sealed, with their content."""
        for block in range(1, self.pool.num_blocks + 1):
            seal = self.pool.seal_id[block]
            if not seal:
                self.sealed.pop(block, None)
            elif self.sealed.get(block, (0,))[0] != seal:
                assert self.pool.refs[block] > 0
                self.sealed[block] = seal, self.kv[block, self.size - 1]

    # -- choosing ------------------------------------------------------------------------------------------------------

    def live(self, *states: Status) -> list[Sequence]:
        return [s for r in self.requests if r.status in states for s in r.sequences]

    def held_by(self, *sequences: Sequence) -> Counter[int]:
        """The entries of their tables of all groups that are not null, and the blocks of their states."""
        return Counter(b for s in sequences for ids, _ in s.holdings for b in ids if b)

    def one(self, which: int, *states: Status) -> Sequence | None:
        found = self.live(*states)
        return found[which % len(found)] if found else None

    # -- rules ---------------------------------------------------------------------------------------------------------

    @rule(tokens=TOKENS, salt=st.sampled_from([b"", b"", b"x"]), which=WHICH, chunk=st.integers(1, 9))
    def admit(self, tokens: list[int], salt: bytes, which: int, chunk: int) -> None:
        if len(self.requests) >= 5:
            return
        earlier = self.live(Status.RUNNING)
        if which % 2 and earlier:  # a conversation goes on
            tokens = [*earlier[which % len(earlier)].token_ids, *tokens][:12]
        elif self.state_blocks:  # long enough for a checkpoint, and likely to be found
            tokens = [*tokens, *[0] * 9][:9]
        request = make("r", tokens, 1 << 20, salt=salt)
        request.begin(0, (0, 0), 1 << 20)
        (seq,) = request.sequences
        before = state_of(self.cache, seq)
        prefix = self.cache.prefixes.lookup(seq)
        self.is_right(seq, prefix)
        needs = self.cache.blocks_to_admit(seq, prefix)
        assert state_of(self.cache, seq) == before, "a question changed something"
        if needs > self.pool.num_available:
            return
        self.cache.attach(seq, prefix)
        request.status = Status.RUNNING
        self.requests.append(request)
        plan = StepPlan()
        chunk = 9 if self.state_blocks and which % 5 < 4 else chunk
        count = min(chunk, len(tokens) - seq.num_computed, self.to_stop(seq, which // 2))
        assert self.cache.blocks_needed([(seq, count)]) <= self.pool.num_available
        self.compute(seq, count, plan)
        if self.cache.rows.num_free:
            plan = StepPlan()
            self.cache.rows.assign(seq, plan, seq.state)
            self.apply(plan)
        if self.state_blocks and which % 3 < 2:
            self.seal(self.live(Status.RUNNING).index(seq))

    def to_stop(self, seq: Sequence, which: int) -> int:
        """Positions until the sequence leaves a checkpoint, most of the times."""
        return 99 if which % 4 == 3 else self.cache.checkpoints.next_stop(seq) - seq.num_computed

    def is_right(self, seq: Sequence, prefix: Any) -> None:
        """Check that each hit has this content, and that no child of the last hit has the next block's content."""
        size, tokens = self.size, seq.token_ids
        assert prefix.num_positions < len(tokens)
        assert len(prefix.block_ids) == self.cache.blocks_for(prefix.num_positions)
        assert prefix.num_positions >= self.best_pin(seq)
        for p in range(prefix.num_positions):
            assert self.kv[prefix.block_ids[p // size], p % size] == (seq.request.salt, tuple(tokens[: p + 1]))
        for group, table in enumerate(prefix.windows, 1):
            assert len(table.block_ids) == len(prefix.block_ids)
            first = max(0, prefix.num_positions - self.windows[group] + 1)  # that the next query attends to
            for p in range(first, prefix.num_positions):
                assert self.kv[table.block_ids[p // size], p % size] == self.content(seq, p, group)
            assert table.num_dropped == first // size and not any(table.block_ids[: first // size])
        assert len(prefix.state) == (self.state_blocks if prefix.num_positions else 0)
        for i, block in enumerate(prefix.state):
            want = seq.request.salt + b"?" * (1 + i), tuple(tokens[: prefix.num_positions])
            assert all(self.kv[block, offset] == want for offset in range(size))
        if self.num_lines > 1:
            assert prefix.num_positions == max(self.best_pin(seq), self.best_hit(seq))
        if prefix.num_positions % size or not self.cache.enable_prefix_caching:  # only a pin has a partial tail
            assert prefix.num_positions == self.best_pin(seq)
            tail = prefix.block_ids[-1] if prefix.block_ids else 0
            assert not prefix.num_positions % size or not self.pool.seal_id[tail], "a full block to be copied"
            return
        if not all(self.pool.seal_id[b] for b in prefix.block_ids):
            # From a pin whose content was sealed in another block, which may be evicted by now.
            assert prefix.num_positions == self.best_pin(seq)
            assert any(p.block_ids[: len(prefix.block_ids)] == prefix.block_ids for p in self.cache.pins.values())
            return
        for i, block in enumerate(prefix.block_ids):
            assert self.sealed[block] == (prefix.seal_ids[i], (seq.request.salt, tuple(tokens[: (i + 1) * size])))
        if (len(prefix.block_ids) + 1) * size < len(tokens) and self.num_lines == 1:
            want = seq.request.salt, tuple(tokens[: (len(prefix.block_ids) + 1) * size])
            parent = prefix.seal_ids[-1] if prefix.seal_ids else seq.request.salt
            missed = [b for b, (_, held) in self.sealed.items() if held == want]
            assert all(self.pool.key_of(b)[0] != parent for b in missed), "missed"  # type: ignore[index]
            if not prefix.seal_ids:
                assert not missed, "a first block is found as long as it is there"

    def best_hit(self, seq: Sequence) -> int:
        """Return the longest prefix of which the index has all full blocks, those that the next query attends to in the
        other groups, and a checkpoint."""
        size, keys = self.size, {self.pool.key_of(block) for block in self.sealed}
        parent: Any = seq.request.salt
        seals: list[int] = []
        for i in range((len(seq.token_ids) - 1) // size):
            key = parent, seq.token_ids[i * size : (i + 1) * size].tobytes()
            if key not in keys:
                break
            (parent,) = (seal for block, (seal, _) in self.sealed.items() if self.pool.key_of(block) == key)
            seals.append(parent)
        return max(
            n * size
            for n in range(len(seals) + 1)
            if all(
                (seals[p // size], bytes([group])) in keys
                for group, window in enumerate(self.windows[1:])
                for p in range(max(0, n * size - window + 1), n * size)
            )
            and (not n or not self.state_blocks or (seals[n - 1], bytes([self.num_groups - 1])) in keys)
        )

    def best_pin(self, seq: Sequence) -> int:
        """Return the number of a sequence's positions that a pin provides."""
        best = 0
        for pin in self.cache.pins.values():
            tokens, own = list(pin.request.prompt_token_ids), list(seq.token_ids)
            same = max(n for n in range(len(own)) if own[:n] == tokens[:n])
            in_tail = same >= len(tokens) - len(tokens) % self.size
            same = same if in_tail else same - same % self.size
            if self.state_blocks and same < len(tokens):
                continue
            needed = [max(0, same - window + 1) // self.size for window in self.windows[1:]]
            has = all(t.num_dropped <= first for t, first in zip(pin.windows, needed, strict=True))
            if pin.request.salt == seq.request.salt and has:
                best = max(best, same)
        return best

    @rule(tokens=TOKENS, salt=st.sampled_from([b"", b"", b"x"]))
    def pin(self, tokens: list[int], salt: bytes) -> None:
        if len(self.cache.pins) >= 2:
            return
        self.num_pins += 1
        request = make(f"pin{self.num_pins}", tokens, 1, salt=salt, pin=True)
        request.begin(0, (0, 0), 1)
        (seq,) = request.sequences
        prefix = self.cache.prefixes.lookup(seq)
        self.is_right(seq, prefix)
        if self.cache.blocks_to_admit(seq, prefix) > self.pool.num_available:
            return
        self.cache.attach(seq, prefix)
        request.status = Status.RUNNING
        self.compute(seq, len(tokens) - seq.num_computed, StepPlan())
        self.cache.prefixes.seal(seq)
        self.note_seals()
        self.marks = [self.pool.last_seal_id]  # pins keep their seals: all their results have arrived
        request.status = Status.FINISHED
        self.cache.num_pinned += len(seq.block_ids) * self.num_groups + self.state_blocks
        self.cache.pin(seq)

    @rule(which=WHICH)
    def unpin(self, which: int) -> None:
        if self.cache.pins:
            name = list(self.cache.pins)[which % len(self.cache.pins)]
            num_blocks = len(self.cache.pins[name].block_ids) * self.num_groups + self.state_blocks
            assert self.cache.unpin(name) == num_blocks and name not in self.cache.pins

    @rule(which=WHICH, count=st.integers(1, 4), token=st.integers(0, 1), know=st.booleans())
    def go_on(self, which: int, count: int, token: int, know: bool) -> None:
        """Compute the remaining known tokens, then sampled ones, which may become known only later."""
        if (seq := self.one(which, Status.RUNNING)) is None:
            return
        if seq.num_unverified:
            return
        count = min(count, self.to_stop(seq, token + count))
        new = max(0, seq.num_computed + count - len(self.everything(seq)))
        if self.cache.blocks_needed([(seq, count)]) > self.pool.num_available:
            return
        self.arriving.setdefault(seq, []).extend((token + i) % 2 for i in range(new))
        used = self.pool.num_used
        needs = self.cache.blocks_needed([(seq, count)])
        self.compute(seq, count, StepPlan())
        assert self.pool.num_used - used == needs
        if know:
            self.land(which, 99)

    @rule(which=WHICH, count=st.integers(1, 6))
    def draft(self, which: int, count: int) -> None:
        """Compute drafts after all other tokens."""
        seq = self.one(which, Status.RUNNING)
        if seq is None or seq.num_unverified or seq.num_computed < len(self.everything(seq)) or self.state_blocks:
            return
        if self.cache.blocks_needed([(seq, count)]) > self.pool.num_available:
            return
        self.arriving.setdefault(seq, []).extend((which + i) % 2 for i in range(count))
        self.compute(seq, count, StepPlan())
        seq.num_unverified = count

    @rule(which=WHICH, rejected=st.integers(0, 6))
    def verify(self, which: int, rejected: int) -> None:
        """Accept drafts and reject the last ones, in any state of their request."""
        drafted = [s for s in self.live(Status.RUNNING, Status.SWAPPED) if s.num_unverified]
        if not drafted:
            return
        seq = drafted[which % len(drafted)]
        rejected = min(rejected, seq.num_unverified)
        tier = self.host if seq.request.status is Status.SWAPPED else self.pool
        used, held, computed = tier.num_used, len(seq.block_ids), seq.num_computed
        seq.num_unverified = 0
        self.cache.shrink(seq, rejected)
        del self.arriving[seq][len(self.arriving[seq]) - rejected :]
        assert seq.num_computed == computed - rejected
        assert held - len(seq.block_ids) == held - self.cache.blocks_for(seq.num_computed)
        assert used - tier.num_used == (held - len(seq.block_ids)) * self.num_groups
        self.note_seals()

    @rule(which=WHICH, count=st.integers(1, 4))
    def land(self, which: int, count: int) -> None:
        """Deliver results, in any state of their request."""
        if (seq := self.one(which, Status.RUNNING, Status.SWAPPED)) is None:
            return
        coming = self.arriving.get(seq, [])
        count = min(count, len(coming) - seq.num_unverified)
        seq.token_ids.extend(coming[:count])
        del coming[:count]

    @rule(which=WHICH)
    def seal(self, which: int) -> None:
        if (seq := self.one(which, Status.RUNNING)) is None:
            return
        if self.cache.enable_prefix_caching and min(len(seq.token_ids), seq.num_computed) < seq.seal_at:
            return  # as the scheduler does: the last full block may be another's, and gone, but not a new one's
        self.cache.prefixes.seal(seq)
        self.note_seals()
        if self.cache.enable_prefix_caching:
            assert len(seq.seal_ids) >= min(len(seq.token_ids), seq.num_computed) // self.size
            self.marks.append(self.pool.last_seal_id)

    @rule(which=WHICH)
    def drop_out_of_window(self, which: int) -> None:
        """Check that blocks out of a group's window are dropped, in the full group sealed ones alone."""
        if (seq := self.one(which, Status.RUNNING)) is None:
            return
        refs, plan, goes = list(self.pool.refs), StepPlan(), []
        held = [list(ids) for ids, _ in seq.tables]
        for group, window in enumerate(self.windows):
            end = seq.num_computed - seq.num_unverified - window + 1
            unseen = [i for i in range(len(seq.block_ids)) if window and (i + 1) * self.size <= end and held[group][i]]
            if self.cache.enable_prefix_caching and not group:
                unseen = [i for i in unseen if i < len(seq.seal_ids)]
            goes.append(unseen)
        self.cache.drop_out_of_window(seq, plan)
        self.apply(plan)
        for (ids, num_dropped), before, gone in zip(seq.tables, held, goes, strict=True):
            assert [i for i in range(len(before)) if ids[i] != before[i]] == gone
            assert all(self.pool.refs[before[i]] == refs[before[i]] - 1 for i in gone)
            assert ids[:num_dropped] == [0] * num_dropped and all(ids[num_dropped:])

    @rule(which=WHICH)
    def fork(self, which: int) -> None:
        seq = self.one(which, Status.RUNNING, Status.SWAPPED)
        if seq is None or len(seq.request.sequences) >= 4 or any(s.num_unverified for s in seq.request.sequences):
            return
        child = Sequence(seq.request, 1, seq.token_ids[:], seq.max_length)
        self.cache.fork(seq, child)
        seq.request.sequences.append(child)
        self.arriving[child] = list(self.arriving.get(seq, []))
        assert [*child.holdings] == [*seq.holdings] and child.num_computed == seq.num_computed

    @rule(which=WHICH)
    def step_together(self, which: int) -> None:
        """Let all sequences of a request write one position: blocks are counted for all before the first copy."""
        if (seq := self.one(which, Status.RUNNING)) is None:
            return
        group = seq.request.sequences
        if any(s.num_unverified for s in group):
            return
        needs = self.cache.blocks_needed((s, 1) for s in group)
        if needs > self.pool.num_available:
            return
        used, plan, before = self.pool.num_used, StepPlan(), list[list[int]]()
        for i, s in enumerate(group):
            if s.num_computed == len(self.everything(s)):
                self.arriving.setdefault(s, []).append(i % 2)
            before.append(s.state)
            self.cache.grow(s, 1, plan)
        assert self.pool.num_used - used == needs
        self.cache.settle(plan)
        assert self.pool.num_used - used <= needs
        self.apply(plan)
        for s, state in zip(group, before, strict=True):
            reads = self.reads(s, state)
            assert not s.num_computed or self.holds(s, reads, self.kv)
            written = {block for other in group if other is not s for block in other.state}
            assert written.isdisjoint(reads), "a sequence writes a state that another reads"
        for s in group:
            s.num_computed += 1
            self.write_state(s)
            p = s.num_computed - 1
            for group_index, (block_ids, _) in enumerate(s.tables):
                self.kv[block_ids[p // self.size], p % self.size] = self.content(s, p, group_index)

    @rule(which=WHICH)
    def free(self, which: int) -> None:
        if (seq := self.one(which, Status.RUNNING, Status.SWAPPED)) is None:
            return
        self.cache.rows.release(seq)
        self.cache.free(seq)
        before = state_of(self.cache, seq)
        self.cache.rows.release(seq)
        self.cache.free(seq)
        assert state_of(self.cache, seq) == before, "free is idempotent"
        seq.request.sequences.remove(seq)
        self.requests = [r for r in self.requests if r.sequences]
        self.note_seals()

    @rule(which=WHICH)
    def discard(self, which: int) -> None:
        if (seq := self.one(which, Status.RUNNING)) is None:
            return
        holders = [*self.live(Status.RUNNING), *self.cache.pins.values()]
        others = self.held_by(*(s for s in holders if s is not seq))
        kept = {b for b in self.held_by(seq) if b in others and self.pool.seal_id[b]}
        self.cache.prefixes.discard(seq)
        assert {b for b in self.held_by(seq) if self.pool.seal_id[b]} == kept
        self.note_seals()
        self.free(self.live(Status.RUNNING, Status.SWAPPED).index(seq))

    @rule(which=WHICH)
    def swap_out(self, which: int) -> None:
        if (seq := self.one(which, Status.RUNNING)) is None:
            return
        request, plan = seq.request, StepPlan()
        before = state_of(self.cache, *request.sequences)
        owned = self.held_by(*request.sequences)
        moves = [b for b, n in owned.items() if not self.pool.seal_id[b] or self.pool.refs[b] == n]
        moves = [*{*moves, *(b for s in request.sequences for b in s.state)}]
        rows = [s.row for s in request.sequences]
        if not self.cache.swapping.swap_out(request, plan):
            assert len(moves) > self.host.num_free
            assert state_of(self.cache, *request.sequences) == before and not plan
            return
        assert sorted(src for src, _ in plan.swap_outs) == sorted(moves), "each block once, and no other"
        assert set(request.shared_on_device) == set(owned) - set(moves)
        for s, row in zip(request.sequences, rows, strict=True):
            assert s.row == row
            self.cache.rows.release(s)
        request.status = Status.SWAPPED
        self.apply(plan)

    @rule(which=WHICH)
    def swap_in(self, which: int) -> None:
        if (seq := self.one(which, Status.SWAPPED)) is None:
            return
        request = seq.request
        if any(s.num_unverified for s in request.sequences):  # it returns when nothing is pending
            return
        before = state_of(self.cache, *request.sequences)
        found = self.cache.swapping.find_swap_in_blocks(request)
        assert state_of(self.cache, *request.sequences) == before
        there = all(self.sealed.get(b, (0,))[0] == seal for b, seal in request.shared_on_device.items())
        assert (found is not None) == there
        if found is None:  # it would be recomputed: here it is freed
            for s in request.sequences:
                self.cache.free(s)
            self.requests.remove(request)
            return
        if found.num_needed > self.pool.num_available:
            return
        plan, available = StepPlan(), self.pool.num_available
        self.cache.swapping.swap_in(request, found, plan)
        request.status = Status.RUNNING
        assert available - self.pool.num_available <= found.num_needed
        self.apply(plan)
        self.note_seals()

    @rule()
    def reset(self) -> None:
        cached = self.pool.num_cached
        assert self.cache.reset_prefix_cache() == cached
        assert self.pool.num_cached == 0
        self.note_seals()

    @precondition(lambda self: self.requests)
    @rule(which=WHICH)
    def take_back_seals(self, which: int) -> None:
        mark = self.marks[which % len(self.marks)]
        young = {s for s in self.live(Status.RUNNING) if any(i > mark for i in s.seal_ids)}
        newer = {block for block, seal in enumerate(self.pool.seal_id) if seal > mark}
        young |= {s for s in self.live(Status.RUNNING) for t in s.windows if not newer.isdisjoint(t.block_ids)}
        young |= {s for s in self.live(Status.RUNNING) if not newer.isdisjoint(s.state)}
        assert set(self.cache.unseal_after(mark)) == young
        assert all(seal <= mark for seal in self.pool.seal_id)
        # Dropped blocks keep their seals: they stay in the chain, and out of the index.
        assert all(i <= mark for s in self.live(Status.RUNNING) for i in s.seal_ids[s.num_dropped :])
        self.note_seals()
        for s in young:
            if s.num_dropped:  # dropped blocks cannot be sealed again: it would be recomputed, here it is freed
                self.free(self.live(Status.RUNNING, Status.SWAPPED).index(s))

    # -- invariants ----------------------------------------------------------------------------------------------------

    @invariant()
    def counts_hold(self) -> None:
        holders = [*self.live(Status.RUNNING), *self.cache.pins.values()]
        owners = self.held_by(*holders)
        o.check_pool(self.pool, owners)
        pinned = [self.num_groups * len(s.block_ids) + self.state_blocks for s in self.cache.pins.values()]
        assert self.cache.num_pinned == sum(pinned)
        o.chains(self.cache)
        host = Counter({b: n for b, n in self.held_by(*self.live(Status.SWAPPED)).items() if b > 0})
        assert list(self.host.refs[1:]) == [host[b] for b in range(1, self.host.num_blocks + 1)]
        assert self.host.num_used == len(host)
        stats = self.cache.stats()
        assert stats.num_used + stats.num_cached + stats.num_free == stats.num_blocks
        assert stats.num_saved_by_sharing == owners.total() - len(owners)
        assert stats.num_unfilled_slots <= len(holders) * (self.size - 1) * self.num_groups
        rows = [s.row for s in self.live(Status.RUNNING) if s.row >= 0]
        assert len(set(rows)) == len(rows) == 4 - self.cache.rows.num_free

    @invariant()
    def a_restored_manager_is_equal(self) -> None:
        sequences = [*self.live(*Status), *self.cache.pins.values()]
        roster = Roster(dict.fromkeys(seq.request for seq in sequences), sequences)
        again = KVCacheManager.from_settings(self.cache.settings())
        again.restore(self.cache.snapshot(roster), roster)
        assert state_of(again, *sequences) == state_of(self.cache, *sequences)
        o.check_pool(again.pool, Counter({b: n for b, n in enumerate(self.pool.refs) if n}))

    @invariant()
    def every_slot_reads_back(self) -> None:
        for seq in [*self.live(Status.RUNNING, Status.SWAPPED), *self.cache.pins.values()]:
            swapped = seq.request.status is Status.SWAPPED
            assert len(seq.block_ids) == self.cache.blocks_for(seq.num_computed)
            assert seq.room == len(seq.block_ids) * self.size
            for group, (block_ids, num_dropped) in enumerate(seq.tables):
                assert len(block_ids) == len(seq.block_ids)
                table = block_ids if seq.row < 0 else self.tables[seq.row * self.num_lines + group]
                assert table[: len(block_ids)] == block_ids
                for p in range(num_dropped * self.size, seq.num_computed):
                    if (block := table[p // self.size]) > 0:
                        kv = self.host_kv if swapped else self.kv
                        assert kv[block, p % self.size] == self.content(seq, p, group)
                    else:
                        assert swapped and -block in seq.request.shared_on_device
            lines = self.tables[(seq.row + 1) * self.num_lines - 2 : (seq.row + 1) * self.num_lines]
            assert seq.row < 0 or not self.state_blocks or lines == [seq.state] * 2
            assert self.holds(seq, seq.state, self.host_kv if swapped else self.kv)
        assert all(seq.num_computed == len(seq.request.prompt_token_ids) for seq in self.cache.pins.values())

    @invariant()
    def sealed_blocks_hold_what_they_held(self) -> None:
        """Check that sealed blocks have their recorded content, and that evicted ones left the index."""
        self.note_seals()
        for block, (_, (salt, tokens)) in self.sealed.items():
            for offset in range(self.size):
                end = len(tokens) if b"?" in salt else len(tokens) - self.size + offset + 1
                assert self.kv[block, offset] == (salt, tokens[:end])
            key = self.pool.key_of(block)
            assert key is not None and self.pool.find(key) == block

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for seq in self.live(Status.RUNNING, Status.SWAPPED):
                self.cache.rows.release(seq)
                self.cache.free(seq)
            for name in list(self.cache.pins):
                self.cache.unpin(name)
            assert self.pool.num_used == 0 == self.host.num_used and not o.holders(self.cache)


QUICK = settings(
    max_examples=100,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_random_operations_keep_memory_right() -> None:
    run_state_machine_as_test(Memory, settings=QUICK)


def test_seals_of_blocks_out_of_the_attention_window_are_taken_back() -> None:
    state = Memory()
    state.begin(size=1, num_blocks=3, num_host=0, caching=True, attention_window=1)
    state.admit(which=0, tokens=[0], salt=b"", chunk=1)
    state.seal(which=0)
    state.drop_out_of_window(which=0)
    assert state.live(Status.RUNNING)[0].num_dropped == 1
    state.take_back_seals(which=0)
    state.teardown()


@pytest.mark.slow
def test_many_random_operations_keep_memory_right() -> None:
    run_state_machine_as_test(Memory, settings=settings(QUICK, max_examples=3000, derandomize=False))
