"""The loop of an engine that lives in a process of its own: commands in, one message a step out (see `engine.ipc`)."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias, cast

import msgspec

from octavo.core import events as ev
from octavo.core.plan import TokenLogprobs
from octavo.core.request import Sequence
from octavo.engine import timeline as inspect
from octavo.engine.engine import Engine, pin_id
from octavo.engine.outputs import MakeDetokenizer, RequestState
from octavo.engine.process.ipc import (
    BAD_MESSAGE,
    DELIVERED,
    AbortRequest,
    AddRequest,
    BadMessage,
    Channel,
    CloseEngine,
    Command,
    FinishReason,
    Heartbeat,
    Lifeline,
    Ready,
    RequestError,
    RequestStats,
    RequestUpdate,
    RpcCall,
    RpcReply,
    SampleUpdate,
    StepReport,
    StopSample,
    params_from_wire,
    read_commands,
    sendable,
    unpack,
)
from octavo.engine.stats import StatsSnapshot
from octavo.engine.structured_output import Grammar
from octavo.errors import OctavoError, UsageError
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams

logger = logging.getLogger("octavo.engine")

STATS_S = 0.25
"""How old the callers' idea of the engine's counters may be while it works."""
FIRST_STEPS = 3
"""Steps that compile kernels and fill caches: they say nothing about those to come, and may take WARM_UP_S."""
WARM_UP_S = 300.0
PATIENCE = 5
"""A step may take so many times as long as was to be expected."""

RpcMethod: TypeAlias = Callable[[Engine, str], Any]
RPC_METHODS: dict[str, RpcMethod] = {
    "kv_stats": lambda engine, _: engine.scheduler.stats(),
    "unpin": lambda engine, name: engine.scheduler.unpin(pin_id(name)),
    "reset_prefix_cache": lambda engine, _: engine.scheduler.cache.reset_prefix_cache(),
    "dump_recording": lambda engine, why: dump_recording(engine, why),
    "debug_request": inspect.describe_request,
    "debug_kv": lambda engine, _: inspect.describe_kv(engine),
}


def dump_recording(engine: Engine, why: str) -> dict[str, str]:
    """Have the flight recorder write down the last minutes: the file's `path`, or the `error` that was in the way."""
    if engine.recorder is None:
        return {"error": "there is no flight recorder; start with --flight-recorder DIR"}
    try:
        return {"path": str(engine.recorder.dump(why))}
    except OSError as error:
        return {"error": f"the flight recorder cannot be written: {error}"}


class StepTimes:
    """How long a step of so many positions may take, going by those before.

    Steps are sorted by powers of two, and of each size the slowest counts, as do those of smaller ones. For a size
    larger than any that has been seen, the largest of them is grown in proportion: too much rather than too little.

    One thread notes, and another may ask meanwhile.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._slowest: dict[int, float] = {}  # bits of the number of positions -> seconds

    def note(self, num_positions: int, seconds: float) -> None:
        self.num_steps += 1
        if self.num_steps > FIRST_STEPS:
            bits = num_positions.bit_length()
            self._slowest[bits] = max(seconds, 0.98 * self._slowest.get(bits, 0.0))  # a slow one is forgotten slowly

    def allowed_s(self, num_positions: int) -> float:
        seen, bits = self._slowest.copy(), num_positions.bit_length()  # it grows while it is looked at
        if not seen:
            return WARM_UP_S
        nearest = min((size for size in seen if size >= bits), default=max(seen))
        grown = seen[nearest] * float(1 << max(0, bits - nearest))
        return PATIENCE * max([grown, *(seen[size] for size in seen if size <= bits)])


class HeartbeatSender:
    """Tells over the lifeline that the process lives and how far it is, from a thread of its own, which calls `on_end`
    when the other side is gone."""

    INTERVAL_S = 0.25

    def __init__(self, lifeline: Lifeline, on_end: Callable[[], None]) -> None:
        self._lifeline = lifeline
        self._on_end = on_end
        self._times = StepTimes()
        self._phase = "starting"
        self._planned: list[int] = []  # positions of the steps whose results have not come
        self._since: float | None = None  # when there was progress last; None: nothing to do
        threading.Thread(target=self._work, name="octavo-pulse", daemon=True).start()

    def enter(self, phase: str) -> None:
        """What is being done, while the process starts: should it die, this is said of it."""
        self._phase = phase
        self._send()

    def __call__(self, event: ev.Event) -> None:
        """Listens to an engine's steps as they are planned."""
        if isinstance(event, ev.Step):
            self._planned.append(event.num_tokens)

    def work(self) -> None:
        """There is something to do."""
        if self._since is None:
            self._since = time.monotonic()

    def advanced(self, num_in_flight: int) -> None:
        """The engine got on; so many steps are still on the device."""
        now = time.monotonic()
        while len(self._planned) > num_in_flight:
            size = self._planned.pop(0)
            if self._since is not None:
                self._times.note(size, now - self._since)
            self._since = now

    def rest(self) -> None:
        self._since = None
        self._planned.clear()

    def beat(self) -> Heartbeat:
        since, planned = self._since, sum(self._planned)
        waited = None if since is None else time.monotonic() - since
        return Heartbeat(self._times.num_steps, waited, self._times.allowed_s(planned), self._phase)

    def _send(self) -> None:
        self._lifeline.send(self.beat())

    def _work(self) -> None:
        poll = select.poll()
        poll.register(self._lifeline.fileno(), select.POLLIN)
        while True:
            try:
                if poll.poll(self.INTERVAL_S * 1000) and not self._lifeline.receive():
                    break
                self._send()
            except OSError:
                break
        self._on_end()


class Text(Protocol):
    """Text work in the engine process; `frontend.input_processor.InputProcessor` implements it.

    The client process does all other detokenizing.
    """

    @property
    def make_detokenizer(self) -> MakeDetokenizer | None:
        """For beam searches with stop strings, which decide by them."""

    def submit_grammar(self, params: SamplingParams | BeamSearchParams) -> Future[Any] | None:
        """The grammar of parameters that have one. It raises `UsageError`."""


class EngineServer:
    """Serves the client at the other end of `channel` until it sends `CloseEngine`.

    more_methods   RPC methods besides `RPC_METHODS`
    """

    COMPILING_S = 0.005
    """How often to look whether a grammar is compiled."""
    READING_S = 0.005
    """How long to read messages, at most, before the next step."""

    def __init__(
        self,
        engine: Engine,
        channel: Channel,
        pulse: HeartbeatSender,
        text: Text | None,
        summary: dict[str, Any],
        more_methods: Mapping[str, RpcMethod] | None = None,
    ) -> None:
        self._rpc_methods = RPC_METHODS | dict(more_methods or {}) | {DELIVERED: lambda *_: self._told()}
        self._engine = engine
        self._channel = channel
        self._pulse = pulse
        self._text = text
        self._summary = summary
        self._compiling: dict[str, tuple[AddRequest, SamplingParams | BeamSearchParams, Future[Any]]] = {}
        self._updates: list[RequestUpdate] = []
        self._refusals: list[RequestError] = []
        self._answers: list[RpcReply] = []
        self._stats_at = 0.0
        self._closing = False

    def serve(self) -> None:
        engine, pulse = self._engine, self._pulse
        unsubscribe = engine.scheduler.events.subscribe(pulse)
        ready = Ready(
            engine.vocab_size, engine.max_model_len, list(engine.eos_token_ids), engine.max_logprobs, self._summary
        )
        self._channel.send(ready)
        pulse.enter("running")
        try:
            while not self._closing:
                pulse.rest()
                self._obey(wait=True)
                self._add_compiled()
                with engine.gc_pause:
                    while engine.has_work and not self._closing:
                        pulse.work()
                        for state in engine.step_states():
                            self._tell(state)
                        pulse.advanced(engine.num_in_flight)
                        self._report()
                        self._obey(wait=False)
                        self._add_compiled()
                self._stats_at = 0.0 if not self._compiling else self._stats_at
                self._report()
        except BaseException:
            if engine.recorder is not None:
                engine.recorder.dump_last("crash")
            raise
        finally:
            unsubscribe()
            engine.close()

    # -- commands ------------------------------------------------------------------------------------------------------

    def _obey(self, *, wait: bool) -> None:
        """Read what has come. Where that takes long, the engine has its step in between: else a caller that sends
        faster than this reads would hold up all requests."""
        patience, begin = (self.COMPILING_S if self._compiling else None) if wait else 0, None
        while (data := self._channel.receive(patience)) is not None:
            commands, bad = read_commands(data)
            for command in commands:
                self._carry_out(command)
            for message in bad:
                self._drop(message)
            patience, begin = 0, begin or time.monotonic()
            if time.monotonic() - begin > self.READING_S:
                break
        if self._answers:  # with all that was told until now, and nothing later: `DELIVERED` is about that
            self._report()

    def _drop(self, bad: BadMessage) -> None:
        """A message that cannot be used ends the request that it names, and no other."""
        self._engine.stats.num_bad_messages += 1
        logger.warning("%s", bad)
        name = bad.request_id
        if name is None or (bad.is_add and self._knows(name)):
            return
        self._compiling.pop(name, None)
        if (state := self._engine.abort_state(name)) is not None:
            state.release()
        self._refusals.append(RequestError(name, "RequestFailedError", f"{BAD_MESSAGE}: {bad}", None, BAD_MESSAGE))

    def _knows(self, name: str) -> bool:
        return name in self._compiling or self._engine.get_state(name) is not None

    def _carry_out(self, command: Command) -> None:
        engine = self._engine
        if isinstance(command, AddRequest):
            self._receive(command)
        elif isinstance(command, AbortRequest):
            if self._compiling.pop(command.request_id, None) is not None:
                self._updates.append(RequestUpdate(command.request_id, [], finished=True))
            if (state := engine.abort_state(command.request_id)) is not None:
                self._tell(state)
        elif isinstance(command, StopSample):
            state = engine.get_state(command.request_id)
            engine.stop(command.request_id, command.index)
            if state is not None and engine.get_state(command.request_id) is None:
                self._tell(state)
        elif isinstance(command, RpcCall):
            self._answers.append(self._answer(command))
        elif isinstance(command, CloseEngine):
            self._closing = True

    def _receive(self, add: AddRequest) -> None:
        if self._knows(add.request_id):
            why = "a request of that name runs already, and goes on"
            self._drop(BadMessage("a command", why, add.request_id, is_add=True))
            return
        try:
            params = params_from_wire(add.params, add.is_beam_search)
            future = None if self._text is None else self._text.submit_grammar(params)
        except UsageError as error:
            self._refuse(add, error)
            return
        except Exception as error:  # parameters of other types than any caller's
            self._drop(BadMessage("a command", f"{type(error).__name__}: {error}", add.request_id, is_add=True))
            return
        if future is None:
            self._add(add, params, None)
        else:
            self._compiling[add.request_id] = add, params, future

    def _add_compiled(self) -> None:
        """Those whose grammars are there."""
        for name in [name for name, (_, _, future) in self._compiling.items() if future.done()]:
            add, params, future = self._compiling.pop(name)
            try:
                grammar = future.result()
            except OctavoError as error:
                self._refuse(add, error)
            except Exception as error:
                self._drop(BadMessage("a command", f"{type(error).__name__}: {error}", name))
            else:
                self._add(add, params, grammar)

    def _add(self, add: AddRequest, params: SamplingParams | BeamSearchParams, grammar: Grammar | None) -> None:
        try:
            try:
                self._begin(add, params, grammar)
            except UsageError:
                raise
            except Exception:  # once may be chance
                logger.exception("request %s could not be added; it is added again", add.request_id)
                self._engine.abort_state(add.request_id)
                self._begin(add, params, grammar)
        except UsageError as error:
            self._refuse(add, error)
        except Exception as error:  # what no check has thought of is this request's alone
            self._drop(BadMessage("a command", f"{type(error).__name__}: {error}", add.request_id))

    def _begin(self, add: AddRequest, params: SamplingParams | BeamSearchParams, grammar: Grammar | None) -> None:
        text = self._text if isinstance(params, BeamSearchParams) and params.stop else None
        self._engine.add_request(
            add.request_id,
            unpack(add.prompt).tolist(),
            params,
            priority=add.priority,
            salt=add.salt,
            tenant=add.tenant,
            rank=add.rank,
            seed=add.seed,
            resume=add.resume and {index: unpack(output) for index, output in add.resume.items()},
            grammar=grammar,
            pin=add.pin,
            make_detokenizer=None if text is None else text.make_detokenizer,
            stream=True,
        )
        state = self._engine.get_state(add.request_id)
        for index, output in (add.resume or {}).items():
            assert state is not None
            state.told_of(index).num_tokens = len(output) // 4  # it comes from there

    def _told(self) -> dict[str, dict[int, int] | None]:
        """Of each request, how many tokens of its live samples were told, and how many log-probabilities of its prompt
        under -1; None: it has not begun. For a client that has lost messages."""
        told: dict[str, dict[int, int] | None] = dict.fromkeys(self._compiling)
        for name, state in self._engine.states():
            counts = {s.index: state.told_of(s.index).num_tokens for s in state.request.sequences}
            told[name] = counts | {-1: state.num_prompt_logprobs_told}
        return told

    def _refuse(self, add: AddRequest, error: OctavoError) -> None:
        text = sendable(str(error))
        self._refusals.append(RequestError(add.request_id, type(error).__name__, text, error.param, error.code))

    def _answer(self, ask: RpcCall) -> RpcReply:
        question = self._rpc_methods.get(ask.question)
        if question is None:
            return RpcReply(ask.number, error=f"no question {ask.question!r}")
        try:
            # Encoded here: an answer that cannot be sent must not take a step's news with it.
            return RpcReply(ask.number, msgspec.Raw(msgspec.msgpack.encode(question(self._engine, ask.argument))))
        except Exception as error:  # whoever looks must not end the engine, and then the next one that is asked
            logger.exception("%s has no answer", ask.question)
            return RpcReply(ask.number, error=sendable(f"{type(error).__name__}: {error}"))

    # -- reports -------------------------------------------------------------------------------------------------------

    def _tell(self, state: RequestState) -> None:
        self._updates.append(update_of(state))
        if not state.request.sequences:
            state.release()

    def _report(self) -> None:
        now = time.monotonic()
        stats = None
        if now - self._stats_at >= STATS_S:
            self._stats_at, stats = now, StatsSnapshot.of(self._engine)
        if self._updates or self._refusals or self._answers or stats is not None:
            self._channel.send(StepReport(self._updates, self._refusals, self._answers, stats))
            self._updates, self._refusals, self._answers = [], [], []


def update_of(state: RequestState) -> RequestUpdate:
    """What of a request has not been told yet."""
    request, finished = state.request, not state.request.sequences
    update = RequestUpdate(request.request_id, [], finished)
    is_new = not state.told
    if state.search is None:
        ended = [s for s in request.finished_sequences if not state.told_of(s.index).finished]
        update.samples = [_sample(state, s) for s in (*request.sequences, *ended)]
    elif not finished:
        return update
    if is_new or finished:
        metrics = state.metrics
        facts = RequestStats(max(0, request.num_cached_tokens), metrics.num_preemptions, metrics.first_scheduled_time)
        facts.error = sendable(request.error)
        if state.search is not None:
            state.output()  # what lives of a search that was ended early becomes hypotheses here
            facts.hypotheses = state.search.hypotheses
            reasons = [cast(FinishReason, s.finish_reason) for s in request.finished_sequences[:1]]
            update.samples = [SampleUpdate(0, [], reason) for reason in reasons]
        update.facts = facts
    if state.prompt_logprobs:
        update.prompt_position = 1 + state.num_prompt_logprobs_told
        update.prompt_logprobs = state.prompt_logprobs[state.num_prompt_logprobs_told :]
        state.num_prompt_logprobs_told = len(state.prompt_logprobs)
    return update


def _sample(state: RequestState, sequence: Sequence) -> SampleUpdate:
    told = state.told_of(sequence.index)
    position = told.num_tokens
    token_ids = sequence.token_ids[len(state.request.prompt_token_ids) + position :].tolist()
    logprobs: list[TokenLogprobs] | None = None
    if (entries := state.logprobs.get(sequence.index)) is not None:
        logprobs = entries[: len(token_ids)]
        del entries[:]
    told.num_tokens += len(token_ids)
    told.finished = bool(sequence.finish_reason)
    reason = cast(FinishReason, sequence.finish_reason)
    return SampleUpdate(sequence.index, token_ids, reason, sequence.stop_token, logprobs, position)
