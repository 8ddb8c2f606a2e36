"""Which sequences compute how many positions in the next step, and what memory must do for it.

Each step: the running in order of arrival; then the swapped; then the waiting, and those only while nothing is swapped.
Each of the three stops at the first request that does not fit. Of several tenants the least served is let in first, and
their prompts share a step. A long prompt takes a part of a step only, and the next long one lets short ones pass. The
scheduler plans step k+1 while the device runs step k, so what it knows of a sequence lags what the device has:
`num_pending` tokens are on their way.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from octavo.core import events as ev
from octavo.core.block_pool import Key
from octavo.core.kv_cache_manager import KVCacheManager, KVStats
from octavo.core.plan import StepPlan, StepResult
from octavo.core.policy import Policy, PreemptionMode
from octavo.core.request import Request, Sequence, Status
from octavo.core.tenants import Tenant, Tenants, level
from octavo.core.types import HostBlockId
from octavo.errors import CapacityError

LONG_PREFILL = "long prefill"
"""Why a request waits while it lets others pass."""


class ScheduledSlice(NamedTuple):
    """What a sequence is to do in a step: compute positions, the last `num_sampled` of which give a token."""

    sequence: Sequence
    num_positions: int
    num_sampled: int


class _Draft:
    """A plan in the making."""

    __slots__ = ("budget", "longs", "plan", "preempted", "sealable", "shares", "writes")

    def __init__(self, plan: StepPlan, budget: int) -> None:
        self.plan = plan
        self.budget = budget  # tokens left of the step's limit; below 0 where a group went beyond it
        self.preempted = False  # somebody was thrown out in this step: nobody comes in
        self.sealable: list[Sequence] = []  # sequences with blocks that this plan fills
        self.writes: set[Key] = set()  # the first block that each of those fills
        self.longs: dict[int, int] = {}  # tenant -> its long prompts that have a chunk in this plan
        self.shares: dict[int, int] | None = None  # tenant -> positions left to its prompts; None: there is one tenant


class Scheduler:
    """The queues of requests, over one `KVCacheManager` that nobody else touches.

    max_num_batched_tokens  positions a step computes at most, windows included
    max_num_seqs            sequences that run at most: the rows of the cache
    decode_window           positions that the device may decode by itself in one step
    num_watermark_blocks    blocks that an admission leaves alone while anything runs, for the running to grow into

    step_limit: positions that a step computes at most for now, fewer after one took more memory than there was. A
    request's sequences go beyond it together, in a step of their own, rather than never.
    confined_to: the only requests that are planned for now; none: all are.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        max_num_batched_tokens: int = 8192,
        decode_window: int = 1,
        num_watermark_blocks: int = 0,
        policy: Policy | None = None,
    ) -> None:
        self.cache = cache
        self.max_num_seqs = cache.rows.num_rows
        self.max_num_batched_tokens = self.max_num_scheduled_tokens = max_num_batched_tokens
        self.decode_window = decode_window
        self.num_watermark_blocks = num_watermark_blocks
        self.policy = policy or Policy()
        self.events = cache.events
        self.requests: dict[str, Request] = {}  # all that have not finished
        self.running: list[Request] = []  # each of the three in the policy's order
        self.swapped: list[Request] = []
        self.waiting: list[Request] = []
        self.tenants = Tenants()
        self.in_flight: deque[StepPlan] = deque()  # planned, their results not here
        self.confined_to: frozenset[Request] = frozenset()
        self.num_rows_taken = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self._num_arrivals = 0
        self._counted = cache.counters()

    # -- the door ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a request in line. Raises `CapacityError`, with the numbers, for one that could never run.

        A `max_tokens` of None is a default: as many as fit. A number is taken at its word.
        """
        prompt, width, cache = len(request.prompt_token_ids), request.width, self.cache
        assert request.request_id not in self.requests and request.request_id not in cache.pins, request.request_id
        most = cache.max_output_tokens(prompt, width)
        wanted = most if request.max_tokens is None else request.max_tokens
        if wanted > most or most < 1:
            needs = cache.blocks_at_max_length(prompt, max(wanted, 1), width)
            raise CapacityError(
                f"the request needs {needs} blocks of {cache.block_size} tokens at its longest ({prompt} prompt "
                f"tokens, max_tokens {request.max_tokens}, width {width}) and the pool has {self._capacity()}; "
                + (f"max_tokens of at most {most} fits" if most >= 1 else self._remedy(width)),
                param="prompt",
            )
        most_rows = min(self.max_num_seqs, self.max_num_batched_tokens)
        if width > most_rows:
            raise CapacityError(
                f"the request decodes {width} sequences together and at most {most_rows} run in a step; "
                "lower n or raise max_num_seqs and max_num_batched_tokens",
                param="n",
            )
        if request.pin:
            self._reserve_pin(request)
        arrival = self._num_arrivals
        self._num_arrivals += 1
        request.begin(arrival, self.policy.order(request, arrival), wanted)
        for sequence in request.sequences:
            cache.free(sequence)  # it holds nothing, in the cache's words: one that resumes is as after a preemption
        self.requests[request.request_id] = request
        self.tenants.enter(request)
        self._enqueue(request)
        if self.events.active:
            self.events.emit(ev.Arrived(request.request_id, prompt, wanted, width, request.priority))

    def _capacity(self) -> str:
        pinned = self.cache.num_pinned
        return f"{self.cache.num_unpinned_blocks}" + (f", beside {pinned} that are pinned" if pinned else "")

    @staticmethod
    def _remedy(width: int) -> str:
        return ("lower n, " if width > 1 else "") + "shorten the prompt or enlarge the pool"

    def _reserve_pin(self, request: Request) -> None:
        """Set the blocks of a pin apart, from here on: whatever was let in before must still fit beside them."""
        cache, total = self.cache, self.cache.pool.num_blocks
        needs = cache.blocks_for(len(request.prompt_token_ids))
        if cache.num_pinned + needs > total // 2:
            raise CapacityError(
                f"{len(request.prompt_token_ids)} tokens to pin take {needs} blocks, {cache.num_pinned} are pinned, "
                f"and at most half of the pool's {total} may be; unpin others or enlarge the pool",
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
                f"a request that was let in may come to need {longest} blocks, and with {needs} more pinned "
                f"{cache.num_unpinned_blocks - needs} are left for it; pin before it comes or after it has gone",
                param="prompt",
            )
        cache.num_pinned += needs

    def unpin(self, name: str) -> int | None:
        """Give up what a request with `pin` left; how many blocks it kept, None when there is no such pin."""
        if name not in self.cache.pins:
            return None
        num_blocks = self.cache.unpin(name)
        if self.events.active:
            self.events.emit(ev.Unpinned(name, num_blocks))
        return num_blocks

    def abort(self, request_id: str, reason: str = "abort") -> Request | None:
        """End a request in whatever state it is. Unknown and finished ones are left alone."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish_request(request, reason)
        return request

    def stop(self, sequence: Sequence, reason: str = "stop") -> bool:
        """The caller of the engine saw the end of a sequence (a stop string); True when that ended its request."""
        if sequence.finish_reason:
            return False
        return self._finish_sequence(sequence, reason)

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.in_flight)

    def stats(self) -> KVStats:
        return self.cache.stats()

    # -- planning ------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step; an empty plan (false) when there is nothing to do before a result has come."""
        plan = StepPlan(self.num_steps, self.cache.pool.last_seal_id)
        draft = _Draft(plan, self.max_num_scheduled_tokens)
        window, several = self._num_decode_steps(), self.tenants.several and not self.confined_to
        if several:
            draft.shares = self._prefill_shares(window)
        settled = self._plan_running(draft, window)
        if settled and not draft.preempted:
            while self.swapped and draft.budget > 0 and self._swap_in(self.swapped[0], draft):
                pass
            if several:
                self.tenants.serve(plan)
            if self.waiting and not self.swapped:
                self._admit_confined(draft) if self.confined_to else self._admit_waiting(draft)
        elif several:
            self.tenants.serve(plan)
        for sequence in draft.sealable:  # findable from the next plan on, not within this one
            self.cache.seal(sequence)
        if plan:
            self.in_flight.append(plan)
            self.num_steps += 1
            if self.events.active:
                self._emit_step(draft)
            self._note_wait_reason(draft)  # also when nobody listens: the reasons decide on windows
        return plan

    def _num_decode_steps(self) -> int:
        """Positions to decode at once. One, while somebody at the door could come in with the next step.

        A request that waits for blocks or rows could come in only when another ends; it waits a window for that.
        """
        first = self.swapped[0] if self.swapped else self._first_waiting()
        if first is None or first.wait_reason in ("blocks", "rows"):
            return self.decode_window
        return 1

    def _first_waiting(self) -> Request | None:
        """Of those that may come in."""
        if self.confined_to:
            return next((request for request in self.waiting if request in self.confined_to), None)
        return self.waiting[0] if self.waiting else None

    def _plan_running(self, draft: _Draft, window: int) -> bool:
        """Plan the running in order. True when all of them were seen."""
        cache, pool, plan, running = self.cache, self.cache.pool, draft.plan, self.running
        rows, starts, counts, samples, sequences = plan.rows, plan.starts, plan.counts, plan.num_sampled, plan.sequences
        budget, i = draft.budget, 0
        while i < len(running) and budget > 0:
            request = running[i]
            seq = request.only_sequence
            if seq is not None and seq.row_has_last:
                # The hot path: one sequence that decodes. Nothing here looks at more than the end of it.
                start = seq.num_computed
                count = seq.max_length - 1 - start
                if count <= 0:  # all planned: waits for its last result
                    i += 1
                    continue
                if count > window:
                    count = window
                if count > budget:
                    count = budget
                if start + count > seq.room:
                    if cache.attention_window:
                        cache.drop_out_of_window(seq, plan)
                    needs = cache.blocks_for(start + count) - len(seq.block_ids)
                    if needs > pool.num_available:
                        if not self._preempt_for(request, needs, draft):
                            break
                        continue
                    cache.grow(seq, count, plan)
                if request.use_structured_output:
                    plan.bitmask_slices.append(len(rows))
                rows.append(seq.row)
                starts.append(start)
                counts.append(count)
                samples.append(count)
                sequences.append(seq)
                seq.num_computed = start + count
                seq.num_pending += count
                budget -= count
                i += 1
                continue
            chunk = self._prefill_chunk(request, request.num_due, budget, draft)
            if not chunk:  # another's turn
                i += 1
                continue
            # A prompt that shares a step feeds itself nothing behind its end: no share was counted for that.
            ahead = window if draft.shares is None or request.num_due <= 1 else 1
            slices = self._slices_of(request, budget, ahead, chunk)
            if slices is None:  # its sequences do not fit together into what is left of the budget
                break
            # Not in groups: rebuilding one, a sibling's head may be needed that it has itself gone beyond.
            if cache.attention_window and seq is not None:
                cache.drop_out_of_window(seq, plan)
            needs = cache.blocks_needed((p.sequence, p.num_positions) for p in slices)
            if needs > pool.num_available:
                if not self._preempt_for(request, needs, draft):
                    break
                continue
            due, num_positions = request.num_due, sum(p.num_positions for p in slices)
            self._add_slices(slices, draft)
            budget -= num_positions
            if draft.shares is not None and due > 1:
                draft.shares[request.tenant] -= num_positions
            i += 1
        draft.budget = budget
        return i == len(running)

    def _prefill_shares(self, window: int) -> dict[int, int]:
        """What the prompts of each tenant may take of the next step, beside all that decode. A tenant with a prompt
        under way gets a position at least: it may hold the very blocks that another waits for."""
        tenants, longest, budget = self.tenants, self.policy.long_prefill_token_threshold, self.max_num_scheduled_tokens
        wants, decodes = dict.fromkeys(tenants.present, 0), dict.fromkeys(tenants.present, 0)
        for request in self.running:
            due = request.num_due
            if due > 1:  # of a group that is rebuilt, one sequence at a time
                wants[request.tenant] += min(due, longest or due)
            elif not (request.needs_result and request.num_pending):
                left = max(seq.max_length - 1 - seq.num_computed for seq in request.sequences)
                steps = 1 if request.needs_result else window
                decodes[request.tenant] += len(request.sequences) * max(0, min(steps, left))
        budget -= sum(decodes.values())
        under_way = [number for number in wants if wants[number]]
        for tenant in tenants.present.values() if not self.swapped else ():
            num_longs = 0
            for request in tenant.waiting:
                if wants[tenant.number] >= budget:
                    break
                if request.wait_reason in ("blocks", "rows"):  # it may take long: just enough for it to be tried
                    wants[tenant.number] += 1
                    break
                num_longs += request.is_long_prefill(longest)
                if num_longs <= self.policy.max_long_partial_prefills:
                    wants[tenant.number] += min(request.num_due, longest or budget)
        shares = tenants.shares(max(0, budget), wants, decodes)
        for number in under_way:
            shares[number] = max(1, shares[number])
        return shares

    def _prefill_chunk(self, request: Request, due: int, budget: int, draft: _Draft) -> int:
        """Positions that a prompt may compute in this step, of those due. 0: none, because a longer one of its tenant
        does, or because its tenant has had its share."""
        longest, number = self.policy.long_prefill_token_threshold, request.tenant
        if due <= 1:
            return budget
        if draft.shares is not None:
            budget = max(0, min(budget, draft.shares[number]))
        if longest and due > longest:
            full = draft.longs.get(number, 0) >= self.policy.max_long_partial_prefills
            return 0 if full else min(budget, longest)
        return budget

    def _slices_of(self, request: Request, budget: int, window: int, chunk: int) -> list[ScheduledSlice] | None:
        """What its sequences do next: [] nothing before a result has come, None nothing within this budget. `chunk`:
        what they may compute of their prompts."""
        sequences = request.sequences
        if request.needs_result and request.num_pending:
            return []
        if len(sequences) > 1:
            if (rebuild := self._recompute_group(request, chunk)) is not None:
                return rebuild
            window = min(window, budget // len(sequences))  # all of them step together, or none
            if window < 1:
                if budget < self.max_num_scheduled_tokens:
                    return None
                window = 1
        if request.needs_result:
            window = 1
        slices = []
        for seq in sequences:
            length = len(seq.token_ids) + seq.num_pending
            if length >= seq.max_length:
                continue
            due = length - seq.num_computed  # known tokens, or the one that the row holds
            if due > chunk:
                return [ScheduledSlice(seq, chunk, 0)]
            fed = min(window, seq.max_length - length, chunk - due + 1) - 1  # positions that the device feeds itself
            slices.append(ScheduledSlice(seq, due + fed, fed + 1))
        return slices

    def _recompute_group(self, request: Request, chunk: int) -> list[ScheduledSlice] | None:
        """After a recompute: one sequence after another, each up to its last token; None when all have caught up.

        All at once, unshared, they might never fit where they fitted when they forked.
        """
        for seq in request.sequences:
            due = len(seq.token_ids) + seq.num_pending - 1 - seq.num_computed
            if due > 0:
                if request.status is Status.SWAPPED:  # swapped while it was being rebuilt: first back, then on
                    return []
                if not seq.block_ids:
                    self.cache.attach(seq, self.cache.sibling_prefix(seq))
                    due = len(seq.token_ids) - 1 - seq.num_computed
                if due > 0:
                    return [ScheduledSlice(seq, min(due, chunk), 0)]
        return None

    def _add_slices(self, slices: list[ScheduledSlice], draft: _Draft) -> None:
        """Put the slices of a request into the plan. There is room."""
        plan, cache, longest = draft.plan, self.cache, self.policy.long_prefill_token_threshold
        for seq, count, num_sampled in slices:
            cache.grow(seq, count, plan)
            if seq.row < 0:
                cache.rows.assign(seq, plan)
            start, request = seq.num_computed, seq.request
            if longest and len(seq.token_ids) + seq.num_pending - start > longest:
                draft.longs[request.tenant] = draft.longs.get(request.tenant, 0) + 1
            if not seq.row_has_last:
                plan.host_tokens[len(plan.rows)] = seq.token_ids[start : start + count]
            if num_sampled and (request.select_beams or not request.forked):
                plan.num_samples[len(plan.rows)] = request.num_samples
            if num_sampled and request.use_structured_output:
                plan.bitmask_slices.append(len(plan.rows))
            plan.rows.append(seq.row)
            plan.starts.append(start)
            plan.counts.append(count)
            plan.num_sampled.append(num_sampled)
            plan.sequences.append(seq)
            seq.num_computed = start + count
            seq.num_pending += num_sampled
            # Of a sequence among several the host chooses the token, or says it once more.
            seq.row_has_last = num_sampled > 0 and (request.only_sequence is not None or not request.needs_result)
            if min(len(seq.token_ids), seq.num_computed) >= seq.seal_at:
                draft.sealable.append(seq)
                draft.writes.add(cache.next_key(seq, seq.seal_ids))

    # -- coming in -----------------------------------------------------------------------------------------------------

    def _admit_waiting(self, draft: _Draft) -> None:
        """Admit from the lines of the tenants: those who have some of their share left first, and of them the least
        served. What they leave is shared out anew. Of one tenant, in order, and long prompts let others pass.

        Who lacks blocks or rows stops all: if others took what becomes free, it might wait for ever.
        """
        passed = {tenant: 0 for tenant in self.tenants.present.values() if tenant.waiting}
        shares = draft.shares

        def place(tenant: Tenant) -> tuple[bool, int, tuple[int, int]]:
            assert shares is not None
            return shares[tenant.number] <= 0, tenant.served, tenant.waiting[passed[tenant]].order

        while passed and draft.budget > 0:
            tenant = min(passed, key=place) if len(passed) > 1 else next(iter(passed))
            request, budget = tenant.waiting[passed[tenant]], draft.budget
            if shares is not None and shares[tenant.number] <= 0:
                shares.update(level(budget, passed))
                continue
            if self._admit(request, draft):
                if shares is not None:
                    tenant.served += budget - draft.budget
                    shares[tenant.number] -= budget - draft.budget
            elif request.wait_reason == LONG_PREFILL:
                passed[tenant] += 1
            elif request.wait_reason in ("blocks", "rows"):
                return
            else:
                del passed[tenant]
                continue
            if passed[tenant] == len(tenant.waiting):
                del passed[tenant]

    def _admit_confined(self, draft: _Draft) -> None:
        """Admit, in order, of the requests that are planned alone."""
        while draft.budget > 0 and (first := self._first_waiting()) is not None and self._admit(first, draft):
            pass

    def _admit(self, request: Request, draft: _Draft) -> bool:
        """Let a request in, and plan its first slice. False: it waits, and says for what."""
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

    def _swap_in(self, request: Request, draft: _Draft) -> bool:
        """Bring back the first of the swapped, whole, and plan its next slices. False: it waits."""
        cache = self.cache
        if request.num_pending:
            return self._set_wait_reason(request, "in flight", request.num_pending)
        if self.num_rows_taken + request.width > self.max_num_seqs:
            return self._set_wait_reason(request, "rows", request.width, self.max_num_seqs - self.num_rows_taken)
        found = cache.find_swap_in_blocks(request)
        if found is None:  # a block left behind was evicted: what is on the host is of no use without it
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
        self._start(request)
        if self.events.active:
            self.events.emit(ev.SwappedIn(request.request_id, len(found.host_ids), len(found.shared_on_device)))
        self._add_slices(slices, draft)
        draft.budget -= sum(p.num_positions for p in slices)
        return True

    def _start(self, request: Request) -> None:
        request.status, request.wait_reason = Status.RUNNING, ""
        insort(self.running, request)
        self.num_rows_taken += request.width

    def _watermark(self) -> int:
        return self.num_watermark_blocks if self.running else 0  # else a request as large as the pool waits for ever

    def _headroom(self, request: Request) -> int:
        """Blocks that stay free when a request comes back that was preempted: it returns when all that it needs next
        fits, beside what the others need next. Alone it needs no leave, or it would wait for ever."""
        if not request.num_preemptions or not self.running:
            return 0
        left = max(s.max_length - len(s.token_ids) for s in request.sequences)
        positions = min(self.policy.headroom(request), left)
        return self.cache.blocks_for(positions) * (self.num_rows_taken + request.width)

    # -- giving way ----------------------------------------------------------------------------------------------------

    def _preempt_for(self, request: Request, needs: int, draft: _Draft) -> bool:
        """Preempt one request. False when it was the asker itself."""
        draft.preempted = True
        victim = self.policy.victim(self.running, request, self.cache)
        self._preempt(victim, request, needs, draft.plan)
        return victim is not request

    def _preempt(self, victim: Request, asker: Request, needs: int, plan: StepPlan) -> None:
        """Its blocks and rows are given up at once, also with a step in flight: stream order makes that safe, and late
        results are appended whatever its state."""
        cache, pool = self.cache, self.cache.pool
        free, evictable = pool.num_free, pool.num_cached
        self._leave_queue(victim)
        self.num_preemptions += 1
        victim.num_preemptions += 1
        num_blocks, num_positions = cache.count_private_blocks(victim)
        mode, why = self.policy.preemption_mode(victim, num_blocks, num_positions)
        if victim.pin:  # what it is computed for is on the device, or nowhere
            mode, why = PreemptionMode.RECOMPUTE, "pin"
        if mode is PreemptionMode.SWAP and not cache.swap_out(victim, plan):
            mode, why = PreemptionMode.RECOMPUTE, "no host room"
        if mode is PreemptionMode.SWAP:
            victim.status = Status.SWAPPED
            insort(self.swapped, victim)
        else:
            self._requeue(victim)
        if self.events.active:
            said = mode.value, asker.request_id, needs, free, evictable, why, num_blocks, num_positions
            self.events.emit(ev.Preempted(victim.request_id, *said))

    def _leave_queue(self, request: Request) -> None:
        """Out of the line that it stands in, and if that was the running's, with its rows."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.num_rows_taken -= request.width
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
        """Give up its blocks, wherever they are, and stand in line again, for a reason that is yet to be said."""
        for seq in request.sequences:
            self.cache.free(seq)
        request.status, request.wait_reason, request.shared_on_device = Status.WAITING, "", {}
        self._enqueue(request)

    def _set_wait_reason(self, request: Request, reason: str, needs: int, free: int = 0, evictable: int = 0) -> bool:
        """Say why a request waits, once per reason and not once a step. Always False."""
        if request.wait_reason != reason:
            request.wait_reason = reason
            if self.events.active:
                self.events.emit(ev.Waiting(request.request_id, reason, needs, free, evictable))
        return False

    def _wait_for_blocks(self, request: Request, needs: int) -> bool:
        pool = self.cache.pool
        free = max(0, pool.num_free - self._watermark())
        return self._set_wait_reason(request, "blocks", needs, free, pool.num_cached)

    # -- results -------------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult, *, last: bool = True) -> list[Request]:
        """Take in what a plan gave; returns the requests that this finished.

        With `last` false it is a part: the first columns of a window that still runs, for streams that want them now.
        Results go to the plan's sequences, whatever has become of them, and are dropped for those that have ended.
        """
        if last:
            assert self.in_flight and self.in_flight[0] is plan, "results come in the order of the plans"
        if result.corrupt:
            self._recompute_corrupt(plan, result.corrupt)
        if plan.void_slices:
            result.drop(plan.void_slices)
        if last:
            self.in_flight.popleft()
        else:
            self._count_partial(plan, result)
        finished: list[Request] = []
        for i in result.errors:
            request = plan.sequences[i].request
            if request.status is not Status.FINISHED:
                request.error = result.errors[i]
                self._finish_request(request, "error")
                finished.append(request)
        candidates: dict[Request, list[tuple[Sequence, Any]]] = {}
        for seq, tokens in zip(plan.sequences, result.tokens, strict=True):
            if not tokens or seq.finish_reason:  # a chunk, or the over-run of a sequence that has ended
                continue
            request = seq.request
            if request.pin and request.status is not Status.RUNNING:  # its blocks are what it is for: computed again
                seq.num_pending -= len(tokens)
                continue
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
            if sealable >= seq.seal_at and request.status is Status.RUNNING:
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

    def _count_partial(self, plan: StepPlan, result: StepResult) -> None:
        if plan.num_outstanding is None:
            plan.num_outstanding = list(plan.num_sampled)
        for i, tokens in enumerate(result.tokens):
            plan.num_outstanding[i] -= min(1, len(tokens)) if i in plan.num_samples else len(tokens)

    def _cut_at_stop(self, seq: Sequence, tokens: Any) -> Any:
        """A window's tokens up to its first stop token; what the device did after it does not count."""
        end = next(i for i, token in enumerate(tokens) if token in seq.request.stop_ids)
        seq.stop_token = tokens[end]
        return tokens[: end + 1]

    def _fork(self, parent: Sequence, draws: Any) -> Any:
        """The samples part: one draw stays with the parent, each other one starts a sequence over the same blocks."""
        request = parent.request
        request.forked, request.needs_result = True, False
        children = []
        for index in range(1, request.width):
            child = Sequence(request, index, parent.token_ids[:], parent.max_length)
            self.cache.fork(parent, child)
            children.append(child)
        request.sequences += children
        for child, token in zip(children, draws[1:], strict=True):
            self._append(child, token)
        return draws[:1]

    def _commit_beams(self, request: Request, parents: list[tuple[Sequence, Any]]) -> bool:
        """Keep the continuations that the request decides on; True when that ended it.

        A parent chosen twice is forked, and all heirs take their references before the unchosen let go of theirs:
        otherwise a block could fall to 0 and be lost between the two.
        """
        assert request.select_beams is not None
        chosen = request.select_beams(parents)
        tokens_before = {seq: seq.token_ids[:] for seq, _ in parents}
        heirs: list[tuple[Sequence, int]] = []
        kept: set[Sequence] = set()
        for index, (parent, token) in enumerate(chosen):
            heir = parent
            if parent in kept:
                heir = Sequence(request, index, tokens_before[parent][:], parent.max_length)
                self.cache.fork(parent, heir)
            kept.add(parent)
            heirs.append((heir, token))
        for seq, _ in parents:
            if seq not in kept:
                seq.finish_reason = "pruned"
                self._drop(seq)
        request.sequences = [heir for heir, _ in heirs]
        for index, (heir, token) in enumerate(heirs):
            heir.index, heir.row_has_last = index, False
            self._append(heir, token)
        if not request.sequences and request.status is not Status.FINISHED:
            num_chosen = sum(len(seq.token_ids) + 1 - len(request.prompt_token_ids) for seq, _ in parents)
            self._finish_request(request, "stop", num_chosen)
        return request.status is Status.FINISHED

    def _append(self, seq: Sequence, token: int) -> None:
        """One token, chosen on the host or drawn for a sequence that has just come to be.

        Nothing is to be sealed: all that is computed was known when it was planned, and sealed then.
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
        """One sequence ended; True when its request did with it."""
        request = seq.request
        seq.finish_reason = reason
        if len(request.sequences) == 1:
            self._finish_request(request, reason)
            return True
        request.sequences.remove(seq)
        request.finished_sequences.append(seq)
        self._drop(seq)
        return False

    def _finish_request(self, request: Request, reason: str, num_chosen: int = 0) -> None:
        """`num_chosen`: tokens of outputs that have no sequence any more, since `decide` kept none."""
        for seq in request.sequences:
            seq.finish_reason = seq.finish_reason or reason
            if reason == "error":
                self.cache.discard(seq)
            if request.pin and request.status is Status.RUNNING and not seq.num_pending and reason == "length":
                self._park(seq)
            else:
                self._drop(seq)
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
            num_tokens = num_chosen + sum(
                len(s.token_ids) - len(request.prompt_token_ids) for s in request.finished_sequences
            )
            self.events.emit(ev.Finished(request.request_id, reason, num_tokens))

    def _park(self, seq: Sequence) -> None:
        self.cache.rows.release(seq)
        self.cache.pin(seq)
        if self.events.active:
            self.events.emit(ev.Pinned(seq.request.request_id, seq.num_computed, len(seq.block_ids)))

    def _drop(self, seq: Sequence) -> None:
        self.cache.rows.release(seq)
        self.cache.free(seq)

    # -- a step that failed --------------------------------------------------------------------------------------------

    def fail(self, plan: StepPlan, limit: int = 0) -> list[Request]:
        """A step failed on the device, and with it all that was queued after it.

        What these plans sealed is taken back, and every request in them is recomputed from what the host knows: its
        blocks, wherever they are, are not to be trusted. Returns those requests; the engine may abort any of them.

        limit   what it failed for was memory: steps are to compute so many positions at most from now on
        """
        assert plan in self.in_flight
        self.max_num_scheduled_tokens = limit or self.max_num_scheduled_tokens
        touched: dict[Request, None] = {}
        void: StepPlan | None = None
        while void is not plan:
            void = self.in_flight.pop()
            left = void.num_outstanding or void.num_sampled
            for i, seq in enumerate(void.sequences):
                if not seq.finish_reason and i not in void.void_slices:
                    seq.num_pending -= left[i]
                    touched[seq.request] = None
            touched.update((r, None) for r in void.swapped_requests if r.status is not Status.FINISHED)
        for seq in self.cache.unseal_after(plan.seal_mark):  # with no slice in these plans, but with blocks of theirs
            touched[seq.request] = None
        for request in touched:
            said = ("out of memory", plan.num_tokens, limit) if limit else ()
            self._recompute(request, ev.Recomputed(request.request_id, plan.step, *said))
        return list(touched)

    def _recompute_corrupt(self, plan: StepPlan, corrupt: list[HostBlockId]) -> None:
        """These host blocks, which `plan` brought back, did not hold what was swapped out.

        Their requests are recomputed from what the host knows, and so is every request that began with a block sealed
        since: it may be one of theirs. What is in flight of all of these is void. Other requests go on.
        """
        cache, mark = self.cache, plan.seal_mark
        cache.num_corrupt += len(corrupt)
        hit = Counter(plan.swap_in_requests[block] for block in corrupt)
        cache.unseal_after(mark)
        lost = dict.fromkeys(r for r in self.requests.values() if r in hit or r.newest_prefix_seal > mark)
        for step in self.in_flight:
            step.drop(lost)
        for request in lost:
            if request in hit and self.events.active:
                self.events.emit(ev.Corrupt(request.request_id, hit[request]))
            self._recompute(request, ev.Recomputed(request.request_id, plan.step, "corrupt"))

    def _recompute(self, request: Request, why: ev.Recomputed) -> None:
        self._leave_queue(request)
        self._requeue(request)
        if self.events.active:
            self.events.emit(why)

    def confine(self, requests: Iterable[Request]) -> None:
        """Plan these requests alone from now on, and all again when there are none of them. The others wait; what they
        hold is given up, so that nothing keeps these from coming in."""
        self.confined_to = frozenset(requests)
        if self.confined_to:
            for request in (*self.running, *self.swapped):
                if request not in self.confined_to:
                    self._leave_queue(request)
                    self._requeue(request)
                    if self.events.active:
                        self.events.emit(ev.Recomputed(request.request_id, self.num_steps, "confined"))

    # -- telling -------------------------------------------------------------------------------------------------------

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
                *(n - b for n, b in zip(now, before, strict=True)),
            )
        )

    def _note_wait_reason(self, draft: _Draft) -> None:
        """The first in line was not even tried: say why."""
        waiting = self._first_waiting()
        if self.swapped and waiting:
            self._set_wait_reason(waiting, "behind a swapped request", len(self.swapped))
        request = self.swapped[0] if self.swapped else waiting
        if request and not request.wait_reason:
            if draft.preempted:
                needs = self.cache.blocks_for(len(request.sequences[0].token_ids))
                self._wait_for_blocks(request, needs + self._headroom(request))
            else:
                num_due = len(request.sequences[0].token_ids) - request.sequences[0].num_computed
                self._set_wait_reason(request, "budget", num_due, max(0, draft.budget))
