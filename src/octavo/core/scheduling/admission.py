"""Admission: whether a request could ever run, and which waiting and swapped requests join a step."""

from __future__ import annotations

from heapq import heappop, heapreplace

from octavo.core import events as ev
from octavo.core.request import Request
from octavo.core.scheduling.scheduler_state import SchedulerState
from octavo.core.scheduling.step_draft import StepDraft
from octavo.core.tenants import Tenant, catch_up_shares
from octavo.errors import CapacityError

LONG_PREFILL = "long prefill"
"""Reason of a waiting request that lets others pass."""


def check_capacity(state: SchedulerState, request: Request) -> int:
    """Return the request's number of output tokens. Raises `CapacityError`, with the numbers, if it could never run."""
    prompt, width, cache = len(request.prompt_token_ids), request.width, state.cache
    assert request.request_id not in state.requests and request.request_id not in cache.pins, request.request_id
    max_output = cache.max_output_tokens(prompt, width, drops=request.drops)
    max_tokens = max_output if request.max_tokens is None else request.max_tokens
    if max_tokens > max_output or max_output < 1:
        needs = cache.blocks_at_max_length(prompt, max(max_tokens, 1), width, drops=request.drops)
        raise CapacityError(
            f"the request needs {needs} blocks of {cache.block_size} tokens at its maximum length ({prompt} prompt "
            f"tokens, max_tokens {request.max_tokens}, width {width}) and the pool has {capacity(state)}; "
            + (f"max_tokens of at most {max_output} fits" if max_output >= 1 else remedy(width)),
            param="prompt",
        )
    max_width = min(state.max_num_seqs, state.max_num_batched_tokens)
    if width > max_width:
        raise CapacityError(
            f"the request decodes {width} sequences together and at most {max_width} run in a step; "
            "lower n or raise max_num_seqs and max_num_batched_tokens",
            param="n",
        )
    if request.pin:
        check_pin(state, request)
    return max_tokens


def capacity(state: SchedulerState) -> str:
    pinned = state.cache.num_pinned
    return f"{state.cache.num_unpinned_blocks}" + (f", besides {pinned} pinned ones" if pinned else "")


def remedy(width: int) -> str:
    return ("lower n, " if width > 1 else "") + "shorten the prompt or enlarge the pool"


def check_pin(state: SchedulerState, request: Request) -> None:
    """Raise `CapacityError` if an unfinished request might no longer fit next to this pin."""
    cache, total = state.cache, state.cache.pool.num_blocks
    needs = cache.blocks_to_pin(len(request.prompt_token_ids))
    if cache.num_pinned + needs > total // 2:
        raise CapacityError(
            f"{len(request.prompt_token_ids)} tokens to pin take {needs} blocks, {cache.num_pinned} are pinned, "
            f"and at most half of the pool's {total} can be; unpin others or enlarge the pool",
            param="prompt",
        )
    longest = 0
    for other in state.requests.values():
        assert other.max_tokens is not None
        if not other.pin:
            prompt = len(other.prompt_token_ids)
            needed = cache.blocks_at_max_length(prompt, other.max_tokens, other.width, drops=other.drops)
            longest = max(longest, needed)
    if longest > cache.num_unpinned_blocks - needs:
        raise CapacityError(
            f"an unfinished request may need up to {longest} blocks, and with {needs} more pinned "
            f"{cache.num_unpinned_blocks - needs} are left for it; pin before it arrives or after it has finished",
            param="prompt",
        )


# -- waiting and swapped requests --------------------------------------------------------------------------------------


def admit_waiting(state: SchedulerState, draft: StepDraft) -> None:
    """Admit waiting requests, one tenant's queue at a time.

    Tenants with share left come first, and among them the least served. What they leave is shared again. Within a
    tenant the order is kept, except that long prefills let others pass.

    A request that waits for blocks or rows lets other tenants pass for `PATIENCE_STEPS`. Then it stops admission:
    otherwise others could take every block that becomes free, and it might wait for ever.
    """
    behind = {request.tenant for request in (*state.swapped, *draft.gave_way)}  # whose own requests come first
    passed = {t: 0 for t in state.tenants.present.values() if t.waiting and t.number not in behind}
    shares, places = draft.shares, {tenant: i for i, tenant in enumerate(passed)}

    def entry(tenant: Tenant) -> tuple[bool, bool, int, tuple[int, int], int, Tenant]:
        """The tenant's place in the line, which changes only with its own requests and with the shares."""
        request, starved = tenant.waiting[passed[tenant]], shares is not None and shares[tenant.number] <= 0
        return not state.is_overdue(request), starved, tenant.served, request.order, places[tenant], tenant

    line = sorted(map(entry, passed))  # a heap, from here on
    while line and draft.budget > 0:
        tenant = line[0][-1]
        request, budget = tenant.waiting[passed[tenant]], draft.budget
        if shares is not None and shares[tenant.number] <= 0:
            left = sorted((item[-1] for item in line), key=places.__getitem__)
            shares.update({tenant.number: 1} if state.is_overdue(request) else catch_up_shares(budget, left))
            line = sorted(map(entry, left))
            continue
        if admit(state, request, draft):
            if shares is not None:
                tenant.served += budget - draft.budget
                shares[tenant.number] -= budget - draft.budget
        elif request.wait_reason == LONG_PREFILL:
            passed[tenant] += 1
        elif request.wait_reason in ("blocks", "rows") and not state.lets_pass(request):
            return
        else:
            heappop(line)
            continue
        if passed[tenant] == len(tenant.waiting):
            heappop(line)
        elif len(line) > 1:
            heapreplace(line, entry(tenant))


def admit_confined(state: SchedulerState, draft: StepDraft) -> None:
    """Admit requests of `confined_to` in order."""
    while draft.budget > 0 and (first := state.first_waiting()) is not None and admit(state, first, draft):
        pass


def admit(state: SchedulerState, request: Request, draft: StepDraft) -> bool:
    """Admit a request and plan its first slice. Returns False if it has to wait, with the reason set."""
    num_longs = draft.longs.get(request.tenant, 0)
    if request.wait_reason == LONG_PREFILL and num_longs >= state.max_long_prefills:
        return False
    cache, pool, seq = state.cache, state.cache.pool, request.sequences[0]
    if request.num_pending:
        return state.set_wait_reason(request, "in flight", request.num_pending)
    if state.num_rows_taken + request.width > state.max_num_seqs:
        return state.set_wait_reason(request, "rows", request.width, state.max_num_seqs - state.num_rows_taken)
    prefix = cache.prefixes.lookup(seq)
    due = len(seq.token_ids) - prefix.num_positions * (request.only_sequence is not None)
    chunk = draft.prefill_chunk(request, due, draft.budget)
    if not chunk:
        return state.set_wait_reason(request, LONG_PREFILL, due)
    if draft.writes and cache.prefixes.is_in_flight(draft.writes, seq, prefix):
        return state.set_wait_reason(request, "prefix in flight", 0)
    needs = cache.blocks_to_admit(seq, prefix) + state.headroom(request) + cache.blocks_due(state.running)
    if needs > pool.num_available - state.watermark():
        in_windows = cache.window_blocks_to_admit(seq, prefix)
        return state.wait_for_blocks(request, needs, in_windows, cache.state_blocks_to_admit(prefix))
    state.leave_queue(request)
    if request.num_preemptions:
        state.policy.costs.record_return(prefix.num_positions, len(seq.token_ids))
    if request.num_cached_tokens < 0:
        cache.prefixes.count_lookup(seq, prefix)
        request.num_cached_tokens = prefix.num_positions
    cache.attach(seq, prefix)
    state.start(request)
    if state.events.active:
        state.events.emit(ev.Admitted(request.request_id, seq.num_computed, len(seq.token_ids)))
    slices = draft.next_slices(request, draft.budget, 1, chunk)
    if slices and (
        len(request.sequences) == 1
        or cache.blocks_needed((p.sequence, p.num_positions) for p in slices) <= pool.num_available
    ):
        draft.add(slices)
        draft.budget -= sum(p.num_positions for p in slices)
    return True


def resume_swapped(state: SchedulerState, draft: StepDraft) -> None:
    """Swap in requests in order, up to the first that has to wait and lets none pass."""
    for request in state.swapped[:]:
        if draft.budget <= 0:
            return
        if request not in draft.gave_way and not swap_in(state, request, draft) and not state.lets_pass(request):
            return


def swap_in(state: SchedulerState, request: Request, draft: StepDraft) -> bool:
    """Swap in a request as a whole and plan its next slices. Returns False if it has to wait."""
    cache = state.cache
    if request.num_pending:
        return state.set_wait_reason(request, "in flight", request.num_pending)
    if state.num_rows_taken + request.width > state.max_num_seqs:
        return state.set_wait_reason(request, "rows", request.width, state.max_num_seqs - state.num_rows_taken)
    found = cache.swapping.find_swap_in_blocks(request)
    if found is None:  # a block shared on the device was evicted: the host blocks are useless without it
        state.leave_queue(request)
        state.requeue(request)
        if state.events.active:
            state.events.emit(ev.SwapLost(request.request_id))
        return True
    chunk = min(draft.budget, state.policy.long_prefill_token_threshold or draft.budget)
    slices = draft.next_slices(request, draft.budget, 1, chunk)
    if slices is None:
        return state.set_wait_reason(request, "budget", len(request.sequences), draft.budget)
    needs = found.num_needed + cache.blocks_needed(((p.sequence, p.num_positions) for p in slices), swapped=True)
    needs += state.headroom(request)
    if needs > cache.pool.num_available - state.watermark():
        return state.wait_for_blocks(request, needs)
    state.swapped.remove(request)
    cache.swapping.swap_in(request, found, draft.plan)
    draft.step.swapped_requests.append(request)
    draft.step.swap_in_requests.update(dict.fromkeys(found.host_ids, request))
    state.start(request)
    if state.events.active:
        state.events.emit(ev.SwappedIn(request.request_id, len(found.host_ids), len(found.shared_on_device)))
    draft.add(slices)
    draft.budget -= sum(p.num_positions for p in slices)
    return True
