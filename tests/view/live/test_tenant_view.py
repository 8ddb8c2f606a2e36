"""One tenant's share of a state: all of its own, and nothing of the others but which blocks they use."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.view.live.messages import Delta, Frame, Snapshot
from octavo.view.live.publisher import STOP
from octavo.view.live.state import PoolState
from octavo.view.live.tenant_view import TenantView
from tests.view.live.test_hub import Reader as Viewer
from tests.view.live.test_hub import World as HubWorld
from tests.view.live.test_hub import aclose, frame_of, run, until
from tests.view.live.test_state import WatchedWorld, through_json


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
    """Of requests, in a frame as a viewer gets it."""
    named = {request["id"] for request in value.get("requests", ())} | set(value.get("gone", ()))
    named |= {name for line in value.get("lines", {}).values() for name in line}
    return named | {event["request_id"] for event in value.get("events", ()) if "request_id" in event}


class SharedWorld(WatchedWorld):
    """As `WatchedWorld`, with two tenants who come at other moments, and see their halves."""

    def __init__(self, seed: int, totals: Counter[str]) -> None:
        super().__init__(seed, totals)
        self.whole: PoolState | None = None
        self.shares: dict[Half, tuple[TenantView, PoolState, set[tuple[int, float]]]] = {}

    def look(self) -> None:
        if self.coin.random() > 0.4:
            return
        frame = self.publisher.frame("" if self.whole is None else f"{self.whole.epoch}:{self.whole.frame}")
        if isinstance(frame, Snapshot):
            self.whole = PoolState(frame)
        elif frame is not None and self.whole is not None:
            self.whole.apply(frame)
            for reader, (share, own, _) in self.shares.items():
                own.apply(self.read(reader, share.delta(frame, self.whole)))  # type: ignore[arg-type]
        assert self.whole is not None
        for reader in (Half(0), Half(1)):
            if reader not in self.shares and self.coin.random() < 0.3:
                share = TenantView(self.whole, reader)
                self.shares[reader] = share, PoolState(self.read(reader, share.snapshot(self.whole))), set()  # type: ignore[arg-type]
        for reader, (share, own, ever) in self.shares.items():
            self.check_share(reader, share, own, ever)

    def read(self, reader: Half, frame: Frame) -> Frame:
        """As its viewer gets it, and without a word of others."""
        names = names_in(json.loads(msgspec.json.encode(frame)))
        assert all(reader.sees(name) for name in names)
        self.totals["names"] += len(names)
        return through_json(frame)  # type: ignore[arg-type,return-value]

    def check_share(self, reader: Half, share: TenantView, own: PoolState, ever: set[tuple[int, float]]) -> None:
        whole = self.whole
        assert whole is not None
        assert np.array_equal(own.words, whole.words) and own.stats == whole.stats and own.counts == whole.counts
        assert own.requests == {name: view for name, view in whole.requests.items() if reader.sees(name)}
        assert own.queues == {line: [n for n in names if reader.sees(n)] for line, names in whole.queues.items()}
        uids = {uid for view in own.requests.values() for uid in view.sequences}
        assert own.tables == {uid: table for uid, table in whole.tables.items() if uid in uids}
        swapped = {uid for view in own.requests.values() if view.status == "swapped" for uid in view.sequences}
        held = {b for uid in uids - swapped for b in own.tables[uid].block_ids.tolist() if b > 0}
        sealed = set(np.nonzero(whole.words >> 15)[0].tolist())
        ever |= {(block, whole.seal_ids[block]) for block in held & sealed}
        for block in sealed:
            is_own = (block, whole.seal_ids[block]) in ever
            assert own.seal_ids[block] == (whole.seal_ids[block] if is_own else 0)
            assert share.has(block, whole) is (is_own or block in held)
            self.totals["own" if is_own else "others'"] += 1
        fresh = PoolState(share.snapshot(whole))
        assert (fresh.requests, fresh.tables) == (own.requests, own.tables)
        now = np.nonzero(whole.words >> 15)[0]
        assert [fresh.seal_ids[b] for b in now] == [whole.seal_ids[b] * ((b, whole.seal_ids[b]) in ever) for b in now]


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_a_share_is_all_of_its_own_and_nothing_else(first: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(first, first + 10):
        SharedWorld(seed, totals).run()
    assert min(totals["own"], totals["others'"], totals["names"]) > 100


def test_viewers_of_one_hub_see_their_shares_and_the_engine_is_asked_once() -> None:
    async def main() -> None:
        world = HubWorld(plain=True)
        viewers = [Viewer(world.hub) for _ in range(3)]
        viewers[1].stream, viewers[2].stream = world.hub.watch(Half(0)), world.hub.watch(Half(1))
        for viewer in viewers:
            await viewer.read()
        assert world.asked["view"] == 1
        world.busy("b", 5)  # Half(0) sees it
        world.lab.add("a", [7, 8, 9, 10, 11], 6)  # Half(1) sees it
        world.lab.step()
        whole = await viewers[0].until("a")
        even, odd = await viewers[1].until("b"), await viewers[2].until("a")
        assert whole.requests.keys() == {"a", "b"} and even.requests.keys() == {"b"} and odd.requests.keys() == {"a"}
        (block, *_) = next(iter(even.tables.values())).block_ids.tolist()
        found = {reader: await world.hub.block(block, reader) for reader in (None, Half(0), Half(1))}
        assert found[None] == found[Half(0)] and found[None] is not None
        assert (found[None]["token_ids"], found[None]["owners"][0]["request_id"]) == ([0, 1], "b")
        other = found[Half(1)]
        assert other is not None and other["references"] == 1 and other["sealed"]
        hidden = (other["token_ids"], other["name"], other["owners"], other["seal_id"], other["parent_id"])
        assert hidden == (None, None, [], 0, 0)
        late = world.hub.watch(Half(1))
        assert {r.id for r in _snapshot(frame_of(await anext(late))).requests} == {"a"}
        await aclose(late, *(viewer.stream for viewer in viewers))

    run(main())


def _snapshot(frame: Frame) -> Snapshot:
    assert isinstance(frame, Snapshot)
    return frame


def test_content_that_has_changed_meanwhile_is_not_shown() -> None:
    """The engine is ahead of the state: the block may be another tenant's by now."""

    async def main() -> None:
        world = HubWorld(plain=True)
        stream = world.hub.watch(Half(0))
        viewer = Viewer(world.hub)
        viewer.stream = stream
        await viewer.read()
        world.busy("b", 5)
        state = await viewer.until("b")
        (block, *_) = next(iter(state.tables.values())).block_ids.tolist()
        whole = world.ask

        async def ask(question: str, argument: str) -> Any:
            answer = await whole(question, argument)
            return answer | changed if question == "view_block" else answer

        world.hub._rpc = ask
        for later in ({"seal_id": 99}, {"epoch": "another"}):
            changed = later
            found = await world.hub.block(block, Half(0))
            assert found is not None and found["owners"] and found["token_ids"] is None and found["name"] is None
        changed = {}
        found = await world.hub.block(block, Half(0))
        assert found is not None and found["token_ids"] == [0, 1]
        await aclose(stream)

    run(main())


def test_viewers_that_come_and_go_make_no_snapshots() -> None:
    async def main() -> None:
        world = HubWorld()
        world.hub._idle_ratio = 1e6  # of a snapshot that takes microseconds
        for _ in range(20):
            stream = world.hub.watch()
            assert isinstance(frame_of(await anext(stream)), Snapshot)
            await aclose(stream)
        assert world.asked[STOP] == 0
        snapshots = [world.hub._snapshot(None, world.hub.state or PoolState(_none())) for _ in range(2)]
        assert snapshots[0] is snapshots[1]
        world.hub._linger_until = 0.0
        await until(lambda: not world.lab.cache.events.active)
        assert world.asked[STOP] == 1 and world.hub.state is None

    run(main())


def _none() -> Snapshot:
    raise AssertionError("nothing is watched")


def test_a_frame_with_nothing_of_ones_own_still_counts() -> None:
    world = HubWorld()
    tap_frame = world.questions["view"]
    engine: Any = type("Engine", (), {"scheduler": world.lab.scheduler})()
    state = PoolState(tap_frame(engine, ""))
    share = TenantView(state, Half(0))
    own = PoolState(share.snapshot(state))
    world.busy("a", 5)
    delta = tap_frame(engine, f"{state.epoch}:{state.frame}")
    assert isinstance(delta, Delta)
    state.apply(delta)
    shown = share.delta(delta, state)
    own.apply(shown)
    assert shown.frame == delta.frame and not shown.requests and shown.blocks == delta.blocks
