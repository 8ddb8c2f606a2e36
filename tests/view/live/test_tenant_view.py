"""A tenant's view: its own requests, and of other tenants only which blocks they use."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.engine.query import Query
from octavo.view.live.messages import Delta, Frame, Snapshot
from octavo.view.live.queries import GetBlock, GetFrame, StopFrames
from octavo.view.live.state import PoolState
from octavo.view.live.tenant_view import TenantView
from tests.view.live.test_hub import StreamReader, aclose, frame_of, run, until
from tests.view.live.test_hub import World as HubWorld
from tests.view.live.test_state import KINDS, WatchedWorld, through_json


@dataclass(frozen=True)
class Half:
    """Sees every other request."""

    rest: int
    sees_all: bool = False

    def sees(self, name: str) -> bool:
        return sum(name.encode()) % 2 == self.rest

    def redact(self, event: Mapping[str, Any]) -> dict[str, Any]:
        return {**event, "for_request": "?"} if not self.sees(event.get("for_request", "")) else dict(event)


def names_in(value: Any) -> set[str]:
    """The ids of requests in a frame, as a viewer gets it."""
    named = {request["id"] for request in value.get("requests", ())} | set(value.get("gone", ()))
    named |= {name for queue in value.get("lines", {}).values() for name in queue}
    return named | {event["request_id"] for event in value.get("events", ()) if "request_id" in event}


class TenantWorld(WatchedWorld):
    """A workload with two tenants, each of which sees one half of the requests."""

    def __init__(self, seed: int, totals: Counter[str], **kinds: bool) -> None:
        super().__init__(seed, totals, **kinds)
        self.whole: PoolState | None = None
        self.views: dict[Half, tuple[TenantView, PoolState, set[tuple[int, float]]]] = {}

    def watch(self) -> None:
        if self.coin.random() > 0.4:
            return
        frame = self.publisher.frame("" if self.whole is None else f"{self.whole.epoch}:{self.whole.frame}")
        if isinstance(frame, Snapshot):
            self.whole = PoolState(frame)
        elif frame is not None and self.whole is not None:
            self.whole.apply(frame)
            for access, (view, own, _) in self.views.items():
                own.apply(self.read(access, view.delta(frame, self.whole)))  # type: ignore[arg-type]
        assert self.whole is not None
        for access in (Half(0), Half(1)):
            if access not in self.views and self.coin.random() < 0.3:
                view = TenantView(self.whole, access)
                self.views[access] = view, PoolState(self.read(access, view.snapshot(self.whole))), set()  # type: ignore[arg-type]
        for access, (view, own, ever) in self.views.items():
            self.check_view(access, view, own, ever)

    def read(self, access: Half, frame: Frame) -> Frame:
        """Pass a frame through JSON, and check that it names no other requests."""
        names = names_in(json.loads(msgspec.json.encode(frame)))
        assert all(access.sees(name) for name in names)
        self.totals["names"] += len(names)
        return through_json(frame)  # type: ignore[arg-type,return-value]

    def check_view(self, access: Half, view: TenantView, own: PoolState, ever: set[tuple[int, float]]) -> None:
        whole = self.whole
        assert whole is not None
        assert np.array_equal(own.words, whole.words) and own.stats == whole.stats and own.counts == whole.counts
        assert own.requests == {name: request for name, request in whole.requests.items() if access.sees(name)}
        assert own.queues == {queue: [n for n in names if access.sees(n)] for queue, names in whole.queues.items()}
        uids = {uid for request in own.requests.values() for uid in request.sequences}
        assert own.tables == {uid: table for uid, table in whole.tables.items() if uid in uids}
        swapped = {uid for r in own.requests.values() if r.status == "swapped" for uid in r.sequences}
        held = {b for uid in uids - swapped for b in own.tables[uid].block_ids.tolist() if b > 0}
        sealed = set(np.nonzero(whole.words >> 15)[0].tolist())
        ever |= {(block, whole.seal_ids[block]) for block in held & sealed}
        for block in sealed:
            is_own = (block, whole.seal_ids[block]) in ever
            assert own.seal_ids[block] == (whole.seal_ids[block] if is_own else 0)
            assert view.has(block, whole) is (is_own or block in held)
            self.totals["own" if is_own else "others'"] += 1
        fresh = PoolState(view.snapshot(whole))
        assert (fresh.requests, fresh.tables) == (own.requests, own.tables)
        now = np.nonzero(whole.words >> 15)[0]
        assert [fresh.seal_ids[b] for b in now] == [whole.seal_ids[b] * ((b, whole.seal_ids[b]) in ever) for b in now]


@pytest.mark.parametrize(("first", "kinds"), [(0, {}), (10, {}), (20, {"groups": True}), (30, KINDS[-1])])
def test_tenant_view_shows_own_requests_only(first: int, kinds: dict[str, bool]) -> None:
    totals: Counter[str] = Counter()
    for seed in range(first, first + 10):
        TenantWorld(seed, totals, **kinds).run()
    assert min(totals["own"], totals["others'"], totals["names"]) > 100


def test_viewers_of_one_hub_share_one_engine_call() -> None:
    async def main() -> None:
        world = HubWorld(plain=True)
        viewers = [StreamReader(world.hub) for _ in range(3)]
        viewers[1].stream, viewers[2].stream = world.hub.watch(Half(0)), world.hub.watch(Half(1))
        for viewer in viewers:
            await viewer.read()
        assert world.calls[GetFrame] == 1
        world.add("b", 5)  # Half(0) sees it
        world.lab.add("a", [7, 8, 9, 10, 11], 6)  # Half(1) sees it
        world.lab.step()
        whole = await viewers[0].until("a")
        even, odd = await viewers[1].until("b"), await viewers[2].until("a")
        assert whole.requests.keys() == {"a", "b"} and even.requests.keys() == {"b"} and odd.requests.keys() == {"a"}
        (block, *_) = next(iter(even.tables.values())).block_ids.tolist()
        found = {access: await world.hub.block(block, access) for access in (None, Half(0), Half(1))}
        assert found[None] == found[Half(0)] and found[None] is not None
        assert (found[None]["token_ids"], found[None]["owners"][0]["request_id"]) == ([0, 1], "b")
        other = found[Half(1)]
        assert other is not None and other["references"] == 1 and other["sealed"]
        hidden = (other["token_ids"], other["name"], other["owners"], other["seal_id"], other["parent_id"])
        assert hidden == (None, None, [], 0, 0)
        late = world.hub.watch(Half(1))
        assert {r.id for r in as_snapshot(frame_of(await anext(late))).requests} == {"a"}
        await aclose(late, *(viewer.stream for viewer in viewers))

    run(main())


def as_snapshot(frame: Frame) -> Snapshot:
    assert isinstance(frame, Snapshot)
    return frame


def test_content_of_a_reused_block_is_hidden() -> None:
    """The engine is ahead of the state: by now the block may hold another tenant's content."""

    async def main() -> None:
        world = HubWorld(plain=True)
        stream = world.hub.watch(Half(0))
        viewer = StreamReader(world.hub)
        viewer.stream = stream
        await viewer.read()
        world.add("b", 5)
        state = await viewer.until("b")
        (block, *_) = next(iter(state.tables.values())).block_ids.tolist()
        unchanged = world.query

        async def query(query: Query[Any]) -> Any:
            reply = await unchanged(query)
            return msgspec.structs.replace(reply, **changed) if isinstance(query, GetBlock) else reply

        world.hub._query = query
        for later in ({"seal_id": 99}, {"epoch": "another"}):
            changed = later
            found = await world.hub.block(block, Half(0))
            assert found is not None and found["owners"] and found["token_ids"] is None and found["name"] is None
        changed = {}
        found = await world.hub.block(block, Half(0))
        assert found is not None and found["token_ids"] == [0, 1]
        await aclose(stream)

    run(main())


def test_reconnecting_viewers_reuse_the_snapshot() -> None:
    async def main() -> None:
        world = HubWorld()
        world.hub._idle_ratio = 1e6  # times a snapshot's microseconds
        for _ in range(20):
            stream = world.hub.watch()
            assert isinstance(frame_of(await anext(stream)), Snapshot)
            await aclose(stream)
        assert world.calls[StopFrames] == 0
        snapshots = [world.hub._snapshot(None, world.hub.state or PoolState(no_state())) for _ in range(2)]
        assert snapshots[0] is snapshots[1]
        world.hub._linger_until = 0.0
        await until(lambda: not world.lab.cache.events.active)
        assert world.calls[StopFrames] == 1 and world.hub.state is None

    run(main())


def no_state() -> Snapshot:
    raise AssertionError("there is no state")


def test_empty_tenant_delta_still_counts_as_a_frame() -> None:
    world = HubWorld()
    engine: Any = type("Engine", (), {"scheduler": world.lab.scheduler})()
    state = PoolState(GetFrame("").answer(engine))
    view = TenantView(state, Half(0))
    own = PoolState(view.snapshot(state))
    world.add("a", 5)
    delta = GetFrame(f"{state.epoch}:{state.frame}").answer(engine)
    assert isinstance(delta, Delta)
    state.apply(delta)
    shown = view.delta(delta, state)
    own.apply(shown)
    assert shown.frame == delta.frame and not shown.requests and shown.blocks == delta.blocks
