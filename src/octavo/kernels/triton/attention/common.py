"""Constants and device functions that the attention kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

MAX_GROUP = 16
"""Limit of query heads for each K/V head: they are the rows of one matrix product."""

LOG2_E = 1.4426950408889634
MIN_SCORE = tl.constexpr(-1e30)  # initial row maximum: finite, so that the difference of two is not NaN
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_kv_rows(ptrs, in_head, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    """Load rows of K or V; columns past HEAD_DIM are 0."""
    if HEAD_DIM == HEAD_DIM_PADDED:
        rows = tl.load(ptrs)
    else:
        rows = tl.load(ptrs, mask=in_head[None, :], other=0.0)
    return rows
