"""How the scripts here measure: the best of several runs, because other work on a machine only ever adds time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

Run = Callable[[], object]


def start(doc: str | None) -> None:
    """Read `--threads N` and fix the seed: what every script here begins with."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    print(f"{f'{torch.get_num_threads()} threads':40}{'cpu us':>10}{'reference us':>14}")


def best_us(run: Run, repeats: int = 20) -> float:
    """Microseconds of the fastest of `repeats` runs, after one that is not counted."""
    run()
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best * 1e6


def compare(case: str, fast: Run, slow: Run, *, num_bytes: int = 0) -> None:
    """One line: the fast path, the reference, and, given the bytes it has to read, the fast path's rate."""
    fast_us, slow_us = best_us(fast), best_us(slow, repeats=5)
    rate = f"{num_bytes / fast_us / 1e3:>8.1f} GB/s" if num_bytes else ""
    print(f"{case:40}{fast_us:>10.1f}{slow_us:>14.1f}{rate}", flush=True)
