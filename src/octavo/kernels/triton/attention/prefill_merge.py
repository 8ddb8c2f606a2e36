"""Merges the parts of prefill tiles whose keys several programs share, in portable Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.attention import softmax
from octavo.kernels.triton.attention.softmax import MIN_SCORE


@triton.jit
def count_parts(tiles, count, num_programs, HEADS: tl.constexpr, KEYS: tl.constexpr, MAY_SPLIT: tl.constexpr):
    """(number of items, parts of each tile). If there are fewer tiles than programs, a tile's keys are split into parts
    of at least two tiles of keys. The first tile has the most keys."""
    num_items = tl.load(count) * HEADS
    num_parts = 1
    if MAY_SPLIT:
        longest = tl.cdiv(tl.load(tiles + 2) + tl.load(tiles + 3), KEYS)
        num_parts = tl.maximum(tl.minimum(num_programs // tl.maximum(num_items, 1), longest // 2), 1)
    return num_items * num_parts, num_parts


@triton.jit
def merge_parts(
    out,
    lse,
    sinks,
    partial,
    partial_lse,
    tiles,
    count,
    num_programs,
    NUM_HEADS: tl.constexpr,
    PACKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS_PER_STEP: tl.constexpr,
    WITH_LSE: tl.constexpr,
    WITH_SINKS: tl.constexpr,
):
    """Merge the parts of one row of a tile, PARTS_PER_STEP at a time."""
    HEADS: tl.constexpr = NUM_HEADS // PACKED
    num_items, num_parts = count_parts(tiles, count, num_programs, HEADS, KEYS, True)
    item = tl.program_id(0)
    row = tl.program_id(1)
    tile = item // HEADS
    if (num_parts > 1) & (item * num_parts < num_items):
        query = row // PACKED
        if query < tl.load(tiles + tile * 4 + 2):
            column = tl.arange(0, HEAD_DIM_PADDED)
            row_max = MIN_SCORE
            row_sum = 0.0
            acc = tl.zeros([HEAD_DIM_PADDED], tl.float32)
            for base in range(0, num_parts, PARTS_PER_STEP):
                part = base + tl.arange(0, PARTS_PER_STEP)
                mask = part < num_parts
                offset = ((tile * num_parts + part) * HEADS + item % HEADS) * ROWS + row
                part_lses = tl.load(partial_lse + offset, mask=mask, other=MIN_SCORE)
                parts = tl.load(
                    partial + offset[:, None] * HEAD_DIM_PADDED + column[None, :], mask=mask[:, None], other=0.0
                )
                row_max, row_sum, acc = softmax.merge_parts_of_row(row_max, row_sum, acc, part_lses, 1.0, parts)
            head = item % HEADS * PACKED + row % PACKED
            if WITH_SINKS:
                row_max, row_sum, acc = softmax.merge_sinks(row_max, row_sum, acc, sinks, head)
            token = (tl.load(tiles + tile * 4 + 1) + query).to(tl.int64)
            out_row = token * NUM_HEADS + head
            softmax.write_row(out, lse, out_row, column, row_max, row_sum, acc, HEAD_DIM, WITH_LSE)
