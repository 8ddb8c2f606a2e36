"""Portable prefill attention: paged attention for queries of any length, in Triton.

Prefill is bound by arithmetic. A program takes a tile of queries, with the query heads of one K/V head as rows of one
matrix, and loops over the keys that any of them sees (FlashAttention-2, arXiv 2307.08691). As in decode, block ids are
loaded one tile ahead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.common import LN_2, LOG2_E, MIN_SCORE, load_kv_rows
from octavo.kernels.triton.attention.prefill_tuning import PrefillTuning, prefill_tuning
from octavo.kernels.triton.attention.query_tiles import query_tiles


def prefill_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    window: int,
    skip_single: bool,
    tuning: PrefillTuning | None = None,
) -> None:
    """Attention of queries of any length, written to their rows of out and lse.

    lse          [num_tokens, num_heads] float32, or empty if it is not needed
    skip_single  leave sequences with one query to `decode_attention`
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2:4]
    group_size = num_heads // num_kv_heads
    max_query_len = 64 if batch.fixed_split else batch.max_query_len
    tuning = tuning or prefill_tuning(q, max_query_len, group_size)
    queries = tuning.rows // group_size
    tiles = query_tiles(batch, queries, tuning.tile, num_tokens, skip_single=skip_single).tiles
    _prefill[(tiles.shape[0] * num_kv_heads,)](
        q,
        kv_layer,
        out,
        lse,
        tiles,
        batch.block_tables,
        scale * LOG2_E,
        window,
        q.stride(0),
        q.stride(1),
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        batch.block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group_size,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=max(triton.next_power_of_2(head_dim), 16),
        ROWS=tuning.rows,
        TILE=tuning.tile,
        SLIDING_WINDOW=window > 0,
        WITH_LSE=lse.numel() > 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


@triton.jit(do_not_specialize=["window", "table_stride"])
def _prefill(
    q,
    kv,
    out,
    lse,
    tiles,
    block_tables,
    scale,
    window,
    q_token_stride,
    q_head_stride,
    kv_block_stride,
    kv_value_stride,
    kv_head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    WITH_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of queries and one K/V head; rows past its queries are padding."""
    tile = tl.program_id(0) // NUM_KV_HEADS
    head = tl.program_id(0) % NUM_KV_HEADS
    seq = tl.load(tiles + tile * 4)
    first_token = tl.load(tiles + tile * 4 + 1)
    num_queries = tl.load(tiles + tile * 4 + 2)
    first_position = tl.load(tiles + tile * 4 + 3)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, HEAD_DIM_PADDED)
    query = row // GROUP
    heads = head * GROUP + row % GROUP
    in_head = column < HEAD_DIM
    row_mask = query < num_queries
    token = (first_token + query).to(tl.int64)
    out_row = token * NUM_KV_HEADS * GROUP + heads
    if seq >= 0:
        position = first_position + query
        row_mask_2d = row_mask[:, None] & in_head[None, :]
        queries = tl.load(
            q + (token * q_token_stride + heads * q_head_stride)[:, None] + column[None, :], mask=row_mask_2d, other=0.0
        )
        # Tiles of keys: all queries see those in [key_begin, masked_begin), some see the rest. A window masks all.
        key_end = first_position + num_queries
        first_key = 0
        key_begin = 0
        masked_begin = (first_position + 1) // TILE * TILE
        if SLIDING_WINDOW:
            first_key = tl.maximum(first_position - window + 1, 0)
            key_begin = first_key // TILE * TILE
            masked_begin = key_begin
        row_max = tl.full([ROWS], MIN_SCORE, tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
        table = block_tables + seq.to(tl.int64) * table_stride
        kv_head = kv + head * kv_head_stride
        last_block = (key_end - 1) // BLOCK_SIZE
        ids = tl.load(table + tl.minimum((key_begin + tl.arange(0, TILE)) // BLOCK_SIZE, last_block))
        if not SLIDING_WINDOW:
            acc, row_max, row_sum, ids = _attend(
                acc, row_max, row_sum, ids, queries, position, key_begin, masked_begin, 0, key_end, last_block, table,
                kv_head, scale, window, kv_block_stride, kv_value_stride,
                BLOCK_SIZE, HEAD_DIM, HEAD_DIM_PADDED, TILE, False, SLIDING_WINDOW, PRECISION,
            )  # fmt: skip
        acc, row_max, row_sum, ids = _attend(
            acc, row_max, row_sum, ids, queries, position, masked_begin, key_end, first_key, key_end, last_block, table,
            kv_head, scale, window, kv_block_stride, kv_value_stride,
            BLOCK_SIZE, HEAD_DIM, HEAD_DIM_PADDED, TILE, True, SLIDING_WINDOW, PRECISION,
        )  # fmt: skip
        row_sum = tl.where(row_mask, row_sum, 1.0)  # padding rows may have seen no key
        result = (acc / row_sum[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_row[:, None] * HEAD_DIM + column[None, :], result, mask=row_mask_2d)
        if WITH_LSE:
            tl.store(lse + out_row, (row_max + tl.log2(row_sum)) * LN_2, mask=row_mask)


@triton.jit
def _attend(
    acc,
    row_max,
    row_sum,
    ids,
    queries,
    query_position,
    begin,
    end,
    first_key,
    num_keys,
    last_block,
    table,
    kv,
    scale,
    window,
    kv_block_stride,
    kv_value_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the keys [begin, end) to the running result; ids are the blocks of the first tile.

    With a window, a row may see none of a tile's keys: its scores are -inf, whose exponential is 0, because the row
    maximum is finite even before the first key.
    """
    key = tl.arange(0, TILE)
    column = tl.arange(0, HEAD_DIM_PADDED)
    in_head = column < HEAD_DIM
    for start in range(begin, end, TILE):
        position = start + key
        offset = ids.to(tl.int64) * kv_block_stride + (position % BLOCK_SIZE) * HEAD_DIM
        ids = tl.load(table + tl.minimum((position + TILE) // BLOCK_SIZE, last_block))
        ptrs = kv + offset[:, None] + column[None, :]
        mask = position < num_keys
        if SLIDING_WINDOW:
            mask &= position >= first_key
        if MASKED:
            keys = tl.load(ptrs, mask=mask[:, None] & in_head[None, :], other=0.0)
        else:
            keys = load_kv_rows(ptrs, in_head, HEAD_DIM, HEAD_DIM_PADDED)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        if MASKED:
            distance = query_position[:, None] - position[None, :]
            visible = distance >= 0
            if SLIDING_WINDOW:
                visible &= distance < window
            scores = tl.where(visible, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        if MASKED:
            values = tl.load(ptrs + kv_value_stride, mask=mask[:, None] & in_head[None, :], other=0.0)
        else:
            values = load_kv_rows(ptrs + kv_value_stride, in_head, HEAD_DIM, HEAD_DIM_PADDED)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum, ids
