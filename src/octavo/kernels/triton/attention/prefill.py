"""Portable prefill attention: paged attention for queries of any length, in Triton.

Prefill is bound by arithmetic. A program takes a tile of queries, with the query heads of one K/V head as rows of one
matrix, and loops over the keys that any of them sees (FlashAttention-2, arXiv 2307.08691). As in decode, block ids are
loaded one tile ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention import softmax
from octavo.kernels.triton.attention.kv_tile import load_kv_tile, locate_keys
from octavo.kernels.triton.attention.prefill_tuning import PrefillTuning, prefill_tuning
from octavo.kernels.triton.attention.query_tiles import query_tiles
from octavo.kernels.triton.attention.softmax import LOG2_E, padded_size
from octavo.kernels.triton.launch import or_placeholder


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
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
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
        *or_placeholder(q, kv_scales),
        out,
        lse,
        *or_placeholder(q, sinks),
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
        ROWS=tuning.rows,
        TILE=tuning.tile,
        SLIDING_WINDOW=window > 0,
        WITH_LSE=lse.numel() > 0,
        SCALED=kv_scales is not None,
        WITH_SINKS=sinks is not None,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


@triton.jit(do_not_specialize=["window", "table_stride"])
def _prefill(
    q,
    kv,
    kv_scales,
    out,
    lse,
    sinks,
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
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    WITH_LSE: tl.constexpr,
    SCALED: tl.constexpr,
    WITH_SINKS: tl.constexpr,
):
    """One tile of queries and one K/V head; rows past its queries are padding."""
    tile = tl.program_id(0) // NUM_KV_HEADS
    head = tl.program_id(0) % NUM_KV_HEADS
    seq = tl.load(tiles + tile * 4)
    first_token = tl.load(tiles + tile * 4 + 1)
    num_queries = tl.load(tiles + tile * 4 + 2)
    first_position = tl.load(tiles + tile * 4 + 3)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, padded_size(HEAD_DIM, 16))
    query = row // GROUP
    heads = head * GROUP + row % GROUP
    row_mask = query < num_queries
    token = (first_token + query).to(tl.int64)
    out_row = token * NUM_KV_HEADS * GROUP + heads
    if seq >= 0:
        position = first_position + query
        queries = tl.load(
            q + (token * q_token_stride + heads * q_head_stride)[:, None] + column[None, :],
            mask=row_mask[:, None] & (column < HEAD_DIM)[None, :],
            other=0.0,
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
        if SCALED:
            queries = queries.to(softmax.float8_product(queries.dtype))
            scale *= tl.load(kv_scales + head)
        row_max, row_sum, acc = softmax.empty_result(ROWS, queries.shape[1])
        table = block_tables + seq.to(tl.int64) * table_stride
        kv_head = kv + head * kv_head_stride
        last_block = (key_end - 1) // BLOCK_SIZE
        ids = tl.load(table + tl.minimum((key_begin + tl.arange(0, TILE)) // BLOCK_SIZE, last_block))
        if not SLIDING_WINDOW:
            row_max, row_sum, acc, ids = _attend(
                row_max, row_sum, acc, ids, queries, position, key_begin, masked_begin, 0, key_end, last_block, table,
                kv_head, scale, window, kv_block_stride, kv_value_stride,
                BLOCK_SIZE, HEAD_DIM, TILE, False, SLIDING_WINDOW,
            )  # fmt: skip
        row_max, row_sum, acc, ids = _attend(
            row_max, row_sum, acc, ids, queries, position, masked_begin, key_end, first_key, key_end, last_block, table,
            kv_head, scale, window, kv_block_stride, kv_value_stride,
            BLOCK_SIZE, HEAD_DIM, TILE, True, SLIDING_WINDOW,
        )  # fmt: skip
        if SCALED:
            acc *= tl.load(kv_scales + NUM_KV_HEADS + head)
        if WITH_SINKS:
            row_max, row_sum, acc = softmax.merge_sinks(row_max, row_sum, acc, sinks, heads)
        row_sum = tl.where(row_mask, row_sum, 1.0)  # padding rows may have seen no key
        softmax.write_rows(out, lse, out_row, column, row_max, row_sum, acc, row_mask, HEAD_DIM, WITH_LSE)


@triton.jit
def _attend(
    row_max,
    row_sum,
    acc,
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
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
):
    """Add the keys [begin, end) to the running result; ids are the blocks of the first tile.

    With a window, a row may see none of a tile's keys: its scores are -inf, whose exponential is 0, because the row
    maximum is finite even before the first key.
    """
    PRECISION: tl.constexpr = softmax.dot_precision(queries.dtype)
    column = tl.arange(0, queries.shape[1])
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        offset = locate_keys(ids, position, kv_block_stride, 0, BLOCK_SIZE, HEAD_DIM)
        ids = tl.load(table + tl.minimum((position + TILE) // BLOCK_SIZE, last_block))
        mask = position < num_keys
        if SLIDING_WINDOW:
            mask &= position >= first_key
        keys = load_kv_tile(kv, offset, column, 0, mask, HEAD_DIM, MASKED)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision=PRECISION)
        if MASKED:
            distance = query_position[:, None] - position[None, :]
            visible = distance >= 0
            if SLIDING_WINDOW:
                visible &= distance < window
            scores = tl.where(visible, scores, -float("inf"))
        row_max, row_sum, weights, rescale = softmax.update(scores, row_max, row_sum, scale)
        acc = acc * rescale[:, None]
        values = load_kv_tile(kv, offset, column, kv_value_stride, mask, HEAD_DIM, MASKED).to(queries.dtype)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return row_max, row_sum, acc, ids
