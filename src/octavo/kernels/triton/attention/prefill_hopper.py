"""Prefill attention on Hopper: warp-specialised paged attention for long queries, in Gluon.

The kernel is persistent: a program of 9 warps stays on its multiprocessor and takes item after item. An item is a tile
of 128 rows, each a query of one of the heads that share a K/V head. One warp drives the copy engine (TMA); two groups
of four warps compute 64 rows each:

    producer | K n | Q | V n | K n-1 | V n-1 | ...             into shared memory, block by block, some tiles ahead
    group 0        | QK n | softmax n | QK n-1, PV n | softmax n-1 | ...
    group 1            | QK n | softmax n | QK n-1, PV n | softmax n-1 | ...

While one group computes exponentials, the other uses the tensor cores, and PV of a tile of keys overlaps the softmax of
the next. If there are fewer items than programs, several programs split an item's keys, and `merge_parts` merges their
parts.

Keys are walked backwards, so the tiles that need the causal mask come first. A block's K is [block_size, head_dim] in
contiguous memory, so it is one TMA box; boxes are placed below each other in the swizzled tile that the tensor cores
read. The structure is FlashAttention-3's (arXiv 2407.08608), for blocks of any size.

If a sequence's last block is partly filled, its box begins earlier by the number of missing rows. TMA writes zeros for
rows before the block's first, and no memory after the last token is read:

         block      | k0 k1 k2 ?? |               `?` may be NaN, and 0 * NaN would poison the product with V
         box   |  0 | k0 k1 k2 |
"""

from __future__ import annotations

import torch
import triton
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
from octavo.kernels.triton.attention.prefill_merge import count_parts, merge_parts
from octavo.kernels.triton.attention.prefill_tuning import (
    HOPPER_REGISTERS,
    HOPPER_ROWS,
    heads_per_tile,
    hopper_prefill_tuning,
    may_split_keys,
)
from octavo.kernels.triton.attention.query_tiles import query_tiles
from octavo.kernels.triton.attention.softmax import LN_2, LOG2_E, MIN_SCORE
from octavo.kernels.triton.capability import num_multiprocessors
from octavo.kernels.triton.launch import or_placeholder


def hopper_prefill_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    skip_single: bool,
    sinks: Tensor | None = None,
) -> None:
    """Causal attention of queries of any length, written to their rows of out and lse; see `supports_hopper_prefill`.

    lse          [num_tokens, num_heads] float32, or empty if it is not needed
    skip_single  leave sequences with one query to `decode_attention`
    """
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, _, num_kv_heads, block_size, _ = kv_layer.shape
    tuning, packed = hopper_prefill_tuning(head_dim), heads_per_tile(q, kv_layer)
    padded = max(triton.next_power_of_2(head_dim), 64)
    rows = min(block_size, tuning.keys)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    # A box of the pool is addressed by (block, head) and row. K and V share one descriptor; rows out of bounds are 0
    box = block_size * head_dim
    block_boxes, value_boxes, head_boxes = (stride // box for stride in kv_layer.stride()[:3])
    boxes = (num_blocks - 1) * block_boxes + value_boxes + (num_kv_heads - 1) * head_boxes + 1
    pool = TensorDescriptor(kv_layer, [boxes, block_size, head_dim], [box, head_dim, 1], [1, rows, padded], layout)
    queries = TensorDescriptor(q, list(q.shape), list(q.stride()), [64 // packed, packed, padded], layout)
    tiles = query_tiles(batch, HOPPER_ROWS // packed, tuning.keys, num_tokens, skip_single=skip_single)
    num_programs = num_multiprocessors(q.device)
    may_split = may_split_keys(q, batch, packed)
    partial = partial_lse = lse
    if may_split:
        key = ("prefill_attention.partial", padded)
        if key not in batch.derived:
            sizes = [num_programs * HOPPER_ROWS * padded, num_programs * HOPPER_ROWS]
            batch.derived[key] = torch.empty(sum(sizes), dtype=torch.float32, device=q.device).split(sizes)
        partial, partial_lse = batch.derived[key]
    _hopper_prefill[(num_programs,)](
        queries,
        pool,
        out,
        lse,
        *or_placeholder(lse, sinks),
        partial,
        partial_lse,
        tiles.tiles,
        tiles.count,
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
        REGISTERS=HOPPER_REGISTERS,
        MAY_SPLIT=may_split,
        WITH_LSE=lse.numel() > 0,
        WITH_SINKS=sinks is not None,
        num_warps=4,
    )
    if may_split:
        merge_parts[(num_programs // 2, HOPPER_ROWS)](
            out,
            lse,
            *or_placeholder(lse, sinks),
            partial,
            partial_lse,
            tiles.tiles,
            tiles.count,
            num_programs,
            NUM_HEADS=num_heads,
            PACKED=packed,
            HEAD_DIM=head_dim,
            HEAD_DIM_PADDED=padded,
            KEYS=tuning.keys,
            ROWS=HOPPER_ROWS,
            PARTS_PER_STEP=8,
            WITH_LSE=lse.numel() > 0,
            WITH_SINKS=sinks is not None,
            num_warps=1,
        )


# -- work partition ---------------------------------------------------------------------------------------------------


@gluon.jit
def _num_program_items(num_items, program, num_programs):
    """Number of a program's items. They are dealt in rounds, every other one backwards, to balance their lengths:

    round 0   0 1 2 3
    round 1   7 6 5 4      4 programs, 10 items
    round 2   8 9
    """
    rounds = num_items // num_programs
    place_in_round = gl.where(rounds % 2 == 0, program, num_programs - 1 - program)
    return rounds + (place_in_round < num_items - rounds * num_programs).to(gl.int32)


@gluon.jit
def _item_index(round_index, program, num_programs):
    """Index of the item that a program takes in a round."""
    return round_index * num_programs + gl.where(round_index % 2 == 0, program, num_programs - 1 - program)


@gluon.jit
def _load_item(tiles, item, num_parts, NUM_HEADS: gl.constexpr, PACKED: gl.constexpr):
    """(part, first head, sequence, first token, number of queries, position of the first query) of an item."""
    tile = tiles + item // (NUM_HEADS // PACKED) // num_parts * 4
    part = item // (NUM_HEADS // PACKED) % num_parts
    head = item % (NUM_HEADS // PACKED) * PACKED
    return part, head, gl.load(tile), gl.load(tile + 1), gl.load(tile + 2), gl.load(tile + 3)


@gluon.jit
def _key_tiles(num_keys, part, num_parts, KEYS: gl.constexpr):
    """(begin, end, has keys) of a part, in tiles of keys. An empty part gets one tile, which is masked."""
    num_tiles = (num_keys + KEYS - 1) // KEYS
    begin = num_tiles * part // num_parts
    end = num_tiles * (part + 1) // num_parts
    return begin, gl.maximum(end, begin + 1), end > begin


@gluon.jit
def _locate_boxes(
    table, first_box, last_box, rows_missing, first, block_boxes,
    BOXES: gl.constexpr, ROWS: gl.constexpr, BLOCK_BOXES: gl.constexpr, IS_LAST_TILE: gl.constexpr,
):  # fmt: skip
    """Pool coordinates (block and head, row) of the boxes of one tile of K, as a loop-carried tuple.

    first         the pool's box of (block 0, this K/V head)
    IS_LAST_TILE  the sequence's last block may end in this tile; boxes after it repeat the last, whose keys are masked
                  and finite
    """
    boxes = ()
    for i in gl.static_range(BOXES):
        box = first_box + i
        if IS_LAST_TILE:
            box = gl.minimum(box, last_box)
        row = box % BLOCK_BOXES * ROWS
        if IS_LAST_TILE:
            row -= gl.where(box == last_box, rows_missing, 0)
        boxes = boxes + ((gl.load(table + box // BLOCK_BOXES) * block_boxes + first, row),)  # type: ignore[assignment]  # noqa: RUF005
    return boxes


@gluon.jit
def _copy_tile(ring, step, pool, boxes, box_offset, NUM_BYTES: gl.constexpr, STAGES: gl.constexpr, BOXES: gl.constexpr):
    """Wait for a free stage, then copy one tile of K; box_offset selects V, which is so many boxes after K."""
    tiles, full, free = ring
    stage = step % STAGES
    mbarrier.wait(free.index(stage), step // STAGES % 2 ^ 1)
    mbarrier.expect(full.index(stage), NUM_BYTES)
    for i in gl.static_range(BOXES):
        box, row = boxes[i]
        tma.async_copy_global_to_shared(
            pool, [box + box_offset, row, 0], full.index(stage), tiles.index(stage).slice(i, 1)
        )


@gluon.jit
def _produce(
    queries, pool, q_ring, k_ring, v_ring, tiles, count, block_tables, seq_lens, table_stride,
    block_boxes, value_boxes, head_boxes,
    NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    MAY_SPLIT: gl.constexpr,
):  # fmt: skip
    """The producer warp, which issues TMA copies. Block ids are loaded a tile ahead: loads between copies would delay
    the copies."""
    ROWS: gl.constexpr = min(BLOCK_SIZE, KEYS)
    BOXES: gl.constexpr = KEYS // ROWS
    BLOCK_BOXES: gl.constexpr = BLOCK_SIZE // ROWS
    NUM_BYTES: gl.constexpr = KEYS * HEAD_DIM * 2
    q_tile, q_full, q_free = q_ring
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    step = 0
    num_items, num_parts = count_parts(tiles, count, num_programs, NUM_HEADS // PACKED, KEYS, MAY_SPLIT)
    for item_round in range(_num_program_items(num_items, program, num_programs)):
        item = _item_index(item_round, program, num_programs)
        part, head, seq, token, num_queries, position = _load_item(tiles, item, num_parts, NUM_HEADS, PACKED)
        num_keys = position + num_queries
        begin, end, _ = _key_tiles(num_keys, part, num_parts, KEYS)
        last_box = (num_keys - 1) // ROWS
        missing = gl.maximum((last_box + 1) * ROWS - gl.load(seq_lens + seq), 0)
        table = block_tables + seq.to(gl.int64) * table_stride
        first = head // GROUP * head_boxes
        box = (end - 1) * BOXES
        last = _locate_boxes(table, box, last_box, missing, first, block_boxes, BOXES, ROWS, BLOCK_BOXES, True)
        box = gl.maximum(box - BOXES, 0)
        boxes = _locate_boxes(table, box, 0, 0, first, block_boxes, BOXES, ROWS, BLOCK_BOXES, False)
        _copy_tile(k_ring, step, pool, last, 0, NUM_BYTES, K_STAGES, BOXES)
        for group in gl.static_range(2):  # after the first K, whose copy need not wait for the previous queries' buffer
            mbarrier.wait(q_free.index(group), item_round % 2 ^ 1)
            mbarrier.expect(q_full.index(group), 64 * HEAD_DIM * 2)
            coordinates = [token + group * (64 // PACKED), head, 0]
            tma.async_copy_global_to_shared(queries, coordinates, q_full.index(group), q_tile.index(group))
        _copy_tile(v_ring, step, pool, last, value_boxes, NUM_BYTES, V_STAGES, BOXES)
        step += 1
        for _ in range(begin + 1, end):
            box = gl.maximum(box - BOXES, 0)
            next_boxes = _locate_boxes(table, box, 0, 0, first, block_boxes, BOXES, ROWS, BLOCK_BOXES, False)
            _copy_tile(k_ring, step, pool, boxes, 0, NUM_BYTES, K_STAGES, BOXES)
            _copy_tile(v_ring, step, pool, boxes, value_boxes, NUM_BYTES, V_STAGES, BOXES)
            boxes = next_boxes
            step += 1


@gluon.constexpr_function
def _product_layout(columns):
    """Layout of a product of 64 rows by four warps: four neighbouring threads share a row."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def _row_sum_layout():
    """Layout [64 rows, 4 threads] of one number for each thread that shares a row of a product."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.constexpr_function
def _store_layout(columns):
    """Layout for stores: each thread has 8 adjacent numbers, 16 bytes, after an exchange among the four of a row."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]] + [[0, 32 << i] for i in range(columns.bit_length() - 6)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def _softmax(scores, row_max, row_sum, scale, KEYS: gl.constexpr):
    """One step of online softmax -> (weights, row maximum, row sums by thread, rescale factor); scale is for base 2.

    Four threads share a row, and a thread has every fourth pair of keys. Each adds its own weights in short chains; the
    four sums are added at the end of the item.
    """
    sum_layout: gl.constexpr = row_sum.type.layout
    # [64, 4], one for each thread of a row
    thread_values = gl.max(gl.max(gl.max(scores.reshape([64, KEYS // 32, 4, 4, 2]), 4), 2), 1)
    tile_max = gl.convert_layout(gl.max(thread_values, 1), row_max.type.layout, assert_trivial=True)
    new_max = gl.maximum(row_max, tile_max * scale)
    weights = gl.exp2(scores * scale - new_max[:, None])
    rescale = gl.exp2(row_max - new_max)
    thread_values = gl.sum(gl.sum(gl.sum(weights.reshape([64, KEYS // 32, 4, 4, 2]), 4), 2), 1)
    thread_rescale = gl.convert_layout(rescale, gl.SliceLayout(1, sum_layout), assert_trivial=True)
    row_sum = row_sum * thread_rescale[:, None] + gl.convert_layout(thread_values, sum_layout, assert_trivial=True)
    return weights, new_max, row_sum, rescale


@gluon.jit
def _store(
    out, lse, token, head, first_query, num_queries, result, row_lse,
    NUM_HEADS: gl.constexpr, PACKED: gl.constexpr, HEAD_DIM: gl.constexpr, WITH_LSE: gl.constexpr,
):  # fmt: skip
    """Store 64 rows of a tile, [64, padded head_dim] float32, and their log-sum-exp, given in base 2."""
    STORED: gl.constexpr = _store_layout(result.shape[1])
    result = gl.convert_layout(result.to(out.dtype.element_ty), STORED)
    row = gl.arange(0, 64, gl.SliceLayout(1, STORED))
    query = first_query + row // PACKED
    column = gl.arange(0, result.shape[1], gl.SliceLayout(0, STORED))
    mask = (query < num_queries)[:, None]
    if result.shape[1] > HEAD_DIM:
        mask = mask & (column < HEAD_DIM)[None, :]
    out_row = (token + query).to(gl.int64) * NUM_HEADS + head + row % PACKED
    gl.store(out + out_row[:, None] * HEAD_DIM + column[None, :], result, mask=mask)
    if WITH_LSE:
        lse_row = gl.arange(0, 64, row_lse.type.layout)
        lse_query = first_query + lse_row // PACKED
        lse_offset = (token + lse_query).to(gl.int64) * NUM_HEADS + head + lse_row % PACKED
        gl.store(lse + lse_offset, row_lse * LN_2, mask=lse_query < num_queries)


@gluon.jit
def _store_partial(partial, partial_lse, first_row, result, row_lse):
    """Store 64 rows of one part for `merge_parts`."""
    row = first_row + gl.arange(0, 64, gl.SliceLayout(1, result.type.layout))
    column = gl.arange(0, result.shape[1], gl.SliceLayout(0, result.type.layout))
    gl.store(partial + row[:, None] * result.shape[1] + column[None, :], result)
    gl.store(partial_lse + first_row + gl.arange(0, 64, row_lse.type.layout), row_lse)


@gluon.jit
def _consume(
    out, lse, sinks, partial, partial_lse, q_ring, k_ring, v_ring, tiles, count, seq_lens, scale,
    GROUP_INDEX: gl.constexpr, NUM_HEADS: gl.constexpr, PACKED: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_PADDED: gl.constexpr, KEYS: gl.constexpr, K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, MAY_SPLIT: gl.constexpr, WITH_LSE: gl.constexpr, WITH_SINKS: gl.constexpr,
):  # fmt: skip
    """One of the two consumer groups of four warps: 64 (query, head) rows of each tile."""
    FIRST_QUERY: gl.constexpr = GROUP_INDEX * (64 // PACKED)
    SCORES: gl.constexpr = _product_layout(KEYS)
    OUT: gl.constexpr = _product_layout(HEAD_DIM_PADDED)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    ROW_SUM: gl.constexpr = _row_sum_layout()
    SCORE_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    ROWS: gl.constexpr = min(BLOCK_SIZE, KEYS)
    DTYPE: gl.constexpr = out.dtype.element_ty
    q_tiles, q_full, q_free = q_ring
    k_tiles, k_full, k_free = k_ring
    v_tiles, v_full, v_free = v_ring
    q_tile = q_tiles.index(GROUP_INDEX).reshape([64, HEAD_DIM_PADDED])
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    row = gl.arange(0, 64, SCORE_ROW)
    key = gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    no_scores = gl.zeros([64, KEYS], gl.float32, SCORES)
    num_items, num_parts = count_parts(tiles, count, num_programs, NUM_HEADS // PACKED, KEYS, MAY_SPLIT)
    num_program_items = _num_program_items(num_items, program, num_programs)
    step = 0
    # The next item's fields are loaded one item ahead
    next_item = gl.minimum(program, gl.maximum(num_items - 1, 0))
    next_fields = _load_item(tiles, next_item, num_parts, NUM_HEADS, PACKED)
    for item_round in range(num_program_items):
        item = next_item
        part, head, seq, token, num_queries, first_position = next_fields
        next_item = gl.minimum(_item_index(item_round + 1, program, num_programs), num_items - 1)
        next_fields = _load_item(tiles, next_item, num_parts, NUM_HEADS, PACKED)
        seq_len = gl.load(seq_lens + seq)
        num_keys = first_position + num_queries
        begin, end, has_keys = _key_tiles(num_keys, part, num_parts, KEYS)
        unmasked_end = (first_position + FIRST_QUERY + 1) // KEYS  # end of the tiles of keys that all rows see
        unmasked_end = gl.minimum(gl.maximum(unmasked_end, begin), end - 1)
        position = first_position + FIRST_QUERY + row // PACKED
        if MAY_SPLIT:
            position = gl.where(has_keys, position, -1)
        row_max = gl.full([64], MIN_SCORE, gl.float32, SCORE_ROW)
        row_sum = gl.zeros([64, 4], gl.float32, ROW_SUM)
        acc = warpgroup_mma_init(gl.zeros([64, HEAD_DIM_PADDED], gl.float32, OUT))

        # The last tile of keys may end with a partly filled block, whose keys are shifted by `rows_missing` rows
        last_begin = (num_keys - 1) // ROWS * ROWS
        rows_missing = gl.maximum(last_begin + ROWS - seq_len, 0)
        key_position = (end - 1) * KEYS + key
        shifted = gl.where(key_position - rows_missing >= last_begin, key_position - rows_missing, seq_len)
        key_position = gl.where(key_position >= last_begin, shifted, key_position)
        stage = step % K_STAGES
        mbarrier.wait(q_full.index(GROUP_INDEX), item_round % 2)
        mbarrier.wait(k_full.index(stage), step // K_STAGES % 2)
        k_tile = k_tiles.index(stage).reshape([KEYS, HEAD_DIM_PADDED])
        pending = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(k_free.index(stage), count=1)
        scores = gl.where(position[:, None] >= key_position[None, :], scores, -float("inf"))
        weights, row_max, row_sum, rescale = _softmax(scores, row_max, row_sum, scale, KEYS)
        weights_16bit = gl.convert_layout(weights.to(DTYPE), WEIGHTS, assert_trivial=True)

        for MASKED in gl.static_range(1, -1, -1):  # first the tiles that need the causal mask
            if MASKED:
                tile_begin = unmasked_end
                tile_end = end - 1
            else:
                tile_begin = begin
                tile_end = unmasked_end
            for i in range(tile_end - tile_begin):
                v_stage = step % V_STAGES
                v_phase = step // V_STAGES % 2
                v_tile = v_tiles.index(v_stage).reshape([KEYS, HEAD_DIM_PADDED])
                step += 1
                k_stage = step % K_STAGES
                k_tile = k_tiles.index(k_stage).reshape([KEYS, HEAD_DIM_PADDED])
                mbarrier.wait(k_full.index(k_stage), step // K_STAGES % 2)
                pending = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(v_stage), v_phase)
                acc = warpgroup_mma(weights_16bit, v_tile, acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[pending])
                if MASKED:
                    key_position = (tile_end - 1 - i) * KEYS + key
                    scores = gl.where(position[:, None] >= key_position[None, :], scores, -float("inf"))
                weights, row_max, row_sum, rescale = _softmax(scores, row_max, row_sum, scale, KEYS)
                next_weights_16bit = gl.convert_layout(weights.to(DTYPE), WEIGHTS, assert_trivial=True)
                # This barrier has completed already; it only ends a basic block. Without it, ptxas moves the
                # exponentials after the wait for PV, and the two no longer overlap.
                mbarrier.wait(v_full.index(v_stage), v_phase)
                acc_done, weights_16bit = warpgroup_mma_wait(0, deps=[acc, next_weights_16bit])
                mbarrier.arrive(k_free.index(k_stage), count=1)
                mbarrier.arrive(v_free.index(v_stage), count=1)
                acc_done = acc_done * gl.convert_layout(rescale, OUT_ROW, assert_trivial=True)[:, None]
                acc = warpgroup_mma_init(acc_done)

        mbarrier.arrive(q_free.index(GROUP_INDEX), count=1)
        stage = step % V_STAGES
        mbarrier.wait(v_full.index(stage), step // V_STAGES % 2)
        v_tile = v_tiles.index(stage).reshape([KEYS, HEAD_DIM_PADDED])
        acc = warpgroup_mma(weights_16bit, v_tile, acc, is_async=True)
        acc_done = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index(stage), count=1)
        step += 1

        full_row_sum = gl.sum(row_sum, 1)
        if MAY_SPLIT:
            # A row that sees no key of the part has sum 0 and maximum MIN_SCORE, so its weight in the merge is 0
            full_row_sum = gl.where(full_row_sum == 0, 1.0, full_row_sum)
        if WITH_SINKS:
            sink = gl.load(sinks + head + row % PACKED) * (1.0 / LN_2)
            if MAY_SPLIT:
                sink = gl.where(num_parts > 1, MIN_SCORE, sink)  # `merge_parts` has them
            new_max = gl.maximum(row_max, sink)
            rescale = gl.exp2(row_max - new_max)
            full_row_sum *= gl.convert_layout(rescale, full_row_sum.type.layout, assert_trivial=True)
            full_row_sum += gl.convert_layout(gl.exp2(sink - new_max), full_row_sum.type.layout, assert_trivial=True)
            acc_done = acc_done * gl.convert_layout(rescale, OUT_ROW, assert_trivial=True)[:, None]
            row_max = new_max
        acc_done = acc_done * (1.0 / gl.convert_layout(full_row_sum, OUT_ROW, assert_trivial=True))[:, None]
        full_row_sum = gl.convert_layout(full_row_sum, SCORE_ROW, assert_trivial=True)
        row_lse = row_max + gl.log2(full_row_sum)
        num_stored = num_queries
        if MAY_SPLIT:
            if num_parts > 1:
                _store_partial(partial, partial_lse, item * 128 + GROUP_INDEX * 64, acc_done, row_lse)
            num_stored = gl.where(num_parts > 1, 0, num_queries)
        _store(out, lse, token, head, FIRST_QUERY, num_stored, acc_done, row_lse, NUM_HEADS, PACKED, HEAD_DIM, WITH_LSE)


@gluon.jit
def _make_ring(SHAPE: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr, NUM_USERS: gl.constexpr):
    """A ring of tiles in shared memory -> (tiles, barriers of full tiles, barriers of tiles that users released)."""
    NUM: gl.constexpr = SHAPE[0]
    tiles = gl.allocate_shared_memory(DTYPE, SHAPE, LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=NUM_USERS)
    return tiles, full, free


@gluon.jit(do_not_specialize=["table_stride"])
def _hopper_prefill(
    queries,
    pool,
    out,
    lse,
    sinks,
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
    WITH_SINKS: gl.constexpr,
):
    """Persistent prefill kernel: one program for each multiprocessor."""
    ROWS: gl.constexpr = min(BLOCK_SIZE, KEYS)
    Q_SHAPE: gl.constexpr = [2, 64 // PACKED, PACKED, HEAD_DIM_PADDED]
    K_SHAPE: gl.constexpr = [K_STAGES, KEYS // ROWS, ROWS, HEAD_DIM_PADDED]
    V_SHAPE: gl.constexpr = [V_STAGES, KEYS // ROWS, ROWS, HEAD_DIM_PADDED]
    Q_LAYOUT: gl.constexpr = queries.layout
    KV_LAYOUT: gl.constexpr = pool.layout
    DTYPE: gl.constexpr = out.dtype.element_ty
    q_ring = _make_ring(Q_SHAPE, Q_LAYOUT, DTYPE, 1)
    k_ring = _make_ring(K_SHAPE, KV_LAYOUT, DTYPE, 2)
    v_ring = _make_ring(V_SHAPE, KV_LAYOUT, DTYPE, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out, lse, sinks, partial, partial_lse, q_ring, k_ring, v_ring, tiles, count, seq_lens, scale,
                    0, NUM_HEADS, PACKED, BLOCK_SIZE, HEAD_DIM, HEAD_DIM_PADDED, KEYS, K_STAGES, V_STAGES, MAY_SPLIT,
                    WITH_LSE, WITH_SINKS,
                ),
            ),
            (
                _consume,
                (
                    out, lse, sinks, partial, partial_lse, q_ring, k_ring, v_ring, tiles, count, seq_lens, scale,
                    1, NUM_HEADS, PACKED, BLOCK_SIZE, HEAD_DIM, HEAD_DIM_PADDED, KEYS, K_STAGES, V_STAGES, MAY_SPLIT,
                    WITH_LSE, WITH_SINKS,
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
