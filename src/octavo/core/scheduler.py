"""The scheduler: plans which sequences compute how many positions in the next step, and the memory operations for it.

A step is filled from three queues: running requests in order of arrival, then swapped ones, then waiting ones, which
are admitted only while no swapped one is before them. Each queue stops at the first request that does not fit.

Among several tenants the least served is admitted first, their prefills share a step, and the one with most rows gives
way to others. A long prefill gets only part of a step, and further long ones let short ones pass.

The scheduler plans step k+1 while the device runs step k. Its view of a sequence therefore lags the device by the
sequence's `num_pending` tokens.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from heapq import heappop, heapreplace
from operator import sub
from typing import Any, NamedTuple, TypeAlias

from octavo.core import commands as cmd
from octavo.core import events as ev
from octavo.core.block_pool import Key
from octavo.core.in_flight import InFlightStep
from octavo.core.kv_cache_manager import KVCacheManager, KVStats
from octavo.core.plan import Drafts, StepPlan, StepResult
from octavo.core.policy import Policy, PreemptionMode
from octavo.core.request import Request, Sequence, Status
from octavo.core.snapshot import Fields, Roster, Snapshot, State
from octavo.core.tenants import Tenant, Tenants, catch_up_shares
from octavo.core.types import HostBlockId
from octavo.errors import CapacityError

Growth: TypeAlias = list[tuple[Sequence, int]]
"""Sequences with the number of positions that each is to compute next."""
LONG_PREFILL = "long prefill"
"""Reason of a waiting request that lets others pass."""
TURN_TOKENS = 4
"""Tokens of each sequence that a request computes before it gives way to another tenant once more."""
PATIENCE_STEPS = 64
"""Steps for which a request lets other tenants pass while none of its own tenant runs."""


class ScheduledSlice(NamedTuple):
    """A sequence's slice of the step being planned: the last `num_sampled` of its positions each sample a token."""

    sequence: Sequence
    num_positions: int
    num_sampled: int


class _Draft:
    """The state of a step while it is planned."""

    __slots__ = (
        "budget",
        "counts",
        "gave_way",
        "longs",
        "num_sampled",
        "plan",
        "preempted",
        "rows",
        "sealable",
        "sequences",
        "shares",
        "starts",
        "step",
        "writes",
    )

    def __init__(self, step: InFlightStep, budget: int) -> None:
        self.step = step
        self.plan = step.plan
        self.sequences = step.sequences
        self.rows: list[int] = []  # columns of the plan
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.num_sampled: list[int] = []
        self.budget = budget  # tokens left of the step's limit; negative after a group that exceeded it
        self.preempted = False  # a request was preempted for blocks in this step: none is admitted
        self.gave_way: set[Request] = set()  # requests that gave way in this step: they are not resumed in it
        self.sealable: list[Sequence] = []  # sequences with blocks that this plan fills
        self.writes: set[Key] = set()  # key of the first block that each of those fills
        self.longs: dict[int, int] = {}  # tenant -> number of its long prefills in this plan
        self.shares: dict[int, int] | None = None  # tenant -> prefill positions left; None with one tenant


class Scheduler:
    """The request queues and the planner of steps. It is the only user of its `KVCacheManager`.

    max_num_batched_tokens    limit of positions per step, decode windows included
    max_num_seqs              limit of running sequences: the rows of the cache
    decode_window             limit of tokens that the device decodes per sequence in one step
    num_speculative_tokens    limit of drafts per forward pass of a sequence; 0: no speculation
    num_watermark_blocks      blocks that an admission leaves free for running requests to grow into
    max_num_scheduled_tokens  current limit of positions per step, lowered after a step ran out of memory. A group that
                              exceeds it runs in a step of its own
    confined_to               the only requests planned at present; empty: all requests are
    tee                       reports the commands that change the scheduler, before it acts on them
    """

    SAVED = Fields("num_rows_taken num_steps num_preemptions _num_arrivals step_limit=max_num_scheduled_tokens")

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        max_num_batched_tokens: int = 8192,
        decode_window: int = 1,
        num_speculative_tokens: int = 0,
        num_watermark_blocks: int = 0,
        policy: Policy | None = None,
    ) -> None:
        self.cache = cache
        self.max_num_seqs = cache.rows.num_rows
        self.max_num_batched_tokens = self.max_num_scheduled_tokens = max_num_batched_tokens
        self.decode_window = decode_window
        self.num_speculative_tokens = num_speculative_tokens
        self.num_watermark_blocks = num_watermark_blocks
        self.policy = policy or Policy()
        self.events, self.tee = cache.events, cache.tee
        self.requests: dict[str, Request] = {}  # all unfinished requests
        self.running: list[Request] = []  # this and the next two are in the policy's order
        self.swapped: list[Request] = []
        self.waiting: list[Request] = []
        self.tenants = Tenants()
        self.in_flight: deque[InFlightStep] = deque()  # planned, without a result yet
        self.confined_to: frozenset[Request] = frozenset()
        self.num_rows_taken = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self._num_arrivals = 0
        self._counted: tuple[int, ...] = cache.counters()

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Append a request to the waiting queue. Raises `CapacityError`, with the numbers, if it could never run.

        A `max_tokens` of None means as many as fit. A number that does not fit is refused, never reduced.
        """
        prompt, width, cache = len(request.prompt_token_ids), request.width, self.cache
        assert request.request_id not in self.requests and request.request_id not in cache.pins, request.request_id
        max_output = cache.max_output_tokens(prompt, width)
        max_tokens = max_output if request.max_tokens is None else request.max_tokens
        if max_tokens > max_output or max_output < 1:
            needs = cache.blocks_at_max_length(prompt, max(max_tokens, 1), width)
            raise CapacityError(
                f"the request needs {needs} blocks of {cache.block_size} tokens at its maximum length ({prompt} prompt "
                f"tokens, max_tokens {request.max_tokens}, width {width}) and the pool has {self._capacity()}; "
                + (f"max_tokens of at most {max_output} fits" if max_output >= 1 else self._remedy(width)),
                param="prompt",
            )
        max_width = min(self.max_num_seqs, self.max_num_batched_tokens)
        if width > max_width:
            raise CapacityError(
                f"the request decodes {width} sequences together and at most {max_width} run in a step; "
                "lower n or raise max_num_seqs and max_num_batched_tokens",
                param="n",
            )
        if request.pin:
            self._check_pin(request)
        if self.tee.active:
            self.tee.emit(cmd.Add(request, max_tokens))
        if request.pin:
            cache.num_pinned += cache.blocks_for(prompt)
        arrival = self._num_arrivals
        self._num_arrivals += 1
        request.begin(arrival, self.policy.order(request, arrival), max_tokens)
        for sequence in request.sequences:
            cache.free(sequence)  # the state after a preemption: a resumed request starts from it too
        self.requests[request.request_id] = request
        self.tenants.enter(request)
        self._enqueue(request)
        if self.events.active:
            self.events.emit(ev.Arrived(request.request_id, prompt, max_tokens, width, request.priority))

    def _capacity(self) -> str:
        pinned = self.cache.num_pinned
        return f"{self.cache.num_unpinned_blocks}" + (f", besides {pinned} pinned ones" if pinned else "")

    @staticmethod
    def _remedy(width: int) -> str:
        return ("lower n, " if width > 1 else "") + "shorten the prompt or enlarge the pool"

    def _check_pin(self, request: Request) -> None:
        """Raise `CapacityError` if an unfinished request might no longer fit next to this pin."""
        cache, total = self.cache, self.cache.pool.num_blocks
        needs = cache.blocks_for(len(request.prompt_token_ids))
        if cache.num_pinned + needs > total // 2:
            raise CapacityError(
                f"{len(request.prompt_token_ids)} tokens to pin take {needs} blocks, {cache.num_pinned} are pinned, "
                f"and at most half of the pool's {total} can be; unpin others or enlarge the pool",
                param="prompt",
            )
        longest = 0
        for other in self.requests.values():
            assert other.max_tokens is not None
            if not other.pin:
                prompt = len(other.prompt_token_ids)
                longest = max(longest, cache.blocks_at_max_length(prompt, other.max_tokens, other.width))
        if longest > cache.num_unpinned_blocks - needs:
            raise CapacityError(
                f"an unfinished request may need up to {longest} blocks, and with {needs} more pinned "
                f"{cache.num_unpinned_blocks - needs} are left for it; pin before it arrives or after it has finished",
                param="prompt",
            )

    def unpin(self, name: str) -> int | None:
        """Release a pin by name. Returns its number of blocks, None if there is no such pin."""
        if name not in self.cache.pins:
            return None
        if self.tee.active:
            self.tee.emit(cmd.Unpin(self.cache.pins[name]))
        num_blocks = self.cache.unpin(name)
        if self.events.active:
            self.events.emit(ev.Unpinned(name, num_blocks))
        return num_blocks

    def abort(self, request_id: str, reason: str = "abort") -> Request | None:
        """Finish a request in any state. Unknown and finished requests are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            if self.tee.active:
                self.tee.emit(cmd.Abort(request, reason))
            self._finish_request(request, reason)
        return request

    def stop(self, sequence: Sequence, reason: str = "stop") -> bool:
        """Finish a sequence whose text met a stop string. Returns True if its request finished with it."""
        if sequence.finish_reason:
            return False
        if self.tee.active:
            self.tee.emit(cmd.Stop(sequence, reason))
        return self._finish_sequence(sequence, reason)

    def limit_steps(self, limit: int) -> None:
        """Change the limit of positions per step."""
        if self.tee.active and limit != self.max_num_scheduled_tokens:
            self.tee.emit(cmd.LimitSteps(limit))
        self.max_num_scheduled_tokens = limit

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.in_flight)

    def stats(self) -> KVStats:
        return self.cache.stats()

    # -- planning ------------------------------------------------------------------------------------------------------

    def schedule(self) -> InFlightStep:
        """Plan the next step. Returns a false one, without a plan, if nothing can run before the next result."""
        if self.tee.active:
            self.tee.emit(cmd.Schedule())
        step = InFlightStep(plan := StepPlan(self.num_steps), self.cache.pool.last_seal_id)
        draft = _Draft(step, self.max_num_scheduled_tokens)
        num_decode_steps, several = self._num_decode_steps(), self.tenants.several and not self.confined_to
        if several:
            self._give_way(draft)
            draft.shares = self._prefill_shares(num_decode_steps)
        all_planned = self._plan_running(draft, num_decode_steps)
        if all_planned and not draft.preempted:
            self._resume_swapped(draft)
            if several:
                self.tenants.serve(draft.sequences, draft.counts)
            if self.waiting and self._first_swapped() is None:
                self._admit_confined(draft) if self.confined_to else self._admit_waiting(draft)
        elif several:
            self.tenants.serve(draft.sequences, draft.counts)
        if self.num_speculative_tokens:
            self._add_drafts(draft)
        for sequence in draft.sealable:  # in the index from the next plan on, not within this one
            self.cache.seal(sequence)
        plan.set_slices(draft.rows, draft.starts, draft.counts, draft.num_sampled)
        if plan:
            self.in_flight.append(step)
            self.num_steps += 1
            if self.events.active:
                self._emit_step(draft)
            self._note_wait_reason(draft)  # also without listeners: `_num_decode_steps` reads the reasons
        return step

    def _num_decode_steps(self) -> int:
        """Tokens to decode per sequence in this step: 1 while a waiting request could be admitted next step, else
        `decode_window`.

        A request that waits for blocks or rows is admitted only after another finishes, so it does not count.
        """
        first = self._first_swapped() or self._first_waiting()
        if first is None or first.wait_reason in ("blocks", "rows"):
            return self.decode_window
        return 1

    def _first_swapped(self) -> Request | None:
        """Return the first swapped request that others wait behind."""
        return next((request for request in self.swapped if not self._lets_pass(request)), None)

    def _first_waiting(self) -> Request | None:
        """Return the first waiting request that may be admitted."""
        if self.confined_to:
            return next((request for request in self.waiting if request in self.confined_to), None)
        return self.waiting[0] if self.waiting else None

    def _plan_running(self, draft: _Draft, num_decode_steps: int) -> bool:
        """Plan the running requests in order. Returns True if all of them were reached.

        A preempted request is the one that is planned or a later one, so the iteration over `running` stays in place.
        """
        cache, pool, plan, running = self.cache, self.cache.pool, draft.plan, self.running
        rows, starts, counts = draft.rows, draft.starts, draft.counts
        num_sampled, sequences, budget = draft.num_sampled, draft.sequences, draft.budget
        for request in running:
            if budget <= 0:
                break
            seq = request.only_sequence
            if seq is not None and seq.row_has_last:
                # The hot path: a single decoding sequence. The cost does not depend on its length.
                start = seq.num_computed
                count = seq.max_length - 1 - start
                if count <= 0:  # all positions are planned: only the last result is missing
                    continue
                if count > num_decode_steps:
                    count = num_decode_steps
                if count > budget:
                    count = budget
                if start + count > seq.room:
                    if cache.attention_window:
                        cache.drop_out_of_window(seq, plan)
                    needs = cache.blocks_for(start + count) - len(seq.block_ids)
                    if needs > pool.num_available and not self._make_room(request, [(seq, count)], draft):
                        break
                    cache.grow(seq, count, plan)
                if request.use_structured_output:
                    plan.bitmask_slices.append(len(rows))
                rows.append(seq.row)
                starts.append(start)
                counts.append(count)
                num_sampled.append(count)
                sequences.append(seq)
                seq.num_computed = start + count
                seq.num_pending += count
                budget -= count
                continue
            due = request.num_due  # as `_prefill_shares` counted it: a rebuilt sequence may find it all at its sibling
            chunk = self._prefill_chunk(request, due, budget, draft)
            if not chunk:  # other prefills come first
                continue
            # A prefill that shares a step decodes one token after its end: its share covers no more.
            max_steps = num_decode_steps if draft.shares is None or due <= 1 else 1
            slices = self._slices_of(request, budget, max_steps, chunk)
            if slices is None:  # its sequences together exceed the remaining budget
                break
            # Not in groups: recomputing a sequence may need blocks of a sibling that the sibling no longer attends to.
            if cache.attention_window and seq is not None:
                cache.drop_out_of_window(seq, plan)
            if not self._make_room(request, [(p.sequence, p.num_positions) for p in slices], draft):
                break
            num_positions = sum(p.num_positions for p in slices)
            self._add_slices(slices, draft)
            budget -= num_positions
            if draft.shares is not None and due > 1:
                draft.shares[request.tenant] -= num_positions
        else:
            draft.budget = budget
            return True
        draft.budget = budget
        return False

    def _prefill_shares(self, num_decode_steps: int) -> dict[int, int]:
        """Return each tenant's share of the step for prefills, after all decodes.

        A tenant with a running prefill gets at least one position: it may hold the blocks that another tenant needs.
        """
        tenants, longest, budget = self.tenants, self.policy.long_prefill_token_threshold, self.max_num_scheduled_tokens
        wants, decodes = dict.fromkeys(tenants.present, 0), dict.fromkeys(tenants.present, 0)
        for request in self.running:
            due = request.num_due
            if due > 1:  # a recomputed group prefills one sequence at a time
                wants[request.tenant] += min(due, longest or due)
            elif not (request.needs_result and request.num_pending):
                left = max(seq.max_length - 1 - seq.num_computed for seq in request.sequences)
                steps = 1 if request.needs_result else num_decode_steps
                decodes[request.tenant] += len(request.sequences) * max(0, min(steps, left))
        budget -= sum(decodes.values())
        prefilling = [number for number in wants if wants[number]]
        for tenant in tenants.present.values() if not self.swapped else ():
            num_longs = 0
            for request in tenant.waiting:
                if wants[tenant.number] >= budget:
                    break
                if request.wait_reason in ("blocks", "rows"):  # may wait for long: one position, so that it is tried
                    wants[tenant.number] += 1
                    break
                num_longs += (is_long := request.is_long_prefill(longest))
                if not is_long or num_longs <= self.policy.max_long_partial_prefills:
                    wants[tenant.number] += min(request.num_due, longest or budget)
        shares = tenants.shares(max(0, budget), wants, decodes)
        if num_starved := sum(not shares[number] for number in prefilling):  # their one position is not the others'
            shares = tenants.shares(max(0, budget - num_starved), wants, decodes)
        for number in prefilling:
            shares[number] = max(1, shares[number])
        return shares

    def _prefill_chunk(self, request: Request, due: int, budget: int, draft: _Draft) -> int:
        """Return how many of its due positions a prefill may compute in this step.

        It is 0 if other long prefills of its tenant are running, or if its tenant's share is used up.
        """
        longest, number = self.policy.long_prefill_token_threshold, request.tenant
        if due <= 1:
            return budget
        if draft.shares is not None:
            budget = max(0, min(budget, draft.shares[number]))
        if longest and due > longest:
            full = draft.longs.get(number, 0) >= self.policy.max_long_partial_prefills
            return 0 if full else min(budget, longest)
        return budget

    def _slices_of(self, request: Request, budget: int, num_steps: int, chunk: int) -> list[ScheduledSlice] | None:
        """Return the next slices of a request: [] if it waits for a result, None if the budget is too small.

        num_steps  limit of tokens to decode per sequence
        chunk      limit of prefill positions
        """
        sequences = request.sequences
        if request.needs_result and request.num_pending:
            return []
        if len(sequences) > 1:
            if (recomputed := self._recompute_group(request, chunk)) is not None:
                return recomputed
            num_open = sum(len(seq.token_ids) + seq.num_pending < seq.max_length for seq in sequences)
            num_steps = min(num_steps, budget // max(1, num_open))  # all open sequences step together, or none
            if num_steps < 1:
                if budget < self.max_num_scheduled_tokens:
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
            if due > chunk:
                return [ScheduledSlice(seq, chunk, 0)]
            fed = min(num_steps, seq.max_length - length, chunk - due + 1) - 1  # tokens that the device feeds itself
            slices.append(ScheduledSlice(seq, due + fed, fed + 1))
        return slices

    def _recompute_group(self, request: Request, chunk: int) -> list[ScheduledSlice] | None:
        """Return the next slice of a preempted group's recomputation, None when all its sequences have caught up.

        The sequences are recomputed one after another, each up to its last token, so that they share blocks. Computed
        together without sharing, they might not fit where they fitted after the fork.
        """
        for seq in request.sequences:
            due = len(seq.token_ids) + seq.num_pending - 1 - seq.num_computed
            if due > 0:
                if request.status is Status.SWAPPED:  # swapped out during recomputation: swap in first
                    return []
                if not seq.block_ids:
                    self.cache.attach(seq, self.cache.sibling_prefix(seq))
                    due = len(seq.token_ids) - 1 - seq.num_computed
                if due > 0:
                    return [ScheduledSlice(seq, min(due, chunk), 0)]
        return None

    def _add_slices(self, slices: list[ScheduledSlice], draft: _Draft) -> None:
        """Add a request's slices to the plan. The caller has checked that there are enough blocks."""
        plan, cache, longest = draft.plan, self.cache, self.policy.long_prefill_token_threshold
        for seq, count, num_sampled in slices:
            cache.grow(seq, count, plan)
            if seq.row < 0:
                cache.rows.assign(seq, plan)
            start, request = seq.num_computed, seq.request
            if longest and len(seq.token_ids) + seq.num_pending - start > longest:
                draft.longs[request.tenant] = draft.longs.get(request.tenant, 0) + 1
            if not seq.row_has_last:
                plan.host_tokens[len(draft.rows)] = seq.token_ids[start : start + count]
            if num_sampled and (request.select_beams or not request.forked):
                plan.num_samples[len(draft.rows)] = request.num_samples
            if num_sampled and request.use_structured_output:
                plan.bitmask_slices.append(len(draft.rows))
            draft.rows.append(seq.row)
            draft.starts.append(start)
            draft.counts.append(count)
            draft.num_sampled.append(num_sampled)
            draft.sequences.append(seq)
            seq.num_computed = start + count
            seq.num_pending += num_sampled
            # For a sequence of a group, the host chooses the token or sends it again.
            seq.row_has_last = num_sampled > 0 and (request.only_sequence is not None or not request.needs_result)
            if min(len(seq.token_ids), seq.num_computed) >= seq.seal_at:
                draft.sealable.append(seq)
                draft.writes.add(cache.next_key(seq, seq.seal_ids))

    def _add_drafts(self, draft: _Draft) -> None:
        """Extend slices by drafts, with the budget and the blocks that are left when everything else has its place.

        So drafts displace nothing and preempt nobody. They are not charged to tenants. A sequence's end becomes an
        upper bound, and a pass returns at least one token, so its other positions stay what they were. Drafts take no
        new blocks while a request waits for blocks.
        """
        plan, cache, budget = draft.plan, self.cache, draft.budget
        first = self._first_swapped() or self._first_waiting()
        is_short = draft.preempted or (first is not None and first.wait_reason == "blocks")
        num_free = 0 if is_short else max(0, cache.pool.num_available - self._watermark())
        for i, seq in enumerate(draft.sequences):
            num_passes, end, request = draft.num_sampled[i], seq.num_computed, seq.request
            num_drafts = min(request.num_draft_tokens, self.num_speculative_tokens)
            if not num_passes or not num_drafts or request.needs_result or request.use_structured_output:
                continue
            # At most half of the remaining length, so that the next step can plan this sequence before the result.
            extra = min(num_passes * num_drafts, (seq.max_length - 1 - end) // 2, budget)
            if end + extra > seq.room:
                extra = min(extra, seq.room + num_free * cache.block_size - end)
                num_free -= max(0, cache.blocks_for(end + extra) - len(seq.block_ids))
            if extra <= 0:
                continue
            cache.grow(seq, extra, plan)
            plan.drafts[i] = Drafts(num_passes, min(num_drafts, extra))
            draft.counts[i] += extra
            draft.num_sampled[i] += extra
            seq.num_computed += extra
            seq.num_pending += extra
            seq.num_unverified += extra
            budget -= extra
        draft.budget = budget

    # -- giving way ----------------------------------------------------------------------------------------------------

    def _lets_pass(self, request: Request) -> bool:
        """Whether other tenants pass a request that waits for rows or blocks, or that gave way."""
        return request.waits_since >= 0 and self.tenants.several and not self._is_overdue(request)

    def _is_overdue(self, request: Request) -> bool:
        """Whether a request has let others pass for so long that all other tenants give way to it."""
        if request.waits_since < 0 or self.tenants.present[request.tenant].num_rows:
            return False
        return self.num_steps - request.waits_since >= PATIENCE_STEPS

    def _give_way(self, draft: _Draft) -> None:
        """Preempt requests for the first request of each tenant that waits for rows or blocks.

        The latest request of the tenant with most rows gives way to one of a tenant that has fewer even with it, and
        any request to an overdue one. Called before anything is planned: a victim has no slice in this step.
        """
        tenants, num_free = self.tenants.present, self.max_num_seqs - self.num_rows_taken
        held = {number: tenant.num_rows for number, tenant in tenants.items()}
        swapped = {request.tenant: request for request in reversed(self.swapped)}
        most, gone = max(held.values()), set()
        ready = [r for r in reversed(self.running) if not r.pin and r.has_had_its_turn]
        for number in sorted(held, key=held.__getitem__):
            request = swapped.get(number) or next(iter(tenants[number].waiting), None)
            if request is None or request.num_pending or number in gone:
                continue
            if ready and (self._is_overdue(request) or most > held[number] + request.width):
                for victim in self._victims(request, num_free, held, ready):
                    ready.remove(victim)
                    num_free += victim.width
                    needs = self.cache.blocks_for(len(request.sequences[0].token_ids))
                    self.preempt(victim, request, needs, draft.step, gives_way=True)
                    victim.waits_since = self.num_steps
                    draft.gave_way.add(victim)
                    gone.add(victim.tenant)
                most = max(held.values())
            num_free = max(0, num_free - request.width)

    def _victims(self, request: Request, num_free: int, held: dict[int, int], ready: list[Request]) -> list[Request]:
        """Return the requests that give way to this one: enough for its rows or none, and one if it waits for blocks.

        They are among the `ready` ones, which have had their turn, so all of them progress. Their rows are taken from
        `held`.
        """
        victims: list[Request] = []
        after, needs_block = held.copy(), request.wait_reason == "blocks"
        limit = -1 if self._is_overdue(request) else held[request.tenant] + request.width
        most = max(after.values())
        for victim in ready:
            if num_free >= request.width and (victims or not needs_block):
                break
            number = victim.tenant
            if number == request.tenant or after[number] <= limit or (after[number] < most and limit >= 0):
                continue
            if self.policy.by_priority and victim.priority < request.priority:
                continue
            victims.append(victim)
            after[number] -= victim.width
            most = max(after.values())
            num_free += victim.width
        if num_free < request.width:
            return []
        held.update(after)
        return victims

    # -- admission -----------------------------------------------------------------------------------------------------

    def _admit_waiting(self, draft: _Draft) -> None:
        """Admit waiting requests, one tenant's queue at a time.

        Tenants with share left come first, and among them the least served. What they leave is shared again. Within a
        tenant the order is kept, except that long prefills let others pass.

        A request that waits for blocks or rows lets other tenants pass for `PATIENCE_STEPS`. Then it stops admission:
        otherwise others could take every block that becomes free, and it might wait for ever.
        """
        behind = {request.tenant for request in (*self.swapped, *draft.gave_way)}  # whose own requests come first
        passed = {t: 0 for t in self.tenants.present.values() if t.waiting and t.number not in behind}
        shares, places = draft.shares, {tenant: i for i, tenant in enumerate(passed)}

        def entry(tenant: Tenant) -> tuple[bool, bool, int, tuple[int, int], int, Tenant]:
            """The tenant's place in the line, which changes only with its own requests and with the shares."""
            request, starved = tenant.waiting[passed[tenant]], shares is not None and shares[tenant.number] <= 0
            return not self._is_overdue(request), starved, tenant.served, request.order, places[tenant], tenant

        line = sorted(map(entry, passed))  # a heap, from here on
        while line and draft.budget > 0:
            tenant = line[0][-1]
            request, budget = tenant.waiting[passed[tenant]], draft.budget
            if shares is not None and shares[tenant.number] <= 0:
                left = sorted((item[-1] for item in line), key=places.__getitem__)
                shares.update({tenant.number: 1} if self._is_overdue(request) else catch_up_shares(budget, left))
                line = sorted(map(entry, left))
                continue
            if self._admit(request, draft):
                if shares is not None:
                    tenant.served += budget - draft.budget
                    shares[tenant.number] -= budget - draft.budget
            elif request.wait_reason == LONG_PREFILL:
                passed[tenant] += 1
            elif request.wait_reason in ("blocks", "rows") and not self._lets_pass(request):
                return
            else:
                heappop(line)
                continue
            if passed[tenant] == len(tenant.waiting):
                heappop(line)
            elif len(line) > 1:
                heapreplace(line, entry(tenant))

    def _admit_confined(self, draft: _Draft) -> None:
        """Admit requests of `confined_to` in order."""
        while draft.budget > 0 and (first := self._first_waiting()) is not None and self._admit(first, draft):
            pass

    def _admit(self, request: Request, draft: _Draft) -> bool:
        """Admit a request and plan its first slice. Returns False if it has to wait, with the reason set."""
        num_longs = draft.longs.get(request.tenant, 0)
        if request.wait_reason == LONG_PREFILL and num_longs >= self.policy.max_long_partial_prefills:
            return False
        cache, pool, seq = self.cache, self.cache.pool, request.sequences[0]
        if request.num_pending:
            return self._set_wait_reason(request, "in flight", request.num_pending)
        if self.num_rows_taken + request.width > self.max_num_seqs:
            return self._set_wait_reason(request, "rows", request.width, self.max_num_seqs - self.num_rows_taken)
        prefix = cache.lookup(seq)
        due = len(seq.token_ids) - prefix.num_positions * (request.only_sequence is not None)
        chunk = self._prefill_chunk(request, due, draft.budget, draft)
        if not chunk:
            return self._set_wait_reason(request, LONG_PREFILL, due)
        if draft.writes and cache.is_next_block_in(draft.writes, seq, prefix):
            return self._set_wait_reason(request, "prefix in flight", 0)
        needs = cache.blocks_to_admit(seq, prefix) + self._headroom(request)
        if needs > pool.num_available - self._watermark():
            return self._wait_for_blocks(request, needs)
        self._leave_queue(request)
        if request.num_preemptions:
            self.policy.costs.record_return(prefix.num_positions, len(seq.token_ids))
        if request.num_cached_tokens < 0:
            cache.count_lookup(seq, prefix)
            request.num_cached_tokens = prefix.num_positions
        cache.attach(seq, prefix)
        self._start(request)
        if self.events.active:
            self.events.emit(ev.Admitted(request.request_id, seq.num_computed, len(seq.token_ids)))
        slices = self._slices_of(request, draft.budget, 1, chunk)
        if slices and (
            len(request.sequences) == 1
            or cache.blocks_needed((p.sequence, p.num_positions) for p in slices) <= pool.num_available
        ):
            self._add_slices(slices, draft)
            draft.budget -= sum(p.num_positions for p in slices)
        return True

    def _resume_swapped(self, draft: _Draft) -> None:
        """Swap in requests in order, up to the first that has to wait and lets none pass."""
        for request in self.swapped[:]:
            if draft.budget <= 0:
                return
            if request not in draft.gave_way and not self._swap_in(request, draft) and not self._lets_pass(request):
                return

    def _swap_in(self, request: Request, draft: _Draft) -> bool:
        """Swap in a request as a whole and plan its next slices. Returns False if it has to wait."""
        cache = self.cache
        if request.num_pending:
            return self._set_wait_reason(request, "in flight", request.num_pending)
        if self.num_rows_taken + request.width > self.max_num_seqs:
            return self._set_wait_reason(request, "rows", request.width, self.max_num_seqs - self.num_rows_taken)
        found = cache.find_swap_in_blocks(request)
        if found is None:  # a block shared on the device was evicted: the host blocks are useless without it
            self._leave_queue(request)
            self._requeue(request)
            if self.events.active:
                self.events.emit(ev.SwapLost(request.request_id))
            return True
        chunk = min(draft.budget, self.policy.long_prefill_token_threshold or draft.budget)
        slices = self._slices_of(request, draft.budget, 1, chunk)
        if slices is None:
            return self._set_wait_reason(request, "budget", len(request.sequences), draft.budget)
        needs = found.num_needed + cache.blocks_needed(((p.sequence, p.num_positions) for p in slices), swapped=True)
        needs += self._headroom(request)
        if needs > cache.pool.num_available - self._watermark():
            return self._wait_for_blocks(request, needs)
        self.swapped.remove(request)
        cache.swap_in(request, found, draft.plan)
        draft.step.swapped_requests.append(request)
        draft.step.swap_in_requests.update(dict.fromkeys(found.host_ids, request))
        self._start(request)
        if self.events.active:
            self.events.emit(ev.SwappedIn(request.request_id, len(found.host_ids), len(found.shared_on_device)))
        self._add_slices(slices, draft)
        draft.budget -= sum(p.num_positions for p in slices)
        return True

    def _start(self, request: Request) -> None:
        request.status, request.wait_reason = Status.RUNNING, ""
        if request.waits_since >= 0:
            request.turn_ends, request.waits_since = len(request.sequences[0].token_ids) + TURN_TOKENS, -1
        insort(self.running, request)
        self._take_rows(request, request.width)

    def _take_rows(self, request: Request, num: int) -> None:
        self.num_rows_taken += num
        self.tenants.present[request.tenant].num_rows += num

    def _watermark(self) -> int:
        return self.num_watermark_blocks if self.running else 0  # else a request as large as the pool would never run

    def _headroom(self, request: Request) -> int:
        """Return the blocks that must stay free when a preempted request resumes, for it and all others to grow.

        It is 0 if nothing else runs, or the request might wait for ever.
        """
        if not request.num_preemptions or not self.running:
            return 0
        left = max(s.max_length - len(s.token_ids) for s in request.sequences)
        positions = min(self.policy.headroom(request), left)
        return self.cache.blocks_for(positions) * (self.num_rows_taken + request.width)

    # -- preemption and queues -----------------------------------------------------------------------------------------

    def _make_room(self, request: Request, growth: Growth, draft: _Draft) -> bool:
        """Preempt requests until the blocks for this growth are available. Returns False if `request` was one of them,
        or if it waits for a result: drafts in flight hold the blocks, and none is preempted if rejecting them suffices.

        The need is counted again after each: a tail that the victim shared is no longer copied.
        """
        while (needs := self.cache.blocks_needed(growth)) > self.cache.pool.num_available:
            draft.preempted = True
            if self.num_speculative_tokens and self._num_held_by_drafts() >= needs - self.cache.pool.num_available:
                return False
            victim = self.policy.victim(self.running, request, self.cache)
            self.preempt(victim, request, needs, draft.step)
            if victim is request:
                return False
        return True

    def _num_held_by_drafts(self) -> int:
        """Blocks that running sequences release if all drafts in flight are rejected."""
        blocks_for = self.cache.blocks_for
        unverified = (seq for request in self.running for seq in request.sequences if seq.num_unverified)
        return sum(len(seq.block_ids) - blocks_for(seq.num_computed - seq.num_unverified) for seq in unverified)

    def preempt(
        self, victim: Request, for_request: Request, needs: int, step: InFlightStep, *, gives_way: bool = False
    ) -> None:
        """Release the victim's blocks and rows at once, even with a step in flight.

        Stream order makes that safe, and late results are appended in any state. One that
        gives way needs no headroom to resume.
        """
        cache, pool = self.cache, self.cache.pool
        free, evictable = pool.num_free, pool.num_cached
        self._leave_queue(victim)
        self.num_preemptions += 1
        victim.num_preemptions += not gives_way
        num_blocks, num_positions = cache.count_private_blocks(victim)
        mode, why = self.policy.preemption_mode(victim, num_blocks, num_positions)
        if victim.pin:  # its blocks are useful only on the device
            mode, why = PreemptionMode.RECOMPUTE, "pin"
        if mode is PreemptionMode.SWAP and not cache.swap_out(victim, step.plan):
            mode, why = PreemptionMode.RECOMPUTE, "no host room"
        if mode is PreemptionMode.SWAP:
            victim.status = Status.SWAPPED
            step.swapped_requests.append(victim)
            insort(self.swapped, victim)
        else:
            self._requeue(victim)
        if self.events.active:
            why = "share" if gives_way else why
            details = mode.value, for_request.request_id, needs, free, evictable, why, num_blocks, num_positions
            self.events.emit(ev.Preempted(victim.request_id, *details))

    def _leave_queue(self, request: Request) -> None:
        """Remove a request from its queue. A running request also releases its rows."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._take_rows(request, -request.width)
            for seq in request.sequences:
                self.cache.rows.release(seq)
        elif request.status is Status.SWAPPED:
            self.swapped.remove(request)
        else:
            self.waiting.remove(request)
            self.tenants.stop_waiting(request)

    def _enqueue(self, request: Request) -> None:
        insort(self.waiting, request)
        self.tenants.wait(request)

    def _requeue(self, request: Request) -> None:
        """Free a request's blocks in either tier and append it to the waiting queue, without a reason yet."""
        for seq in request.sequences:
            self.cache.free(seq)
        request.status, request.wait_reason, request.shared_on_device = Status.WAITING, "", {}
        self._enqueue(request)

    def _set_wait_reason(self, request: Request, reason: str, needs: int, free: int = 0, evictable: int = 0) -> bool:
        """Set the reason why a request waits, and emit it if it changed. Always returns False."""
        if reason in ("blocks", "rows") and request.status is Status.WAITING and request.waits_since < 0:
            request.waits_since = self.num_steps
        if request.wait_reason != reason:
            request.wait_reason = reason
            if self.events.active:
                self.events.emit(ev.Waiting(request.request_id, reason, needs, free, evictable))
        return False

    def _wait_for_blocks(self, request: Request, needs: int) -> bool:
        pool = self.cache.pool
        free = max(0, pool.num_free - self._watermark())
        return self._set_wait_reason(request, "blocks", needs, free, pool.num_cached)

    # -- committing results --------------------------------------------------------------------------------------------

    def update(self, step: InFlightStep, result: StepResult, *, last: bool = True) -> list[Request]:
        """Commit the sampled tokens of a step and return the requests that this finished.

        With `last` false the result is partial: the first columns of a decode window that still runs, for streaming.
        Results go to the step's sequences in any state; those of finished sequences are dropped.
        """
        if last:
            assert self.in_flight and self.in_flight[0] is step, "results arrive in the order of the plans"
        if self.tee.active:
            self.tee.emit(cmd.Update(step, result, last))
        if result.corrupt:
            self._recompute_corrupt(step, result.corrupt)
        if step.void_slices:
            result.drop(step.void_slices)
        if last:
            self.in_flight.popleft()
        else:
            step.count_partial(result)
        finished: list[Request] = []
        for i in result.errors:
            request = step.sequences[i].request
            if request.status is not Status.FINISHED:
                request.error = result.errors[i]
                self._finish_request(request, "error")
                finished.append(request)
        candidates: dict[Request, list[tuple[Sequence, Any]]] = {}
        if last and step.plan.drafts:
            self._reject_drafts(step, result)
        for seq, tokens in zip(step.sequences, result.tokens, strict=True):
            if not tokens or seq.finish_reason:  # a prefill chunk, or tokens after the end of the sequence
                continue
            request = seq.request
            if request.pin and request.status is not Status.RUNNING:  # a preempted pin: its blocks are recomputed
                seq.num_pending -= len(tokens)
                continue
            if request.only_sequence is None:
                if request.select_beams is not None:
                    seq.num_pending -= 1
                    candidates.setdefault(request, []).append((seq, tokens))
                    continue
                if not request.forked:
                    tokens = self._fork(seq, tokens)
            if len(tokens) == 1:
                token = tokens[0]
                seq.num_pending -= 1
                seq.token_ids.append(token)
                if token in request.stop_ids:
                    seq.stop_token = token
            else:
                seq.num_pending -= len(tokens)
                if not request.stop_ids.isdisjoint(tokens):
                    tokens = self._cut_at_stop(seq, tokens)
                seq.token_ids.extend(tokens)
            known = len(seq.token_ids)
            sealable = known if known < seq.num_computed else seq.num_computed
            # In a part with drafts, the last token's position may not be computed yet.
            if sealable >= seq.seal_at and (last or not seq.num_unverified) and request.status is Status.RUNNING:
                self.cache.seal(seq)
            if seq.stop_token is not None:
                if self._finish_sequence(seq, "stop"):
                    finished.append(request)
            elif known >= seq.max_length and self._finish_sequence(seq, "length"):
                finished.append(request)
        for request, parents in candidates.items():
            if self._commit_beams(request, parents):
                finished.append(request)
        return finished

    def _reject_drafts(self, step: InFlightStep, result: StepResult) -> None:
        """Take back the tokens and positions that the step planned, and that neither this result nor a part has."""
        step.settle_drafts()
        for i in step.plan.drafts:
            seq = step.sequences[i]
            if not seq.finish_reason and i not in step.void_slices:
                num = step.outstanding[i] - len(result.tokens[i])
                seq.num_pending -= num
                self.cache.shrink(seq, num)

    def _cut_at_stop(self, seq: Sequence, tokens: Any) -> Any:
        """Return a decode window's tokens up to and including its first stop token."""
        end = next(i for i, token in enumerate(tokens) if token in seq.request.stop_ids)
        seq.stop_token = tokens[end]
        return tokens[: end + 1]

    def _fork(self, parent: Sequence, samples: Any) -> Any:
        """Fork a request with n > 1: the parent keeps the first sample, each other one starts a child sequence."""
        request = parent.request
        request.forked, request.needs_result = True, False
        children = []
        for index in range(1, request.width):
            child = Sequence(request, index, parent.token_ids[:], parent.max_length)
            self.cache.fork(parent, child)
            children.append(child)
        request.sequences += children
        for child, token in zip(children, samples[1:], strict=True):
            self._append(child, token)
        return samples[:1]

    def _commit_beams(self, request: Request, parents: list[tuple[Sequence, Any]]) -> bool:
        """Continue with the beams that `select_beams` returns. Returns True if the request finished.

        A parent selected twice is forked. All selected beams take their references before the others are released:
        otherwise a block could drop to 0 references and be lost in between.
        """
        assert request.select_beams is not None
        selected = request.select_beams(parents)
        if self.tee.active:
            self.tee.emit(cmd.BeamsSelected(request, [seq for seq, _ in parents], selected))
        tokens_before = {seq: seq.token_ids[:] for seq, _ in parents}
        beams: list[tuple[Sequence, int]] = []
        kept: set[Sequence] = set()
        for index, (parent, token) in enumerate(selected):
            beam = parent
            if parent in kept:
                beam = Sequence(request, index, tokens_before[parent][:], parent.max_length)
                self.cache.fork(parent, beam)
            kept.add(parent)
            beams.append((beam, token))
        for seq, _ in parents:
            if seq not in kept:
                seq.finish_reason = "pruned"
                self._release(seq)
        request.sequences = [beam for beam, _ in beams]
        for index, (beam, token) in enumerate(beams):
            beam.index, beam.row_has_last = index, False
            self._append(beam, token)
        if not request.sequences and request.status is not Status.FINISHED:
            num_tokens = sum(len(seq.token_ids) + 1 - len(request.prompt_token_ids) for seq, _ in parents)
            self._finish_request(request, "stop", num_tokens)
        return request.status is Status.FINISHED

    def _append(self, seq: Sequence, token: int) -> None:
        """Append a token to a beam or to a sequence that was just forked.

        No block can be sealed here: all computed tokens were known when they were planned, and sealed then.
        """
        request = seq.request
        seq.token_ids.append(token)
        if token in request.stop_ids:
            seq.stop_token = token
        if seq.stop_token is not None:
            self._finish_sequence(seq, "stop")
        elif len(seq.token_ids) >= seq.max_length:
            self._finish_sequence(seq, "length")

    def _finish_sequence(self, seq: Sequence, reason: str) -> bool:
        """Finish one sequence. Returns True if its request finished with it."""
        request = seq.request
        seq.finish_reason = reason
        if len(request.sequences) == 1:
            self._finish_request(request, reason)
            return True
        request.sequences.remove(seq)
        request.finished_sequences.append(seq)
        self._release(seq)
        return False

    def _finish_request(self, request: Request, reason: str, num_ended: int = 0) -> None:
        """Finish a request. `num_ended` counts output tokens whose sequences ended when `select_beams` kept none."""
        for seq in request.sequences:
            seq.finish_reason = seq.finish_reason or reason
            if reason == "error":
                self.cache.discard(seq)
            if request.pin and request.status is Status.RUNNING and not seq.num_pending and reason == "length":
                self._pin(seq)
            else:
                self._release(seq)
        if request.pin and request.request_id not in self.cache.pins:
            self.cache.num_pinned -= self.cache.blocks_for(len(request.prompt_token_ids))
        request.finished_sequences += request.sequences
        request.sequences = []
        self._leave_queue(request)
        self.tenants.leave(request)
        request.status = Status.FINISHED
        if self.confined_to:
            self.confined_to -= {request}
        del self.requests[request.request_id]
        if self.events.active:
            num_prompt = len(request.prompt_token_ids)
            num_tokens = num_ended + sum(len(s.token_ids) - num_prompt for s in request.finished_sequences)
            self.events.emit(ev.Finished(request.request_id, reason, num_tokens))

    def _pin(self, seq: Sequence) -> None:
        self.cache.rows.release(seq)
        self.cache.pin(seq)
        if self.events.active:
            self.events.emit(ev.Pinned(seq.request.request_id, seq.num_computed, len(seq.block_ids)))

    def _release(self, seq: Sequence) -> None:
        self.cache.rows.release(seq)
        self.cache.free(seq)

    # -- failed steps and corrupt blocks -------------------------------------------------------------------------------

    def fail(self, step: InFlightStep, limit: int = 0) -> list[Request]:
        """Handle a step that failed on the device, together with all steps queued after it.

        Seals of these steps are removed, and every request in them is recomputed from the tokens that the host has: its
        blocks may hold anything. Returns these requests; the engine may abort any of them.

        limit   new limit of positions per step if the step ran out of memory; 0: unchanged
        """
        assert step in self.in_flight
        if self.tee.active:
            self.tee.emit(cmd.Fail(step, limit))
        self.max_num_scheduled_tokens = limit or self.max_num_scheduled_tokens
        touched: dict[Request, None] = {}
        void: InFlightStep | None = None
        while void is not step:
            void = self.in_flight.pop()
            left = void.outstanding
            void.settle_drafts()
            for i, seq in enumerate(void.sequences):
                if not seq.finish_reason and i not in void.void_slices:
                    seq.num_pending -= left[i]
                    touched[seq.request] = None
            touched.update((r, None) for r in void.swapped_requests if r.status is not Status.FINISHED)
        for seq in self.cache.unseal_after(step.seal_mark):  # has no slice in these steps, but uses their blocks
            touched[seq.request] = None
        for request in touched:
            details = ("out of memory", step.plan.num_tokens, limit) if limit else ()
            self._recompute(request, ev.Recomputed(request.request_id, step.plan.step, *details))
        return list(touched)

    def _recompute_corrupt(self, step: InFlightStep, corrupt: list[HostBlockId]) -> None:
        """Handle host blocks of the plan's `swap_ins` whose content changed while they were swapped out.

        Their requests are recomputed from the tokens that the host has. So is every request that began with a block
        sealed since, because it may be one of theirs. Results in flight of these requests are void.
        """
        cache, mark = self.cache, step.seal_mark
        cache.num_corrupt += len(corrupt)
        hit = Counter(step.swap_in_requests[block] for block in corrupt)
        cache.unseal_after(mark)
        affected = dict.fromkeys(r for r in self.requests.values() if r in hit or r.newest_prefix_seal > mark)
        for in_flight in self.in_flight:
            in_flight.drop(affected)
        for request in affected:
            if request in hit and self.events.active:
                self.events.emit(ev.Corrupt(request.request_id, hit[request]))
            self._recompute(request, ev.Recomputed(request.request_id, step.plan.step, "corrupt"))

    def _recompute(self, request: Request, why: ev.Recomputed) -> None:
        self._leave_queue(request)
        self._requeue(request)
        if self.events.active:
            self.events.emit(why)

    def confine(self, requests: Iterable[Request]) -> None:
        """Plan only these requests from now on; with none, plan all requests again.

        The others wait and release their blocks, so that the confined requests can be admitted.
        """
        members = tuple(requests)
        if self.tee.active:
            self.tee.emit(cmd.Confine(members))
        self.confined_to = frozenset(members)
        if self.confined_to:
            for request in (*self.running, *self.swapped):
                if request not in self.confined_to:
                    self._leave_queue(request)
                    self._requeue(request)
                    if self.events.active:
                        self.events.emit(ev.Recomputed(request.request_id, self.num_steps, "confined"))

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def settings(self) -> State:
        """The arguments that the scheduler, its cache and its policy are made with, as plain data."""
        return {
            **self.cache.settings(),
            **self.policy.settings(),
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "decode_window": self.decode_window,
            "num_speculative_tokens": self.num_speculative_tokens,
            "num_watermark_blocks": self.num_watermark_blocks,
        }

    @classmethod
    def from_settings(cls, settings: State) -> Scheduler:
        """An empty scheduler with these settings."""
        return cls(
            KVCacheManager.from_settings(settings),
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            decode_window=settings["decode_window"],
            num_speculative_tokens=settings.get("num_speculative_tokens", 0),  # older recordings have none
            num_watermark_blocks=settings["num_watermark_blocks"],
            policy=Policy.from_settings(settings),
        )

    def snapshot(self) -> Snapshot:
        """The state between two commands, without tokens: see `core.snapshot`."""
        steps, pins = self.in_flight, self.cache.pins.values()
        requests = dict.fromkeys(self.requests.values())
        for step in steps:  # with those that have finished since
            requests |= dict.fromkeys([*(seq.request for seq in step.sequences), *step.swapped_requests])
        requests |= dict.fromkeys(seq.request for seq in pins)
        sequences = dict.fromkeys(seq for r in requests for seq in (*r.sequences, *r.finished_sequences))
        for step in steps:  # with beams that were not selected
            sequences |= dict.fromkeys(step.sequences)
        roster = Roster(requests, sequences | dict.fromkeys(pins))
        return Snapshot(
            {
                **self.cache.snapshot(roster),
                "scheduler": self.SAVED.save(self),
                "counted": list(self._counted),
                "served": self.tenants.snapshot(),
                "costs": self.policy.costs.snapshot(),
                "requests": [request.snapshot(roster) for request in roster.requests],
                "sequences": [seq.snapshot(roster) for seq in roster.sequences],
                "scheduled": roster.indices(self.requests.values()),
                "running": roster.indices(self.running),
                "swapped": roster.indices(self.swapped),
                "waiting": roster.indices(self.waiting),
                "confined": roster.indices(r for r in self.requests.values() if r in self.confined_to),
                "in_flight": [step.snapshot(roster) for step in steps],
            },
            roster,
        )

    def restore(self, state: State, requests: Seq[Request], tokens: Seq[array[int]]) -> None:
        """Continue from a snapshot. This scheduler is new, and has the same settings.

        requests  for each entry of `state["requests"]` the request, which has not begun
        tokens    for each entry of `state["sequences"]` its tokens
        """
        roster = Roster(
            requests,
            [
                Sequence.restored(entry, requests, known)
                for entry, known in zip(state["sequences"], tokens, strict=True)
            ],
        )
        for request, entry in zip(requests, state["requests"], strict=True):
            request.restore(entry, roster)
        self.cache.restore(state, roster)
        self.SAVED.load(self, state["scheduler"])
        self.policy.costs.restore(state["costs"])
        self._counted = tuple(state["counted"])
        self.requests = {request.request_id: request for request in roster.requests_at(state["scheduled"])}
        self.running = roster.requests_at(state["running"])
        self.swapped = roster.requests_at(state["swapped"])
        self.waiting = roster.requests_at(state["waiting"])
        self.confined_to = frozenset(roster.requests_at(state.get("confined", ())))  # recordings before it have none
        self.tenants.restore(state["served"], self.requests.values(), self.waiting)
        self.in_flight.extend(InFlightStep.restored(entry, roster) for entry in state["in_flight"])

    # -- events --------------------------------------------------------------------------------------------------------

    def _emit_step(self, draft: _Draft) -> None:
        pool, plan, before = self.cache.pool, draft.plan, self._counted
        self._counted = now = self.cache.counters()
        self.events.emit(
            ev.Step(
                plan.step,
                len(plan.rows),
                self.max_num_scheduled_tokens - draft.budget,
                len(self.running),
                len(self.waiting),
                len(self.swapped),
                pool.num_used,
                pool.num_cached,
                pool.num_free,
                *map(sub, now, before),
            )
        )

    def _note_wait_reason(self, draft: _Draft) -> None:
        """Set the reason of the first waiting request if this step did not even try to admit it."""
        waiting, swapped = self._first_waiting(), self._first_swapped()
        if swapped and waiting:
            self._set_wait_reason(waiting, "behind a swapped request", len(self.swapped))
        request = swapped or waiting
        if request and not request.wait_reason:
            if draft.preempted:
                needs = self.cache.blocks_for(len(request.sequences[0].token_ids))
                self._wait_for_blocks(request, needs + self._headroom(request))
            else:
                num_due = len(request.sequences[0].token_ids) - request.sequences[0].num_computed
                self._set_wait_reason(request, "budget", num_due, max(0, draft.budget))
