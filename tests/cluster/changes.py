"""A program: changes a Ray Serve application while streams run, and prints a JSON object of what became of them.

python -m tests.cluster.changes CASE MODEL PORT

scale    a second engine starts under load, and stops after it
update   the file has another engine option and is deployed again
fronts   two fronts; then one of them dies
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import ray

from octavo.cluster import launcher
from tests.cluster.remove_nodes import MEMORY, NUM_STREAMS, configuration, read, undisturbed

WAIT_S = 90.0


def with_deployments(model: str, port: int, engine: dict[str, Any], num_fronts: int = 1) -> dict[str, Any]:
    """A configuration for one node that has CPUs only."""
    config = configuration(model, port)
    config["applications"][0]["deployments"] = [
        {"name": "Engine", **engine},
        {"name": "Front", "num_replicas": num_fronts, "ray_actor_options": {"num_cpus": 0.5}},
    ]
    return config


def replicas(deployment: str) -> set[str]:
    """The replicas of a deployment that Serve has started and not yet stopped."""
    names = (actor["name"] for actor in ray.util.list_named_actors(True))
    return {name for name in names if f"#{deployment}#" in name}


async def wait_for(condition: Callable[[], bool]) -> float:
    """Seconds until a condition holds."""
    start = time.monotonic()
    while not await asyncio.to_thread(condition):
        if time.monotonic() - start > WAIT_S:
            raise TimeoutError(f"the condition does not hold after {WAIT_S:.0f} s")
        await asyncio.sleep(0.2)
    return round(time.monotonic() - start, 1)


class Load:
    """Streams that follow each other, and what became of them."""

    def __init__(self, url: str, expected: list[str]) -> None:
        self._url, self._expected = url, expected
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False
        self.right = self.wrong = self.lost = 0
        self.longest_pause_s = 0.0

    def start(self, num: int) -> None:
        self._stopped = False
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(num)]

    async def stop(self) -> None:
        """Let the running streams end."""
        self._stopped = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), WAIT_S)

    async def _run(self, i: int) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as client:
            while not self._stopped:
                arrivals: list[float] = []
                try:
                    text = await read(client, i, arrivals)
                except httpx.HTTPError:
                    text = ""
                self.right += text == self._expected[i]
                self.lost += not text
                self.wrong += bool(text) and text != self._expected[i]
                pauses = [b - a for a, b in itertools.pairwise(arrivals)]
                self.longest_pause_s = max(self.longest_pause_s, *pauses, 0.0)

    def result(self) -> dict[str, Any]:
        counts = {"right": self.right, "wrong": self.wrong, "lost": self.lost}
        return {**counts, "longest_pause_s": round(self.longest_pause_s, 2)}


def is_used(url: str, replica: int) -> bool:
    """Whether a replica has unfinished requests."""
    known = httpx.get(f"{url}/debug/router").json()["replicas"]
    return any(row["replica"] == replica and row["num_requests"] for row in known)


async def scale(model: str, port: int) -> dict[str, Any]:
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 4}
    delays = {"upscale_delay_s": 1, "downscale_delay_s": 2, "metrics_interval_s": 0.5, "look_back_period_s": 2}
    config = with_deployments(model, port, {"autoscaling_config": {**scaling, **delays}})
    with launcher.deployed(config) as url:
        load = Load(url, await undisturbed(url))
        load.start(NUM_STREAMS)
        up_s = await wait_for(lambda: len(replicas("Engine")) == 2)
        used_s = round(up_s + await wait_for(lambda: is_used(url, 1)), 1)
        await load.stop()
        load.start(1)  # it may be on the replica that stops
        down_s = await wait_for(lambda: len(replicas("Engine")) == 1)
        await load.stop()
        return {**load.result(), "up_s": up_s, "used_s": used_s, "down_s": down_s}


async def update(model: str, port: int) -> dict[str, Any]:
    old = with_deployments(model, port, {"num_replicas": 2})
    new = with_deployments(model, port, {"num_replicas": 2})
    new["applications"][0]["args"]["engine"]["max_num_seqs"] = 64
    with launcher.deployed(old) as url:
        load = Load(url, await undisturbed(url))
        before = replicas("Engine") | replicas("Front")
        load.start(NUM_STREAMS)
        await asyncio.sleep(1)
        start = time.monotonic()
        await asyncio.to_thread(launcher.deployed(new).__enter__)
        deployed_s = round(time.monotonic() - start, 1)
        await wait_for(lambda: not before & (replicas("Engine") | replicas("Front")))
        gone_s = round(time.monotonic() - start, 1)
        await load.stop()
        engines = len(replicas("Engine"))
        return {**load.result(), "deployed_s": deployed_s, "old_gone_s": gone_s, "engines": engines}


async def fronts(model: str, port: int) -> dict[str, Any]:
    """A front dies: its streams end, the others go on, and new ones go elsewhere."""
    config = with_deployments(model, port, {"num_replicas": 2}, num_fronts=2)
    with launcher.deployed(config) as url:
        expected = await undisturbed(url)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            arrivals: list[list[float]] = [[] for _ in expected]
            tasks = []
            for i, times in enumerate(arrivals):  # one after the other: the proxy sees which front has fewer
                tasks.append(asyncio.create_task(read(client, i, times)))
                while len(times) < 5:
                    await asyncio.sleep(0.01)
            num_done = sum(task.done() for task in tasks)
            os.kill(front_pids()[0], signal.SIGKILL)
            texts = [t if isinstance(t, str) else "" for t in await asyncio.gather(*tasks, return_exceptions=True)]
        later = await undisturbed(url)
    return {
        "done_before": num_done,
        "ended": sum(not text for text in texts),
        "wrong": sum(bool(t) and t != right for t, right in zip(texts, expected, strict=True)),
        "right_after": sum(t == right for t, right in zip(later, expected, strict=True)),
    }


def front_pids() -> list[int]:
    """Processes of fronts: Serve gives them their names."""
    mark = os.environ["OCTAVO_TEST_CLUSTER"]
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b":Front" in path.read_bytes() and mark.encode() in (path.parent / "environ").read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


CASES = {"scale": scale, "update": update, "fronts": fronts}


def main(case: str, model: str, port: int) -> dict[str, Any]:
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=MEMORY)
    try:
        return asyncio.run(CASES[case](model, port))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
