"""Launch shapes of the experts' kernels, by formulas of the sizes.

A tile is what one program computes: some outputs of one expert for some of its tokens. The weight is the first operand
of the matrix instruction, so few tokens need no padding to 64, and Hopper has the same instruction for all batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.kernels.triton.capability import LARGE_SHARED, kernels_for

SCAN_TOKENS = 64
"""Up to so many tokens in all, a tile has them all, and each program finds those of its expert by itself."""
STEP_COLUMNS, WIDE_STEP_COLUMNS = 64, 32
"""Inputs of a step, in 16 bits and in float32: the same in all tiles, so that a sum's order depends on no batch."""
MIN_TILE_TOKENS, MAX_TILE_TOKENS = 16, 128


@dataclass(frozen=True, slots=True)
class ExpertTuning:
    """Launch parameters of a product.

    rows     outputs of a tile; with a gate, rows of each half of the weight
    columns  inputs of a step
    tma      the copy engine loads the weight, whose rows must be multiples of 16 bytes
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    tma: bool = False


def tile_tokens(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Tokens of a tile: all of a small batch; else a power of two, at least twice the mean of an expert's."""
    wanted = num_tokens if num_tokens <= SCAN_TOKENS else 2 * num_tokens * top_k // num_experts
    return min(max(1 << (max(wanted, 1) - 1).bit_length(), MIN_TILE_TOKENS), MAX_TILE_TOKENS)


def expert_tuning(x: Tensor, tokens: int, gated: bool) -> ExpertTuning:
    """The tuning of a product of x in tiles of so many tokens."""
    shared = kernels_for(x.device).shared_bytes
    if x.dtype == torch.float32:
        tuning = _wide_tuning(tokens)
    else:
        tuning = _half_tuning(tokens, x.shape[-1], gated, large=shared >= LARGE_SHARED)
    stage_bytes = (tuning.rows * (2 if gated else 1) + tokens) * tuning.columns * x.itemsize
    return replace(tuning, num_stages=min(tuning.num_stages, shared // stage_bytes))


def _half_tuning(tokens: int, num_in: int, gated: bool, large: bool) -> ExpertTuning:
    """Of 16-bit weights. Both halves of a gated tile are in registers, so it has fewer rows.

    Measured on an H200: the copy engine makes the second product of large batches up to 1.4 times as fast, and the
    first one slower. More than four stages help short sums only.

    large  the GPU has Hopper's shared memory; others also need registers for the operands of their instructions
    """
    if tokens <= 64:
        stages = {16: 6, 32: 5}.get(tokens, 4) if num_in <= 2048 else 4
        return ExpertTuning(64 if gated else 128, STEP_COLUMNS, num_warps=4, num_stages=stages)
    rows = 128 if large or not gated else 64
    tma = large and not gated and num_in % 8 == 0
    return ExpertTuning(rows, STEP_COLUMNS, num_warps=8, num_stages=4 if gated else 3, tma=tma)


def _wide_tuning(tokens: int) -> ExpertTuning:
    """Of float32 weights, which have no matrix instruction: a thread's part of the operands is in its registers."""
    return ExpertTuning(32 if tokens <= 32 else 16, WIDE_STEP_COLUMNS, num_warps=4, num_stages=2)
