"""Writes K and V into their slots of the KV pool, in Triton: alone, or after QK-norm and RoPE in the same launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.launch import or_placeholder, pdl_options, wait_before_successor
from octavo.kernels.triton.rope import load_halves, load_norm_weight, rotate_halves


def kv_write(k: Tensor, v: Tensor, kv_layer: Tensor, slot_mapping: Tensor, *, kv_scales: Tensor | None = None) -> None:
    """`reference.kv_write`. k and v may be views of a fused projection."""
    num_tokens, num_kv_heads, head_dim = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1), (k.stride(), v.stride())
    assert kv_layer.stride()[3:] == (head_dim, 1), kv_layer.stride()
    if num_tokens:
        _kv_write[(num_tokens, 2)](
            k,
            v,
            kv_layer,
            *or_placeholder(k, kv_scales),
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
            LIMIT=float8_limit(kv_layer, kv_scales),
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
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Normalise and rotate the heads of q and k, write K and V into their slots -> rotated q.

    q_norm, k_norm  [head_dim] weights of `rms_norm`, or None for models without QK-norm
    q               [num_tokens, num_heads, head_dim]; may be a view of a fused projection
    k, v            [num_tokens, num_kv_heads, head_dim]; likewise
    positions, slot_mapping  [num_tokens]
    cos_sin         from `rope_table`

    One launch; rotated K goes straight to its slot. Everything but q, k and v is read before the preceding kernel has
    ended, so that kernel must not write it.
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
            *or_placeholder(q, kv_scales),
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
            LIMIT=float8_limit(kv_layer, kv_scales),
            num_warps=4,
            **pdl_options(q.device),
        )
    return out


def float8_limit(kv_layer: Tensor, kv_scales: Tensor | None) -> int:
    """The largest number of a float8 pool; 0 for one in the dtype of the activations."""
    return 0 if kv_scales is None else int(torch.finfo(kv_layer.dtype).max)


@triton.jit
def _to_pool(x, kv, scale, LIMIT: tl.constexpr):
    """x in the pool's dtype. In float8, x / scale, cut off at LIMIT; NaN if x is not finite: faults are found."""
    if LIMIT:
        x = x.to(tl.float32) / scale
        x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -LIMIT), LIMIT), float("nan"))
    return x.to(kv.dtype.element_ty)


@triton.jit
def _kv_write(
    k,
    v,
    kv,
    kv_scales,
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
    LIMIT: tl.constexpr,
):
    """Write one token's K, or its V."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    head = tl.arange(0, HEADS_PADDED)[:, None]
    column = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    mask = (head < HEADS) & (column < HEAD_DIM)
    ptrs = kv + (slot // BLOCK_SIZE) * kv_block_stride + (slot % BLOCK_SIZE) * HEAD_DIM + head * kv_head_stride + column
    scale = 1.0
    if LIMIT:
        scale = tl.load(kv_scales + tl.program_id(1) * HEADS + head, mask=head < HEADS, other=1.0)
    if tl.program_id(1) == 0:
        rows = tl.load(k + token * k_token_stride + head * HEAD_DIM + column, mask=mask)
        tl.store(ptrs, _to_pool(rows, kv, scale, LIMIT), mask=mask)
    else:
        rows = tl.load(v + token * v_token_stride + head * HEAD_DIM + column, mask=mask)
        tl.store(ptrs + kv_value_stride, _to_pool(rows, kv, scale, LIMIT), mask=mask)


@triton.jit
def _rope_kv_write(
    q,
    k,
    v,
    out,
    kv,
    kv_scales,
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
    LIMIT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """All heads of one token.

    Tensors that no kernel of this layer writes are loaded before the wait, everything else right after it: there is
    little to compute, so each wait for memory counts.
    """
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_PADDED)
    in_half = pair < HALF
    angles = cos_sin + tl.load(positions + token) * 2 * HALF + pair
    slot = tl.load(slot_mapping + token)
    cos = tl.load(angles, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=in_half, other=0.0).to(tl.float32)
    q_weight, q_second_weight, k_weight, k_second_weight = cos, cos, cos, cos
    if NORM:
        q_weight, q_second_weight = load_norm_weight(q_norm, pair, HALF)
        k_weight, k_second_weight = load_norm_weight(k_norm, pair, HALF)
    kv_head = tl.arange(0, KV_HEADS_PADDED)
    k_scale, v_scale = 1.0, 1.0
    if LIMIT:
        k_scale = tl.load(kv_scales + kv_head, mask=kv_head < KV_HEADS, other=1.0)[:, None]
        v_scale = tl.load(kv_scales + KV_HEADS + kv_head, mask=kv_head < KV_HEADS, other=1.0)[:, None]
    wait_before_successor(USE_PDL)
    head = tl.arange(0, HEADS_PADDED)
    mask = (head < HEADS)[:, None] & in_half[None, :]
    q_first, q_second = load_halves(q + token * q_token_stride, head, pair, mask, HALF)
    kv_mask = (kv_head < KV_HEADS)[:, None] & in_half[None, :]
    k_first, k_second = load_halves(k + token * k_token_stride, kv_head, pair, kv_mask, HALF)
    v_first, v_second = load_halves(v + token * v_token_stride, kv_head, pair, kv_mask, HALF)

    q_first, q_second = rotate_halves(q_first, q_second, q_weight, q_second_weight, q_norm, eps, cos, sin, HALF, NORM)
    ptrs = out + token * HEADS * 2 * HALF + head[:, None] * 2 * HALF + pair[None, :]
    tl.store(ptrs, q_first, mask=mask)
    tl.store(ptrs + HALF, q_second, mask=mask)
    k_first, k_second = rotate_halves(k_first, k_second, k_weight, k_second_weight, k_norm, eps, cos, sin, HALF, NORM)
    ptrs = kv + (slot // BLOCK_SIZE) * kv_block_stride + (slot % BLOCK_SIZE) * 2 * HALF
    ptrs += kv_head[:, None] * kv_head_stride + pair[None, :]
    tl.store(ptrs, _to_pool(k_first, kv, k_scale, LIMIT), mask=kv_mask)
    tl.store(ptrs + HALF, _to_pool(k_second, kv, k_scale, LIMIT), mask=kv_mask)
    tl.store(ptrs + kv_value_stride, _to_pool(v_first, kv, v_scale, LIMIT), mask=kv_mask)
    tl.store(ptrs + kv_value_stride + HALF, _to_pool(v_second, kv, v_scale, LIMIT), mask=kv_mask)
