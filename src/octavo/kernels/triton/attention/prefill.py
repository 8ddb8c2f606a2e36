"""Paged attention for queries of any length, in Triton. See `paged_attention`.

Longer queries are bound by arithmetic: a program takes a tile of queries, the heads of a group side by side as rows of
one matrix, and walks over the keys that any of them sees (FlashAttention-2, arXiv 2307.08691). As in decoding, the ids
of the next tile's blocks are loaded while this tile is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.query_tiles import query_tiles
from octavo.kernels.triton.attention.softmax import LN_2, LOG2_E, NOTHING, load_rows


@dataclass(frozen=True, slots=True)
class ChunkTuning:
    """rows: of a tile of queries, the group's heads side by side; tile: keys read at a time."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def chunk_tuning(q: Tensor, max_query_len: int, group_size: int) -> ChunkTuning:
    """What was fastest on an H200; see benchmarks/kernels/gpu_check.py."""
    head_dim = triton.next_power_of_2(q.shape[2])
    if q.dtype == torch.float32:  # for tests: products of float32 are done without the matrix units
        return ChunkTuning(rows=32, tile=16 if head_dim > 128 else 32, num_warps=4, num_stages=2)
    tile = 32 if head_dim > 128 else 64
    if max_query_len * group_size <= 16:
        return ChunkTuning(rows=16, tile=tile, num_warps=4, num_stages=3)
    return ChunkTuning(rows=64, tile=tile, num_warps=4, num_stages=3)


def chunk_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    window: int,
    skip_single: bool,
    tuning: ChunkTuning | None = None,
) -> None:
    """Attention of queries of any lengths, into their rows of out and lse (empty if nobody asks).

    skip_single: leave sequences with one query to `decode_attention`.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2:4]
    group_size = num_heads // num_kv_heads
    longest = 64 if batch.fixed_split else batch.max_query_len
    tuning = tuning or chunk_tuning(q, longest, group_size)
    queries = tuning.rows // group_size
    tiles = query_tiles(batch, queries, tuning.tile, num_tokens, skip_single=skip_single).tiles
    _chunk[(tiles.shape[0] * num_kv_heads,)](
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
        WINDOWED=window > 0,
        WITH_LSE=lse.numel() > 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


@triton.jit(do_not_specialize=["window", "table_stride"])
def _chunk(
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
    WINDOWED: tl.constexpr,
    WITH_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of queries and one K/V head: ROWS rows, of which those of its queries are used."""
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
    wanted = query < num_queries
    token = (first_token + query).to(tl.int64)
    place = token * NUM_KV_HEADS * GROUP + heads
    if seq >= 0:
        position = first_position + query
        wanted_2d = wanted[:, None] & in_head[None, :]
        queries = tl.load(
            q + (token * q_token_stride + heads * q_head_stride)[:, None] + column[None, :], mask=wanted_2d, other=0.0
        )
        # Keys, in tiles: [low, full) are seen by all of these queries, [full, high) by some; with a window, all by some
        high = first_position + num_queries
        first_key = 0
        low = 0
        full = (first_position + 1) // TILE * TILE
        if WINDOWED:
            first_key = tl.maximum(first_position - window + 1, 0)
            low = first_key // TILE * TILE
            full = low
        best = tl.full([ROWS], NOTHING, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
        table = block_tables + seq.to(tl.int64) * table_stride
        kv_head = kv + head * kv_head_stride
        last_block = (high - 1) // BLOCK_SIZE
        ids = tl.load(table + tl.minimum((low + tl.arange(0, TILE)) // BLOCK_SIZE, last_block))
        if not WINDOWED:
            acc, best, total, ids = _attend(
                acc, best, total, ids, queries, position, low, full, 0, high, last_block, table, kv_head, scale, window,
                kv_block_stride, kv_value_stride,
                BLOCK_SIZE, HEAD_DIM, HEAD_DIM_PADDED, TILE, False, WINDOWED, PRECISION,
            )  # fmt: skip
        acc, best, total, ids = _attend(
            acc, best, total, ids, queries, position, full, high, first_key, high, last_block, table, kv_head, scale,
            window, kv_block_stride, kv_value_stride,
            BLOCK_SIZE, HEAD_DIM, HEAD_DIM_PADDED, TILE, True, WINDOWED, PRECISION,
        )  # fmt: skip
        total = tl.where(wanted, total, 1.0)  # a padding row may have seen nothing
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + place[:, None] * HEAD_DIM + column[None, :], result, mask=wanted_2d)
        if WITH_LSE:
            tl.store(lse + place, (best + tl.log2(total)) * LN_2, mask=wanted)


@triton.jit
def _attend(
    acc,
    best,
    total,
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
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the keys [begin, end) to the running result; ids are the blocks of its first tile.

    A row may see none of a tile's keys, under a window: its scores are -inf, whose exponential is 0, because the best
    is finite even before the first key.
    """
    key = tl.arange(0, TILE)
    column = tl.arange(0, HEAD_DIM_PADDED)
    in_head = column < HEAD_DIM
    for start in range(begin, end, TILE):
        position = start + key
        offset = ids.to(tl.int64) * kv_block_stride + (position % BLOCK_SIZE) * HEAD_DIM
        ids = tl.load(table + tl.minimum((position + TILE) // BLOCK_SIZE, last_block))
        place = kv + offset[:, None] + column[None, :]
        here = position < num_keys
        if WINDOWED:
            here &= position >= first_key
        if MASKED:
            keys = tl.load(place, mask=here[:, None] & in_head[None, :], other=0.0)
        else:
            keys = load_rows(place, in_head, HEAD_DIM, HEAD_DIM_PADDED)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        if MASKED:
            distance = query_position[:, None] - position[None, :]
            seen = distance >= 0
            if WINDOWED:
                seen &= distance < window
            scores = tl.where(seen, scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_best[:, None])
        decay = tl.exp2(best - new_best)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        if MASKED:
            values = tl.load(place + kv_value_stride, mask=here[:, None] & in_head[None, :], other=0.0)
        else:
            values = load_rows(place + kv_value_stride, in_head, HEAD_DIM, HEAD_DIM_PADDED)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        best = new_best
    return acc, best, total, ids
