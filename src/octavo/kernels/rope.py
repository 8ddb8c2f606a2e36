"""Rotary position embedding on a GPU, in Triton: q and k in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.apply_rope`. q and k may be views of a fused projection; what comes back is contiguous."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert q.stride()[1:] == k.stride()[1:] == (head_dim, 1), (q.stride(), k.stride())
    assert cos_sin.is_contiguous() and cos_sin.shape[1] == head_dim, cos_sin.shape
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if num_tokens:
        _apply_rope[(num_tokens,)](
            q,
            k,
            q_out,
            k_out,
            positions,
            cos_sin,
            q.stride(0),
            k.stride(0),
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            HEADS_PADDED=triton.next_power_of_2(num_heads),
            KV_HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
            HALF=head_dim // 2,
            HALF_PADDED=triton.next_power_of_2(head_dim // 2),
            num_warps=4,
        )
    return q_out, k_out


@triton.jit
def turn_heads(x, weight, eps, cos, sin, head, pair, here, HALF: tl.constexpr, NORM: tl.constexpr):
    """Both halves of one token's heads, turned and rounded; x points at its first head, cos and sin are [1, HALF].

    NORM: each head is normalised by its root mean square and weighted first, as `reference.rms_norm` does it.
    """
    place = x + head[:, None] * 2 * HALF + pair[None, :]
    first = tl.load(place, mask=here, other=0.0)
    second = tl.load(place + HALF, mask=here, other=0.0)
    if NORM:
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        square = tl.sum(wide_first * wide_first + wide_second * wide_second, 1)
        scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        in_half = (pair < HALF)[None, :]
        wide_first, wide_second = wide_first * scale, wide_second * scale
        if weight.dtype.element_ty == first.dtype:  # a wider weight is applied before rounding
            wide_first = wide_first.to(first.dtype).to(tl.float32)
            wide_second = wide_second.to(second.dtype).to(tl.float32)
        factor = tl.load(weight + pair[None, :], mask=in_half, other=0.0).to(tl.float32)
        first = (wide_first * factor).to(first.dtype)
        factor = tl.load(weight + HALF + pair[None, :], mask=in_half, other=0.0).to(tl.float32)
        second = (wide_second * factor).to(second.dtype)
    a, b = first.to(tl.float32), second.to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(second.dtype)


@triton.jit
def _apply_rope(
    q,
    k,
    q_out,
    k_out,
    positions,
    cos_sin,
    q_token_stride,
    k_token_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """One token: all heads of q and k."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_PADDED)
    in_half = (pair < HALF)[None, :]
    angles = cos_sin + tl.load(positions + token) * 2 * HALF + pair[None, :]
    cos = tl.load(angles, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=in_half, other=0.0).to(tl.float32)
    head = tl.arange(0, HEADS_PADDED)
    here = (head < HEADS)[:, None] & in_half
    first, second = turn_heads(q + token * q_token_stride, q, 0.0, cos, sin, head, pair, here, HALF, False)
    place = q_out + token * HEADS * 2 * HALF + head[:, None] * 2 * HALF + pair[None, :]
    tl.store(place, first, mask=here)
    tl.store(place + HALF, second, mask=here)
    head = tl.arange(0, KV_HEADS_PADDED)
    here = (head < KV_HEADS)[:, None] & in_half
    first, second = turn_heads(k + token * k_token_stride, k, 0.0, cos, sin, head, pair, here, HALF, False)
    place = k_out + token * KV_HEADS * 2 * HALF + head[:, None] * 2 * HALF + pair[None, :]
    tl.store(place, first, mask=here)
    tl.store(place + HALF, second, mask=here)
