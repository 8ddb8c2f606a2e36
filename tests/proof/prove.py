"""The core's long proofs: `python -m tests.proof.prove [--steps 1000000] [--seed 0] [--jobs 2]`.

1. Random workloads, each plain, with drafts, with window groups, with both, with states, and with window groups and
   states, until the oracle has checked `--steps` steps. A table has the events that they reached.
2. The small worlds, all of them.
3. Every test marked slow.

Exit code 1 on any failure, with the failing seed or world and the command to run it again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count, islice, product
from typing import Any, NamedTuple

from tests.core import test_small_worlds as small
from tests.proof.workloads import covering, run

SEEDS_A_JOB = 40
SHAPES_A_JOB = 20
NO_TESTS = 5
"""Exit code of pytest when it collected no test."""


class Report(NamedTuple):
    """Totals of a job, and its failures as (command to reproduce, error)."""

    totals: Counter[str]
    failures: list[tuple[str, str]]


def play_seeds(first: int) -> Report:
    totals: Counter[str] = Counter()
    failures = []
    with covering(totals):
        for seed in range(first, first + SEEDS_A_JOB):
            for groups, more in product(("", " --groups"), ("", " --drafts", " --states")):
                try:
                    options = {"speculates": "drafts" in more, "groups": bool(groups), "states": "states" in more}
                    run(seed, totals, **options)
                except Exception as error:
                    again = f"python -m tests.proof.workloads {seed} {seed + 1}{groups}{more}"
                    failures.append((again, f"{type(error).__name__}: {error}"))
    return Report(totals, failures)


def play_shapes(jobs: list[tuple[tuple[small.Shape, ...], dict[str, Any]]]) -> Report:
    totals: Counter[str] = Counter()
    failures = []
    for shapes, options in jobs:
        try:
            small.play_all(shapes, totals, **options)
        except Exception as error:
            again = f'python -c "from tests.core.test_small_worlds import *; play({error.args[-1]})"'
            failures.append((again, f"{type(error).__name__}: {error}"))
    return Report(totals, failures)


def run_jobs(
    do: Callable[[Any], Report], jobs: Iterator[Any], num_jobs: int, enough: Callable[[Counter[str]], bool], what: str
) -> Report:
    """Run jobs in processes until all are done, `enough` holds, or one fails."""
    totals: Counter[str] = Counter()
    failures: list[tuple[str, str]] = []
    begin = last_report = time.monotonic()
    with ProcessPoolExecutor(num_jobs) as pool:
        busy: set[Future[Report]] = {pool.submit(do, job) for job in islice(jobs, 2 * num_jobs)}
        while busy:
            done, busy = wait(busy, return_when=FIRST_COMPLETED)
            for future in done:
                report = future.result()
                totals += report.totals
                failures += report.failures
                if not failures and not enough(totals):
                    busy |= {pool.submit(do, job) for job in islice(jobs, 1)}
            if (now := time.monotonic()) - last_report > 5 or not busy:
                last_report = now
                amount = sum(n for name, n in totals.items() if name.startswith(what))
                print(f"  {amount:>10,} {what.strip()}, {len(failures)} failures, {now - begin:4.0f} s", flush=True)
    return Report(totals, failures)


def print_report(report: Report) -> None:
    for name, n in sorted(report.totals.items()):
        print(f"{n:>14,}  {name}")
    for again, error in report.failures[:5]:
        print(f"FAILED {error}\n    {again}")


def batches(jobs: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while batch := list(islice(jobs, size)):
        yield batch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps to check with the oracle")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first workload")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", choices=("steps", "worlds", "slow"), help="one of the three proofs")
    args = parser.parse_args()
    bad = False
    if args.only in (None, "steps"):
        print(f"== {args.steps:,} steps of random workloads under the oracle", flush=True)
        seeds = count(args.seed, SEEDS_A_JOB)
        report = run_jobs(play_seeds, seeds, args.jobs, lambda done: done["steps"] >= args.steps, "steps")
        print_report(report)
        leaked = sum("leaked" in error for _, error in report.failures)
        print(
            f"{report.totals['steps']:,} steps, {report.totals['slots read']:,} slots read again: "
            f"{len(report.failures) - leaked} wrong, {leaked} leaked"
        )
        bad |= bool(report.failures)
    if args.only in (None, "worlds"):
        print("== small worlds, exhaustively", flush=True)
        jobs = batches(small.everything(), SHAPES_A_JOB)
        report = run_jobs(play_shapes, jobs, args.jobs, lambda _: False, "worlds")
        print_report(report)
        print(f"{report.totals['worlds']:,} small worlds: {len(report.failures)} wrong")
        bad |= bool(report.failures)
    if args.only in (None, "slow"):
        print("== tests marked slow", flush=True)
        code = subprocess.call([sys.executable, "-m", "pytest", "-m", "slow", "-n", str(args.jobs), "-q"])
        bad |= code not in (0, NO_TESTS)
    print("FAILED" if bad else "proved")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
