"""Linear layers for small batches on Hopper, in Gluon: the weight streams through shared memory.

The kernel of `skinny` starts enough programs to keep the memory busy, but memory is idle between two products of a
layer. Here a producer warp copies the weight by TMA, tile by tile and some tiles ahead. It begins before the preceding
kernel has ended, because no kernel writes weights.

A program takes a tile of rows of the weight, or, if there are few tiles, one of several ranges of its columns. Programs
that share a tile then exchange sums: each stores its partial sums, waits for the others, and adds the parts of its
share of the rows, always in the same order. So results do not depend on which program is last.

    columns     0 1 2 3 4 5 6 7
    program 0   x x x x             adds the parts of the tile's first half of rows
    program 1           x x x x     adds the parts of the second half
"""

from __future__ import annotations

import functools

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
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.kernels.reference.norms import Gate
from octavo.kernels.triton.activation import GELU_SLOPE
from octavo.kernels.triton.launch import or_placeholder, pdl_options, wait_for_predecessor
from octavo.kernels.triton.linear.ranks_hopper import begin_launch, sum_over_ranks
from octavo.kernels.triton.linear.tuning import TILE_TOKENS, HopperTuning, padded_tokens
from octavo.kernels.triton.reduce import PeerBuffers

LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
PRODUCER_REGISTERS = gl.constexpr(40)
"""Registers of a thread of the producer warp; the rest goes to the consumer warps."""


@functools.cache
def barrier_counters(device: torch.device) -> Tensor:
    """One counter for each tile; see `sync_programs`."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Gate,
    tuning: HopperTuning,
    *,
    squares: Tensor | None,
    eps: float,
    residual: Tensor | None,
    norm: Tensor | None,
    peers: PeerBuffers | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """-> y, and with a norm its (weighted, squares). Strides must be multiples of 16 bytes, for TMA.

    peers  of the ranks whose products are summed

    Launches on a device must not overlap: they share the barrier counters.
    """
    num_tokens, num_in = x.shape
    num_rows = weight.shape[0]
    num_out, padded = num_rows // (2 if gate else 1), padded_tokens(num_tokens)
    y = torch.empty(num_tokens, num_out, dtype=x.dtype, device=x.device)
    tokens, row_shares = min(padded, TILE_TOKENS), triton.cdiv(num_out, tuning.rows) * tuning.splits
    programs = row_shares * (padded // tokens)
    norm_outputs = None
    if norm is not None:
        norm_outputs = torch.empty_like(y), torch.empty(row_shares, padded, dtype=torch.float32, device=x.device)
    num_sums = programs * (num_rows // num_out) * tuning.rows * tokens if tuning.splits > 1 else 0
    words: tuple[Tensor | None, ...] = (None,) * 5
    numbers = 0, 0, 0
    if peers is not None:
        mine, addresses, counters = peers.words.mine, peers.words.peers, peers.words.counters
        words = mine, addresses, counters, peers.status, peers.stop
        numbers = peers.rank, peers.words.capacity, peers.spin_limit
    xs = TensorDescriptor(x, [num_tokens, num_in], [x.stride(0), 1], [tokens, tuning.columns], LAYOUT)
    weights = TensorDescriptor(weight, [num_rows, num_in], [num_in, 1], [tuning.rows, tuning.columns], LAYOUT)
    _skinny_hopper[(programs,)](
        xs,
        weights,
        *or_placeholder(y, bias, squares, residual, norm, y, *(norm_outputs or (None, None))),
        torch.empty(num_sums, dtype=torch.float32, device=x.device),
        barrier_counters(x.device),
        *or_placeholder(y, *words),
        num_tokens,
        num_out,
        num_in,
        0 if squares is None else len(squares),
        eps,
        *numbers,
        ROWS=tuning.rows,
        TOKENS=tokens,
        PADDED=padded,
        COLUMNS=tuning.columns,
        SPLITS=tuning.splits,
        STAGES=tuning.stages,
        GATE=gate,
        SCALED=squares is not None,
        WITH_BIAS=bias is not None,
        WITH_RESIDUAL=residual is not None,
        WITH_NORM=norm is not None,
        NUM_RANKS=1 if peers is None else peers.size,
        num_warps=4,
        maxnreg=tuning.registers,
        **pdl_options(x.device),
    )
    return y, norm_outputs


@gluon.constexpr_function
def squares_layout(tokens, warps=4):
    across = max(tokens // 4, 1)
    return gl.BlockedLayout([1, min(tokens, 4)], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def _share_layout(rows, warps):
    """Layout of a share of a tile's rows: a thread has adjacent rows, which it stores together."""
    return gl.BlockedLayout([min(rows // 8, 4), 1], [8, 4], [1, warps], [0, 1])


@gluon.jit
def make_ring(
    xs, weights, ROWS: gl.constexpr, TOKENS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    HALVES: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """A ring of STAGES steps of the weight and of the tokens, with a full and a free barrier for each."""
    tiles = gl.allocate_shared_memory(DTYPE, [STAGES * HALVES, ROWS, COLUMNS], weights.layout)
    x_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TOKENS, COLUMNS], xs.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    return tiles, x_tiles, full, free


@gluon.jit
def _copy_weights(
    weights, ring, stage, tile, step, num_out, pred,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, NUM_BYTES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Copy the weight's part of a step. NUM_BYTES includes the tokens, which `_copy_tokens` copies."""
    tiles, _, full, _ = ring
    mbarrier.expect(full.index(stage), NUM_BYTES, pred=pred)
    for half in gl.static_range(HALVES):
        coordinates = [tile * ROWS + half * num_out, step * COLUMNS]
        target = tiles.index(stage * HALVES + half)
        tma.async_copy_global_to_shared(weights, coordinates, full.index(stage), target, pred=pred)


@gluon.jit
def _copy_tokens(xs, ring, stage, first_token, step, pred, COLUMNS: gl.constexpr):
    _, x_tiles, full, _ = ring
    coordinates = [first_token, step * COLUMNS]
    tma.async_copy_global_to_shared(xs, coordinates, full.index(stage), x_tiles.index(stage), pred=pred)


@gluon.jit
def producer(
    xs, weights, ring, tile, first_token, begin, end, num_out,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp, which issues TMA copies."""
    NUM_BYTES: gl.constexpr = (HALVES * ROWS + TOKENS) * COLUMNS * 2
    _, _, _, free = ring
    for i in gl.static_range(STAGES):
        step = begin + i
        _copy_weights(weights, ring, i, tile, step, num_out, step < end, ROWS, COLUMNS, NUM_BYTES, HALVES)
    wait_for_predecessor(USE_PDL)
    for i in gl.static_range(STAGES):
        _copy_tokens(xs, ring, i, first_token, begin + i, begin + i < end, COLUMNS)
    for iteration in range(STAGES, end - begin):
        stage = iteration % STAGES
        mbarrier.wait(free.index(stage), iteration // STAGES % 2 ^ 1)
        _copy_weights(weights, ring, stage, tile, begin + iteration, num_out, True, ROWS, COLUMNS, NUM_BYTES, HALVES)
        _copy_tokens(xs, ring, stage, first_token, begin + iteration, True, COLUMNS)


@gluon.jit
def sync_programs(counter, is_first, NUM: gl.constexpr):
    """A barrier of NUM programs: afterwards, each sees what the others wrote before it.

    The increments of all programs together flip the counter's highest bit and leave the others 0, so the next use needs
    no reset.
    """
    gl.thread_barrier()
    increment = gl.where(is_first, -(1 << 31) - (NUM - 1) + (1 << 32), 1).to(gl.int32)
    before = gl.atomic_add(counter, increment, sem="acq_rel")
    current = before + increment
    while (before ^ current) >= 0:
        current = gl.atomic_add(counter, 0, sem="acquire")


@gluon.jit
def _output_tile(
    first_row, first_token, num_tokens, num_out, ROWS: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr
):
    """A tile of y -> (rows, tokens, mask of rows, mask of elements, offsets of elements)."""
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    row_mask = row < num_out
    mask = row_mask[:, None] & (token < num_tokens)[None, :]
    return row, token, row_mask, mask, token[None, :] * num_out + row[:, None]


@gluon.jit
def load_epilogue_inputs(
    bias, residual, norm, first_row, first_token, num_tokens, num_out,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr, GATE: gl.constexpr, WITH_BIAS: gl.constexpr,
    WITH_RESIDUAL: gl.constexpr, WITH_NORM: gl.constexpr,
):  # fmt: skip
    """Load bias, residual and norm weight for `_epilogue`, as they are in memory; zeros for those that are absent."""
    row, _, row_mask, mask, offsets = _output_tile(first_row, first_token, num_tokens, num_out, ROWS, TOKENS, LAYOUT)
    bias_values = gl.zeros([ROWS], bias.dtype.element_ty, gl.SliceLayout(1, LAYOUT))
    up_bias = bias_values
    norm_weight = gl.zeros([ROWS], norm.dtype.element_ty, gl.SliceLayout(1, LAYOUT))
    residual_values = gl.zeros([ROWS, TOKENS], residual.dtype.element_ty, LAYOUT)
    if WITH_BIAS:
        bias_values = gl.load(bias + row, mask=row_mask, other=0.0)
        if GATE != "":
            up_bias = gl.load(bias + num_out + row, mask=row_mask, other=0.0)
    if WITH_RESIDUAL:
        residual_values = gl.load(residual + offsets, mask=mask, other=0.0)
    if WITH_NORM:
        norm_weight = gl.load(norm + row, mask=row_mask, other=0.0)
    return bias_values, up_bias, residual_values, norm_weight


@gluon.jit
def _epilogue(
    acc, up, squares, first_squares, inputs, y, weighted, out_squares, ranks,
    first_row, first_token, num_tokens, num_out, num_in, num_squares, eps,
    PADDED: gl.constexpr, GATE: gl.constexpr, SCALED: gl.constexpr, WITH_BIAS: gl.constexpr,
    WITH_RESIDUAL: gl.constexpr, WITH_NORM: gl.constexpr, NUM_RANKS: gl.constexpr,
):  # fmt: skip
    """Apply scale, bias, gate, the sum over ranks, residual and norm to the sums [rows, tokens], and store them.

    out_squares  [PADDED], sums of squares of these rows
    """
    LAYOUT: gl.constexpr = acc.type.layout
    DTYPE: gl.constexpr = y.dtype.element_ty
    TOKENS: gl.constexpr = acc.shape[1]
    bias_values, up_bias, residual_values, norm_weight = inputs
    _, token, _, mask, offsets = _output_tile(first_row, first_token, num_tokens, num_out, acc.shape[0], TOKENS, LAYOUT)
    if SCALED:
        SQUARES_LAYOUT: gl.constexpr = first_squares.type.layout
        SQUARES_PER_LOAD: gl.constexpr = first_squares.shape[0]
        sum_squares = gl.sum(first_squares, 0)
        part = gl.arange(0, SQUARES_PER_LOAD, gl.SliceLayout(1, SQUARES_LAYOUT))
        column = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, SQUARES_LAYOUT))
        for base in range(SQUARES_PER_LOAD, num_squares, SQUARES_PER_LOAD):
            valid = (base + part < num_squares)[:, None]
            sum_squares += gl.sum(gl.load(squares + (base + part)[:, None] * PADDED + column[None, :], valid, 0.0), 0)
        scale = gl.rsqrt(gl.convert_layout(sum_squares, gl.SliceLayout(0, LAYOUT)) / num_in + eps)
        acc *= scale[None, :]
        up *= scale[None, :]
    if WITH_BIAS:
        acc += bias_values.to(gl.float32)[:, None]
        up += up_bias.to(gl.float32)[:, None]
    if GATE == "silu":
        acc = acc / (1.0 + gl.exp(-acc)) * up
    if GATE == "gelu":
        acc = acc / (1.0 + gl.exp(-GELU_SLOPE * (acc + 0.044715 * acc * acc * acc))) * up
    if NUM_RANKS > 1:
        acc = sum_over_ranks(acc, ranks, first_row, first_token, num_tokens, num_out, NUM_RANKS)
    if WITH_RESIDUAL:
        acc += residual_values.to(gl.float32)
    rounded = acc.to(DTYPE)
    gl.store(y + offsets, rounded, mask=mask)
    if WITH_NORM:
        wide = gl.where(mask, rounded.to(gl.float32), 0.0)
        gl.store(out_squares + token, gl.sum(wide * wide, 0))
        gl.store(weighted + offsets, (wide * norm_weight.to(gl.float32)[:, None]).to(DTYPE), mask=mask)


@gluon.jit
def load_squares(
    squares, first_token, num_squares, TOKENS: gl.constexpr, PADDED: gl.constexpr, SCALED: gl.constexpr
):  # fmt: skip
    """The first squares of a tile's tokens; loaded early, used in `finish_tile`."""
    LAYOUT: gl.constexpr = squares_layout(TOKENS, gl.num_warps())
    SQUARES_PER_LOAD: gl.constexpr = 4096 // TOKENS
    first_squares = gl.zeros([SQUARES_PER_LOAD, TOKENS], gl.float32, LAYOUT)
    if SCALED:
        part = gl.arange(0, SQUARES_PER_LOAD, gl.SliceLayout(1, LAYOUT))[:, None]
        column = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))[None, :]
        first_squares = gl.load(squares + part * PADDED + column, mask=part < num_squares, other=0.0)
    return first_squares


@gluon.constexpr_function
def finished_layout(acc_layout, rows, splits):
    """Layout of the sums that a program finishes: of its tile, or of its share of the rows."""
    return acc_layout if splits == 1 else _share_layout(rows // splits, acc_layout.warps_per_cta[0])


@gluon.jit
def finish_tile(
    acc, up, first_squares, inputs, squares, y, weighted, out_squares, partial_sums, barriers, ranks,
    tile, first_token, split, num_tokens, num_out, num_in, num_squares, eps,
    PADDED: gl.constexpr, SPLITS: gl.constexpr, GATE: gl.constexpr, SCALED: gl.constexpr, WITH_BIAS: gl.constexpr,
    WITH_RESIDUAL: gl.constexpr, WITH_NORM: gl.constexpr, NUM_RANKS: gl.constexpr,
):  # fmt: skip
    """Exchange the sums [rows, tokens] of programs that share a tile, then finish this program's share.

    ranks  of `sum_over_ranks`, if there are several
    """
    ACC: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    SHARE: gl.constexpr = ROWS // SPLITS
    SHARE_LAYOUT: gl.constexpr = finished_layout(ACC, ROWS, SPLITS)
    first_row = tile * ROWS + split * SHARE
    out_squares += (tile * SPLITS + split) * PADDED
    if SPLITS == 1:
        _epilogue(
            acc, up, squares, first_squares, inputs, y, weighted, out_squares, ranks,
            first_row, first_token, num_tokens, num_out, num_in, num_squares, eps,
            PADDED, GATE, SCALED, WITH_BIAS, WITH_RESIDUAL, WITH_NORM, NUM_RANKS,
        )  # fmt: skip
    else:
        SIZE: gl.constexpr = (2 if GATE != "" else 1) * ROWS * TOKENS  # a token's rows are adjacent
        tile_index = gl.program_id(0) // SPLITS
        tile_sums = partial_sums + tile_index * SPLITS * SIZE
        row = gl.arange(0, ROWS, gl.SliceLayout(1, ACC))[:, None]
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, ACC))[None, :]
        sum_ptrs = tile_sums + split * SIZE + token * ROWS + row
        gl.store(sum_ptrs, acc)
        if GATE != "":
            gl.store(sum_ptrs + ROWS * TOKENS, up)
        sync_programs(barriers + tile_index, split == 0, SPLITS)
        row = split * SHARE + gl.arange(0, SHARE, gl.SliceLayout(1, SHARE_LAYOUT))[:, None]
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, SHARE_LAYOUT))[None, :]
        share = gl.zeros([SHARE, TOKENS], gl.float32, SHARE_LAYOUT)
        up_share = gl.zeros([SHARE, TOKENS], gl.float32, SHARE_LAYOUT)
        for i in gl.static_range(SPLITS):
            ptrs = tile_sums + i * SIZE + token * ROWS + row
            share += gl.load(ptrs, cache_modifier=".cg")
            if GATE != "":
                up_share += gl.load(ptrs + ROWS * TOKENS, cache_modifier=".cg")
        _epilogue(
            share, up_share, squares, first_squares, inputs, y, weighted, out_squares, ranks,
            first_row, first_token, num_tokens, num_out, num_in, num_squares, eps,
            PADDED, GATE, SCALED, WITH_BIAS, WITH_RESIDUAL, WITH_NORM, NUM_RANKS,
        )  # fmt: skip


# Triton's key of a caller depends on whether this key is known. Several kernels call it, in an order of each process.
_ = finish_tile.cache_key


@gluon.jit
def _consumer(
    bias, squares, residual, norm, y, weighted, out_squares, partial_sums, barriers, words, peers, launch_counters,
    status, stop, rank, capacity, spin_limit,
    ring, tile, first_token, split, begin, end, num_tokens, num_out, num_in, num_squares, eps,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, PADDED: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    GATE: gl.constexpr, SCALED: gl.constexpr, WITH_BIAS: gl.constexpr, WITH_RESIDUAL: gl.constexpr,
    WITH_NORM: gl.constexpr, NUM_RANKS: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The four consumer warps, which multiply."""
    HALVES: gl.constexpr = 2 if GATE != "" else 1
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16])
    SHARE: gl.constexpr = ROWS // SPLITS
    tiles, x_tiles, full, free = ring
    wait_for_predecessor(USE_PDL)
    first_squares = load_squares(squares, first_token, num_squares, TOKENS, PADDED, SCALED)
    inputs = load_epilogue_inputs(
        bias, residual, norm, tile * ROWS + split * SHARE, first_token, num_tokens, num_out,
        SHARE, TOKENS, finished_layout(ACC, ROWS, SPLITS), GATE, WITH_BIAS, WITH_RESIDUAL, WITH_NORM,
    )  # fmt: skip
    epoch = rank  # unused by one rank
    if NUM_RANKS > 1:
        epoch = begin_launch(launch_counters)
    ranks = (words, peers, epoch, status, stop, rank, capacity, spin_limit)
    acc = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
    up = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
    for iteration in range(end - begin):
        stage = iteration % STAGES
        mbarrier.wait(full.index(stage), iteration // STAGES % 2)
        x_tile = x_tiles.index(stage).permute((1, 0))
        pending = warpgroup_mma(tiles.index(stage * HALVES), x_tile, acc, is_async=True)
        if GATE != "":
            pending_up = warpgroup_mma(tiles.index(stage * HALVES + 1), x_tile, up, is_async=True)
            acc, up = warpgroup_mma_wait(0, deps=[pending, pending_up])
        else:
            acc = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(free.index(stage), count=1)
    finish_tile(
        acc, up, first_squares, inputs, squares, y, weighted, out_squares, partial_sums, barriers, ranks,
        tile, first_token, split, num_tokens, num_out, num_in, num_squares, eps,
        PADDED, SPLITS, GATE, SCALED, WITH_BIAS, WITH_RESIDUAL, WITH_NORM, NUM_RANKS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens", "num_squares", "rank", "spin_limit"])
def _skinny_hopper(
    xs,
    weights,
    bias,
    squares,
    residual,
    norm,
    y,
    weighted,
    out_squares,
    partial_sums,
    barriers,
    words,
    peers,
    launch_counters,
    status,
    stop,
    num_tokens,
    num_out,
    num_in,
    num_squares,
    eps,
    rank,
    capacity,
    spin_limit,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    PADDED: gl.constexpr,
    COLUMNS: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    GATE: gl.constexpr,
    SCALED: gl.constexpr,
    WITH_BIAS: gl.constexpr,
    WITH_RESIDUAL: gl.constexpr,
    WITH_NORM: gl.constexpr,
    NUM_RANKS: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """A tile of rows, a tile of tokens, and one of SPLITS ranges of the columns; tiles of the same rows are adjacent.

    xs, weights  TMA descriptors of x [num_tokens, num_in] and of the weight
    """
    HALVES: gl.constexpr = 2 if GATE != "" else 1
    DTYPE: gl.constexpr = y.dtype.element_ty
    tile = gl.program_id(0) // (PADDED // TOKENS * SPLITS)
    first_token = gl.program_id(0) // SPLITS % (PADDED // TOKENS) * TOKENS
    split = gl.program_id(0) % SPLITS
    num_steps = (num_in + COLUMNS - 1) // COLUMNS
    begin = split * num_steps // SPLITS
    end = (split + 1) * num_steps // SPLITS
    ring = make_ring(xs, weights, ROWS, TOKENS, COLUMNS, STAGES, HALVES, DTYPE)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    bias, squares, residual, norm, y, weighted, out_squares, partial_sums, barriers,
                    words, peers, launch_counters, status, stop, rank, capacity, spin_limit,
                    ring, tile, first_token, split, begin, end, num_tokens, num_out, num_in, num_squares, eps,
                    ROWS, TOKENS, PADDED, SPLITS, STAGES, GATE, SCALED, WITH_BIAS, WITH_RESIDUAL, WITH_NORM, NUM_RANKS,
                    USE_PDL,
                ),
            ),
            (
                producer,
                (
                    xs, weights, ring, tile, first_token, begin, end, num_out,
                    ROWS, TOKENS, COLUMNS, STAGES, HALVES, USE_PDL,
                ),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
