"""Results of steps: sampled tokens are committed, requests fork and finish, drafts are rejected."""

from __future__ import annotations

from typing import Any

from octavo.core import commands as cmd
from octavo.core import events as ev
from octavo.core.in_flight import InFlightStep
from octavo.core.plan import StepResult
from octavo.core.request import Request, Sequence, Status
from octavo.core.scheduling.failures import recompute_corrupt
from octavo.core.scheduling.scheduler_state import SchedulerState


def commit(state: SchedulerState, step: InFlightStep, result: StepResult, last: bool) -> list[Request]:
    """Commit a result, the last of its step or a part, and return the requests that this finished."""
    if result.corrupt:
        recompute_corrupt(state, step, result.corrupt)
    if step.void_slices:
        result.drop(step.void_slices)
    step.num_accepted += sum(num_right for passes in result.drafts.values() for _, num_right in passes)
    if last:
        state.in_flight.popleft()
    else:
        step.count_partial(result)
    finished: list[Request] = []
    for i in result.errors:
        request = step.sequences[i].request
        if request.status is not Status.FINISHED:
            request.error = result.errors[i]
            finish_request(state, request, "error")
            finished.append(request)
    candidates: dict[Request, list[tuple[Sequence, Any]]] = {}
    if last and step.plan.drafts:
        reject_drafts(state, step, result)
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
                tokens = fork(state, seq, tokens)
        if len(tokens) == 1:
            token = tokens[0]
            seq.num_pending -= 1
            seq.token_ids.append(token)
            if token in request.stop_ids:
                seq.stop_token = token
        else:
            seq.num_pending -= len(tokens)
            if not request.stop_ids.isdisjoint(tokens):
                tokens = cut_at_stop(state, seq, tokens)
            seq.token_ids.extend(tokens)
        known = len(seq.token_ids)
        sealable = known if known < seq.num_computed else seq.num_computed
        # In a part with drafts, the last token's position may not be computed yet.
        if sealable >= seq.seal_at and (last or not seq.num_unverified) and request.status is Status.RUNNING:
            state.cache.prefixes.seal(seq)
        if seq.stop_token is not None:
            if finish_sequence(state, seq, "stop"):
                finished.append(request)
        elif known >= seq.max_length and finish_sequence(state, seq, "length"):
            finished.append(request)
    for request, parents in candidates.items():
        if commit_beams(state, request, parents):
            finished.append(request)
    return finished


def reject_drafts(state: SchedulerState, step: InFlightStep, result: StepResult) -> None:
    """Take back the tokens and positions that the step planned, and that neither this result nor a part has."""
    step.settle_drafts()
    for i in step.plan.drafts:
        seq = step.sequences[i]
        if i in step.void_slices:
            continue
        num = step.outstanding[i] - len(result.tokens[i])
        step.num_lost += num
        if not seq.finish_reason:
            seq.num_pending -= num
            state.cache.shrink(seq, num)


def cut_at_stop(state: SchedulerState, seq: Sequence, tokens: Any) -> Any:
    """Return a decode window's tokens up to and including its first stop token."""
    end = next(i for i, token in enumerate(tokens) if token in seq.request.stop_ids)
    seq.stop_token = tokens[end]
    return tokens[: end + 1]


def fork(state: SchedulerState, parent: Sequence, samples: Any) -> Any:
    """Fork a request with n > 1: the parent keeps the first sample, each other one starts a child sequence."""
    request = parent.request
    request.forked, request.needs_result = True, False
    children = []
    for index in range(1, request.width):
        child = Sequence(request, index, parent.token_ids[:], parent.max_length)
        state.cache.fork(parent, child)
        children.append(child)
    request.sequences += children
    for child, token in zip(children, samples[1:], strict=True):
        append(state, child, token)
    return samples[:1]


def commit_beams(state: SchedulerState, request: Request, parents: list[tuple[Sequence, Any]]) -> bool:
    """Continue with the beams that `select_beams` returns. Returns True if the request finished.

    A parent selected twice is forked. All selected beams take their references before the others are released:
    otherwise a block could drop to 0 references and be lost in between.
    """
    assert request.select_beams is not None
    selected = request.select_beams(parents)
    if state.tee.active:
        state.tee.emit(cmd.BeamsSelected(request, [seq for seq, _ in parents], selected))
    tokens_before = {seq: seq.token_ids[:] for seq, _ in parents}
    beams: list[tuple[Sequence, int]] = []
    kept: set[Sequence] = set()
    for index, (parent, token) in enumerate(selected):
        beam = parent
        if parent in kept:
            beam = Sequence(request, index, tokens_before[parent][:], parent.max_length)
            state.cache.fork(parent, beam)
        kept.add(parent)
        beams.append((beam, token))
    for seq, _ in parents:
        if seq not in kept:
            seq.finish_reason = "pruned"
            release(state, seq)
    request.sequences = [beam for beam, _ in beams]
    for index, (beam, token) in enumerate(beams):
        beam.index, beam.row_has_last = index, False
        append(state, beam, token)
    if not request.sequences and request.status is not Status.FINISHED:
        num_tokens = sum(len(seq.token_ids) + 1 - len(request.prompt_token_ids) for seq, _ in parents)
        finish_request(state, request, "stop", num_tokens)
    return request.status is Status.FINISHED


def append(state: SchedulerState, seq: Sequence, token: int) -> None:
    """Append a token to a beam or to a sequence that was just forked.

    No block can be sealed here: all computed tokens were known when they were planned, and sealed then.
    """
    request = seq.request
    seq.token_ids.append(token)
    if token in request.stop_ids:
        seq.stop_token = token
    if seq.stop_token is not None:
        finish_sequence(state, seq, "stop")
    elif len(seq.token_ids) >= seq.max_length:
        finish_sequence(state, seq, "length")


# -- finishing ---------------------------------------------------------------------------------------------------------


def finish_sequence(state: SchedulerState, seq: Sequence, reason: str) -> bool:
    """Finish one sequence. Returns True if its request finished with it."""
    request = seq.request
    seq.finish_reason = reason
    if len(request.sequences) == 1:
        finish_request(state, request, reason)
        return True
    request.sequences.remove(seq)
    request.finished_sequences.append(seq)
    release(state, seq)
    return False


def finish_request(state: SchedulerState, request: Request, reason: str, num_ended: int = 0) -> None:
    """Finish a request. `num_ended` counts output tokens whose sequences ended when `select_beams` kept none."""
    for seq in request.sequences:
        seq.finish_reason = seq.finish_reason or reason
        if reason == "error":
            state.cache.prefixes.discard(seq)
        if request.pin and request.status is Status.RUNNING and not seq.num_pending and reason == "length":
            pin(state, seq)
        else:
            release(state, seq)
    if request.pin and request.request_id not in state.cache.pins:
        state.cache.num_pinned -= state.cache.blocks_to_pin(len(request.prompt_token_ids))
    request.finished_sequences += request.sequences
    request.sequences = []
    state.leave_queue(request)
    state.tenants.leave(request)
    request.status = Status.FINISHED
    if state.confined_to:
        state.confined_to -= {request}
    del state.requests[request.request_id]
    if state.events.active:
        num_prompt = len(request.prompt_token_ids)
        num_tokens = num_ended + sum(len(s.token_ids) - num_prompt for s in request.finished_sequences)
        state.events.emit(ev.Finished(request.request_id, reason, num_tokens))


def pin(state: SchedulerState, seq: Sequence) -> None:
    state.cache.rows.release(seq)
    state.cache.pin(seq)
    if state.events.active:
        state.events.emit(ev.Pinned(seq.request.request_id, seq.num_computed, len(seq.block_ids)))


def release(state: SchedulerState, seq: Sequence) -> None:
    state.cache.rows.release(seq)
    state.cache.free(seq)
