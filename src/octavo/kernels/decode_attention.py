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

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from octavo.kernels.attention_rows import LN_2, LOG2_E, NOTHING, load_rows, store_nothing
from octavo.kernels.batch import RaggedBatch
from octavo.kernels.launching import overlapped, wait_for_predecessor

SPLIT = 512
"""Keys of a piece, where the split is fixed."""
FEW_SHARERS = 10
"""Programs that share a (head, sequence), up to which the last of them merges."""


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # Triton's interpreter: few enough that programs share sequences also in small tests
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """tile: keys read at a time; a program's stretch is at least min_tiles of them. early: programs start before the
    kernel before them has ended, if it is a layer's; not where a multiprocessor has room for more than its share of
    them, since those that start early would crowd."""

    tile: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    min_tiles: int = 1
    early: bool = True


def decode_tuning(q: Tensor, num_seqs: int) -> DecodeTuning:
    """What was fastest on an H200; see benchmarks/kernels/gpu_check.py."""
    row_bytes = triton.next_power_of_2(q.shape[2]) * q.element_size()
    if row_bytes <= 128 and num_seqs > 32:
        return DecodeTuning(tile=128, num_warps=4, num_stages=3, programs_per_multiprocessor=2, early=False)
    tile = min(max(8192 // row_bytes, 16), 64)  # short tiles are shared out more evenly, and more of them are in flight
    if num_seqs > 32:
        return DecodeTuning(tile, num_warps=2, num_stages=3, programs_per_multiprocessor=6)
    return DecodeTuning(tile, 1 if row_bytes == 256 else 2, num_stages=4, programs_per_multiprocessor=4)


@dataclass(slots=True)
class _Schedule:
    """Who reads what in a step, the same for all its layers.

    tile_ends   [num_seqs + 1] int32, tile_ends[s + 1] is the sum of the tiles of sequences 0 to s, tile_ends[0] = 0
    starts      [num_programs] int32, the sequence that each program's first tile belongs to
    totals      [4] int32: tiles of all sequences for one head, and the stretch of one program; two unused
    merges      [5, num_merges] int32, what is shared by several programs and to be merged: its token, or -1 where
                nothing is; its K/V head; the first and the last program that share it; and the slot that the first of
                these left its part in, all others having used slot 0. A column for every (sequence, head) or, if those
                are fewer, for every program, whose first tile is not the first of its (head, sequence)
    arrivals    [num_programs] int32, how many of those that share what a program is the first to share have left their
                part; zeros between launches
    partial     [2 * num_programs, group_size, head_dim] float32, unnormalised output of the shared (head, sequence)s
    partial_ml  [2 * num_programs, 2, group_size] float32, their largest scores and their sums of exponentials

    With a fixed split, sequences are padded to whole pieces in tile_ends, a piece has a slot of its own instead of a
    program two, and merges name a first and a last piece.
    """

    tile_ends: Tensor
    starts: Tensor
    totals: Tensor
    merges: Tensor
    arrivals: Tensor
    partial: Tensor
    partial_ml: Tensor


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
) -> None:
    """Attention of the sequences with one query, into their rows of out and lse (which is empty if nobody asks).

    alone: also write the rows that have no keys, the padding; otherwise another kernel owns them.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2:4]
    group_size = num_heads // num_kv_heads
    tuning = tuning or decode_tuning(q, 64 if batch.fixed_split else batch.num_seqs)
    split = SPLIT // tuning.tile if batch.fixed_split else 0  # tiles of a piece
    key = ("paged_attention.decode", tuning, num_kv_heads, group_size, head_dim, window)
    schedule: _Schedule | None = batch.derived.get(key)
    # An earlier layer has made it: there is something to do before q is there.
    early = schedule is not None and tuning.early
    if schedule is None:
        schedule = batch.derived[key] = _make_schedule(
            batch, tuning, split, num_kv_heads, group_size, head_dim, window, q.device
        )
    num_programs = schedule.starts.shape[0]
    head_dim_padded = max(triton.next_power_of_2(head_dim), 16)
    # How many programs share a (head, sequence), roughly.
    shared = num_programs // (batch.num_seqs * num_kv_heads) + 2
    merging = not split and shared <= FEW_SHARERS
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
        schedule.tile_ends,
        schedule.starts,
        schedule.totals,
        scale * LOG2_E,
        window,
        num_tokens,
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
        WINDOWED=window > 0,
        WITH_LSE=lse.numel() > 0,
        MERGING=merging,
        ALONE=alone,
        GROUP_PADDED=triton.next_power_of_2(group_size),
        KV_HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
        **(overlapped(q.device) if early else {"OVERLAPPED": False}),
    )
    if merging:
        return
    splits = 16 if split else 4 if shared <= 4 else 16 if shared <= 16 else 64  # read at a time
    num_merges = schedule.merges.shape[1]
    _combine[(num_merges + (batch.num_seqs if alone else 0), group_size)](
        out,
        lse,
        schedule.partial,
        schedule.partial_ml,
        batch.query_start,
        schedule.tile_ends,
        schedule.merges,
        num_merges,
        num_tokens,
        batch.num_seqs,
        NUM_KV_HEADS=num_kv_heads,
        KV_HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        GROUP=group_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        SPLITS=splits,
        SLOTS=1 if split else 2,
        WITH_LSE=lse.numel() > 0,
        num_warps=1 if splits == 4 else 4,
        **overlapped(q.device),
    )


def _make_schedule(
    batch: RaggedBatch,
    tuning: DecodeTuning,
    split: int,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    window: int,
    device: torch.device,
) -> _Schedule:
    num_programs = -(-_num_multiprocessors(device) * tuning.programs_per_multiprocessor // 4) * 4
    # One piece of memory, and what has a multiple of 16 bytes first: a pointer's alignment makes a kernel's variant.
    num_merges, num_slots = min(num_programs, batch.num_seqs * num_kv_heads), 2 * num_programs
    if split:
        num_tiles = -(-batch.max_seq_len // tuning.tile)  # of one sequence; a window may begin and end inside one
        num_tiles = min(num_tiles, window // tuning.tile + 2) if window else num_tiles
        num_merges = batch.num_seqs * num_kv_heads
        num_slots = num_merges * -(-num_tiles // split)
    sizes = [4, num_programs, num_programs, batch.num_seqs + 1, 5 * num_merges]
    ints = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    totals, starts, arrivals, tile_ends, merges = ints.split(sizes)
    floats = torch.empty(num_slots * group_size * (head_dim + 2), dtype=torch.float32, device=device)
    partial, partial_ml = floats.split([num_slots * group_size * head_dim, 2 * num_slots * group_size])
    _plan_decode[(1,)](
        batch.seq_lens,
        batch.query_start,
        tile_ends,
        starts,
        arrivals,
        totals,
        merges,
        batch.num_seqs,
        num_programs,
        num_merges,
        tuning.min_tiles,
        window,
        NUM_KV_HEADS=num_kv_heads,
        TILE=tuning.tile,
        SEQS=max(64, triton.next_power_of_2(batch.num_seqs)),
        PROGRAMS=triton.next_power_of_2(max(num_programs, num_merges)),
        BY_PROGRAM=not split and num_merges == num_programs,
        SPLIT=split,
        num_warps=8,
    )
    return _Schedule(tile_ends, starts, totals, merges.view(5, num_merges), arrivals, partial, partial_ml)


# Numbers that differ from batch to batch are not specialised on: every variant of a kernel is a compilation.
@triton.jit(do_not_specialize=["num_seqs", "num_merges", "window"])
def _plan_decode(
    seq_lens,
    query_start,
    tile_ends,
    starts,
    arrivals,
    totals,
    merges,
    num_seqs,
    num_programs,
    num_merges,
    min_tiles,
    window,
    NUM_KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    SEQS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BY_PROGRAM: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Fill a `_Schedule`; one program. Sequences with no query, or with several, have no tiles."""
    seq = tl.arange(0, SEQS)
    alive = seq < num_seqs
    seq_len = tl.load(seq_lens + seq, mask=alive, other=0)
    query_begin = tl.load(query_start + seq, mask=alive, other=0)
    query_end = tl.load(query_start + seq + 1, mask=alive, other=0)
    tiles = tl.cdiv(seq_len, TILE)
    if window > 0:
        tiles -= tl.maximum(seq_len - window, 0) // TILE
    if SPLIT:
        tiles = tl.cdiv(tiles, SPLIT) * SPLIT
    tiles = tl.where(query_end - query_begin == 1, tiles, 0)
    ends = tl.cumsum(tiles, 0)
    num_tiles = tl.sum(tiles, 0)
    stretch = tl.maximum(tl.cdiv(num_tiles * NUM_KV_HEADS, num_programs), min_tiles)
    share = stretch  # what a slot is for
    if SPLIT:
        stretch = tl.cdiv(stretch, SPLIT) * SPLIT
        share = SPLIT
    tl.store(tile_ends, 0)
    tl.store(tile_ends + 1 + seq, ends, mask=alive)
    tl.store(totals, num_tiles)
    tl.store(totals + 1, stretch)
    tl.debug_barrier()  # what this program's threads wrote is read by others of them
    program = tl.arange(0, PROGRAMS)
    tile = (program * stretch) % tl.maximum(num_tiles, 1)
    low = tl.zeros([PROGRAMS], tl.int32)  # tile_ends[low] <= tile < tile_ends[high], but for programs without work
    high = tl.zeros([PROGRAMS], tl.int32) + num_seqs
    step = SEQS
    while step > 0:
        middle = (low + high) // 2
        below = tl.load(tile_ends + middle) <= tile
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
        step = step // 2
    tl.store(starts + program, low, mask=program < num_programs)
    tl.store(arrivals + program, 0, mask=program < num_programs)

    merge = program
    alive = merge < num_merges
    if BY_PROGRAM:
        boundary = program * stretch
        seq = low
        head = boundary // tl.maximum(num_tiles, 1)
    else:
        boundary = program * 0
        seq = tl.minimum(merge // NUM_KV_HEADS, num_seqs - 1)
        head = merge % NUM_KV_HEADS
    begin = head * num_tiles + tl.load(tile_ends + seq)
    end = head * num_tiles + tl.load(tile_ends + seq + 1)
    first = begin // share
    last = (end - 1) // share
    if BY_PROGRAM:
        # Of several programs that begin inside it, the first one merges
        shared = (boundary < num_tiles * NUM_KV_HEADS) & (begin < boundary) & (first == program - 1)
    else:
        shared = first < last
    tl.store(merges + merge, tl.where(shared, tl.load(query_start + seq), -1), mask=alive)
    tl.store(merges + num_merges + merge, head, mask=alive)
    tl.store(merges + 2 * num_merges + merge, first, mask=alive)
    tl.store(merges + 3 * num_merges + merge, last, mask=alive)
    # It came last in the program that it began in the middle of, and first in all that follow.
    tl.store(merges + 4 * num_merges + merge, (begin != first * share).to(tl.int32), mask=alive)


@triton.jit(do_not_specialize=["window", "num_tokens", "num_seqs", "table_stride"])
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
    tile_ends,
    starts,
    totals,
    scale,
    window,
    num_tokens,
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
    WINDOWED: tl.constexpr,
    WITH_LSE: tl.constexpr,
    MERGING: tl.constexpr,
    ALONE: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One program's stretch of tiles. scale is for scores in base 2. OVERLAPPED: it starts before its predecessor has
    ended, finds out what it is to read, and waits then.

    Written for the pipeliner: one inner loop, no mask on its loads (a mask cost 1 to 10 %).
    """
    program = tl.program_id(0)
    num_tiles = tl.load(totals)
    stretch = tl.load(totals + 1)
    seq = tl.load(starts + program)
    begin = program * stretch
    end = tl.minimum(begin + stretch, num_tiles * NUM_KV_HEADS)
    row = tl.arange(0, 16)  # a matrix product has 16 rows at least; those past the group are padding
    column = tl.arange(0, HEAD_DIM_PADDED)
    key = tl.arange(0, TILE)
    in_group = row < GROUP
    in_head = column < HEAD_DIM
    at = begin
    while at < end:
        head = at // num_tiles
        tile = at - head * num_tiles
        seq = tl.where(tile == 0, 0, seq)  # the next head's line begins with the first sequence again
        seq_end = tl.load(tile_ends + seq + 1)
        while seq_end <= tile:
            seq += 1
            seq_end = tl.load(tile_ends + seq + 1)
        seq_begin = tl.load(tile_ends + seq)
        seq_len = tl.load(seq_lens + seq)
        token = tl.load(query_start + seq).to(tl.int64)
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
        low = first_tile * TILE
        high = tl.minimum(low + take * TILE, seq_len)

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
        table = block_tables + seq.to(tl.int64) * table_stride
        # Beyond either end, the end again: what is not there is not read, and no load needs a mask.
        last_block = (high - 1) // BLOCK_SIZE
        blocks = tl.minimum((low + key) // BLOCK_SIZE, last_block)
        next_ids = tl.load(table + tl.maximum(blocks, first_key // BLOCK_SIZE))
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

        if take == seq_end - seq_begin:
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
                        (whole != first * stretch).to(tl.int32),
                        token * NUM_KV_HEADS * GROUP + head * GROUP,
                        GROUP,
                        GROUP_PADDED,
                        HEAD_DIM,
                        HEAD_DIM_PADDED,
                        WITH_LSE,
                    )
                    tl.store(arrivals + first, 0)
        at += take
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
                tile_ends,
                idle,
                num_tokens,
                num_seqs,
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
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    WITH_LSE: tl.constexpr,
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
    tile_ends,
    seq,
    num_tokens,
    num_seqs,
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """0 into a sequence's row if it has no keys, and into row `seq` if that is padding behind the last sequence's."""
    kv_heads = tl.arange(0, KV_HEADS_PADDED)
    alive = kv_heads < NUM_KV_HEADS
    own = tl.load(query_start + seq)
    has_keys = tl.load(tile_ends + seq) != tl.load(tile_ends + seq + 1)
    is_idle = (own < tl.load(query_start + seq + 1)) & (not has_keys)
    is_padding = (seq >= tl.load(query_start + num_seqs)) & (seq < num_tokens)
    if is_idle | is_padding:
        for i in range(0, GROUP):
            place = own.to(tl.int64) * NUM_KV_HEADS * GROUP + kv_heads * GROUP + i
            store_nothing(out, lse, place, alive & is_idle, HEAD_DIM, HEAD_DIM_PADDED, WITH_LSE)
            place = seq.to(tl.int64) * NUM_KV_HEADS * GROUP + kv_heads * GROUP + i
            store_nothing(out, lse, place, alive & is_padding, HEAD_DIM, HEAD_DIM_PADDED, WITH_LSE)


@triton.jit(do_not_specialize=["num_merges", "num_tokens", "num_seqs"])
def _combine(
    out,
    lse,
    partial,
    partial_ml,
    query_start,
    tile_ends,
    merges,
    num_merges,
    num_tokens,
    num_seqs,
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

    Programs beyond those, one a sequence, write rows without keys: 0, and so is row s where it is padding behind the
    last sequence's.
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
            tile_ends,
            merge - num_merges,
            num_tokens,
            num_seqs,
            NUM_KV_HEADS,
            KV_HEADS_PADDED,
            GROUP,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            WITH_LSE,
        )
