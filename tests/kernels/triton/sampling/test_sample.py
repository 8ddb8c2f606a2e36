"""Sampling against the reference."""

from __future__ import annotations

import math
import random
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels import reference
from octavo.kernels.metadata import SamplingTensors
from octavo.kernels.triton import ops as cuda
from tests.kernels.pool import settings_of
from tests.kernels.slices import decide, sliced_logits, sliced_params
from tests.kernels.triton.device import DEVICE, INTERPRETED


def make_params(device: str = DEVICE, **changes: list[Any]) -> SamplingTensors:
    """Greedy rows, random rows, and each filter alone and combined."""
    columns: dict[str, list[Any]] = {
        "temperature": [0.0, 1.0, 0.6, 0.8, 1.3, 0.7, 1.0, 2.0],
        "top_k": [0, 0, 3, 0, 50, 0, 1, 7],
        "top_p": [1.0, 1.0, 1.0, 0.9, 0.8, 0.3, 1.0, 0.5],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.02, 0.1, 0.0, 0.3],
        "seed": [random.getrandbits(64) - (1 << 63) for _ in range(8)],
        "sample_index": list(range(8)),
        "position": [random.randrange(1 << 20) for _ in range(8)],
    }
    return SamplingTensors.from_lists(**(columns | changes), device=device)


def on_cpu(params: SamplingTensors) -> SamplingTensors:
    values = {f.name: getattr(params, f.name) for f in fields(SamplingTensors)}
    return SamplingTensors(**{k: v.cpu() if isinstance(v, Tensor) else v for k, v in values.items()})


@pytest.mark.parametrize("kind", ["flat", "peaked", "equals"])
@pytest.mark.parametrize("vocab", [5, 300, 5003] if INTERPRETED else [5, 300, 5003, 151_936])
def test_tokens_match_the_reference(vocab: int, kind: str) -> None:
    different = total = 0
    for _ in range(1 if INTERPRETED else 20):
        logits = torch.randn(8, vocab) * {"flat": 0.5, "peaked": 8.0, "equals": 2.0}[kind]
        if kind == "equals":
            logits = logits.round()
        params = make_params()
        actual = cuda.sample(logits.to(DEVICE), params).cpu()
        different += int((actual != reference.sample(logits, on_cpu(params))).sum())
        total += 8
    assert different <= total // 100  # two scores may be within rounding of each other


def test_float16_logits_with_strided_rows() -> None:
    logits = torch.randn(8, 1000).half()
    wide = torch.zeros(8, 1500, dtype=torch.float16)
    wide[:, :1000] = logits
    params = make_params()
    expected = reference.sample(logits.float(), on_cpu(params))
    assert torch.equal(cuda.sample(wide.to(DEVICE)[:, :1000], params).cpu(), expected)


def test_only_rows_with_non_finite_logits_are_marked() -> None:
    logits = torch.randn(8, 5003)
    expected = reference.sample(logits, on_cpu(params := make_params()))
    for row, (column, value) in {1: (5002, math.nan), 3: (0, math.inf), 5: (2500, -math.inf)}.items():
        logits[row, column] = value
    expected[[1, 3, 5]] = -1
    assert torch.equal(cuda.sample_checked(logits.to(DEVICE), params).cpu(), expected)
    assert torch.equal(reference.sample_checked(logits, on_cpu(params)), expected)


@pytest.mark.parametrize("num_left", [1, 3, 400])
def test_masked_tokens_are_never_sampled(num_left: int) -> None:
    """Several splits of the vocabulary, some without an allowed token; two rows have no bitmask."""
    vocab = 9003
    logits, params = torch.randn(8, vocab), make_params()
    mask_index = torch.tensor([1, -1, 5, 2, -1, 3, 0, 3], dtype=torch.int32)  # two rows share mask 3; mask 4 is unused
    bitmask = torch.zeros(6, cdiv(vocab, 32), dtype=torch.int32)
    for mask in range(len(bitmask)):
        for token in torch.randperm(vocab)[:num_left].tolist():
            bitmask[mask, token // 32] |= (1 << token % 32) - ((1 << 32) if token % 32 == 31 else 0)
    masked, actual = logits.clone(), logits.to(DEVICE)
    reference.apply_token_bitmask(masked, mask_index, bitmask)
    cuda.apply_token_bitmask(actual, mask_index.to(DEVICE), bitmask.to(DEVICE))
    assert torch.equal(actual.cpu(), masked)
    assert (masked > -math.inf).sum(1).tolist() == [vocab if i < 0 else num_left for i in mask_index.tolist()]
    assert torch.equal(cuda.sample(actual, params).cpu(), reference.sample(masked, on_cpu(params)))


@pytest.mark.parametrize("num_left", [1, 2, 400])
def test_sample_checked_applies_the_bitmask(num_left: int) -> None:
    """One bitmask masks every token; a row with a NaN is marked even where the NaN is masked."""
    vocab = 9003
    logits, params = torch.randn(8, vocab), make_params()
    mask_index = torch.tensor([1, -1, 0, 2, 4, 3, 0, 3], dtype=torch.int32)
    bitmask = torch.zeros(5, cdiv(vocab, 32), dtype=torch.int32)
    for mask in range(4):
        for token in torch.randperm(vocab)[:num_left].tolist():
            bitmask[mask, token // 32] |= (1 << token % 32) - ((1 << 32) if token % 32 == 31 else 0)
    masked = logits.clone()
    reference.apply_token_bitmask(masked, mask_index, bitmask)
    expected = reference.sample(masked, on_cpu(params))
    logits[5, int((masked[5] == -math.inf).nonzero()[7])] = math.nan
    expected[4], expected[5] = -2, -1
    for sample_checked, device in ((reference.sample_checked, "cpu"), (cuda.sample_checked, DEVICE)):
        actual = logits.to(device, copy=True)
        found = sample_checked(
            actual, params if device == DEVICE else on_cpu(params), (mask_index.to(device), bitmask.to(device))
        )
        assert torch.equal(found.cpu(), expected)
        good = [0, 1, 2, 3, 4, 6, 7]
        assert torch.equal(actual.cpu()[good], masked[good])


def test_greedy_takes_the_lowest_id_of_equals_in_any_split() -> None:
    logits = torch.zeros(3, 20_000)
    for row, first in enumerate((19_999, 4096, 4095)):
        logits[row, first:] = 1.0
    params = settings_of(3, temperature=0.0, device=DEVICE)
    assert cuda.sample(logits.to(DEVICE), params).tolist() == [19_999, 4096, 4095]


def test_samples_follow_the_filtered_distribution() -> None:
    """A chi-squared test over the 6 tokens that the filters keep of a vocabulary of 40."""
    count = 25 if INTERPRETED else 4000
    logits = torch.linspace(0, 4, 40)[torch.randperm(40)].repeat(count, 1)
    params = settings_of(count, temperature=0.8, top_k=8, top_p=0.9, min_p=0.3, device=DEVICE)
    tokens = cuda.sample(logits.to(DEVICE), params).cpu()
    probs = reference.filtered_logits(logits[:1], on_cpu(params).select(torch.tensor([0]))).softmax(-1)[0]
    counts = torch.bincount(tokens, minlength=40)
    assert not counts[probs == 0].any()
    kept = probs > 0
    expected = probs[kept] * count
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    assert statistic < 20.5  # exceeded by 0.1 % of correct samples, with 5 degrees of freedom


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1])
def test_races_over_slices_decide_as_one(seed: int, dtype: torch.dtype) -> None:
    params = sliced_params(DEVICE)
    logits = sliced_logits(params, seed).to(dtype)
    tokens = decide(cuda, logits.to(DEVICE), params)
    assert torch.equal(tokens, cuda.sample_checked(logits.to(DEVICE), params))
    assert torch.equal(tokens.cpu(), reference.sample_checked(logits, on_cpu(params)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1])
def test_filtered_slices_decide_as_one(seed: int, dtype: torch.dtype) -> None:
    params = sliced_params(DEVICE, filters=True)
    logits = sliced_logits(params, seed).to(dtype)
    tokens = decide(cuda, logits.to(DEVICE), params)
    assert torch.equal(tokens, cuda.sample_checked(logits.to(DEVICE), params))
    assert torch.equal(tokens.cpu(), reference.sample_checked(logits, on_cpu(params)))


def test_races_of_several_splits() -> None:
    """Scores are those of the reference, whose rounding differs."""
    params = sliced_params(DEVICE)
    logits = torch.randn(12, 5003)
    expected = reference.race(logits, on_cpu(params), 1000)
    torch.testing.assert_close(cuda.race(logits.to(DEVICE), params, 1000).cpu(), expected, rtol=0, atol=1e-4)
    assert cuda.race(logits[:0].to(DEVICE), params, 0).shape == (0, 3) and not len(cuda.decide(expected[:0].to(DEVICE)))
