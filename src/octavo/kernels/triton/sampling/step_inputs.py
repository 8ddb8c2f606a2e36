"""Prepares the inputs of a forward pass from the row state, and commits its sampled tokens to it, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.row_state import (
    COLUMN,
    FIRST_STOP_ID,
    MAX_DRAFTS,
    MAX_STOP_IDS,
    NOT_FINITE,
    NOTHING_SAMPLED,
    NUM_COLUMNS,
    DecodeInputs,
    RowState,
)
from octavo.kernels.triton.launch import or_placeholder


def prepare_decode_inputs(state: RowState, inputs: DecodeInputs, block_size: int) -> None:
    """`reference.prepare_decode_inputs`."""
    batch, sampling = inputs.batch, inputs.sampling
    _prepare_decode_inputs[(len(inputs.rows),)](
        state.block_tables,
        state.last_token,
        state.num_computed,
        state.drafts,
        state.done,
        state.sampling_params,
        inputs.rows,
        inputs.depths,
        inputs.ends,
        inputs.live_rows,
        inputs.token_ids,
        batch.positions,
        batch.slot_mapping,
        batch.seq_lens,
        batch.block_tables,
        *or_placeholder(
            inputs.rows,
            batch.common_prefix_lens,
            batch.window_tables,
            batch.window_slots,
            batch.state_tables,
            batch.state_reads,
        ),
        sampling.position,
        tuple(getattr(sampling, name) for name in COLUMN),
        state.null_row,
        state.block_tables.stride(0),
        batch.block_tables.stride(0),
        *_window_strides(state, batch),
        *_state_sizes(state, batch),
        NUM_WINDOWS=batch.num_groups - 1,
        COLUMNS=NUM_COLUMNS,
        BLOCK_SIZE=block_size,
        TILE=256,
        FIND_COMMON_PREFIX=batch.common_prefix_lens is not None,
        num_warps=2,
    )


def _window_strides(state: RowState, batch: RaggedBatch) -> tuple[int, int, int]:
    """From group to group: in a row of the row state's tables, in the batch's tables, and in its slots."""
    if batch.window_tables is None or batch.window_slots is None:
        return 0, 0, 0
    return state.max_blocks, batch.window_tables.stride(0), batch.window_slots.stride(0)


def _state_sizes(state: RowState, batch: RaggedBatch) -> tuple[int, int, int, int]:
    """Of recurrent states: the first columns of both tables of a row, their blocks, and the batch's tables' stride."""
    if batch.state_tables is None:
        return 0, 0, 0, 0
    first = state.num_groups * state.max_blocks
    return first, first + state.max_blocks, state.state_blocks, batch.state_tables.stride(0)


def prepare_prefill_inputs(
    state: RowState, rows: Tensor, starts: Tensor, known: Tensor, batch: RaggedBatch, token_ids: Tensor, block_size: int
) -> None:
    """`reference.prepare_prefill_inputs`."""
    tile = 256
    _prepare_prefill_inputs[(len(rows), triton.cdiv(batch.max_query_len, tile))](
        state.block_tables,
        state.last_token,
        state.num_computed,
        state.done,
        rows,
        starts,
        known,
        batch.query_start,
        token_ids,
        batch.positions,
        batch.slot_mapping,
        batch.seq_lens,
        batch.block_tables,
        *or_placeholder(rows, batch.window_tables, batch.window_slots, batch.state_tables, batch.state_reads),
        state.block_tables.stride(0),
        batch.block_tables.stride(0),
        batch.block_tables.shape[1],
        *_window_strides(state, batch),
        *_state_sizes(state, batch),
        NUM_WINDOWS=batch.num_groups - 1,
        BLOCK_SIZE=block_size,
        TILE=tile,
        num_warps=2,
    )


def commit_sampled_tokens(
    state: RowState, rows: Tensor, tokens: Tensor, positions: Tensor, ring: Tensor, step_counter: Tensor
) -> None:
    """`reference.commit_sampled_tokens`."""
    _commit_sampled_tokens[(1,)](
        state.last_token,
        state.num_computed,
        *or_placeholder(ring, state.history if state.history.shape[1] else None),
        state.done,
        state.sampling_params,
        rows,
        tokens,
        positions,
        ring,
        step_counter,
        len(rows),
        ring.stride(0),
        state.history.stride(0),
        KEEPS_HISTORY=state.history.shape[1] > 0,
        COLUMNS=NUM_COLUMNS,
        SAMPLES=triton.next_power_of_2(ring.shape[1]),  # not len(rows): each value is a compilation
        num_warps=4,
    )


# Numbers that vary between steps are not specialised on: every variant of a kernel is a compilation.
WINDOW_STRIDES = ["group_stride", "window_tables_stride", "window_slots_stride"]
STATE_SIZES = ["state_column", "read_column", "state_blocks", "state_tables_stride"]


@triton.jit(do_not_specialize=["null_row", "table_stride", "batch_table_stride", *WINDOW_STRIDES, *STATE_SIZES])
def _prepare_decode_inputs(
    block_tables,
    last_token,
    num_computed,
    drafts,
    done,
    sampling_params,
    rows,
    depths,
    ends,
    live_rows,
    token_ids,
    positions,
    slot_mapping,
    seq_lens,
    batch_tables,
    common_prefix_lens,
    window_tables,
    window_slots,
    state_tables,
    state_reads,
    next_position,
    sampling,
    null_row,
    table_stride,
    batch_table_stride,
    group_stride,
    window_tables_stride,
    window_slots_stride,
    state_column,
    read_column,
    state_blocks,
    state_tables_stride,
    NUM_WINDOWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    FIND_COMMON_PREFIX: tl.constexpr,
):
    """Inputs of one line."""
    i = tl.program_id(0)
    row, live, position = _line_position(rows, depths, ends, num_computed, drafts, done, i)
    depth = tl.load(depths + i)
    seq_len = tl.where(live, position + 1, 0).to(tl.int32)
    table = block_tables + row * table_stride
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    tl.store(live_rows + i, tl.where(live, row, null_row))
    draft = tl.load(drafts + row * DRAFT_ENTRIES + depth - 1, mask=depth > 0, other=0)
    tl.store(token_ids + i, tl.where(depth > 0, tl.maximum(draft, 0), tl.load(last_token + row)))
    tl.store(positions + i, position)
    tl.store(slot_mapping + i, tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, 0))
    tl.store(seq_lens + i, seq_len)

    for k in tl.static_range(len(sampling)):  # the columns of COLUMN
        value = tl.load(sampling_params + row * COLUMNS + k)
        dtype = sampling[k].dtype.element_ty
        if dtype.is_floating():
            value = value.to(tl.float64, bitcast=True)
        tl.store(sampling[k] + i, value.to(dtype))
    tl.store(next_position + i, position + 1)

    num_blocks = tl.cdiv(seq_len, BLOCK_SIZE)
    line = i.to(tl.int64) * batch_table_stride
    _copy_states(table, state_column, read_column, state_tables, state_reads, i * state_tables_stride, state_blocks,
                 ~live, TILE)  # fmt: skip
    _copy_table(table, batch_tables + line, num_blocks, False, TILE)
    for group in range(NUM_WINDOWS):
        table += group_stride
        block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
        tl.store(window_slots + group * window_slots_stride + i, slot)
        _copy_table(table, window_tables + group * window_tables_stride + line, num_blocks, False, TILE)

    if FIND_COMMON_PREFIX:
        before = tl.maximum(i - 1, 0)
        other, other_live, other_position = _line_position(rows, depths, ends, num_computed, drafts, done, before)
        both = live & other_live & (i > 0)
        max_common = tl.where(both, tl.minimum(position, other_position) // BLOCK_SIZE, 0).to(tl.int32)
        common = _num_common(block_tables + row * table_stride, block_tables + other * table_stride, max_common, TILE)
        tl.store(common_prefix_lens + i, common * BLOCK_SIZE)


@triton.jit
def _num_common(table, other_table, max_common, TILE: tl.constexpr):
    """Leading blocks, at most max_common, that two tables have in common."""
    common = max_common
    for first in range(0, max_common, TILE):
        column = first + tl.arange(0, TILE)
        ids = tl.load(table + column, mask=column < max_common)
        other_ids = tl.load(other_table + column, mask=column < max_common)
        differ = (ids != other_ids) & (column < max_common)
        common = tl.minimum(common, tl.min(tl.where(differ, column, max_common), 0))
    return common


@triton.jit
def _copy_table(source, target, num_blocks, is_done, TILE: tl.constexpr):
    """Copy a row's block ids, or null blocks for a row that is done."""
    for first in range(0, num_blocks, TILE):
        column = first + tl.arange(0, TILE)
        ids = tl.load(source + column, mask=column < num_blocks)
        tl.store(target + column, tl.where(is_done, 0, ids), mask=column < num_blocks)


@triton.jit
def _copy_states(table, state_column, read_column, state_tables, state_reads, offset, state_blocks, is_done,
                 TILE: tl.constexpr):  # fmt: skip
    """Copy both tables of a row's state. Unless the row is done, its next pass reads what this one writes."""
    for first in range(0, state_blocks, TILE):
        column = first + tl.arange(0, TILE)
        mask = column < state_blocks
        writes = tl.load(table + state_column + column, mask=mask)
        reads = tl.load(table + read_column + column, mask=mask)
        tl.store(state_tables + offset + column, tl.where(is_done, 0, writes), mask=mask)
        tl.store(state_reads + offset + column, tl.where(is_done, 0, reads), mask=mask)
        tl.store(table + read_column + column, writes, mask=mask & ~is_done)


@triton.jit
def _line_position(rows, depths, ends, num_computed, drafts, done, i):
    """(row, is live, position) of a line; the position is 0 if the line is not live."""
    row = tl.load(rows + i)
    depth = tl.load(depths + i)
    position = tl.load(num_computed + row) + depth
    live = (position < tl.load(ends + i)) & (tl.load(done + row).to(tl.int32) == 0)
    live &= tl.load(drafts + row * DRAFT_ENTRIES + depth - 1, mask=depth > 0, other=0) >= 0
    return row, live, tl.where(live, position, 0)


@triton.jit(do_not_specialize=["table_stride", "batch_table_stride", "width", *WINDOW_STRIDES, *STATE_SIZES])
def _prepare_prefill_inputs(
    block_tables,
    last_token,
    num_computed,
    done,
    rows,
    starts,
    known,
    query_start,
    token_ids,
    positions,
    slot_mapping,
    seq_lens,
    batch_tables,
    window_tables,
    window_slots,
    state_tables,
    state_reads,
    table_stride,
    batch_table_stride,
    width,
    group_stride,
    window_tables_stride,
    window_slots_stride,
    state_column,
    read_column,
    state_blocks,
    state_tables_stride,
    NUM_WINDOWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE tokens of one slice; the slice's first program also writes its row of the block tables."""
    i = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(rows + i)
    begin = tl.load(query_start + i)
    count = tl.load(query_start + i + 1) - begin
    # If the host sent no tokens, the first entry is -1 and stands for the row's last token.
    from_host = tl.load(known + begin, mask=count > 0, other=-1) >= 0
    is_done = (tl.load(done + row).to(tl.int32) != 0) & (not from_host)
    start = tl.where(from_host, tl.load(starts + i), tl.load(num_computed + row))
    start = tl.where(is_done, 0, start)
    offset = tile * TILE + tl.arange(0, TILE)
    mask = offset < count
    token = tl.load(known + begin + offset, mask=mask, other=0)
    token = tl.where(token < 0, tl.load(last_token + row), token)
    position = start + offset
    table = block_tables + row * table_stride
    block = tl.load(table + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    slot = tl.where(is_done, 0, block * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(token_ids + begin + offset, token, mask=mask)
    tl.store(positions + begin + offset, position, mask=mask)
    tl.store(slot_mapping + begin + offset, slot, mask=mask)
    for group in range(NUM_WINDOWS):
        of_group = table + (group + 1) * group_stride
        block = tl.load(of_group + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
        slot = tl.where(is_done, 0, block * BLOCK_SIZE + position % BLOCK_SIZE)
        tl.store(window_slots + group * window_slots_stride + begin + offset, slot, mask=mask)
    if tile == 0:
        tl.store(done + row, is_done)  # tokens from the host clear the flag
        tl.store(num_computed + row, start + count - 1, mask=~is_done)  # a slice without host tokens has one tile
        seq_len = (start + count).to(tl.int32)
        tl.store(seq_lens + i, seq_len)
        num_blocks = tl.minimum(tl.cdiv(seq_len, BLOCK_SIZE), width)
        line = i.to(tl.int64) * batch_table_stride
        _copy_states(table, state_column, read_column, state_tables, state_reads, i * state_tables_stride,
                     state_blocks, is_done, TILE)  # fmt: skip
        _copy_table(table, batch_tables + line, num_blocks, is_done, TILE)
        for group in range(NUM_WINDOWS):
            of_group = table + (group + 1) * group_stride
            target = window_tables + group * window_tables_stride + line
            _copy_table(of_group, target, num_blocks, is_done, TILE)


@triton.jit(do_not_specialize=["num_samples", "ring_stride", "history_stride"])
def _commit_sampled_tokens(
    last_token,
    num_computed,
    history,
    done,
    sampling_params,
    rows,
    tokens,
    positions,
    ring,
    step_counter,
    num_samples,
    ring_stride,
    history_stride,
    KEEPS_HISTORY: tl.constexpr,
    COLUMNS: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """One program for all samples: several samples of a row must all read its done flag before one sets it."""
    i = tl.arange(0, SAMPLES)
    mask = i < num_samples
    row = tl.load(rows + i, mask=mask, other=0)
    token = tl.load(tokens + i, mask=mask, other=0)
    position = tl.load(positions + i, mask=mask, other=0)
    active = mask & (tl.load(done + row, mask=mask, other=1).to(tl.int32) == 0)
    column = tl.load(step_counter)
    is_token = token >= 0
    # The next line of the same row, if its token counts, has the row's last token.
    has_next = i + 1 < num_samples
    next_row = tl.load(rows + i + 1, mask=has_next, other=-1)
    next_token = tl.load(tokens + i + 1, mask=has_next, other=-1)
    is_last = is_token & ((next_row != row) | (next_token < 0))
    stops = (token == -1) | (token == -2)
    for k in tl.static_range(NUM_STOP_COLUMNS):
        stops |= tl.load(sampling_params + row * COLUMNS + FIRST_STOP_COLUMN + k, mask=mask, other=-1) == token
    ring_value = tl.where(active, tl.where(is_token, token, token + (NOT_FINITE_MARK + 1)), NOTHING_SAMPLED_MARK)
    tl.debug_barrier()  # all threads of this program have read
    tl.store(ring + column * ring_stride + i, ring_value.to(ring.dtype.element_ty), mask=mask)
    tl.store(last_token + row, token, mask=active & is_last)
    tl.store(num_computed + row, position, mask=active & is_last)
    if KEEPS_HISTORY:
        tl.store(history + row * history_stride + position, token.to(tl.int32), mask=active & is_token)
    tl.store(done + row, stops, mask=active & stops)
    tl.store(step_counter, column + 1)


FIRST_STOP_COLUMN = tl.constexpr(FIRST_STOP_ID)
NUM_STOP_COLUMNS = tl.constexpr(MAX_STOP_IDS)
DRAFT_ENTRIES = tl.constexpr(MAX_DRAFTS)
NOT_FINITE_MARK = tl.constexpr(NOT_FINITE)
NOTHING_SAMPLED_MARK = tl.constexpr(NOTHING_SAMPLED)
