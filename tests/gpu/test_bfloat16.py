"""The engine on a GPU in bfloat16 gives the tokens of float32 weights, except near-ties (tests/proof/margins.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.kernels.triton import ops as cuda
from tests.models.tiny import KINDS
from tests.proof import margins as m
from tests.proof.ways import WAYS, runs

ON_HOPPER = torch.cuda.get_device_capability() == (9, 0)
HOPPER_KERNELS = (
    "octavo.kernels.triton.linear.skinny_hopper.launch",
    "octavo.kernels.triton.linear.qkv_hopper.launch",
    "octavo.kernels.triton.attention.prefill_hopper.hopper_prefill_attention",
)


@pytest.mark.parametrize("kind", list(KINDS))
def test_tokens_equal_the_reference_except_near_ties(kind: str, tmp_path: Path) -> None:
    judge = m.Judge(m.make_rounded_checkpoint(kind, tmp_path / kind))
    for way, options in WAYS.items():
        with LLM(str(tmp_path / kind), device="cuda", **(m.SMALL | options)) as llm:
            for outputs in runs(llm, way, m.SMALL_PROMPTS, m.GREEDY):
                judge.check(outputs, way)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of calls of each Hopper kernel."""
    counts: Counter[str] = Counter()

    def counting(path: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[path] += 1
            return launch(*args, **kwargs)

        return counted

    for path in HOPPER_KERNELS:
        module, name = path.rsplit(".", 1)
        monkeypatch.setattr(path, counting(path, getattr(import_module(module), name)))
    return counts


def test_tokens_of_a_large_model_equal_the_reference(tmp_path: Path, launches: Counter[str]) -> None:
    """Uses Hopper's kernels for small-batch linear layers, QKV projection and long queries. Their calls are counted in
    eager mode, without captures and precompilation."""
    judge = m.Judge(m.make_rounded_checkpoint(m.LARGE_KIND, tmp_path / "large", **m.LARGE_SIZES))
    for way, options in m.LARGE_WAYS.items():
        with LLM(str(tmp_path / "large"), device="cuda", **(m.LARGE | options)) as llm:
            launches.clear()
            for outputs in runs(llm, way, m.LARGE_PROMPTS, m.GREEDY):
                judge.check(outputs, way)
        if way == "eager" and ON_HOPPER:
            linear, qkv, prefill = (launches[path] for path in HOPPER_KERNELS)
            layers = m.LARGE_SIZES["num_hidden_layers"]
            assert linear == 3 * qkv and qkv >= layers * (m.GREEDY.max_tokens - 1) and prefill >= layers, launches


@pytest.mark.parametrize("plant", m.PLANTS)
def test_a_planted_bug_is_noticed(tmp_path: Path, plant: m.Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = m.Judge(m.make_rounded_checkpoint(m.LARGE_KIND, tmp_path / "large", **m.LARGE_SIZES))
    plant(monkeypatch, cuda, cuda)
    with LLM(str(tmp_path / "large"), device="cuda", **m.LARGE, enforce_eager=True) as llm:
        outputs = llm.generate(m.LARGE_PROMPTS, m.GREEDY, use_tqdm=False)
    with pytest.raises(AssertionError, match="below the best"):
        judge.check(outputs)
