"""Decode attention: paged attention for sequences with one query, in Triton.

Decode is bound by memory: every K and V is read once. The keys of all sequences are cut into tiles, the tiles of all
heads are numbered through, and each program of a grid that just fills the GPU takes an equal number of consecutive
tiles, regardless of where sequences begin and end:

    head 0                          head 1
    | seq 0 | seq 1       | seq 2 | | seq 0 | seq 1       | seq 2 |      num_tiles tiles for each head
    |  program 0 |  program 1 |  program 2 |  program 3 |  program 4 |   tiles_per_program tiles for each program

A program that covers a whole (head, sequence) writes its output. Otherwise it stores a partial result; this happens for
at most two sequences, its first and its last. If few programs share a sequence, the last of them to finish merges the
parts; if many do, `_combine` merges them in parallel. The idea is LeanAttention's (arXiv 2405.10480). The
schedule is computed on the device once a step (`decode_schedule`), so a CUDA graph replays with other lengths.

A row with drafts has several lines, each a sequence with one query (`RaggedBatch.lines_per_row`). Neighbouring lines of
a row are a pack: their queries are further rows of the same matrix product, which has room for MATRIX_ROWS, and their
keys are read once. Above, a pack then stands in place of a sequence.

The last bits of a result depend on the batch, because the other sequences decide where a sequence is cut. With
`fixed_split`, each sequence is cut every SPLIT_KEYS keys from its own beginning, and its parts are merged in order.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention import softmax
from octavo.kernels.triton.attention.cascade import (
    PREFIX_FIELDS,
    CascadeTuning,
    cascade_attention,
    cascade_tuning,
    merge_prefix,
)
from octavo.kernels.triton.attention.decode_schedule import (
    PACK_QUERIES,
    PREFIX_TILES,
    PROGRAM_BEGIN,
    ROW_SIZE,
    SEGMENT_INDEX,
    SPLIT_KEYS,
    DecodeSchedule,
    DecodeTuning,
    can_widen,
    decode_tuning,
    load_segment,
    make_decode_schedule,
    make_packs,
)
from octavo.kernels.triton.attention.kv_tile import load_kv_tile, locate_keys, split_pairs
from octavo.kernels.triton.attention.softmax import LOG2_E, MIN_SCORE, padded_size
from octavo.kernels.triton.launch import (
    gdc_launch_dependents,
    gdc_wait,
    or_placeholder,
    pdl_options,
    wait_for_predecessor,
)

MATRIX_ROWS = 16
"""Rows of the matrix product with a tile of keys: query heads of a group, for each query of a pack. Twice as many, in
two warps, where they do not hold a row's lines and a tile is no larger: 8 lines of 256 rows then take half the time."""


def decode_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    window: int,
    decode_only: bool,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
    tuning: DecodeTuning | None = None,
    cascade: CascadeTuning | None = None,
) -> None:
    """Attention of the sequences with one query, written to their rows of out and lse.

    lse              [num_tokens, num_heads] float32, or empty if it is not needed
    decode_only      no sequence has several queries; rows without keys are set to 0
    tuning, cascade  default: the fastest that were measured
    """
    num_kv_heads, group_size, head_dim = kv_layer.shape[2], q.shape[1] // kv_layer.shape[2], q.shape[2]
    # A fixed split begins at a line's own first key, so lines with a window have no splits in common.
    can_pack = decode_only and batch.common_prefix_lens is None and not (batch.fixed_split and window)
    is_wide = batch.lines_per_row * group_size > MATRIX_ROWS and not batch.fixed_split and can_widen(q)
    packs = make_packs(batch, (MATRIX_ROWS << is_wide) // group_size if can_pack else 1)
    is_packed = packs.capacity > 1 and not batch.fixed_split
    tuning = tuning or decode_tuning(
        q, 64 if batch.fixed_split else packs.num, packed=is_packed, wide=is_wide, kv_bytes=kv_layer.itemsize
    )
    split_tiles = SPLIT_KEYS // tuning.tile if batch.fixed_split else 0
    chosen_cascade = None
    if batch.common_prefix_lens is not None and decode_only and not window and not split_tiles:
        chosen_cascade = cascade or cascade_tuning(q)
    key = ("paged_attention.decode", tuning, chosen_cascade, num_kv_heads, group_size, head_dim, window)
    schedule: DecodeSchedule | None = batch.derived.get(key)
    # If an earlier layer made the schedule, this kernel has work to do before q is written.
    early = schedule is not None
    if schedule is None:
        schedule = batch.derived[key] = make_decode_schedule(
            batch, tuning, split_tiles, num_kv_heads, group_size, head_dim, window, chosen_cascade, packs
        )
    if schedule.cascade is not None:
        cascade_attention(q, kv_layer, batch, schedule.cascade, scale=scale, early=early, kv_scales=kv_scales)
    _launch_decode(
        q, kv_layer, kv_scales, sinks, batch, out, lse, schedule, tuning, split_tiles, scale, window, decode_only, early
    )
    if schedule.num_merges:
        _launch_combine(batch, out, lse, sinks, schedule, num_kv_heads, split_tiles, decode_only)


def _launch_decode(
    q: Tensor,
    kv_layer: Tensor,
    kv_scales: Tensor | None,
    sinks: Tensor | None,
    batch: RaggedBatch,
    out: Tensor,
    lse: Tensor,
    schedule: DecodeSchedule,
    tuning: DecodeTuning,
    split_tiles: int,
    scale: float,
    window: int,
    decode_only: bool,
    early: bool,
) -> None:
    plan = schedule.cascade
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    _decode[(len(schedule.arrivals),)](
        q,
        kv_layer,
        *or_placeholder(q, kv_scales),
        out,
        lse,
        *or_placeholder(q, sinks),
        schedule.partial,
        schedule.partial_ml,
        schedule.arrivals,
        batch.block_tables,
        batch.query_start,
        batch.seq_lens,
        schedule.segments,
        schedule.starts,
        schedule.totals,
        *or_placeholder(q, *((plan.partial, plan.partial_ml, plan.prefixes) if plan is not None else (None,) * 3)),
        scale * LOG2_E,
        window,
        batch.num_seqs,
        q.stride(0),
        q.stride(1),
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        batch.block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=q.shape[1] // num_kv_heads,
        QUERIES=schedule.packs.capacity,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        TILE=tuning.tile,
        STAGES=tuning.num_stages,
        SPLIT_TILES=split_tiles,
        SEQ_OVERHEAD=0 if split_tiles else tuning.seq_overhead,
        SLIDING_WINDOW=window > 0,
        WITH_LSE=lse.numel() > 0,
        MERGE_INLINE=schedule.num_merges == 0,
        USE_CASCADE=plan is not None,
        SCALED=kv_scales is not None,
        WITH_SINKS=sinks is not None,
        WRITE_EMPTY_ROWS=decode_only and schedule.num_merges == 0,
        num_warps=tuning.num_warps,
        maxnreg=tuning.registers,
        **(pdl_options(q.device) if early else {"USE_PDL": False}),
    )


def _launch_combine(
    batch: RaggedBatch,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    schedule: DecodeSchedule,
    num_kv_heads: int,
    split_tiles: int,
    decode_only: bool,
) -> None:
    num_heads, head_dim = out.shape[1:]
    group_size = num_heads // num_kv_heads
    num_merges, packs = schedule.num_merges, schedule.packs
    _combine[(num_merges + (batch.num_seqs if decode_only else 0), group_size * packs.queries)](
        out,
        lse,
        *or_placeholder(out, sinks),
        schedule.partial,
        schedule.partial_ml,
        batch.query_start,
        batch.seq_lens,
        schedule.merges,
        num_merges,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group_size,
        QUERIES=packs.capacity,
        HEAD_DIM=head_dim,
        PARTS_PER_STEP=16 if split_tiles or schedule.num_sharers <= 16 else 64,
        SLOTS_PER_PART=1 if split_tiles else 2,
        WITH_LSE=lse.numel() > 0,
        WITH_SINKS=sinks is not None,
        num_warps=4,
        **pdl_options(out.device),
    )


class Prefixes(NamedTuple):
    """The parts of shared prefixes in a kernel; see `CascadePlan`."""

    partial: tl.tensor
    partial_ml: tl.tensor
    fields: tl.tensor


@triton.jit(do_not_specialize=["window", "num_seqs", "table_stride"])
def _decode(
    q,
    kv,
    kv_scales,
    out,
    lse,
    sinks,
    partial,
    partial_ml,
    arrivals,
    block_tables,
    query_start,
    seq_lens,
    segments,
    starts,
    totals,
    prefix_partial,
    prefix_partial_ml,
    prefixes,
    scale,
    window,
    num_seqs,
    q_token_stride,
    q_head_stride,
    kv_block_stride,
    kv_value_stride,
    kv_head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    SEQ_OVERHEAD: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    WITH_LSE: tl.constexpr,
    MERGE_INLINE: tl.constexpr,
    USE_CASCADE: tl.constexpr,
    SCALED: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    WRITE_EMPTY_ROWS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """The tiles of one program. scale is for scores in base 2.

    QUERIES: most queries of a pack. Row r of a product is query head r % GROUP of query r // GROUP.
    USE_PDL: the program loads its schedule before it waits for its predecessor, and lets its successor start when only
    results are left to write.
    """
    program = tl.program_id(0)
    num_tiles = tl.load(totals)
    tiles_per_program = tl.load(totals + 1)
    start_ptr = starts + program * ROW_SIZE
    begin = tl.load(start_ptr + PROGRAM_BEGIN)
    end = tl.load(start_ptr + ROW_SIZE + PROGRAM_BEGIN)
    segment = tl.load(start_ptr + SEGMENT_INDEX)
    seq_begin, seq_end, seq_len, token, seq = load_segment(start_ptr)
    prefix_tiles = 0
    if USE_CASCADE:
        prefix_tiles = tl.load(start_ptr + PREFIX_TILES)
    if QUERIES > 1:
        num_queries = tl.load(start_ptr + PACK_QUERIES)
    row = tl.arange(0, padded_size(GROUP * QUERIES, 16))  # a product has at least 16 rows; the last ones are padding
    column = tl.arange(0, padded_size(HEAD_DIM, 16))
    key = tl.arange(0, TILE)
    in_group = row < GROUP
    in_head = column < HEAD_DIM
    cursor = begin
    while cursor < end:
        head = cursor // num_tiles
        tile = cursor - head * num_tiles
        num_taken = tl.minimum(seq_end - tile, end - cursor)
        slot = 2 * program + (cursor != begin).to(tl.int32)
        if SPLIT_TILES:
            num_taken = SPLIT_TILES
            slot = cursor // SPLIT_TILES
        first_len = seq_len
        row_len = seq_len
        rows_end = GROUP
        if QUERIES > 1:
            first_len = seq_len - num_queries + 1
            row_len = tl.minimum(first_len + row // GROUP, seq_len)
            rows_end = GROUP * num_queries
            in_group = row < rows_end
        first_key, key_begin, key_end = _key_range(
            tile - seq_begin, num_taken, prefix_tiles, first_len, seq_len, window, TILE, SLIDING_WINDOW, USE_CASCADE
        )
        table = block_tables + seq.to(tl.int64) * table_stride
        last_block = (key_end - 1) // BLOCK_SIZE
        block = tl.minimum((key_begin + key) // BLOCK_SIZE, last_block)  # clamped, so that no load needs a mask
        block_ids = tl.load(table + tl.maximum(block, first_key // BLOCK_SIZE))
        # Prefetch the next segment. After a head's last segment comes the first segment of the next head.
        ends_segment = tile + num_taken == seq_end
        segment = tl.where(ends_segment, tl.where(seq_end == num_tiles, 0, segment + 1), segment)
        next_begin, next_end, next_len, next_token, next_seq = load_segment(segments + segment * ROW_SIZE)
        if USE_CASCADE:
            prefix_tiles = tl.load(segments + segment * ROW_SIZE + PREFIX_TILES)
        if QUERIES > 1:
            num_queries = tl.load(segments + segment * ROW_SIZE + PACK_QUERIES)

        if USE_PDL:  # noqa: SIM102 (one is a compile-time constant, the other is not)
            if cursor == begin:
                gdc_wait()
        heads = head * GROUP + row
        q_rows = q + token * q_token_stride
        if QUERIES > 1:
            heads = head * GROUP + row % GROUP
            q_rows += (row // GROUP)[:, None] * q_token_stride
        queries = tl.load(
            q_rows + heads[:, None] * q_head_stride + column[None, :],
            mask=in_group[:, None] & in_head[None, :],
            other=0.0,
        )
        head_scale = scale
        if SCALED:
            queries = queries.to(softmax.float8_product(queries.dtype))
            head_scale *= tl.load(kv_scales + head)
        row_max, row_sum, acc = _attend(
            queries, kv, table, block_ids, key_begin, key_end, first_key, row_len, window, head, head_scale,
            kv_block_stride, kv_value_stride, kv_head_stride,
            BLOCK_SIZE, HEAD_DIM, TILE, STAGES, QUERIES > 1, SLIDING_WINDOW,
        )  # fmt: skip
        if SCALED:
            acc *= tl.load(kv_scales + NUM_KV_HEADS + head)
        next_cursor = cursor + num_taken + tl.where(ends_segment, SEQ_OVERHEAD, 0)
        if USE_PDL:  # noqa: SIM102
            if next_cursor >= end:  # little work is left
                gdc_launch_dependents()

        prefix = Prefixes(prefix_partial, prefix_partial_ml, prefixes + seq * PREFIX_FIELDS)
        if num_taken == seq_end - seq_begin:
            if USE_CASCADE:
                row_max, row_sum, acc = merge_prefix(
                    row_max, row_sum, acc, row, column, prefix.partial, prefix.partial_ml, prefix.fields, head,
                    NUM_KV_HEADS, GROUP, HEAD_DIM,
                )  # fmt: skip
            out_row = token * NUM_KV_HEADS * GROUP + heads
            if QUERIES > 1:
                out_row += row // GROUP * (NUM_KV_HEADS * GROUP)
            if WITH_SINKS:
                row_max, row_sum, acc = softmax.merge_sinks(row_max, row_sum, acc, sinks, head * GROUP + row % GROUP)
            softmax.write_rows(out, lse, out_row, column, row_max, row_sum, acc, in_group, HEAD_DIM, WITH_LSE)
        else:
            offset = (slot * (GROUP * QUERIES) + row) * HEAD_DIM
            ml_offset = slot * 2 * (GROUP * QUERIES) + row
            softmax.store_part(
                partial, partial_ml, offset, ml_offset, row_max, row_sum, acc, in_group, column, HEAD_DIM,
                GROUP * QUERIES,
            )  # fmt: skip
            if MERGE_INLINE:
                _merge_if_last(
                    out, lse, sinks, partial, partial_ml, arrivals, token, head, rows_end, head * num_tiles + seq_begin,
                    head * num_tiles + seq_end, tiles_per_program, prefix,
                    NUM_KV_HEADS, GROUP, QUERIES, HEAD_DIM, SEQ_OVERHEAD, WITH_LSE, WITH_SINKS, USE_CASCADE,
                )  # fmt: skip
        cursor = next_cursor
        seq_begin, seq_end, seq_len, token, seq = next_begin, next_end, next_len, next_token, next_seq
    if USE_PDL:  # noqa: SIM102
        if begin >= end:  # programs without work wait, too: see `launch`
            gdc_wait()
    if WRITE_EMPTY_ROWS:
        empty_seq = program
        while empty_seq < num_seqs:
            softmax.write_empty_row(out, lse, query_start, seq_lens, empty_seq, NUM_KV_HEADS, GROUP, HEAD_DIM, WITH_LSE)
            empty_seq += tl.num_programs(0)


@triton.jit
def _key_range(
    first_tile, num_tiles, prefix_tiles, first_len, seq_len, window,
    TILE: tl.constexpr, SLIDING_WINDOW: tl.constexpr, USE_CASCADE: tl.constexpr,
):  # fmt: skip
    """(first visible key, first key, end key) of tiles of a segment. A window may begin inside the first tile.

    first_len, seq_len: context lengths of the first line of a pack and of the last
    """
    first_key = 0
    if SLIDING_WINDOW:
        first_key = tl.maximum(first_len - window, 0)
        first_tile += first_key // TILE
    if USE_CASCADE:
        first_tile += prefix_tiles
    begin = first_tile * TILE
    return first_key, begin, tl.minimum(begin + num_tiles * TILE, seq_len)


@triton.jit
def _attend(
    queries, kv, table, block_ids, begin, end, first_key, row_len, window, head, scale, block_stride, value_stride,
    head_stride, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, SLIDING_WINDOW: tl.constexpr,
):  # fmt: skip
    """Attention of one token's queries, or of a pack's, over the keys [begin, end), without those before `first_key`.

    row_len: [rows], the context length of each row of a pack; others have that of the last.
    block_ids: the blocks of the first tile's keys. Written for Triton's pipeliner: one loop without masks on its loads
    (a mask cost 1 to 10 %). Positions outside the range are clamped to its ends.
    """
    PRECISION: tl.constexpr = softmax.dot_precision(queries.dtype)
    KV_DTYPE: tl.constexpr = kv.dtype.element_ty
    COLUMNS: tl.constexpr = queries.shape[1]
    # Shared memory serves matrix instructions 16 bits at a time: two numbers of 8 bits are read as one, then split.
    PAIRS: tl.constexpr = KV_DTYPE.primitive_bitwidth == 8 and COLUMNS >= 32
    WIDTH: tl.constexpr = 2 if PAIRS else 1
    key = tl.arange(0, TILE)
    column = tl.arange(0, COLUMNS // WIDTH)
    last_block = (end - 1) // BLOCK_SIZE
    row_max, row_sum, acc = softmax.empty_result(queries.shape[0], COLUMNS // WIDTH)
    if PAIRS:
        kv = kv.to(tl.pointer_type(tl.int16), bitcast=True)
        block_stride, value_stride, head_stride = block_stride // 2, value_stride // 2, head_stride // 2
        queries, odd_queries = tl.split(queries.reshape(queries.shape[0], COLUMNS // 2, 2))
        odd_acc = acc
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        position = tl.maximum(tl.minimum(start + key, end - 1), first_key)
        visible = start + key == position
        offset = locate_keys(block_ids, position, block_stride, head * head_stride, BLOCK_SIZE, HEAD_DIM // WIDTH)
        block_ids = tl.load(table + tl.minimum((start + TILE + key) // BLOCK_SIZE, last_block))
        keys = load_kv_tile(kv, offset, column, 0, None, HEAD_DIM // WIDTH, False)
        if PAIRS:
            keys, odd_keys = split_pairs(keys, KV_DTYPE, queries.dtype)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            scores = tl.dot(odd_queries, tl.trans(odd_keys), scores, input_precision=PRECISION) * scale
        else:
            scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision=PRECISION) * scale
        if PACKED:
            in_context = (start + key)[None, :] < row_len[:, None]
            if SLIDING_WINDOW:
                in_context &= (start + key)[None, :] >= row_len[:, None] - window
            scores = tl.where(in_context, scores, -float("inf"))
        else:
            scores = tl.where(visible[None, :], scores, -float("inf"))
        row_max, row_sum, weights, rescale = softmax.update(scores, row_max, row_sum, 1.0)
        weights = weights.to(queries.dtype)
        values = load_kv_tile(kv, offset, column, value_stride, None, HEAD_DIM // WIDTH, False)
        if PAIRS:
            values, odd_values = split_pairs(values, KV_DTYPE, queries.dtype)
            odd_acc *= rescale[:, None]
            odd_acc = tl.dot(weights, _finite(odd_values, PACKED), odd_acc, input_precision=PRECISION)
        values = _finite(values.to(queries.dtype), PACKED)
        acc = tl.dot(weights, values, acc * rescale[:, None], input_precision=PRECISION)
    if PAIRS:
        acc = tl.join(acc, odd_acc).reshape(queries.shape[0], COLUMNS)
    return row_max, row_sum, acc


@triton.jit
def _finite(values, PACKED: tl.constexpr):
    """With PACKED, others become 0: a later draft's, times weight 0, would spoil the lines before it."""
    return tl.where(tl.abs(values) < float("inf"), values, 0.0) if PACKED else values


@triton.jit
def _merge_if_last(
    out, lse, sinks, partial, partial_ml, arrivals, token, head, rows_end, begin, end, tiles_per_program, prefix,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr,
    SEQ_OVERHEAD: tl.constexpr, WITH_LSE: tl.constexpr, WITH_SINKS: tl.constexpr, USE_CASCADE: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a (head, segment) with the tiles [begin, end), if all other programs have stored theirs."""
    first = begin // tiles_per_program
    last = (end - 1) // tiles_per_program
    tl.debug_barrier()  # all threads of this program have written
    if tl.atomic_add(arrivals + first, 1, sem="acq_rel") == last - first:
        # A segment that begins inside a program is that program's last, and the first of all that follow.
        first_slot = (first * tiles_per_program < begin - SEQ_OVERHEAD).to(tl.int32)
        out_row = token * NUM_KV_HEADS * GROUP + head * GROUP
        _merge(
            out, lse, sinks, partial, partial_ml, first, last, first_slot, out_row, head, rows_end, prefix,
            NUM_KV_HEADS, GROUP, QUERIES, HEAD_DIM, WITH_LSE, WITH_SINKS, USE_CASCADE,
        )  # fmt: skip
        tl.store(arrivals + first, 0)


@triton.jit
def _merge(
    out, lse, sinks, partial, partial_ml, first, last, first_slot, out_row, head, rows_end, prefix,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr,
    WITH_LSE: tl.constexpr, WITH_SINKS: tl.constexpr, USE_CASCADE: tl.constexpr,
):  # fmt: skip
    """Merge the parts of programs first to last into the output's rows from out_row on; rows_end: rows of a part"""
    row = tl.arange(0, padded_size(GROUP * QUERIES))
    column = tl.arange(0, padded_size(HEAD_DIM, 16))
    in_group = row < rows_end
    row_max, row_sum, acc = softmax.empty_result(row.shape[0], column.shape[0])
    AT_ONCE: tl.constexpr = 4 if QUERIES == 1 else 2  # more parts of a pack do not fit into registers
    for base in range(first, last + 1, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            program = tl.minimum(base + i, last)
            slot = 2 * program + tl.where(program == first, first_slot, 0)
            part_max, part_sum, part = softmax.load_part(
                partial, partial_ml, (slot * (GROUP * QUERIES) + row) * HEAD_DIM, slot * 2 * (GROUP * QUERIES) + row,
                in_group & (base + i <= last), column, HEAD_DIM, GROUP * QUERIES,
            )  # fmt: skip
            row_max, row_sum, acc = softmax.merge(row_max, row_sum, acc, part_max, part_sum, part)
    if USE_CASCADE:
        row_max, row_sum, acc = merge_prefix(
            row_max, row_sum, acc, row, column, prefix.partial, prefix.partial_ml, prefix.fields, head,
            NUM_KV_HEADS, GROUP, HEAD_DIM,
        )  # fmt: skip
    if WITH_SINKS:
        row_max, row_sum, acc = softmax.merge_sinks(row_max, row_sum, acc, sinks, head * GROUP + row % GROUP)
    row_sum = tl.where(in_group, row_sum, 1.0)
    out_row += row
    if QUERIES > 1:
        out_row += row // GROUP * ((NUM_KV_HEADS - 1) * GROUP)  # the same heads of the next query
    softmax.write_rows(out, lse, out_row, column, row_max, row_sum, acc, in_group, HEAD_DIM, WITH_LSE)


@triton.jit(do_not_specialize=["num_merges"])
def _combine(
    out,
    lse,
    sinks,
    partial,
    partial_ml,
    query_start,
    seq_lens,
    merges,
    num_merges,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS_PER_STEP: tl.constexpr,
    SLOTS_PER_PART: tl.constexpr,
    WITH_LSE: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Merge the parts of one (head, pack) for one row: a query head of its group, of one query.

    Further programs, one for each sequence, write the rows without keys.
    """
    merge_index = tl.program_id(0)
    row = tl.program_id(1)
    wait_for_predecessor(USE_PDL)
    if merge_index < num_merges:
        token = tl.load(merges + merge_index)
        if QUERIES > 1:
            token = tl.where(row < GROUP * tl.load(merges + 5 * num_merges + merge_index), token, -1)
        if token >= 0:
            kv_head = tl.load(merges + num_merges + merge_index)
            first = tl.load(merges + 2 * num_merges + merge_index)
            last = tl.load(merges + 3 * num_merges + merge_index)
            first_slot = tl.load(merges + 4 * num_merges + merge_index)
            column = tl.arange(0, padded_size(HEAD_DIM, 16))
            row_max, row_sum, acc = _merge_row(
                partial, partial_ml, first, last, first_slot, row, column,
                GROUP * QUERIES, HEAD_DIM, PARTS_PER_STEP, SLOTS_PER_PART,
            )  # fmt: skip
            if WITH_SINKS:
                row_max, row_sum, acc = softmax.merge_sinks(row_max, row_sum, acc, sinks, kv_head * GROUP + row % GROUP)
            out_row = token.to(tl.int64) * NUM_KV_HEADS * GROUP + kv_head * GROUP + row
            if QUERIES > 1:
                out_row += row // GROUP * ((NUM_KV_HEADS - 1) * GROUP)
            softmax.write_row(out, lse, out_row, column, row_max, row_sum, acc, HEAD_DIM, WITH_LSE)
    elif row == 0:
        softmax.write_empty_row(
            out, lse, query_start, seq_lens, merge_index - num_merges, NUM_KV_HEADS, GROUP, HEAD_DIM, WITH_LSE
        )


@triton.jit
def _merge_row(
    partial, partial_ml, first, last, first_slot, row, column,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS_PER_STEP: tl.constexpr, SLOTS_PER_PART: tl.constexpr,
):  # fmt: skip
    """Merge the parts first to last of one row of ROWS, PARTS_PER_STEP at a time -> (row_max, row_sum, acc)."""
    row_max = MIN_SCORE
    row_sum = 0.0
    acc = tl.zeros([column.shape[0]], tl.float32)
    for base in range(first, last + 1, PARTS_PER_STEP):
        part = base + tl.arange(0, PARTS_PER_STEP)
        mask = part <= last
        slot = SLOTS_PER_PART * part + tl.where(part == first, first_slot, 0)
        part_maxes = tl.load(partial_ml + slot * 2 * ROWS + row, mask=mask, other=MIN_SCORE)
        part_sums = tl.load(partial_ml + slot * 2 * ROWS + ROWS + row, mask=mask, other=0.0)
        offset = (slot * ROWS + row) * HEAD_DIM
        mask_2d = mask[:, None] & (column < HEAD_DIM)[None, :]
        parts = tl.load(partial + offset[:, None] + column[None, :], mask=mask_2d, other=0.0)
        row_max, row_sum, acc = softmax.merge_parts_of_row(row_max, row_sum, acc, part_maxes, part_sums, parts)
    return row_max, row_sum, acc
