"""`ClusterTransport`: an `EngineClient`'s way to replicas on any number of machines.

Each request is a task. It sends the request to one replica and applies what comes back; this process makes the text.
When the replica dies, hangs or is lost, the task sends the request to another one: prompt, tokens so far and seed
(`frontend.client_request`). Readers only notice a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import msgspec

from octavo.cluster.messages import REFUSED, Fingerprint, Report
from octavo.cluster.pool import LOST_S, NO_REPLICA_S, CallError, Calls, Replica, ReplicaPool, no_replica
from octavo.engine.engine_request import EngineRequest, check_priority, check_prompt, generate_seed
from octavo.engine.process import ipc
from octavo.engine.process.supervisor import rebuild_error
from octavo.engine.query import DescribeRequest, Query
from octavo.engine.stats import Health, StatsSnapshot, sum_stats
from octavo.errors import EngineError, OctavoError, ParameterError, RequestFailedError
from octavo.frontend.client_request import ClientRequest
from octavo.frontend.request_stream import RequestStream
from octavo.router.router import Router

R = TypeVar("R")
logger = logging.getLogger("octavo.cluster")

MAX_DEATHS = 3
"""Replicas that may fail with a request since its last new token; then the request fails."""
PAUSE_S = 0.1
"""Before a request goes on elsewhere; grows with each failure."""


class _ReplicaGoneError(Exception):
    """The replica of a request cannot go on with it, or has not taken it."""


class _RequestHandle(RequestStream):
    """A request on its way.

    num_attempts   replicas that it was sent to
    num_deaths     replicas that took it and failed, since its last new token
    num_refusals   replicas that did not take it, since the last that did
    """

    def __init__(self, request: ClientRequest) -> None:
        super().__init__(request)
        self.replica: Replica | None = None
        self.task: asyncio.Task[None] | None = None
        self.num_attempts = self.num_deaths = self.num_refusals = 0
        self.accepted = False
        self.waiting_since = time.monotonic()

    @property
    def wire_id(self) -> str:
        """Its id on the replica: each attempt has its own, as an earlier one may still run where it was lost."""
        name = self.request.request_id
        return name if self.num_attempts < 2 else f"{name}~{self.num_attempts}"


class ClusterTransport:
    """Requests of one front. All methods are for one event loop.

    fingerprint   of the replicas that it uses
    """

    def __init__(self, calls: Calls, fingerprint: Fingerprint, seed: int | None = None) -> None:
        self._calls = calls
        self.pool = ReplicaPool(calls, fingerprint)
        self._seeds = random.Random(seed)
        self.handles: dict[str, _RequestHandle] = {}
        self._report: Report | None = None
        self._calls_without_reader: set[asyncio.Task[None]] = set()  # the loop keeps only weak references
        self._closed = False

    @property
    def engines(self) -> Sequence[ClusterTransport]:
        """Itself: /metrics has the sum, since a series for each number would mix the replicas of several fronts."""
        return (self,)

    @property
    def router(self) -> Router:
        return self.pool.router

    @property
    def is_running(self) -> bool:
        return not self._closed

    @property
    def _ready(self) -> ipc.Ready | None:
        return None if self._report is None else self._report.ready

    @property
    def max_model_len(self) -> int:
        return 0 if self._ready is None else self._ready.max_model_len

    @property
    def summary(self) -> dict[str, Any]:
        return {} if self._ready is None else self._ready.summary

    async def start(self) -> None:
        self._report = await self.pool.start()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def submit(self, request: EngineRequest) -> _RequestHandle:
        ready = self._ready
        if self._closed or ready is None:
            raise EngineError("the front is closed")
        if request.pin:
            raise ParameterError("a cluster pins no prefixes; its prefix caches keep them", param="pin_prefix")
        check_prompt(request.prompt_token_ids, ready.vocab_size)
        check_priority(request.priority)
        name = request.request_id
        if name in self.handles:
            raise ParameterError(f"a request {name!r} is running already; ids must differ", param="request_id")
        if getattr(request.params, "seed", None) is None:
            request.seed = generate_seed(self._seeds)
        handle = _RequestHandle(ClientRequest(request, eos_token_ids=ready.eos_token_ids))
        self.handles[name] = handle
        handle.task = asyncio.create_task(self._run(handle), name=f"octavo-{name}")
        return handle

    async def _run(self, handle: _RequestHandle) -> None:
        try:
            while not handle.request.finished:
                try:
                    await self._attempt(handle)
                except _ReplicaGoneError as error:
                    await self._survive(handle, error)
        except OctavoError as error:
            handle.fail(error)
        except Exception as error:  # of its text: fails this request only
            logger.error("request %s failed", handle.request.request_id, exc_info=error)
            text = f"request {handle.request.request_id} failed: {type(error).__name__}: {error}"
            handle.fail(RequestFailedError(text, code="internal_error"))
        finally:
            self._forget(handle)

    async def _survive(self, handle: _RequestHandle, error: _ReplicaGoneError) -> None:
        """Prepare the next attempt. Raises `OctavoError` after too many."""
        logger.warning("request %s goes on elsewhere: %s", handle.request.request_id, error)
        if handle.accepted:
            self.router.stats.num_moved += 1
            handle.num_deaths += 1
            handle.num_refusals, handle.waiting_since = 0, time.monotonic()
        else:
            handle.num_refusals += 1
        if handle.num_deaths >= MAX_DEATHS:
            text = f"{handle.num_deaths} replicas failed while they ran the request; the last was {error}"
            raise RequestFailedError(text, code="internal_error")
        if time.monotonic() - handle.waiting_since > NO_REPLICA_S:
            raise EngineError(f"no replica took the request for {NO_REPLICA_S:.0f} s; the last was {error}")
        await asyncio.sleep(min(1.0, PAUSE_S * (handle.num_deaths + handle.num_refusals)))

    async def _attempt(self, handle: _RequestHandle) -> None:
        """Run a request on one replica until it ends. Raises `_ReplicaGoneError` if it has to go on elsewhere."""
        new = handle.new
        replica = await self.pool.choose(new.request_id, new.prompt_token_ids, new.salt)
        handle.replica = replica
        handle.num_attempts += 1
        handle.accepted = False
        try:
            command = msgspec.structs.replace(handle.request.add_command(), request_id=handle.wire_id)
            stream = self._calls.generate(replica.name, bytes(ipc.encode_command(command)))
            async with contextlib.aclosing(stream) as messages:
                while not handle.request.finished:
                    async with asyncio.timeout(LOST_S):
                        data = await anext(messages)
                    message = ipc.read_message(data) if data else None
                    if not (isinstance(message, ipc.EngineFailed) and message.error == REFUSED):
                        handle.accepted = True
                    if message is not None:
                        self._apply(handle, replica, message)
        except (CallError, StopAsyncIteration, ipc.MessageError, TimeoutError) as error:
            self.pool.avoid(replica)
            why = str(error) or f"it was silent for {LOST_S:.0f} s"
            raise _ReplicaGoneError(f"replica {replica.name}: {why}") from None
        except _ReplicaGoneError:
            self.pool.avoid(replica)
            raise
        finally:
            self.pool.router.finish(new.request_id)
            handle.replica = None

    def _apply(self, handle: _RequestHandle, replica: Replica, message: ipc.EngineMessage) -> None:
        if isinstance(message, ipc.EngineFailed):
            raise _ReplicaGoneError(f"replica {replica.name}: {message.message}")
        if not isinstance(message, ipc.StepReport):
            raise ipc.MessageError(f"a {type(message).__name__} is no report of a step")
        for error in message.errors:
            raise rebuild_error(error.error, error.message, error.param, error.code)
        for update in message.updates:
            for index in handle.request.apply_update(update):
                self._later(self._calls.stop(replica.name, handle.wire_id, index))
            if update.samples:
                handle.num_deaths = 0
                self.pool.router.start(handle.request.request_id)
        handle.notify()

    def _later(self, call: Any) -> None:
        """Make a call that nobody waits for. It may fail: a replica that is gone does not need it."""

        async def run() -> None:
            with contextlib.suppress(CallError):
                await call

        task = asyncio.create_task(run())
        self._calls_without_reader.add(task)
        task.add_done_callback(self._calls_without_reader.discard)

    def _forget(self, handle: _RequestHandle) -> None:
        if self.handles.get(handle.request.request_id) is handle:
            del self.handles[handle.request.request_id]

    def close_stream(self, stream: Any) -> None:
        handle = cast("_RequestHandle", stream)
        self._forget(handle)
        if handle.task is not None:
            handle.task.cancel()

    async def abort(self, request_id: str) -> bool:
        handle = self.handles.get(request_id)
        if handle is None:
            return False
        self.close_stream(handle)
        handle.request.finish("abort")
        handle.notify()
        return True

    def discard_pin(self, request_id: str) -> None:
        """There are none."""

    async def unpin(self, request_id: str) -> int | None:
        return None

    # -- state, and shutdown -------------------------------------------------------------------------------------------

    async def query(self, query: Query[R], /) -> R:
        """Ask the replica of the request that a query is about, and otherwise the first replica."""
        return await self.pool.ask(self._asked(query), self._on_wire(query))

    def _asked(self, query: Query[Any]) -> Replica:
        if isinstance(query, DescribeRequest):
            handle = self.handles.get(query.request_id)
            if handle is not None and handle.replica is not None:
                return handle.replica
        if not (up := self.pool.up):
            raise no_replica("no replica is ready; try again later")
        return up[0]

    def _on_wire(self, query: Query[R]) -> Query[R]:
        if isinstance(query, DescribeRequest) and (handle := self.handles.get(query.request_id)) is not None:
            return cast("Query[R]", DescribeRequest(handle.wire_id))
        return query

    async def stats(self) -> StatsSnapshot:
        """The sum over all replicas."""
        total = sum_stats([replica.report.stats for replica in self.pool.up if replica.report is not None])
        num_deferred = sum(handle.replica is None for handle in self.handles.values())
        return replace(total, num_waiting=total.num_waiting + num_deferred, num_deferred=num_deferred)

    def health(self) -> Health:
        """Running while any replica is."""
        if self._closed:
            return Health("failed", 0.0, reason="it was shut down")
        if self.pool.up:
            return Health("running", 0.0)
        reason = self.pool.mismatch() or "no replica is ready"
        state: Literal["starting", "restarting"] = "starting" if self._report is None else "restarting"
        return Health(state, time.monotonic() - self.pool.last_up, reason=reason)

    def close(self) -> None:
        """End all requests with an error."""
        self._closed = True
        self.pool.close()
        for handle in list(self.handles.values()):
            self.close_stream(handle)
            handle.fail(EngineError("the front is closed"))
