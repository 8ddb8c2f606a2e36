"""What watching costs the engine's host: a scheduler over a device that answers at once, watched and not, by turns.

    python benchmarks/view.py [--rounds 7]

Prints microseconds a token of scheduling alone, what being watched adds to it, and what share of an engine's
time that is at 20,000 tokens a second; then the time of a snapshot of a million blocks.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import msgspec

from octavo.core.kv_cache import KVCache
from octavo.core.plan import StepResult
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.engine.stats import EngineStats
from octavo.view.frames import Frame
from octavo.view.live import SHARE
from octavo.view.picture import Picture
from octavo.view.tap import Tap

NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT, BLOCK_SIZE = 256, 256, 1024, 16
RATE = 20_000
"""Tokens a second of the engine whose time is shared out."""
FRAMES_A_SECOND = 10


def run(watched: bool) -> tuple[float, int, int]:
    """Processor seconds, tokens generated and frames."""
    cache = KVCache(NUM_REQUESTS * 80, BLOCK_SIZE, num_rows=NUM_REQUESTS)
    scheduler = Scheduler(cache, max_num_batched_tokens=8192)
    for i in range(NUM_REQUESTS):
        prompt = [(i * 7 + j) % 1000 for j in range(NUM_PROMPT)]
        scheduler.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True)))
    scheduler.events.subscribe(EngineStats())  # an engine always counts its steps
    tap = Tap(scheduler)
    if watched:
        tap.frame()
    num_tokens = num_frames = 0
    due = RATE / FRAMES_A_SECOND
    begin = time.process_time()
    while scheduler.has_work:
        plan = scheduler.schedule()
        num_tokens += sum(plan.samples)
        scheduler.update(plan, StepResult([[1] * n for n in plan.samples]))
        if watched and num_tokens >= due:
            frame = tap.frame(tap.last)
            num_frames += 1
            due = num_tokens + RATE * max(1 / FRAMES_A_SECOND, SHARE * frame.cost_s if frame is not None else 0)
            if frame is not None:
                msgspec.msgpack.encode(frame)
    return time.process_time() - begin, num_tokens, num_frames


def million() -> dict[str, float]:
    """Seconds for a snapshot of a million blocks, all of them in use."""
    cache = KVCache(1_000_000, BLOCK_SIZE, num_rows=16)
    scheduler = Scheduler(cache, max_num_batched_tokens=1 << 20)
    for i in range(15):
        scheduler.add(Request(f"r{i}", [i] * 1_000_000, SamplingParams(max_tokens=1)))
    while scheduler.waiting or scheduler.running[-1].sequences[0].num_computed < 1_000_000:
        plan = scheduler.schedule()  # whose results never come: the requests stay
        assert plan
    gc.collect()
    gc.freeze()  # as a server does
    tap = Tap(scheduler)
    times = {}
    begin = time.perf_counter()
    snapshot = tap.frame()
    times["s, made by the engine"] = time.perf_counter() - begin
    begin = time.perf_counter()
    data = msgspec.msgpack.encode(snapshot)
    frame = msgspec.convert(msgspec.msgpack.decode(data), Frame)  # type: ignore[arg-type]
    picture = Picture(frame)
    times["s, to the other process"] = time.perf_counter() - begin
    begin = time.perf_counter()
    text = msgspec.json.encode(picture.snapshot())
    times["s, to JSON for a viewer"] = time.perf_counter() - begin
    times["MB of JSON"] = len(text) / 1e6
    times["blocks in use"] = picture.num_used
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
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
    for name, value in million().items():
        print(f"a million blocks      {value:,.3f} {name}")


if __name__ == "__main__":
    main()
