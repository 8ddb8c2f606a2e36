"""Planning of running requests: the decoding rows, prefills within their shares, and drafts with what is left."""

from __future__ import annotations

from octavo.core.plan import Drafts
from octavo.core.scheduling.preemption import make_room
from octavo.core.scheduling.scheduler_state import SchedulerState
from octavo.core.scheduling.step_draft import StepDraft


def num_decode_steps(state: SchedulerState) -> int:
    """Tokens to decode per sequence in this step: 1 while a waiting request could be admitted next step, else
    `decode_window`.

    A request that waits for blocks or rows is admitted only after another finishes, so it does not count.
    """
    first = state.first_swapped() or state.first_waiting()
    if first is None or first.wait_reason in ("blocks", "rows"):
        return min(state.decode_window, state.cache.max_chunk)
    return 1


def plan_running(state: SchedulerState, draft: StepDraft, num_decode_steps: int) -> bool:
    """Plan the running requests in order. Returns True if all of them were reached.

    A preempted request is the one that is planned or a later one, so the iteration over `running` stays in place.
    """
    cache, pool, plan, running = state.cache, state.cache.pool, draft.plan, state.running
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
                if cache.has_windows:
                    cache.drop_out_of_window(seq, plan)
                if cache.state_blocks:
                    count = cache.checkpoints.cut(seq, count)
                needs = (cache.blocks_for(start + count) - len(seq.block_ids)) * cache.num_groups
                if needs > pool.num_available and not make_room(state, request, [(seq, count)], draft):
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
        chunk = draft.prefill_chunk(request, due, budget)
        if not chunk:  # other prefills come first
            continue
        # A prefill that shares a step decodes one token after its end: its share covers no more.
        max_steps = num_decode_steps if draft.shares is None or due <= 1 else 1
        slices = draft.next_slices(request, budget, max_steps, chunk)
        if slices is None:  # its sequences together exceed the remaining budget
            break
        if cache.has_windows and seq is not None:  # of several, one may begin with blocks of another: see `drops`
            cache.drop_out_of_window(seq, plan)
        if not make_room(state, request, [(p.sequence, p.num_positions) for p in slices], draft):
            break
        num_positions = sum(p.num_positions for p in slices)
        draft.add(slices)
        budget -= num_positions
        if draft.shares is not None and due > 1:
            draft.shares[request.tenant] -= num_positions
    else:
        draft.budget = budget
        return True
    draft.budget = budget
    return False


def prefill_shares(state: SchedulerState, num_decode_steps: int) -> dict[int, int]:
    """Return each tenant's share of the step for prefills, after all decodes.

    A tenant with a running prefill gets at least one position: it may hold the blocks that another tenant needs.
    """
    tenants, longest, budget = state.tenants, state.policy.long_prefill_token_threshold, state.max_num_scheduled_tokens
    max_chunk = state.cache.max_chunk
    wants, decodes = dict.fromkeys(tenants.present, 0), dict.fromkeys(tenants.present, 0)
    for request in state.running:
        due = request.num_due
        if due > 1:  # a recomputed group prefills one sequence at a time
            wants[request.tenant] += min(due, longest or due, max_chunk)
        elif not (request.needs_result and request.num_pending):
            left = max(seq.max_length - 1 - seq.num_computed for seq in request.sequences)
            steps = 1 if request.needs_result else num_decode_steps
            decodes[request.tenant] += len(request.sequences) * max(0, min(steps, left))
    budget -= sum(decodes.values())
    prefilling = [number for number in wants if wants[number]]
    for tenant in tenants.present.values() if not state.swapped else ():
        num_longs = 0
        for request in tenant.waiting:
            if wants[tenant.number] >= budget:
                break
            if request.wait_reason in ("blocks", "rows"):  # may wait for long: one position, so that it is tried
                wants[tenant.number] += 1
                break
            num_longs += (is_long := request.is_long_prefill(longest))
            if not is_long or num_longs <= state.max_long_prefills:
                wants[tenant.number] += min(request.num_due, longest or budget, max_chunk)
    shares = tenants.shares(max(0, budget), wants, decodes)
    if num_starved := sum(not shares[number] for number in prefilling):  # their one position is not the others'
        shares = tenants.shares(max(0, budget - num_starved), wants, decodes)
    for number in prefilling:
        shares[number] = max(1, shares[number])
    return shares


def add_drafts(state: SchedulerState, draft: StepDraft) -> None:
    """Extend slices by drafts, with the budget and the blocks that are left when everything else has its place.

    Drafts therefore delay no other request and preempt none. Tenants are not charged for them. While a request waits
    for blocks, drafts take no new ones. The positions of an extended sequence are certain up to one token a pass; its
    end in this step is only an upper bound.
    """
    plan, cache, budget = draft.plan, state.cache, draft.budget
    first = state.first_swapped() or state.first_waiting()
    is_short = draft.preempted or (first is not None and first.wait_reason == "blocks")
    num_free = 0 if is_short else max(0, cache.pool.num_available - state.watermark())
    for i, seq in enumerate(draft.sequences):
        num_passes, end, request = draft.num_sampled[i], seq.num_computed, seq.request
        num_drafts = min(request.num_draft_tokens, state.num_speculative_tokens)
        if not num_passes or not num_drafts or request.needs_result:
            continue
        # At most half of the remaining length, so that the next step can plan this sequence before the result.
        extra = min(num_passes * num_drafts, (seq.max_length - 1 - end) // 2, budget, cache.max_chunk - draft.counts[i])
        if end + extra > seq.room:
            extra = min(extra, seq.room + num_free // cache.num_groups * cache.block_size - end)
            num_free -= max(0, cache.blocks_for(end + extra) - len(seq.block_ids)) * cache.num_groups
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


def note_wait_reason(state: SchedulerState, draft: StepDraft) -> None:
    """Set the reason of the first waiting request if this step did not even try to admit it."""
    waiting, swapped = state.first_waiting(), state.first_swapped()
    if swapped and waiting:
        state.set_wait_reason(waiting, "behind a swapped request", len(state.swapped))
    request = swapped or waiting
    if request and not request.wait_reason:
        if draft.preempted:
            needs = state.cache.blocks_for(len(request.sequences[0].token_ids))
            state.wait_for_blocks(request, needs + state.headroom(request))
        else:
            num_due = len(request.sequences[0].token_ids) - request.sequences[0].num_computed
            state.set_wait_reason(request, "budget", num_due, max(0, draft.budget))
