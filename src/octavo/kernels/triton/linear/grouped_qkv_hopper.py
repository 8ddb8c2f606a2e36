"""Fused QKV projection of a quantised weight on Hopper: the product of `grouped_hopper`, the epilogue of `qkv_hopper`.

A tile of the weight is one head of 128, or two of 64; of an odd number of these, the last tile has one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton.launch import wait_for_predecessor
from octavo.kernels.triton.linear.grouped_hopper import (
    NUM_WARPS,
    ROWS,
    describe,
    lines_of,
    make_ring,
    planes_of_step,
    producer,
    sum_products,
    sums_layout,
    tile_tokens,
)
from octavo.kernels.triton.linear.grouped_kernels import TILE_OUTPUTS
from octavo.kernels.triton.linear.qkv_hopper import (
    half_layout,
    head_arguments,
    load_angles,
    load_head_norm,
    norm_scale,
    project_share,
    write_heads,
)
from octavo.kernels.triton.linear.skinny_hopper import PRODUCER_REGISTERS
from octavo.kernels.triton.linear.tuning import HopperTuning

if TYPE_CHECKING:
    from octavo.kernels.triton.linear.grouped import GroupedWeight


def launch(
    residual: NormedResidual,
    eps: float,
    weight: GroupedWeight,
    bias: Tensor | None,
    kv_layer: Tensor,
    batch: RaggedBatch,
    cos_sin: Tensor,
    tuning: HopperTuning,
    **norms: Any,
) -> Tensor:
    """As `qkv_hopper.launch`, with its norms. tuning: its rows are 128; no program has less than a token."""
    tokens = tile_tokens(len(residual.x))
    tuning = replace(tuning, splits=min(tuning.splits, tokens))
    q, grid, args = head_arguments(
        residual, eps, weight.num_out // kv_layer.shape[4], TILE_OUTPUTS, bias, kv_layer, batch, cos_sin, tuning,
        tokens, **norms,
    )  # fmt: skip
    _grouped_qkv_hopper[grid](
        *describe(weight, residual.weighted, tuning.columns),
        weight.planes,
        *lines_of(weight),
        **weight.constants(),
        STEP=tuning.columns,
        num_warps=NUM_WARPS,
        **args,
    )
    return q


@gluon.jit
def _consumer(
    row_scales, bias, q_norm, k_norm, squares, cos_sin, positions, slots, q, kv, partial_sums, barriers,
    ring, tile, split, begin, end, num_tokens, num_in, num_squares, eps, norm_eps,
    kv_block_stride, kv_value_stride, kv_head_stride,
    FORMAT: gl.constexpr, PLANES: gl.constexpr, COLUMNS: gl.constexpr, ZERO: gl.constexpr, SCALES: gl.constexpr,
    STEP: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    TOKENS: gl.constexpr, PADDED: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    WITH_BIAS: gl.constexpr, NORM: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The consumer warps, which multiply."""
    ACC: gl.constexpr = sums_layout(TOKENS)
    DTYPE: gl.constexpr = q.dtype.element_ty
    SHARE: gl.constexpr = TOKENS // SPLITS
    HALF: gl.constexpr = HEAD_DIM // 2
    SHARE_LAYOUT: gl.constexpr = half_layout(HALF, ACC)
    SCALE_LAYOUT: gl.constexpr = ACC if SPLITS == 1 else SHARE_LAYOUT
    ALL_HEADS: gl.constexpr = HEADS + 2 * KV_HEADS
    first_token = split * SHARE
    head = tile * (ROWS // HEAD_DIM)
    angles = load_angles(positions, slots, cos_sin, first_token, num_tokens, HALF, SHARE, SHARE_LAYOUT)
    head_norm = load_head_norm(q_norm, k_norm, head < HEADS, HALF, SHARE_LAYOUT, NORM)
    wait_for_predecessor(USE_PDL)
    scale = norm_scale(squares, first_token, num_squares, num_in, eps, SHARE, PADDED, SCALE_LAYOUT)
    acc, _ = sum_products(
        row_scales, ring, tile, begin, end, 0, FORMAT, PLANES, COLUMNS, ZERO, SCALES, STEP, TOKENS, STAGES, 1
    )
    heads = project_share(
        acc, scale, bias, partial_sums, barriers, tile * ROWS, ALL_HEADS * HEAD_DIM, split,
        SPLITS, WITH_BIAS, DTYPE, SHARE_LAYOUT,
    )  # fmt: skip
    if HEAD_DIM < ROWS:
        heads, second = heads.reshape([2, HEAD_DIM, SHARE]).permute((1, 2, 0)).split()
        if head + 1 < ALL_HEADS:
            second_norm = load_head_norm(q_norm, k_norm, head + 1 < HEADS, HALF, SHARE_LAYOUT, NORM)
            write_heads(
                second, angles, second_norm, q_norm, q, kv, head + 1, first_token, num_tokens, norm_eps,
                kv_block_stride, kv_value_stride, kv_head_stride, HEADS, KV_HEADS, BLOCK_SIZE, NORM, SHARE_LAYOUT,
            )  # fmt: skip
    write_heads(
        heads, angles, head_norm, q_norm, q, kv, head, first_token, num_tokens, norm_eps,
        kv_block_stride, kv_value_stride, kv_head_stride, HEADS, KV_HEADS, BLOCK_SIZE, NORM, SHARE_LAYOUT,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens", "num_squares"])
def _grouped_qkv_hopper(
    xs,
    words,
    planes,
    row_scales,
    tile_lines,
    plane_lines,
    bias,
    q_norm,
    k_norm,
    squares,
    cos_sin,
    positions,
    slots,
    q,
    kv,
    partial_sums,
    barriers,
    num_tokens,
    num_in,
    num_squares,
    eps,
    norm_eps,
    kv_block_stride,
    kv_value_stride,
    kv_head_stride,
    FORMAT: gl.constexpr,
    PLANES: gl.constexpr,
    COLUMNS: gl.constexpr,
    ZERO: gl.constexpr,
    SCALES: gl.constexpr,
    STEP: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TOKENS: gl.constexpr,
    PADDED: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    WITH_BIAS: gl.constexpr,
    NORM: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """A tile of outputs and one of SPLITS ranges of the inputs, as in `_grouped_hopper`."""
    NUM_PLANES: gl.constexpr = planes_of_step(PLANES, COLUMNS, STEP)
    tile = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    num_steps = (num_in + STEP - 1) // STEP
    begin = split * num_steps // SPLITS
    end = (split + 1) * num_steps // SPLITS
    ring = make_ring(xs, words, planes, FORMAT, PLANES, COLUMNS, STEP, TOKENS, STAGES, 1)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    row_scales, bias, q_norm, k_norm, squares, cos_sin, positions, slots, q, kv, partial_sums, barriers,
                    ring, tile, split, begin, end, num_tokens, num_in, num_squares, eps, norm_eps,
                    kv_block_stride, kv_value_stride, kv_head_stride,
                    FORMAT, PLANES, COLUMNS, ZERO, SCALES, STEP, HEADS, KV_HEADS, BLOCK_SIZE, HEAD_DIM,
                    TOKENS, PADDED, SPLITS, STAGES, WITH_BIAS, NORM, USE_PDL,
                ),
            ),
            (
                producer,
                (
                    xs, words, planes, ring, tile, begin, end, 0, tile_lines, plane_lines,
                    FORMAT, STEP, NUM_PLANES, COLUMNS, TOKENS, STAGES, 1, USE_PDL,
                ),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
