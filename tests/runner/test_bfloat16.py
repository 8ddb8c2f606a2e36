"""Tokens in bfloat16 compared with the float32 reference: `ModelRunner` on a CPU. tests/gpu does it on a GPU.

Planted bugs prove that the check notices errors; see `tests.proof.margins`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from octavo import LLM
from octavo.kernels import reference
from octavo.kernels.cpu import ops as cpu
from tests.models.tiny import KINDS
from tests.proof import margins as m
from tests.proof.ways import WAYS, runs
from tests.runner.stub_platform import use_stub_platform

Models = Callable[[str], tuple[str, m.Judge]]
FEW = ("graphs", "chunks", "swap")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """kind -> (directory of its checkpoint, judge of its tokens), made once."""
    made: dict[str, tuple[str, m.Judge]] = {}

    def get(kind: str) -> tuple[str, m.Judge]:
        if kind not in made:
            directory = tmp_path_factory.mktemp("rounded") / kind
            m.make_rounded_checkpoint(kind, directory)
            made[kind] = str(directory), m.Judge(directory)
        return made[kind]

    return get


@pytest.mark.parametrize("ways", [FEW, pytest.param(WAYS.keys() - FEW, marks=pytest.mark.proof)], ids=["few", "rest"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_tokens_equal_the_reference_except_near_ties(models: Models, kind: str, ways: Iterable[str]) -> None:
    directory, judge = models(kind)
    for way in ways:
        options = m.SMALL | WAYS[way]
        with use_stub_platform(LLM(directory, device="cpu", **options), fake_graphs=way != "eager") as llm:
            for outputs in runs(llm, way, m.SMALL_PROMPTS, m.GREEDY):
                judge.check(outputs, way)


@pytest.mark.parametrize("kind", list(KINDS))
def test_most_positions_have_one_acceptable_token(models: Models, kind: str) -> None:
    """Also for random prompts; else the margin would accept wrong tokens."""
    directory, judge = models(kind)
    with use_stub_platform(LLM(directory, device="cpu", **m.SMALL)) as llm:
        gaps = judge.gaps(llm.generate(m.SMALL_PROMPTS, m.GREEDY, use_tqdm=False))
    assert torch.cat([g.second for g in gaps]).lt(m.MARGIN).float().mean() < 0.4
    logits = torch.cat(judge.logits(m.SMALL_PROMPTS))  # [num_tokens, vocab_size]
    assert float(logits.std(1).mean()) == pytest.approx(m.SPREAD, rel=0.15)
    best, second = logits.topk(2).values.T
    assert (best - second).lt(m.MARGIN).float().mean() < 0.4


def test_the_large_model_of_the_gpu_tests(tmp_path: Path) -> None:
    """With preemption and prefill chunks."""
    judge = m.Judge(m.make_rounded_checkpoint(m.LARGE_KIND, tmp_path / "large", **m.LARGE_SIZES))
    options = m.LARGE | m.LARGE_WAYS["recompute"] | m.LARGE_WAYS["chunks"]
    with use_stub_platform(LLM(str(tmp_path / "large"), device="cpu", **options)) as llm:
        for outputs in runs(llm, "recompute", m.LARGE_PROMPTS, m.GREEDY):
            judge.check(outputs)


@pytest.mark.parametrize(
    ("kind", "plant"),
    [*((kind, m.lose_value_block) for kind in KINDS), *((kind, m.shift_row) for kind in ("qwen2", "opt"))],
)
def test_a_planted_bug_is_noticed(models: Models, kind: str, plant: m.Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, judge = models(kind)
    with use_stub_platform(LLM(directory, device="cpu", **m.SMALL)) as llm:
        plant(monkeypatch, cpu, reference)
        outputs = llm.generate(m.SMALL_PROMPTS, m.GREEDY, use_tqdm=False)
    with pytest.raises(AssertionError, match="below the best"):
        judge.check(outputs)
