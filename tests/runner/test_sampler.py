"""The sampler's edges: rows that are no numbers, and rows of every kind side by side."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from octavo.core.plan import RowSetup
from octavo.core.sampling_params import SamplingParams
from octavo.kernels import cpu, reference
from octavo.runner.sampler import NOT_FINITE, Draw, Sampler

KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.2, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.1),
]


def draw(logits: torch.Tensor, rows: list[int], ops: ModuleType) -> tuple[list[int], list[str]]:
    setups = [RowSetup(i, KINDS[i % len(KINDS)], 100 + i, 0, frozenset()) for i in rows]
    sampler = Sampler(10, 8, ops)
    drawn = sampler.draw(logits[rows].clone(), [Draw(i, setup, 0, 7) for i, setup in enumerate(setups)])
    return drawn.tokens, drawn.errors


@pytest.mark.parametrize("ops", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("whole", [False, True])
def test_a_row_that_is_not_finite_spoils_no_other(ops: ModuleType, bad: float, whole: bool) -> None:
    logits = 3 * torch.randn(10, 50, generator=torch.Generator().manual_seed(0))
    rows = list(range(10))
    wanted, fine = draw(logits, rows, ops)
    assert fine == [""] * 10
    for victim in rows:
        spoilt = logits.clone()
        spoilt[victim, slice(None) if whole else 7] = bad
        tokens, fine = draw(spoilt, rows, ops)
        assert fine == [NOT_FINITE if i == victim else "" for i in rows]
        assert [t for i, t in enumerate(tokens) if i != victim] == [t for i, t in enumerate(wanted) if i != victim]
        assert 0 <= tokens[victim] < 50


def test_huge_but_finite_numbers_are_numbers() -> None:
    logits = torch.full((1, 50), 3e38)
    logits[0, 9] = 3.2e38
    tokens, fine = draw(logits, [0], cpu)
    assert (tokens, fine) == ([9], [""])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = 3 * torch.randn(10, 50, generator=torch.Generator().manual_seed(1))
    together, _ = draw(logits, list(range(10)), cpu)
    assert together == [draw(logits, [i], cpu)[0][0] for i in range(10)]
    assert draw(logits, list(range(9, -1, -1)), cpu)[0] == together[::-1]
