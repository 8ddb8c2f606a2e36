"""Writing K and V into their slots on a GPU, in Triton: alone, or with all that stands between projection and pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.launch import overlapped, wait_before_successor
from octavo.kernels.triton.rope import load_factors, load_halves, turn_halves


def kv_write(k: Tensor, v: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
    """See `reference.kv_write`. k and v may be views of a fused projection."""
    num_tokens, num_kv_heads, head_dim = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1), (k.stride(), v.stride())
    assert kv_layer.stride()[3:] == (head_dim, 1), kv_layer.stride()
    if num_tokens:
        _kv_write[(num_tokens, 2)](
            k,
            v,
            kv_layer,
            slot_mapping,
            k.stride(0),
            v.stride(0),
            kv_layer.stride(0),
            kv_layer.stride(1),
            kv_layer.stride(2),
            HEADS=num_kv_heads,
            HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
            BLOCK_SIZE=kv_layer.shape[3],
            HEAD_DIM=head_dim,
            HEAD_DIM_PADDED=triton.next_power_of_2(head_dim),
            num_warps=2,
        )


def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    kv_layer: Tensor,
    slot_mapping: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`rms_norm` of q's and k's heads where weights [head_dim] are given, `apply_rope`, then `kv_write` -> q, turned.

    q [num_tokens, num_heads, head_dim], k, v [num_tokens, num_kv_heads, head_dim], which may be views of a fused
    projection; positions, slot_mapping [num_tokens]; cos_sin from `rope_table`. One launch, and k never returns to
    memory but in its slot. All but q, k and v are read before the kernel in front has ended: it must not write them.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (head_dim, 1), (q.stride(), k.stride(), v.stride())
    assert kv_layer.stride()[3:] == (head_dim, 1), kv_layer.stride()
    assert cos_sin.is_contiguous() and cos_sin.shape[1] == head_dim, cos_sin.shape
    assert (q_norm is None) == (k_norm is None)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens:
        _rope_kv_write[(num_tokens,)](
            q,
            k,
            v,
            out,
            kv_layer,
            positions,
            slot_mapping,
            cos_sin,
            q if q_norm is None else q_norm,
            k if k_norm is None else k_norm,
            eps,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            kv_layer.stride(0),
            kv_layer.stride(1),
            kv_layer.stride(2),
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            HEADS_PADDED=triton.next_power_of_2(num_heads),
            KV_HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
            BLOCK_SIZE=kv_layer.shape[3],
            HALF=head_dim // 2,
            HALF_PADDED=triton.next_power_of_2(head_dim // 2),
            NORM=q_norm is not None,
            num_warps=4,
            **overlapped(q.device),
        )
    return out


@triton.jit
def _kv_write(
    k,
    v,
    kv,
    slot_mapping,
    k_token_stride,
    v_token_stride,
    kv_block_stride,
    kv_value_stride,
    kv_head_stride,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    """One token: its K, or its V."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    head = tl.arange(0, HEADS_PADDED)[:, None]
    column = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    here = (head < HEADS) & (column < HEAD_DIM)
    place = (
        kv + (slot // BLOCK_SIZE) * kv_block_stride + (slot % BLOCK_SIZE) * HEAD_DIM + head * kv_head_stride + column
    )
    if tl.program_id(1) == 0:
        rows = tl.load(k + token * k_token_stride + head * HEAD_DIM + column, mask=here)
        tl.store(place, rows.to(kv.dtype.element_ty), mask=here)
    else:
        rows = tl.load(v + token * v_token_stride + head * HEAD_DIM + column, mask=here)
        tl.store(place + kv_value_stride, rows.to(kv.dtype.element_ty), mask=here)


@triton.jit
def _rope_kv_write(
    q,
    k,
    v,
    out,
    kv,
    positions,
    slot_mapping,
    cos_sin,
    q_norm,
    k_norm,
    eps,
    q_token_stride,
    k_token_stride,
    v_token_stride,
    kv_block_stride,
    kv_value_stride,
    kv_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One token: all its heads. What no kernel of this layer writes is asked for before the wait, and all else at once
    behind it: there is little to compute, so that each time one waits for memory counts."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_PADDED)
    in_half = pair < HALF
    angles = cos_sin + tl.load(positions + token) * 2 * HALF + pair
    slot = tl.load(slot_mapping + token)
    cos = tl.load(angles, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=in_half, other=0.0).to(tl.float32)
    q_factor, q_second_factor, k_factor, k_second_factor = cos, cos, cos, cos
    if NORM:
        q_factor, q_second_factor = load_factors(q_norm, pair, HALF)
        k_factor, k_second_factor = load_factors(k_norm, pair, HALF)
    wait_before_successor(OVERLAPPED)
    head = tl.arange(0, HEADS_PADDED)
    here = (head < HEADS)[:, None] & in_half[None, :]
    q_first, q_second = load_halves(q + token * q_token_stride, head, pair, here, HALF)
    kv_head = tl.arange(0, KV_HEADS_PADDED)
    kv_here = (kv_head < KV_HEADS)[:, None] & in_half[None, :]
    k_first, k_second = load_halves(k + token * k_token_stride, kv_head, pair, kv_here, HALF)
    v_first, v_second = load_halves(v + token * v_token_stride, kv_head, pair, kv_here, HALF)

    q_first, q_second = turn_halves(q_first, q_second, q_factor, q_second_factor, q_norm, eps, cos, sin, HALF, NORM)
    place = out + token * HEADS * 2 * HALF + head[:, None] * 2 * HALF + pair[None, :]
    tl.store(place, q_first, mask=here)
    tl.store(place + HALF, q_second, mask=here)
    k_first, k_second = turn_halves(k_first, k_second, k_factor, k_second_factor, k_norm, eps, cos, sin, HALF, NORM)
    place = kv + (slot // BLOCK_SIZE) * kv_block_stride + (slot % BLOCK_SIZE) * 2 * HALF
    place += kv_head[:, None] * kv_head_stride + pair[None, :]
    tl.store(place, k_first.to(kv.dtype.element_ty), mask=kv_here)
    tl.store(place + HALF, k_second.to(kv.dtype.element_ty), mask=kv_here)
    tl.store(place + kv_value_stride, v_first.to(kv.dtype.element_ty), mask=kv_here)
    tl.store(place + kv_value_stride + HALF, v_second.to(kv.dtype.element_ty), mask=kv_here)
