"""Between two passes of the model on a GPU, in Triton: from the rows to the inputs, and from the tokens to the rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.row_state import (
    FIRST_STOP_ID,
    MAX_STOP_IDS,
    MIN_P,
    NOT_FINITE,
    NOTHING_SAMPLED,
    NUM_COLUMNS,
    SAMPLE_INDEX,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    DecodeInputs,
    RowState,
)
from octavo.kernels.triton.launch import given


def prepare_decode_inputs(state: RowState, inputs: DecodeInputs, block_size: int) -> None:
    """See `reference.prepare_decode_inputs`."""
    batch, sampling = inputs.batch, inputs.sampling
    _prepare_decode_inputs[(len(inputs.rows),)](
        state.block_tables,
        state.last_token,
        state.done,
        state.sampling_params,
        inputs.step_counter,
        inputs.rows,
        inputs.starts,
        inputs.ends,
        inputs.live_rows,
        inputs.token_ids,
        batch.positions,
        batch.slot_mapping,
        batch.seq_lens,
        batch.block_tables,
        *given(inputs.step_counter, batch.common_prefix_lens),
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        sampling.sample_index,
        sampling.position,
        state.null_row,
        state.block_tables.stride(0),
        batch.block_tables.stride(0),
        COLUMNS=NUM_COLUMNS,
        BLOCK_SIZE=block_size,
        TILE=256,
        COMPARING=batch.common_prefix_lens is not None,
        num_warps=2,
    )


def prepare_prefill_inputs(
    state: RowState, rows: Tensor, starts: Tensor, known: Tensor, batch: RaggedBatch, token_ids: Tensor, block_size: int
) -> None:
    """See `reference.prepare_prefill_inputs`."""
    tile = 256
    _prepare_prefill_inputs[(len(rows), triton.cdiv(batch.max_query_len, tile))](
        state.block_tables,
        state.last_token,
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
        state.block_tables.stride(0),
        batch.block_tables.stride(0),
        batch.block_tables.shape[1],
        BLOCK_SIZE=block_size,
        TILE=tile,
        num_warps=2,
    )


def commit_sampled_tokens(state: RowState, rows: Tensor, tokens: Tensor, ring: Tensor, step_counter: Tensor) -> None:
    """See `reference.commit_sampled_tokens`."""
    _commit_sampled_tokens[(1,)](
        state.last_token,
        state.done,
        state.sampling_params,
        rows,
        tokens,
        ring,
        step_counter,
        len(rows),
        ring.stride(0),
        COLUMNS=NUM_COLUMNS,
        DRAWS=triton.next_power_of_2(ring.shape[1]),  # not of these rows: each number would be a compilation
        num_warps=4,
    )


# What the host counts up from step to step is not specialised on: every variant of a kernel is a compilation.
@triton.jit(do_not_specialize=["null_row", "table_stride", "own_table_stride"])
def _prepare_decode_inputs(
    block_tables,
    last_token,
    done,
    sampling_params,
    step_counter,
    rows,
    starts,
    ends,
    live_rows,
    token_ids,
    positions,
    slot_mapping,
    seq_lens,
    own_tables,
    common_prefix_lens,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    sample_index,
    next_position,
    null_row,
    table_stride,
    own_table_stride,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COMPARING: tl.constexpr,
):
    """One slice."""
    i = tl.program_id(0)
    num_passes = tl.load(step_counter + 1)
    row, live, position = _place(rows, starts, ends, done, i, num_passes)
    seq_len = tl.where(live, position + 1, 0).to(tl.int32)
    block = tl.load(block_tables + row * table_stride + position // BLOCK_SIZE).to(tl.int64)
    tl.store(live_rows + i, tl.where(live, row, null_row))
    tl.store(token_ids + i, tl.load(last_token + row))
    tl.store(positions + i, position)
    tl.store(slot_mapping + i, tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, 0))
    tl.store(seq_lens + i, seq_len)

    line = sampling_params + row * COLUMNS
    tl.store(temperature + i, tl.load(line + TEMPERATURE_AT).to(tl.float64, bitcast=True).to(tl.float32))
    tl.store(top_p + i, tl.load(line + TOP_P_AT).to(tl.float64, bitcast=True).to(tl.float32))
    tl.store(min_p + i, tl.load(line + MIN_P_AT).to(tl.float64, bitcast=True).to(tl.float32))
    tl.store(top_k + i, tl.load(line + TOP_K_AT).to(tl.int32))
    tl.store(seed + i, tl.load(line + SEED_AT))
    tl.store(sample_index + i, tl.load(line + SAMPLE_INDEX_AT))
    tl.store(next_position + i, position + 1)

    num_blocks = tl.cdiv(seq_len, BLOCK_SIZE)
    for first in range(0, num_blocks, TILE):
        column = first + tl.arange(0, TILE)
        ids = tl.load(block_tables + row * table_stride + column, mask=column < num_blocks)
        tl.store(own_tables + i.to(tl.int64) * own_table_stride + column, ids, mask=column < num_blocks)

    if COMPARING:
        other, other_live, other_position = _place(rows, starts, ends, done, tl.maximum(i - 1, 0), num_passes)
        both = live & other_live & (i > 0)
        most = tl.where(both, tl.minimum(position, other_position) // BLOCK_SIZE, 0).to(tl.int32)
        common = most
        for first in range(0, most, TILE):
            column = first + tl.arange(0, TILE)
            ids = tl.load(block_tables + row * table_stride + column, mask=column < most)
            other_ids = tl.load(block_tables + other * table_stride + column, mask=column < most)
            differ = (ids != other_ids) & (column < most)
            common = tl.minimum(common, tl.min(tl.where(differ, column, most), 0))
        tl.store(common_prefix_lens + i, common * BLOCK_SIZE)


@triton.jit
def _place(rows, starts, ends, done, i, num_passes):
    """A slice's row, whether there is something to do, and the position, 0 if not."""
    row = tl.load(rows + i)
    position = tl.load(starts + i) + num_passes
    live = (position < tl.load(ends + i)) & (tl.load(done + row).to(tl.int32) == 0)
    return row, live, tl.where(live, position, 0)


@triton.jit(do_not_specialize=["table_stride", "own_table_stride", "width"])
def _prepare_prefill_inputs(
    block_tables,
    last_token,
    done,
    rows,
    starts,
    known,
    query_start,
    token_ids,
    positions,
    slot_mapping,
    seq_lens,
    own_tables,
    table_stride,
    own_table_stride,
    width,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE tokens of one slice; the first of its programs also writes its line of the block tables."""
    i = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(rows + i)
    begin = tl.load(query_start + i)
    count = tl.load(query_start + i + 1) - begin
    # The first token tells whether the host sent any: the row's own last token is -1 there.
    from_host = tl.load(known + begin, mask=count > 0, other=-1) >= 0
    is_done = (tl.load(done + row).to(tl.int32) != 0) & (not from_host)
    start = tl.where(is_done, 0, tl.load(starts + i))
    offset = tile * TILE + tl.arange(0, TILE)
    here = offset < count
    token = tl.load(known + begin + offset, mask=here, other=0)
    token = tl.where(token < 0, tl.load(last_token + row), token)
    position = start + offset
    block = tl.load(block_tables + row * table_stride + position // BLOCK_SIZE, mask=here, other=0).to(tl.int64)
    slot = tl.where(is_done, 0, block * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(token_ids + begin + offset, token, mask=here)
    tl.store(positions + begin + offset, position, mask=here)
    tl.store(slot_mapping + begin + offset, slot, mask=here)
    if tile == 0:
        tl.store(done + row, is_done)  # cleared by the host's tokens
        seq_len = (start + count).to(tl.int32)
        tl.store(seq_lens + i, seq_len)
        num_blocks = tl.minimum(tl.cdiv(seq_len, BLOCK_SIZE), width)
        for first in range(0, num_blocks, TILE):
            column = first + tl.arange(0, TILE)
            ids = tl.load(block_tables + row * table_stride + column, mask=column < num_blocks)
            ids = tl.where(is_done, 0, ids)
            tl.store(own_tables + i.to(tl.int64) * own_table_stride + column, ids, mask=column < num_blocks)


@triton.jit(do_not_specialize=["num_draws", "ring_stride"])
def _commit_sampled_tokens(
    last_token,
    done,
    sampling_params,
    rows,
    tokens,
    ring,
    step_counter,
    num_draws,
    ring_stride,
    COLUMNS: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """One program: several draws of one row all look at its flag before any of them sets it."""
    i = tl.arange(0, DRAWS)
    here = i < num_draws
    row = tl.load(rows + i, mask=here, other=0)
    token = tl.load(tokens + i, mask=here, other=0)
    alive = here & (tl.load(done + row, mask=here, other=1).to(tl.int32) == 0)
    column = tl.load(step_counter)
    num_passes = tl.load(step_counter + 1)
    is_number = token >= 0
    stops = token < 0
    for k in tl.static_range(STOP_IDS):
        stops |= tl.load(sampling_params + row * COLUMNS + STOPS_AT + k, mask=here, other=-1) == token
    told = tl.where(alive, tl.where(is_number, token, token + (NOT_FINITE_MARK + 1)), NOTHING_MARK)
    tl.debug_barrier()  # all of this program's threads have read
    tl.store(ring + column * ring_stride + i, told.to(ring.dtype.element_ty), mask=here)
    tl.store(last_token + row, token, mask=alive & is_number)
    tl.store(done + row, stops, mask=alive & stops)
    tl.store(step_counter, column + 1)
    tl.store(step_counter + 1, num_passes + 1)


TEMPERATURE_AT = tl.constexpr(TEMPERATURE)
TOP_P_AT = tl.constexpr(TOP_P)
MIN_P_AT = tl.constexpr(MIN_P)
TOP_K_AT = tl.constexpr(TOP_K)
SEED_AT = tl.constexpr(SEED)
SAMPLE_INDEX_AT = tl.constexpr(SAMPLE_INDEX)
STOPS_AT = tl.constexpr(FIRST_STOP_ID)
STOP_IDS = tl.constexpr(MAX_STOP_IDS)
NOT_FINITE_MARK = tl.constexpr(NOT_FINITE)
NOTHING_MARK = tl.constexpr(NOTHING_SAMPLED)
