"""Rotary position embedding on a GPU, in Triton, and the norm of heads before it: parts of kernels that also write."""

from __future__ import annotations

import triton
import triton.language as tl


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
