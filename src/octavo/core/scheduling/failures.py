"""Failed steps and corrupt blocks: the requests that they touch are computed again."""

from __future__ import annotations

from collections import Counter

from octavo.core import events as ev
from octavo.core.in_flight import InFlightStep
from octavo.core.request import Request, Status
from octavo.core.scheduling.scheduler_state import SchedulerState
from octavo.core.types import HostBlockId


def undo(state: SchedulerState, step: InFlightStep, limit: int) -> list[Request]:
    """Take back a failed step and all after it, and recompute their requests, which are returned.

    limit  positions per step from now on, if it ran out of memory; else 0
    """
    touched: dict[Request, None] = {}
    void: InFlightStep | None = None
    while void is not step:
        void = state.in_flight.pop()
        left = void.outstanding
        void.settle_drafts()
        for i, seq in enumerate(void.sequences):
            if not seq.finish_reason and i not in void.void_slices:
                seq.num_pending -= left[i]
                touched[seq.request] = None
        touched.update((r, None) for r in void.swapped_requests if r.status is not Status.FINISHED)
    for seq in state.cache.unseal_after(step.seal_mark):  # has no slice in these steps, but uses their blocks
        touched[seq.request] = None
    for request in touched:
        details = ("out of memory", step.plan.num_tokens, limit) if limit else ()
        recompute(state, request, ev.Recomputed(request.request_id, step.plan.step, *details))
    return list(touched)


def recompute_corrupt(state: SchedulerState, step: InFlightStep, corrupt: list[HostBlockId]) -> None:
    """Handle host blocks of the plan's `swap_ins` whose content changed while they were swapped out.

    Their requests are recomputed from the tokens that the host has. So is every request that began with a block
    sealed since, because it may be one of theirs. Results in flight of these requests are void.
    """
    cache, mark = state.cache, step.seal_mark
    cache.num_corrupt += len(corrupt)
    hit = Counter(step.swap_in_requests[block] for block in corrupt)
    cache.unseal_after(mark)
    affected = dict.fromkeys(r for r in state.requests.values() if r in hit or r.newest_prefix_seal > mark)
    for in_flight in state.in_flight:
        in_flight.drop(affected)
    for request in affected:
        if request in hit and state.events.active:
            state.events.emit(ev.Corrupt(request.request_id, hit[request]))
        recompute(state, request, ev.Recomputed(request.request_id, step.plan.step, "corrupt"))


def recompute(state: SchedulerState, request: Request, why: ev.Recomputed) -> None:
    state.leave_queue(request)
    state.requeue(request)
    if state.events.active:
        state.events.emit(why)
