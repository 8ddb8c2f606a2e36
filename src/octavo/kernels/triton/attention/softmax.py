"""What the attention kernels share: constants, and loading rows of heads."""

from __future__ import annotations

import triton
import triton.language as tl

MAX_GROUP = 16
"""Query heads that share a K/V head, at most: the rows of one matrix product."""

LOG2_E = 1.4426950408889634
NOTHING = tl.constexpr(-1e30)  # the largest score so far, before any: finite, so that a difference of two is a number
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(place, in_head, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    if HEAD_DIM == HEAD_DIM_PADDED:
        rows = tl.load(place)
    else:
        rows = tl.load(place, mask=in_head[None, :], other=0.0)
    return rows
