"""Measures the cost of the live view, in alternating rounds with and without viewers.

    python benchmarks/view.py [scheduler] [million] [engines] [--rounds 7] [--pairs 100]

scheduler   a scheduler with a device that returns at once: microseconds per token of scheduling, the cost that viewers
            add, and its share of an engine's time at 20,000 tokens per second
million     the time of a snapshot of a million blocks
engines     whole engines of `octavo serve`, with three viewers that read /view/events over HTTP, and without: output
            tokens per second, and the engine process's CPU time, which other processes disturb less. One engine runs a
            small model on one CPU core; the other is the tests' oracle, slowed to about 20,000 tokens per second

The engine is always fully loaded; viewers come and go. The order of the two rounds of a pair alternates. Only the half
of the pairs counts in which other processes used the machine least.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from octavo.bench.http_client import HTTPClient
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.engine.stats import EngineStats
from octavo.params.sampling_params import SamplingParams
from octavo.view.live.hub import IDLE_RATIO
from octavo.view.live.messages import Frame
from octavo.view.live.publisher import Publisher
from octavo.view.live.state import PoolState

ROOT = Path(__file__).parents[1]
NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT, BLOCK_SIZE = 256, 256, 1024, 16
RATE = 20_000
"""Tokens a second of the engine whose time is shared out."""
FRAMES_A_SECOND = 10
NUM_VIEWERS = 3
ROUND_S = 1.5


def run(watched: bool) -> tuple[float, int, int]:
    """Processor seconds, tokens generated and frames."""
    cache = KVCacheManager(NUM_REQUESTS * 80, BLOCK_SIZE, num_rows=NUM_REQUESTS)
    scheduler = Scheduler(cache, max_num_batched_tokens=8192)
    for i in range(NUM_REQUESTS):
        prompt = [(i * 7 + j) % 1000 for j in range(NUM_PROMPT)]
        scheduler.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True)))
    scheduler.events.subscribe(EngineStats())  # an engine always counts its steps
    publisher = Publisher(scheduler)
    if watched:
        publisher.frame()
    num_tokens = num_frames = 0
    due = RATE / FRAMES_A_SECOND
    begin = time.process_time()
    while scheduler.has_work:
        step = scheduler.schedule()
        num_tokens += sum(step.plan.num_sampled)
        scheduler.update(step, StepResult([[1] * n for n in step.plan.num_sampled]))
        if watched and num_tokens >= due:
            frame = publisher.frame(publisher.last)
            num_frames += 1
            due = num_tokens + RATE * max(1 / FRAMES_A_SECOND, IDLE_RATIO * frame.cost_s if frame is not None else 0)
            if frame is not None:
                msgspec.msgpack.encode(frame)
    return time.process_time() - begin, num_tokens, num_frames


def million() -> dict[str, float]:
    """Seconds for a snapshot of a million blocks, all of them in use."""
    cache = KVCacheManager(1_000_000, BLOCK_SIZE, num_rows=16)
    scheduler = Scheduler(cache, max_num_batched_tokens=1 << 20)
    for i in range(15):
        scheduler.add(Request(f"r{i}", [i] * 1_000_000, SamplingParams(max_tokens=1)))
    while scheduler.waiting or scheduler.running[-1].sequences[0].num_computed < 1_000_000:
        step = scheduler.schedule()  # whose result never comes: the requests stay
        assert step
    gc.collect()
    gc.freeze()  # as a server does
    publisher = Publisher(scheduler)
    times = {}
    begin = time.perf_counter()
    snapshot = publisher.frame()
    times["s, made by the engine"] = time.perf_counter() - begin
    begin = time.perf_counter()
    data = msgspec.msgpack.encode(snapshot)
    frame = msgspec.convert(msgspec.msgpack.decode(data), Frame)  # type: ignore[arg-type]
    state = PoolState(frame)
    times["s, to the other process"] = time.perf_counter() - begin
    begin = time.perf_counter()
    text = msgspec.json.encode(state.snapshot())
    times["s, to JSON for a viewer"] = time.perf_counter() - begin
    times["MB of JSON"] = len(text) / 1e6
    times["blocks in use"] = state.num_used
    return times


# -- whole engines -----------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """A server, and what is asked of it: so many requests at a time, with prompts and answers of so many tokens.
    `streams`: answers come token by token; at many thousands of tokens a second that would measure the client."""

    name: str
    command: tuple[str, ...]
    num_requests: int
    num_prompt: int
    num_output: int
    streams: bool
    options: dict[str, Any]
    sizes: dict[str, int] = field(default_factory=dict)
    """Of the model."""


ORACLE = (sys.executable, str(ROOT / "tests" / "serve" / "oracle_server.py"))
OCTAVO = (sys.executable, "-m", "octavo.cli.main")
LOADS = (
    Load(
        "a model on the CPU",
        OCTAVO,
        24,
        16,
        200,
        True,
        {"max_num_seqs": 16, "num_gpu_blocks_override": 256, "dtype": "float32"},
        {
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 10,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "max_position_embeddings": 256,
        },
    ),
    Load(
        "the oracle",
        (*ORACLE, json.dumps({"step_s": 0.003})),
        160,
        16,
        200,
        False,
        {"max_num_seqs": 128, "num_gpu_blocks_override": 2048},
    ),
)


@contextlib.contextmanager
def server(load: Load) -> Iterator[tuple[str, int, int]]:
    """Its address, its process, and the engine's."""
    sys.path.insert(0, str(ROOT))
    from tests.engine.models import make_talking_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        model = make_talking_checkpoint(Path(folder), **load.sizes)
        command = [*load.command, "serve", str(model), "--port", "0", "--disable-log-stats", "--device", "cpu"]
        for name, value in load.options.items():
            command += ["--" + name.replace("_", "-"), str(value)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}  # the other core is for the clients
        log = Path(folder) / "log"
        with log.open("w") as err, subprocess.Popen(command, cwd=ROOT, env=env, stderr=err) as process:
            try:
                while not (found := re.search(r"serving on (http://\S+)", log.read_text())):
                    if process.poll() is not None:
                        raise SystemExit(log.read_text())
                    time.sleep(0.05)
                yield found[1].rstrip("/"), process.pid, engine_of(process.pid)
            finally:
                process.terminate()


def engine_of(pid: int) -> int:
    """Of a server's children the one that has worked most; another keeps track of shared memory."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return max((int(child) for task in tasks for child in (task / "children").read_text().split()), key=used_s)


def used_s(pid: int) -> float:
    """Seconds that a process had a processor."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_viewers(address: str, pipe: Connection) -> None:
    """The viewers' process. The first message starts the viewers, and it replies when all have a snapshot. The second
    message stops them, and it replies with the number of events."""

    async def viewer(ready: asyncio.Semaphore, counts: list[int], number: int) -> None:
        host, _, port = address.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET /view/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        while data := await reader.read(1 << 20):
            if b"event: snapshot" in data:
                ready.release()
            counts[number] += data.count(b"event: delta")

    async def viewers() -> list[int]:
        ready, counts = asyncio.Semaphore(0), [0] * NUM_VIEWERS
        tasks = [asyncio.create_task(viewer(ready, counts, number)) for number in range(NUM_VIEWERS)]
        for _ in tasks:
            await ready.acquire()
        pipe.send("ready")
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return counts

    while pipe.recv():
        pipe.send(asyncio.run(viewers()))


class Work:
    """Keeps the load's number of requests running. `num_tokens` counts the output tokens received: as they come in a
    stream, else at the end of a request."""

    def __init__(self, load: Load, address: str) -> None:
        self.load, self.num_tokens = load, 0
        self._client = HTTPClient(address)
        self._tasks = [asyncio.create_task(self._caller(number)) for number in range(load.num_requests)]

    async def _caller(self, number: int) -> None:
        load = self.load
        length = 1 + load.num_output * number // load.num_requests  # so that they do not end together
        while True:
            body = {"max_tokens": length, "ignore_eos": True, "temperature": 0, "stream": load.streams}
            prompt = [3 + (number * 7 + i) % 90 for i in range(load.num_prompt)]
            take = self._count if load.streams else None
            answer = await self._client.post("/v1/completions", msgspec.json.encode(body | {"prompt": prompt}), take)
            assert answer.status == 200, bytes(answer.body)
            if not load.streams:
                self.num_tokens += length
            length = load.num_output

    def _count(self, piece: bytes) -> None:
        self.num_tokens += piece.count(b"data: {")

    async def during(self, seconds: float) -> float:
        """Tokens a second."""
        begin, before = time.perf_counter(), self.num_tokens
        done, _ = await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # it raises
        return (self.num_tokens - before) / (time.perf_counter() - begin)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._client.close()


class Round(NamedTuple):
    """`others`: what processes that are none of ours used of the machine, or of its host."""

    rate: float
    cpu_us: float
    others: float


class Machine:
    """What is used of it by the processes of this benchmark, and by all."""

    def __init__(self, *processes: int) -> None:
        self._processes = processes
        self._begin, self._ours, self._idle = time.perf_counter(), self._used_s(), self._idle_s()

    def others(self) -> float:
        """A share of the machine, since this was made."""
        all_s = (time.perf_counter() - self._begin) * (os.cpu_count() or 1)
        return 1 - (self._used_s() - self._ours + self._idle_s() - self._idle) / all_s

    def _used_s(self) -> float:
        return sum(map(used_s, self._processes))

    def _idle_s(self) -> float:
        idle, waits = Path("/proc/stat").read_text().split()[4:6]
        return (int(idle) + int(waits)) / os.sysconf("SC_CLK_TCK")


async def measured(load: Load, num_pairs: int, address: str, engine: int, pipe: Connection, ours: list[int]) -> None:
    pairs: list[dict[bool, Round]] = []
    events: list[int] = []
    loop, work = asyncio.get_running_loop(), Work(load, address)
    await work.during(2 * ROUND_S)
    for number in range(num_pairs):
        pair = {}
        for watched in (False, True) if number % 2 else (True, False):
            if watched:
                pipe.send(True)
                assert await loop.run_in_executor(None, pipe.recv) == "ready"
            machine, used = Machine(*ours), used_s(engine)
            rate = await work.during(ROUND_S)
            pair[watched] = Round(rate, 1e6 * (used_s(engine) - used) / rate / ROUND_S, machine.others())
            if watched:
                pipe.send(False)
                events += await loop.run_in_executor(None, pipe.recv)
        pairs.append(pair)
    await work.stop()
    pairs.sort(key=lambda pair: max(pair[False].others, pair[True].others))
    quiet = pairs[: (num_pairs + 1) // 2]
    max_others = max(quiet[-1][False].others, quiet[-1][True].others)
    print(
        f"{load.name}: of {num_pairs} pairs of {ROUND_S:g} s the {len(quiet)} in which others used least of the "
        f"machine, at most {max_others:.0%}; {statistics.median(events):.0f} frames a viewer in each"
    )
    for watched in (False, True):
        viewers = f"{NUM_VIEWERS} viewers" if watched else "no viewers"
        rate = statistics.median(pair[watched].rate for pair in quiet)
        each_us = statistics.median(pair[watched].cpu_us for pair in quiet)
        print(f"  {viewers:<12}{rate:>10,.0f} tokens/s{each_us:>10.1f} us of the engine's processor a token")
    for name, column in (("throughput", 0), ("processor", 1)):
        ratios = [pair[True][column] / pair[False][column] for pair in quiet]
        first, middle, third = statistics.quantiles(ratios, n=4)
        whole = sum(pair[True][column] for pair in quiet) / sum(pair[False][column] for pair in quiet)
        print(
            f"  watched     {middle:.4f} x the {name}, half of them in {first:.3f} to {third:.3f}; sums {whole:.4f} x"
        )


def engines(load: Load, num_pairs: int) -> None:
    here, there = multiprocessing.get_context("spawn").Pipe()
    with server(load) as (address, api, engine):
        watcher = multiprocessing.get_context("spawn").Process(target=run_viewers, args=(address, there), daemon=True)
        watcher.start()
        assert watcher.pid is not None
        asyncio.run(measured(load, num_pairs, address, engine, here, [os.getpid(), api, engine, watcher.pid]))
        here.send(None)
        watcher.join()


def scheduling(rounds: int) -> None:
    plain: list[float] = []
    watched: list[float] = []
    for _ in range(rounds):
        seconds, num_tokens, _ = run(False)
        plain.append(1e6 * seconds / num_tokens)
        seconds, num_tokens, num_frames = run(True)
        watched.append(1e6 * seconds / num_tokens)
    more = statistics.median(w - p for w, p in zip(watched, plain, strict=True))
    print(f"scheduling alone      {statistics.median(plain):.3f} us a token, {NUM_REQUESTS} requests")
    print(f"watched               {statistics.median(watched):.3f} us a token, {num_frames} frames")
    print(f"watching              {more:.3f} us a token: {more * RATE / 1e4:.2f} % of the time at {RATE:,} a second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=[], help="scheduler, million, engines; all of them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=100, help="of rounds, of a whole engine")
    options = parser.parse_args()
    what = options.what or ["scheduler", "million", "engines"]
    if "scheduler" in what:
        scheduling(options.rounds)
    if "million" in what:
        for name, value in million().items():
            print(f"a million blocks      {value:,.3f} {name}")
    if "engines" in what:
        for load in LOADS:
            engines(load, options.pairs)


if __name__ == "__main__":
    main()
