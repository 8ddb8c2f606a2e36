"""Products of few tokens on Hopper, in Gluon: the weight streams through shared memory.

`thin_linear` starts programs enough to keep the memory busy, and each begins and ends; between two products of a layer
the memory rests. Here the copy engine brings the weight, tile by tile and some tiles ahead, and it begins with that
before the kernel in front has ended: weights are nobody's to write.

A program takes a tile of rows of the weight, or where these are few one of some shares of its columns. Then programs
that share a tile trade: each leaves its sums for all, waits for the others, and adds up a share of the rows, always in
the same order, so that results do not depend on who was last.

    columns     0 1 2 3 4 5 6 7
    program 0   x x x x             of the tile's rows, the first half are added up by program 0
    program 1           x x x x     and the others by program 1
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

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

from octavo.integers import cdiv
from octavo.kernels.reference.norms import Gate
from octavo.kernels.triton.activation import GELU_SLOPE
from octavo.kernels.triton.launch import given, overlapped, wait_for_predecessor

MOST_TOKENS, MOST_TOKENS_OF_SMALL = 64, 256
"""Up to which it has the edge, the second with weights of SMALL_BYTES; it is right with any number."""
SMALL_BYTES = 32 << 20
TILE_TOKENS = 64
MULTIPROCESSORS = 132
"""Of the GPU that tunings are chosen for; they are right on any."""
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
REGISTERS_OF_COPIER = gl.constexpr(40)
"""Of the warp that drives the copy engine: what it gives back is for those that multiply."""


@dataclass(frozen=True, slots=True)
class StreamTuning:
    """rows: of a tile, with a gate of either half of the weight; columns: of a step; splits: programs that share a
    tile; stages: steps in shared memory; registers: of a thread when a program starts."""

    rows: int
    columns: int
    splits: int
    stages: int
    registers: int = 128


def stream_tuning(num_out: int, num_in: int, num_tokens: int, gated: bool) -> StreamTuning:
    """What was fastest on an H200; see benchmarks/kernels/bench_thin_linear.py. All programs are at work at once, most
    often as many as multiprocessors or a few less, so that none begins when others end."""
    if num_tokens > TILE_TOKENS:
        return _many_tuning(num_out, num_in, num_tokens, gated)
    few = num_tokens <= 32
    tiles = triton.cdiv(num_out, 128)
    if tiles > MULTIPROCESSORS:  # two programs fit into each
        return StreamTuning(128, 64, 1, stages=(3 if few else 2) if gated else (5 if few else 4))
    splits = max(1, min(MULTIPROCESSORS // tiles, num_in // 128, 16))
    splits = 1 << (splits.bit_length() - 1)
    if few and not gated:
        return StreamTuning(128, 128, splits, stages=4) if num_in // splits >= 512 else StreamTuning(128, 64, splits, 9)
    if few:
        return StreamTuning(128, 64, splits, stages=5)
    if splits == 1:
        return StreamTuning(128, 64, 1, stages=3 if gated else 5)
    return StreamTuning(64, 64, splits // 2, stages=5 if gated else 8)  # sums of many tokens are much to trade


def _many_tuning(num_out: int, num_in: int, num_tokens: int, gated: bool) -> StreamTuning:
    """Of several tiles of tokens: one program fills a multiprocessor, or where there are more of them, two."""
    tiles = triton.cdiv(num_out, 64) * triton.cdiv(num_tokens, TILE_TOKENS)
    if tiles > MULTIPROCESSORS:
        return StreamTuning(64, 64, 1, stages=4 if gated else 6)
    if gated:
        return StreamTuning(64, 128, 1, stages=4, registers=232)
    splits = 1
    while splits < 8 and 2 * splits * tiles <= MULTIPROCESSORS and num_in >= 256 * splits:
        adds = splits == 1 and num_out <= num_in  # to the stream, which takes long at the end
        if splits * tiles >= 50 and num_in // splits <= 1600 and not adds:
            break
        splits *= 2
    return StreamTuning(64, 128, splits, max(2, min(7, triton.cdiv(num_in, 128 * splits))), registers=232)


def padded_tokens(num_tokens: int) -> int:
    """Whole tiles of TILE_TOKENS, or one of fewer: a matrix instruction has 16 columns, or a multiple."""
    if num_tokens > TILE_TOKENS:
        return cdiv(num_tokens, TILE_TOKENS) * TILE_TOKENS
    return max(16, int(triton.next_power_of_2(num_tokens)))


@functools.cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def can_stream(weight: Tensor) -> bool:
    """Whether this kernel takes it: Hopper, bfloat16, and rows that are a multiple of 16 bytes."""
    return _hopper(weight.device) and weight.dtype == torch.bfloat16 and weight.shape[1] % 8 == 0


@functools.cache
def meeting_places(device: torch.device) -> Tensor:
    """For each tile, where its programs meet; see `meet`."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Gate,
    tuning: StreamTuning,
    *,
    squares: Tensor | None,
    eps: float,
    residual: Tensor | None,
    norm: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """-> y, and with a norm (weighted, squares) of it; see `thin_linear`. All that the copy engine steps over is a
    multiple of 16 bytes. Calls on a device must not overlap: their programs meet at the same places."""
    num_tokens, num_in = x.shape
    num_rows = weight.shape[0]
    num_out, padded = num_rows // (2 if gate else 1), padded_tokens(num_tokens)
    y = torch.empty(num_tokens, num_out, dtype=x.dtype, device=x.device)
    tokens, shares = min(padded, TILE_TOKENS), triton.cdiv(num_out, tuning.rows) * tuning.splits
    programs = shares * (padded // tokens)
    written = None
    if norm is not None:
        written = torch.empty_like(y), torch.empty(shares, padded, dtype=torch.float32, device=x.device)
    num_sums = programs * (num_rows // num_out) * tuning.rows * tokens if tuning.splits > 1 else 0
    xs = TensorDescriptor(x, [num_tokens, num_in], [x.stride(0), 1], [tokens, tuning.columns], LAYOUT)
    weights = TensorDescriptor(weight, [num_rows, num_in], [num_in, 1], [tuning.rows, tuning.columns], LAYOUT)
    _stream_linear[(programs,)](
        xs,
        weights,
        *given(y, bias, squares, residual, norm, y, *(written or (None, None))),
        torch.empty(num_sums, dtype=torch.float32, device=x.device),
        meeting_places(x.device),
        num_tokens,
        num_out,
        num_in,
        0 if squares is None else len(squares),
        eps,
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
        num_warps=4,
        maxnreg=tuning.registers,
        **overlapped(x.device),
    )
    return y, written


@gluon.constexpr_function
def squares_layout(tokens):
    across = max(tokens // 4, 1)
    return gl.BlockedLayout([1, min(tokens, 4)], [32 // across, across], [4, 1], [1, 0])


@gluon.constexpr_function
def _share_layout(rows):
    """Of a share of a tile's rows: a thread has some side by side, as they are stored."""
    return gl.BlockedLayout([min(rows // 8, 4), 1], [8, 4], [1, 4], [0, 1])


@gluon.jit
def make_ring(
    xs, weights, ROWS: gl.constexpr, TOKENS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    HALVES: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """STAGES steps of the weight and of the tokens, and for each the barriers that say that it is there, and free."""
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
def _fetch_weights(
    weights, ring, stage, tile, step, num_out, wanted,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, NUM_BYTES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """A step's part of the weight; NUM_BYTES: with the tokens', which come by `_fetch_tokens`."""
    tiles, _, full, _ = ring
    mbarrier.expect(full.index(stage), NUM_BYTES, pred=wanted)
    for half in gl.static_range(HALVES):
        at = [tile * ROWS + half * num_out, step * COLUMNS]
        into = tiles.index(stage * HALVES + half)
        tma.async_copy_global_to_shared(weights, at, full.index(stage), into, pred=wanted)


@gluon.jit
def _fetch_tokens(xs, ring, stage, first_token, step, wanted, COLUMNS: gl.constexpr):
    _, x_tiles, full, _ = ring
    at = [first_token, step * COLUMNS]
    tma.async_copy_global_to_shared(xs, at, full.index(stage), x_tiles.index(stage), pred=wanted)


@gluon.jit
def produce(
    xs, weights, ring, tile, first_token, begin, end, num_out,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
    OVERLAPPED: gl.constexpr,
):  # fmt: skip
    """The copying warp."""
    NUM_BYTES: gl.constexpr = (HALVES * ROWS + TOKENS) * COLUMNS * 2
    _, _, _, free = ring
    for i in gl.static_range(STAGES):
        step = begin + i
        _fetch_weights(weights, ring, i, tile, step, num_out, step < end, ROWS, COLUMNS, NUM_BYTES, HALVES)
    wait_for_predecessor(OVERLAPPED)
    for i in gl.static_range(STAGES):
        _fetch_tokens(xs, ring, i, first_token, begin + i, begin + i < end, COLUMNS)
    for turn in range(STAGES, end - begin):
        stage = turn % STAGES
        mbarrier.wait(free.index(stage), turn // STAGES % 2 ^ 1)
        _fetch_weights(weights, ring, stage, tile, begin + turn, num_out, True, ROWS, COLUMNS, NUM_BYTES, HALVES)
        _fetch_tokens(xs, ring, stage, first_token, begin + turn, True, COLUMNS)


@gluon.jit
def meet(meeting, is_first, NUM: gl.constexpr):
    """Wait until NUM programs are here, and see what they have written. All that they add together flips the highest
    bit and leaves the others 0, so that nobody has to reset it for the next ones."""
    gl.thread_barrier()
    amount = gl.where(is_first, -(1 << 31) - (NUM - 1) + (1 << 32), 1).to(gl.int32)
    before = gl.atomic_add(meeting, amount, sem="acq_rel")
    now = before + amount
    while (before ^ now) >= 0:
        now = gl.atomic_add(meeting, 0, sem="acquire")


@gluon.jit
def _places(
    first_row, first_token, num_tokens, num_out, ROWS: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Of some rows and tokens of y: the rows, the tokens, which rows there are, which of all, and where they lie."""
    out = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    is_row = out < num_out
    here = is_row[:, None] & (token < num_tokens)[None, :]
    return out, token, is_row, here, token[None, :] * num_out + out[:, None]


@gluon.jit
def _ask_for(
    bias, residual, norm, first_row, first_token, num_tokens, num_out,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr, GATE: gl.constexpr, WITH_BIAS: gl.constexpr,
    WITH_RESIDUAL: gl.constexpr, WITH_NORM: gl.constexpr,
):  # fmt: skip
    """What `_finish` adds to the sums or multiplies them by, as it is in memory; zeros for what is not there."""
    out, _, is_row, here, place = _places(first_row, first_token, num_tokens, num_out, ROWS, TOKENS, LAYOUT)
    own_bias = gl.zeros([ROWS], bias.dtype.element_ty, gl.SliceLayout(1, LAYOUT))
    up_bias = own_bias
    factor = gl.zeros([ROWS], norm.dtype.element_ty, gl.SliceLayout(1, LAYOUT))
    added = gl.zeros([ROWS, TOKENS], residual.dtype.element_ty, LAYOUT)
    if WITH_BIAS:
        own_bias = gl.load(bias + out, mask=is_row, other=0.0)
        if GATE != "":
            up_bias = gl.load(bias + num_out + out, mask=is_row, other=0.0)
    if WITH_RESIDUAL:
        added = gl.load(residual + place, mask=here, other=0.0)
    if WITH_NORM:
        factor = gl.load(norm + out, mask=is_row, other=0.0)
    return own_bias, up_bias, added, factor


@gluon.jit
def _finish(
    acc, up, squares, some_squares, asked_for, y, weighted, own_squares,
    first_row, first_token, num_tokens, num_out, num_in, num_squares, eps,
    PADDED: gl.constexpr, GATE: gl.constexpr, SCALED: gl.constexpr, WITH_BIAS: gl.constexpr,
    WITH_RESIDUAL: gl.constexpr, WITH_NORM: gl.constexpr,
):  # fmt: skip
    """Sums of some rows, [rows, tokens], to what is stored of them. own_squares: [PADDED], of these rows alone."""
    LAYOUT: gl.constexpr = acc.type.layout
    DTYPE: gl.constexpr = y.dtype.element_ty
    TOKENS: gl.constexpr = acc.shape[1]
    own_bias, up_bias, added, factor = asked_for
    _, token, _, here, place = _places(first_row, first_token, num_tokens, num_out, acc.shape[0], TOKENS, LAYOUT)
    if SCALED:
        PARTS: gl.constexpr = some_squares.type.layout
        AT_ONCE: gl.constexpr = some_squares.shape[0]
        sums = gl.sum(some_squares, 0)
        part = gl.arange(0, AT_ONCE, gl.SliceLayout(1, PARTS))
        column = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, PARTS))
        for first in range(AT_ONCE, num_squares, AT_ONCE):
            inside = (first + part < num_squares)[:, None]
            sums += gl.sum(gl.load(squares + (first + part)[:, None] * PADDED + column[None, :], inside, 0.0), 0)
        scale = gl.rsqrt(gl.convert_layout(sums, gl.SliceLayout(0, LAYOUT)) / num_in + eps)
        acc *= scale[None, :]
        up *= scale[None, :]
    if WITH_BIAS:
        acc += own_bias.to(gl.float32)[:, None]
        up += up_bias.to(gl.float32)[:, None]
    if GATE == "silu":
        acc = acc / (1.0 + gl.exp(-acc)) * up
    if GATE == "gelu":
        acc = acc / (1.0 + gl.exp(-GELU_SLOPE * (acc + 0.044715 * acc * acc * acc))) * up
    if WITH_RESIDUAL:
        acc += added.to(gl.float32)
    rounded = acc.to(DTYPE)
    gl.store(y + place, rounded, mask=here)
    if WITH_NORM:
        wide = gl.where(here, rounded.to(gl.float32), 0.0)
        gl.store(own_squares + token, gl.sum(wide * wide, 0))
        gl.store(weighted + place, (wide * factor.to(gl.float32)[:, None]).to(DTYPE), mask=here)


@gluon.jit
def _consume(
    bias, squares, residual, norm, y, weighted, own_squares, parts, meetings,
    ring, tile, first_token, split, begin, end, num_tokens, num_out, num_in, num_squares, eps,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, PADDED: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    GATE: gl.constexpr, SCALED: gl.constexpr, WITH_BIAS: gl.constexpr, WITH_RESIDUAL: gl.constexpr,
    WITH_NORM: gl.constexpr, OVERLAPPED: gl.constexpr,
):  # fmt: skip
    """The four warps that multiply."""
    HALVES: gl.constexpr = 2 if GATE != "" else 1
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16])
    PARTS: gl.constexpr = squares_layout(TOKENS)
    AT_ONCE: gl.constexpr = 4096 // TOKENS  # parts of squares
    tiles, x_tiles, full, free = ring
    wait_for_predecessor(OVERLAPPED)
    some_squares = gl.zeros([AT_ONCE, TOKENS], gl.float32, PARTS)
    # All of this is asked for now, and needed at the end.
    if SCALED:
        part = gl.arange(0, AT_ONCE, gl.SliceLayout(1, PARTS))[:, None]
        column = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, PARTS))[None, :]
        some_squares = gl.load(squares + part * PADDED + column, mask=part < num_squares, other=0.0)
    SHARE: gl.constexpr = ROWS // SPLITS
    SHARED: gl.constexpr = ACC if SPLITS == 1 else _share_layout(SHARE)
    first_row = tile * ROWS + split * SHARE
    asked_for = _ask_for(
        bias, residual, norm, first_row, first_token, num_tokens, num_out,
        SHARE, TOKENS, SHARED, GATE, WITH_BIAS, WITH_RESIDUAL, WITH_NORM,
    )  # fmt: skip
    acc = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
    up = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
    for turn in range(end - begin):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES % 2)
        x_tile = x_tiles.index(stage).permute((1, 0))
        pending = warpgroup_mma(tiles.index(stage * HALVES), x_tile, acc, is_async=True)
        if GATE != "":
            pending_up = warpgroup_mma(tiles.index(stage * HALVES + 1), x_tile, up, is_async=True)
            acc, up = warpgroup_mma_wait(0, deps=[pending, pending_up])
        else:
            acc = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(free.index(stage), count=1)

    own_squares += (tile * SPLITS + split) * PADDED
    if SPLITS == 1:
        _finish(
            acc, up, squares, some_squares, asked_for, y, weighted, own_squares,
            first_row, first_token, num_tokens, num_out, num_in, num_squares, eps,
            PADDED, GATE, SCALED, WITH_BIAS, WITH_RESIDUAL, WITH_NORM,
        )  # fmt: skip
    else:
        SIZE: gl.constexpr = HALVES * ROWS * TOKENS  # a token's rows are side by side
        group = gl.program_id(0) // SPLITS
        theirs = parts + group * SPLITS * SIZE
        row = gl.arange(0, ROWS, gl.SliceLayout(1, ACC))[:, None]
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, ACC))[None, :]
        own = theirs + split * SIZE + token * ROWS + row
        gl.store(own, acc)
        if GATE != "":
            gl.store(own + ROWS * TOKENS, up)
        meet(meetings + group, split == 0, SPLITS)
        row = split * SHARE + gl.arange(0, SHARE, gl.SliceLayout(1, SHARED))[:, None]
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, SHARED))[None, :]
        share = gl.zeros([SHARE, TOKENS], gl.float32, SHARED)
        upper_share = gl.zeros([SHARE, TOKENS], gl.float32, SHARED)
        for i in gl.static_range(SPLITS):
            at = theirs + i * SIZE + token * ROWS + row
            share += gl.load(at, cache_modifier=".cg")
            if GATE != "":
                upper_share += gl.load(at + ROWS * TOKENS, cache_modifier=".cg")
        _finish(
            share, upper_share, squares, some_squares, asked_for, y, weighted, own_squares,
            first_row, first_token, num_tokens, num_out, num_in, num_squares, eps,
            PADDED, GATE, SCALED, WITH_BIAS, WITH_RESIDUAL, WITH_NORM,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens", "num_squares"])
def _stream_linear(
    xs,
    weights,
    bias,
    squares,
    residual,
    norm,
    y,
    weighted,
    own_squares,
    parts,
    meetings,
    num_tokens,
    num_out,
    num_in,
    num_squares,
    eps,
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
    OVERLAPPED: gl.constexpr,
):
    """A tile of rows, one of tokens, and one of SPLITS parts of the columns; tiles of the same rows are side by side.
    xs, weights: descriptions of x [num_tokens, num_in] and the weight."""
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
                _consume,
                (
                    bias, squares, residual, norm, y, weighted, own_squares, parts, meetings,
                    ring, tile, first_token, split, begin, end, num_tokens, num_out, num_in, num_squares, eps,
                    ROWS, TOKENS, PADDED, SPLITS, STAGES, GATE, SCALED, WITH_BIAS, WITH_RESIDUAL, WITH_NORM, OVERLAPPED,
                ),
            ),
            (
                produce,
                (
                    xs, weights, ring, tile, first_token, begin, end, num_out,
                    ROWS, TOKENS, COLUMNS, STAGES, HALVES, OVERLAPPED,
                ),
            ),
        ],
        [1],
        [REGISTERS_OF_COPIER],
    )  # fmt: skip
