"""Fused QKV projection on Hopper, in Gluon: the product of `skinny_hopper` with `rope_kv_write` as its epilogue.

    norm_linear | rope_kv_write | attention        project_qkv | attention

A tile of the weight's rows is one head, so the program that has its sums can normalise and rotate it. Programs that
share a tile divide its tokens, not its rows, and a thread has both numbers of every rotated pair. q is written as
attention reads it, K and V to their slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton.launch import or_placeholder, pdl_options, wait_for_predecessor
from octavo.kernels.triton.linear.skinny_hopper import (
    LAYOUT,
    PRODUCER_REGISTERS,
    barrier_counters,
    make_ring,
    producer,
    squares_layout,
    sync_programs,
)
from octavo.kernels.triton.linear.tuning import TILE_TOKENS, HopperTuning, padded_tokens, qkv_tuning


def launch(
    residual: NormedResidual,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    kv_layer: Tensor,
    batch: RaggedBatch,
    cos_sin: Tensor,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
) -> Tensor:
    """`reference.project_qkv`. Tensors that no layer writes are read before the preceding kernel has ended.

    Launches on a device must not overlap, nor overlap those of `skinny_hopper`: they share the barrier counters.
    """
    num_tokens, num_in = residual.x.shape
    head_dim = kv_layer.shape[4]
    all_heads = weight.shape[0] // head_dim
    tuning = qkv_tuning(all_heads, head_dim, num_in, num_tokens)
    tokens = min(padded_tokens(num_tokens), TILE_TOKENS)
    x = residual.weighted
    q, grid, args = head_arguments(
        residual, eps, all_heads, head_dim, bias, kv_layer, batch, cos_sin, tuning, tokens,
        q_norm=q_norm, k_norm=k_norm, norm_eps=norm_eps,
    )  # fmt: skip
    _qkv_hopper[grid](
        TensorDescriptor(x, [num_tokens, num_in], [x.stride(0), 1], [tokens, tuning.columns], LAYOUT),
        TensorDescriptor(weight, list(weight.shape), [num_in, 1], [head_dim, tuning.columns], LAYOUT),
        COLUMNS=tuning.columns,
        num_warps=4,
        **args,
    )
    return q


def head_arguments(
    residual: NormedResidual,
    eps: float,
    all_heads: int,
    rows: int,
    bias: Tensor | None,
    kv_layer: Tensor,
    batch: RaggedBatch,
    cos_sin: Tensor,
    tuning: HopperTuning,
    tokens: int,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
) -> tuple[Tensor, tuple[int], dict[str, Any]]:
    """Of a kernel that ends in `write_heads`: q, the grid, and all arguments but the weight's.

    all_heads     of q, k and v
    rows, tokens  of a tile
    """
    x = residual.x
    num_tokens, num_in = x.shape
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    assert kv_layer.stride()[3:] == (head_dim, 1) and kv_layer.dtype == x.dtype, kv_layer.stride()
    assert cos_sin.is_contiguous() and cos_sin.shape[1] == head_dim, cos_sin.shape
    programs = cdiv(all_heads * head_dim, rows) * cdiv(num_tokens, tokens) * tuning.splits
    num_sums = programs * rows * tokens if tuning.splits > 1 else 0
    q = torch.empty(num_tokens, all_heads - 2 * num_kv_heads, head_dim, dtype=x.dtype, device=x.device)
    present = zip(("bias", "q_norm", "k_norm"), or_placeholder(q, bias, q_norm, k_norm), strict=True)
    args = {
        **dict(present),
        "squares": residual.squares,
        "cos_sin": cos_sin,
        "positions": batch.positions,
        "slots": batch.slot_mapping,
        "q": q,
        "kv": kv_layer,
        "partial_sums": torch.empty(num_sums, dtype=torch.float32, device=q.device),
        "barriers": barrier_counters(q.device),
        "num_tokens": num_tokens,
        "num_in": num_in,
        "num_squares": len(residual.squares),
        "eps": eps,
        "norm_eps": norm_eps,
        "kv_block_stride": kv_layer.stride(0),
        "kv_value_stride": kv_layer.stride(1),
        "kv_head_stride": kv_layer.stride(2),
        "HEADS": q.shape[1],
        "KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "TOKENS": tokens,
        "PADDED": padded_tokens(num_tokens),
        "SPLITS": tuning.splits,
        "STAGES": tuning.stages,
        "WITH_BIAS": bias is not None,
        "NORM": q_norm is not None,
        "maxnreg": tuning.registers,
        **pdl_options(q.device),
    }
    return q, (programs,), args


@gluon.constexpr_function
def half_layout(half, acc_layout):
    """Layout of [half, tokens]: a thread has adjacent rows. Of [2 * half, tokens], it has both numbers of a pair."""
    return gl.BlockedLayout([4, 1], [half // 4, 128 // half], [1, acc_layout.warps_per_cta[0]], [0, 1])


@gluon.jit
def load_angles(
    positions, slots, cos_sin, first_token, num_tokens,
    HALF: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load what no kernel of a layer writes: the slots and angles of some tokens."""
    pair = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    is_token = token < num_tokens
    position = gl.load(positions + token, mask=is_token, other=0)
    slot = gl.load(slots + token, mask=is_token, other=0)
    angles = cos_sin + position[None, :] * 2 * HALF + pair[:, None]
    return slot, gl.load(angles), gl.load(angles + HALF)


@gluon.jit
def load_head_norm(q_norm, k_norm, is_q, HALF: gl.constexpr, LAYOUT: gl.constexpr, NORM: gl.constexpr):
    """Load a head's norm, in halves."""
    pair = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    weight = gl.zeros([HALF], q_norm.dtype.element_ty, gl.SliceLayout(1, LAYOUT))
    second_weight = weight
    if NORM:
        weight = gl.where(is_q, gl.load(q_norm + pair), gl.load(k_norm + pair))
        second_weight = gl.where(is_q, gl.load(q_norm + HALF + pair), gl.load(k_norm + HALF + pair))
    return weight, second_weight


@gluon.jit
def norm_scale(
    squares, first_token, num_squares, num_in, eps,
    TOKENS: gl.constexpr, PADDED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The scale of the norm before the projection, for some tokens."""
    SQUARES_LAYOUT: gl.constexpr = squares_layout(TOKENS, gl.num_warps())
    SQUARES_PER_LOAD: gl.constexpr = 4096 // TOKENS if TOKENS >= 16 else 256
    part = gl.arange(0, SQUARES_PER_LOAD, gl.SliceLayout(1, SQUARES_LAYOUT))
    column = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, SQUARES_LAYOUT))
    sum_squares = gl.zeros([TOKENS], gl.float32, gl.SliceLayout(0, SQUARES_LAYOUT))
    for base in range(0, num_squares, SQUARES_PER_LOAD):
        ptrs = squares + (base + part)[:, None] * PADDED + column[None, :]
        sum_squares += gl.sum(gl.load(ptrs, mask=(base + part < num_squares)[:, None], other=0.0), 0)
    return gl.rsqrt(gl.convert_layout(sum_squares, gl.SliceLayout(0, LAYOUT)) / num_in + eps)


@gluon.jit
def _project(acc, scale, bias, first_row, num_rows, WITH_BIAS: gl.constexpr, DTYPE: gl.constexpr):
    """Scale a tile's sums, add the bias, and round."""
    acc *= scale[None, :]
    if WITH_BIAS:
        row = first_row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias + row, mask=row < num_rows, other=0.0).to(gl.float32)[:, None]
    return acc.to(DTYPE)


@gluon.jit
def project_share(
    acc, scale, bias, partial_sums, barriers, first_row, num_rows, split,
    SPLITS: gl.constexpr, WITH_BIAS: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Exchange the sums [rows, tokens] of programs that share a tile -> this program's tokens, finished.

    scale  of these tokens: in the layout of acc if there is one program, else in LAYOUT
    """
    ACC: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    if SPLITS == 1:
        return gl.convert_layout(_project(acc, scale, bias, first_row, num_rows, WITH_BIAS, DTYPE), LAYOUT)
    else:
        SHARE: gl.constexpr = TOKENS // SPLITS
        SIZE: gl.constexpr = ROWS * TOKENS  # a token's rows are adjacent
        tile_index = gl.program_id(0) // SPLITS
        tile_sums = partial_sums + tile_index * SPLITS * SIZE
        row = gl.arange(0, ROWS, gl.SliceLayout(1, ACC))[:, None]
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, ACC))[None, :]
        gl.store(tile_sums + split * SIZE + token * ROWS + row, acc)
        sync_programs(barriers + tile_index, split == 0, SPLITS)
        row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
        token = split * SHARE + gl.arange(0, SHARE, gl.SliceLayout(0, LAYOUT))[None, :]
        share = gl.zeros([ROWS, SHARE], gl.float32, LAYOUT)
        for i in gl.static_range(SPLITS):
            share += gl.load(tile_sums + i * SIZE + token * ROWS + row, cache_modifier=".cg")
        return _project(share, scale, bias, first_row, num_rows, WITH_BIAS, DTYPE)


@gluon.jit
def write_heads(
    heads, angles, head_norm, q_norm, q, kv, head, first_token, num_tokens, norm_eps,
    kv_block_stride, kv_value_stride, kv_head_stride,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, NORM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Normalise and rotate one head of some tokens, [HEAD_DIM, tokens], and write it to q or to its K/V slots."""
    DTYPE: gl.constexpr = heads.dtype
    HALF: gl.constexpr = heads.shape[0] // 2
    TOKENS: gl.constexpr = heads.shape[1]
    slot, cos, sin = angles
    weight, second_weight = head_norm
    first, second = heads.reshape([2, HALF, TOKENS]).permute((1, 2, 0)).split()
    first = gl.convert_layout(first, LAYOUT)
    second = gl.convert_layout(second, LAYOUT)
    if head < HEADS + KV_HEADS:
        x = first.to(gl.float32)
        y = second.to(gl.float32)
        if NORM:
            scale = gl.rsqrt(gl.sum(x * x + y * y, 0) / (2 * HALF) + norm_eps)[None, :]
            x *= scale
            y *= scale
            if q_norm.dtype.element_ty == DTYPE:  # a wider weight is applied before rounding
                x = x.to(DTYPE).to(gl.float32)
                y = y.to(DTYPE).to(gl.float32)
            x = (x * weight.to(gl.float32)[:, None]).to(DTYPE).to(gl.float32)
            y = (y * second_weight.to(gl.float32)[:, None]).to(DTYPE).to(gl.float32)
        first = (x * cos - y * sin).to(DTYPE)
        second = (y * cos + x * sin).to(DTYPE)
    pair = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    mask = (token < num_tokens)[None, :]
    if head < HEADS:
        ptrs = q + (token * HEADS + head)[None, :] * 2 * HALF + pair[:, None]
        gl.store(ptrs, first, mask=mask)
        gl.store(ptrs + HALF, second, mask=mask)
    else:
        is_value = head >= HEADS + KV_HEADS
        kv_head = gl.where(is_value, head - HEADS - KV_HEADS, head - HEADS).to(gl.int64)
        head_ptr = kv + kv_head * kv_head_stride + gl.where(is_value, kv_value_stride, 0)
        slot_offset = slot // BLOCK_SIZE * kv_block_stride + slot % BLOCK_SIZE * 2 * HALF
        ptrs = head_ptr + slot_offset[None, :] + pair[:, None]
        gl.store(ptrs, first, mask=mask)
        gl.store(ptrs + HALF, second, mask=mask)


@gluon.jit
def _consumer(
    bias, q_norm, k_norm, squares, cos_sin, positions, slots, q, kv, partial_sums, barriers,
    ring, head, first_token, split, begin, end, num_tokens, num_in, num_squares, eps, norm_eps,
    kv_block_stride, kv_value_stride, kv_head_stride,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    TOKENS: gl.constexpr, PADDED: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    WITH_BIAS: gl.constexpr, NORM: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The four consumer warps, which multiply."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16])
    DTYPE: gl.constexpr = q.dtype.element_ty
    SHARE: gl.constexpr = TOKENS // SPLITS
    HALF: gl.constexpr = HEAD_DIM // 2
    SHARE_LAYOUT: gl.constexpr = half_layout(HALF, ACC)
    SCALE_LAYOUT: gl.constexpr = ACC if SPLITS == 1 else SHARE_LAYOUT
    tiles, x_tiles, full, free = ring
    share_token = first_token + split * SHARE
    angles = load_angles(positions, slots, cos_sin, share_token, num_tokens, HALF, SHARE, SHARE_LAYOUT)
    head_norm = load_head_norm(q_norm, k_norm, head < HEADS, HALF, SHARE_LAYOUT, NORM)
    wait_for_predecessor(USE_PDL)
    scale = norm_scale(squares, share_token, num_squares, num_in, eps, SHARE, PADDED, SCALE_LAYOUT)
    acc = gl.zeros([HEAD_DIM, TOKENS], gl.float32, ACC)
    for iteration in range(end - begin):
        stage = iteration % STAGES
        mbarrier.wait(full.index(stage), iteration // STAGES % 2)
        pending = warpgroup_mma(tiles.index(stage), x_tiles.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(free.index(stage), count=1)
    heads = project_share(
        acc, scale, bias, partial_sums, barriers, head * HEAD_DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, split,
        SPLITS, WITH_BIAS, DTYPE, SHARE_LAYOUT,
    )  # fmt: skip
    write_heads(
        heads, angles, head_norm, q_norm, q, kv, head, share_token, num_tokens, norm_eps,
        kv_block_stride, kv_value_stride, kv_head_stride, HEADS, KV_HEADS, BLOCK_SIZE, NORM, SHARE_LAYOUT,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens", "num_squares"])
def _qkv_hopper(
    xs,
    weights,
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
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TOKENS: gl.constexpr,
    PADDED: gl.constexpr,
    COLUMNS: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    WITH_BIAS: gl.constexpr,
    NORM: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """A head, a tile of tokens, and one of SPLITS ranges of the columns, as in `_skinny_hopper`."""
    DTYPE: gl.constexpr = q.dtype.element_ty
    head = gl.program_id(0) // (PADDED // TOKENS * SPLITS)
    first_token = gl.program_id(0) // SPLITS % (PADDED // TOKENS) * TOKENS
    split = gl.program_id(0) % SPLITS
    num_steps = (num_in + COLUMNS - 1) // COLUMNS
    begin = split * num_steps // SPLITS
    end = (split + 1) * num_steps // SPLITS
    ring = make_ring(xs, weights, HEAD_DIM, TOKENS, COLUMNS, STAGES, 1, DTYPE)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    bias, q_norm, k_norm, squares, cos_sin, positions, slots, q, kv, partial_sums, barriers,
                    ring, head, first_token, split, begin, end, num_tokens, num_in, num_squares, eps, norm_eps,
                    kv_block_stride, kv_value_stride, kv_head_stride,
                    HEADS, KV_HEADS, BLOCK_SIZE, HEAD_DIM, TOKENS, PADDED, SPLITS, STAGES, WITH_BIAS, NORM, USE_PDL,
                ),
            ),
            (
                producer,
                (xs, weights, ring, head, first_token, begin, end, 0, HEAD_DIM, TOKENS, COLUMNS, STAGES, 1, USE_PDL),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
