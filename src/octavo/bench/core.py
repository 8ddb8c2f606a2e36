"""`octavo bench core`: the host cost of the core, `schedule` + `update` without a device.

All requests decode, with prefix cache, statistics and event log, and with the engine's garbage collection. Prompts
differ, and their lengths are spread over a block, so each step allocates and seals its share of blocks. A round has as
many steps as a block has tokens. Figures are medians of the rounds' means. The longest step is measured in processor
time, which includes garbage collection and growing tables but no other process. Loads no torch.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.engine.gc_control import GCPause
from octavo.engine.stats import EngineStats
from octavo.params.sampling_params import SamplingParams
from octavo.view.recording.event_log import EventLog

BLOCK_SIZE = 16
CASES = (  # requests, context, window
    (1, 1024, 1),
    (256, 1024, 1),
    (256, 1024, 8),
    (1024, 1024, 1),
    (1024, 1024, 8),
    (32, 1024, 1),
    (32, 32768, 1),
    (256, 32768, 1),
    (256, 32768, 8),
)
NUM_ROUNDS = 9
LARGE_POOL = 1_000_000
"""Blocks of the pool whose creation is timed."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost for `requests` that decode `window` tokens per step at `context` tokens each. Times in microseconds."""

    requests: int
    context: int
    window: int
    us_per_step: float
    us_per_request_step: float
    us_per_token: float
    longest_step_us: float


def measure(requests: int, context: int, window: int, num_rounds: int = NUM_ROUNDS) -> Cost:
    """Measure one case. The first round, which includes prefill, does not count."""
    output = (num_rounds + 2) * BLOCK_SIZE * window
    num_blocks = requests * ((context + output) // BLOCK_SIZE + 2)
    cache = KVCacheManager(num_blocks, BLOCK_SIZE, num_rows=requests)
    cache.events.subscribe(EngineStats())
    cache.events.subscribe(EventLog())
    scheduler = Scheduler(cache, max_num_batched_tokens=1 << 40, decode_window=window)
    params = SamplingParams(max_tokens=output)
    for i in range(requests):
        tokens = range(i, i + context - i % BLOCK_SIZE)
        scheduler.add(Request(str(i), tokens, params, stop_ids=(1 << 30,)))
    column = array("i", [7] * window)
    rounds: list[float] = []
    longest = 0.0
    with GCPause() as garbage:
        _round(scheduler, column, garbage)  # prefill and first use
        gc.collect()
        for _ in range(num_rounds):
            took = _round(scheduler, column, garbage)
            rounds.append(sum(wall for wall, _ in took) / BLOCK_SIZE)
            longest = max(longest, *(cpu for _, cpu in took))
    us = statistics.median(rounds) * 1e6
    return Cost(requests, context, window, us, us / requests, us / requests / window, longest * 1e6)


def _round(scheduler: Scheduler, column: array[int], garbage: GCPause) -> list[tuple[float, float]]:
    """(wall time, processor time) of each step of a round in seconds, without creating the result."""
    took = []
    for _ in range(BLOCK_SIZE):
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        step = scheduler.schedule()
        planned, planned_cpu = time.perf_counter(), time.thread_time()
        result = StepResult([column[:n] for n in step.plan.num_sampled])
        landed, landed_cpu = time.perf_counter(), time.thread_time()
        scheduler.update(step, result)
        garbage.collect_young()
        end, end_cpu = time.perf_counter(), time.thread_time()
        took.append((planned - begin + end - landed, planned_cpu - begin_cpu + end_cpu - landed_cpu))
    return took


def time_start() -> float:
    """Seconds to create a large pool; the best of three."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        cache = KVCacheManager(LARGE_POOL, BLOCK_SIZE, num_rows=256)
        times.append(time.perf_counter() - begin)
        assert cache.pool.num_free == LARGE_POOL
    return min(times)


def main(cases: Sequence[tuple[int, int, int]] = CASES, *, as_json: bool = False) -> list[Cost]:
    """Measure all cases and print a table, or one JSON object per line."""
    costs = []
    for case in cases:
        costs.append(measure(*case))
        if as_json:
            print(json.dumps({k: round(v, 4) for k, v in asdict(costs[-1]).items()}), flush=True)
    start_s = time_start()
    if as_json:
        print(json.dumps({"num_blocks": LARGE_POOL, "start_s": round(start_s, 4)}), flush=True)
    else:
        _print_table(costs, start_s)
    return costs


def _print_table(costs: Sequence[Cost], start_s: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="schedule + update, microseconds", title_justify="left")
    for name in ("requests", "context", "window", "per step", "per request and step", "per token", "longest step"):
        table.add_column(name, justify="right")
    for c in costs:
        table.add_row(
            f"{c.requests:,}",
            f"{c.context:,}",
            str(c.window),
            f"{c.us_per_step:,.1f}",
            f"{c.us_per_request_step:.3f}",
            f"{c.us_per_token:.3f}",
            f"{c.longest_step_us:,.0f}",
        )
    console = Console()
    console.print(table)
    console.print(f"a pool of {LARGE_POOL:,} blocks starts in {start_s:.3f} s")
