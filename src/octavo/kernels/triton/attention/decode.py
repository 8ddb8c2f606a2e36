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

The last bits of a result depend on the batch, because the other sequences decide where a sequence is cut. With
`fixed_split`, each sequence is cut every SPLIT_KEYS keys from its own beginning, and its parts are merged in order.

Block ids are loaded one tile ahead. If they were loaded in the iteration that uses them, Triton's pipeliner would spend
its stages on that indirection, with fewer bytes of K and V in flight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.cascade import (
    PREFIX_FIELDS,
    CascadeTuning,
    cascade_attention,
    cascade_tuning,
    merge_prefix,
)
from octavo.kernels.triton.attention.common import LN_2, LOG2_E, MIN_SCORE, load_kv_rows
from octavo.kernels.triton.attention.decode_schedule import (
    PREFIX_TILES,
    PROGRAM_BEGIN,
    ROW_SIZE,
    SEGMENT_INDEX,
    SPLIT_KEYS,
    DecodeSchedule,
    DecodeTuning,
    decode_tuning,
    load_segment,
    make_decode_schedule,
)
from octavo.kernels.triton.launch import (
    gdc_launch_dependents,
    gdc_wait,
    or_placeholder,
    pdl_options,
    wait_for_predecessor,
)


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
    tuning: DecodeTuning | None = None,
    cascade: CascadeTuning | None = None,
) -> None:
    """Attention of the sequences with one query, written to their rows of out and lse.

    lse              [num_tokens, num_heads] float32, or empty if it is not needed
    decode_only      no sequence has several queries; rows without keys are set to 0
    tuning, cascade  default: the fastest that were measured
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv_layer.shape[2:4]
    group_size = num_heads // num_kv_heads
    tuning = tuning or decode_tuning(q, 64 if batch.fixed_split else batch.num_seqs)
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
            batch, tuning, split_tiles, num_kv_heads, group_size, head_dim, window, chosen_cascade
        )
    num_programs = len(schedule.arrivals)
    head_dim_padded = max(triton.next_power_of_2(head_dim), 16)
    num_merges = schedule.merges.shape[1]
    plan = schedule.cascade
    if plan is not None:
        cascade_attention(q, kv_layer, batch, plan, scale=scale, early=early)
    _decode[(num_programs,)](
        q,
        kv_layer,
        out,
        lse,
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
        GROUP=group_size,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        TILE=tuning.tile,
        STAGES=tuning.num_stages,
        SPLIT_TILES=split_tiles,
        SEQ_OVERHEAD=0 if split_tiles else tuning.seq_overhead,
        SLIDING_WINDOW=window > 0,
        WITH_LSE=lse.numel() > 0,
        MERGE_INLINE=num_merges == 0,
        USE_CASCADE=plan is not None,
        DECODE_ONLY=decode_only,
        GROUP_PADDED=triton.next_power_of_2(group_size),
        KV_HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
        maxnreg=tuning.registers,
        **(pdl_options(q.device) if early else {"USE_PDL": False}),
    )
    if num_merges == 0:
        return
    parts_per_step = 16 if split_tiles or schedule.num_sharers <= 16 else 64
    _combine[(num_merges + (batch.num_seqs if decode_only else 0), group_size)](
        out,
        lse,
        schedule.partial,
        schedule.partial_ml,
        batch.query_start,
        batch.seq_lens,
        schedule.merges,
        num_merges,
        NUM_KV_HEADS=num_kv_heads,
        KV_HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        GROUP=group_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        PARTS_PER_STEP=parts_per_step,
        SLOTS_PER_PART=1 if split_tiles else 2,
        WITH_LSE=lse.numel() > 0,
        num_warps=4,
        **pdl_options(q.device),
    )


@triton.jit(do_not_specialize=["window", "num_seqs", "table_stride"])
def _decode(
    q,
    kv,
    out,
    lse,
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
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    SEQ_OVERHEAD: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    WITH_LSE: tl.constexpr,
    MERGE_INLINE: tl.constexpr,
    USE_CASCADE: tl.constexpr,
    DECODE_ONLY: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """The tiles of one program. scale is for scores in base 2.

    USE_PDL: the program loads its schedule before it waits for its predecessor, and lets its successor start when only
    results are left to write. Written for Triton's pipeliner: one inner loop without masks on its loads (a mask cost 1
    to 10 %).
    """
    program = tl.program_id(0)
    num_tiles = tl.load(totals)
    tiles_per_program = tl.load(totals + 1)
    start_ptr = starts + program * ROW_SIZE
    begin = tl.load(start_ptr + PROGRAM_BEGIN)
    end = tl.load(start_ptr + ROW_SIZE + PROGRAM_BEGIN)
    segment = tl.load(start_ptr + SEGMENT_INDEX)
    seq_begin, seq_end, seq_len, token, seq = load_segment(start_ptr)
    if USE_CASCADE:
        prefix_tiles = tl.load(start_ptr + PREFIX_TILES)
    row = tl.arange(0, 16)  # a matrix product has at least 16 rows; those past the group are padding
    column = tl.arange(0, HEAD_DIM_PADDED)
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
        window_begin = 0
        first_tile = tile - seq_begin
        if SLIDING_WINDOW:
            window_begin = tl.maximum(seq_len - window, 0)
            first_tile += window_begin // TILE
        if USE_CASCADE:
            first_tile += prefix_tiles
        key_begin = first_tile * TILE
        key_end = tl.minimum(key_begin + num_taken * TILE, seq_len)
        table = block_tables + seq.to(tl.int64) * table_stride
        # Positions outside the range are clamped to its ends, so that no load needs a mask.
        first_block = window_begin // BLOCK_SIZE
        last_block = (key_end - 1) // BLOCK_SIZE
        next_ids = tl.load(table + tl.maximum(tl.minimum((key_begin + key) // BLOCK_SIZE, last_block), first_block))
        # Prefetch the next segment. After a head's last segment comes the first segment of the next head.
        ends_segment = tile + num_taken == seq_end
        segment = tl.where(ends_segment, tl.where(seq_end == num_tiles, 0, segment + 1), segment)
        next_begin, next_end, next_len, next_token, next_seq = load_segment(segments + segment * ROW_SIZE)
        if USE_CASCADE:
            prefix_tiles = tl.load(segments + segment * ROW_SIZE + PREFIX_TILES)

        if USE_PDL:  # noqa: SIM102 (one is a compile-time constant, the other is not)
            if cursor == begin:
                gdc_wait()
        heads = head * GROUP + row
        queries = tl.load(
            q + token * q_token_stride + heads[:, None] * q_head_stride + column[None, :],
            mask=in_group[:, None] & in_head[None, :],
            other=0.0,
        )
        row_max = tl.full([16], MIN_SCORE, tl.float32)
        row_sum = tl.zeros([16], tl.float32)
        acc = tl.zeros([16, HEAD_DIM_PADDED], tl.float32)
        for start in tl.range(key_begin, key_end, TILE, num_stages=STAGES):
            position = tl.maximum(tl.minimum(start + key, key_end - 1), window_begin)
            visible = start + key == position
            offset = (
                next_ids.to(tl.int64) * kv_block_stride + head * kv_head_stride + (position % BLOCK_SIZE) * HEAD_DIM
            )
            next_ids = tl.load(table + tl.minimum((start + TILE + key) // BLOCK_SIZE, last_block))
            ptrs = kv + offset[:, None] + column[None, :]
            keys = load_kv_rows(ptrs, in_head, HEAD_DIM, HEAD_DIM_PADDED)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
            scores = tl.where(visible[None, :], scores, -float("inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            weights = tl.exp2(scores - new_max[:, None])
            rescale = tl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            values = load_kv_rows(ptrs + kv_value_stride, in_head, HEAD_DIM, HEAD_DIM_PADDED)
            acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None], input_precision=PRECISION)
            row_max = new_max

        next_cursor = cursor + num_taken + tl.where(ends_segment, SEQ_OVERHEAD, 0)
        if USE_PDL:  # noqa: SIM102
            if next_cursor >= end:  # little work is left
                gdc_launch_dependents()
        if num_taken == seq_end - seq_begin:
            if USE_CASCADE:
                acc, row_max, row_sum = merge_prefix(
                    acc, row_max, row_sum, row, column, prefix_partial, prefix_partial_ml,
                    prefixes + seq * PREFIX_FIELDS, head, NUM_KV_HEADS, GROUP, HEAD_DIM,
                )  # fmt: skip
            out_offset = (token * NUM_KV_HEADS * GROUP + heads) * HEAD_DIM
            result = (acc / row_sum[:, None]).to(out.dtype.element_ty)
            tl.store(out + out_offset[:, None] + column[None, :], result, mask=in_group[:, None] & in_head[None, :])
            if WITH_LSE:
                tl.store(lse + token * NUM_KV_HEADS * GROUP + heads, (row_max + tl.log2(row_sum)) * LN_2, mask=in_group)
        else:
            part_offset = (slot * GROUP + row) * HEAD_DIM
            tl.store(partial + part_offset[:, None] + column[None, :], acc, mask=in_group[:, None] & in_head[None, :])
            tl.store(partial_ml + slot * 2 * GROUP + row, row_max, mask=in_group)
            tl.store(partial_ml + slot * 2 * GROUP + GROUP + row, row_sum, mask=in_group)
            if MERGE_INLINE:
                segment_begin = head * num_tiles + seq_begin
                first_program = segment_begin // tiles_per_program
                last_program = (head * num_tiles + seq_end - 1) // tiles_per_program
                tl.debug_barrier()  # all threads of this program have written
                if tl.atomic_add(arrivals + first_program, 1, sem="acq_rel") == last_program - first_program:
                    _merge(
                        out,
                        lse,
                        partial,
                        partial_ml,
                        first_program,
                        last_program,
                        (first_program * tiles_per_program < segment_begin - SEQ_OVERHEAD).to(tl.int32),
                        token * NUM_KV_HEADS * GROUP + head * GROUP,
                        prefix_partial,
                        prefix_partial_ml,
                        prefixes + seq * PREFIX_FIELDS,
                        head,
                        NUM_KV_HEADS,
                        GROUP,
                        GROUP_PADDED,
                        HEAD_DIM,
                        HEAD_DIM_PADDED,
                        WITH_LSE,
                        USE_CASCADE,
                    )
                    tl.store(arrivals + first_program, 0)
        cursor = next_cursor
        seq_begin, seq_end, seq_len, token, seq = next_begin, next_end, next_len, next_token, next_seq
    if USE_PDL:  # noqa: SIM102
        if begin >= end:  # programs without work wait, too: see `launch`
            gdc_wait()
    if MERGE_INLINE and DECODE_ONLY:
        empty_seq = program
        while empty_seq < num_seqs:
            _write_empty_row(
                out,
                lse,
                query_start,
                seq_lens,
                empty_seq,
                NUM_KV_HEADS,
                KV_HEADS_PADDED,
                GROUP,
                HEAD_DIM,
                HEAD_DIM_PADDED,
                WITH_LSE,
            )
            empty_seq += tl.num_programs(0)


@triton.jit
def _merge(
    out,
    lse,
    partial,
    partial_ml,
    first,
    last,
    first_slot,
    out_row,
    prefix_partial,
    prefix_partial_ml,
    prefix_ptr,
    head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    WITH_LSE: tl.constexpr,
    USE_CASCADE: tl.constexpr,
):
    """Merge the parts of programs first to last into the output's rows from out_row on.

    Other programs may have run on other multiprocessors, so their parts are read past the L1 cache.
    """
    row = tl.arange(0, GROUP_PADDED)
    column = tl.arange(0, HEAD_DIM_PADDED)
    in_group = row < GROUP
    mask = in_group[:, None] & (column < HEAD_DIM)[None, :]
    row_max = tl.full([GROUP_PADDED], MIN_SCORE, tl.float32)
    row_sum = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, HEAD_DIM_PADDED], tl.float32)
    for base in range(first, last + 1, 4):
        for i in tl.static_range(4):
            program = tl.minimum(base + i, last)
            used = base + i <= last
            slot = 2 * program + tl.where(program == first, first_slot, 0)
            rows = (slot * GROUP + row) * HEAD_DIM
            part = tl.load(partial + rows[:, None] + column[None, :], mask=mask & used, other=0.0, cache_modifier=".cg")
            ml_ptrs = partial_ml + slot * 2 * GROUP + row
            part_max = tl.load(ml_ptrs, mask=in_group & used, other=MIN_SCORE, cache_modifier=".cg")
            part_sum = tl.load(ml_ptrs + GROUP, mask=in_group & used, other=0.0, cache_modifier=".cg")
            new_max = tl.maximum(row_max, part_max)
            rescale = tl.exp2(row_max - new_max)
            weight = tl.exp2(part_max - new_max)
            row_sum = row_sum * rescale + part_sum * weight
            acc = acc * rescale[:, None] + part * weight[:, None]
            row_max = new_max
    if USE_CASCADE:
        acc, row_max, row_sum = merge_prefix(
            acc, row_max, row_sum, row, column, prefix_partial, prefix_partial_ml, prefix_ptr, head,
            NUM_KV_HEADS, GROUP, HEAD_DIM,
        )  # fmt: skip
    rows = (out_row + row) * HEAD_DIM
    row_sum = tl.where(in_group, row_sum, 1.0)
    tl.store(out + rows[:, None] + column[None, :], (acc / row_sum[:, None]).to(out.dtype.element_ty), mask=mask)
    if WITH_LSE:
        tl.store(lse + out_row + row, (row_max + tl.log2(row_sum)) * LN_2, mask=in_group)


@triton.jit
def _write_empty_row(
    out,
    lse,
    query_start,
    seq_lens,
    seq,
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Write 0, and an lse of -inf, to a sequence's row if the sequence has no keys."""
    token = tl.load(query_start + seq).to(tl.int64)
    if (token < tl.load(query_start + seq + 1)) & (tl.load(seq_lens + seq) == 0):
        kv_head = tl.arange(0, KV_HEADS_PADDED)
        column = tl.arange(0, HEAD_DIM_PADDED)
        mask = kv_head < NUM_KV_HEADS
        mask_2d = mask[:, None] & (column < HEAD_DIM)[None, :]
        zeros = tl.zeros([KV_HEADS_PADDED, HEAD_DIM_PADDED], out.dtype.element_ty)
        for i in range(0, GROUP):
            out_row = (token * NUM_KV_HEADS + kv_head) * GROUP + i
            tl.store(out + out_row[:, None] * HEAD_DIM + column[None, :], zeros, mask=mask_2d)
            if WITH_LSE:
                tl.store(lse + out_row, tl.full([KV_HEADS_PADDED], -float("inf"), tl.float32), mask=mask)


@triton.jit(do_not_specialize=["num_merges"])
def _combine(
    out,
    lse,
    partial,
    partial_ml,
    query_start,
    seq_lens,
    merges,
    num_merges,
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PARTS_PER_STEP: tl.constexpr,
    SLOTS_PER_PART: tl.constexpr,
    WITH_LSE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Merge the parts of one (head, sequence) for one query head of its group, PARTS_PER_STEP at a time.

    Further programs, one for each sequence, write the rows without keys.
    """
    merge_index = tl.program_id(0)
    group_head = tl.program_id(1)
    wait_for_predecessor(USE_PDL)
    if merge_index < num_merges:
        token = tl.load(merges + merge_index)
        if token >= 0:
            kv_head = tl.load(merges + num_merges + merge_index)
            first = tl.load(merges + 2 * num_merges + merge_index)
            last = tl.load(merges + 3 * num_merges + merge_index)
            first_slot = tl.load(merges + 4 * num_merges + merge_index)
            column = tl.arange(0, HEAD_DIM_PADDED)
            in_head = column < HEAD_DIM
            row_max = MIN_SCORE
            row_sum = 0.0
            acc = tl.zeros([HEAD_DIM_PADDED], tl.float32)
            for base in range(first, last + 1, PARTS_PER_STEP):
                part = base + tl.arange(0, PARTS_PER_STEP)
                mask = part <= last
                slot = SLOTS_PER_PART * part + tl.where(part == first, first_slot, 0)
                part_maxes = tl.load(partial_ml + slot * 2 * GROUP + group_head, mask=mask, other=MIN_SCORE)
                part_sums = tl.load(partial_ml + slot * 2 * GROUP + GROUP + group_head, mask=mask, other=0.0)
                offset = (slot * GROUP + group_head) * HEAD_DIM
                parts = tl.load(
                    partial + offset[:, None] + column[None, :], mask=mask[:, None] & in_head[None, :], other=0.0
                )
                new_max = tl.maximum(row_max, tl.max(part_maxes, 0))
                rescale = tl.exp2(row_max - new_max)
                weight = tl.exp2(part_maxes - new_max)
                row_sum = row_sum * rescale + tl.sum(part_sums * weight, 0)
                acc = acc * rescale + tl.sum(parts * weight[:, None], 0)
                row_max = new_max
            row = token.to(tl.int64) * NUM_KV_HEADS * GROUP + kv_head * GROUP + group_head
            tl.store(out + row * HEAD_DIM + column, (acc / row_sum).to(out.dtype.element_ty), mask=in_head)
            if WITH_LSE:
                tl.store(lse + row, (row_max + tl.log2(row_sum)) * LN_2)
    elif group_head == 0:
        _write_empty_row(
            out,
            lse,
            query_start,
            seq_lens,
            merge_index - num_merges,
            NUM_KV_HEADS,
            KV_HEADS_PADDED,
            GROUP,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            WITH_LSE,
        )
