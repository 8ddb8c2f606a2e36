"""The engine loop: schedule a step, submit it, process the result of an earlier one, and return what is new."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import compress
from pathlib import Path
from typing import Protocol

from octavo.core import events as ev
from octavo.core.in_flight import InFlightStep
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request, Sequence
from octavo.core.scheduler import Scheduler
from octavo.engine.engine_request import NO_OPENINGS, EngineRequest, ModelLimits, RequestBuilder, TurnOpenings
from octavo.engine.executor import Executor, GrammarBitmask, StepHandle
from octavo.engine.failure_bisection import FailureBisection
from octavo.engine.gc_control import GCPause
from octavo.engine.oom_backoff import OOMBackoff
from octavo.engine.outputs import error_code
from octavo.engine.request_state import RequestState
from octavo.engine.request_update import RequestUpdate
from octavo.engine.stats import EngineStats, StatsSnapshot
from octavo.engine.structured_output import BitmaskRow, compute_bitmask
from octavo.engine.timeline import Timelines
from octavo.errors import (
    DeviceLostError,
    EngineError,
    ParameterError,
    StepError,
    StepMemoryError,
)
from octavo.params.sampling_params import SamplingParams

logger = logging.getLogger("octavo.engine")

POLL_S = 0.1
"""Longest single wait for the device, in seconds; Ctrl-C is handled in between."""
TOO_LARGE = (
    "takes more memory than the device has next to the weights and the KV pool; lower --gpu-memory-utilization or "
    "--max-num-batched-tokens, or shorten the request"
)


class Recorder(Protocol):
    """Records the engine's last minutes; `octavo.view.recording.recorder` implements it."""

    def dump(self, why: str) -> Path:
        """Write the recording to a file and return its path. Raises `OSError`."""

    def dump_last(self, why: str) -> None:
        """Write the recording of an engine that is crashing; never raises."""


class _SubmittedStep:
    """A step at the executor.

    num_bitmasks  columns whose bitmask has been provided
    masked_at     `outstanding` when the last of them was
    """

    __slots__ = ("handle", "masked_at", "num_bitmasks", "step")

    def __init__(self, step: InFlightStep, handle: StepHandle) -> None:
        self.step, self.handle, self.num_bitmasks = step, handle, 0
        self.masked_at: Seq[int] = ()

    @property
    def needs_bitmask(self) -> bool:
        return self.num_bitmasks < self.step.plan.num_bitmask_columns


class Engine:
    """Takes requests and returns their new tokens, one step at a time. Not thread-safe: one thread owns it.

    default_params   sampling parameters for requests without any; frontends apply them
    overlap          schedule the next step while the device computes the current one
    drafts_in_grammars
                     the executor computes drafts of structured outputs

    The other options are those of `ModelLimits` and `RequestBuilder`.

    on_close: callbacks of `close`. recorder: the recorder of its last minutes, if there is one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Seq[int] = (),
        max_logprobs: int = 20,
        default_params: SamplingParams | None = None,
        overlap: bool = True,
        drafts_in_grammars: bool = False,
        turn_openings: TurnOpenings = NO_OPENINGS,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.limits = ModelLimits(vocab_size, max_model_len, tuple(eos_token_ids), max_logprobs)
        self._request_builder = RequestBuilder(
            self.limits,
            scheduler.cache.max_output_tokens,
            seed,
            num_draft_tokens=scheduler.num_speculative_tokens,
            num_grammar_drafts=scheduler.num_speculative_tokens if drafts_in_grammars else 0,
            turn_openings=turn_openings,
        )
        self.default_params = default_params or SamplingParams()
        self.stats = EngineStats(num_accepted_per_position=[0] * scheduler.num_speculative_tokens)
        self.timelines = Timelines(clock)
        self.gc_pause = GCPause()
        self._clock = clock
        self.overlap = overlap
        self._oom_backoff = OOMBackoff(scheduler)
        self._suspects: FailureBisection[Request] = FailureBisection()  # requests whose steps failed twice
        self._in_flight: deque[_SubmittedStep] = deque()
        self._states: dict[str, RequestState] = {}
        self._num_streams = 0
        self._device_busy_since = 0.0
        self._closed = False
        self.on_close: list[Callable[[], None]] = []
        self.recorder: Recorder | None = None
        scheduler.events.subscribe(self.stats)
        scheduler.events.subscribe(self.timelines)
        scheduler.events.subscribe(self._on_event)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(self, new: EngineRequest) -> None:
        """Queue a request.

        Raises `PromptError`, `ContextLengthError`, `ParameterError` or `CapacityError`, and queues nothing then.
        """
        self._check_open()
        request_id = new.request_id
        if request_id in self._states:
            raise ParameterError(f"a request {request_id!r} is running already; ids must differ", param="request_id")
        state = self._request_builder.build(new, self._clock())
        if request_id in self.scheduler.cache.pins:
            raise ParameterError(f"{request_id!r} is pinned already; unpin it, or use another name", param="name")
        self.scheduler.add(state.request)
        self._num_streams += state.stream
        self._states[request_id] = state

    def abort(self, request_id: str) -> RequestUpdate | None:
        """Abort a request at once; returns its last update, None if there is no such request."""
        self.scheduler.abort(request_id)
        state = self._remove_state(request_id)
        return None if state is None else state.update()

    def stop(self, request_id: str, index: int) -> RequestUpdate | None:
        """Stop one sample, at a stop string that the client found in its text.

        The last sample finishes the request; returns its last update then.
        """
        state = self._states.get(request_id)
        for sequence in () if state is None else state.request.sequences:
            if sequence.index == index:
                if self.scheduler.stop(sequence) and (state := self._remove_state(request_id)) is not None:
                    return state.update()
                break
        return None

    def get_state(self, request_id: str) -> RequestState | None:
        """The state of a running or waiting request."""
        return self._states.get(request_id)

    def stats_snapshot(self) -> StatsSnapshot:
        scheduler, waits = self.scheduler, dict(self.timelines.wait_counts)
        num_running, num_waiting, num_swapped = map(len, (scheduler.running, scheduler.waiting, scheduler.swapped))
        return StatsSnapshot(self.stats, scheduler.stats(), num_running, num_waiting, num_swapped, waits)

    @property
    def has_work(self) -> bool:
        return bool(self._states or self._in_flight)

    @property
    def num_requests(self) -> int:
        return len(self._states)

    @property
    def _depth(self) -> int:
        """Maximum number of steps in flight. `overlap` may only change while there is none."""
        return 2 if self.overlap else 1

    @property
    def num_in_flight(self) -> int:
        """Submitted steps whose result is outstanding."""
        return len(self._in_flight)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestUpdate]:
        """Schedule one step, process what the device has finished, and return what is new.

        May return [] while the device computes; waits for the device if there is nothing to schedule. Raises
        `EngineError` once the engine is closed, `DeviceLostError` if the device is lost.
        """
        self._check_open()
        if self._suspects:
            self._clear_suspects()
        if step := self._schedule():
            self._submit(step)
            if len(self._in_flight) == 1 and (failed := self._put_bitmask()):
                return [state.update() for state in failed]
            if len(self._in_flight) < self._depth:
                return []  # schedule the next step while the device computes this one
        if not self._in_flight:
            return []
        self.gc_pause.collect_young()
        return self._process_oldest()

    def drain(self) -> list[RequestUpdate]:
        """Process all steps in flight and schedule nothing more."""
        updates: list[RequestUpdate] = []
        while self._in_flight:
            updates += self._process_oldest()
        return updates

    def _schedule(self) -> InFlightStep | None:
        """The next step; none while enough are in flight, or while the oldest waits for a bitmask."""
        if len(self._in_flight) >= self._depth or (self._in_flight and self._in_flight[0].needs_bitmask):
            return None
        return self.scheduler.schedule()

    def _submit(self, step: InFlightStep) -> None:
        if not self._in_flight:
            self._device_busy_since = self._clock()
        for i in step.plan.drafts:  # the counter must not fall when drafts turn out wrong
            self.stats.num_tokens_computed -= step.plan.num_unverified(i)
        self._in_flight.append(_SubmittedStep(step, self.executor.submit(step.plan)))

    def _process_oldest(self) -> list[RequestUpdate]:
        """Wait for the oldest step in flight, update the scheduler, and provide the next bitmask if it can be computed
        now."""
        step = self._in_flight[0].step
        try:
            result, last = self._wait()
        except StepError as error:
            return [state.update() for state in self._handle_step_error(step, error)]
        now = self._clock()
        if last:
            self._record_step_time(step.plan, now)
            self._oom_backoff.record_success()
        finished = self.scheduler.update(step, result, last=last)
        if step.plan.drafts:
            self._record_drafts(step, result, last)
        states = self._changed(step, result, finished, now)
        if failed := self._put_bitmask():
            states = [state for state in states if state not in failed] + failed
        return [state.update() for state in states]

    def _wait(self) -> tuple[StepResult, bool]:
        """The result of the oldest step, and True. If a request streams: its next tokens, and False while more come."""
        submitted = self._in_flight[0]
        handle = submitted.handle
        try:
            if self._num_streams or submitted.needs_bitmask:
                while not handle.done:
                    if (part := handle.poll(POLL_S)) is not None:
                        return part, False
            result = handle.result()
        except DeviceLostError:
            self._in_flight.clear()  # no result will come: `drain` must not wait for one
            raise
        self._in_flight.popleft()
        return result, True

    def _put_bitmask(self) -> list[RequestState]:
        """Provide the next bitmask of the oldest step in flight, once all earlier tokens are known, while the device
        computes. Returns the requests that failed because their grammar cannot be followed any further."""
        if not self._in_flight or not self._in_flight[0].needs_bitmask:
            return []
        submitted, rows = self._in_flight[0], []
        step, column = submitted.step, submitted.num_bitmasks
        plan, left = step.plan, step.outstanding
        for i in plan.bitmask_slices:
            seq = step.sequences[i]
            state = self._state_of(seq)
            if plan.num_passes(i) <= column or seq.finish_reason or state is None or state.grammar is None:
                continue
            if i in step.void_slices or not left[i]:
                continue
            if column and left[i] == submitted.masked_at[i]:  # the first column may arrive in several parts
                return []
            is_decode = column > 0 or i not in plan.host_tokens
            num_drafts = min(plan.drafts[i].num_draft_tokens, left[i] - 1) if i in plan.drafts and is_decode else 0
            rows.append(BitmaskRow(i, seq, state.grammar, num_drafts))
        submitted.num_bitmasks += 1
        submitted.masked_at = left[:]
        masks: GrammarBitmask | None = None
        try:
            masks, errors = compute_bitmask(rows)
        finally:
            submitted.handle.put_bitmask(masks)  # always: the device waits for it
        failed: dict[str, RequestState] = {}
        for i, error in errors.items():
            if (state := self._state_of(step.sequences[i])) is not None:
                reason = str(error)
                self._fail(
                    state, reason if error_code(reason) else f"its structured_outputs cannot be followed: {reason}"
                )
                failed[state.request.request_id] = state
        return list(failed.values())

    def _changed(
        self, step: InFlightStep, result: StepResult, finished: list[Request], now: float
    ) -> list[RequestState]:
        """The requests to report after a result: streams with new tokens, and those that have finished."""
        for i in step.plan.host_tokens:  # slices of prefill and of recomputation
            state = self._state_of(step.sequences[i])
            if result.tokens[i] and state is not None and state.metrics.first_token_time is None:
                state.metrics.first_token_time = now
        if result.logprobs or result.prompt_logprobs:
            self._add_logprobs(step, result)
        streams = [s for s in self._states_of(step, result) if s.stream] if self._num_streams else []
        states = [state for state in streams if state.request.sequences]
        for request in finished:
            if (state := self._remove_state(request.request_id, now)) is not None:
                states.append(state)
        for state in states:
            state.metrics.last_token_time = now
        return states

    def _record_step_time(self, plan: StepPlan, now: float) -> None:
        """Record the device time of a step: the scheduler estimates the cost of preemptions from it."""
        seconds, self._device_busy_since = now - self._device_busy_since, now
        if plan.rows and not plan.swap_outs and not plan.swap_ins:
            num_prompt = sum(map(len, plan.host_tokens.values()))
            costs, num_passes = self.scheduler.policy.costs, plan.most_passes
            # Only the first pass of a decode window computes prompt tokens.
            first_s = seconds - (num_passes - 1) * costs.step_s if num_prompt else seconds / num_passes
            costs.record_step(num_prompt, first_s)

    def _add_logprobs(self, step: InFlightStep, result: StepResult) -> None:
        for i, entries in result.logprobs.items():
            if (state := self._state_of(step.sequences[i])) is None:
                continue
            if i in step.plan.num_samples:  # one entry per sample
                for index, entry in enumerate(entries):
                    state.add_logprobs(index, [entry])
            else:
                state.add_logprobs(step.sequences[i].index, entries)
        for i, (position, entries) in result.prompt_logprobs.items():
            if (state := self._state_of(step.sequences[i])) is not None:
                state.add_prompt_logprobs(position, entries)

    def _record_drafts(self, step: InFlightStep, result: StepResult, last: bool) -> None:
        """Count what became of drafts, at the end of a step also the positions of those that were right."""
        if last:
            num_unverified = sum(map(step.plan.num_unverified, step.plan.drafts))
            self.stats.num_tokens_computed += max(0, num_unverified - step.num_lost)
        for i, passes in result.drafts.items():
            self.stats.record_drafts(passes)
            if (state := self._state_of(step.sequences[i])) is not None:
                metrics = state.metrics
                metrics.num_draft_tokens += sum(num_drafts for num_drafts, _ in passes)
                metrics.num_accepted_tokens += sum(num_right for _, num_right in passes)
                self.timelines.drafts[state.request.request_id] = metrics.num_draft_tokens, metrics.num_accepted_tokens

    def _state_of(self, sequence: Sequence) -> RequestState | None:
        """None after its request was removed: a step in flight may hold sequences of an earlier request of that id."""
        state = self._states.get(sequence.request.request_id)
        return state if state is not None and state.request is sequence.request else None

    def _states_of(self, step: InFlightStep, result: StepResult | None = None) -> list[RequestState]:
        """The requests of a step, each once; with a result, only those that got a token."""
        sequences = step.sequences if result is None else compress(step.sequences, result.tokens)
        states = [self._state_of(seq) for seq in sequences]
        return list({state.request.request_id: state for state in states if state is not None}.values())

    def _remove_state(self, request_id: str, now: float | None = None) -> RequestState | None:
        """Remove a finished request."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._num_streams -= state.stream
            state.metrics.finished_time = self._clock() if now is None else now
        return state

    def _handle_step_error(self, step: InFlightStep, error: StepError) -> list[RequestState]:
        """Handle a failed step: recompute everything that was in flight, since a first failure may be chance.

        If a request's step fails a second time before the request has a new token, the step's requests are bisected
        while all others wait. A request that fails alone is failed for good.

        Consecutive failures would be the wrong criterion: between two failures caused by one request, steps that
        recompute its neighbours may succeed, without end.
        """
        self._in_flight.clear()
        self.stats.num_failed_steps += 1
        if isinstance(error, StepMemoryError) and step.plan.rows:
            return self._handle_out_of_memory(step, error)
        self.scheduler.fail(step)
        states, number = self._states_of(step), step.plan.step
        failed_again = any(state.num_known == state.failed_at for state in states)
        for state in states:
            state.failed_at = state.num_known
        if not failed_again:
            logger.warning("step %d failed and is recomputed: %s", number, error)
            return []
        if len(states) == 1:
            name = states[0].request.request_id
            logger.error("step %d failed again with request %s alone, which fails now: %s", number, name, error)
            self._fail(states[0], str(error))
            return states
        logger.warning("step %d failed again; its %d requests are tried in halves: %s", number, len(states), error)
        self._suspects.split([state.request for state in states])
        self.scheduler.confine(self._suspects.active)
        return []

    def _clear_suspects(self) -> None:
        """Clear the active suspects that have a new token or have ended: they do not make steps fail."""
        cleared = []
        for request in self._suspects.active:
            state = self._states.get(request.request_id)
            if state is None or state.request is not request or state.num_known > state.failed_at:
                cleared.append(request)
        if self._suspects.clear(cleared):
            self.scheduler.confine(self._suspects.active)

    def _handle_out_of_memory(self, step: InFlightStep, error: StepMemoryError) -> list[RequestState]:
        """Handle a step that ran out of device memory: recompute everything that was in flight, in smaller steps.

        A request fails only if a step with it alone, one position per sequence, does not fit.
        """
        limit, num_tokens = self._oom_backoff.smaller_limit(step), step.plan.num_tokens
        states = self._states_of(step)
        self.scheduler.fail(step, limit)
        if limit:
            logger.warning(
                "step %d, %d tokens of %d requests, ran out of device memory; it is recomputed in steps of at most %d "
                "tokens: %s",
                *(step.plan.step, num_tokens, len(states), limit, error),
            )
            return []
        for state in states:
            logger.error("request %s runs out of device memory alone: %s", state.request.request_id, error)
            self._fail(state, f"out_of_memory: a step of its own, {num_tokens} tokens, {TOO_LARGE}: {error}")
        self._oom_backoff.reset()
        return states

    def _fail(self, state: RequestState, reason: str) -> None:
        """Fail a request."""
        state.request.error = reason
        self.scheduler.abort(state.request.request_id, "error")
        self._remove_state(state.request.request_id)

    def _on_event(self, event: ev.Event) -> None:
        if isinstance(event, ev.Corrupt):
            logger.error(
                "request %s: %d swapped blocks came back corrupted and are recomputed; check this host's memory", *event
            )
        if isinstance(event, ev.Admitted | ev.Preempted):
            state = self._states.get(event.request_id)
            if state is None:
                return
            if isinstance(event, ev.Preempted):
                state.metrics.record_preemption(event)
            elif state.metrics.first_scheduled_time is None:
                state.metrics.first_scheduled_time = self._clock()

    def close(self) -> None:
        """Abort all requests and close the executor. A second call does nothing."""
        if not self._closed:
            self._closed = True
            for request_id in list(self._states):
                self.abort(request_id)
            self._in_flight.clear()
            self.executor.close()
            for close in self.on_close:
                close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; create a new one")
