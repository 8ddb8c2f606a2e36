"""Linear layers whose outputs have the same bits in every batch, in Triton: for `EngineArgs.batch_invariant`.

Libraries choose another kernel for another number of rows, and so another order of addition. Here a weight has one
tile, chosen from its dtype and sizes alone. Each output is one sum over the inputs in their order, in steps of one
size, by one matrix instruction: a tile of few rows is padded to a whole one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.capability import kernels_for
from octavo.kernels.triton.launch import or_placeholder, pdl_options, wait_before_successor

GROUP_ROWS = 16
"""Tiles of rows whose programs are adjacent for each tile of outputs: they read the same weights from the L2 cache."""


@dataclass(frozen=True, slots=True)
class InvariantTuning:
    """Launch parameters of a weight's product.

    rows, outputs  of a tile. Hopper's instruction has 64 rows; fewer would be another instruction
    columns        inputs of a step
    """

    rows: int
    outputs: int
    columns: int
    num_warps: int
    num_stages: int


def invariant_tuning(weight: Tensor) -> InvariantTuning:
    """The tuning of a weight; few outputs take smaller tiles, for more programs."""
    if weight.dtype == torch.float32:  # no matrix instruction: a thread's part of the operands is in its registers
        return InvariantTuning(32, 32, 32, num_warps=4, num_stages=2)
    outputs = 128 if len(weight) >= 16384 else 64
    stage_bytes = (64 + outputs) * 64 * weight.itemsize
    stages = min(4, kernels_for(weight.device).shared_bytes // stage_bytes)
    return InvariantTuning(64, outputs, 64, num_warps=4, num_stages=stages)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.linear`. Sums are in float32 and rounded once, with the bias."""
    (num_rows, num_in), num_out = x.shape, len(weight)
    assert weight.is_contiguous() and x.stride(1) == 1, (weight.stride(), x.stride())
    y = x.new_empty(num_rows, num_out)
    if y.numel() == 0:
        return y
    tuning = invariant_tuning(weight)
    _linear[(triton.cdiv(num_rows, tuning.rows) * triton.cdiv(num_out, tuning.outputs),)](
        x,
        weight,
        *or_placeholder(weight, bias),
        y,
        num_rows,
        num_out,
        num_in,
        x.stride(0),
        ROWS=tuning.rows,
        OUTPUTS=tuning.outputs,
        COLUMNS=tuning.columns,
        EVEN=num_in % tuning.columns == 0,
        STAGES=tuning.num_stages,
        GROUP_ROWS=GROUP_ROWS,
        WITH_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
        **pdl_options(x.device),
    )
    return y


# One row and multiples of 16 are no other compilations: one kernel computes all batches.
@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x,
    weight,
    bias,
    y,
    num_rows,
    num_out,
    num_in,
    x_stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """ROWS rows of x times OUTPUTS rows of the weight."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    output_tiles = tl.cdiv(num_out, OUTPUTS)
    group = tl.program_id(0) // (GROUP_ROWS * output_tiles)
    in_group = tl.program_id(0) % (GROUP_ROWS * output_tiles)
    first_tile = group * GROUP_ROWS
    group_rows = tl.minimum(row_tiles - first_tile, GROUP_ROWS)
    row = (first_tile + in_group % group_rows) * ROWS + tl.arange(0, ROWS)
    output = in_group // group_rows * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, COLUMNS)
    # Rows and outputs past the last are clamped to it, so that no load needs a mask for them.
    x_ptrs = x + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * x_stride + column[None, :]
    weight_row = tl.minimum(output, num_out - 1)
    w_ptrs = weight + weight_row.to(tl.int64)[None, :] * num_in + column[:, None]
    wait_before_successor(USE_PDL)
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in tl.range(0, num_in, COLUMNS, num_stages=STAGES):
        if EVEN:
            xs = tl.load(x_ptrs + start)
            w = tl.load(w_ptrs + start)
        else:
            valid = start + column < num_in
            xs = tl.load(x_ptrs + start, mask=valid[None, :], other=0.0)
            w = tl.load(w_ptrs + start, mask=valid[:, None], other=0.0)
        acc = tl.dot(xs, w, acc, input_precision=PRECISION)
    if WITH_BIAS:
        acc += tl.load(bias + weight_row).to(tl.float32)[None, :]
    y_ptrs = y + row.to(tl.int64)[:, None] * num_out + output[None, :]
    tl.store(y_ptrs, acc.to(y.dtype.element_ty), mask=(row < num_rows)[:, None] & (output < num_out)[None, :])
