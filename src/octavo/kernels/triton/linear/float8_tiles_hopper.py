"""Products of float8 weights for many tokens on Hopper, in Gluon: both operands in float8, sums in float32.

The tensor cores add 128 inputs with 14 bits. Such a sum is multiplied by its scales and added to the others in float32,
while the other group of warps has the tensor cores (DeepGEMM's scheme, which the library has, too). Tiles are larger
than the library's, so less is read from the cache, and `stream_k_hopper` divides them among programs.

A producer warp copies both operands by TMA, some steps ahead; the first weights before the previous kernel has ended.
Two groups of four warps have the tokens of a tile, and half of its outputs each. A weight has a scale for each block of
128 x 128, or one an output. x has a scale for each 128 inputs of a token, or one a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
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
from octavo.kernels.triton.launch import or_placeholder, pdl_options, wait_for_predecessor
from octavo.kernels.triton.linear.grouped_kernels import FLOAT8_GROUP, TILE_OUTPUTS
from octavo.kernels.triton.linear.stream_k_hopper import (
    add_sums,
    boundary,
    flags_of,
    load_item,
    num_items,
    num_programs,
    rows_layout,
    share,
    signal,
    store_sums,
    wait,
)
from octavo.kernels.triton.linear.tuning import TilesTuning

if TYPE_CHECKING:
    from octavo.kernels.triton.linear.grouped import GroupedWeight

VALUE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
SCALE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
REGISTERS = gl.constexpr([240, 40])
"""Of a thread of the second group of consumer warps, and of the producer warp."""
MIN_STEPS = gl.constexpr(8)
"""See `stream_k_hopper`."""
PART = gl.constexpr(64)
"""Tokens of a matrix instruction."""


def launch(
    weight: GroupedWeight,
    values: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    tuning: TilesTuning,
    *,
    out: Tensor,
) -> None:
    """Writes out = x @ weight.T + bias; `quantise` made values and scales of x. For TMA, out has rows of 16 bytes.

    Launches on a device must not overlap: they share flags.
    """
    num_tokens, num_steps, rows = len(out), values.shape[1] // FLOAT8_GROUP, 2 * tuning.rows
    token_tiles = cdiv(num_tokens, tuning.tokens)
    num_tiles = cdiv(weight.num_out, rows) * token_tiles
    programs = num_programs(out.device, num_tiles, num_steps, MIN_STEPS.value)
    y_layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    by_row = weight.kind == "row"
    words = weight.words.view(len(weight.words) * TILE_OUTPUTS, -1)
    _float8_tiles[(programs,)](
        TensorDescriptor.from_tensor(values, [tuning.tokens, FLOAT8_GROUP], VALUE_LAYOUT),
        TensorDescriptor.from_tensor(words, [rows, FLOAT8_GROUP], VALUE_LAYOUT),
        TensorDescriptor.from_tensor(scales.view(-1, 16), [tuning.tokens // 16, 16], SCALE_LAYOUT),
        TensorDescriptor.from_tensor(weight.planes.view(torch.float32).view(-1, 16), [rows // 16, 16], SCALE_LAYOUT),
        TensorDescriptor(out, [num_tokens, weight.num_out], [out.stride(0), 1], [PART.value, tuning.rows], y_layout),
        scales,
        weight.planes,
        *or_placeholder(out, bias),
        torch.empty(programs * rows * tuning.tokens, dtype=torch.float32, device=out.device),
        flags_of(out.device),
        num_tiles,
        token_tiles,
        num_steps,
        num_tokens,
        weight.num_out,
        scales.stride(0) // 16,
        0 if by_row else weight.planes.stride(0) // 16,
        STEP=FLOAT8_GROUP,
        BY_ROW=by_row,
        ROWS=tuning.rows,
        TOKENS=tuning.tokens,
        STAGES=tuning.stages,
        WITH_BIAS=bias is not None,
        num_warps=4,
        **pdl_options(out.device),
    )


@gluon.jit
def _copy(
    values, scales, tiles, scale_tiles, full, stage, first, step, lines, STEP: gl.constexpr, BY_ROW: gl.constexpr
):  # fmt: skip
    """Copy a step of an operand from its row `first` on, and its scales."""
    bar = full.index(stage)
    tma.async_copy_global_to_shared(values, [first, step * STEP], bar, tiles.index(stage))
    if not BY_ROW:
        place = [step * lines + first // 16, 0]
        tma.async_copy_global_to_shared(scales, place, bar, scale_tiles.index(stage))


@gluon.jit
def _produce(
    xs, words, x_scales, w_scales, ring, num_tiles, token_tiles, num_steps, x_lines, w_lines,
    STEP: gl.constexpr, BY_ROW: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp, which issues TMA copies."""
    NUM_BYTES: gl.constexpr = (TOKENS + 2 * ROWS) * (STEP + (0 if BY_ROW else 4))
    x_tiles, w_tiles, x_scale_tiles, w_scale_tiles, full, free = ring
    rounds, _, _, begin, end = share(num_tiles, num_steps, MIN_STEPS)
    tile, first, stop = load_item(0, rounds, begin, end, num_steps)
    ahead = gl.minimum(stop - first, STAGES)  # no kernel writes weights
    for i in range(ahead):
        mbarrier.expect(full.index(i), NUM_BYTES)
        first_row = tile // token_tiles * 2 * ROWS
        _copy(
            words, w_scales, w_tiles, w_scale_tiles, full, i, first_row, first + i, w_lines, STEP, BY_ROW
        )  # fmt: skip
    wait_for_predecessor(USE_PDL)
    iteration = 0
    for item in range(num_items(rounds, begin, end, num_steps)):
        tile, first, stop = load_item(item, rounds, begin, end, num_steps)
        first_row = tile // token_tiles * 2 * ROWS
        first_token = tile % token_tiles * TOKENS
        for step in range(first, stop):
            stage = iteration % STAGES
            if iteration >= ahead:
                mbarrier.wait(free.index(stage), iteration // STAGES % 2 ^ 1)
                mbarrier.expect(full.index(stage), NUM_BYTES)
            _copy(xs, x_scales, x_tiles, x_scale_tiles, full, stage, first_token, step, x_lines, STEP, BY_ROW)
            if iteration >= ahead:
                _copy(words, w_scales, w_tiles, w_scale_tiles, full, stage, first_row, step, w_lines, STEP, BY_ROW)
            iteration += 1


@gluon.jit
def _add_part(acc, x_tile, w_tile, x_scales, w_scales, INDEX: gl.constexpr, BY_ROW: gl.constexpr):
    """acc + a step's products of PART of the tokens, times their scales."""
    part = warpgroup_mma(
        x_tile.slice(INDEX * PART, PART, dim=0),
        w_tile.permute((1, 0)),
        gl.zeros_like(acc),
        use_acc=False,
        is_async=True,
    )
    if BY_ROW:
        return acc + warpgroup_mma_wait(0, deps=[part])
    BY_TOKEN: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    scale = x_scales.slice(INDEX * (PART // 16), PART // 16, dim=0).load(rows_layout(PART))
    scale *= w_scales.load(rows_layout(PART))  # the same for all outputs
    scale = gl.convert_layout(scale.reshape([PART]), BY_TOKEN, assert_trivial=True)
    return acc + warpgroup_mma_wait(0, deps=[part]) * scale[:, None]


@gluon.jit
def _finish(
    acc, ys, y_tile, scales, row_scales, bias, first_token, first_row, num_tokens, num_out,
    BY_ROW: gl.constexpr, WITH_BIAS: gl.constexpr,
):  # fmt: skip
    """Stores a group's outputs of PART tokens."""
    token = first_token + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    row = first_row + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    if BY_ROW:
        acc *= gl.load(scales + token, mask=token < num_tokens, other=0.0)[:, None]
        acc *= gl.load(row_scales + row, mask=row < num_out, other=0.0)[None, :]
    if WITH_BIAS:
        acc += gl.load(bias + row, mask=row < num_out, other=0.0).to(gl.float32)[None, :]
    tma.store_wait(0)  # of the tokens before
    gl.thread_barrier()
    y_tile.store(acc.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(ys, [first_token, first_row], y_tile)


@gluon.jit
def _consume(
    ys, scales, row_scales, bias, partial_sums, flags, ring, y_tiles, num_tiles, token_tiles, num_steps, num_tokens,
    num_out, GROUP: gl.constexpr, BY_ROW: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, WITH_BIAS: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """One of the two groups of four consumer warps: ROWS outputs of each tile."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 32])
    TWO: gl.constexpr = TOKENS == 2 * PART
    SIZE: gl.constexpr = ROWS * PART
    x_tiles, w_tiles, x_scale_tiles, w_scale_tiles, full, free = ring
    y_tile = y_tiles.index(GROUP)
    wait_for_predecessor(USE_PDL)
    program = gl.program_id(0)
    rounds, last_steps, num_parts, begin, end = share(num_tiles, num_steps, MIN_STEPS)
    iteration = 0
    for item in range(num_items(rounds, begin, end, num_steps)):
        tile, first, stop = load_item(item, rounds, begin, end, num_steps)
        first_row = (2 * (tile // token_tiles) + GROUP) * ROWS
        first_token = tile % token_tiles * TOKENS
        acc = gl.zeros([PART, ROWS], gl.float32, ACC)
        other_acc = acc
        for _ in range(first, stop):
            stage = iteration % STAGES
            mbarrier.wait(full.index(stage), iteration // STAGES % 2)
            x_tile = x_tiles.index(stage)
            w_tile = w_tiles.index(stage).slice(GROUP * ROWS, ROWS, dim=0)
            w_scales = w_scale_tiles.index(stage).slice(GROUP * (ROWS // 16), PART // 16, dim=0)
            x_scales = x_scale_tiles.index(stage)
            acc = _add_part(acc, x_tile, w_tile, x_scales, w_scales, 0, BY_ROW)
            if TWO:
                other_acc = _add_part(other_acc, x_tile, w_tile, x_scales, w_scales, 1, BY_ROW)
            if not BY_ROW:
                fence_async_shared()  # as in `grouped_hopper`: the scales were read
            gl.thread_barrier()  # all warps have read the step
            mbarrier.arrive(free.index(stage), count=1)
            iteration += 1
        if first > 0:
            own_sums = partial_sums + (2 * program + GROUP) * (TOKENS // PART) * SIZE
            store_sums(own_sums, acc)
            if TWO:
                store_sums(own_sums + SIZE, other_acc)
            signal(flags + 2 * program + GROUP)
        else:
            other = program + 1
            tile_end = gl.where(stop < num_steps, (end // num_steps + 1) * num_steps, 0)
            while boundary(other, num_steps, last_steps, num_parts, MIN_STEPS) < tile_end:
                sums = partial_sums + (2 * other + GROUP) * (TOKENS // PART) * SIZE
                wait(flags + 2 * other + GROUP)
                acc = add_sums(sums, acc)
                if TWO:
                    other_acc = add_sums(sums + SIZE, other_acc)
                other += 1
            _finish(
                acc, ys, y_tile, scales, row_scales, bias, first_token, first_row, num_tokens, num_out, BY_ROW,
                WITH_BIAS,
            )  # fmt: skip
            if TWO:
                _finish(
                    other_acc, ys, y_tile, scales, row_scales, bias, first_token + PART, first_row, num_tokens,
                    num_out, BY_ROW, WITH_BIAS,
                )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tiles", "token_tiles", "num_steps", "num_tokens", "num_out", "x_lines", "w_lines"])
def _float8_tiles(
    xs,
    words,
    x_scales,
    w_scales,
    ys,
    scales,
    row_scales,
    bias,
    partial_sums,
    flags,
    num_tiles,
    token_tiles,
    num_steps,
    num_tokens,
    num_out,
    x_lines,
    w_lines,
    STEP: gl.constexpr,
    BY_ROW: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    WITH_BIAS: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """Persistent kernel: at most one program for each multiprocessor. Tiles of the same outputs are adjacent.

    ROWS                outputs of a group of warps: half of a tile, within a block of the weight
    x_lines, w_lines    lines of 16 scales of a group of inputs: of all tokens, of all outputs
    scales, row_scales  BY_ROW: of tokens, of outputs
    """
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TOKENS, STEP], xs.layout)
    w_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 2 * ROWS, STEP], words.layout)
    x_scale_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS // 16, 16], x_scales.layout)
    w_scale_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * ROWS // 16, 16], w_scales.layout)
    y_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, PART, ROWS], ys.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    ring = (x_tiles, w_tiles, x_scale_tiles, w_scale_tiles, full, free)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    ys, scales, row_scales, bias, partial_sums, flags, ring, y_tiles, num_tiles, token_tiles,
                    num_steps, num_tokens, num_out, 0, BY_ROW, ROWS, TOKENS, STAGES, WITH_BIAS, USE_PDL,
                ),
            ),
            (
                _consume,
                (
                    ys, scales, row_scales, bias, partial_sums, flags, ring, y_tiles, num_tiles, token_tiles,
                    num_steps, num_tokens, num_out, 1, BY_ROW, ROWS, TOKENS, STAGES, WITH_BIAS, USE_PDL,
                ),
            ),
            (
                _produce,
                (
                    xs, words, x_scales, w_scales, ring, num_tiles, token_tiles, num_steps, x_lines, w_lines,
                    STEP, BY_ROW, ROWS, TOKENS, STAGES, USE_PDL,
                ),
            ),
        ],
        [4, 1],
        REGISTERS.value,
    )  # fmt: skip
