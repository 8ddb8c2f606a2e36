"""The tag check of tests/proof/tags.py on a GPU: its kernels write, copy and swap blocks, and steps overlap."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from octavo import LLM
from octavo.runner.platform import CudaPlatform
from tests.models.tiny import make_tiny_checkpoint
from tests.proof import tags as t
from tests.runner.test_tags import CASES, OPTIONS, PLANTS, Plant, check_notices

ON_GPU = {**OPTIONS, "device": "cuda", "gpu_memory_utilization": 0.3}


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", list(CASES))
def test_every_slot_that_a_pass_reads_belongs_to_its_sequence(
    tmp_path: Path, case: str, dtype: str, graphs: bool
) -> None:
    model = str(make_tiny_checkpoint("llama", tmp_path / "llama"))
    seen: Counter[str] = Counter()
    with LLM(model, **(ON_GPU | CASES[case] | {"dtype": dtype, "enforce_eager": True})) as llm:
        tags = t.tag(llm, CudaPlatform(), graphs=graphs)
        for seed in range(24):
            outputs, events = t.serve(llm, seed)
            assert outputs
            seen += events
        assert tags.check() > 50_000 and tags.num_lost > 300
        stats = llm.engine.scheduler.stats()
    assert stats.num_hits and stats.num_copied and seen["Preempted"] and seen["Evicted"]
    assert bool(stats.num_swapped_out and stats.num_swapped_in) == (case != "recompute")


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_noticed(tmp_path: Path, plant: Plant) -> None:
    check_notices(
        str(make_tiny_checkpoint("llama", tmp_path / "llama")), plant, CudaPlatform(), **ON_GPU, enforce_eager=True
    )
