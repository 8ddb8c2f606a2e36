"""The convolution of a recurrent layer, in Triton.

A program computes some channels of a tile of a sequence's tokens. The first tile's program alone reads the sequence's
state, and it alone writes the new one: the others find all their inputs in x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.launch import pdl_options, wait_for_predecessor
from octavo.kernels.triton.recurrent.layout import find_tile, has_whole_rows, max_tiles, places

TILE_TOKENS, CHANNELS = 32, 128
"""Of a program. A pass of single tokens has tiles of one."""


def causal_conv(x: Tensor, weight: Tensor, states: Tensor, first: int, batch: RaggedBatch) -> Tensor:
    """See `reference.causal_conv`."""
    (num_channels, size), tables, reads = weight.shape, batch.state_tables, batch.state_reads
    assert tables is not None and reads is not None and reads.stride() == tables.stride()
    assert x.stride(1) == 1 and weight.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    tile = 1 if batch.max_query_len == 1 else max(TILE_TOKENS, triton.next_power_of_2(size))
    _causal_conv[(max_tiles(batch, tile), triton.cdiv(num_channels, CHANNELS))](
        x,
        weight,
        states,
        tables,
        reads,
        batch.query_start,
        batch.seq_lens,
        out,
        batch.num_seqs,
        first,
        x.stride(0),
        tables.stride(0),
        NUM_CHANNELS=num_channels,
        SIZE=size,
        ROWS=triton.next_power_of_2(max(size - 1, 1)),
        WIDTH=states.shape[1],
        WHOLE_ROWS=has_whole_rows(states, first, num_channels),
        TOKENS=tile,
        CHANNELS=CHANNELS,
        num_warps=4,
        **pdl_options(x.device),
    )
    return out


@triton.jit
def _input(
    x,
    state,
    table,
    first,
    begin,
    index,
    channel,
    mask,
    has_state,
    x_stride,
    NUM_CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
):
    """Inputs of some channels, [len(index), channels]: of a slice from index 0 on, before it of the state."""
    is_own = mask & (index >= 0)[:, None]
    token = (begin + index).to(tl.int64)
    own = tl.load(x + token[:, None] * x_stride + channel[None, :], mask=is_own, other=0.0).to(tl.float32)
    is_old = mask & (index < 0)[:, None] & has_state
    number = first + (SIZE - 1 + index) * NUM_CHANNELS
    old = tl.load(state + places(table, number, channel, is_old, WIDTH, WHOLE_ROWS), mask=is_old, other=0.0)
    return own + old


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _causal_conv(
    x,
    weight,
    states,
    tables,
    reads,
    query_start,
    seq_lens,
    out,
    num_seqs,
    first,
    x_stride,
    table_stride,
    NUM_CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    wait_for_predecessor(USE_PDL)
    sequence, tile = find_tile(query_start, num_seqs, tl.program_id(0), TOKENS, 0)
    begin = tl.load(query_start + sequence, mask=sequence < num_seqs, other=0)
    count = tl.load(query_start + sequence + 1, mask=sequence < num_seqs, other=0) - begin
    if tile * TOKENS < count:
        before = reads + sequence * table_stride
        has_state = tl.load(seq_lens + sequence) > count
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        is_channel = (channel < NUM_CHANNELS)[None, :]
        index = tile * TOKENS + tl.arange(0, TOKENS)
        mask = (index < count)[:, None] & is_channel
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for tap in tl.static_range(SIZE):
            inputs = _input(x, states, before, first, begin, index + (tap - SIZE + 1), channel, mask, has_state,
                            x_stride, NUM_CHANNELS, SIZE, WIDTH, WHOLE_ROWS)  # fmt: skip
            taps = tl.load(weight + channel * SIZE + tap, mask=channel < NUM_CHANNELS, other=0.0).to(tl.float32)
            total += inputs * taps[None, :]
        token = (begin + index).to(tl.int64)
        out_ptrs = out + token[:, None] * NUM_CHANNELS + channel[None, :]
        tl.store(out_ptrs, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=mask)
        if (tile == 0) & (SIZE > 1):
            row = tl.arange(0, ROWS)
            is_kept = (row < SIZE - 1)[:, None] & is_channel
            new = _input(x, states, before, first, begin, count - (SIZE - 1) + row, channel, is_kept, has_state,
                         x_stride, NUM_CHANNELS, SIZE, WIDTH, WHOLE_ROWS)  # fmt: skip
            tl.debug_barrier()  # every thread has read the state, which may be replaced where it is
            table = tables + sequence * table_stride
            number = first + row * NUM_CHANNELS
            tl.store(states + places(table, number, channel, is_kept, WIDTH, WHOLE_ROWS), new, mask=is_kept)
