"""Paged attention for queries of length 1, in Triton. See `paged_attention`.

Decoding is bound by memory: every K and V of every sequence is read once. The keys of all sequences are cut into tiles,
the tiles of all heads are laid end to end, and each program of a grid that just fills the GPU takes an equal stretch of
that line, wherever sequences begin and end on it:

    head 0                          head 1
    | seq 0 | seq 1       | seq 2 | | seq 0 | seq 1       | seq 2 |      num_tiles tiles a head
    |  program 0 |  program 1 |  program 2 |  program 3 |  program 4 |   stretch tiles a program

A program that covers all of a (head, sequence) writes its output; of one that it shares with others it leaves a partial
result, and it shares at most two: its first and its last. Where few share one, the last of them to finish merges what
they left; many are merged by many, in `_combine`. The idea is LeanAttention's (arXiv 2405.10480). The stretch and where
each program starts are worked out on the device, once a step, so that a CUDA graph replays with other lengths.

So results depend on the batch, in their last bits: where a sequence is cut is decided by the others. If the batch asks
for `fixed_split`, each is cut into pieces of SPLIT keys from its own beginning, and merged in their order.

The ids of the next tile's blocks are loaded while this tile is computed. Were they loaded in the iteration that uses
them, Triton's pipeliner would spend its stages on that indirection, with fewer bytes of K and V in flight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.cascade import JOIN, CascadeTuning, cascade_attention, cascade_tuning, join_common
from octavo.kernels.triton.attention.decode_schedule import (
    BEGIN,
    LINE,
    NUMBER,
    SKIPPED,
    SPLIT,
    DecodeTuning,
    Schedule,
    decode_tuning,
    load_segment,
    make_schedule,
)
from octavo.kernels.triton.attention.softmax import LN_2, LOG2_E, NOTHING, load_rows
from octavo.kernels.triton.launch import given, overlapped, wait_for_predecessor


def decode_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    window: int,
    alone: bool,
    tuning: DecodeTuning | None = None,
    cascade: CascadeTuning | None = None,
) -> None:
    """Attention of the sequences with one query, into their rows of out and lse (which is empty if nobody asks).

    alone: all sequences have one query, and those without keys get 0.
    tuning, cascade: default: what was fastest.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv_layer.shape[2:4]
    group_size = num_heads // num_kv_heads
    tuning = tuning or decode_tuning(q, 64 if batch.fixed_split else batch.num_seqs)
    split = SPLIT // tuning.tile if batch.fixed_split else 0  # tiles of a piece
    common_tuning = None
    if batch.common_prefix_lens is not None and alone and not window and not split:
        common_tuning = cascade or cascade_tuning(q)
    key = ("paged_attention.decode", tuning, common_tuning, num_kv_heads, group_size, head_dim, window)
    schedule: Schedule | None = batch.derived.get(key)
    # An earlier layer has made it: there is something to do before q is there.
    early = schedule is not None
    if schedule is None:
        schedule = batch.derived[key] = make_schedule(
            batch, tuning, split, num_kv_heads, group_size, head_dim, window, common_tuning
        )
    num_programs = len(schedule.arrivals)
    head_dim_padded = max(triton.next_power_of_2(head_dim), 16)
    num_merges = schedule.merges.shape[1]
    shared = schedule.cascade
    if shared is not None:
        cascade_attention(q, kv_layer, batch, shared, scale=scale, early=early)
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
        *given(q, *((shared.partial, shared.partial_ml, shared.joins) if shared is not None else (None,) * 3)),
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
        SPLIT=split,
        GAP=0 if split else tuning.gap,
        WINDOWED=window > 0,
        WITH_LSE=lse.numel() > 0,
        MERGING=num_merges == 0,
        CASCADED=shared is not None,
        ALONE=alone,
        GROUP_PADDED=triton.next_power_of_2(group_size),
        KV_HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
        maxnreg=tuning.registers,
        **(overlapped(q.device) if early else {"OVERLAPPED": False}),
    )
    if num_merges == 0:
        return
    splits = 16 if split or schedule.num_sharers <= 16 else 64  # read at a time
    _combine[(num_merges + (batch.num_seqs if alone else 0), group_size)](
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
        SPLITS=splits,
        SLOTS=1 if split else 2,
        WITH_LSE=lse.numel() > 0,
        num_warps=4,
        **overlapped(q.device),
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
    common_partial,
    common_partial_ml,
    joins,
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
    SPLIT: tl.constexpr,
    GAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    WITH_LSE: tl.constexpr,
    MERGING: tl.constexpr,
    CASCADED: tl.constexpr,
    ALONE: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One program's stretch of tiles. scale is for scores in base 2. OVERLAPPED: it starts before its predecessor has
    ended, finds out what it is to read, and waits then; and its successor may start when only sums are left to write.

    Written for the pipeliner: one inner loop, no mask on its loads (a mask cost 1 to 10 %).
    """
    program = tl.program_id(0)
    num_tiles = tl.load(totals)
    stretch = tl.load(totals + 1)
    own = starts + program * LINE
    begin = tl.load(own + BEGIN)
    end = tl.load(own + LINE + BEGIN)
    segment = tl.load(own + NUMBER)
    seq_begin, seq_end, seq_len, token, seq = load_segment(own)
    if CASCADED:
        skipped = tl.load(own + SKIPPED)
    row = tl.arange(0, 16)  # a matrix product has 16 rows at least; those past the group are padding
    column = tl.arange(0, HEAD_DIM_PADDED)
    key = tl.arange(0, TILE)
    in_group = row < GROUP
    in_head = column < HEAD_DIM
    at = begin
    while at < end:
        head = at // num_tiles
        tile = at - head * num_tiles
        take = tl.minimum(seq_end - tile, end - at)
        slot = 2 * program + (at != begin).to(tl.int32)
        if SPLIT:
            take = SPLIT
            slot = at // SPLIT
        first_key = 0
        first_tile = tile - seq_begin
        if WINDOWED:
            first_key = tl.maximum(seq_len - window, 0)
            first_tile += first_key // TILE
        if CASCADED:
            first_tile += skipped
        low = first_tile * TILE
        high = tl.minimum(low + take * TILE, seq_len)
        table = block_tables + seq.to(tl.int64) * table_stride
        # Beyond either end, the end again: what is not there is not read, and no load needs a mask.
        first_block = first_key // BLOCK_SIZE
        last_block = (high - 1) // BLOCK_SIZE
        next_ids = tl.load(table + tl.maximum(tl.minimum((low + key) // BLOCK_SIZE, last_block), first_block))
        # What comes next is asked for before there is need of it. Behind the last segment the next head's first begins.
        is_last = tile + take == seq_end
        segment = tl.where(is_last, tl.where(seq_end == num_tiles, 0, segment + 1), segment)
        next_begin, next_end, next_len, next_token, next_seq = load_segment(segments + segment * LINE)
        if CASCADED:
            skipped = tl.load(segments + segment * LINE + SKIPPED)

        if OVERLAPPED:  # noqa: SIM102 (one is known to the compiler, the other is not)
            if at == begin:
                gdc_wait()
        heads = head * GROUP + row
        queries = tl.load(
            q + token * q_token_stride + heads[:, None] * q_head_stride + column[None, :],
            mask=in_group[:, None] & in_head[None, :],
            other=0.0,
        )
        best = tl.full([16], NOTHING, tl.float32)
        total = tl.zeros([16], tl.float32)
        acc = tl.zeros([16, HEAD_DIM_PADDED], tl.float32)
        for start in tl.range(low, high, TILE, num_stages=STAGES):
            position = tl.maximum(tl.minimum(start + key, high - 1), first_key)
            seen = start + key == position
            offset = (
                next_ids.to(tl.int64) * kv_block_stride + head * kv_head_stride + (position % BLOCK_SIZE) * HEAD_DIM
            )
            next_ids = tl.load(table + tl.minimum((start + TILE + key) // BLOCK_SIZE, last_block))
            place = kv + offset[:, None] + column[None, :]
            keys = load_rows(place, in_head, HEAD_DIM, HEAD_DIM_PADDED)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
            scores = tl.where(seen[None, :], scores, -float("inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - new_best[:, None])
            decay = tl.exp2(best - new_best)
            total = total * decay + tl.sum(weights, 1)
            values = load_rows(place + kv_value_stride, in_head, HEAD_DIM, HEAD_DIM_PADDED)
            acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
            best = new_best

        following = at + take + tl.where(is_last, GAP, 0)
        if OVERLAPPED:  # noqa: SIM102
            if following >= end:  # what is left is short
                gdc_launch_dependents()
        if take == seq_end - seq_begin:
            if CASCADED:
                acc, best, total = join_common(
                    acc, best, total, row, column, common_partial, common_partial_ml, joins + seq * JOIN, head,
                    NUM_KV_HEADS, GROUP, HEAD_DIM,
                )  # fmt: skip
            target = (token * NUM_KV_HEADS * GROUP + heads) * HEAD_DIM
            result = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + target[:, None] + column[None, :], result, mask=in_group[:, None] & in_head[None, :])
            if WITH_LSE:
                tl.store(lse + token * NUM_KV_HEADS * GROUP + heads, (best + tl.log2(total)) * LN_2, mask=in_group)
        else:
            part = (slot * GROUP + row) * HEAD_DIM
            tl.store(partial + part[:, None] + column[None, :], acc, mask=in_group[:, None] & in_head[None, :])
            tl.store(partial_ml + slot * 2 * GROUP + row, best, mask=in_group)
            tl.store(partial_ml + slot * 2 * GROUP + GROUP + row, total, mask=in_group)
            if MERGING:
                whole = head * num_tiles + seq_begin
                first = whole // stretch
                last = (head * num_tiles + seq_end - 1) // stretch
                tl.debug_barrier()  # all of this program's threads have written
                if tl.atomic_add(arrivals + first, 1, sem="acq_rel") == last - first:
                    _merge(
                        out,
                        lse,
                        partial,
                        partial_ml,
                        first,
                        last,
                        (first * stretch < whole - GAP).to(tl.int32),
                        token * NUM_KV_HEADS * GROUP + head * GROUP,
                        common_partial,
                        common_partial_ml,
                        joins + seq * JOIN,
                        head,
                        NUM_KV_HEADS,
                        GROUP,
                        GROUP_PADDED,
                        HEAD_DIM,
                        HEAD_DIM_PADDED,
                        WITH_LSE,
                        CASCADED,
                    )
                    tl.store(arrivals + first, 0)
        at = following
        seq_begin, seq_end, seq_len, token, seq = next_begin, next_end, next_len, next_token, next_seq
    if OVERLAPPED:  # noqa: SIM102
        if begin >= end:  # those without work wait, too: see `kernels.launching`
            gdc_wait()
    if MERGING and ALONE:
        idle = program
        while idle < num_seqs:
            _write_nothing(
                out,
                lse,
                query_start,
                seq_lens,
                idle,
                NUM_KV_HEADS,
                KV_HEADS_PADDED,
                GROUP,
                HEAD_DIM,
                HEAD_DIM_PADDED,
                WITH_LSE,
            )
            idle += tl.num_programs(0)


@triton.jit
def _merge(
    out,
    lse,
    partial,
    partial_ml,
    first,
    last,
    first_slot,
    target,
    common_partial,
    common_partial_ml,
    join,
    head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    WITH_LSE: tl.constexpr,
    CASCADED: tl.constexpr,
):
    """Of what programs first to last share, into the output's rows from target on. Others of them may have run on other
    multiprocessors: their parts are read past the level-1 cache."""
    row = tl.arange(0, GROUP_PADDED)
    column = tl.arange(0, HEAD_DIM_PADDED)
    in_group = row < GROUP
    here = in_group[:, None] & (column < HEAD_DIM)[None, :]
    best = tl.full([GROUP_PADDED], NOTHING, tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, HEAD_DIM_PADDED], tl.float32)
    for some in range(first, last + 1, 4):
        for i in tl.static_range(4):
            sharer = tl.minimum(some + i, last)
            new = some + i <= last
            slot = 2 * sharer + tl.where(sharer == first, first_slot, 0)
            place = (slot * GROUP + row) * HEAD_DIM
            part = tl.load(partial + place[:, None] + column[None, :], mask=here & new, other=0.0, cache_modifier=".cg")
            own_best = partial_ml + slot * 2 * GROUP + row
            part_best = tl.load(own_best, mask=in_group & new, other=NOTHING, cache_modifier=".cg")
            part_total = tl.load(own_best + GROUP, mask=in_group & new, other=0.0, cache_modifier=".cg")
            new_best = tl.maximum(best, part_best)
            decay = tl.exp2(best - new_best)
            share = tl.exp2(part_best - new_best)
            total = total * decay + part_total * share
            acc = acc * decay[:, None] + part * share[:, None]
            best = new_best
    if CASCADED:
        acc, best, total = join_common(
            acc, best, total, row, column, common_partial, common_partial_ml, join, head,
            NUM_KV_HEADS, GROUP, HEAD_DIM,
        )  # fmt: skip
    place = (target + row) * HEAD_DIM
    total = tl.where(in_group, total, 1.0)
    tl.store(out + place[:, None] + column[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=here)
    if WITH_LSE:
        tl.store(lse + target + row, (best + tl.log2(total)) * LN_2, mask=in_group)


@triton.jit
def _write_nothing(
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
    """What attention over no keys gives, into a sequence's row if it has none."""
    token = tl.load(query_start + seq).to(tl.int64)
    if (token < tl.load(query_start + seq + 1)) & (tl.load(seq_lens + seq) == 0):
        kv_head = tl.arange(0, KV_HEADS_PADDED)
        column = tl.arange(0, HEAD_DIM_PADDED)
        here = kv_head < NUM_KV_HEADS
        here_2d = here[:, None] & (column < HEAD_DIM)[None, :]
        nothing = tl.zeros([KV_HEADS_PADDED, HEAD_DIM_PADDED], out.dtype.element_ty)
        for i in range(0, GROUP):
            place = (token * NUM_KV_HEADS + kv_head) * GROUP + i
            tl.store(out + place[:, None] * HEAD_DIM + column[None, :], nothing, mask=here_2d)
            if WITH_LSE:
                tl.store(lse + place, tl.full([KV_HEADS_PADDED], -float("inf"), tl.float32), mask=here)


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
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Merge the partial results of one (head, sequence), one query head of its group, SPLITS at a time.

    Programs beyond those, one a sequence, write rows without keys.
    """
    merge = tl.program_id(0)
    in_group = tl.program_id(1)
    wait_for_predecessor(OVERLAPPED)
    if merge < num_merges:
        token = tl.load(merges + merge)
        if token >= 0:
            kv_head = tl.load(merges + num_merges + merge)
            first = tl.load(merges + 2 * num_merges + merge)
            last = tl.load(merges + 3 * num_merges + merge)
            first_slot = tl.load(merges + 4 * num_merges + merge)
            column = tl.arange(0, HEAD_DIM_PADDED)
            in_head = column < HEAD_DIM
            best = NOTHING
            total = 0.0
            acc = tl.zeros([HEAD_DIM_PADDED], tl.float32)
            for some in range(first, last + 1, SPLITS):
                sharer = some + tl.arange(0, SPLITS)
                here = sharer <= last
                slot = SLOTS * sharer + tl.where(sharer == first, first_slot, 0)
                bests = tl.load(partial_ml + slot * 2 * GROUP + in_group, mask=here, other=NOTHING)
                sums = tl.load(partial_ml + slot * 2 * GROUP + GROUP + in_group, mask=here, other=0.0)
                place = (slot * GROUP + in_group) * HEAD_DIM
                parts = tl.load(
                    partial + place[:, None] + column[None, :], mask=here[:, None] & in_head[None, :], other=0.0
                )
                new_best = tl.maximum(best, tl.max(bests, 0))
                decay = tl.exp2(best - new_best)
                share = tl.exp2(bests - new_best)
                total = total * decay + tl.sum(sums * share, 0)
                acc = acc * decay + tl.sum(parts * share[:, None], 0)
                best = new_best
            row = token.to(tl.int64) * NUM_KV_HEADS * GROUP + kv_head * GROUP + in_group
            tl.store(out + row * HEAD_DIM + column, (acc / total).to(out.dtype.element_ty), mask=in_head)
            if WITH_LSE:
                tl.store(lse + row, (best + tl.log2(total)) * LN_2)
    elif in_group == 0:
        _write_nothing(
            out,
            lse,
            query_start,
            seq_lens,
            merge - num_merges,
            NUM_KV_HEADS,
            KV_HEADS_PADDED,
            GROUP,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            WITH_LSE,
        )
