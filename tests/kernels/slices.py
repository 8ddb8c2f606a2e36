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


def sliced_params(device: str = "cpu") -> SamplingTensors:
    """Greedy and random rows, by turns."""
    n = 12
    temperature = [(0.0, 1.0, 0.3)[i % 3] for i in range(n)]
    columns = temperature, [0] * n, [1.0] * n, [0.0] * n, list(range(n)), [0, 1] * (n // 2), list(range(50, 50 + n))
    return SamplingTensors.from_lists(*columns, device=device)


def sliced_logits(params: SamplingTensors, seed: int) -> Tensor:
    """[num_rows, BOUNDS[-1]] float32. Odd seeds give whole numbers. Some rows have values that are not finite, in one
    slice or another; a row is all 0."""
    logits = 3 * torch.randn(len(params.seed), BOUNDS[-1], generator=torch.Generator().manual_seed(seed))
    logits = logits.round() if seed % 2 else logits
    logits[6] = 0.0
    logits[3, 5], logits[4, -1], logits[5, 300], logits[11, 899] = math.nan, math.nan, math.inf, -math.inf
    return logits


def decide(ops: Any, logits: Tensor, params: SamplingTensors) -> Tensor:
    """The tokens of races over slices with memory of their own, as ranks have it."""
    winners = [ops.race(logits[:, first:last].contiguous(), params, first) for first, last in pairwise(BOUNDS)]
    tokens: Tensor = ops.decide(torch.cat(winners, 1))
    return tokens
