"""A viewer's state equals the scheduler's, at random moments of the oracle's workloads."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain, islice, repeat
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.core.in_flight import InFlightStep
from octavo.core.scheduler import Scheduler
from octavo.engine.engine import Engine
from octavo.view.live.messages import Delta, Frame, Snapshot
from octavo.view.live.publisher import Publisher
from octavo.view.live.queries import BlockContent, GetBlock
from octavo.view.live.state import PoolState
from tests.core.lab import Lab
from tests.proof.oracle import Oracle
from tests.proof.workloads import World

KINDS = [{}, {"groups": True}, {"states": True}, {"groups": True, "states": True}]


def through_json(frame: Frame) -> Frame:
    return msgspec.json.decode(msgspec.json.encode(frame), type=Frame)  # type: ignore[arg-type]


def through_a_process(frame: Frame) -> Frame:
    """As an engine process sends it: plain data with raw arrays."""
    plain: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(frame))
    return msgspec.convert(plain, Frame)  # type: ignore[arg-type]


def test_unknown_block_id_has_no_content() -> None:
    """The id may come from the state of an engine before a restart, which had more memory."""
    lab = Lab(4, 2, rows=4, listen=False)
    engine = Engine(lab.scheduler, Oracle(lab.scheduler), vocab_size=9, max_model_len=9)
    for block in (1, 4, 5, 1000):
        assert GetBlock(block).answer(engine) == BlockContent()


def check(state: PoolState, scheduler: Scheduler) -> None:
    cache = scheduler.cache
    pool, num_tables = cache.pool, cache.num_groups + (cache.state_blocks > 0)
    refs, seals = np.array(pool.refs), np.array(pool.seal_id)
    assert np.array_equal(state.words & 0x7FFF, refs)
    assert np.array_equal(state.words >> 15 == 1, seals != 0)
    assert np.array_equal(np.where(seals, state.seal_ids, 0), seals)
    for block in np.nonzero(seals)[0].tolist():
        key = pool.key_of(block)
        assert key is not None
        assert state.parent_ids[block] == (0 if isinstance(key[0], bytes) else key[0])
        assert state.block(block)["group"] == state.groups[block] == (key[1][0] + 1 if len(key[1]) == 1 else 0)
    stats = cache.stats()
    assert state.stats == stats.as_dict()
    assert (state.num_used, state.num_cached, state.num_free) == (
        stats.num_used,
        stats.num_cached,
        stats.num_free,
    )
    queues = {"running": scheduler.running, "swapped": scheduler.swapped, "waiting": scheduler.waiting}
    assert state.queues == {name: [r.request_id for r in queue] for name, queue in queues.items()}
    live = {r.request_id: (r, r.status.value, r.sequences) for queue in queues.values() for r in queue}
    live |= {name: (s.request, "pinned", [s]) for name, s in cache.pins.items()}
    assert state.requests.keys() == live.keys()
    owners: Counter[int] = Counter()
    for name, (request, status, sequences) in live.items():
        view = state.requests[name]
        assert (view.status, view.num_cached, view.num_preempted) == (
            status,
            request.num_cached_tokens,
            request.num_preemptions,
        )
        assert (view.wait.reason if view.wait else "") == request.wait_reason
        tables = [state.tables[uid] for uid in view.sequences]
        shown = [(t.num_tokens, t.num_computed, t.group, t.block_ids.tolist()) for t in tables]
        held = [
            (len(s.token_ids), s.num_computed, group, ids)
            for s in sequences
            for group, (ids, _) in enumerate(islice(chain(s.holdings, repeat(([], 0))), num_tables))
        ]
        assert shown == held, request
        if status != "swapped":
            owners.update(b for t in tables for b in t.block_ids.tolist() if b)
    assert state.tables.keys() == {uid for view in state.requests.values() for uid in view.sequences}
    assert [owners[b] for b in range(1, len(refs))] == refs[1:].tolist()


class WatchedWorld(World):
    """A workload with an early and a late viewer, who get frames at random moments."""

    def __init__(self, seed: int, totals: Counter[str], **kinds: bool) -> None:
        super().__init__(seed, totals, listen=True, **kinds)
        self.coin = random.Random(seed + 0.125)
        self.publisher = Publisher(self.scheduler)
        self.early: PoolState | None = None
        self.late: PoolState | None = None

    def _plan(self) -> InFlightStep:
        step = super()._plan()
        self.watch()
        return step

    def _land(self) -> None:
        super()._land()
        self.watch()

    def _interfere(self) -> None:
        super()._interfere()
        self.watch()

    def watch(self) -> None:
        if self.coin.random() > 0.4:
            return
        after = "" if self.early is None else f"{self.early.epoch}:{self.early.frame}"
        carry = self.coin.choice([through_json, through_a_process])
        frame = self.publisher.frame(after)
        self.totals[type(frame).__name__] += 1
        if self.early is None:
            assert isinstance(frame, Snapshot)
            self.early = PoolState(carry(frame))  # type: ignore[arg-type]
        elif frame is not None:
            assert isinstance(frame, Delta)
            for state in (self.early, self.late or PoolState(self.early.snapshot())):
                state.apply(carry(frame))
        check(self.early, self.scheduler)
        if self.late is not None:
            check(self.late, self.scheduler)
        elif self.coin.random() < 0.2:
            self.late = PoolState(carry(self.early.snapshot()))  # type: ignore[arg-type]
            check(self.late, self.scheduler)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("first", range(0, 30, 10))
def test_state_equals_the_pool(first: int, kinds: dict[str, bool]) -> None:
    totals: Counter[str] = Counter()
    for seed in range(first, first + 10):
        WatchedWorld(seed, totals, **kinds).run()
    assert totals["Snapshot"] > 5 and totals["Delta"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("first", range(1000, 3000, 250))
def test_state_equals_the_pool_for_many_seeds(first: int, kinds: dict[str, bool]) -> None:
    totals: Counter[str] = Counter()
    for seed in range(first, first + 250):
        WatchedWorld(seed, totals, **kinds).run()
    assert totals["Delta"] > 2500
