"""Online softmax of the attention kernels: running results, their parts, and the rows of the output. Device functions.

A running result of some rows is (row_max, row_sum, acc): the largest score; the sum of the weights 2 ** (score -
row_max); the weighted sum of the values. Scores are in base 2. A part is a running result in memory, which another
program merges: acc in `partial`, row_max and row_sum in `partial_ml`.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_GROUP = 16
"""Limit of query heads for each K/V head: they are the rows of one matrix product."""

LOG2_E = 1.4426950408889634
MIN_SCORE = tl.constexpr(-1e30)  # initial row maximum: finite, so that the difference of two is not NaN
LN_2 = tl.constexpr(0.6931471805599453)


@triton.constexpr_function
def padded_size(size, at_least=1):
    """The next power of two: dimensions of Triton's tensors are powers of two. At least 16 for a matrix product."""
    return max(triton.next_power_of_2(size), at_least)


@triton.constexpr_function
def dot_precision(dtype):
    """Products of float32 do not use the tensor cores, for tests; the setting has no effect on other dtypes."""
    return "ieee" if dtype == tl.float32 else "tf32"


@triton.constexpr_function
def float8_product(dtype):
    """The dtype in which rows of float8 are multiplied: float16 holds them, and the conversion is one instruction for
    two on Hopper, where bfloat16 takes eight. float32 is for tests."""
    return tl.float32 if dtype == tl.float32 else tl.float16


@triton.jit
def empty_result(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The running result of no keys."""
    row_max = tl.full([ROWS], MIN_SCORE, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    return row_max, row_sum, tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def update(scores, row_max, row_sum, scale):
    """Add a tile of scores [rows, keys] -> (row_max, row_sum, weights of the values, factor for acc).

    A score of -inf is a masked key: its weight is 0, because row_max is finite even before the first key.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    return new_max, row_sum * rescale + tl.sum(weights, 1), weights, rescale


@triton.jit
def merge(row_max, row_sum, acc, part_max, part_sum, part):
    """Merge one part of each row [rows, columns] -> (row_max, row_sum, acc)."""
    new_max = tl.maximum(row_max, part_max)
    rescale = tl.exp2(row_max - new_max)
    weight = tl.exp2(part_max - new_max)
    row_sum = row_sum * rescale + part_sum * weight
    return new_max, row_sum, acc * rescale[:, None] + part * weight[:, None]


@triton.jit
def merge_parts_of_row(row_max, row_sum, acc, part_maxes, part_sums, parts):
    """Merge several parts [parts, columns] of one row -> (row_max, row_sum, acc [columns])."""
    new_max = tl.maximum(row_max, tl.max(part_maxes, 0))
    rescale = tl.exp2(row_max - new_max)
    weight = tl.exp2(part_maxes - new_max)
    row_sum = row_sum * rescale + tl.sum(part_sums * weight, 0)
    return new_max, row_sum, acc * rescale + tl.sum(parts * weight[:, None], 0)


@triton.jit
def store_part(
    partial, partial_ml, offset, ml_offset, row_max, row_sum, acc, row_mask, column,
    HEAD_DIM: tl.constexpr, SUM_OFFSET: tl.constexpr,
):  # fmt: skip
    """Store one part of each row: acc from offset [rows] on, row_max at ml_offset [rows], row_sum SUM_OFFSET after."""
    mask = row_mask[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(partial + offset[:, None] + column[None, :], acc, mask=mask)
    tl.store(partial_ml + ml_offset, row_max, mask=row_mask)
    tl.store(partial_ml + ml_offset + SUM_OFFSET, row_sum, mask=row_mask)


@triton.jit
def load_part(
    partial, partial_ml, offset, ml_offset, row_mask, column, HEAD_DIM: tl.constexpr, SUM_OFFSET: tl.constexpr
):
    """Load what `store_part` stored -> (row_max, row_sum, acc); rows outside the mask are empty results.

    Other programs have written it, perhaps in an earlier layer to the same place: it is read past the L1 cache.
    """
    mask = row_mask[:, None] & (column < HEAD_DIM)[None, :]
    part = tl.load(partial + offset[:, None] + column[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    part_max = tl.load(partial_ml + ml_offset, mask=row_mask, other=MIN_SCORE, cache_modifier=".cg")
    part_sum = tl.load(partial_ml + ml_offset + SUM_OFFSET, mask=row_mask, other=0.0, cache_modifier=".cg")
    return part_max, part_sum, part


@triton.jit
def merge_sinks(row_max, row_sum, acc, sinks, head):
    """Merge the sinks of the heads of some rows, or of one, into results of all keys -> (row_max, row_sum, acc)."""
    sink = tl.load(sinks + head) * (1.0 / LN_2)
    new_max = tl.maximum(row_max, sink)
    rescale = tl.exp2(row_max - new_max)
    return new_max, row_sum * rescale + tl.exp2(sink - new_max), acc * tl.expand_dims(rescale, -1)


@triton.jit
def write_rows(out, lse, row, column, row_max, row_sum, acc, row_mask, HEAD_DIM: tl.constexpr, WITH_LSE: tl.constexpr):
    """Write the results of rows of the output, and their log-sum-exp. row [rows]: token * num_heads + head."""
    mask = row_mask[:, None] & (column < HEAD_DIM)[None, :]
    offset = row * HEAD_DIM
    result = (acc / row_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + offset[:, None] + column[None, :], result, mask=mask)
    if WITH_LSE:
        tl.store(lse + row, (row_max + tl.log2(row_sum)) * LN_2, mask=row_mask)


@triton.jit
def write_row(out, lse, row, column, row_max, row_sum, acc, HEAD_DIM: tl.constexpr, WITH_LSE: tl.constexpr):
    """`write_rows` of one row, with acc [columns]."""
    tl.store(out + row * HEAD_DIM + column, (acc / row_sum).to(out.dtype.element_ty), mask=column < HEAD_DIM)
    if WITH_LSE:
        tl.store(lse + row, (row_max + tl.log2(row_sum)) * LN_2)


@triton.jit
def write_empty_row(
    out, lse, query_start, seq_lens, seq,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WITH_LSE: tl.constexpr,
):  # fmt: skip
    """Write 0, and an lse of -inf, to a sequence's row if the sequence has no keys."""
    token = tl.load(query_start + seq).to(tl.int64)
    if (token < tl.load(query_start + seq + 1)) & (tl.load(seq_lens + seq) == 0):
        kv_head = tl.arange(0, padded_size(NUM_KV_HEADS))
        column = tl.arange(0, padded_size(HEAD_DIM, 16))
        mask = kv_head < NUM_KV_HEADS
        mask_2d = mask[:, None] & (column < HEAD_DIM)[None, :]
        zeros = tl.zeros([kv_head.shape[0], column.shape[0]], out.dtype.element_ty)
        for i in range(0, GROUP):
            out_row = (token * NUM_KV_HEADS + kv_head) * GROUP + i
            tl.store(out + out_row[:, None] * HEAD_DIM + column[None, :], zeros, mask=mask_2d)
            if WITH_LSE:
                tl.store(lse + out_row, tl.full([kv_head.shape[0]], -float("inf"), tl.float32), mask=mask)
