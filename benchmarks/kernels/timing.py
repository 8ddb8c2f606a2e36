"""How the scripts here measure: the best of several runs, because other work on a machine only ever adds time."""

from __future__ import annotations

import time
from collections.abc import Callable


def best_us(run: Callable[[], object], repeats: int = 20) -> float:
    """Microseconds of the fastest of `repeats` runs, after one that is not counted."""
    run()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best * 1e6
