"""Preemption: requests release blocks and rows, for running ones to grow or for those of other tenants."""

from __future__ import annotations

from bisect import insort
from typing import TypeAlias

from octavo.core import events as ev
from octavo.core.in_flight import InFlightStep
from octavo.core.policy import PreemptionMode
from octavo.core.request import Request, Sequence, Status
from octavo.core.scheduling.scheduler_state import SchedulerState
from octavo.core.scheduling.step_draft import StepDraft

Growth: TypeAlias = list[tuple[Sequence, int]]
"""Sequences with the number of positions that each is to compute next."""


def make_room(state: SchedulerState, request: Request, growth: Growth, draft: StepDraft) -> bool:
    """Preempt requests until the blocks for this growth are available. Returns False if `request` was one of them,
    or if it waits for a result: drafts in flight hold the blocks, and none is preempted if rejecting them suffices.

    The need is counted again after each: a tail that the victim shared is no longer copied.
    """
    while (needs := state.cache.blocks_needed(growth)) > state.cache.pool.num_available:
        draft.preempted = True
        if state.num_speculative_tokens and num_held_by_drafts(state) >= needs - state.cache.pool.num_available:
            return False
        victim = state.policy.victim(state.running, request, state.cache)
        preempt(state, victim, request, needs, draft.step)
        if victim is request:
            return False
    return True


def num_held_by_drafts(state: SchedulerState) -> int:
    """Most blocks that running sequences release when the drafts in flight are rejected or accepted."""
    cache, blocks_for, total = state.cache, state.cache.blocks_for, 0
    for seq in (seq for request in state.running for seq in request.sequences if seq.num_unverified):
        total += (len(seq.block_ids) - blocks_for(seq.num_computed - seq.num_unverified)) * cache.num_groups
        total += blocks_for(seq.num_unverified) * len(cache.windows)  # what leaves the windows if they are accepted
    return total


def preempt(
    state: SchedulerState, victim: Request, claim: Request, needs: int, step: InFlightStep, *, gives_way: bool = False
) -> None:
    """Release the victim's blocks and rows at once for those that `claim` needs, even with a step in flight.

    Stream order makes that safe, and late results are appended in any state. One that gives way needs no headroom to
    resume.
    """
    cache, pool = state.cache, state.cache.pool
    free, evictable = pool.num_free, pool.num_cached
    state.leave_queue(victim)
    state.num_preemptions += 1
    victim.num_preemptions += not gives_way
    if cache.windows and victim.only_sequence is not None:  # what it resumes with has a bound, too
        cache.drop_out_of_window(victim.only_sequence, step.plan)
    num_blocks, num_positions = cache.swapping.count_private_blocks(victim)
    mode, why = state.policy.preemption_mode(victim, num_blocks, num_positions)
    if victim.pin:  # its blocks are useful only on the device
        mode, why = PreemptionMode.RECOMPUTE, "pin"
    if mode is PreemptionMode.SWAP and not cache.swapping.swap_out(victim, step.plan):
        mode, why = PreemptionMode.RECOMPUTE, "no host room"
    if mode is PreemptionMode.SWAP:
        victim.status = Status.SWAPPED
        step.swapped_requests.append(victim)
        insort(state.swapped, victim)
    else:
        state.requeue(victim)
    if state.events.active:
        why = "share" if gives_way else why
        details = mode.value, claim.request_id, needs, free, evictable, why, num_blocks, num_positions
        state.events.emit(ev.Preempted(victim.request_id, *details))


# -- giving way --------------------------------------------------------------------------------------------------------


def give_way(state: SchedulerState, draft: StepDraft) -> None:
    """Preempt requests for the first request of each tenant that waits for rows or blocks.

    The latest request of the tenant with most rows gives way to one of a tenant that has fewer even with it, and
    any request to an overdue one. Called before anything is planned: a victim has no slice in this step.
    """
    tenants, num_free = state.tenants.present, state.max_num_seqs - state.num_rows_taken
    held = {number: tenant.num_rows for number, tenant in tenants.items()}
    swapped = {request.tenant: request for request in reversed(state.swapped)}
    most, gone = max(held.values()), set()
    ready = [r for r in reversed(state.running) if not r.pin and r.has_had_its_turn]
    for number in sorted(held, key=held.__getitem__):
        request = swapped.get(number) or next(iter(tenants[number].waiting), None)
        if request is None or request.num_pending or number in gone:
            continue
        if ready and (state.is_overdue(request) or most > held[number] + request.width):
            for victim in victims_for(state, request, num_free, held, ready):
                ready.remove(victim)
                num_free += victim.width
                needs = state.cache.blocks_for(len(request.sequences[0].token_ids))
                preempt(state, victim, request, needs, draft.step, gives_way=True)
                victim.waits_since = state.num_steps
                draft.gave_way.add(victim)
                gone.add(victim.tenant)
            most = max(held.values())
        num_free = max(0, num_free - request.width)


def victims_for(
    state: SchedulerState, request: Request, num_free: int, held: dict[int, int], ready: list[Request]
) -> list[Request]:
    """Return the requests that give way to this one: enough for its rows or none, and one if it waits for blocks.

    They are among the `ready` ones, which have had their turn, so all of them progress. Their rows are taken from
    `held`.
    """
    victims: list[Request] = []
    after, needs_block = held.copy(), request.wait_reason == "blocks"
    limit = -1 if state.is_overdue(request) else held[request.tenant] + request.width
    most = max(after.values())
    for victim in ready:
        if num_free >= request.width and (victims or not needs_block):
            break
        number = victim.tenant
        if number == request.tenant or after[number] <= limit or (after[number] < most and limit >= 0):
            continue
        if state.policy.by_priority and victim.priority < request.priority:
            continue
        victims.append(victim)
        after[number] -= victim.width
        most = max(after.values())
        num_free += victim.width
    if num_free < request.width:
        return []
    held.update(after)
    return victims
