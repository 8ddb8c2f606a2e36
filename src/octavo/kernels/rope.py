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
def load_halves(x, head, pair, here, HALF: tl.constexpr):
    """Both halves of one token's heads; x points at the first of them."""
    place = x + head[:, None] * 2 * HALF + pair[None, :]
    return tl.load(place, mask=here, other=0.0), tl.load(place + HALF, mask=here, other=0.0)


@triton.jit
def load_factors(weight, pair, HALF: tl.constexpr):
    """Both halves of a norm's weight."""
    first = tl.load(weight + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    return first, tl.load(weight + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)


@triton.jit
def normed(x, scale, factor, like):
    """`reference.rms_norm` of heads by a scale each. like: where the weight comes from, a wider one than x being
    applied before rounding."""
    wide = x.to(tl.float32) * scale[:, None]
    if like.dtype.element_ty == x.dtype:
        wide = wide.to(x.dtype).to(tl.float32)
    return (wide * factor[None, :]).to(x.dtype)


@triton.jit
def turned(x, partner, cos, sin):
    """A part of heads, by what is half a head away from it; sin is negative for first halves."""
    return (x.to(tl.float32) * cos[None, :] + partner.to(tl.float32) * sin[None, :]).to(x.dtype)


@triton.jit
def turn_halves(first, second, factor, second_factor, like, eps, cos, sin, HALF: tl.constexpr, NORM: tl.constexpr):
    """Both halves of heads, each head normalised first if NORM."""
    if NORM:
        a, b = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)
        first, second = normed(first, scale, factor, like), normed(second, scale, second_factor, like)
    return turned(first, second, cos, -sin), turned(second, first, cos, sin)


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
    in_half = pair < HALF
    angles = cos_sin + tl.load(positions + token) * 2 * HALF + pair
    cos = tl.load(angles, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=in_half, other=0.0).to(tl.float32)
    head = tl.arange(0, HEADS_PADDED)
    here = (head < HEADS)[:, None] & in_half[None, :]
    first, second = load_halves(q + token * q_token_stride, head, pair, here, HALF)
    place = q_out + token * HEADS * 2 * HALF + head[:, None] * 2 * HALF + pair[None, :]
    tl.store(place, turned(first, second, cos, -sin), mask=here)
    tl.store(place + HALF, turned(second, first, cos, sin), mask=here)
    head = tl.arange(0, KV_HEADS_PADDED)
    here = (head < KV_HEADS)[:, None] & in_half[None, :]
    first, second = load_halves(k + token * k_token_stride, head, pair, here, HALF)
    place = k_out + token * KV_HEADS * 2 * HALF + head[:, None] * 2 * HALF + pair[None, :]
    tl.store(place, turned(first, second, cos, -sin), mask=here)
    tl.store(place + HALF, turned(second, first, cos, sin), mask=here)
