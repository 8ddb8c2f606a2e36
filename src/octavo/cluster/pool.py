"""`ReplicaPool`: the replicas that a front knows, and which of them gets the next request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol, TypeVar

import msgspec

from octavo.cluster.messages import REPORT, Fingerprint, Report
from octavo.engine.process import ipc
from octavo.engine.query import Query
from octavo.errors import EngineError, EngineQueryError
from octavo.router.router import Router

R = TypeVar("R")
logger = logging.getLogger("octavo.cluster")

REPORT_S = 0.5
"""How often a front asks each replica for a report."""
STALE_S = 2.0
"""A replica whose last report is older gets no new request while another one has a fresh report."""
LOST_S = 10.0
"""Silence after which a replica's node counts as lost: its requests go on elsewhere."""
NO_REPLICA_S = 600.0
"""How long a request waits for a replica; then it fails."""
MISMATCH_S = 60.0
"""How long a front waits at its start while all replicas have another model or version, as during an update."""


class CallError(Exception):
    """A call to a replica failed because of the replica, its node or the way there."""


class Calls(Protocol):
    """How a front reaches the replicas. All but `names` raise `CallError`."""

    def names(self) -> list[str]:
        """The replicas that take new requests."""

    def generate(self, replica: str, command: bytes) -> AsyncGenerator[bytes, None]: ...

    async def stop(self, replica: str, request_id: str, index: int) -> None: ...

    async def query(self, replica: str, query: bytes) -> bytes: ...

    async def report(self, replica: str, since: int) -> bytes: ...


class Replica:
    """A replica as a front sees it. `number`: for the router and for people; another one may get it later."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.report: Report | None = None
        self.reported_at = time.monotonic()
        self.avoid_until = 0.0

    def is_up(self, fingerprint: Fingerprint) -> bool:
        report = self.report
        return report is not None and report.fingerprint == fingerprint and report.health.state == "running"

    def is_fresh(self, now: float) -> bool:
        return now - self.reported_at < STALE_S and now >= self.avoid_until


class ReplicaSlot:
    """A number, and the replica that has it now. Called with a query, it asks that replica."""

    def __init__(self, pool: ReplicaPool, number: int) -> None:
        self._pool, self._number = pool, number

    async def __call__(self, query: Query[R], /) -> R:
        for replica in self._pool.up:
            if replica.number == self._number:
                return await self._pool.ask(replica, query)
        raise no_replica(f"no replica {self._number} is ready; try again later")


def no_replica(message: str) -> EngineQueryError:
    """The error of a query that no replica can answer now. People may read its message."""
    return EngineQueryError(message, code="no_replica")


class ReplicaPool:
    """Asks all replicas for reports, and lets `router` choose.

    fingerprint   of the replicas that this front can use
    slots         one for each number that a replica has had: there may be more later
    """

    def __init__(self, calls: Calls, fingerprint: Fingerprint) -> None:
        self._calls = calls
        self._fingerprint = fingerprint
        self.replicas: dict[str, Replica] = {}
        self.slots = [ReplicaSlot(self, 0)]
        self.router = Router()
        self.last_up = time.monotonic()  # when a replica ran requests
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> Report:
        """Wait for a replica that this front can use, and return its report.

        Raises `EngineError` if all have another model or version for a while.
        """
        self._task = asyncio.create_task(self._watch(), name="octavo-replicas")
        since = time.monotonic()
        while not self.up:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wait_for_change(), 1.0)
            if not (problem := self.mismatch()):
                since = time.monotonic()
            elif time.monotonic() - since > MISMATCH_S:
                raise EngineError(problem)
        report = self.up[0].report
        assert report is not None
        return report

    def close(self) -> None:
        for task in (self._task, *self._polls.values()):
            if task is not None:
                task.cancel()

    @property
    def up(self) -> list[Replica]:
        """The replicas that run requests now."""
        return [replica for replica in self.replicas.values() if replica.is_up(self._fingerprint)]

    def mismatch(self) -> str:
        """Why this front cannot use a replica, in one line; "" if it can use all that have reported."""
        for replica in self.replicas.values():
            if replica.report is not None and (what := self._fingerprint.difference(replica.report.fingerprint)):
                return f"replica {replica.name} has {what}; give all nodes the same model files and Octavo version"
        return ""

    async def choose(self, request_id: str, prompt: Sequence[int], salt: bytes) -> Replica:
        """The replica for a request. Waits while there is none; raises `EngineError` if that takes too long."""
        deadline = time.monotonic() + NO_REPLICA_S
        while not (usable := self._usable()):
            if time.monotonic() > deadline:
                raise EngineError(f"no replica was ready for {NO_REPLICA_S:.0f} s; try again later")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wait_for_change(), REPORT_S)
        among = {replica.number: replica for replica in usable}
        mask = sum(1 << number for number in among)
        return among[self.router.route(request_id, len(prompt), self.router.hashes(prompt, salt), mask).replica]

    def _usable(self) -> list[Replica]:
        now = time.monotonic()
        return [replica for replica in self.up if replica.is_fresh(now)] or self.up

    def avoid(self, replica: Replica) -> None:
        """A call to this replica has failed: others come first until it had time to report."""
        replica.avoid_until = time.monotonic() + STALE_S

    async def ask(self, replica: Replica, query: Query[R]) -> R:
        """Ask a replica's engine. Raises `EngineQueryError`."""
        try:
            data = await self._calls.query(replica.name, msgspec.msgpack.encode(query))
            if not data:
                raise CallError("its engine is down")
            reply = msgspec.msgpack.decode(data, type=ipc.RpcReply)
            if reply.error:
                raise EngineQueryError(reply.error)
            answer: R = msgspec.convert(reply.value, query.answer_type())
        except CallError:
            raise no_replica(f"replica {replica.number} does not answer; try again later") from None
        except msgspec.MsgspecError as error:
            raise EngineQueryError(f"the answer to {type(query).__name__} is unusable: {error}") from None
        return answer

    # -- reports -------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Keep a poll for every replica that takes requests."""
        while True:
            names = set(self._calls.names())
            for name in self.replicas.keys() - names:  # first: a successor gets the number
                self._polls.pop(name).cancel()
                self.router.index.clear(self.replicas.pop(name).number)
                self._notify()
            for name in names - self.replicas.keys():
                taken = {replica.number for replica in self.replicas.values()}
                number = min(set(range(len(taken) + 1)) - taken)
                if number == len(self.slots):
                    self.slots.append(ReplicaSlot(self, number))
                self.replicas[name] = Replica(name, number)
                self._polls[name] = asyncio.create_task(self._poll(self.replicas[name]))
            if self.up:
                self.last_up = time.monotonic()
            await asyncio.sleep(REPORT_S / 2)

    async def _poll(self, replica: Replica) -> None:
        since, was_refused = -1, False
        while True:
            with contextlib.suppress(CallError, TimeoutError, msgspec.DecodeError):
                data = await asyncio.wait_for(self._calls.report(replica.name, since), LOST_S)
                report = REPORT.decode(data)
                replica.report, replica.reported_at, since = report, time.monotonic(), report.sequence
                self._note_blocks(replica.number, report)
                if not was_refused and (what := self._fingerprint.difference(report.fingerprint)):
                    was_refused = True
                    logger.error("replica %s gets no request: it has %s", replica.name, what)
                self._notify()
            await asyncio.sleep(REPORT_S)

    def _note_blocks(self, number: int, report: Report) -> None:
        """Tell the router what a replica caches now."""
        if report.is_whole:
            self.router.index.clear(number)
        self.router.index.store(number, report.stored)
        self.router.index.remove(number, report.removed)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self) -> None:
        await self._changed.wait()
