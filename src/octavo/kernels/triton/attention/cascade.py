"""Decoding sequences that begin with the same blocks: these are read once for several, in Triton.

    sequence  blocks              common with the one before
    0         a b c d e | f                      }
    1         a b c d e | g h     a b c d e      }  a tile: its queries are the rows of one product with a .. e
    2         a b c d e | i       a b c d e      }
    3         j k l m             nothing

A tile is up to ROWS rows of neighbours that begin alike; its common keys are cut into pieces, and a program takes one
piece for one K/V head and leaves what it gives each of the sequences, unnormalised. `decode_attention` then begins each
of them behind what is common, and adds that. The idea is Hydragen's (arXiv 2402.05099), known as cascade attention,
too; here tiles and pieces are worked out on the device, once a step, from `RaggedBatch.common_prefix_lens`, so that a
CUDA graph replays with others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.softmax import LOG2_E, NOTHING, load_rows
from octavo.kernels.triton.launch import overlapped

UNIT = 64
"""Keys that what is common is a multiple of: no kernel's tile is longer, so that none is cut."""
PIECE = tl.constexpr(8)
"""Numbers of a line of `Cascade.pieces`."""
JOIN = tl.constexpr(4)
"""Numbers of a line of `Cascade.joins`."""


@dataclass(frozen=True, slots=True)
class CascadeTuning:
    """rows: queries of a tile, a group's heads side by side; tile: keys read at a time; least: tokens in common below
    which each sequence reads its own, and the shortest piece."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    least: int = 256


def cascade_tuning(q: Tensor) -> CascadeTuning:
    head_dim = triton.next_power_of_2(q.shape[2])
    if q.dtype == torch.float32:  # for tests: products of float32 are done without the matrix units
        return CascadeTuning(rows=32, tile=16, num_warps=4, num_stages=2, programs_per_multiprocessor=2)
    tile = 32 if head_dim > 128 else 64
    return CascadeTuning(rows=64, tile=tile, num_warps=4, num_stages=2, programs_per_multiprocessor=2)


@dataclass(slots=True)
class Cascade:
    """What a step's sequences have in common, and where the parts of that are left, the same for all its layers.

    joins       [num_seqs, JOIN] int32, of a sequence: the tokens that it has in common with its tile, a multiple of
                UNIT, 0 for one alone; the place of what the first piece gave it; how far the next piece's is from
                there; the number of pieces
    pieces      [bound, PIECE] int32, of a piece: the tile's first sequence and how many there are; its first key and
                the one behind the last; the place of what it gives the first; the rest is unused
    count       [4] int32, how many pieces there are; the rest is unused
    partial     [num_places, num_kv_heads, group_size, head_dim] float32, unnormalised output
    partial_ml  [num_places, num_kv_heads, group_size, 2] float32, largest score and sum of exponentials
    """

    tuning: CascadeTuning
    num_programs: int
    joins: Tensor
    pieces: Tensor
    count: Tensor
    partial: Tensor
    partial_ml: Tensor


def make_cascade(
    batch: RaggedBatch,
    tuning: CascadeTuning,
    num_multiprocessors: int,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
) -> Cascade:
    """Of a batch that has `common_prefix_lens`."""
    device, num_seqs = batch.seq_lens.device, batch.num_seqs
    cap = tuning.rows // group_size
    num_programs = num_multiprocessors * tuning.programs_per_multiprocessor
    wanted = max(num_programs // num_kv_heads, 1)  # pieces; there are up to one more of each tile, since tiles end
    bound = wanted + num_seqs // 2
    num_places = wanted * cap + num_seqs
    # One piece of memory, and what has a multiple of 16 bytes first: a pointer's alignment makes a kernel's variant.
    sizes = [4, PIECE.value * bound, JOIN.value * num_seqs, num_seqs + 1]
    ints = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    count, pieces, joins, firsts = ints.split(sizes)
    floats = torch.empty(num_places * num_kv_heads * group_size * (head_dim + 2), dtype=torch.float32, device=device)
    partial, partial_ml = floats.split([x * num_places * num_kv_heads * group_size for x in (head_dim, 2)])
    _plan_cascade[(1,)](
        batch.common_prefix_lens,
        joins,
        pieces,
        firsts,
        count,
        num_seqs,
        wanted,
        CAP=cap,
        LEAST=tuning.least,
        WHOLE=UNIT,
        SEQS=max(64, triton.next_power_of_2(num_seqs)),
        num_warps=4,
    )
    return Cascade(tuning, num_programs, joins, pieces, count, partial, partial_ml)


def cascade_attention(
    q: Tensor, kv_layer: Tensor, batch: RaggedBatch, cascade: Cascade, *, scale: float, early: bool
) -> None:
    """Attention of all tiles' queries over what they have in common, into the cascade's parts.

    early: the cascade was made by an earlier layer
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv_layer.shape[2:4]
    tuning = cascade.tuning
    _attend_common[(cascade.num_programs,)](
        q,
        kv_layer,
        cascade.partial,
        cascade.partial_ml,
        batch.block_tables,
        batch.query_start,
        cascade.pieces,
        cascade.count,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        batch.block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=max(triton.next_power_of_2(head_dim), 16),
        ROWS=tuning.rows,
        TILE=tuning.tile,
        STAGES=tuning.num_stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
        **(overlapped(q.device) if early else {"OVERLAPPED": False}),
    )


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


# Numbers that differ from batch to batch are not specialised on: every variant of a kernel is a compilation.
@triton.jit(do_not_specialize=["num_seqs", "wanted"])
def _plan_cascade(
    common_prefix_lens,
    joins,
    pieces,
    firsts,
    count,
    num_seqs,
    wanted,
    CAP: tl.constexpr,
    LEAST: tl.constexpr,
    WHOLE: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Fill a `Cascade`; one program. firsts [num_seqs + 1] int32 is its own: the first sequence of each tile.

    A tile ends where too little is common. It also ends where that is less than half of what it is on either side:
    better to read a long beginning once for four than a short one once for all.
    """
    seq = tl.arange(0, SEQS)
    alive = seq < num_seqs
    common = tl.load(common_prefix_lens + seq, mask=alive, other=0)
    before = tl.load(common_prefix_lens + seq - 1, mask=alive & (seq > 0), other=0)
    after = tl.load(common_prefix_lens + seq + 1, mask=seq + 1 < num_seqs, other=0)
    alone = (common < LEAST) | (2 * common < before) | (2 * common < after)
    run = tl.associative_scan(tl.where(alone, seq, 0), 0, _larger)
    starts_tile = (seq - run) % CAP == 0
    tile = tl.cumsum(starts_tile.to(tl.int32), 0) - 1
    num_tiles = tl.sum((starts_tile & alive).to(tl.int32), 0)
    tl.store(firsts + tile, seq, mask=starts_tile & alive)
    tl.store(firsts + num_tiles, num_seqs)
    tl.debug_barrier()  # what this program's threads wrote is read by others of them

    here = seq < num_tiles  # from here on, tiles
    first = tl.load(firsts + seq, mask=here, other=0)
    size = tl.load(firsts + seq + 1, mask=here, other=0) - first
    keys = tl.full([SEQS], 1 << 30, tl.int32)
    for i in range(1, CAP):
        keys = tl.minimum(keys, tl.load(common_prefix_lens + first + i, mask=here & (i < size), other=1 << 30))
    keys = tl.where(here & (size > 1), keys // WHOLE * WHOLE, 0)
    stretch = tl.maximum(tl.cdiv(tl.cdiv(tl.sum(keys, 0), wanted), WHOLE) * WHOLE, LEAST)
    num_pieces = tl.cdiv(keys, stretch)
    first_piece = tl.cumsum(num_pieces, 0) - num_pieces
    places = num_pieces * size
    first_place = tl.cumsum(places, 0) - places
    tl.store(count, tl.sum(num_pieces, 0))
    for i in range(0, tl.max(num_pieces, 0)):
        line = pieces + (first_piece + i) * PIECE
        mine = i < num_pieces
        tl.store(line, first, mask=mine)
        tl.store(line + 1, size, mask=mine)
        tl.store(line + 2, i * stretch, mask=mine)
        tl.store(line + 3, tl.minimum((i + 1) * stretch, keys), mask=mine)
        tl.store(line + 4, first_place + i * size, mask=mine)
    for i in range(0, CAP):
        line = joins + (first + i) * JOIN
        mine = here & (i < size)
        tl.store(line, keys, mask=mine)
        tl.store(line + 1, first_place + i, mask=mine)
        tl.store(line + 2, size, mask=mine)
        tl.store(line + 3, num_pieces, mask=mine)


@triton.jit(do_not_specialize=["table_stride"])
def _attend_common(
    q,
    kv,
    partial,
    partial_ml,
    block_tables,
    query_start,
    pieces,
    count,
    scale,
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
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Pieces by turns, each for each K/V head. Of ROWS rows those of the tile's sequences are used; all of them see all
    of the keys, and no load of these needs a mask."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, HEAD_DIM_PADDED)
    key = tl.arange(0, TILE)
    in_head = column < HEAD_DIM
    num_items = tl.load(count) * NUM_KV_HEADS
    if OVERLAPPED:
        gdc_wait()
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        line = pieces + item // NUM_KV_HEADS * PIECE
        head = item % NUM_KV_HEADS
        first = tl.load(line)
        begin = tl.load(line + 2)
        end = tl.load(line + 3)
        place = tl.load(line + 4)
        member = row // GROUP
        wanted = member < tl.load(line + 1)
        table = block_tables + first.to(tl.int64) * table_stride
        next_ids = tl.load(table + (begin + key) // BLOCK_SIZE)
        token = tl.load(query_start + first + member, mask=wanted, other=0).to(tl.int64)
        heads = head * GROUP + row % GROUP
        queries = tl.load(
            q + (token * q_token_stride + heads * q_head_stride)[:, None] + column[None, :],
            mask=wanted[:, None] & in_head[None, :],
            other=0.0,
        )
        best = tl.full([ROWS], NOTHING, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            offset = next_ids.to(tl.int64) * kv_block_stride + head * kv_head_stride
            offset += (start + key) % BLOCK_SIZE * HEAD_DIM
            next_ids = tl.load(table + tl.minimum(start + TILE + key, end - 1) // BLOCK_SIZE)
            keys = load_rows(kv + offset[:, None] + column[None, :], in_head, HEAD_DIM, HEAD_DIM_PADDED)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
            new_best = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - new_best[:, None])
            decay = tl.exp2(best - new_best)
            total = total * decay + tl.sum(weights, 1)
            place_of_values = kv + kv_value_stride + offset[:, None] + column[None, :]
            values = load_rows(place_of_values, in_head, HEAD_DIM, HEAD_DIM_PADDED)
            acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
            best = new_best
        target = ((place + member).to(tl.int64) * NUM_KV_HEADS + head) * GROUP + row % GROUP
        tl.store(partial + target[:, None] * HEAD_DIM + column[None, :], acc, mask=wanted[:, None] & in_head[None, :])
        tl.store(partial_ml + target * 2, best, mask=wanted)
        tl.store(partial_ml + target * 2 + 1, total, mask=wanted)


@triton.jit
def join_common(
    acc,
    best,
    total,
    row,
    column,
    partial,
    partial_ml,
    line,
    head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """A sequence's own result for one K/V head, its group's rows first, and what the pieces of its tile gave it.

    line: the sequence's of `Cascade.joins`. An earlier layer's parts lay in the same place: they are read past the
    level-1 cache.
    """
    in_group = row < GROUP
    here = in_group[:, None] & (column < HEAD_DIM)[None, :]
    place = tl.load(line + 1).to(tl.int64)
    step = tl.load(line + 2)
    num_pieces = tl.load(line + 3)
    for some in range(0, num_pieces, 2):
        for i in tl.static_range(2):  # more of them at once have no room in registers
            new = some + i < num_pieces
            source = ((place + (some + i) * step) * NUM_KV_HEADS + head) * GROUP + row
            part = tl.load(
                partial + source[:, None] * HEAD_DIM + column[None, :], mask=here & new, other=0.0, cache_modifier=".cg"
            )
            part_best = tl.load(partial_ml + source * 2, mask=in_group & new, other=NOTHING, cache_modifier=".cg")
            part_total = tl.load(partial_ml + source * 2 + 1, mask=in_group & new, other=0.0, cache_modifier=".cg")
            new_best = tl.maximum(best, part_best)
            decay = tl.exp2(best - new_best)
            share = tl.exp2(part_best - new_best)
            total = total * decay + part_total * share
            acc = acc * decay[:, None] + part * share[:, None]
            best = new_best
    return acc, best, total
