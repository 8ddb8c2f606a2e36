"""Work in slices, and messages of the engine's: their order is kept, and others have their turn in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.engine.process import ipc
from octavo.engine.process.ipc import Channel, endpoint_in
from octavo.frontend import cooperative as slices
from octavo.frontend.cooperative import YIELD_POINT, iter_cooperatively, run_cooperatively
from tests.serve.event_loop import run


class Log(list[Any]):
    """What happened, in order."""

    @contextlib.asynccontextmanager
    async def with_another_task(self) -> AsyncIterator[None]:
        async def other() -> None:
            while True:
                self.append("other")
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def own(self) -> list[Any]:
        return [item for item in self if item != "other"]


def work(num_items: int) -> Iterator[Any]:
    for i in range(num_items):
        yield i
        yield YIELD_POINT


@pytest.mark.parametrize(("slice_s", "num_turns"), [(-1.0, 10), (1e6, 0)])
def test_results_keep_their_order_and_others_run_between_slices(
    monkeypatch: pytest.MonkeyPatch, slice_s: float, num_turns: int
) -> None:
    monkeypatch.setattr(slices, "SLICE_S", slice_s)

    async def main() -> None:
        log = Log()
        async with log.with_another_task():
            async for item in iter_cooperatively(work(10)):
                log.append(item)
            assert log.own == list(range(10))
            assert log.count("other") == num_turns  # one between any two slices; none within one
        assert await run_cooperatively(work(5)) == [0, 1, 2, 3, 4]

    run(main())


def test_what_a_slice_raises_reaches_the_caller() -> None:
    def failing() -> Iterator[Any]:
        yield 1
        yield YIELD_POINT
        raise ValueError("no")

    async def main() -> None:
        with pytest.raises(ValueError, match="no"):
            await run_cooperatively(failing())

    run(main())


@pytest.mark.parametrize("drain_s", [-1.0, 1e6])
def test_messages_keep_their_order_and_others_run_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drain_s: float
) -> None:
    """With no time at all for messages, each still comes, once its turn has: nothing waits for the next signal."""

    async def main() -> None:
        log, arrived = Log(), asyncio.Event()
        there, here = Channel(bind=endpoint_in(str(tmp_path))), Channel(connect=endpoint_in(str(tmp_path)))
        try:
            here.send("hello")
            assert there.receive(30.0) is not None  # before that, what is sent may be lost
            for i in range(50):
                there.send(i)

            def take(data: bytes) -> None:
                log.append(msgspec.msgpack.decode(data))
                if len(log.own) == 50:
                    arrived.set()

            async with log.with_another_task():
                here.attach(asyncio.get_running_loop(), take)
                async with asyncio.timeout(30):
                    await arrived.wait()
            assert log.own == list(range(50))
        finally:
            here.close()
            there.close()
        turns = "".join("." if item == "other" else "m" for item in log)
        if drain_s < 0:
            assert "mm" not in turns

    monkeypatch.setattr(ipc, "DRAIN_S", drain_s)
    run(main())
