"""Cascade attention: decode reads a shared prefix once for several sequences, in Triton.

    sequence  blocks              shared with the previous sequence
    0         a b c d e | f                      }
    1         a b c d e | g h     a b c d e      }  a prefix group: its queries are the rows of one product with a .. e
    2         a b c d e | i       a b c d e      }
    3         j k l m             nothing

A prefix group is up to ROWS query rows of neighbouring sequences with a shared prefix. The prefix is cut into splits; a
program takes one split for one K/V head and stores an unnormalised part for each sequence. `decode_attention` then
reads the rest of each sequence and merges these parts. The idea is Hydragen's (arXiv 2402.05099). Groups and splits are
computed on the device, once a step, from `RaggedBatch.common_prefix_lens`, so a CUDA graph replays with other prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention import softmax
from octavo.kernels.triton.attention.kv_tile import load_kv_tile, locate_keys
from octavo.kernels.triton.attention.softmax import LOG2_E, padded_size
from octavo.kernels.triton.launch import gdc_wait, or_placeholder, pdl_options

PREFIX_ALIGNMENT = 64
"""Prefix lengths are multiples of so many keys: no kernel has a longer tile, so no tile is cut."""
SPLIT_FIELDS = tl.constexpr(8)
"""Numbers in a row of `CascadePlan.splits`."""
PREFIX_FIELDS = tl.constexpr(4)
"""Numbers in a row of `CascadePlan.prefixes`."""


@dataclass(frozen=True, slots=True)
class CascadeTuning:
    """Launch parameters of the cascade kernel.

    rows            query rows of a prefix group: its sequences times the query heads of a K/V head
    tile            keys read at a time
    min_prefix_len  shorter prefixes are not shared; also the minimum length of a split
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    min_prefix_len: int = 256


def cascade_tuning(q: Tensor) -> CascadeTuning:
    head_dim = triton.next_power_of_2(q.shape[2])
    if q.dtype == torch.float32:  # for tests: products of float32 do not use the tensor cores
        return CascadeTuning(rows=32, tile=16, num_warps=4, num_stages=2, programs_per_multiprocessor=2)
    if head_dim > 256:  # not measured
        return CascadeTuning(rows=32, tile=16, num_warps=4, num_stages=2, programs_per_multiprocessor=2)
    tile = 32 if head_dim > 128 else 64
    return CascadeTuning(rows=64, tile=tile, num_warps=4, num_stages=2, programs_per_multiprocessor=2)


@dataclass(slots=True)
class CascadePlan:
    """The shared prefixes of a step and the buffers for their parts, the same for all layers.

    prefixes    [num_seqs, PREFIX_FIELDS] int32, for each sequence: length of the prefix that its group shares, a
                multiple of PREFIX_ALIGNMENT, or 0; slot of its part of the first split; distance to the slot of its
                next part; number of splits
    splits      [max_splits, SPLIT_FIELDS] int32, for each split: the group's first sequence; number of sequences; first
                key; end key; slot of the first sequence's part; the rest is unused
    count       [4] int32: number of splits; the rest is unused
    partial     [num_slots, num_kv_heads, group_size, head_dim] float32, unnormalised outputs
    partial_ml  [num_slots, num_kv_heads, group_size, 2] float32, row maxima and row sums of exponentials
    """

    tuning: CascadeTuning
    num_programs: int
    prefixes: Tensor
    splits: Tensor
    count: Tensor
    partial: Tensor
    partial_ml: Tensor


def plan_cascade(
    batch: RaggedBatch,
    tuning: CascadeTuning,
    num_multiprocessors: int,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
) -> CascadePlan:
    """The plan for a batch that has `common_prefix_lens`."""
    device, num_seqs = batch.seq_lens.device, batch.num_seqs
    max_group_seqs = tuning.rows // group_size
    num_programs = num_multiprocessors * tuning.programs_per_multiprocessor
    target_splits = max(num_programs // num_kv_heads, 1)  # each group may add one: its last split is shorter
    max_splits = target_splits + num_seqs // 2
    num_slots = target_splits * max_group_seqs + num_seqs
    # One allocation, multiples of 16 bytes first: every alignment of a pointer is a variant of the kernel.
    sizes = [4, SPLIT_FIELDS.value * max_splits, PREFIX_FIELDS.value * num_seqs, num_seqs + 1]
    ints = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    count, splits, prefixes, group_starts = ints.split(sizes)
    floats = torch.empty(num_slots * num_kv_heads * group_size * (head_dim + 2), dtype=torch.float32, device=device)
    partial, partial_ml = floats.split([x * num_slots * num_kv_heads * group_size for x in (head_dim, 2)])
    _build_cascade_plan[(1,)](
        batch.common_prefix_lens,
        prefixes,
        splits,
        group_starts,
        count,
        num_seqs,
        target_splits,
        MAX_GROUP_SEQS=max_group_seqs,
        MIN_PREFIX_LEN=tuning.min_prefix_len,
        ALIGNMENT=PREFIX_ALIGNMENT,
        SEQS=max(64, triton.next_power_of_2(num_seqs)),
        num_warps=4,
    )
    return CascadePlan(tuning, num_programs, prefixes, splits, count, partial, partial_ml)


def cascade_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    plan: CascadePlan,
    *,
    scale: float,
    early: bool,
    kv_scales: Tensor | None = None,
) -> None:
    """Attention of every group's queries over its prefix, into the plan's partial results.

    early  an earlier layer made the plan
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv_layer.shape[2:4]
    tuning = plan.tuning
    _attend_common[(plan.num_programs,)](
        q,
        kv_layer,
        *or_placeholder(q, kv_scales),
        plan.partial,
        plan.partial_ml,
        batch.block_tables,
        batch.query_start,
        plan.splits,
        plan.count,
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
        ROWS=tuning.rows,
        TILE=tuning.tile,
        STAGES=tuning.num_stages,
        SCALED=kv_scales is not None,
        num_warps=tuning.num_warps,
        **(pdl_options(q.device) if early else {"USE_PDL": False}),
    )


@triton.jit
def _max(a, b):
    return tl.maximum(a, b)


# Numbers that vary between batches are not specialised on: every variant of a kernel is a compilation.
@triton.jit(do_not_specialize=["num_seqs", "target_splits"])
def _build_cascade_plan(
    common_prefix_lens,
    prefixes,
    splits,
    group_starts,
    count,
    num_seqs,
    target_splits,
    MAX_GROUP_SEQS: tl.constexpr,
    MIN_PREFIX_LEN: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Fill a `CascadePlan`; one program. group_starts [num_seqs + 1] int32 is scratch: each group's first sequence.

    A group ends before a sequence that shares less than MIN_PREFIX_LEN tokens with the previous one, or less than half
    of what a neighbouring pair shares: reading a long prefix once for four beats reading a short one once for all.
    """
    seq = tl.arange(0, SEQS)
    valid = seq < num_seqs
    common = tl.load(common_prefix_lens + seq, mask=valid, other=0)
    before = tl.load(common_prefix_lens + seq - 1, mask=valid & (seq > 0), other=0)
    after = tl.load(common_prefix_lens + seq + 1, mask=seq + 1 < num_seqs, other=0)
    starts_run = (common < MIN_PREFIX_LEN) | (2 * common < before) | (2 * common < after)
    run_start = tl.associative_scan(tl.where(starts_run, seq, 0), 0, _max)
    starts_group = (seq - run_start) % MAX_GROUP_SEQS == 0
    group_index = tl.cumsum(starts_group.to(tl.int32), 0) - 1
    num_groups = tl.sum((starts_group & valid).to(tl.int32), 0)
    tl.store(group_starts + group_index, seq, mask=starts_group & valid)
    tl.store(group_starts + num_groups, num_seqs)
    tl.debug_barrier()  # other threads of this program read what was written

    is_group = seq < num_groups  # from here on, one lane for each group
    first = tl.load(group_starts + seq, mask=is_group, other=0)
    size = tl.load(group_starts + seq + 1, mask=is_group, other=0) - first
    length = tl.full([SEQS], 1 << 30, tl.int32)
    for i in range(1, MAX_GROUP_SEQS):
        length = tl.minimum(length, tl.load(common_prefix_lens + first + i, mask=is_group & (i < size), other=1 << 30))
    length = tl.where(is_group & (size > 1), length // ALIGNMENT * ALIGNMENT, 0)
    split_len = tl.maximum(tl.cdiv(tl.cdiv(tl.sum(length, 0), target_splits), ALIGNMENT) * ALIGNMENT, MIN_PREFIX_LEN)
    num_splits = tl.cdiv(length, split_len)
    first_split = tl.cumsum(num_splits, 0) - num_splits
    num_slots = num_splits * size
    first_slot = tl.cumsum(num_slots, 0) - num_slots
    tl.store(count, tl.sum(num_splits, 0))
    for i in range(0, tl.max(num_splits, 0)):
        row_ptr = splits + (first_split + i) * SPLIT_FIELDS
        mask = i < num_splits
        tl.store(row_ptr, first, mask=mask)
        tl.store(row_ptr + 1, size, mask=mask)
        tl.store(row_ptr + 2, i * split_len, mask=mask)
        tl.store(row_ptr + 3, tl.minimum((i + 1) * split_len, length), mask=mask)
        tl.store(row_ptr + 4, first_slot + i * size, mask=mask)
    for i in range(0, MAX_GROUP_SEQS):
        row_ptr = prefixes + (first + i) * PREFIX_FIELDS
        mask = is_group & (i < size)
        tl.store(row_ptr, length, mask=mask)
        tl.store(row_ptr + 1, first_slot + i, mask=mask)
        tl.store(row_ptr + 2, size, mask=mask)
        tl.store(row_ptr + 3, num_splits, mask=mask)


@triton.jit(do_not_specialize=["table_stride"])
def _attend_common(
    q,
    kv,
    kv_scales,
    partial,
    partial_ml,
    block_tables,
    query_start,
    splits,
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
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Attend over splits of prefixes; programs take (split, K/V head) pairs in turn.

    Only the rows of the group's sequences are used. All of them see all keys, so no load of keys needs a mask.
    """
    PRECISION: tl.constexpr = softmax.dot_precision(q.dtype.element_ty)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, padded_size(HEAD_DIM, 16))
    key = tl.arange(0, TILE)
    num_items = tl.load(count) * NUM_KV_HEADS
    if USE_PDL:
        gdc_wait()
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        split_ptr = splits + item // NUM_KV_HEADS * SPLIT_FIELDS
        head = item % NUM_KV_HEADS
        first = tl.load(split_ptr)
        begin = tl.load(split_ptr + 2)
        end = tl.load(split_ptr + 3)
        first_slot = tl.load(split_ptr + 4)
        seq_in_group = row // GROUP
        valid = seq_in_group < tl.load(split_ptr + 1)
        table = block_tables + first.to(tl.int64) * table_stride
        block_ids = tl.load(table + (begin + key) // BLOCK_SIZE)
        token = tl.load(query_start + first + seq_in_group, mask=valid, other=0).to(tl.int64)
        heads = head * GROUP + row % GROUP
        queries = tl.load(
            q + (token * q_token_stride + heads * q_head_stride)[:, None] + column[None, :],
            mask=valid[:, None] & (column < HEAD_DIM)[None, :],
            other=0.0,
        )
        row_max, row_sum, acc = softmax.empty_result(ROWS, column.shape[0])
        head_scale = scale
        if SCALED:
            queries = queries.to(softmax.float8_product(queries.dtype))
            head_scale *= tl.load(kv_scales + head)
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            offset = locate_keys(block_ids, start + key, kv_block_stride, head * kv_head_stride, BLOCK_SIZE, HEAD_DIM)
            block_ids = tl.load(table + tl.minimum(start + TILE + key, end - 1) // BLOCK_SIZE)
            keys = load_kv_tile(kv, offset, column, 0, None, HEAD_DIM, False)
            scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision=PRECISION) * head_scale
            row_max, row_sum, weights, rescale = softmax.update(scores, row_max, row_sum, 1.0)
            values = load_kv_tile(kv + kv_value_stride, offset, column, 0, None, HEAD_DIM, False)
            values = values.to(queries.dtype)
            acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None], input_precision=PRECISION)
        if SCALED:
            acc *= tl.load(kv_scales + NUM_KV_HEADS + head)
        part = ((first_slot + seq_in_group).to(tl.int64) * NUM_KV_HEADS + head) * GROUP + row % GROUP
        softmax.store_part(
            partial, partial_ml, part * HEAD_DIM, part * 2, row_max, row_sum, acc, valid, column, HEAD_DIM, 1
        )


@triton.jit
def merge_prefix(
    row_max, row_sum, acc, row, column, partial, partial_ml, prefix_ptr, head,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a sequence's prefix into its running result for one K/V head; the group's rows come first.

    prefix_ptr  the sequence's row of `CascadePlan.prefixes`
    """
    first_slot = tl.load(prefix_ptr + 1).to(tl.int64)
    slot_stride = tl.load(prefix_ptr + 2)
    num_splits = tl.load(prefix_ptr + 3)
    for base in range(0, num_splits, 2):
        for i in tl.static_range(2):  # more at once do not fit into registers
            mask = (row < GROUP) & (base + i < num_splits)
            rows = ((first_slot + (base + i) * slot_stride) * NUM_KV_HEADS + head) * GROUP + row
            part_max, part_sum, part = softmax.load_part(
                partial, partial_ml, rows * HEAD_DIM, rows * 2, mask, column, HEAD_DIM, 1
            )
            row_max, row_sum, acc = softmax.merge(row_max, row_sum, acc, part_max, part_sum, part)
    return row_max, row_sum, acc
