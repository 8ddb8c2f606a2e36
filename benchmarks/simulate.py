"""Speed of the simulator on one core, with 100,000 requests of ShareGPT-like lengths.

    python benchmarks/simulate.py [--requests N] [--profile]

`--profile` prints a profile of a tenth of the requests instead.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time

from octavo.config import EngineArgs
from octavo.simulate import traces
from octavo.simulate.devices import find_device
from octavo.simulate.models import find_model
from octavo.simulate.simulation import Records, SimConfig, simulate


def run(num: int, rate: float, window: int) -> Records:
    args = EngineArgs(model="llama-3.1-8b", decode_window=window)
    setup = SimConfig(find_model("llama-3.1-8b"), find_device("h200"), args)
    return simulate(setup, traces.from_lengths(traces.sharegpt_like(num), traces.poisson(rate)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=30.0, help="requests per second, for Llama 3.1 8B on one H200")
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for window in options.windows:
        if options.profile:
            profile = cProfile.Profile()
            profile.runcall(run, options.requests // 10, options.rate, window)
            pstats.Stats(profile).sort_stats("tottime").print_stats(16)
            continue
        begin, began_cpu = time.perf_counter(), time.process_time()
        records = run(options.requests, options.rate, window)
        wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - began_cpu
        tokens = int(records.column("num_output").sum())
        mean = tokens / records.num_steps
        print(
            f"window {window}: {len(records):,} requests, {records.num_steps:,} steps, {mean:.0f} tokens a step: "
            f"{wall_s:.0f} s ({cpu_s:.0f} s of one core), {wall_s / tokens * 1e6:.2f} us a token",
            flush=True,
        )


if __name__ == "__main__":
    main()
