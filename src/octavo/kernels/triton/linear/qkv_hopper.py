"""The product of q, k and v on Hopper with all that lies between it and attention, in Gluon: `stream_linear`, and
`rope_kv_write` in the end of it.

    norm_linear | rope_kv_write | attention        project_qkv | attention

A tile of the weight's rows is one head, so that whoever has its sums can normalise and turn it. Programs that share a
tile share out its tokens, not its rows; a thread has both numbers of every pair that is turned. q is written as
attention reads it, k and v into their slots.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton.launch import given, overlapped, wait_for_predecessor
from octavo.kernels.triton.linear.skinny_hopper import (
    LAYOUT,
    MULTIPROCESSORS,
    REGISTERS_OF_COPIER,
    TILE_TOKENS,
    StreamTuning,
    make_ring,
    meet,
    meeting_places,
    padded_tokens,
    produce,
    squares_layout,
)

HEAD_DIMS = (64, 128)
"""Of the heads that it takes: rows of a tile."""


def heads_tuning(num_heads: int, head_dim: int, num_in: int, num_tokens: int) -> StreamTuning:
    """num_heads: of q, k and v together. As in `stream_tuning`, all programs are at work at once."""
    tiles = num_heads * triton.cdiv(num_tokens, TILE_TOKENS)
    most = MULTIPROCESSORS if num_tokens <= TILE_TOKENS else MULTIPROCESSORS // 2  # many sums take long to trade
    splits = 1
    while splits < 16 and 2 * splits * tiles <= most and num_in >= 256 * splits:
        splits *= 2
    if num_tokens <= 32:
        columns, stages = (128, 4) if num_in // splits >= 512 else (64, 8)
        return StreamTuning(head_dim, columns, splits, stages)
    return StreamTuning(head_dim, 128, splits, max(2, min(4, triton.cdiv(num_in, 128 * splits))), registers=232)


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
    """See `reference.project_qkv`. Calls on a device must not overlap, with those of `stream_linear` neither: their
    programs meet at the same places. What no layer writes is read before the kernel in front has ended."""
    num_tokens, num_in = residual.x.shape
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    all_heads = weight.shape[0] // head_dim
    num_heads = all_heads - 2 * num_kv_heads
    assert kv_layer.stride()[3:] == (head_dim, 1) and kv_layer.dtype == residual.x.dtype, kv_layer.stride()
    assert cos_sin.is_contiguous() and cos_sin.shape[1] == head_dim, cos_sin.shape
    tuning = heads_tuning(all_heads, head_dim, num_in, num_tokens)
    padded = padded_tokens(num_tokens)
    tokens = min(padded, TILE_TOKENS)
    programs = all_heads * (padded // tokens) * tuning.splits
    num_sums = programs * head_dim * tokens if tuning.splits > 1 else 0
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=weight.dtype, device=weight.device)
    x = residual.weighted
    xs = TensorDescriptor(x, [num_tokens, num_in], [x.stride(0), 1], [tokens, tuning.columns], LAYOUT)
    weights = TensorDescriptor(weight, list(weight.shape), [num_in, 1], [head_dim, tuning.columns], LAYOUT)
    _stream_heads[(programs,)](
        xs,
        weights,
        *given(q, bias, q_norm, k_norm),
        residual.squares,
        cos_sin,
        batch.positions,
        batch.slot_mapping,
        q,
        kv_layer,
        torch.empty(num_sums, dtype=torch.float32, device=q.device),
        meeting_places(q.device),
        num_tokens,
        num_in,
        len(residual.squares),
        eps,
        norm_eps,
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        TOKENS=tokens,
        PADDED=padded,
        COLUMNS=tuning.columns,
        SPLITS=tuning.splits,
        STAGES=tuning.stages,
        WITH_BIAS=bias is not None,
        NORM=q_norm is not None,
        num_warps=4,
        maxnreg=tuning.registers,
        **overlapped(q.device),
    )
    return q


@gluon.constexpr_function
def _half_layout(half):
    """Of [half, tokens]: rows side by side, as they are stored. Of [2 * half, tokens] a thread has both of a pair."""
    return gl.BlockedLayout([4, 1], [half // 4, 128 // half], [1, 4], [0, 1])


@gluon.jit
def _asked_for(
    positions, slots, cos_sin, q_norm, k_norm, is_q, first_token, num_tokens,
    HALF: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """What no kernel of a layer writes, as it is in memory: slots, angles, and the norm's weight."""
    pair = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    is_token = token < num_tokens
    position = gl.load(positions + token, mask=is_token, other=0)
    slot = gl.load(slots + token, mask=is_token, other=0)
    angles = cos_sin + position[None, :] * 2 * HALF + pair[:, None]
    cos = gl.load(angles)
    sin = gl.load(angles + HALF)
    factor = gl.zeros([HALF], q_norm.dtype.element_ty, gl.SliceLayout(1, LAYOUT))
    second_factor = factor
    if NORM:
        factor = gl.where(is_q, gl.load(q_norm + pair), gl.load(k_norm + pair))
        second_factor = gl.where(is_q, gl.load(q_norm + HALF + pair), gl.load(k_norm + HALF + pair))
    return slot, cos, sin, factor, second_factor


@gluon.jit
def _scale_of(
    squares, first_token, num_squares, num_in, eps,
    TOKENS: gl.constexpr, PADDED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The factor of a norm, of some tokens."""
    PARTS: gl.constexpr = squares_layout(TOKENS)
    AT_ONCE: gl.constexpr = 4096 // TOKENS if TOKENS >= 16 else 256
    part = gl.arange(0, AT_ONCE, gl.SliceLayout(1, PARTS))
    column = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, PARTS))
    sums = gl.zeros([TOKENS], gl.float32, gl.SliceLayout(0, PARTS))
    for first in range(0, num_squares, AT_ONCE):
        place = squares + (first + part)[:, None] * PADDED + column[None, :]
        sums += gl.sum(gl.load(place, mask=(first + part < num_squares)[:, None], other=0.0), 0)
    return gl.rsqrt(gl.convert_layout(sums, gl.SliceLayout(0, LAYOUT)) / num_in + eps)


@gluon.jit
def _projected(acc, scale, bias, first_row, WITH_BIAS: gl.constexpr, DTYPE: gl.constexpr):
    """Sums of a head's rows to what the projection gives, rounded."""
    acc *= scale[None, :]
    if WITH_BIAS:
        row = first_row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias + row).to(gl.float32)[:, None]
    return acc.to(DTYPE)


@gluon.jit
def _finish(
    heads, asked_for, q_norm, q, kv, head, first_token, num_tokens, norm_eps,
    kv_block_stride, kv_value_stride, kv_head_stride,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, NORM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """One head of some tokens, [HEAD_DIM, tokens]: normalised, turned, and written where it belongs."""
    DTYPE: gl.constexpr = heads.dtype
    HALF: gl.constexpr = heads.shape[0] // 2
    TOKENS: gl.constexpr = heads.shape[1]
    slot, cos, sin, factor, second_factor = asked_for
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
            x = (x * factor.to(gl.float32)[:, None]).to(DTYPE).to(gl.float32)
            y = (y * second_factor.to(gl.float32)[:, None]).to(DTYPE).to(gl.float32)
        first = (x * cos - y * sin).to(DTYPE)
        second = (y * cos + x * sin).to(DTYPE)
    pair = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    here = (token < num_tokens)[None, :]
    if head < HEADS:
        place = q + (token * HEADS + head)[None, :] * 2 * HALF + pair[:, None]
        gl.store(place, first, mask=here)
        gl.store(place + HALF, second, mask=here)
    else:
        is_value = head >= HEADS + KV_HEADS
        kv_head = gl.where(is_value, head - HEADS - KV_HEADS, head - HEADS).to(gl.int64)
        base = kv + kv_head * kv_head_stride + gl.where(is_value, kv_value_stride, 0)
        at = slot // BLOCK_SIZE * kv_block_stride + slot % BLOCK_SIZE * 2 * HALF
        place = base + at[None, :] + pair[:, None]
        gl.store(place, first, mask=here)
        gl.store(place + HALF, second, mask=here)


@gluon.jit
def _consume(
    bias, q_norm, k_norm, squares, cos_sin, positions, slots, q, kv, parts, meetings,
    ring, head, first_token, split, begin, end, num_tokens, num_in, num_squares, eps, norm_eps,
    kv_block_stride, kv_value_stride, kv_head_stride,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    TOKENS: gl.constexpr, PADDED: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    WITH_BIAS: gl.constexpr, NORM: gl.constexpr, OVERLAPPED: gl.constexpr,
):  # fmt: skip
    """The four warps that multiply."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16])
    DTYPE: gl.constexpr = q.dtype.element_ty
    SHARE: gl.constexpr = TOKENS // SPLITS
    SHARED: gl.constexpr = _half_layout(HEAD_DIM // 2)
    tiles, x_tiles, full, free = ring
    own_token = first_token + split * SHARE
    asked_for = _asked_for(
        positions, slots, cos_sin, q_norm, k_norm, head < HEADS, own_token, num_tokens,
        HEAD_DIM // 2, SHARE, SHARED, NORM,
    )  # fmt: skip
    wait_for_predecessor(OVERLAPPED)
    WHOLE: gl.constexpr = ACC if SPLITS == 1 else SHARED
    scale = _scale_of(squares, own_token, num_squares, num_in, eps, SHARE, PADDED, WHOLE)
    acc = gl.zeros([HEAD_DIM, TOKENS], gl.float32, ACC)
    for turn in range(end - begin):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES % 2)
        pending = warpgroup_mma(tiles.index(stage), x_tiles.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(free.index(stage), count=1)

    if SPLITS == 1:
        heads = gl.convert_layout(_projected(acc, scale, bias, head * HEAD_DIM, WITH_BIAS, DTYPE), SHARED)
    else:
        SIZE: gl.constexpr = HEAD_DIM * TOKENS  # a token's rows are side by side
        group = gl.program_id(0) // SPLITS
        theirs = parts + group * SPLITS * SIZE
        row = gl.arange(0, HEAD_DIM, gl.SliceLayout(1, ACC))[:, None]
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, ACC))[None, :]
        gl.store(theirs + split * SIZE + token * HEAD_DIM + row, acc)
        meet(meetings + group, split == 0, SPLITS)
        row = gl.arange(0, HEAD_DIM, gl.SliceLayout(1, SHARED))[:, None]
        token = split * SHARE + gl.arange(0, SHARE, gl.SliceLayout(0, SHARED))[None, :]
        share = gl.zeros([HEAD_DIM, SHARE], gl.float32, SHARED)
        for i in gl.static_range(SPLITS):
            share += gl.load(theirs + i * SIZE + token * HEAD_DIM + row, cache_modifier=".cg")
        heads = _projected(share, scale, bias, head * HEAD_DIM, WITH_BIAS, DTYPE)
    _finish(
        heads, asked_for, q_norm, q, kv, head, own_token, num_tokens, norm_eps,
        kv_block_stride, kv_value_stride, kv_head_stride, HEADS, KV_HEADS, BLOCK_SIZE, NORM, SHARED,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens", "num_squares"])
def _stream_heads(
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
    parts,
    meetings,
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
    OVERLAPPED: gl.constexpr,
):
    """A head, a tile of tokens, and one of SPLITS parts of the columns, as in `_stream_linear`."""
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
                _consume,
                (
                    bias, q_norm, k_norm, squares, cos_sin, positions, slots, q, kv, parts, meetings,
                    ring, head, first_token, split, begin, end, num_tokens, num_in, num_squares, eps, norm_eps,
                    kv_block_stride, kv_value_stride, kv_head_stride,
                    HEADS, KV_HEADS, BLOCK_SIZE, HEAD_DIM, TOKENS, PADDED, SPLITS, STAGES, WITH_BIAS, NORM, OVERLAPPED,
                ),
            ),
            (
                produce,
                (xs, weights, ring, head, first_token, begin, end, 0, HEAD_DIM, TOKENS, COLUMNS, STAGES, 1, OVERLAPPED),
            ),
        ],
        [1],
        [REGISTERS_OF_COPIER],
    )  # fmt: skip
