"""The checks of benchmarks/kernels/gpu_check.py: every kernel in random sizes, compared with the reference.

They run in parallel processes, since each case compiles its own kernels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from benchmarks.kernels.gpu_check import all_checks, run_check

CASES = list(all_checks())
KINDS = {"far blocks": 1, "replay": 1, "small": 24, "long": 30, "attention": 72, "packs": 30}
"""kind -> number of its cases."""


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(min(10, max(2, (os.cpu_count() or 2) // 2)), mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("kind", list(KINDS))
def test_random_cases_equal_the_reference(pool: ProcessPoolExecutor, kind: str) -> None:
    chosen = [(name, case) for name, case in CASES if kind == ("long" if case.get("kind") == "long" else name)]
    assert len(chosen) == KINDS[kind] and len(CASES) == sum(KINDS.values()) == 158
    lines = list(pool.map(run_check, *zip(*chosen, strict=True)))
    wrong = [json.dumps(line) for line in lines if not line["ok"]]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(lines)}", *wrong])
