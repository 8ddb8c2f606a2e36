"""The schedule of decode attention: which program reads which tiles of keys.

One small program computes it on the device, once a step, so a CUDA graph replays with other lengths. `decode` describes
how the work is partitioned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.cascade import PREFIX_FIELDS, CascadePlan, CascadeTuning, plan_cascade
from octavo.kernels.triton.capability import num_multiprocessors

SPLIT_KEYS = 512
"""Keys of a split, if the batch asks for `fixed_split`."""
ROW_SIZE = tl.constexpr(8)
"""Numbers in a row of `DecodeSchedule.segments` and `DecodeSchedule.starts`."""
SEGMENT_INDEX, PROGRAM_BEGIN = tl.constexpr(5), tl.constexpr(6)
"""Fields of a row of `starts`: index of the segment, and the tile where the program begins."""
PREFIX_TILES = tl.constexpr(7)
"""Field of a row of either: tiles of the shared prefix, which cascade attention reads."""
PACK_QUERIES = PREFIX_TILES
"""The same field, which packs use for their number of queries: packs and shared prefixes do not occur together."""
MAX_INLINE_MERGE = 10
"""If at most so many programs share a (head, segment), the last of them to finish merges; else a second kernel does."""


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Launch parameters of the decode kernel.

    tile          keys read at a time
    seq_overhead  cost of switching to another sequence, in tiles
    """

    tile: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    seq_overhead: int = 0

    @property
    def registers(self) -> int:
        """Limit for each thread, so that all programs are resident at once."""
        return min(65536 // (32 * self.num_warps * self.programs_per_multiprocessor) // 8 * 8, 255)


def can_widen(q: Tensor) -> bool:
    """True if packs may have twice the rows: measured for heads of 128 in 16 bits."""
    return bool(triton.next_power_of_2(q.shape[2]) * q.element_size() == 256)


def decode_tuning(
    q: Tensor, num_seqs: int, *, packed: bool = False, wide: bool = False, kv_bytes: int = 2
) -> DecodeTuning:
    """The fastest tuning on an H200 (benchmarks/kernels/gpu_check.py). wide: packs with twice the rows

    kv_bytes  of a number of K or V
    """
    row_bytes = triton.next_power_of_2(q.shape[2]) * q.element_size()
    if q.shape[2] > 256 and q.element_size() == 2:  # not measured: all programs are resident, and none spills
        return DecodeTuning(tile=16, num_warps=4, num_stages=3, programs_per_multiprocessor=2)
    if packed and row_bytes == 256:
        stages = 3 if wide else 4
        return DecodeTuning(tile=32, num_warps=1 + wide, num_stages=stages, programs_per_multiprocessor=4)
    if row_bytes <= 128 and num_seqs > 32:
        return DecodeTuning(tile=64, num_warps=2, num_stages=3, programs_per_multiprocessor=4, seq_overhead=2)
    tile = min(max(8192 // row_bytes, 16), 64)  # short tiles balance better, and more of them are in flight
    if num_seqs > 32:
        return DecodeTuning(tile, 1 if row_bytes == 256 else 2, num_stages=3, programs_per_multiprocessor=6)
    if row_bytes == 256 and kv_bytes == 1:  # benchmarks/kernels/bench_decode.py
        return DecodeTuning(2 * tile, num_warps=1, num_stages=4, programs_per_multiprocessor=4, seq_overhead=1)
    if row_bytes == 256:
        return DecodeTuning(tile, num_warps=1, num_stages=4, programs_per_multiprocessor=4, seq_overhead=1)
    return DecodeTuning(tile, num_warps=2, num_stages=4, programs_per_multiprocessor=4)


class Packs(NamedTuple):
    """Packs of a batch: neighbouring lines of a row, whose keys are read once. Without packing, each line is a pack.

    num       of the batch
    per_row   of a row
    queries   lines of a pack; the last pack of a row may have fewer
    capacity  most lines that a pack of this group size can have; 1: no packing
    """

    num: int
    per_row: int
    queries: int
    capacity: int


def make_packs(batch: RaggedBatch, capacity: int) -> Packs:
    """Packs of balanced size."""
    lines = batch.lines_per_row
    if lines == 1 or capacity < 2:
        return Packs(batch.num_seqs, 1, 1, 1)
    per_row = cdiv(lines, capacity)
    return Packs(batch.num_seqs // lines * per_row, per_row, cdiv(lines, per_row), capacity)


@dataclass(slots=True)
class DecodeSchedule:
    """The schedule of a step, the same for all its layers.

    A segment is the tiles of one pack; it is the same for every head. The tiles of a head are numbered over all
    segments, with `seq_overhead` unused numbers before each segment. The numbers of head h follow those of head h - 1.

    segments    [num_packs, ROW_SIZE] int32, one row for each segment: first tile, end tile, context length, token,
                sequence; two unused; tiles of the shared prefix, which are not numbered. For a pack, the context length
                and the sequence are those of its last line, the token that of its first; its number of queries is last
    starts      [num_programs + 1, ROW_SIZE] int32, a copy of the row of the segment in which each program begins,
                then its index in `segments` and the tile where the program begins, over all heads. A program ends where
                the next one begins. The copy puts everything that a program needs first into one place
    totals      [4] int32: tiles of one head, overhead included; tiles of one program; two unused
    merges      [6, num_merges] int32, one column for each (head, segment): token, or -1 if one program covers it; K/V
                head; first and last program that share it; the first program's slot, all others use slot 0; a pack's
                number of queries. Empty if the last program to finish merges
    arrivals    [num_programs] int32, for the first program that shares a segment: how many of the sharing programs have
                stored their part; zeros between launches
    partial     [2 * num_programs, num_rows, head_dim] float32, unnormalised outputs of shared (head, segment)s; there
                is a row for each query head of a group, and for each query that a pack can have
    partial_ml  [2 * num_programs, 2, num_rows] float32, their row maxima and row sums of exponentials
    cascade     the plan for shared prefixes, if there is one

    With a fixed split, segments are padded to whole splits, every split has one slot instead of two for each program,
    and `merges` holds the first and the last split instead of programs.
    """

    packs: Packs
    num_sharers: int
    """Programs that share one (head, segment), estimated."""
    segments: Tensor
    starts: Tensor
    totals: Tensor
    merges: Tensor
    arrivals: Tensor
    partial: Tensor
    partial_ml: Tensor
    cascade: CascadePlan | None = None

    @property
    def num_merges(self) -> int:
        """(head, segment)s that a second kernel merges; 0 if the last program to finish merges."""
        return self.merges.shape[1]


def make_decode_schedule(
    batch: RaggedBatch,
    tuning: DecodeTuning,
    split_tiles: int,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    window: int,
    cascade_tuning: CascadeTuning | None = None,
    packs: Packs | None = None,
) -> DecodeSchedule:
    """Build the schedule of a step on the device.

    split_tiles     tiles of a fixed split, or 0
    cascade_tuning  if set, shared prefixes are read once; the batch needs `common_prefix_lens`
    packs           default: each line is one
    """
    packs = packs or make_packs(batch, 1)
    multiprocessors = num_multiprocessors(batch.seq_lens.device)
    num_programs = cdiv(multiprocessors * tuning.programs_per_multiprocessor, 4) * 4
    num_pairs = packs.num * num_kv_heads
    num_sharers = num_programs // num_pairs + 2
    num_merges, num_slots = (num_pairs if split_tiles or num_sharers > MAX_INLINE_MERGE else 0, 2 * num_programs)
    cascade = None
    if cascade_tuning is not None and num_merges == 0:
        cascade = plan_cascade(batch, cascade_tuning, multiprocessors, num_kv_heads, group_size, head_dim)
    if split_tiles:
        num_tiles = cdiv(batch.max_seq_len, tuning.tile)  # of one sequence; a window may begin and end inside a tile
        num_tiles = min(num_tiles, window // tuning.tile + 2) if window else num_tiles
        num_slots = num_pairs * cdiv(num_tiles, split_tiles)
    num_rows = num_slots * group_size * packs.capacity
    schedule = _allocate_schedule(batch, packs, num_programs, num_sharers, num_merges, num_rows, head_dim, cascade)
    _build_decode_schedule[(1,)](
        batch.seq_lens,
        batch.query_start,
        schedule.segments,
        schedule.starts,
        schedule.arrivals,
        schedule.totals,
        schedule.merges,
        schedule.totals if cascade is None else cascade.prefixes,
        packs.num,
        packs.per_row,
        packs.queries,
        batch.lines_per_row,
        num_programs,
        num_merges,
        window,
        NUM_KV_HEADS=num_kv_heads,
        TILE=tuning.tile,
        SEQS=max(64, triton.next_power_of_2(packs.num)),
        SEQ_OVERHEAD=0 if split_tiles else tuning.seq_overhead,
        PROGRAMS=triton.next_power_of_2(max(num_programs + 1, num_merges)),
        SPLIT_TILES=split_tiles,
        USE_CASCADE=cascade is not None,
        PACKED=packs.capacity > 1,
        num_warps=8,
    )
    return schedule


def _allocate_schedule(
    batch: RaggedBatch,
    packs: Packs,
    num_programs: int,
    num_sharers: int,
    num_merges: int,
    num_rows: int,
    head_dim: int,
    cascade: CascadePlan | None,
) -> DecodeSchedule:
    """Two allocations, multiples of 16 bytes first: every alignment of a pointer is a variant of the kernel.

    num_rows  of all parts
    """
    device, size = batch.seq_lens.device, ROW_SIZE.value
    sizes = [4, size * (num_programs + 1), size * packs.num, num_programs, 6 * num_merges]
    ints = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    totals, starts, segments, arrivals, merges = ints.split(sizes)
    floats = torch.empty(num_rows * (head_dim + 2), dtype=torch.float32, device=device)
    partial, partial_ml = floats.split([num_rows * head_dim, num_rows * 2])
    segments, starts, merges = segments.view(-1, size), starts.view(-1, size), merges.view(6, num_merges)
    return DecodeSchedule(packs, num_sharers, segments, starts, totals, merges, arrivals, partial, partial_ml, cascade)


# Numbers that vary between batches are not specialised on: every variant of a kernel is a compilation.
@triton.jit(do_not_specialize=["num_packs", "packs_per_row", "queries", "lines_per_row", "num_merges", "window"])
def _build_decode_schedule(
    seq_lens,
    query_start,
    segments,
    starts,
    arrivals,
    totals,
    merges,
    prefixes,
    num_packs,
    packs_per_row,
    queries,
    lines_per_row,
    num_programs,
    num_merges,
    window,
    NUM_KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    SEQS: tl.constexpr,
    SEQ_OVERHEAD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    USE_CASCADE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Fill a `DecodeSchedule`; one program. Sequences without a query, with several, or without keys have no tiles."""
    pack = tl.arange(0, SEQS)
    num_tiles, num_segments = _write_segments(
        seq_lens, query_start, segments, prefixes, pack, num_packs, packs_per_row, queries, lines_per_row, window,
        TILE, SEQ_OVERHEAD, SPLIT_TILES, USE_CASCADE, PACKED,
    )  # fmt: skip
    tiles_per_program = tl.maximum(tl.cdiv(num_tiles * NUM_KV_HEADS, num_programs), 1)
    slot_tiles = tiles_per_program
    if SPLIT_TILES:
        tiles_per_program = tl.cdiv(tiles_per_program, SPLIT_TILES) * SPLIT_TILES
        slot_tiles = SPLIT_TILES
    tl.store(totals, num_tiles)
    tl.store(totals + 1, tiles_per_program)
    tl.debug_barrier()  # other threads of this program read what was written
    program = tl.arange(0, PROGRAMS)
    _write_starts(
        segments, starts, program, num_programs, num_segments, num_tiles, tiles_per_program,
        NUM_KV_HEADS, SEQS, SEQ_OVERHEAD, USE_CASCADE or PACKED,
    )  # fmt: skip
    tl.store(arrivals + program, 0, mask=program < num_programs)
    if num_merges > 0:
        _write_merges(
            segments, merges, program, num_merges, num_segments, num_tiles, slot_tiles,
            NUM_KV_HEADS, SEQ_OVERHEAD, PACKED,
        )  # fmt: skip


@triton.jit
def _write_segments(
    seq_lens, query_start, segments, prefixes, pack, num_packs, packs_per_row, queries, lines_per_row, window,
    TILE: tl.constexpr, SEQ_OVERHEAD: tl.constexpr, SPLIT_TILES: tl.constexpr, USE_CASCADE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Number the tiles of the packs with one query a sequence and some keys -> (tiles of a head, segments)."""
    valid = pack < num_packs
    seq = pack
    if PACKED:
        first_line = pack % packs_per_row * queries
        num_lines = tl.minimum(queries, lines_per_row - first_line)
        seq = pack // packs_per_row * lines_per_row + first_line
    query_begin = tl.load(query_start + seq, mask=valid, other=0)
    query_end = tl.load(query_start + seq + 1, mask=valid, other=0)
    if PACKED:
        first_seq = seq
        seq_len = tl.zeros_like(seq)  # of the last line that has keys
        first_len = tl.zeros_like(seq)
        for i in range(0, queries):
            line_len = tl.load(seq_lens + first_seq + i, mask=valid & (i < num_lines), other=0)
            seq = tl.where(line_len > 0, first_seq + i, seq)  # its block table has the blocks of all lines before it
            seq_len = tl.maximum(seq_len, line_len)
            first_len = tl.maximum(first_len, line_len - i)
    else:
        seq_len = tl.load(seq_lens + seq, mask=valid, other=0)
        first_len = seq_len
    tiles = tl.cdiv(seq_len, TILE)
    if USE_CASCADE:
        prefix_tiles = tl.load(prefixes + seq * PREFIX_FIELDS, mask=valid, other=0) // TILE
        tiles -= prefix_tiles
    if window > 0:
        tiles -= tl.maximum(first_len - window, 0) // TILE
    if SPLIT_TILES:
        tiles = tl.cdiv(tiles, SPLIT_TILES) * SPLIT_TILES
    is_decode = (query_end - query_begin == 1) & (seq_len > 0)
    length = tl.where(is_decode, SEQ_OVERHEAD + tiles, 0)
    ends = tl.cumsum(length, 0)
    segment_ptr = segments + (tl.cumsum(is_decode.to(tl.int32), 0) - 1) * ROW_SIZE
    tl.store(segment_ptr, ends - tiles, mask=is_decode)
    tl.store(segment_ptr + 1, ends, mask=is_decode)
    tl.store(segment_ptr + 2, seq_len, mask=is_decode)
    tl.store(segment_ptr + 3, query_begin, mask=is_decode)
    tl.store(segment_ptr + 4, seq, mask=is_decode)
    if USE_CASCADE:
        tl.store(segment_ptr + PREFIX_TILES, prefix_tiles, mask=is_decode)
    if PACKED:
        tl.store(segment_ptr + PACK_QUERIES, seq_len - first_len + 1, mask=is_decode)
    return tl.sum(length, 0), tl.sum(is_decode.to(tl.int32), 0)


@triton.jit
def _write_starts(
    segments, starts, program, num_programs, num_segments, num_tiles, tiles_per_program,
    NUM_KV_HEADS: tl.constexpr, SEQS: tl.constexpr, SEQ_OVERHEAD: tl.constexpr, HAS_LAST_FIELD: tl.constexpr,
):  # fmt: skip
    """Find the segment and the tile where each program begins."""
    tile = (program * tiles_per_program) % tl.maximum(num_tiles, 1)
    # Binary search: segment `low` begins at the tile or before it, `high` after it.
    low = tl.zeros([program.shape[0]], tl.int32)
    high = tl.zeros([program.shape[0]], tl.int32) + num_segments
    search_step = SEQS
    while search_step > 0:
        middle = (low + high) // 2
        is_before = tl.load(segments + middle * ROW_SIZE, mask=middle < num_segments, other=0) - SEQ_OVERHEAD <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
        search_step = search_step // 2
    valid = (program <= num_programs) & (low < num_segments)
    for field in tl.static_range(5):
        value = tl.load(segments + low * ROW_SIZE + field, mask=valid, other=0)
        tl.store(starts + program * ROW_SIZE + field, value, mask=valid)
    if HAS_LAST_FIELD:
        value = tl.load(segments + low * ROW_SIZE + PREFIX_TILES, mask=valid, other=0)
        tl.store(starts + program * ROW_SIZE + PREFIX_TILES, value, mask=valid)
    tl.store(starts + program * ROW_SIZE + SEGMENT_INDEX, low, mask=valid)
    # A program that would begin in the overhead begins after it.
    first_tile = tl.load(segments + low * ROW_SIZE, mask=valid, other=0)
    begin = tl.minimum(program * tiles_per_program - tile + tl.maximum(tile, first_tile), num_tiles * NUM_KV_HEADS)
    tl.store(starts + program * ROW_SIZE + PROGRAM_BEGIN, begin, mask=program <= num_programs)


@triton.jit
def _write_merges(
    segments, merges, merge, num_merges, num_segments, num_tiles, slot_tiles,
    NUM_KV_HEADS: tl.constexpr, SEQ_OVERHEAD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """List which programs share each (head, segment); slot_tiles: tiles of a program, or of a fixed split."""
    head = merge % NUM_KV_HEADS
    segment_ptr = segments + merge // NUM_KV_HEADS * ROW_SIZE
    mask = merge < num_merges
    valid = mask & (merge // NUM_KV_HEADS < num_segments)
    start = head * num_tiles + tl.load(segment_ptr, mask=valid, other=0)
    first = start // slot_tiles
    last = (head * num_tiles + tl.load(segment_ptr + 1, mask=valid, other=0) - 1) // slot_tiles
    token = tl.load(segment_ptr + 3, mask=valid, other=0)
    tl.store(merges + merge, tl.where(valid & (first < last), token, -1), mask=mask)
    tl.store(merges + num_merges + merge, head, mask=mask)
    tl.store(merges + 2 * num_merges + merge, first, mask=mask)
    tl.store(merges + 3 * num_merges + merge, last, mask=mask)
    # A segment that begins inside a program is that program's last, and the first of all that follow.
    tl.store(merges + 4 * num_merges + merge, (first * slot_tiles < start - SEQ_OVERHEAD).to(tl.int32), mask=mask)
    if PACKED:
        queries = tl.load(segment_ptr + PACK_QUERIES, mask=valid, other=0)
        tl.store(merges + 5 * num_merges + merge, queries, mask=mask)


@triton.jit
def load_segment(segment_ptr):
    """(first tile, end tile, context length, token, sequence) of a row of `segments` or `starts`."""
    token = tl.load(segment_ptr + 3).to(tl.int64)
    return tl.load(segment_ptr), tl.load(segment_ptr + 1), tl.load(segment_ptr + 2), token, tl.load(segment_ptr + 4)
