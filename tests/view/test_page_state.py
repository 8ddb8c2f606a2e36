"""The page's state of the pool, which its JavaScript makes from frames, equals the scheduler's."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections import Counter
from itertools import chain, islice, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest

import octavo.view
from octavo.core.block_pool import group_of
from octavo.core.in_flight import InFlightStep
from octavo.view.live.messages import Snapshot
from octavo.view.live.publisher import Publisher
from tests.proof.workloads import World
from tests.view.live.test_state import KINDS

STATIC = Path(octavo.view.__file__).parent / "static"

SCRIPT = """
import { readFileSync } from "node:fs";
const { FrameLost, Pool } = await import(process.argv[1]);
for (const run of JSON.parse(readFileSync(0, "utf8"))) {
  let pool = null;
  const summaries = [];
  for (const frame of run) {
    if (frame.kind === "delta") pool.apply(frame);
    else if (pool) pool.replace(frame);
    else pool = new Pool(frame);
    summaries.push(structuredClone(pool.summary()));
  }
  let lost = 0;
  try {
    pool.apply({ kind: "delta", epoch: pool.epoch, frame: pool.frame + 2, time_s: 0, step: 0 });
  } catch (error) {
    if (error instanceof FrameLost) lost = 1;
  }
  console.log(JSON.stringify({ summaries, lost }));
}
"""


def run_pool(runs: list[list[Any]]) -> list[dict[str, Any]]:
    """The page's state after each frame of each run."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    command = [node, "--input-type=module", "-e", SCRIPT, (STATIC / "pool.mjs").as_uri()]
    done = subprocess.run(command, input=json.dumps(runs), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


class FilmedWorld(World):
    """A workload that keeps its frames as JSON, and the scheduler's state at each."""

    def __init__(self, seed: int, **kinds: bool) -> None:
        super().__init__(seed, Counter(), listen=True, **kinds)
        self.coin = random.Random(seed + 0.25)
        self.publisher = Publisher(self.scheduler)
        self.frames: list[Any] = []
        self.truths: list[dict[str, Any]] = []

    def _plan(self) -> InFlightStep:
        step = super()._plan()
        self.film()
        return step

    def _land(self) -> None:
        super()._land()
        self.film()

    def film(self) -> None:
        if self.coin.random() > 0.4:
            return
        # Now and then a snapshot, as after a lost connection.
        frame = self.publisher.frame(self.publisher.last if self.frames and self.coin.random() < 0.95 else "")
        if frame is None:
            return
        self.frames.append(json.loads(msgspec.json.encode(frame)))
        if isinstance(frame, Snapshot) or self.frames[0]["num_blocks"] < 4096:
            self.truths.append(truth(self))


def truth(world: World) -> dict[str, Any]:
    """The scheduler's state in the form of `Pool.summary`."""
    scheduler = world.scheduler
    cache = scheduler.cache
    pool, size = cache.pool, cache.block_size
    queues = {"running": scheduler.running, "swapped": scheduler.swapped, "waiting": scheduler.waiting}
    live = [request for queue in queues.values() for request in queue]
    owners: Counter[int] = Counter()
    filled: dict[int, int] = {}
    groups: dict[int, int] = {}
    holders = [s for request in live if request.status.value != "swapped" for s in request.sequences]
    for sequence in (*holders, *cache.pins.values()):
        for group, (block_ids, _) in enumerate(sequence.holdings):
            for i, block in enumerate(block_ids):
                owners[block] += 1
                is_state = group == cache.num_groups
                filled[block] = size if is_state else min(max(sequence.num_computed - i * size, 0), size)
                groups[block] = group
    for block, seal_id in enumerate(pool.seal_id):
        if seal_id and (key := pool.key_of(block)) is not None:
            groups[block] = group_of(key[1])
    blocks = range(1, pool.num_blocks + 1)
    sealed = {seal_id: block for block, seal_id in enumerate(pool.seal_id) if seal_id}
    checkpoints = []
    for full in sealed.values():
        state = pool.find_state(pool.seal_id[full]) if cache.state_blocks and not groups[full] else []
        above, num = pool.key_of(full), 1
        while above is not None and not isinstance(above[0], bytes):
            above, num = pool.key_of(sealed.get(above[0], 0)), num + 1
        checkpoints += [[block, full, part, above and num * size] for part, block in enumerate(state)]
    pinned = [(name, sequence) for name, sequence in cache.pins.items()]
    num_tables = cache.num_groups + (cache.state_blocks > 0)
    sequences = [(r.request_id, s) for r in live for s in r.sequences] + pinned
    states = ["used" if pool.refs[b] else "cached" if pool.seal_id[b] else "free" for b in blocks]
    return {
        "refs": [pool.refs[b] for b in blocks],
        "states": states,
        "seals": [pool.seal_id[b] for b in blocks],
        "owners": [owners[b] for b in blocks],
        "owned": [owners[b] > 0 for b in blocks],
        "filled": [size if pool.seal_id[b] else filled.get(b, 0) for b in blocks],
        "groups": [groups.get(b, 0) for b in blocks],
        "kinds": [
            "" if groups.get(b) != cache.num_groups else "checkpoint" if pool.seal_id[b] else "state" for b in blocks
        ],
        "checkpoints": sorted(checkpoints),
        "tables": sorted(
            (
                [name, len(s.token_ids), s.num_computed, list(table)]
                for name, s in sequences
                for table in islice(chain((ids for ids, _ in s.holdings), repeat([])), num_tables)
            ),
            key=itemgetter(0),
        ),
        "numTables": len(sequences) * num_tables,
        "queues": {name: [r.request_id for r in queue] for name, queue in queues.items()},
        "stats": cache.stats().as_dict(),
    }


def check_runs(seeds: range, **kinds: bool) -> Counter[str]:
    worlds = [FilmedWorld(seed, **kinds) for seed in seeds]
    for world in worlds:
        world.run()
    worlds = [world for world in worlds if world.frames]
    totals: Counter[str] = Counter()
    for world, shown in zip(worlds, run_pool([world.frames for world in worlds]), strict=True):
        assert shown["lost"] == 1, "a delta out of order was applied"
        for frame, summary, expected in zip(world.frames, shown["summaries"], world.truths, strict=True):
            summary["tables"].sort(key=itemgetter(0))  # the tables of one request keep their order
            summary["queues"].pop("pinned")
            for name, value in expected.items():
                assert summary[name] == value, (frame["kind"], frame["frame"], name)
            totals[frame["kind"]] += 1
            totals["swapped"] += bool(expected["queues"]["swapped"])
            totals["shared"] += max(expected["refs"]) > 1
            totals["in windows or states"] += sum(map(bool, expected["groups"]))
            totals["checkpoints"] += len(summary["checkpoints"])
    return totals


@pytest.mark.parametrize("kinds", KINDS)
def test_page_state_equals_the_scheduler(kinds: dict[str, bool]) -> None:
    totals = check_runs(range(44, 58), **kinds)
    assert bool(totals["in windows or states"]) == bool(kinds)
    assert (totals["checkpoints"] > 100) == ("states" in kinds), totals
    assert totals["snapshot"] > 8 and totals["delta"] > 80 and totals["swapped"] > 10 and totals["shared"] > 20, totals


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("first", range(1000, 1300, 100))
def test_page_state_equals_the_scheduler_for_many_seeds(first: int, kinds: dict[str, bool]) -> None:
    totals = check_runs(range(first, first + 100), **kinds)
    assert totals["delta"] > 1000
