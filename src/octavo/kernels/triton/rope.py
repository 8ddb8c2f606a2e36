"""Device functions for RoPE and the norm of heads before it; `kv.write` calls them. In Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_halves(x, head, pair, mask, HALF: tl.constexpr):
    """Load both halves of one token's heads; x points at the first head."""
    ptrs = x + head[:, None] * 2 * HALF + pair[None, :]
    return tl.load(ptrs, mask=mask, other=0.0), tl.load(ptrs + HALF, mask=mask, other=0.0)


@triton.jit
def load_norm_weight(weight, pair, HALF: tl.constexpr):
    """Load both halves of a norm's weight."""
    first = tl.load(weight + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    return first, tl.load(weight + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)


@triton.jit
def norm(x, scale, weight, weight_ptr):
    """`reference.rms_norm` with a given scale for each head. weight_ptr: a weight wider than x is applied before
    rounding."""
    wide = x.to(tl.float32) * scale[:, None]
    if weight_ptr.dtype.element_ty == x.dtype:
        wide = wide.to(x.dtype).to(tl.float32)
    return (wide * weight[None, :]).to(x.dtype)


@triton.jit
def rotate(x, partner, cos, sin):
    """Rotate one half of heads; partner is the other half, and sin is negative for first halves."""
    return (x.to(tl.float32) * cos[None, :] + partner.to(tl.float32) * sin[None, :]).to(x.dtype)


@triton.jit
def rotate_halves(
    first, second, weight, second_weight, weight_ptr, eps, cos, sin, HALF: tl.constexpr, NORM: tl.constexpr
):
    """Rotate both halves of heads; with NORM, normalise each head first."""
    if NORM:
        a, b = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)
        first, second = (norm(first, scale, weight, weight_ptr), norm(second, scale, second_weight, weight_ptr))
    return rotate(first, second, cos, -sin), rotate(second, first, cos, sin)
