"""Who reads what when a batch decodes: worked out on the device, once a step, by one small program.

`decode_attention` says what for. A CUDA graph replays it with other lengths.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.cascade import JOIN, Cascade, CascadeTuning, make_cascade

SPLIT = 512
"""Keys of a piece, where the split is fixed."""
LINE = tl.constexpr(8)
"""Numbers of a line of `Schedule.segments` and `Schedule.starts`."""
NUMBER, BEGIN = tl.constexpr(5), tl.constexpr(6)
"""Where in a line of `starts` are the segment's number, and where the program begins."""
SKIPPED = tl.constexpr(7)
"""Where in either line are the tiles that the sequence leaves to its cascade."""
FEW_SHARERS = 10
"""Programs that share a (head, sequence), up to which the last of them to be done merges."""


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # Triton's interpreter: few enough that programs share sequences also in small tests
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """tile: keys read at a time; gap: going on to another sequence counts like so many of them."""

    tile: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    gap: int = 0

    @property
    def registers(self) -> int:
        """That a thread may have, if all programs are to be there at once."""
        return min(65536 // (32 * self.num_warps * self.programs_per_multiprocessor) // 8 * 8, 255)


def decode_tuning(q: Tensor, num_seqs: int) -> DecodeTuning:
    """What was fastest on an H200; see benchmarks/kernels/gpu_check.py."""
    row_bytes = triton.next_power_of_2(q.shape[2]) * q.element_size()
    if row_bytes <= 128 and num_seqs > 32:
        return DecodeTuning(tile=64, num_warps=2, num_stages=3, programs_per_multiprocessor=4, gap=2)
    tile = min(max(8192 // row_bytes, 16), 64)  # short tiles are shared out more evenly, and more of them are in flight
    if num_seqs > 32:
        return DecodeTuning(tile, 1 if row_bytes == 256 else 2, num_stages=3, programs_per_multiprocessor=6)
    if row_bytes == 256:
        return DecodeTuning(tile, num_warps=1, num_stages=4, programs_per_multiprocessor=4, gap=1)
    return DecodeTuning(tile, num_warps=2, num_stages=4, programs_per_multiprocessor=4)


@dataclass(slots=True)
class Schedule:
    """Who reads what in a step, the same for all its layers.

    segments    [num_seqs, LINE] int32, a line for each sequence that has tiles, in their order: the first of these and
                the one behind the last, on the line of one head, with a gap before each sequence; its length, its
                token, its number; two unused; with a cascade, how many tiles it leaves to that, which are not on
                the line
    starts      [num_programs + 1, LINE] int32, the same of the sequence that each program begins in; that one's line in
                `segments`; and where the program begins, on the line of all heads. It ends where the next one begins.
                So what a program needs first lies in one place
    totals      [4] int32: tiles of all sequences for one head, with the gaps, and the stretch of one program; two
                unused
    merges      [5, num_merges] int32, what is shared by several programs and to be merged: its token, or -1 where
                nothing is; its K/V head; the first and the last program that share it; and the slot that the first of
                these left its part in, all others having used slot 0. A column for every (head, segment), or none if
                the last of those that share it merges
    arrivals    [num_programs] int32, how many of those that share what a program is the first to share have left their
                part; zeros between launches
    partial     [2 * num_programs, group_size, head_dim] float32, unnormalised output of the shared (head, segment)s
    partial_ml  [2 * num_programs, 2, group_size] float32, their largest scores and their sums of exponentials
    cascade     what its sequences have in common, where that is read once

    With a fixed split, sequences are padded to whole pieces of tiles, a piece has a slot of its own instead of a
    program two, and merges name a first and a last piece.
    """

    num_sharers: int
    """Programs that share a (head, segment), roughly."""
    segments: Tensor
    starts: Tensor
    totals: Tensor
    merges: Tensor
    arrivals: Tensor
    partial: Tensor
    partial_ml: Tensor
    cascade: Cascade | None = None


def make_schedule(
    batch: RaggedBatch,
    tuning: DecodeTuning,
    split: int,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    window: int,
    cascade_tuning: CascadeTuning | None = None,
) -> Schedule:
    """split: tiles of a piece, or 0. cascade_tuning: set where the batch has `common_prefix_lens`, read once."""
    device = batch.seq_lens.device
    num_programs = cdiv(_num_multiprocessors(device) * tuning.programs_per_multiprocessor, 4) * 4
    num_shared = batch.num_seqs * num_kv_heads
    num_sharers = num_programs // num_shared + 2
    num_merges, num_slots = num_shared if split or num_sharers > FEW_SHARERS else 0, 2 * num_programs
    cascade = None
    if cascade_tuning is not None and num_merges == 0:
        cascade = make_cascade(batch, cascade_tuning, _num_multiprocessors(device), num_kv_heads, group_size, head_dim)
    if split:
        num_tiles = cdiv(batch.max_seq_len, tuning.tile)  # of one sequence; a window may begin and end inside one
        num_tiles = min(num_tiles, window // tuning.tile + 2) if window else num_tiles
        num_slots = num_shared * cdiv(num_tiles, split)
    # One piece of memory, and what has a multiple of 16 bytes first: a pointer's alignment makes a kernel's variant.
    sizes = [4, LINE.value * (num_programs + 1), LINE.value * batch.num_seqs, num_programs, 5 * num_merges]
    ints = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    totals, starts, segments, arrivals, merges = ints.split(sizes)
    floats = torch.empty(num_slots * group_size * (head_dim + 2), dtype=torch.float32, device=device)
    partial, partial_ml = floats.split([num_slots * group_size * head_dim, 2 * num_slots * group_size])
    _plan_decode[(1,)](
        batch.seq_lens,
        batch.query_start,
        segments,
        starts,
        arrivals,
        totals,
        merges,
        totals if cascade is None else cascade.joins,
        batch.num_seqs,
        num_programs,
        num_merges,
        window,
        NUM_KV_HEADS=num_kv_heads,
        TILE=tuning.tile,
        SEQS=max(64, triton.next_power_of_2(batch.num_seqs)),
        GAP=0 if split else tuning.gap,
        PROGRAMS=triton.next_power_of_2(max(num_programs + 1, num_merges)),
        SPLIT=split,
        CASCADED=cascade is not None,
        num_warps=8,
    )
    segments, starts = segments.view(-1, LINE.value), starts.view(-1, LINE.value)
    merges = merges.view(5, num_merges)
    return Schedule(num_sharers, segments, starts, totals, merges, arrivals, partial, partial_ml, cascade)


# Numbers that differ from batch to batch are not specialised on: every variant of a kernel is a compilation.
@triton.jit(do_not_specialize=["num_seqs", "num_merges", "window"])
def _plan_decode(
    seq_lens,
    query_start,
    segments,
    starts,
    arrivals,
    totals,
    merges,
    joins,
    num_seqs,
    num_programs,
    num_merges,
    window,
    NUM_KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    SEQS: tl.constexpr,
    GAP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SPLIT: tl.constexpr,
    CASCADED: tl.constexpr,
):
    """Fill a `Schedule`; one program. Sequences with no query, with several, or with no keys have no tiles."""
    seq = tl.arange(0, SEQS)
    alive = seq < num_seqs
    seq_len = tl.load(seq_lens + seq, mask=alive, other=0)
    query_begin = tl.load(query_start + seq, mask=alive, other=0)
    query_end = tl.load(query_start + seq + 1, mask=alive, other=0)
    tiles = tl.cdiv(seq_len, TILE)
    if CASCADED:
        skipped = tl.load(joins + seq * JOIN, mask=alive, other=0) // TILE
        tiles -= skipped
    if window > 0:
        tiles -= tl.maximum(seq_len - window, 0) // TILE
    if SPLIT:
        tiles = tl.cdiv(tiles, SPLIT) * SPLIT
    decodes = (query_end - query_begin == 1) & (seq_len > 0)
    length = tl.where(decodes, GAP + tiles, 0)
    ends = tl.cumsum(length, 0)
    num_tiles = tl.sum(length, 0)
    num_segments = tl.sum(decodes.to(tl.int32), 0)
    stretch = tl.maximum(tl.cdiv(num_tiles * NUM_KV_HEADS, num_programs), 1)
    share = stretch  # what a slot is for
    if SPLIT:
        stretch = tl.cdiv(stretch, SPLIT) * SPLIT
        share = SPLIT
    tl.store(totals, num_tiles)
    tl.store(totals + 1, stretch)
    line = segments + (tl.cumsum(decodes.to(tl.int32), 0) - 1) * LINE
    tl.store(line, ends - tiles, mask=decodes)
    tl.store(line + 1, ends, mask=decodes)
    tl.store(line + 2, seq_len, mask=decodes)
    tl.store(line + 3, query_begin, mask=decodes)
    tl.store(line + 4, seq, mask=decodes)
    if CASCADED:
        tl.store(line + SKIPPED, skipped, mask=decodes)
    tl.debug_barrier()  # what this program's threads wrote is read by others of them
    program = tl.arange(0, PROGRAMS)
    tile = (program * stretch) % tl.maximum(num_tiles, 1)
    low = tl.zeros([PROGRAMS], tl.int32)  # the tile is behind the first of `low`, and before that of `high`
    high = tl.zeros([PROGRAMS], tl.int32) + num_segments
    step = SEQS
    while step > 0:
        middle = (low + high) // 2
        below = tl.load(segments + middle * LINE, mask=middle < num_segments, other=0) - GAP <= tile
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
        step = step // 2
    alive = (program <= num_programs) & (low < num_segments)
    for field in tl.static_range(5):
        value = tl.load(segments + low * LINE + field, mask=alive, other=0)
        tl.store(starts + program * LINE + field, value, mask=alive)
    if CASCADED:
        value = tl.load(segments + low * LINE + SKIPPED, mask=alive, other=0)
        tl.store(starts + program * LINE + SKIPPED, value, mask=alive)
    tl.store(starts + program * LINE + NUMBER, low, mask=alive)
    first_tile = tl.load(segments + low * LINE, mask=alive, other=0)  # behind the gap, if it would begin in one
    begin = tl.minimum(program * stretch - tile + tl.maximum(tile, first_tile), num_tiles * NUM_KV_HEADS)
    tl.store(starts + program * LINE + BEGIN, begin, mask=program <= num_programs)
    tl.store(arrivals + program, 0, mask=program < num_programs)

    if num_merges > 0:
        merge = program
        head = merge % NUM_KV_HEADS
        shared = segments + merge // NUM_KV_HEADS * LINE
        here = merge < num_merges
        alive = here & (merge // NUM_KV_HEADS < num_segments)
        whole = head * num_tiles + tl.load(shared, mask=alive, other=0)
        first = whole // share
        last = (head * num_tiles + tl.load(shared + 1, mask=alive, other=0) - 1) // share
        token = tl.load(shared + 3, mask=alive, other=0)
        tl.store(merges + merge, tl.where(alive & (first < last), token, -1), mask=here)
        tl.store(merges + num_merges + merge, head, mask=here)
        tl.store(merges + 2 * num_merges + merge, first, mask=here)
        tl.store(merges + 3 * num_merges + merge, last, mask=here)
        # It came last in the program that it began in the middle of, and first in all that follow.
        tl.store(merges + 4 * num_merges + merge, (first * share < whole - GAP).to(tl.int32), mask=here)


@triton.jit
def load_segment(line):
    """Of a line of `Schedule.segments` or its `starts`: first tile, the one behind the last, length, token, number."""
    token = tl.load(line + 3).to(tl.int64)
    return tl.load(line), tl.load(line + 1), tl.load(line + 2), token, tl.load(line + 4)
