"""`RayCalls`: calls to replicas through Ray Serve, each to the replica that it names."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import ray.exceptions
from ray.serve.exceptions import RayServeException

from octavo.cluster.pool import CallError
from octavo.errors import cut

named_router: Any = None
"""The `NamedReplicaRouter` of this process; Serve makes it at a handle's first call."""


@contextlib.contextmanager
def _as_call_error() -> Any:
    try:
        yield
    except (ray.exceptions.RayError, RayServeException) as error:
        cause = getattr(error, "cause", None) or error
        raise CallError(f"{type(cause).__name__}: {cut(str(cause).strip().partition(chr(10))[0], 200)}") from None


class RayCalls:
    """Calls of one front. `handle`: the engines' `DeploymentHandle`; `front`: a name that no other front has."""

    def __init__(self, handle: Any, front: str) -> None:
        self._handle = handle
        self._front = front

    async def connect(self) -> None:
        """Make Serve's router, which knows the replicas. Waits for the first replica."""
        with contextlib.suppress(CallError):
            await self.report("", -1)

    def names(self) -> list[str]:
        return [] if named_router is None else [replica.unique_id for replica in list(named_router.curr_replicas)]

    async def generate(self, replica: str, command: bytes) -> AsyncGenerator[bytes, None]:
        stream = self._handle.options(stream=True).generate.remote(self._front, command, replica=replica)
        try:
            with _as_call_error():
                messages: AsyncIterator[bytes] = aiter(stream)
                async for data in messages:
                    yield data
        finally:
            stream.cancel()

    async def stop(self, replica: str, request_id: str, index: int) -> None:
        with _as_call_error():
            await self._handle.stop.remote(request_id, index, replica=replica)

    async def query(self, replica: str, query: bytes) -> bytes:
        with _as_call_error():
            answer: bytes = await self._handle.query.remote(query, replica=replica)
            return answer

    async def report(self, replica: str, since: int) -> bytes:
        with _as_call_error():
            report: bytes = await self._handle.report.remote(self._front, since, replica=replica)
            return report
