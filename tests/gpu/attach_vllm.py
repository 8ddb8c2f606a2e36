"""`octavo view --attach` beside a running vLLM: what it shows is what vLLM tells, and what was asked of it.

    python tests/gpu/attach_vllm.py CONFIG_DIR [--vllm-python PYTHON]
    python tests/gpu/attach_vllm.py --octavo

CONFIG_DIR holds a config.json; weights are random and prompts are token ids. A server is started with a pool so small
that it evicts, and four look at its KV events: a plain subscriber, which is the judge; a view that was there from the
beginning; one that comes late, and has to ask the replay socket for everything; and one that loses every third message.
The server's /metrics and the prompts themselves are the other witnesses. With --octavo the server is ours, which speaks
the same format: so the script can be tried where there is no vLLM.

It is no pytest: it takes a server of somebody else's and a minute for that to start. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from octavo.view.live.external import ExternalPool
from octavo.view.live.messages import SEALED_BIT, Frame, Snapshot
from octavo.view.live.state import PoolState

ROOT = Path(__file__).parents[2]
NUM_REQUESTS, NUM_GROUPS, NUM_SHARED = 60, 4, 160
"""Requests of each phase, in groups that share their first tokens."""
NUM_BLOCKS, SIZE = 640, 16
OUTPUT, LARGEST = 4, 96
SETTLE_S = 20.0

Shape = Counter[tuple[int, int]]
"""Of a forest of blocks: how many have so many known blocks before them, and so many children."""


def shape_of(parents: dict[Any, Any]) -> Shape:
    """`parents`: block -> the one before it; one that is not there, or None, begins a tree."""
    children = Counter(p for p in parents.values() if p in parents)
    found: Shape = Counter()
    for block in parents:
        depth, before = 0, parents[block]
        while before in parents:
            depth, before = depth + 1, parents[before]
        found[depth, children[block]] += 1
    return found


# -- who looks ---------------------------------------------------------------------------------------------------------


class Judge:
    """A subscriber that knows nothing of ours: events as vLLM's own documentation reads them."""

    def __init__(self, endpoint: str) -> None:
        self.parents: dict[Any, Any] = {}
        self.num_stored = self.num_removed = self.num_messages = 0
        self.block_sizes: set[int] = set()
        self.encodings: Counter[str] = Counter()
        self.gaps: list[tuple[int, int]] = []
        self.last = -1
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(endpoint)

    def read(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                _topic, sequence, payload = self._socket.recv_multipart(zmq.NOBLOCK)
                number = int.from_bytes(sequence, "big")
                if self.num_messages and number != self.last + 1:  # the first may be from before it was there
                    self.gaps.append((self.last, number))
                self.last = number
                self.num_messages += 1
                self._process(msgspec.msgpack.decode(payload))

    def _process(self, batch: Any) -> None:
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        for event in events:
            self.encodings[f"{type(event).__name__} in {type(batch).__name__}"] += 1
            if isinstance(event, list):
                names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size")
                event = dict(zip(names, event, strict=False))
            if event["type"] == "BlockStored":
                self.block_sizes.add(event["block_size"])
                before = event.get("parent_block_hash")
                for name in event["block_hashes"]:
                    self.num_stored += 1
                    self.parents.setdefault(name, before)
                    before = name
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    self.num_removed += 1
                    self.parents.pop(name, None)
            else:
                self.parents.clear()


class Seen:
    """What a view shows, from its frames."""

    def __init__(self) -> None:
        self.state: PoolState | None = None

    def take(self, frame: Frame) -> None:
        if self.state is None:
            assert isinstance(frame, Snapshot)
            self.state = PoolState(frame)
        else:
            self.state.apply(frame)

    def look(self) -> None:
        """Take in what there is; nothing where frames come by themselves."""

    @property
    def parents(self) -> dict[int, int]:
        state = self.state
        if state is None:
            return {}
        sealed = np.nonzero(state.words & SEALED_BIT)[0]
        return {int(state.seal_ids[b]): int(state.parent_ids[b]) for b in sealed}

    def stat(self, name: str) -> Any:
        return None if self.state is None else self.state.stats[name]


class OctavoView(Seen):
    """`octavo view --attach`, a process of its own; and a browser's part, which is to read its events."""

    def __init__(self, *options: str) -> None:
        super().__init__()
        command = [sys.executable, "-m", "octavo.cli.main", "view", *options]
        self.process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        url = self.process.stdout.readline().strip()
        if not url.startswith("http"):
            raise SystemExit(f"octavo view did not start: {url!r}")
        self._lock = threading.Lock()
        threading.Thread(target=self._read, args=(url + "events",), daemon=True).start()

    def _read(self, url: str) -> None:
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(url) as answer:
            for line in answer:
                if line.startswith(b"data: {") and b'"kind"' in line:
                    frame = msgspec.json.decode(line[6:], type=Frame)
                    with self._lock:
                        self.take(frame)

    @property
    def parents(self) -> dict[int, int]:
        with self._lock:
            return super().parents

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


class Lossy(Seen):
    """The same part of the program in this process, on a socket that loses every third message while it `loses`."""

    def __init__(self, endpoint: str, replay: str) -> None:
        super().__init__()
        self.attached = ExternalPool(endpoint, replay=replay)
        self._socket, self.attached._socket = self.attached._socket, self  # type: ignore[assignment]
        self.loses, self.num_heard, self.num_dropped = True, 0, 0

    def recv_multipart(self, flags: int) -> list[bytes]:
        while True:
            parts = self._socket.recv_multipart(flags)
            self.num_heard += 1
            if self.num_heard % 3 or not self.loses:
                return parts
            self.num_dropped += 1

    def look(self) -> None:
        after = "" if self.state is None else f"{self.state.epoch}:{self.state.frame}"
        frame = asyncio.run(self.attached.view_rpc("view", after))
        if frame is not None:
            self.take(frame)

    def close(self) -> None:
        self.attached._socket = self._socket
        self.attached.close()


# -- the server --------------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def tiny_model(folder: Path) -> str:
    """For our own server, which serves none without a tokenizer."""
    sys.path.insert(0, str(ROOT))
    from tests.engine.models import make_talking_checkpoint

    return str(make_talking_checkpoint(folder, max_position_embeddings=2048))


class Server:
    """`ports`: of HTTP, of the events and of the replay socket. vLLM takes an address for its own only if it has a
    star; to any other it connects."""

    def __init__(self, options: argparse.Namespace, ports: list[int], log: Path) -> None:
        self.base = f"http://127.0.0.1:{ports[0]}"
        self.endpoint, self.replay = (f"tcp://127.0.0.1:{port}" for port in ports[1:])
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{ports[1]}",
            "replay_endpoint": self.replay,
            "topic": "kv-events",
        }
        common = ["--port", str(ports[0]), "--max-model-len", "2048", "--num-gpu-blocks-override", str(NUM_BLOCKS)]
        common += ["--block-size", str(SIZE), "--served-model-name", "m", "--kv-events-config", json.dumps(events)]
        if options.octavo:
            command, env = (
                [sys.executable, "-m", "octavo.cli.main", "serve", tiny_model(log.parent), *common],
                environment(),
            )
        else:
            entry = ["-m", "vllm.entrypoints.openai.api_server", "--model", options.model, "--enforce-eager"]
            entry += ["--load-format", "dummy", "--skip-tokenizer-init", "--gpu-memory-utilization", "0.5"]
            command = [*options.vllm_python.split(), *entry, *common, *options.more]
            env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        self._log = log.open("w")
        self.log = log
        self.process = subprocess.Popen(command, env=env, stdout=self._log, stderr=subprocess.STDOUT)

    def wait(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.base + "/health", timeout=1):
                return
            time.sleep(0.5)
        raise SystemExit("the server did not start:\n" + self.log.read_text()[-6000:])

    def complete(self, prompt: list[int]) -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.base + "/v1/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                usage = json.load(answer)["usage"]
        except urllib.error.HTTPError as error:
            text = error.read()[:2000].decode("utf-8", "replace")
            raise SystemExit(f"{error}: {text}\n{self.log.read_text()[-4000:]}") from None
        assert usage["prompt_tokens"] == len(prompt), usage

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's lines; with `label`, the number in that label."""
        with urllib.request.urlopen(self.base + "/metrics", timeout=5) as answer:
            text = answer.read().decode()
        if label:
            found = re.search(rf'^{name}\{{.*?{label}="([0-9]+)"', text, re.MULTILINE)
            return float(found[1]) if found else -1.0
        return sum(float(n) for n in re.findall(rf"^{name}(?:\{{[^}}]*\}})? ([0-9.e+]+)$", text, re.MULTILINE))

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._log.close()


# -- what is asked -----------------------------------------------------------------------------------------------------


def make_prompts(rnd: random.Random, least: int, most: int) -> list[list[int]]:
    """Of each group one first, so that what is shared is there for the others. Tails that the answer does not fill."""
    heads = [[rnd.randrange(LARGEST) for _ in range(NUM_SHARED)] for _ in range(NUM_GROUPS)]
    prompts = []
    for i in range(NUM_REQUESTS):
        num_own = SIZE * rnd.randint(least, most) + rnd.randint(1, SIZE - OUTPUT)
        prompts.append(heads[i % NUM_GROUPS] + [rnd.randrange(LARGEST) for _ in range(num_own)])
    return prompts


def blocks_of(prompts: list[list[int]]) -> dict[tuple[int, ...], tuple[int, ...] | None]:
    """The prefix tree that these make in an empty pool: each full block, by all tokens up to its end -> its parent."""
    found: dict[tuple[int, ...], tuple[int, ...] | None] = {}
    for prompt in prompts:
        for end in range(SIZE, len(prompt) + 1, SIZE):
            found[tuple(prompt[:end])] = tuple(prompt[: end - SIZE]) if end > SIZE else None
    return found


def send(server: Server, prompts: list[list[int]]) -> None:
    for prompt in prompts[:NUM_GROUPS]:
        server.complete(prompt)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(server.complete, prompts[NUM_GROUPS:]))


class Report:
    """A table of what was looked at, what was found and what should have been."""

    def __init__(self) -> None:
        self.num_wrong = 0

    def title(self, text: str) -> None:
        print(f"\n{text}\n{'':<58}{'found':>14}{'expected':>14}", flush=True)

    def check(self, what: str, found: Any, expected: Any) -> None:
        good = found == expected
        self.num_wrong += not good
        print(f"{what:<58}{_short(found):>14}{_short(expected):>14}{'' if good else '   WRONG'}", flush=True)


def _short(value: Any) -> str:
    return f"{sum(value.values())} nodes" if isinstance(value, Counter) else f"{value:g}" if value is not None else "-"


def settle(judge: Judge, viewers: list[Seen], done: Callable[[], bool] = lambda: True) -> None:
    """Until all have what the judge has, and nothing comes any more; or for so long that it is wrong."""
    until, quiet_at, before = time.monotonic() + SETTLE_S, time.monotonic(), -1
    while time.monotonic() < until:
        judge.read()
        for viewer in viewers:
            viewer.look()
        if judge.num_messages != before:
            before, quiet_at = judge.num_messages, time.monotonic()
        same = all(len(viewer.parents) == len(judge.parents) for viewer in viewers)
        if same and done() and time.monotonic() - quiet_at > 1.5:
            return
        time.sleep(0.05)


def compare(report: Report, judge: Judge, named: dict[str, Seen]) -> None:
    for name, viewer in named.items():
        parents = viewer.parents
        report.check(f"{name}: blocks shown", len(parents), len(judge.parents))
        report.check(f"{name}: the tree's shape", shape_of(parents), shape_of(judge.parents))
        report.check(f"{name}: messages lost", viewer.stat("num_lost"), 0)
        report.check(f"{name}: messages malformed", viewer.stat("num_malformed"), 0)


def check_all(report: Report, server: Server, judge: Judge, stack: contextlib.ExitStack) -> None:
    rnd = random.Random(5)
    addresses = ["--attach", server.endpoint, "--metrics", server.base + "/metrics"]
    early = stack.enter_context(contextlib.closing(OctavoView(*addresses, "--replay-endpoint", server.replay)))
    lossy = stack.enter_context(contextlib.closing(Lossy(server.endpoint, server.replay)))
    settle(judge, [early, lossy])

    # Everything fits: the prompts say what must be there.
    prompts = make_prompts(rnd, 1, 8)
    expected = blocks_of(prompts)
    assert len(expected) + 2 * NUM_REQUESTS < NUM_BLOCKS, len(expected)  # each has an unfilled block besides
    send(server, prompts)
    num_hits = NUM_SHARED * (NUM_REQUESTS - NUM_GROUPS)
    settle(judge, [early, lossy], lambda: server.metric("vllm:prefix_cache_hits_total") >= num_hits)
    late = stack.enter_context(contextlib.closing(OctavoView(*addresses, "--replay-endpoint", server.replay)))
    settle(judge, [early, lossy, late])
    report.title(f"{NUM_REQUESTS} requests that fit")
    report.check("events told: blocks stored", judge.num_stored, len(expected))
    report.check("events told: blocks removed", judge.num_removed, 0)
    report.check("gaps in the judge's numbers", len(judge.gaps), 0)
    report.check("tokens a block", max(judge.block_sizes, default=None), SIZE)
    report.check("metrics: prompt tokens found in the cache", server.metric("vllm:prefix_cache_hits_total"), num_hits)
    num_prompt = sum(map(len, prompts))
    report.check("metrics: prompt tokens looked up", server.metric("vllm:prefix_cache_queries_total"), num_prompt)
    report.check("the judge's tree is the prompts'", shape_of(judge.parents), shape_of(expected))
    compare(report, judge, {"view": early, "view that came late": late, "view that loses messages": lossy})
    roots = sum(count for (depth, _), count in shape_of(early.parents).items() if depth == 0)
    report.check("view: prompts' first blocks, each once", roots, NUM_GROUPS)
    forks = {depth: count for (depth, children), count in shape_of(early.parents).items() if children > 1}
    report.check("view: forks, at the shared prefixes' ends", forks.get(NUM_SHARED // SIZE - 1, 0), NUM_GROUPS)
    pool = server.metric("vllm:cache_config_info", "num_gpu_blocks")
    report.check("view: blocks of the pool, as /metrics has it", early.stat("num_blocks"), pool)

    # More than fits: blocks are evicted, and the judge says what is left.
    for _ in range(2):
        send(server, make_prompts(rnd, 4, 16))
    lossy.loses = False
    server.complete([rnd.randrange(LARGEST) for _ in range(3 * SIZE + 1)])  # who lost the last message hears of it now
    settle(judge, [early, late, lossy])
    latest = stack.enter_context(contextlib.closing(OctavoView(*addresses, "--replay-endpoint", server.replay)))
    settle(judge, [early, late, lossy, latest])
    report.title(f"{2 * NUM_REQUESTS + 1} more, with evictions")
    report.check("gaps in the judge's numbers", len(judge.gaps), 0)
    report.check("some were removed", judge.num_removed > 0, True)
    report.check("messages that one view lost on the way", lossy.num_dropped > 0, True)
    compare(
        report,
        judge,
        {"view": early, "view that came late": late, "one that came now": latest, "view that lost messages": lossy},
    )
    report.check("view: removed", early.stat("num_evicted"), late.stat("num_evicted"))
    print(f"\n{judge.num_messages} messages, {judge.num_stored} stored, {judge.num_removed} removed; {judge.encodings}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="CONFIG_DIR", nargs="?", default="")
    parser.add_argument("--vllm-python", default=sys.executable, metavar="PYTHON", help="a command that has vLLM")
    parser.add_argument("--octavo", action="store_true", help="try it on our own server, and a tiny model")
    parser.add_argument("--more", nargs="*", default=[], help="for the server")
    parser.add_argument("--timeout-s", type=float, default=400.0, help="for the server to start")
    options = parser.parse_args()
    if not options.model and not options.octavo:
        parser.error("CONFIG_DIR is missing")
    report = Report()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = Server(options, free_ports(3), Path(folder) / "server.log")
        stack.callback(server.close)
        judge = Judge(server.endpoint)  # before the first event
        server.wait(options.timeout_s)
        check_all(report, server, judge, stack)
    print(f"{report.num_wrong} differences" if report.num_wrong else "all as it should be")
    sys.exit(report.num_wrong > 0)


if __name__ == "__main__":
    main()
