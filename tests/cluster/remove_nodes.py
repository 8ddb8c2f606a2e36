"""A program: removes nodes of a Ray cluster while streams run, and prints a JSON object of what became of them.

    python -m tests.cluster.remove_nodes MODEL PORT ROUNDS [hang]

In each round eight streams run on two nodes, one node is removed, and another one joins. With `hang` a node's processes
are stopped before, and continue only to be removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray.cluster_utils import Cluster

from octavo.cluster import launcher

NUM_STREAMS, NUM_TOKENS = 8, 600
KNOWN_S = 3.0
"""Time for a front to hear of a new replica."""
MEMORY = 100 << 20
ENGINE_NODE: dict[str, Any] = {"num_cpus": 1, "resources": {"engine": 1}, "object_store_memory": MEMORY}


def configuration(model: str, port: int) -> dict[str, Any]:
    app = {
        "name": "octavo",
        "import_path": launcher.IMPORT_PATH,
        "args": {
            "model": model,
            "routing": "least-loaded",  # half of the streams on each node
            "engine": {"device": "cpu", "num_gpu_blocks_override": 1024},
            "api": {"uvicorn_log_level": "warning"},
        },
        "deployments": [
            # A bundle with "engine" fits no node but those that the test removes, and one replica each.
            {
                "name": "Engine",
                "num_replicas": 2,
                "placement_group_bundles": [{"CPU": 0.5, "engine": 1}],
                "ray_actor_options": {"num_cpus": 0.5, "resources": {"engine": 1}},
            },
            {"name": "Front", "ray_actor_options": {"num_cpus": 0.5, "resources": {"front": 1}}},
        ],
    }
    options = {"host": "127.0.0.1", "port": port}
    return {"proxy_location": "HeadOnly", "http_options": options, "applications": [app]}


def body(i: int) -> dict[str, Any]:
    """Half of the requests are greedy, the others have a seed."""
    sampling = {"temperature": 0} if i % 2 else {"temperature": 1.0, "seed": i}
    return {"prompt": f"request {i} ", "max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}


async def read(client: httpx.AsyncClient, i: int, arrivals: list[float]) -> str:
    """The text of one stream; "" if it ended early."""
    text, ended = "", False
    async with client.stream("POST", "/v1/completions", json={**body(i), "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.monotonic())
                chunk = json.loads(line.removeprefix("data: "))
                text += "".join(choice["text"] for choice in chunk.get("choices", []))
            ended |= line == "data: [DONE]"
    return text if ended else ""


def wait_for_engines(num: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        engine = serve.status().applications["octavo"].deployments["Engine"]
        if engine.replica_states.get("RUNNING") == num and len(engine.replica_states) == 1:
            return
        time.sleep(0.2)
    raise TimeoutError(f"{num} engines do not run after 60 s")


def processes_of(node: Any) -> list[int]:
    """A node's raylet and all that it has started, engines included."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [entry.process.pid for entry in node.all_processes["raylet"]]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def hang(node: Any) -> None:
    for pid in processes_of(node):
        os.kill(pid, signal.SIGSTOP)


def end(cluster: Cluster, node: Any) -> None:
    """Remove a node that hangs: its processes notice nothing while they are stopped."""
    pids = processes_of(node)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    cluster.remove_node(node, False)


async def run_round(url: str, expected: list[str], cluster: Cluster, node: Any, hangs: bool = False) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        arrivals: list[list[float]] = [[] for _ in expected]
        tasks = [asyncio.create_task(read(client, i, arrivals[i])) for i in range(len(expected))]
        while not all(len(times) > 20 for times in arrivals):
            await asyncio.sleep(0.01)
        num_done = sum(task.done() for task in tasks)
        await asyncio.to_thread(*((hang, node) if hangs else (cluster.remove_node, node, False)))
        _, pending = await asyncio.wait(tasks, timeout=60)
        texts = ["" if t in pending or t.exception() else t.result() for t in tasks]
        pauses = [max(b - a for a, b in itertools.pairwise(times)) for times in arrivals]
    if hangs:
        await asyncio.to_thread(end, cluster, node)
    return {
        "done_before": num_done,
        "hung": len(pending),
        "lost": sum(not text for text in texts) - len(pending),
        "wrong": sum(bool(text) and text != right for text, right in zip(texts, expected, strict=True)),
        "longest_pause_s": round(max(pauses), 2),
        "num_paused": sum(pause > 0.5 for pause in pauses),
    }


def queried(url: str) -> dict[int, int]:
    """The tokens that each replica has looked up in its prefix cache, by the replica's number."""
    found = {}
    for i in range(httpx.get(f"{url}/view/config").json()["num_replicas"]):
        kv = httpx.get(f"{url}/debug/kv?replica={i}")
        with httpx.stream("GET", f"{url}/view/events?replica={i}") as response:
            event = next(response.iter_lines())
        if kv.status_code == 200 and event == "event: snapshot":
            found[i] = kv.json()["num_queried_tokens"]
    return found


def num_reached(url: str) -> int:
    """How many of the two replicas that the front shows a single request reaches."""
    deadline = time.monotonic() + 60
    while len(before := queried(url)) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the front shows {before} after 60 s")
        time.sleep(0.5)
    httpx.post(f"{url}/v1/completions", json=body(0), timeout=60).raise_for_status()
    after = queried(url)
    return sum(before[i] < after[i] for i in before)


async def undisturbed(url: str) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        return [await read(client, i, []) for i in range(NUM_STREAMS)]


def main(model: str, port: int, num_rounds: int, hangs: bool = False) -> dict[str, Any]:
    os.environ["RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING"] = "0"
    head = {"num_cpus": 1, "resources": {"front": 1}, "object_store_memory": MEMORY, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.add_node(**ENGINE_NODE) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False)
        with launcher.deployed(configuration(model, port)) as url:
            wait_for_engines(2)
            time.sleep(KNOWN_S)
            expected = asyncio.run(undisturbed(url))
            rounds = []
            for _ in range(num_rounds):
                rounds.append(asyncio.run(run_round(url, expected, cluster, nodes.pop(0), hangs)))
                print(rounds[-1], file=sys.stderr, flush=True)
                nodes.append(cluster.add_node(**ENGINE_NODE))
                wait_for_engines(2)
                time.sleep(KNOWN_S)
            complete = sum(bool(text) for text in expected)
            return {"rounds": rounds, "complete": complete, "num_reached": num_reached(url)}
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["hang"])))
