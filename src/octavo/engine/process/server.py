"""The engine process's main loop: receives commands, runs the engine, and sends one report per step."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from typing import Any

import msgspec

from octavo.engine.engine import Engine
from octavo.engine.engine_request import EngineRequest
from octavo.engine.kv_events import CacheFeed
from octavo.engine.process import ipc
from octavo.engine.process.heartbeat import HeartbeatSender
from octavo.engine.query import EngineQuery, Query
from octavo.engine.request_update import RequestUpdate, encodable
from octavo.engine.structured_output import Grammar
from octavo.engine.text_processor import TextProcessor
from octavo.errors import OctavoError, RequestFailedError
from octavo.params.beam_search_params import BeamSearchParams
from octavo.params.sampling_params import SamplingParams

logger = logging.getLogger("octavo.engine")

STATS_S = 0.25
"""Interval of the engine's statistics while it works."""


class EngineServer:
    """Serves the client at the other end of `channel` until it sends `CloseEngine`.

    queries         type of the queries that it answers, a union of subclasses of `Query`
    reports_cache   see `ipc.Placement`
    """

    COMPILING_S = 0.005
    """How often to check whether a grammar is compiled."""
    READING_S = 0.005
    """How long to read messages, at most, before the next step."""

    def __init__(
        self,
        engine: Engine,
        channel: ipc.Channel,
        heartbeats: HeartbeatSender,
        text: TextProcessor | None,
        summary: dict[str, Any],
        queries: Any = EngineQuery,
        *,
        reports_cache: bool = False,
    ) -> None:
        self._queries = queries
        self._feed = CacheFeed(engine.scheduler.cache) if reports_cache else None
        self._engine = engine
        self._channel = channel
        self._heartbeats = heartbeats
        self._text = text
        self._summary = summary
        self._compiling: dict[str, tuple[ipc.AddRequest, SamplingParams | BeamSearchParams, Future[Any]]] = {}
        self._updates: list[RequestUpdate] = []
        self._errors: list[ipc.RequestError] = []
        self._replies: list[ipc.RpcReply] = []
        self._stats_at = 0.0
        self._closing = False

    def serve(self) -> None:
        """Serve until the client closes the engine."""
        engine, heartbeats = self._engine, self._heartbeats
        unsubscribe = engine.scheduler.events.subscribe(heartbeats)
        heartbeats.executor = engine.executor
        limits = engine.limits
        ready = ipc.Ready(
            limits.vocab_size, limits.max_model_len, list(limits.eos_token_ids), limits.max_logprobs, self._summary
        )
        self._channel.send(ready)
        heartbeats.enter("running")
        try:
            while not self._closing:
                heartbeats.rest()
                self._read_commands(wait=True)
                self._add_compiled()
                with engine.gc_pause:
                    while engine.has_work and not self._closing:
                        heartbeats.begin_work()
                        self._updates += engine.step()
                        heartbeats.advance(engine.num_in_flight)
                        self._report()
                        self._read_commands(wait=False)
                        self._add_compiled()
                self._stats_at = 0.0 if not self._compiling else self._stats_at
                self._report()
        except BaseException:
            if engine.recorder is not None:
                engine.recorder.dump_last("crash")
            raise
        finally:
            unsubscribe()
            heartbeats.executor = None  # its memory goes
            engine.close()

    # -- commands ------------------------------------------------------------------------------------------------------

    def _read_commands(self, *, wait: bool) -> None:
        """Read and execute the received commands, for READING_S at most: a client that sends faster than this reads
        must not hold up the steps of all requests."""
        timeout, begin = (self.COMPILING_S if self._compiling else None) if wait else 0, None
        while (data := self._channel.receive(timeout)) is not None:
            for command in ipc.read_commands(data):
                self._execute(command)
            timeout, begin = 0, begin or time.monotonic()
            if time.monotonic() - begin > self.READING_S:
                break
        if self._replies:  # they wait for no step
            self._report()

    def _execute(self, command: ipc.Command) -> None:
        engine = self._engine
        if isinstance(command, ipc.AddRequest):
            self._receive(command)
        elif isinstance(command, ipc.AbortRequest):
            if (compiling := self._compiling.pop(command.request_id, None)) is not None:
                self._withdraw_grammar(compiling[-1])
                self._updates.append(RequestUpdate(command.request_id, [], finished=True))
            if (update := engine.abort(command.request_id)) is not None:
                self._updates.append(update)
        elif isinstance(command, ipc.StopSample):
            if (update := engine.stop(command.request_id, command.index)) is not None:
                self._updates.append(update)
        elif isinstance(command, ipc.RpcCall):
            self._replies.append(self._answer(command))
        elif isinstance(command, ipc.CloseEngine):
            self._closing = True

    def _receive(self, add: ipc.AddRequest) -> None:
        if add.request_id in self._compiling or self._engine.get_state(add.request_id) is not None:
            raise ipc.MessageError("a request of the same id is running already")
        try:
            params = ipc.params_from_wire(add.params, add.is_beam_search)
            future = None if self._text is None else self._text.submit_grammar(params, add.tenant)
        except Exception as error:
            self._reject_request(add, error)
            return
        if future is None:
            self._add(add, params, None)
        else:
            self._compiling[add.request_id] = add, params, future

    def _add_compiled(self) -> None:
        """Add the requests whose grammars are compiled."""
        for name in [name for name, (_, _, future) in self._compiling.items() if future.done()]:
            add, params, future = self._compiling.pop(name)
            self._withdraw_grammar(future)
            try:
                grammar = future.result()
            except Exception as error:
                self._reject_request(add, error)
            else:
                self._add(add, params, grammar)

    def _withdraw_grammar(self, compilation: Future[Any]) -> None:
        assert self._text is not None
        self._text.withdraw_grammar(compilation)

    def _add(self, add: ipc.AddRequest, params: SamplingParams | BeamSearchParams, grammar: Grammar | None) -> None:
        try:
            self._add_to_engine(add, params, grammar)
        except Exception as error:
            self._engine.abort(add.request_id)
            self._reject_request(add, error)

    def _add_to_engine(
        self, add: ipc.AddRequest, params: SamplingParams | BeamSearchParams, grammar: Grammar | None
    ) -> None:
        text = self._text if isinstance(params, BeamSearchParams) and params.stop else None
        self._engine.add_request(
            EngineRequest(
                add.request_id,
                ipc.unpack_tokens(add.prompt).tolist(),
                params,
                priority=add.priority,
                salt=add.salt,
                tenant=add.tenant,
                index_in_call=add.index_in_call,
                seed=add.seed,
                resume=add.resume and {index: ipc.unpack_tokens(output) for index, output in add.resume.items()},
                grammar=grammar,
                pin=add.pin,
                make_detokenizer=None if text is None else text.make_detokenizer,
                stream=True,
            )
        )
        state = self._engine.get_state(add.request_id)
        for index, output in (add.resume or {}).items():
            assert state is not None
            state.num_sent[index] = len(output) // 4  # the client has these tokens

    def _reject_request(self, add: ipc.AddRequest, error: Exception) -> None:
        """Fail one request with its error; an unforeseen one is logged."""
        if not isinstance(error, OctavoError):
            logger.error("request %s could not be added", add.request_id, exc_info=error)
            text = f"the engine could not add the request: {type(error).__name__}: {error}"
            error = RequestFailedError(text, code="internal_error")
        text = encodable(str(error))
        self._errors.append(ipc.RequestError(add.request_id, type(error).__name__, text, error.param, error.code))

    def _answer(self, call: ipc.RpcCall) -> ipc.RpcReply:
        try:
            query: Query[Any] = msgspec.convert(call.query, self._queries)
        except msgspec.ValidationError as error:
            return ipc.RpcReply(call.number, error=encodable(f"no query of this engine: {error}"))
        try:
            answer = query.answer(self._engine)
            # Encoded here: a value that cannot be encoded must not take a whole step report with it.
            return ipc.RpcReply(call.number, msgspec.Raw(msgspec.msgpack.encode(answer)))
        except Exception as error:  # a query must not crash the engine, nor the one after it
            logger.exception("query %s failed", type(query).__name__)
            return ipc.RpcReply(call.number, error=encodable(f"{type(error).__name__}: {error}"))

    # -- reports -------------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        now = time.monotonic()
        stats = None
        if now - self._stats_at >= STATS_S:
            self._stats_at, stats = now, self._engine.stats_snapshot()
        cache = [] if self._feed is None else self._feed.take()
        if self._updates or self._errors or self._replies or cache or stats is not None:
            self._channel.send(ipc.StepReport(self._updates, self._errors, self._replies, stats, cache))
            self._updates, self._errors, self._replies = [], [], []
