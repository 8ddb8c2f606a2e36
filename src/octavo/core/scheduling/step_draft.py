"""A step while it is planned, and the slices that a request contributes to it."""

from __future__ import annotations

from typing import NamedTuple

from octavo.core.block_pool import Key
from octavo.core.in_flight import InFlightStep
from octavo.core.plan import StepPlan
from octavo.core.request import Request, Sequence, Status
from octavo.core.scheduling.scheduler_state import SchedulerState
from octavo.core.types import NEVER


class ScheduledSlice(NamedTuple):
    """A sequence's slice of the step being planned: the last `num_sampled` of its positions each sample a token."""

    sequence: Sequence
    num_positions: int
    num_sampled: int


class StepDraft:
    """The columns of the plan, and what its slices have used up and will seal."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.plan = StepPlan(state.num_steps)
        self.step = InFlightStep(self.plan, state.cache.pool.last_seal_id)
        self.sequences = self.step.sequences
        self.rows: list[int] = []  # columns of the plan
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.num_sampled: list[int] = []
        self.budget = state.max_num_scheduled_tokens  # tokens left; negative after a group that exceeded it
        self.preempted = False  # a request was preempted for blocks in this step: none is admitted
        self.gave_way: set[Request] = set()  # requests that gave way in this step: they are not resumed in it
        self.sealable: list[Sequence] = []  # sequences with blocks that this plan fills
        self.writes: dict[Key, Sequence] = {}  # key of the first block that each of those fills
        self.longs: dict[int, int] = {}  # tenant -> number of its long prefills in this plan
        self.shares: dict[int, int] | None = None  # tenant -> prefill positions left; None with one tenant

    def prefill_chunk(self, request: Request, due: int, budget: int) -> int:
        """Return how many of its due positions a prefill may compute in this step.

        It is 0 if other long prefills of its tenant are running, or if its tenant's share is used up.
        """
        policy, number = self.state.policy, request.tenant
        longest = policy.long_prefill_token_threshold
        if due <= 1:
            return budget
        if self.shares is not None:
            budget = max(0, min(budget, self.shares[number]))
        if longest and due > longest:
            full = self.longs.get(number, 0) >= self.state.max_long_prefills
            return 0 if full else min(budget, longest)
        return budget

    def next_slices(self, request: Request, budget: int, num_steps: int, chunk: int) -> list[ScheduledSlice] | None:
        """Return the next slices of a request: [] if it waits for a result, None if the budget is too small.

        num_steps  limit of tokens to decode per sequence
        chunk      limit of prefill positions
        """
        cache, sequences = self.state.cache, request.sequences
        chunk = min(chunk, cache.max_chunk)
        if request.needs_result and request.num_pending:
            return []
        if len(sequences) > 1:
            if (recomputed := self._recompute_group(request, chunk)) is not None:
                return recomputed
            num_open = sum(len(seq.token_ids) + seq.num_pending < seq.max_length for seq in sequences)
            num_steps = min(num_steps, budget // max(1, num_open))  # all open sequences step together, or none
            if num_steps < 1:
                if budget < self.state.max_num_scheduled_tokens:
                    return None
                num_steps = 1
        if request.needs_result:
            num_steps = 1
        slices = []
        for seq in sequences:
            length = len(seq.token_ids) + seq.num_pending
            if length >= seq.max_length:
                continue
            due = length - seq.num_computed  # tokens known to the host, or the one that the row holds
            if not seq.block_ids and seq not in cache.holders:  # the last of a rebuilt group: it has not begun
                cache.attach(seq, cache.prefixes.sibling_prefix(seq))
            stop = cache.checkpoints.next_stop(seq) - seq.num_computed
            if due > min(chunk, stop):
                return [ScheduledSlice(seq, min(chunk, stop), 0)]
            # A step of its own reaches a stop: see `Checkpoints.cut`.
            most = due if stop == due else min(chunk, stop - 1)
            fed = min(num_steps, seq.max_length - length, most - due + 1) - 1  # tokens that the device feeds itself
            slices.append(ScheduledSlice(seq, due + fed, fed + 1))
        return slices

    def _recompute_group(self, request: Request, chunk: int) -> list[ScheduledSlice] | None:
        """Return the next slice of a preempted group's recomputation, None when all its sequences have caught up.

        The sequences are recomputed one after another, each up to its last token, so that they share blocks. Computed
        together without sharing, they might not fit where they fitted after the fork. With states all others begin
        where the first one has computed what they have in common.
        """
        cache, prefixes = self.state.cache, self.state.cache.prefixes
        for seq in request.sequences:
            due = len(seq.token_ids) + seq.num_pending - 1 - seq.num_computed
            if due > 0:
                if request.status is Status.SWAPPED:  # swapped out during recomputation: swap in first
                    return []
                if cache.state_blocks:
                    chunk = min(chunk, self._part_group(request))
                if not seq.block_ids:
                    cache.attach(seq, prefixes.sibling_prefix(seq))
                due = len(seq.token_ids) - 1 - seq.num_computed
                if due > 0:
                    stop = cache.checkpoints.next_stop(seq) - seq.num_computed
                    return [ScheduledSlice(seq, min(due, chunk, stop), 0)]
        return None

    def _part_group(self, request: Request) -> int:
        """Let all sequences of a group begin with what they have in common, once the first one has computed it. Returns
        the positions until then."""
        cache, first = self.state.cache, request.sequences[0]
        common = cache.prefixes.common_length(request)
        if first.num_computed == common > 0:
            for seq in request.sequences:
                if not seq.block_ids:
                    cache.attach(seq, cache.prefixes.common_prefix(request))
        return common - first.num_computed if first.num_computed < common else NEVER

    def add(self, slices: list[ScheduledSlice]) -> None:
        """Add a request's slices to the plan. The caller has checked that there are enough blocks."""
        plan, cache, longest = self.plan, self.state.cache, self.state.policy.long_prefill_token_threshold
        for seq, count, num_sampled in slices:
            cache.grow(seq, count, plan)
            if seq.row < 0:
                cache.rows.assign(seq, plan, cache.reads.get(seq, seq.state))
            start, request = seq.num_computed, seq.request
            if longest and len(seq.token_ids) + seq.num_pending - start > longest:
                self.longs[request.tenant] = self.longs.get(request.tenant, 0) + 1
            if not seq.row_has_last:
                plan.host_tokens[len(self.rows)] = seq.token_ids[start : start + count]
            if num_sampled and (request.select_beams or not request.forked):
                plan.num_samples[len(self.rows)] = request.num_samples
            if num_sampled and request.use_structured_output:
                plan.bitmask_slices.append(len(self.rows))
            self.rows.append(seq.row)
            self.starts.append(start)
            self.counts.append(count)
            self.num_sampled.append(num_sampled)
            self.sequences.append(seq)
            seq.num_computed = start + count
            seq.num_pending += num_sampled
            # For a sequence of a group, the host chooses the token or sends it again.
            seq.row_has_last = num_sampled > 0 and (request.only_sequence is not None or not request.needs_result)
            if min(len(seq.token_ids), seq.num_computed) >= seq.seal_at:
                self.sealable.append(seq)
                self.writes[cache.prefixes.next_key(seq, seq.seal_ids)] = seq
