"""The loop: plan a step, submit it, take in the result of the one before, and tell what came of it."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import chain, compress
from pathlib import Path
from typing import Protocol

from octavo.core import events as ev
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request, Sequence
from octavo.core.scheduler import Scheduler
from octavo.engine.beam_search import BeamSearch
from octavo.engine.executor import Executor, GrammarBitmask, StepHandle
from octavo.engine.failure_bisection import FailureBisection
from octavo.engine.gc_control import GCPause
from octavo.engine.oom_backoff import OOMBackoff
from octavo.engine.outputs import MakeDetokenizer, RequestMetrics, RequestOutput, RequestState, error_code
from octavo.engine.stats import EngineStats
from octavo.engine.structured_output import Constraint, Grammar, Wanted, work_out
from octavo.engine.timeline import Timelines
from octavo.errors import (
    ContextLengthError,
    DeviceLostError,
    EngineError,
    ParameterError,
    PromptError,
    StepError,
    StepMemoryError,
)
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import INT64, RequestOutputKind, SamplingParams

logger = logging.getLogger("octavo.engine")

POLL_S = 0.1
"""How long one wait for the device lasts before the loop looks around (for Ctrl-C)."""
TOO_LARGE = (
    "takes more memory than the device has beside the weights and the KV pool; lower --gpu-memory-utilization or "
    "--max-num-batched-tokens, or shorten the request"
)
MAX_PRIORITY = 1 << 31
"""Of a request, either way."""
PIN_PARAMS = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
"""Of a request that is there for its prompt alone."""


class Recorder(Protocol):
    """Keeps an engine's last minutes: `octavo.view.recording.recorder.FlightRecorder`."""

    def dump(self, why: str) -> Path:
        """Write them down; where. Raises `OSError`."""

    def dump_last(self, why: str) -> None:
        """The same of an engine that dies; never raises."""


class _InFlight:
    """A step that the device has not finished. `num_put`: columns of it whose masks have been put."""

    __slots__ = ("num_put", "plan", "running")

    def __init__(self, plan: StepPlan, running: StepHandle) -> None:
        self.plan, self.running, self.num_put = plan, running, 0

    @property
    def lacks_masks(self) -> bool:
        return self.num_put < self.plan.num_bitmask_columns


class Engine:
    """Requests in, outputs out, one step at a time. Not thread-safe: one thread owns it.

    vocab_size, max_model_len   what a prompt is checked against
    eos_token_ids               the model's own ends of sequence
    max_logprobs                the most that a request may ask for at a position; -1: the whole vocabulary
    default_params              of a request whose caller says nothing; for the fronts
    overlap                     plan the next step while the device computes this one
    seed                        where the seeds of requests that bring none come from

    on_close: what else is to end with it. recorder: who keeps its last minutes, if anybody does.
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
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        # Files may name ends that the model has no logits for: an added token of a table that was never resized.
        self.eos_token_ids = tuple(token for token in eos_token_ids if token < vocab_size)
        self.max_logprobs = max_logprobs
        self.default_params = default_params or SamplingParams()
        self.stats = EngineStats()
        self.timelines = Timelines(clock)
        self.gc_pause = GCPause()
        self._clock = clock
        self._seeds = random.Random(seed)
        self.overlap = overlap
        self._step_limit = OOMBackoff(scheduler)
        self._suspects: FailureBisection[Request] = FailureBisection()  # whose steps failed twice
        self._flight: deque[_InFlight] = deque()
        self._states: dict[str, RequestState] = {}
        self._num_incremental = 0
        self._device_since = 0.0
        self._closed = False
        self.on_close: list[Callable[[], None]] = []
        self.recorder: Recorder | None = None
        scheduler.events.subscribe(self.stats)
        scheduler.events.subscribe(self.timelines)
        scheduler.events.subscribe(self._listen)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        params: SamplingParams | BeamSearchParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        salt: bytes = b"",
        tenant: int = 0,
        rank: int = 0,
        seed: int | None = None,
        resume: Mapping[int, Seq[int]] | None = None,
        grammar: Grammar | None = None,
        pin: bool = False,
        make_detokenizer: MakeDetokenizer | None = None,
        stream: bool = False,
    ) -> None:
        """Queue a request; with `stream`, `step` tells of it whenever it has new tokens, else when it has finished.

        `tenant`, `rank`: see `core.request.Request`. `seed` is that of a request that brings none; None: the engine
        draws one. `resume`: what another engine had made of it (see `core.request.Request`), under the same seed. It is
        told again as if it were new. `grammar`: what the parameters' `structured_outputs` compile to.

        Raises `PromptError`, `ContextLengthError`, `ParameterError` or `CapacityError`; then nothing was queued.
        """
        self._check_open()
        if request_id in self._states:
            raise ParameterError(f"a request {request_id!r} is running already; ids must differ", param="request_id")
        check_prompt(prompt_token_ids, self.vocab_size)
        check_priority(priority)
        check_seed(seed)
        beams, params = (params, params.sampling_params) if isinstance(params, BeamSearchParams) else (None, params)
        max_tokens = self._max_tokens(len(prompt_token_ids), params)
        if pin and (resume or params != PIN_PARAMS or not request_id.startswith(pin_id(""))):
            text = f"{request_id!r:.80} is to be pinned with a request that does more; use `Engine.pin`"
            raise ParameterError(text, param="pin")
        if resume:
            check_resume(resume, 0 if beams is not None else params.width, max_tokens, self.vocab_size)
        stop_ids = params.stop_ids(self.eos_token_ids)
        self._check_params(params, max_tokens, stop_ids, params.logprobs if beams is None else beams.logprobs)
        search = None if beams is None else BeamSearch(beams, len(prompt_token_ids), stop_ids)
        if beams is not None and beams.beam_width > self.vocab_size:
            raise ParameterError(
                f"beam_width is {beams.beam_width}, the vocabulary has {self.vocab_size} tokens", param="beam_width"
            )
        if params.structured_outputs is not None and grammar is None:
            text = "structured_outputs take a tokenizer, which makes a grammar of tokens of them; the engine has none"
            raise ParameterError(text, param="structured_outputs")
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            max_tokens=max_tokens,
            seed=self._seed_of(params, seed),
            stop_ids=stop_ids,
            priority=priority,
            salt=salt,
            tenant=tenant,
            index_in_call=rank,
            width=None if beams is None else beams.beam_width,
            num_samples=None if search is None else search.num_candidates,
            select_beams=None if search is None else search.select_beams,
            use_structured_output=grammar is not None,
            pin=pin,
            resume=resume,
        )
        if request_id in self.scheduler.cache.pins:
            raise ParameterError(f"{request_id!r} is pinned already; unpin it, or take another name", param="name")
        self.scheduler.add(request)
        if not params.detokenize:
            make_detokenizer = None
        stream = stream and params.output_kind is not RequestOutputKind.FINAL_ONLY and search is None
        incremental = make_detokenizer is not None and search is None and (stream or bool(params.stop_strings))
        self._num_incremental += incremental or stream
        self._states[request_id] = state = RequestState(
            request, prompt, RequestMetrics(self._clock()), make_detokenizer, incremental, stream, search=search
        )
        if search is not None and params.stop_strings:
            search.ends = state.ends_in_stop_string
        if grammar is not None:
            state.constraint = Constraint(grammar, len(prompt_token_ids), stop_ids, self.eos_token_ids)

    def pin(self, name: str, token_ids: Seq[int], *, salt: bytes = b"") -> str:
        """Queue the computing of a prompt whose blocks are to stay, for requests of that salt that begin with it.

        Returns the id of the request that does it, which is told of when it has finished. Raises as `add`, and
        `CapacityError` where the pin would leave too little to others.
        """
        request_id = pin_id(name)
        self.add_request(request_id, token_ids, PIN_PARAMS, salt=salt, pin=True)
        return request_id

    def unpin(self, name: str) -> int:
        """Give a pin up; who began with it goes on. Returns its blocks. Raises `ParameterError` if there is none."""
        num_blocks = self.scheduler.unpin(pin_id(name))
        if num_blocks is None:
            raise ParameterError(f"nothing of the name {name!r} is pinned", param="name", code="not_found")
        return num_blocks

    def _seed_of(self, params: SamplingParams, drawn: int | None) -> int:
        if params.seed is not None:
            return params.seed
        return draw_seed(self._seeds) if drawn is None else drawn

    def _check_params(
        self, params: SamplingParams, max_tokens: int, stop_ids: frozenset[int], logprobs: int | None
    ) -> None:
        """What is wrong only with this model, or with a default that has become a number. Raises `ParameterError`."""
        given: dict[str, Iterable[int]] = {
            "stop_token_ids": params.stop_token_ids or (),
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words_token_ids": chain.from_iterable(params.bad_words_token_ids or ()),
            "logit_bias": params.logit_bias or (),
        }
        for name, ids in given.items():
            if (largest := max(ids, default=0)) >= self.vocab_size:
                code = "invalid_logit_bias" if name == "logit_bias" else "invalid_token_id"
                text = f"{name} has {largest}, the vocabulary ends at {self.vocab_size - 1}"
                raise ParameterError(text, param=name, code=code)
        most = self.vocab_size if self.max_logprobs < 0 else self.max_logprobs
        for name, num in (("logprobs", logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if num is not None and (self.vocab_size if num < 0 else num) > most:
                raise ParameterError(f"{name} is {num}, at most {most} are given; raise max_logprobs", param=name)
        if params.min_tokens > max_tokens:
            raise ParameterError(
                f"min_tokens is {params.min_tokens}, and there is room for {max_tokens}; lower it", param="min_tokens"
            )
        if params.bad_words and not params.bad_words_token_ids:
            raise ParameterError(
                "bad_words are text, which takes a tokenizer; use bad_words_token_ids", param="bad_words"
            )
        if params.allowed_token_ids is not None:
            never = {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
            if never.union(stop_ids if params.min_tokens else ()).issuperset(params.allowed_token_ids):
                raise ParameterError(
                    "bad_words and min_tokens rule out all of allowed_token_ids; allow more",
                    param="allowed_token_ids",
                    code="no_allowed_token",
                )

    def _max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        """A number is taken at its word; a default is cut to what fits."""
        limit = self.max_model_len
        if params.max_tokens == 0 and num_prompt <= limit:
            return 1  # what the core cannot do without; nobody is told of it
        if num_prompt + 1 > limit or (params.max_tokens is not None and num_prompt + params.max_tokens > limit):
            asked = f"{params.max_tokens} for the completion" if params.max_tokens is not None else "a completion"
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens. However, you requested {num_prompt} tokens in "
                f"the prompt and {asked}; shorten the prompt"
                + (f", or ask for at most {limit - num_prompt} tokens" if num_prompt < limit else ""),
                param="prompt" if num_prompt + 1 > limit else "max_tokens",
            )
        if params.max_tokens is not None:
            return params.max_tokens
        most = self.scheduler.cache.max_output_tokens(num_prompt, params.width)
        return max(1, min(limit - num_prompt, most))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request, whatever it is doing; its output so far, None when there is no such request."""
        state = self.abort_state(request_id)
        return None if state is None else _last_output(state)

    def abort_state(self, request_id: str) -> RequestState | None:
        """As `abort`, for who makes something else of its state than an output, and then calls `release` on it."""
        self.scheduler.abort(request_id)
        return self._close(request_id)

    def stop(self, request_id: str, index: int) -> None:
        """Somebody else has seen the end of a sample, in its text. When no other lives, the request is forgotten."""
        state = self._states.get(request_id)
        for sequence in () if state is None else state.request.sequences:
            if sequence.index == index:
                if self.scheduler.stop(sequence):
                    self._close(request_id)
                return

    def get_state(self, request_id: str) -> RequestState | None:
        """One that runs or waits."""
        return self._states.get(request_id)

    def states(self) -> Iterable[tuple[str, RequestState]]:
        """All that run or wait, by id."""
        return self._states.items()

    @property
    def has_work(self) -> bool:
        return bool(self._states or self._flight)

    @property
    def num_requests(self) -> int:
        return len(self._states)

    @property
    def _depth(self) -> int:
        """Steps in flight at most. `overlap` may change while there is none."""
        return 2 if self.overlap else 1

    @property
    def num_in_flight(self) -> int:
        """Steps that the device has not finished."""
        return len(self._flight)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Plan one step, and take in what the device has; returns the requests that have something to tell.

        May return nothing while the device works. Waits for the device when there is nothing else to do. Raises
        `EngineError` once the engine is closed, `DeviceLostError` where there is no device any more.
        """
        return _outputs(self.step_states())

    def step_states(self) -> list[RequestState]:
        """As `step`, for who makes something else of the states than outputs, and then calls `release` on those that
        have ended, which come last. Raises `EngineError` once the engine is closed."""
        self._check_open()
        if self._suspects:
            self._clear_suspects()
        plan = None
        if len(self._flight) < self._depth and not (self._flight and self._flight[0].lacks_masks):
            plan = self.scheduler.schedule()
            if plan:
                if not self._flight:
                    self._device_since = self._clock()
                self._flight.append(_InFlight(plan, self.executor.submit(plan)))
                if len(self._flight) == 1 and (given_up := self._put_masks()):
                    return given_up
        if not self._flight or (plan and len(self._flight) < self._depth):
            return []
        self.gc_pause.collect_young()
        return self._next_result()

    def drain(self) -> list[RequestOutput]:
        """Take in all that is in flight and plan nothing more: for leaving in the middle of something."""
        outputs: list[RequestOutput] = []
        while self._flight:
            outputs += _outputs(self._next_result())
        return outputs

    def _next_result(self) -> list[RequestState]:
        """Wait for more of the oldest step in flight: all that is left of it, unless somebody waits for each token."""
        step = self._flight[0]
        try:
            if self._num_incremental or step.lacks_masks:
                while not step.running.done:
                    if (part := step.running.poll(POLL_S)) is not None:
                        return self._taken_in(step.plan, part, last=False)
            result = step.running.result()
        except StepError as error:
            return self._failed(step.plan, error)
        except DeviceLostError:
            self._flight.clear()  # nothing comes of it: who drains, on his way out, asks no more
            raise
        self._flight.popleft()
        return self._taken_in(step.plan, result, last=True)

    def _taken_in(self, plan: StepPlan, result: StepResult, *, last: bool) -> list[RequestState]:
        """As `_take_in`; and what waits for masks gets those that can be worked out now."""
        states = self._take_in(plan, result, last=last)
        given_up = self._put_masks()
        return [state for state in states if state not in given_up] + given_up if given_up else states

    def _put_masks(self) -> list[RequestState]:
        """Work out what may come next in the constrained outputs of the oldest step in flight, once all tokens before
        are known, while the device computes. Returns the requests that are given up, because their grammars cannot be
        followed any further."""
        if not self._flight or not self._flight[0].lacks_masks:
            return []
        step, wanted = self._flight[0], []
        plan, column = step.plan, step.num_put
        left = plan.num_outstanding or plan.num_sampled
        for i in plan.bitmask_slices:
            seq = plan.sequences[i]
            state = self._state_of(seq)
            if plan.num_sampled[i] <= column or seq.finish_reason or state is None or state.constraint is None:
                continue
            if i in plan.void_slices:
                continue
            if plan.num_sampled[i] - left[i] < column:  # the first column may come in several parts
                return []
            wanted.append(Wanted(i, seq, state.constraint))
        step.num_put += 1
        masks: GrammarBitmask | None = None
        try:
            masks, errors = work_out(wanted)
        finally:
            step.running.put_bitmask(masks)  # whatever happens: the device waits for them
        given_up: dict[str, RequestState] = {}
        for i, error in errors.items():
            if (state := self._state_of(plan.sequences[i])) is not None:
                why = str(error)
                self._give_up(state, why if error_code(why) else f"its structured_outputs cannot be followed: {why}")
                given_up[state.request.request_id] = state
        return list(given_up.values())

    def _take_in(self, plan: StepPlan, result: StepResult, *, last: bool) -> list[RequestState]:
        now = self._clock()
        if last:
            self._learn(plan, now)
            self._step_limit.went_well()
        finished = self.scheduler.update(plan, result, last=last)
        for i in plan.host_tokens:  # the slices of prompts, and of what was recomputed
            state = self._state_of(plan.sequences[i])
            if result.tokens[i] and state is not None and state.metrics.first_token_time is None:
                state.metrics.first_token_time = now
        if result.logprobs or result.prompt_logprobs:
            self._take_in_logprobs(plan, result)
        told: list[RequestState] = []
        if self._num_incremental:
            for state in self._states_of(plan, result):
                if state.incremental:
                    self._read(state, finished)
                state.metrics.last_token_time = now
                if state.stream:
                    told.append(state)
        states = [s for s in told if s.request.sequences]
        for request in finished:
            if (state := self._close(request.request_id, now)) is not None:
                state.metrics.last_token_time = now
                states.append(state)
        return states

    def _learn(self, plan: StepPlan, now: float) -> None:
        """What a step took, since the device had nothing before it to do: it tells what a preemption costs."""
        seconds, self._device_since = now - self._device_since, now
        if plan.rows and not plan.swap_outs and not plan.swap_ins:
            num_prompt = sum(map(len, plan.host_tokens.values()))
            costs, num_passes = self.scheduler.policy.costs, max(1, *plan.num_sampled)
            # A window's passes after the first compute no prompt.
            first_s = seconds - (num_passes - 1) * costs.step_s if num_prompt else seconds / num_passes
            costs.record_step(num_prompt, first_s)

    def _take_in_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        for i, entries in result.logprobs.items():
            if (state := self._state_of(plan.sequences[i])) is None:
                continue
            if i in plan.num_samples:  # one of each sample
                for index, entry in enumerate(entries):
                    state.read_logprobs(index, [entry])
            else:
                state.read_logprobs(plan.sequences[i].index, entries)
        for i, (position, entries) in result.prompt_logprobs.items():
            if (state := self._state_of(plan.sequences[i])) is not None:
                state.read_prompt_logprobs(position, entries)

    def _read(self, state: RequestState, finished: list[Request]) -> None:
        """Text from new tokens. A stop string in it ends the sequence, which the scheduler cannot know."""
        request = state.request
        for sequence in [*request.sequences, *request.finished_sequences]:
            if state.read(sequence) and not sequence.finish_reason and self.scheduler.stop(sequence):
                finished.append(request)

    def _state_of(self, sequence: Sequence) -> RequestState | None:
        """None once its request is forgotten: what is in flight of that is not a later one's of the same name."""
        state = self._states.get(sequence.request.request_id)
        return state if state is not None and state.request is sequence.request else None

    def _states_of(self, plan: StepPlan, result: StepResult | None = None) -> list[RequestState]:
        """Each once, however many of its sequences are there. With a result: of those only that got a token by it."""
        news = plan.sequences if result is None else compress(plan.sequences, result.tokens)
        states = [self._state_of(seq) for seq in news]
        return list({state.request.request_id: state for state in states if state is not None}.values())

    def _close(self, request_id: str, now: float | None = None) -> RequestState | None:
        """A request that has ended is forgotten here."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._num_incremental -= state.incremental or state.stream
            state.metrics.finished_time = self._clock() if now is None else now
        return state

    def _failed(self, plan: StepPlan, error: StepError) -> list[RequestState]:
        """A step failed. Once may be chance: all that was in flight is computed again. Where a request's step fails a
        second time before the request has got a token further, the step's requests are tried in halves, and all others
        wait. A request is given up that fails alone.

        Steps that failed in a row are not what counts: between two that fail because of one request, others may
        succeed that recompute its neighbours, for ever.
        """
        self._flight.clear()
        self.stats.num_failed_steps += 1
        if isinstance(error, StepMemoryError) and plan.rows:
            return self._out_of_memory(plan, error)
        self.scheduler.fail(plan)
        states = self._states_of(plan)
        failed_again = any(state.num_known == state.failed_at for state in states)
        for state in states:
            state.failed_at = state.num_known
        if not failed_again:
            logger.warning("step %d failed and is computed again: %s", plan.step, error)
            return []
        if len(states) == 1:
            name = states[0].request.request_id
            logger.error("step %d failed again; request %s was alone in it and is given up: %s", plan.step, name, error)
            self._give_up(states[0], str(error))
            return states
        logger.warning("step %d failed again; its %d requests are tried in halves: %s", plan.step, len(states), error)
        self._suspects.failed([state.request for state in states])
        self.scheduler.confine(self._suspects.on_trial)
        return []

    def _clear_suspects(self) -> None:
        """Those on trial that got a token further, or have gone, do not make steps fail."""
        cleared = []
        for request in self._suspects.on_trial:
            state = self._states.get(request.request_id)
            if state is None or state.request is not request or state.num_known > state.failed_at:
                cleared.append(request)
        if self._suspects.cleared(cleared):
            self.scheduler.confine(self._suspects.on_trial)

    def _out_of_memory(self, plan: StepPlan, error: StepMemoryError) -> list[RequestState]:
        """A step took more memory than the device has. All that was in flight is computed again, in smaller steps: who
        has no place in them waits. Given up is who does not fit even alone, with a position at a time."""
        limit, num_tokens = self._step_limit.below(plan), plan.num_tokens
        states = self._states_of(plan)
        self.scheduler.fail(plan, limit)
        if limit:
            logger.warning(
                "step %d, %d tokens of %d requests, took more memory than there is; it is computed again in steps of "
                "at most %d: %s",
                *(plan.step, num_tokens, len(states), limit, error),
            )
            return []
        for state in states:
            logger.error("request %s takes more memory than there is: %s", state.request.request_id, error)
            self._give_up(state, f"out_of_memory: a step of its own, {num_tokens} tokens, {TOO_LARGE}: {error}")
        self._step_limit.lift()
        return states

    def _give_up(self, state: RequestState, why: str) -> None:
        state.request.error = why
        self.scheduler.abort(state.request.request_id, "error")
        self._close(state.request.request_id)

    def _listen(self, event: ev.Event) -> None:
        if isinstance(event, ev.Corrupt):
            logger.error(
                "request %s: %d swapped blocks came back with another content than they left with, and it is computed "
                "again; check this host's memory",
                *event,
            )
        if isinstance(event, ev.Admitted | ev.Preempted):
            state = self._states.get(event.request_id)
            if state is None:
                return
            if isinstance(event, ev.Preempted):
                state.metrics.note(event)
            elif state.metrics.first_scheduled_time is None:
                state.metrics.first_scheduled_time = self._clock()

    def close(self) -> None:
        """Abort what runs, and the executor gives back what it holds. A second call does nothing."""
        if not self._closed:
            self._closed = True
            for request_id in list(self._states):
                self.abort(request_id)
            self._flight.clear()
            self.executor.close()
            for close in self.on_close:
                close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; make a new one")


def _outputs(states: list[RequestState]) -> list[RequestOutput]:
    return [state.output() if state.request.sequences else _last_output(state) for state in states]


def _last_output(state: RequestState) -> RequestOutput:
    output = state.output()
    state.release()
    return output


def check_prompt(prompt_token_ids: Seq[int], vocab_size: int) -> None:
    """Raises `PromptError` for an empty prompt or a token that the model does not have."""
    if not prompt_token_ids:
        raise PromptError("the prompt is empty; give it at least one token", param="prompt", code="empty_prompt")
    if set(map(type, prompt_token_ids)) == {int} and min(prompt_token_ids) >= 0 and max(prompt_token_ids) < vocab_size:
        return  # the usual, four times as fast: a thousand prompts wait for each other here
    for i, token in enumerate(prompt_token_ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise PromptError(
                f"token {i} of the prompt is {token!r}; token ids are integers from 0 to {vocab_size - 1}",
                param="prompt",
                code="invalid_token_id",
            )


def check_priority(priority: int) -> None:
    """Raises `ParameterError` for one that is no integer, or beyond `MAX_PRIORITY`."""
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > MAX_PRIORITY:
        raise ParameterError(
            f"priority is {priority!r}, it must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}",
            param="priority",
        )


def check_seed(seed: int | None) -> None:
    """Raises `ParameterError` for one that is no int64: no step could draw from it."""
    if seed is None:
        return
    if not isinstance(seed, int) or isinstance(seed, bool) or not -INT64 <= seed < INT64:
        text = f"seed is {seed!r:.40}, it must be an integer from {-INT64} to {INT64 - 1}"
        raise ParameterError(text, param="seed", code="integer_out_of_range")


def check_resume(resume: Mapping[int, Seq[int]], width: int, max_tokens: int, vocab_size: int) -> None:
    """Raises `ParameterError` for outputs that no engine can have made of a request of so many samples."""
    for index, output in resume.items():
        if not 0 <= index < width:
            raise ParameterError(f"resume has sample {index}, and the request has {width} to resume", param="resume")
        if not 0 < len(output) < max_tokens:
            text = f"resume has {len(output)} tokens of sample {index}; one that goes on has 1 to {max_tokens - 1}"
            raise ParameterError(text, param="resume")
        if min(output) < 0 or max(output) >= vocab_size:
            text = f"resume has a token outside 0 to {vocab_size - 1} in sample {index}"
            raise ParameterError(text, param="resume", code="invalid_token_id")


def pin_id(name: str) -> str:
    """Pins are requests, too, whose ids are no other request's."""
    return f"pin:{name}"


def draw_seed(seeds: random.Random) -> int:
    """For a request that brings none. One way for all: the same requests get the same ones wherever they run."""
    return seeds.getrandbits(63)
