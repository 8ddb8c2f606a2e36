"""Paged attention of long queries on Hopper, in Gluon, its warps specialised. See `paged_attention`.

A program of 9 warps stays on its multiprocessor and takes item after item: a tile of 128 rows, each a query of one of
the heads that share a K/V head. One warp drives the copy engine; two groups of four, 64 rows each, multiply and take
exponentials:

    copy     | K n | Q | V n | K n-1 | V n-1 | ...             into shared memory, block by block, some tiles ahead
    group 0        | QK n | softmax n | QK n-1, PV n | softmax n-1 | ...
    group 1            | QK n | softmax n | QK n-1, PV n | softmax n-1 | ...

While one group takes exponentials, the other has the matrix units; and PV of a tile of keys runs beside the softmax of
the next. Where items are fewer than programs, several share one's keys, and `_merge` puts their parts together.

Keys are walked backwards, so that the tiles that need the causal mask come first. A block's K is [block_size, head_dim]
in one piece of memory, so it is one box of the copy engine; boxes land one under the other in the swizzled tile that
the matrix units read. The structure is FlashAttention-3's (arXiv 2407.08608), for blocks of any size.

Where a sequence's last block is partly filled, its box is asked for earlier by as many rows as are missing: the copy
engine writes zeros for rows before the block's first, and nothing behind the last token is ever read.

         block      | k0 k1 k2 ?? |               `?` may be NaN, and 0 * NaN would poison the product with V
         box   |  0 | k0 k1 k2 |
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.query_tiles import query_tiles
from octavo.kernels.triton.attention.softmax import LN_2, LOG2_E, NOTHING

ROWS = 128
"""Of a tile, (query, head)s: two groups of 64, a matrix instruction's."""
REGISTERS = 232
"""Of a thread that computes."""


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """keys: of a tile; k_stages, v_stages: tiles in shared memory."""

    keys: int
    k_stages: int
    v_stages: int


def prefill_tuning(head_dim: int) -> PrefillTuning:
    """What fits into 227 KiB beside the queries, and was fastest on an H200; see benchmarks/kernels/gpu_vs_fa3.py."""
    if head_dim <= 64:
        return PrefillTuning(keys=128, k_stages=4, v_stages=4)
    if head_dim <= 128:
        return PrefillTuning(keys=128, k_stages=3, v_stages=2)
    return PrefillTuning(keys=64, k_stages=2, v_stages=2)


@functools.cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def can_prefill(q: Tensor, kv_layer: Tensor) -> bool:
    """Whether this kernel takes them: Hopper, 16 bits, and all that the copy engine steps over a multiple of 16 bytes.

    A layer's blocks must also lie a whole number of (block, head)s apart, as in the pool.
    """
    block_size, head_dim = kv_layer.shape[3:]
    box = block_size * head_dim
    return (
        _hopper(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and block_size >= 8
        and q.stride(0) % 8 == 0
        and q.stride(1) % 8 == 0
        and q.data_ptr() % 16 == 0
        and kv_layer.data_ptr() % 16 == 0
        and all(stride % box == 0 for stride in kv_layer.stride()[:3])
    )


def is_worth_it(q: Tensor, kv_layer: Tensor, batch: RaggedBatch) -> bool:
    """Whether this kernel is ahead of `chunk_attention`: if a sequence fills a tile, or keys must be split."""
    packed = _packed(q, kv_layer)
    return batch.max_query_len * packed >= ROWS or _may_split(q, batch, packed)


def _packed(q: Tensor, kv_layer: Tensor) -> int:
    """Heads side by side in a tile of queries: the largest power of two that divides a group. The fewer queries that
    leaves, the fewer rows are wasted where a sequence's queries end."""
    group = q.shape[1] // kv_layer.shape[2]
    return group & -group


def _may_split(q: Tensor, batch: RaggedBatch, packed: int) -> bool:
    """Whether tiles are so few, at most, that several programs could share one's keys. For short batches alone, since
    it costs a second launch."""
    queries = ROWS // packed
    most_tiles = (q.shape[0] + batch.num_seqs * (queries - 1)) // queries
    return 2 * most_tiles * (q.shape[1] // packed) <= _num_multiprocessors(q.device)


def prefill_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    skip_single: bool,
) -> None:
    """Causal attention of queries of any lengths, into their rows of out and lse (empty if nobody asks).

    skip_single: leave sequences with one query to `decode_attention`. What it takes, `can_prefill` says.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, _, num_kv_heads, block_size, _ = kv_layer.shape
    tuning, packed = prefill_tuning(head_dim), _packed(q, kv_layer)
    padded = max(triton.next_power_of_2(head_dim), 64)
    rows = min(block_size, tuning.keys)  # of a box
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    # Boxes of the pool are found by (block, head) and row; K and V by one description, and a row that is not there is 0
    box = block_size * head_dim
    block_boxes, value_boxes, head_boxes = (stride // box for stride in kv_layer.stride()[:3])
    boxes = (num_blocks - 1) * block_boxes + value_boxes + (num_kv_heads - 1) * head_boxes + 1
    pool = TensorDescriptor(kv_layer, [boxes, block_size, head_dim], [box, head_dim, 1], [1, rows, padded], layout)
    queries = TensorDescriptor(q, list(q.shape), list(q.stride()), [64 // packed, packed, padded], layout)
    work = query_tiles(batch, ROWS // packed, tuning.keys, num_tokens, skip_single=skip_single)
    num_programs = _num_multiprocessors(q.device)
    may_split = _may_split(q, batch, packed)
    partial = partial_lse = lse
    if may_split:
        key = ("prefill_attention.partial", padded)
        if key not in batch.derived:
            sizes = [num_programs * ROWS * padded, num_programs * ROWS]
            batch.derived[key] = torch.empty(sum(sizes), dtype=torch.float32, device=q.device).split(sizes)
        partial, partial_lse = batch.derived[key]
    _prefill[(num_programs,)](
        queries,
        pool,
        out,
        lse,
        partial,
        partial_lse,
        work.tiles,
        work.count,
        batch.block_tables,
        batch.seq_lens,
        scale * LOG2_E,
        batch.block_tables.stride(0),
        block_boxes,
        value_boxes,
        head_boxes,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        PACKED=packed,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=padded,
        KEYS=tuning.keys,
        K_STAGES=tuning.k_stages,
        V_STAGES=tuning.v_stages,
        REGISTERS=REGISTERS,
        MAY_SPLIT=may_split,
        WITH_LSE=lse.numel() > 0,
        num_warps=4,
    )
    if may_split:
        _merge[(num_programs // 2, ROWS)](
            out,
            lse,
            partial,
            partial_lse,
            work.tiles,
            work.count,
            num_programs,
            NUM_HEADS=num_heads,
            PACKED=packed,
            HEAD_DIM=head_dim,
            HEAD_DIM_PADDED=padded,
            KEYS=tuning.keys,
            ROWS=ROWS,
            PARTS=8,
            WITH_LSE=lse.numel() > 0,
            num_warps=1,
        )


# -- who does what ----------------------------------------------------------------------------------------------------


@triton.jit
def _count_parts(tiles, count, num_programs, HEADS: tl.constexpr, KEYS: tl.constexpr, MAY_SPLIT: tl.constexpr):
    """(items, parts of each): where tiles are too few for all programs, several share one's keys, two tiles each at
    least. The first tile has most."""
    num_items = tl.load(count) * HEADS
    num_parts = 1
    if MAY_SPLIT:
        longest = tl.cdiv(tl.load(tiles + 2) + tl.load(tiles + 3), KEYS)
        num_parts = tl.maximum(tl.minimum(num_programs // tl.maximum(num_items, 1), longest // 2), 1)
    return num_items * num_parts, num_parts


@gluon.jit
def _num_mine(num_items, program, num_programs):
    """Items of one program: they are dealt in rounds, every other one backwards, so that nobody always gets the longest

    round 0   0 1 2 3
    round 1   7 6 5 4      4 programs, 10 items
    round 2   8 9
    """
    rounds = num_items // num_programs
    turn = gl.where(rounds % 2 == 0, program, num_programs - 1 - program)
    return rounds + (turn < num_items - rounds * num_programs).to(gl.int32)


@gluon.jit
def _item(turn, program, num_programs):
    return turn * num_programs + gl.where(turn % 2 == 0, program, num_programs - 1 - program)


@gluon.jit
def _describe(tiles, item, num_parts, NUM_HEADS: gl.constexpr, PACKED: gl.constexpr):
    """(part, first head, sequence, first token, number of queries, position of the first) of an item."""
    tile = tiles + item // (NUM_HEADS // PACKED) // num_parts * 4
    part = item // (NUM_HEADS // PACKED) % num_parts
    head = item % (NUM_HEADS // PACKED) * PACKED
    return part, head, gl.load(tile), gl.load(tile + 1), gl.load(tile + 2), gl.load(tile + 3)


@gluon.jit
def _part(num_keys, part, num_parts, KEYS: gl.constexpr):
    """Tiles of keys of a part, [begin, end), and whether it has any: then it has one nevertheless, to be masked."""
    num_tiles = (num_keys + KEYS - 1) // KEYS
    begin = num_tiles * part // num_parts
    end = num_tiles * (part + 1) // num_parts
    return begin, gl.maximum(end, begin + 1), end > begin


@gluon.jit
def _boxes(
    table, first_box, last_box, missing, first, block_boxes,
    BOXES: gl.constexpr, ROWS: gl.constexpr, BLOCK_BOXES: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """Where the boxes of one tile of K lie in the pool, (block and head, row) each; a tuple, loop-carried.

    first: the pool's box of (block 0, this K/V head). LAST: of the last tile, which the last block may end in. Boxes
    behind it are the last again: what is there is masked, and finite.
    """
    places = ()
    for i in gl.static_range(BOXES):
        box = first_box + i
        if LAST:
            box = gl.minimum(box, last_box)
        row = box % BLOCK_BOXES * ROWS
        if LAST:
            row -= gl.where(box == last_box, missing, 0)
        places = places + ((gl.load(table + box // BLOCK_BOXES) * block_boxes + first, row),)  # type: ignore[assignment]  # noqa: RUF005
    return places


@gluon.jit
def _fill(ring, step, pool, places, further, NUM_BYTES: gl.constexpr, STAGES: gl.constexpr, BOXES: gl.constexpr):
    """Have the boxes of one tile copied, of K, or of V, which lies so many boxes further, once there is room."""
    tiles, full, free = ring
    stage = step % STAGES
    mbarrier.wait(free.index(stage), step // STAGES % 2 ^ 1)
    mbarrier.expect(full.index(stage), NUM_BYTES)
    for i in gl.static_range(BOXES):
        box, row = places[i]
        tma.async_copy_global_to_shared(
            pool, [box + further, row, 0], full.index(stage), tiles.index(stage).slice(i, 1)
        )


@gluon.jit
def _produce(
    queries, pool, q_ring, k_ring, v_ring, tiles, count, block_tables, seq_lens, table_stride,
    block_boxes, value_boxes, head_boxes,
    NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    MAY_SPLIT: gl.constexpr,
):  # fmt: skip
    """The copying warp. Where the next tile's blocks are travels through the loop: loads between the engine's orders
    would hold those up."""
    ROWS: gl.constexpr = min(BLOCK_SIZE, KEYS)
    BOXES: gl.constexpr = KEYS // ROWS  # of a tile
    BLOCK_BOXES: gl.constexpr = BLOCK_SIZE // ROWS
    NUM_BYTES: gl.constexpr = KEYS * HEAD_DIM * 2
    q_tile, q_full, q_free = q_ring
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    step = 0
    num_items, num_parts = _count_parts(tiles, count, num_programs, NUM_HEADS // PACKED, KEYS, MAY_SPLIT)
    for turn in range(_num_mine(num_items, program, num_programs)):
        item = _item(turn, program, num_programs)
        part, head, seq, token, num_queries, position = _describe(tiles, item, num_parts, NUM_HEADS, PACKED)
        num_keys = position + num_queries
        begin, end, _ = _part(num_keys, part, num_parts, KEYS)
        last_box = (num_keys - 1) // ROWS
        missing = gl.maximum((last_box + 1) * ROWS - gl.load(seq_lens + seq), 0)
        table = block_tables + seq.to(gl.int64) * table_stride
        first = head // GROUP * head_boxes
        box = (end - 1) * BOXES
        last = _boxes(table, box, last_box, missing, first, block_boxes, BOXES, ROWS, BLOCK_BOXES, True)
        box = gl.maximum(box - BOXES, 0)
        places = _boxes(table, box, 0, 0, first, block_boxes, BOXES, ROWS, BLOCK_BOXES, False)
        _fill(k_ring, step, pool, last, 0, NUM_BYTES, K_STAGES, BOXES)
        for group in gl.static_range(2):  # behind the first K, which need not wait until the last queries are done with
            mbarrier.wait(q_free.index(group), turn % 2 ^ 1)
            mbarrier.expect(q_full.index(group), 64 * HEAD_DIM * 2)
            at = [token + group * (64 // PACKED), head, 0]
            tma.async_copy_global_to_shared(queries, at, q_full.index(group), q_tile.index(group))
        _fill(v_ring, step, pool, last, value_boxes, NUM_BYTES, V_STAGES, BOXES)
        step += 1
        for _ in range(begin + 1, end):
            box = gl.maximum(box - BOXES, 0)
            next_places = _boxes(table, box, 0, 0, first, block_boxes, BOXES, ROWS, BLOCK_BOXES, False)
            _fill(k_ring, step, pool, places, 0, NUM_BYTES, K_STAGES, BOXES)
            _fill(v_ring, step, pool, places, value_boxes, NUM_BYTES, V_STAGES, BOXES)
            places = next_places
            step += 1


@gluon.constexpr_function
def _product_layout(columns):
    """Of the product of 64 rows that a group of four warps makes: four neighbouring threads share a row."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def _shares_layout():
    """[64 rows, 4 threads], of one number of each thread that shares a row of a product."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.constexpr_function
def _stored_layout(columns):
    """A product's, but that a thread has 8 numbers side by side, 16 bytes: the four of a row trade theirs for that."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]] + [[0, 32 << i] for i in range(columns.bit_length() - 6)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def _softmax(scores, best, total, scale, KEYS: gl.constexpr):
    """(weights, largest score, sum of weights by thread, decay) after one more tile, scale being for base 2.

    Four threads share a row. Of the keys in between, taken in pairs, a thread has every fourth pair. It adds up its own
    in short chains, and what the four have is added only in the end.
    """
    shares: gl.constexpr = total.type.layout
    own = gl.max(gl.max(gl.max(scores.reshape([64, KEYS // 32, 4, 4, 2]), 4), 2), 1)  # [64, 4], a row's threads
    largest = gl.convert_layout(gl.max(own, 1), best.type.layout, assert_trivial=True)
    new_best = gl.maximum(best, largest * scale)
    weights = gl.exp2(scores * scale - new_best[:, None])
    decay = gl.exp2(best - new_best)
    own = gl.sum(gl.sum(gl.sum(weights.reshape([64, KEYS // 32, 4, 4, 2]), 4), 2), 1)
    own_decay = gl.convert_layout(decay, gl.SliceLayout(1, shares), assert_trivial=True)
    total = total * own_decay[:, None] + gl.convert_layout(own, shares, assert_trivial=True)
    return weights, new_best, total, decay


@gluon.jit
def _store(
    out, lse, token, head, first_query, num_queries, result, row_lse,
    NUM_HEADS: gl.constexpr, PACKED: gl.constexpr, HEAD_DIM: gl.constexpr, WITH_LSE: gl.constexpr,
):  # fmt: skip
    """64 rows of a tile, [64, padded head_dim] float32, and their log-sum-exp in base 2."""
    STORED: gl.constexpr = _stored_layout(result.shape[1])
    result = gl.convert_layout(result.to(out.dtype.element_ty), STORED)
    row = gl.arange(0, 64, gl.SliceLayout(1, STORED))
    query = first_query + row // PACKED
    column = gl.arange(0, result.shape[1], gl.SliceLayout(0, STORED))
    wanted = (query < num_queries)[:, None]
    if result.shape[1] > HEAD_DIM:
        wanted = wanted & (column < HEAD_DIM)[None, :]
    place = (token + query).to(gl.int64) * NUM_HEADS + head + row % PACKED
    gl.store(out + place[:, None] * HEAD_DIM + column[None, :], result, mask=wanted)
    if WITH_LSE:
        row_of_score = gl.arange(0, 64, row_lse.type.layout)
        query_of_score = first_query + row_of_score // PACKED
        place_of_score = (token + query_of_score).to(gl.int64) * NUM_HEADS + head + row_of_score % PACKED
        gl.store(lse + place_of_score, row_lse * LN_2, mask=query_of_score < num_queries)


@gluon.jit
def _store_part(partial, partial_lse, first_row, result, row_lse):
    """The same of one part, for `_merge`."""
    row = first_row + gl.arange(0, 64, gl.SliceLayout(1, result.type.layout))
    column = gl.arange(0, result.shape[1], gl.SliceLayout(0, result.type.layout))
    gl.store(partial + row[:, None] * result.shape[1] + column[None, :], result)
    gl.store(partial_lse + first_row + gl.arange(0, 64, row_lse.type.layout), row_lse)


@gluon.jit
def _consume(
    out, lse, partial, partial_lse, q_ring, k_ring, v_ring, tiles, count, seq_lens, scale,
    WHICH: gl.constexpr, NUM_HEADS: gl.constexpr, PACKED: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_PADDED: gl.constexpr, KEYS: gl.constexpr, K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, MAY_SPLIT: gl.constexpr, WITH_LSE: gl.constexpr,
):  # fmt: skip
    """One of the two groups of four warps: 64 rows of each tile, (query, head)s."""
    FIRST: gl.constexpr = WHICH * (64 // PACKED)  # query
    SCORES: gl.constexpr = _product_layout(KEYS)
    OUT: gl.constexpr = _product_layout(HEAD_DIM_PADDED)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    SHARES: gl.constexpr = _shares_layout()
    SCORE_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    ROWS: gl.constexpr = min(BLOCK_SIZE, KEYS)
    DTYPE: gl.constexpr = out.dtype.element_ty
    q_tiles, q_full, q_free = q_ring
    k_tiles, k_full, k_free = k_ring
    v_tiles, v_full, v_free = v_ring
    q_tile = q_tiles.index(WHICH).reshape([64, HEAD_DIM_PADDED])
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    row = gl.arange(0, 64, SCORE_ROW)
    key = gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    no_scores = gl.zeros([64, KEYS], gl.float32, SCORES)
    num_items, num_parts = _count_parts(tiles, count, num_programs, NUM_HEADS // PACKED, KEYS, MAY_SPLIT)
    num_mine = _num_mine(num_items, program, num_programs)
    step = 0
    # What the next item is, is loaded one item ahead
    next_item = gl.minimum(program, gl.maximum(num_items - 1, 0))
    following = _describe(tiles, next_item, num_parts, NUM_HEADS, PACKED)
    for turn in range(num_mine):
        item = next_item
        part, head, seq, token, num_queries, first_position = following
        next_item = gl.minimum(_item(turn + 1, program, num_programs), num_items - 1)
        following = _describe(tiles, next_item, num_parts, NUM_HEADS, PACKED)
        seq_len = gl.load(seq_lens + seq)
        num_keys = first_position + num_queries
        begin, end, some = _part(num_keys, part, num_parts, KEYS)
        seen = (first_position + FIRST + 1) // KEYS  # tiles of keys that all these rows see, and then those some see
        seen = gl.minimum(gl.maximum(seen, begin), end - 1)
        position = first_position + FIRST + row // PACKED
        if MAY_SPLIT:
            position = gl.where(some, position, -1)
        best = gl.full([64], NOTHING, gl.float32, SCORE_ROW)
        total = gl.zeros([64, 4], gl.float32, SHARES)
        acc = warpgroup_mma_init(gl.zeros([64, HEAD_DIM_PADDED], gl.float32, OUT))

        # The last tile of keys, which may end with a block partly filled, whose keys then lie `missing` rows further on
        last_begin = (num_keys - 1) // ROWS * ROWS
        missing = gl.maximum(last_begin + ROWS - seq_len, 0)
        at = (end - 1) * KEYS + key
        moved = gl.where(at - missing >= last_begin, at - missing, seq_len)
        at = gl.where(at >= last_begin, moved, at)
        stage = step % K_STAGES
        mbarrier.wait(q_full.index(WHICH), turn % 2)
        mbarrier.wait(k_full.index(stage), step // K_STAGES % 2)
        k_tile = k_tiles.index(stage).reshape([KEYS, HEAD_DIM_PADDED])
        pending = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(k_free.index(stage), count=1)
        scores = gl.where(position[:, None] >= at[None, :], scores, -float("inf"))
        weights, best, total, decay = _softmax(scores, best, total, scale, KEYS)
        packed = gl.convert_layout(weights.to(DTYPE), WEIGHTS, assert_trivial=True)

        for MASKED in gl.static_range(1, -1, -1):  # first the tiles of keys that some rows don't see, then the others
            if MASKED:
                low = seen
                high = end - 1
            else:
                low = begin
                high = seen
            for i in range(high - low):
                v_stage = step % V_STAGES
                v_phase = step // V_STAGES % 2
                v_tile = v_tiles.index(v_stage).reshape([KEYS, HEAD_DIM_PADDED])
                step += 1
                k_stage = step % K_STAGES
                k_tile = k_tiles.index(k_stage).reshape([KEYS, HEAD_DIM_PADDED])
                mbarrier.wait(k_full.index(k_stage), step // K_STAGES % 2)
                pending = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(v_stage), v_phase)
                acc = warpgroup_mma(packed, v_tile, acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[pending])
                if MASKED:
                    at = (high - 1 - i) * KEYS + key
                    scores = gl.where(position[:, None] >= at[None, :], scores, -float("inf"))
                weights, best, total, decay = _softmax(scores, best, total, scale, KEYS)
                next_packed = gl.convert_layout(weights.to(DTYPE), WEIGHTS, assert_trivial=True)
                # Over already: the barrier is only here to end a basic block. Without one, ptxas moves the exponentials
                # behind the wait for PV, and they no longer run beside it.
                mbarrier.wait(v_full.index(v_stage), v_phase)
                acc_done, packed = warpgroup_mma_wait(0, deps=[acc, next_packed])
                mbarrier.arrive(k_free.index(k_stage), count=1)
                mbarrier.arrive(v_free.index(v_stage), count=1)
                acc_done = acc_done * gl.convert_layout(decay, OUT_ROW, assert_trivial=True)[:, None]
                acc = warpgroup_mma_init(acc_done)

        mbarrier.arrive(q_free.index(WHICH), count=1)
        stage = step % V_STAGES
        mbarrier.wait(v_full.index(stage), step // V_STAGES % 2)
        v_tile = v_tiles.index(stage).reshape([KEYS, HEAD_DIM_PADDED])
        acc = warpgroup_mma(packed, v_tile, acc, is_async=True)
        acc_done = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index(stage), count=1)
        step += 1

        row_total = gl.sum(total, 1)
        if MAY_SPLIT:
            # 0 for a row that sees none of the part's keys: its best is NOTHING, and so is its part in the end
            row_total = gl.where(row_total == 0, 1.0, row_total)
        acc_done = acc_done * (1.0 / gl.convert_layout(row_total, OUT_ROW, assert_trivial=True))[:, None]
        row_total = gl.convert_layout(row_total, SCORE_ROW, assert_trivial=True)
        row_lse = best + gl.log2(row_total)
        num_stored = num_queries
        if MAY_SPLIT:
            if num_parts > 1:
                _store_part(partial, partial_lse, item * 128 + WHICH * 64, acc_done, row_lse)
            num_stored = gl.where(num_parts > 1, 0, num_queries)
        _store(out, lse, token, head, FIRST, num_stored, acc_done, row_lse, NUM_HEADS, PACKED, HEAD_DIM, WITH_LSE)


@gluon.jit
def _ring(SHAPE: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr, NUM_USERS: gl.constexpr):
    """(tiles in shared memory, a barrier each that says it is full, one each that says all its users are done)."""
    NUM: gl.constexpr = SHAPE[0]
    tiles = gl.allocate_shared_memory(DTYPE, SHAPE, LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=NUM_USERS)
    return tiles, full, free


@gluon.jit(do_not_specialize=["table_stride"])
def _prefill(
    queries,
    pool,
    out,
    lse,
    partial,
    partial_lse,
    tiles,
    count,
    block_tables,
    seq_lens,
    scale,
    table_stride,
    block_boxes,
    value_boxes,
    head_boxes,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PACKED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_PADDED: gl.constexpr,
    KEYS: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    MAY_SPLIT: gl.constexpr,
    WITH_LSE: gl.constexpr,
):
    """Tiles of queries, dealt out to a grid of one program a multiprocessor."""
    ROWS: gl.constexpr = min(BLOCK_SIZE, KEYS)
    Q_SHAPE: gl.constexpr = [2, 64 // PACKED, PACKED, HEAD_DIM_PADDED]
    K_SHAPE: gl.constexpr = [K_STAGES, KEYS // ROWS, ROWS, HEAD_DIM_PADDED]
    V_SHAPE: gl.constexpr = [V_STAGES, KEYS // ROWS, ROWS, HEAD_DIM_PADDED]
    Q_LAYOUT: gl.constexpr = queries.layout
    KV_LAYOUT: gl.constexpr = pool.layout
    DTYPE: gl.constexpr = out.dtype.element_ty
    q_ring = _ring(Q_SHAPE, Q_LAYOUT, DTYPE, 1)
    k_ring = _ring(K_SHAPE, KV_LAYOUT, DTYPE, 2)
    v_ring = _ring(V_SHAPE, KV_LAYOUT, DTYPE, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out, lse, partial, partial_lse, q_ring, k_ring, v_ring, tiles, count, seq_lens, scale,
                    0, NUM_HEADS, PACKED, BLOCK_SIZE, HEAD_DIM, HEAD_DIM_PADDED, KEYS, K_STAGES, V_STAGES, MAY_SPLIT,
                    WITH_LSE,
                ),
            ),
            (
                _consume,
                (
                    out, lse, partial, partial_lse, q_ring, k_ring, v_ring, tiles, count, seq_lens, scale,
                    1, NUM_HEADS, PACKED, BLOCK_SIZE, HEAD_DIM, HEAD_DIM_PADDED, KEYS, K_STAGES, V_STAGES, MAY_SPLIT,
                    WITH_LSE,
                ),
            ),
            (
                _produce,
                (
                    queries, pool, q_ring, k_ring, v_ring, tiles, count, block_tables, seq_lens, table_stride,
                    block_boxes, value_boxes, head_boxes,
                    NUM_HEADS, GROUP, PACKED, BLOCK_SIZE, HEAD_DIM_PADDED, KEYS, K_STAGES, V_STAGES, MAY_SPLIT,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 40],
    )  # fmt: skip


# -- several programs for one tile ------------------------------------------------------------------------------------


@triton.jit
def _merge(
    out,
    lse,
    partial,
    partial_lse,
    tiles,
    count,
    num_programs,
    NUM_HEADS: tl.constexpr,
    PACKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """One row of a tile of which several programs computed a part each, PARTS at a time."""
    HEADS: tl.constexpr = NUM_HEADS // PACKED
    num_items, num_parts = _count_parts(tiles, count, num_programs, HEADS, KEYS, True)
    item = tl.program_id(0)
    row = tl.program_id(1)
    tile = item // HEADS
    if (num_parts > 1) & (item * num_parts < num_items):
        query = row // PACKED
        if query < tl.load(tiles + tile * 4 + 2):
            column = tl.arange(0, HEAD_DIM_PADDED)
            best = NOTHING
            total = 0.0
            acc = tl.zeros([HEAD_DIM_PADDED], tl.float32)
            for some in range(0, num_parts, PARTS):
                part = some + tl.arange(0, PARTS)
                here = part < num_parts
                place = ((tile * num_parts + part) * HEADS + item % HEADS) * ROWS + row
                bests = tl.load(partial_lse + place, mask=here, other=NOTHING)
                results = tl.load(
                    partial + place[:, None] * HEAD_DIM_PADDED + column[None, :], mask=here[:, None], other=0.0
                )
                new_best = tl.maximum(best, tl.max(bests, 0))
                decay = tl.exp2(best - new_best)
                share = tl.exp2(bests - new_best)
                total = total * decay + tl.sum(share, 0)
                acc = acc * decay + tl.sum(results * share[:, None], 0)
                best = new_best
            token = (tl.load(tiles + tile * 4 + 1) + query).to(tl.int64)
            place = token * NUM_HEADS + item % HEADS * PACKED + row % PACKED
            result = (acc / total).to(out.dtype.element_ty)
            tl.store(out + place * HEAD_DIM + column, result, mask=column < HEAD_DIM)
            if WITH_LSE:
                tl.store(lse + place, (best + tl.log2(total)) * LN_2)
