"""Checks `octavo view --attach` against a running vLLM: the view must match vLLM's KV events and the sent prompts.

    python tests/gpu/attach_vllm.py CONFIG_DIR [--vllm-python PYTHON]
    python tests/gpu/attach_vllm.py --octavo

CONFIG_DIR holds a config.json; weights are random and prompts are token ids. The script starts a server with a KV pool
so small that it evicts blocks. Four clients read its KV events: a plain subscriber, the reference; a view attached from
the start; a view attached later, which reads all events from the replay socket; and a view that loses every third
message. The server's /metrics and the prompts are checked, too. With --octavo the server is Octavo's, which sends the
same format: so the script also runs without vLLM.

It is not a pytest: it needs vLLM and a minute to start it. Exit status 1 if anything differs.
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
from octavo.view.live.queries import GetFrame
from octavo.view.live.state import PoolState

ROOT = Path(__file__).parents[2]
NUM_REQUESTS, NUM_GROUPS, NUM_SHARED = 60, 4, 160
"""Requests of each phase, in groups that share their first tokens."""
NUM_BLOCKS, SIZE = 640, 16
OUTPUT, LARGEST = 4, 96
MAX_WAIT_S = 20.0

Shape = Counter[tuple[int, int]]
"""Shape of a forest of blocks: (depth, number of children) -> number of blocks."""


def shape_of(parents: dict[Any, Any]) -> Shape:
    """parents: block -> its parent block. A root has None, or a parent that is not in `parents`."""
    children = Counter(p for p in parents.values() if p in parents)
    found: Shape = Counter()
    for block in parents:
        depth, before = 0, parents[block]
        while before in parents:
            depth, before = depth + 1, parents[before]
        found[depth, children[block]] += 1
    return found


# -- clients -----------------------------------------------------------------------------------------------------------


class Subscriber:
    """The reference: a subscriber without Octavo's code, which decodes events as vLLM's documentation does."""

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
                if self.num_messages and number != self.last + 1:  # the first one may have any number
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


class ViewClient:
    """The state that a view shows, built from its frames."""

    def __init__(self) -> None:
        self.state: PoolState | None = None

    def apply(self, frame: Frame) -> None:
        if self.state is None:
            assert isinstance(frame, Snapshot)
            self.state = PoolState(frame)
        else:
            self.state.apply(frame)

    def update(self) -> None:
        """Fetch new frames. Does nothing if frames arrive by themselves."""

    @property
    def parents(self) -> dict[int, int]:
        state = self.state
        if state is None:
            return {}
        sealed = np.nonzero(state.words & SEALED_BIT)[0]
        return {int(state.seal_ids[b]): int(state.parent_ids[b]) for b in sealed}

    def stat(self, name: str) -> Any:
        return None if self.state is None else self.state.stats[name]


class OctavoView(ViewClient):
    """`octavo view --attach` in a separate process, and a reader of its event stream as in a browser."""

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
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(url) as response:
            for line in response:
                if line.startswith(b"data: {") and b'"kind"' in line:
                    frame = msgspec.json.decode(line[6:], type=Frame)
                    with self._lock:
                        self.apply(frame)

    @property
    def parents(self) -> dict[int, int]:
        with self._lock:
            return super().parents

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


class LossyView(ViewClient):
    """The view's `ExternalPool` in this process, on a socket that drops every third message while `is_lossy`."""

    def __init__(self, endpoint: str, replay: str) -> None:
        super().__init__()
        self.attached = ExternalPool(endpoint, replay=replay)
        self._socket, self.attached._socket = self.attached._socket, self  # type: ignore[assignment]
        self.is_lossy, self.num_received, self.num_dropped = True, 0, 0

    def recv_multipart(self, flags: int) -> list[bytes]:
        while True:
            parts = self._socket.recv_multipart(flags)
            self.num_received += 1
            if self.num_received % 3 or not self.is_lossy:
                return parts
            self.num_dropped += 1

    def update(self) -> None:
        after = "" if self.state is None else f"{self.state.epoch}:{self.state.frame}"
        frame = asyncio.run(self.attached.query(GetFrame(after)))
        if frame is not None:
            self.apply(frame)

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
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def tiny_model(folder: Path) -> str:
    """A model for Octavo's server, which needs a tokenizer."""
    sys.path.insert(0, str(ROOT))
    from tests.engine.models import make_talking_checkpoint

    return str(make_talking_checkpoint(folder, max_position_embeddings=2048))


class Server:
    """The server process.

    ports   of HTTP, the event socket and the replay socket. vLLM binds only addresses with a star
    """

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
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.base + "/health", timeout=1):
                return
            time.sleep(0.5)
        raise SystemExit("the server did not start:\n" + self.log.read_text()[-6000:])

    def complete(self, prompt: list[int]) -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.base + "/v1/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                usage = json.load(response)["usage"]
        except urllib.error.HTTPError as error:
            text = error.read()[:2000].decode("utf-8", "replace")
            raise SystemExit(f"{error}: {text}\n{self.log.read_text()[-4000:]}") from None
        assert usage["prompt_tokens"] == len(prompt), usage

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples; with `label`, the number in that label."""
        with urllib.request.urlopen(self.base + "/metrics", timeout=5) as response:
            text = response.read().decode()
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


# -- requests ----------------------------------------------------------------------------------------------------------


def make_prompts(rnd: random.Random, min_blocks: int, max_blocks: int) -> list[list[int]]:
    """Prompts of shared prefixes and random tails. The first of each group comes first, to fill the prefix cache. The
    output does not fill a tail's last block."""
    heads = [[rnd.randrange(LARGEST) for _ in range(NUM_SHARED)] for _ in range(NUM_GROUPS)]
    prompts = []
    for i in range(NUM_REQUESTS):
        num_tail = SIZE * rnd.randint(min_blocks, max_blocks) + rnd.randint(1, SIZE - OUTPUT)
        prompts.append(heads[i % NUM_GROUPS] + [rnd.randrange(LARGEST) for _ in range(num_tail)])
    return prompts


def blocks_of(prompts: list[list[int]]) -> dict[tuple[int, ...], tuple[int, ...] | None]:
    """The prefix tree of these prompts in an empty KV pool: tokens to the end of a full block -> its parent's."""
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
    """Prints a table of checks, with found and expected values."""

    def __init__(self) -> None:
        self.num_wrong = 0

    def title(self, text: str) -> None:
        print(f"\n{text}\n{'':<58}{'found':>14}{'expected':>14}", flush=True)

    def check(self, name: str, found: Any, expected: Any) -> None:
        is_equal = found == expected
        self.num_wrong += not is_equal
        print(f"{name:<58}{_short(found):>14}{_short(expected):>14}{'' if is_equal else '   WRONG'}", flush=True)


def _short(value: Any) -> str:
    return f"{sum(value.values())} nodes" if isinstance(value, Counter) else f"{value:g}" if value is not None else "-"


def wait_until_equal(reference: Subscriber, viewers: list[ViewClient], done: Callable[[], bool] = lambda: True) -> None:
    """Wait until all views have the reference's blocks and no more events arrive, at most MAX_WAIT_S."""
    deadline, quiet_at, before = time.monotonic() + MAX_WAIT_S, time.monotonic(), -1
    while time.monotonic() < deadline:
        reference.read()
        for viewer in viewers:
            viewer.update()
        if reference.num_messages != before:
            before, quiet_at = reference.num_messages, time.monotonic()
        same = all(len(viewer.parents) == len(reference.parents) for viewer in viewers)
        if same and done() and time.monotonic() - quiet_at > 1.5:
            return
        time.sleep(0.05)


def compare(report: Report, reference: Subscriber, named: dict[str, ViewClient]) -> None:
    for name, viewer in named.items():
        parents = viewer.parents
        report.check(f"{name}: blocks shown", len(parents), len(reference.parents))
        report.check(f"{name}: the tree's shape", shape_of(parents), shape_of(reference.parents))
        report.check(f"{name}: messages lost", viewer.stat("num_lost"), 0)
        report.check(f"{name}: messages malformed", viewer.stat("num_malformed"), 0)


def check_all(report: Report, server: Server, reference: Subscriber, stack: contextlib.ExitStack) -> None:
    rnd = random.Random(5)
    addresses = ["--attach", server.endpoint, "--metrics", server.base + "/metrics"]
    early = stack.enter_context(contextlib.closing(OctavoView(*addresses, "--replay-endpoint", server.replay)))
    lossy = stack.enter_context(contextlib.closing(LossyView(server.endpoint, server.replay)))
    wait_until_equal(reference, [early, lossy])

    # Everything fits: the prompts determine the blocks.
    prompts = make_prompts(rnd, 1, 8)
    expected = blocks_of(prompts)
    assert len(expected) + 2 * NUM_REQUESTS < NUM_BLOCKS, len(expected)  # each request has an unfilled block, too
    send(server, prompts)
    num_hits = NUM_SHARED * (NUM_REQUESTS - NUM_GROUPS)
    wait_until_equal(reference, [early, lossy], lambda: server.metric("vllm:prefix_cache_hits_total") >= num_hits)
    late = stack.enter_context(contextlib.closing(OctavoView(*addresses, "--replay-endpoint", server.replay)))
    wait_until_equal(reference, [early, lossy, late])
    report.title(f"{NUM_REQUESTS} requests that fit")
    report.check("events: blocks stored", reference.num_stored, len(expected))
    report.check("events: blocks removed", reference.num_removed, 0)
    report.check("gaps in the sequence numbers", len(reference.gaps), 0)
    report.check("tokens a block", max(reference.block_sizes, default=None), SIZE)
    report.check("metrics: prompt tokens found in the cache", server.metric("vllm:prefix_cache_hits_total"), num_hits)
    num_prompt = sum(map(len, prompts))
    report.check("metrics: prompt tokens looked up", server.metric("vllm:prefix_cache_queries_total"), num_prompt)
    report.check("events: the prefix tree is that of the prompts", shape_of(reference.parents), shape_of(expected))
    compare(report, reference, {"view": early, "view attached late": late, "lossy view": lossy})
    roots = sum(count for (depth, _), count in shape_of(early.parents).items() if depth == 0)
    report.check("view: prompts' first blocks, each once", roots, NUM_GROUPS)
    forks = {depth: count for (depth, children), count in shape_of(early.parents).items() if children > 1}
    report.check("view: forks, at the shared prefixes' ends", forks.get(NUM_SHARED // SIZE - 1, 0), NUM_GROUPS)
    pool = server.metric("vllm:cache_config_info", "num_gpu_blocks")
    report.check("view: blocks of the pool, as /metrics has it", early.stat("num_blocks"), pool)

    # More than fits: blocks are evicted, and the reference knows the rest.
    for _ in range(2):
        send(server, make_prompts(rnd, 4, 16))
    lossy.is_lossy = False
    # One more message: a view that lost the last one notices now.
    server.complete([rnd.randrange(LARGEST) for _ in range(3 * SIZE + 1)])
    wait_until_equal(reference, [early, late, lossy])
    latest = stack.enter_context(contextlib.closing(OctavoView(*addresses, "--replay-endpoint", server.replay)))
    wait_until_equal(reference, [early, late, lossy, latest])
    report.title(f"{2 * NUM_REQUESTS + 1} more, with evictions")
    report.check("gaps in the sequence numbers", len(reference.gaps), 0)
    report.check("blocks were removed", reference.num_removed > 0, True)
    report.check("lossy view: dropped messages", lossy.num_dropped > 0, True)
    compare(
        report,
        reference,
        {"view": early, "view attached late": late, "view attached now": latest, "lossy view": lossy},
    )
    report.check("view: removed", early.stat("num_evicted"), late.stat("num_evicted"))
    counts = f"{reference.num_messages} messages, {reference.num_stored} stored, {reference.num_removed} removed"
    print(f"\n{counts}; {reference.encodings}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="CONFIG_DIR", nargs="?", default="")
    parser.add_argument("--vllm-python", default=sys.executable, metavar="PYTHON", help="Python command with vLLM")
    parser.add_argument("--octavo", action="store_true", help="use Octavo's server and a tiny model")
    parser.add_argument("--more", nargs="*", default=[], help="further options of the server")
    parser.add_argument("--timeout-s", type=float, default=400.0, help="longest start of the server")
    options = parser.parse_args()
    if not options.model and not options.octavo:
        parser.error("CONFIG_DIR is missing")
    report = Report()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = Server(options, free_ports(3), Path(folder) / "server.log")
        stack.callback(server.close)
        reference = Subscriber(server.endpoint)  # before the first event
        server.wait(options.timeout_s)
        check_all(report, server, reference, stack)
    print(f"{report.num_wrong} differences" if report.num_wrong else "no differences")
    sys.exit(report.num_wrong > 0)


if __name__ == "__main__":
    main()
