"""Logits of several slices of a vocabulary, and what their races decide together."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.metadata import SamplingTensors

BOUNDS = (0, 300, 600, 900, 1003)
"""The last slice is shorter."""


def sliced_params(device: str = "cpu", *, filters: bool = False) -> SamplingTensors:
    """Greedy and random rows, by turns. filters: three of four rows have a top_k, and some other filters too"""
    n = 12
    temperature = [(0.0, 1.0, 0.3)[i % 3] for i in range(n)]
    top_k = [(64, 40, 0, 3)[i % 4] * filters for i in range(n)]
    top_p = [(1.0, 0.913, 1.0, 0.513, 0.713)[i % 5] if k else 1.0 for i, k in enumerate(top_k)]  # no whole tokens
    min_p = [(0.0, 0.0, 0.1)[i % 3] if k else 0.0 for i, k in enumerate(top_k)]
    columns = temperature, top_k, top_p, min_p, list(range(n)), [0, 1] * (n // 2), list(range(50, 50 + n))
    return SamplingTensors.from_lists(*columns, device=device)


def sliced_logits(params: SamplingTensors, seed: int) -> Tensor:
    """[num_rows, BOUNDS[-1]] float32. Odd seeds give whole numbers. Some rows have values that are not finite, in one
    slice or another; a row is all 0."""
    logits = 3 * torch.randn(len(params.seed), BOUNDS[-1], generator=torch.Generator().manual_seed(seed))
    logits = logits.round() if seed % 2 else logits
    logits[6] = 0.0
    logits[3, 5], logits[4, -1], logits[5, 300], logits[11, 899] = math.nan, math.nan, math.inf, -math.inf
    return logits


def slices_of(ops: Any, logits: Tensor, params: SamplingTensors, bounds: tuple[int, ...] = BOUNDS) -> list[Tensor]:
    """Slices with memory of their own, as ranks have it; with filters, if a row has one."""
    slices = [logits[:, first:last].contiguous() for first, last in pairwise(bounds)]
    if not params.any_filter:
        return slices
    tops = torch.cat([ops.slice_tops(own, params) for own in slices], 1)
    return [ops.keep_slice(own, params, tops, i) for i, own in enumerate(slices)]


def decide(ops: Any, logits: Tensor, params: SamplingTensors, bounds: tuple[int, ...] = BOUNDS) -> Tensor:
    """The tokens of races over slices."""
    slices = zip(slices_of(ops, logits, params, bounds), bounds, strict=False)
    tokens: Tensor = ops.decide(torch.cat([ops.race(own, params, first) for own, first in slices], 1))
    return tokens
