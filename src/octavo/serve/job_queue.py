"""Jobs on the event loop that share a few slots, in turns between tenants (`octavo.turns`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from octavo.serve.openai.errors import ApiError
from octavo.turns import Turns

T = TypeVar("T")


class JobQueue(Generic[T]):
    """Runs jobs, `num_slots` at a time. Use it on one event loop.

    room       the sum of the sizes of all jobs; a job for which there is no room gets 429
    full_text  the message of that error
    spare      one slot more for a tenant that has none
    """

    def __init__(self, num_slots: int, room: int, full_text: str, *, spare: bool = True) -> None:
        self.turns: Turns[_Job[T]] = Turns(num_slots, room, self._refuse, spare=spare)
        self._full_text = full_text
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, job: Callable[[], Awaitable[T]], tenant: int, size: int, *, slow: bool = False) -> T:
        """Runs a job when it is its tenant's turn, and returns its result.

        A caller that is cancelled leaves the queue. A job that runs already runs to its end, and holds its slot.
        """
        waiting = _Job(job)
        if not self.turns.add(waiting, tenant, size, slow=slow):
            self._refuse(waiting)
        self._start_jobs()
        try:
            result: T = await waiting.result
            return result
        finally:
            self.turns.withdraw(waiting)

    async def aclose(self) -> None:
        """Cancels all jobs."""
        for job in self.turns.waiting:
            job.result.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_jobs(self) -> None:
        while (job := self.turns.take()) is not None:
            task = asyncio.ensure_future(self._run(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, job: _Job[T]) -> None:
        try:
            result = await job.work()
        except asyncio.CancelledError:
            job.result.cancel()
            raise
        except Exception as error:
            if not job.result.done():
                job.result.set_exception(error)
        else:
            if not job.result.done():
                job.result.set_result(result)
        finally:
            self.turns.done(job)
            self._start_jobs()

    def _refuse(self, job: _Job[T]) -> None:
        if not job.result.done():
            job.result.set_exception(ApiError(429, "queue_full", self._full_text, retry_after_s=1))


class _Job(Generic[T]):
    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self.work = work
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
