"""The hub: late viewers get the state, slow ones are disconnected, and without viewers the engine does no work."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from octavo.engine.engine import Engine
from octavo.engine.executor import RankPlace
from octavo.engine.query import Query
from octavo.errors import EngineError
from octavo.view.live import hub as hub_module
from octavo.view.live.hub import MAX_QUEUED, Hub, Message
from octavo.view.live.messages import Delta, Frame, Snapshot
from octavo.view.live.publisher import Publisher
from octavo.view.live.queries import GetBlock, StopFrames
from octavo.view.live.state import FrameLostError, PoolState
from octavo.view.live.summary import Summary, read_ranks
from tests.core.lab import SWAP, Lab
from tests.proof.oracle import Oracle
from tests.view.live.test_state import check

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    async def in_time() -> T:
        return await asyncio.wait_for(main, 60)

    return asyncio.run(in_time())


class World:
    """A scheduler driven by hand, and a hub that polls it all the time."""

    def __init__(self, *, plain: bool = False) -> None:
        self.lab = Lab(40, 2, rows=4, host=8, policy=SWAP, listen=False)
        self.plain = plain
        self.calls: Counter[type[Query[Any]]] = Counter()
        self.error: EngineError | None = None
        self.lose = False
        self.hub = Hub(self.query, interval_s=0, idle_ratio=0)

    async def query(self, query: Query[Any]) -> Any:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.calls[type(query)] += 1
        engine: Any = type("Engine", (), {"scheduler": self.lab.scheduler})()
        engine = self.__dict__.setdefault("engine", engine)
        reply = query.answer(engine)
        if self.lose and isinstance(reply, Delta):
            self.lose = False
            reply.frame += 1
        if not self.plain:
            return reply
        return msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(reply)), query.answer_type())

    def add(self, name: str, num_prompt: int = 9) -> None:
        self.lab.add(name, list(range(num_prompt)), 6)
        self.lab.step()


def frame_of(message: Message) -> Frame:
    kind, data = message
    frame: Frame = msgspec.json.decode(data, type=Frame)  # type: ignore[arg-type]
    assert kind == json.loads(bytes(data))["kind"]
    return frame


class StreamReader:
    """Applies the frames of a viewer's stream."""

    def __init__(self, hub: Hub) -> None:
        self.stream = hub.watch()
        self.state: PoolState | None = None

    async def read(self) -> None:
        frame = frame_of(await anext(self.stream))
        if self.state is None:
            assert isinstance(frame, Snapshot)
            self.state = PoolState(frame)
        else:
            self.state.apply(frame)

    async def until(self, name: str) -> PoolState:
        """Read until the state has a request."""
        while self.state is None or name not in self.state.requests:
            await self.read()
        return self.state


async def aclose(*streams: AsyncGenerator[Any, None]) -> None:
    for stream in streams:
        with contextlib.suppress(RuntimeError):
            await stream.aclose()


async def until(ready: Any) -> None:
    while not ready():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("plain", [False, True], ids=["same process", "another process"])
def test_late_viewer_gets_the_same_state(plain: bool) -> None:
    async def main() -> None:
        world = World(plain=plain)
        assert not world.lab.cache.events.active  # no viewers: no subscription
        early = StreamReader(world.hub)
        await early.read()
        assert world.lab.cache.events.active and not world.lab.cache.events.blocks
        world.add("a")
        check(await early.until("a"), world.lab.scheduler)
        late = StreamReader(world.hub)
        await late.read()
        world.add("b")
        world.add("c", 12)
        for reader in (early, late):
            check(await reader.until("c"), world.lab.scheduler)
        assert world.hub.num_viewers == 2
        await aclose(early.stream, late.stream)
        await until(lambda: not world.lab.cache.events.active)
        assert world.calls[StopFrames] == 1 and world.hub.num_viewers == 0
        again = StreamReader(world.hub)
        check(await again.until("c"), world.lab.scheduler)
        await aclose(again.stream)

    run(main())


def test_ranks_are_told_while_the_engine_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that hangs is when they matter. After a restart there may be none."""
    monkeypatch.setattr(hub_module, "RANKS_S", 0.001)
    places = [RankPlace(3, 9, True, 0.04, False), RankPlace(3, 8, False, 7.26, True)]

    async def main() -> None:
        async def never(query: Query[Any]) -> Any:
            await asyncio.Event().wait()

        hub = Hub(never, lambda: places)
        stream = hub.watch()
        told = [await anext(stream), await anext(stream)]
        assert [name for name, _ in told] == ["ranks", "ranks"]
        ranks = json.loads(bytes(told[1][1]))["ranks"]
        assert ranks[1] == {"plan": 3, "collective": 8, "is_inside": False, "age_s": 7.3, "is_behind": True}
        assert read_ranks(ranks)[0] == (3, 9, True, 0.0, False)
        places.clear()
        while json.loads(bytes((await anext(stream))[1]))["ranks"]:
            pass
        await asyncio.sleep(0.01)
        (viewer,) = hub._viewers
        assert not viewer._messages  # no rank is told once
        await aclose(stream)

    run(main())


def test_slow_viewer_is_disconnected_and_others_stay() -> None:
    async def main() -> None:
        world = World()
        slow, quick = StreamReader(world.hub), StreamReader(world.hub)
        await slow.read()
        await quick.read()
        for i in range(2 * MAX_QUEUED):
            if not world.lab.requests or not world.lab.scheduler.requests:
                world.add(f"r{i}", 1 + i % 7)
            else:
                world.lab.step()
            step = world.lab.scheduler.num_steps
            while quick.state is None or quick.state.step < step:
                await quick.read()
        check(quick.state, world.lab.scheduler)
        assert world.hub.num_viewers == 1
        assert [message async for message in slow.stream] == [("bye", msgspec.Raw(b'{"reason":"slow"}'))]
        await aclose(quick.stream)

    run(main())


def test_viewers_are_notified_when_the_engine_ends() -> None:
    async def main() -> None:
        world = World()
        reader = StreamReader(world.hub)
        await reader.read()
        world.error = EngineError("the engine is gone")
        (message,) = [message async for message in reader.stream]
        assert message == ("bye", msgspec.Raw(b'{"reason":"the engine is gone"}'))
        world.error = None
        back = world.hub.watch()
        assert isinstance(frame_of(await anext(back)), Snapshot)
        await aclose(back)

    run(main())


def test_lost_frame_causes_a_new_snapshot() -> None:
    async def main() -> None:
        world = World()
        reader = StreamReader(world.hub)
        await reader.read()
        assert reader.state is not None
        epoch = reader.state.epoch
        world.lose = True
        world.add("a")
        check(await reader.until("a"), world.lab.scheduler)
        assert reader.state.epoch != epoch
        await aclose(reader.stream)

    run(main())


def test_block_details() -> None:
    async def main() -> None:
        world = World(plain=True)
        assert await world.hub.block(1) is None  # no viewers
        reader = StreamReader(world.hub)
        await reader.read()
        world.add("a", 5)
        await reader.until("a")
        found = await world.hub.block(1)
        assert found is not None and len(found["name"]) == 32
        assert found["owners"] == [{"request_id": "a", "index": 0, "entry": 0}]
        assert (found["references"], found["sealed"], found["num_filled"], found["token_ids"]) == (1, True, 2, [0, 1])
        tail = await world.hub.block(3)
        assert tail is not None and (tail["sealed"], tail["num_filled"], tail["name"]) == (False, 1, None)
        assert await world.hub.block(0) is None and await world.hub.block(41) is None
        await aclose(reader.stream)

    run(main())


def test_unchanged_state_makes_no_frame() -> None:
    lab = Lab(8, 2)
    publisher = Publisher(lab.scheduler)
    assert not publisher.is_subscribed
    first = publisher.frame()
    assert isinstance(first, Snapshot) and first.frame == 0
    assert publisher.frame(publisher.last) is None
    lab.add("a", [1, 2, 3], 4)
    delta = publisher.frame(publisher.last)
    assert isinstance(delta, Delta) and delta.frame == 1
    assert isinstance(publisher.frame(f"{first.epoch}:0"), Snapshot)  # not the last frame: a snapshot
    publisher.stop()
    assert not publisher.is_subscribed
    state = PoolState(first)
    with pytest.raises(FrameLostError, match="take a snapshot"):
        state.apply(Delta(first.epoch, 2, 0.0, 0, first.counts))


def test_delta_has_wait_reasons_and_steps() -> None:
    lab = Lab(4, 2, rows=4, listen=False)
    publisher = Publisher(lab.scheduler)
    publisher.frame()
    lab.add("a", [1, 2, 3, 4, 5], 2)
    lab.add("b", [6, 7, 8, 9, 10], 2)
    lab.step()
    delta = publisher.frame(publisher.last)
    assert isinstance(delta, Delta)
    (b,) = [r for r in delta.requests if r.id == "b"]
    assert b.wait is not None and (b.wait.reason, b.wait.needs, b.wait.free) == ("blocks", 3, 1)
    (step,) = delta.steps
    assert step[0] == 0 and step[2:] == [5, 1, 1, 1, 0, 3, 0, 1]  # five positions, one of them sampled
    assert [e["event"] for e in delta.events] == ["arrived", "arrived", "admitted", "waiting"]
    lab.run()
    assert not publisher._waits  # finished requests are removed


def test_wait_for_blocks_tells_those_of_windows() -> None:
    """12 positions in blocks of 2 are 6 full blocks, and 3 in each window group: a window and a step."""
    lab = Lab(22, 2, rows=4, windows=(3, 3), max_chunk=3)
    publisher = Publisher(lab.scheduler)
    state = PoolState(publisher.frame())  # type: ignore[arg-type]
    lab.add("a", [*range(4), 7, 8, 9, 7, 8, 9, 7, 8], 12)
    for _ in range(4):
        lab.step()
    lab.add("b", [*range(3, 15)], 2)
    lab.step()
    state.apply(publisher.frame(publisher.last))  # type: ignore[arg-type]
    cache, (b,) = lab.cache, lab.scheduler.waiting
    wait, prefix = state.requests["b"].wait, cache.prefixes.lookup(b.sequences[0])
    assert wait is not None and wait.needs == cache.blocks_to_admit(b.sequences[0], prefix) == 6 + 3 + 3
    assert wait.in_windows == 6
    assert Summary.of(state).first_waiting.startswith("b needs 12 blocks (6 in windows): ")


def test_wait_for_blocks_tells_those_of_a_state() -> None:
    lab = Lab(9, 2, rows=4, state_blocks=3)
    publisher = Publisher(lab.scheduler)
    state = PoolState(publisher.frame())  # type: ignore[arg-type]
    assert state.state_blocks == PoolState(state.snapshot()).state_blocks == 3
    lab.add("a", [1, 2, 3, 4], 6)
    lab.add("b", [5, 6, 7], 2)
    lab.step()
    state.apply(publisher.frame(publisher.last))  # type: ignore[arg-type]
    wait = state.requests["b"].wait
    assert wait is not None and (wait.needs, wait.in_windows, wait.in_states) == (6, 0, 3)
    assert Summary.of(state).first_waiting.startswith("b needs 6 blocks (3 in its state): ")
    lab.run()


def test_content_of_a_checkpoint_is_that_of_the_last_full_block_before_it() -> None:
    lab = Lab(20, 2, rows=4, state_blocks=3, listen=False)
    engine = Engine(lab.scheduler, Oracle(lab.scheduler), vocab_size=9, max_model_len=20)
    lab.add("a", [1, 2, 3, 4, 5, 6, 7], 1)
    lab.run()
    blocks = lab.pool.find_state(lab.pool.seal_id[3])
    assert len(blocks) == 3
    for block in (3, *blocks):
        assert GetBlock(block).answer(engine).token_ids == [5, 6]


def test_content_of_a_windows_block_is_that_of_the_full_one() -> None:
    lab = Lab(20, 2, rows=4, windows=(3, 5), listen=False)
    engine = Engine(lab.scheduler, Oracle(lab.scheduler), vocab_size=9, max_model_len=20)
    lab.add("a", [1, 2, 3, 4, 5, 6, 7], 2)
    lab.step()
    (a,) = lab.scheduler.running
    for block_ids, _ in a.sequences[0].tables:
        assert GetBlock(block_ids[2]).answer(engine).token_ids == [5, 6]


def test_events_keep_their_own_time() -> None:
    """Although the frame is made later."""
    now = 10.0
    lab = Lab(4, 2, rows=4, listen=False)
    publisher = Publisher(lab.scheduler, clock=lambda: now)
    publisher.frame()
    known: dict[int, int] = {}
    num_evicted = 0
    for number in range(1, 6):
        now = 10.0 + number
        lab.add(f"r{number}", [number, number + 1, number + 2, number + 3, 0], 1)
        lab.run()
        now += 0.5
        delta = publisher.frame(publisher.last)
        assert isinstance(delta, Delta) and delta.seals is not None and delta.counts.tokens == 5 * number
        assert {step[1] for step in delta.steps} == {number}
        for event in delta.events:
            if event["event"] == "evicted":  # evictions are found when the frame is made
                assert event["time_s"] == number + 0.5 and known[event["block_id"]] == event["seal_id"]
                num_evicted += event["seal_id"] != event["block_id"]
            else:
                assert event["time_s"] == number and event["request_id"] == f"r{number}"
        finished = {"event": "finished", "time_s": number, "request_id": f"r{number}"}
        assert finished | {"reason": "length", "num_tokens": 1} in delta.events
        columns = np.frombuffer(delta.seals.block_ids, "<u4"), np.frombuffer(delta.seals.seal_ids, "<f8")
        known |= dict(zip(*(column.tolist() for column in columns), strict=True))
    assert num_evicted


def test_frame_is_bounded_and_counts_omitted_events() -> None:
    lab = Lab(4, 2, rows=4, listen=False)
    publisher = Publisher(lab.scheduler)
    publisher.frame()
    for i in range(300):
        lab.add(f"r{i}", [1], 1)
    delta = publisher.frame(publisher.last)
    assert isinstance(delta, Delta)
    assert (len(delta.events), delta.num_omitted, len(delta.requests)) == (256, 44, 256)
    assert delta.counts.waiting == 300
