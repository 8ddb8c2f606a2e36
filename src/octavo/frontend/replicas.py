"""`Replicas`: several engine processes behind one `EngineClient`, and a router that chooses among them.

    submit --> Router --> Replica (a `ProcessTransport`) --> engine process
                 ^           |
                 +-----------+   what its cache stores and removes, first tokens, ends

When an engine dies or hangs, its requests go on elsewhere with their tokens so far, as they would on its successor
(`frontend.client_request`). A request whose engines died twice stays with the last one: it may be the cause.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from octavo.config import EngineArgs
from octavo.engine.engine_request import EngineRequest
from octavo.engine.kv_events import update_index
from octavo.engine.outputs import RequestOutput
from octavo.engine.process import ipc
from octavo.engine.process.supervisor import ENGINE_COMMAND, EngineTimeouts
from octavo.engine.query import DescribeRequest, GetKVStats, Query, ResetPrefixCache
from octavo.engine.stats import Health, StatsSnapshot, sum_kv_stats, sum_stats
from octavo.errors import MemoryBudgetError, OctavoError, ParameterError
from octavo.frontend.engine_client import EngineClient
from octavo.frontend.process_transport import DEATHS_TO_TRIAL, ProcessTransport, RequestHandle, make_client
from octavo.router.router import Router, RouterPolicy
from octavo.runner.memory.budget import free_memory

R = TypeVar("R")

MAX_DEATHS_TO_MOVE = 1
"""Engine deaths in a row with which a request still goes to another replica."""
LONG_PROMPT = 16_384
"""Tokens of a prompt from which its blocks are hashed on another thread."""


def replicas_client(
    args: EngineArgs,
    num: int,
    policy: RouterPolicy = "affinity",
    *,
    command: Sequence[str] = ENGINE_COMMAND,
    timeouts: EngineTimeouts | None = None,
) -> EngineClient[Replicas]:
    """As `process_client`, of `num` engine processes."""
    return make_client(args, Replicas(args, num, policy, command=command, timeouts=timeouts))


class Replica(ProcessTransport):
    """One engine process of a group. The group hears when its requests progress, and when it dies."""

    def __init__(self, group: Replicas, index: int, args: EngineArgs, **process: Any) -> None:
        super().__init__(args, **process)
        self.index = index
        self._group = group
        self._seeds = group.seeds

    @property
    def accepts(self) -> bool:
        """It runs, and a new request would not wait for suspects."""
        return self.supervisor.is_up and not self.suspects

    def give_up(self, handle: RequestHandle) -> None:
        """Forget a request that the engine does not have; another replica continues it."""
        del self.handles[handle.request.request_id]

    def adopt(self, handle: RequestHandle) -> None:
        """Continue another replica's request."""
        self.handles[handle.request.request_id] = handle
        self._send_unsent()

    def movable(self, max_deaths: int) -> list[RequestHandle]:
        """The requests that the engine does not have and that another one may run."""
        handles = self.handles.values()
        return [h for h in handles if not (h.sent or h.request.new.pin or h.num_deaths > max_deaths)]

    def _on_step(self, step: ipc.StepReport) -> None:
        update_index(self._group.router.index, self.index, step.cache)
        super()._on_step(step)

    def _on_progress(self, handle: RequestHandle) -> None:
        super()._on_progress(handle)
        name = handle.request.request_id
        if self.handles.get(name) is not handle:
            self._group.router.finish(name)
        elif handle.started:
            self._group.router.start(name)

    def _on_ready(self, ready: ipc.Ready) -> None:
        super()._on_ready(ready)
        self._group.rescue()

    def _on_down(self) -> None:
        super()._on_down()
        self._group.router.index.clear(self.index)
        self._group.rescue()

    def _on_failed(self, error: OctavoError) -> None:
        if self.is_running:
            self._group.rescue(self)
            for name in self.handles:
                self._group.router.finish(name)
        super()._on_failed(error)


class Replicas:
    """A `Transport` over `num` engine processes, each with its share of the machine. For one event loop."""

    def __init__(
        self,
        args: EngineArgs,
        num: int,
        policy: RouterPolicy = "affinity",
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        timeouts: EngineTimeouts | None = None,
    ) -> None:
        self.router = Router(policy)
        self.seeds = random.Random(args.seed)  # as with one engine, whichever replica gets a request
        self._num_early = 0
        self.replicas = [
            Replica(self, i, engine_args(args, i), command=command, timeouts=timeouts, placement=placement)
            for i, placement in enumerate(placements(num, args.tensor_parallel_size))
        ]

    async def start(self) -> None:
        """Start all engines. Raises the first error, and leaves nothing running then."""
        starts = [asyncio.create_task(replica.start()) for replica in self.replicas]
        await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
        failed = [(task, i) for i, task in enumerate(starts) if task.done() and task.exception() is not None]
        try:
            if failed:
                raise self._start_error(failed[0][1], cast(Exception, failed[0][0].exception()))
            self._check_devices()
        except BaseException:
            for task in starts:
                task.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            self.close()
            raise
        self.router.block_size = int(self.summary["block_size"])

    def _start_error(self, index: int, error: Exception) -> Exception:
        if not isinstance(error, MemoryBudgetError):
            return error
        text = f"replica {index} of {len(self.replicas)} does not fit: {error}; or lower data_parallel_size"
        return MemoryBudgetError(text, param=error.param, code=error.code)

    def _check_devices(self) -> None:
        devices = [replica.summary.get("device") for replica in self.replicas]
        if len(set(devices)) > 1:
            other = next(i for i, device in enumerate(devices) if device != devices[0])
            text = f"replica 0 runs on {devices[0]!r} and replica {other} on {devices[other]!r}: there are fewer GPUs"
            raise ParameterError(f"{text} than replicas; lower data_parallel_size", param="data_parallel_size")

    # -- requests ------------------------------------------------------------------------------------------------------

    async def submit(self, request: EngineRequest) -> RequestHandle | PinStream:
        """As `Transport.submit`. A pin is computed by every replica."""
        if request.pin:
            return await self._pin(request)
        name, token_ids = request.request_id, request.prompt_token_ids
        if len(token_ids) > LONG_PROMPT:
            hashes = await asyncio.to_thread(self.router.hashes, token_ids, request.salt)
        else:
            hashes = self.router.hashes(token_ids, request.salt)
        self._num_early += 1
        try:
            among = await self._when_up()
        finally:
            self._num_early -= 1
        if self._owner(name) is not None:
            raise ParameterError(f"a request {name!r} is running already; ids must differ", param="request_id")
        replica = self.replicas[self.router.route(name, len(token_ids), hashes, among).replica]
        try:
            return await replica.submit(request)
        except BaseException:
            self.router.finish(name)
            raise

    async def _when_up(self) -> int:
        """The set of replicas that accept requests; waits until there is one."""
        while not (among := self._among()):
            running = [replica for replica in self.replicas if replica.is_running]
            if not running:
                await self.replicas[0].query(GetKVStats())  # raises why it failed
            waits = [asyncio.ensure_future(replica.up.wait()) for replica in running]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return among

    def _among(self) -> int:
        """The set of replicas for new requests: those without suspects, if there are any."""
        up = [replica for replica in self.replicas if replica.supervisor.is_up]
        return sum(1 << replica.index for replica in [r for r in up if r.accepts] or up)

    def _owner(self, request_id: str) -> Replica | None:
        return next((replica for replica in self.replicas if request_id in replica.handles), None)

    async def abort(self, request_id: str) -> bool:
        owner = self._owner(request_id)
        return owner is not None and await owner.abort(request_id)

    def close_stream(self, stream: RequestHandle | PinStream) -> None:
        if isinstance(stream, PinStream):
            stream.close()
        elif (owner := self._owner(stream.request.request_id)) is not None:
            owner.close_stream(stream)

    # -- failures ------------------------------------------------------------------------------------------------------

    def rescue(self, failed: Replica | None = None) -> None:
        """Move the requests of replicas that are down to those that run.

        failed   will not come back: all its requests leave it but the suspects
        """
        for replica in self.replicas:
            if replica.supervisor.is_up:
                continue
            for handle in replica.movable(DEATHS_TO_TRIAL - 1 if replica is failed else MAX_DEATHS_TO_MOVE):
                if not (among := self._among()):
                    return
                self._move(handle, replica, among)

    def _move(self, handle: RequestHandle, source: Replica, among: int) -> None:
        request = handle.request.new
        source.give_up(handle)
        num_tokens = len(request.prompt_token_ids) + sum(len(s.token_ids) for s in handle.request.samples.values())
        self.replicas[self.router.move(request.request_id, num_tokens, among).replica].adopt(handle)

    # -- pinned prefixes -----------------------------------------------------------------------------------------------

    async def _pin(self, request: EngineRequest) -> PinStream:
        stream = PinStream()
        try:
            for replica in self.replicas:
                if replica.is_running:
                    stream.parts.append((replica, await replica.submit(request)))
        except BaseException:
            stream.close()
            for replica, _ in stream.parts:
                replica.discard_pin(request.request_id)
            raise
        if not stream.parts:
            await self._when_up()  # raises
        return stream

    def discard_pin(self, request_id: str) -> None:
        for replica in self.replicas:
            replica.discard_pin(request_id)

    async def unpin(self, request_id: str) -> int | None:
        numbers = [await replica.unpin(request_id) for replica in self.replicas if replica.is_running]
        return max((number for number in numbers if number is not None), default=None)

    # -- state, and shutdown -------------------------------------------------------------------------------------------

    @property
    def engines(self) -> Sequence[Replica]:
        return self.replicas

    @property
    def is_running(self) -> bool:
        return any(replica.is_running for replica in self.replicas)

    @property
    def max_model_len(self) -> int:
        """Of the replica with the least memory."""
        return min(replica.max_model_len for replica in self.replicas)

    @property
    def summary(self) -> dict[str, Any]:
        return self.replicas[0].summary

    def listen(self, on_step: Callable[[int], object]) -> None:
        for replica in self.replicas:
            replica.listen(on_step)

    def health(self) -> Health:
        """Running while one replica runs; the reason names those that do not."""
        states = [replica.health() for replica in self.replicas]
        best = min(states, key=lambda health: ("running", "restarting", "starting", "failed").index(health.state))
        ages = [health.last_step_age_s for health in states if health.state == best.state]
        age = None if None in ages else min(age for age in ages if age is not None)
        reasons = [f"replica {i}: {health.reason}" for i, health in enumerate(states) if health.reason]
        num_restarts = sum(health.num_restarts for health in states)
        return replace(best, last_step_age_s=age, num_restarts=num_restarts, reason="; ".join(reasons), ranks=())

    async def stats(self) -> StatsSnapshot:
        """The sum over the replicas."""
        total = sum_stats([await replica.stats() for replica in self.replicas])
        early = self._num_early
        return replace(total, num_waiting=total.num_waiting + early, num_deferred=total.num_deferred + early)

    async def query(self, query: Query[R], /) -> R:
        """Ask the replica that has the request; all, of the cache as a whole; else the first that runs."""
        running = [replica for replica in self.replicas if replica.is_running] or self.replicas
        if isinstance(query, GetKVStats):
            return cast(R, sum_kv_stats([await replica.query(query) for replica in running]))
        if isinstance(query, ResetPrefixCache):
            return cast(R, sum([await replica.query(query) for replica in running]))
        if isinstance(query, DescribeRequest):
            owner = self._owner(query.request_id)
            for replica in running if owner is None else [owner]:
                if (answer := await replica.query(query)) is not None:
                    return cast(R, answer)
            return cast(R, None)
        return await running[0].query(query)

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()


class PinStream:
    """The outputs of a pin, which every replica computes."""

    def __init__(self) -> None:
        self.parts: list[tuple[Replica, RequestHandle]] = []

    async def get(self) -> RequestOutput:
        """Wait for all replicas; returns the output of one that failed, if there is one."""
        outputs = [await handle.get() for _, handle in self.parts]
        return next((o for o in outputs if any(c.finish_reason == "error" for c in o.outputs)), outputs[0])

    def close(self) -> None:
        for replica, handle in self.parts:
            replica.close_stream(handle)


def engine_args(args: EngineArgs, index: int) -> EngineArgs:
    """A replica's options: its KV events have a port, or a path, and a number of their own."""
    config = args.kv_events()
    if not config.is_enabled:
        return args
    given = dict(args.kv_events_config or {})
    for name in ("endpoint", "replay_endpoint"):
        if (endpoint := getattr(config, name)) is not None:
            given[name] = offset_endpoint(endpoint, index)
    return replace(args, kv_events_config=given | {"data_parallel_rank": index})


def offset_endpoint(endpoint: str, index: int) -> str:
    """The endpoint of a replica, as in vLLM: the port plus its number, or the path with a suffix."""
    if not index:
        return endpoint
    head, colon, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and colon and port.isdigit():
        return f"{head}:{int(port) + index}"
    return f"{endpoint}_dp{index}"


def placements(num: int, num_gpus: int = 1) -> list[ipc.Placement]:
    """Equal parts of the processors and the free memory that this process may use; so many GPUs each."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    size, host_bytes = len(cpus), free_memory() // num
    return [
        ipc.Placement(
            cpus[i * size // num : (i + 1) * size // num] or [cpus[i % size]],
            i * num_gpus,
            host_bytes,
            num_gpus=num_gpus,
        )
        for i in range(num)
    ]
