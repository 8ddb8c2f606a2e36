"""Products of integer weights for many tokens on Hopper, in Gluon: the words become an operand in registers.

The kernel is persistent, as that of prefill attention: a producer warp copies words and tokens by TMA, some steps
ahead, and two groups of four warps multiply. Each group has its own outputs, and unpacks the next inputs' words while
the tensor cores multiply the last. A weight is multiplied by its scale before it is an operand, so it is the number in
bfloat16 that `GroupedWeight.dequantised` has, and all inputs have one sum.

`stream_k_hopper` divides tiles among programs.
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.integers import cdiv
from octavo.kernels.triton.launch import or_placeholder, pdl_options, wait_for_predecessor
from octavo.kernels.triton.linear.grouped_hopper import WORD_LAYOUT, lines_of_step
from octavo.kernels.triton.linear.grouped_kernels import (
    INT4_RESULTS,
    INT4_VALUES,
    INT8_RESULTS,
    INT8_VALUES,
    join_int4,
    join_int8,
    order_words,
    read_half,
    unpack,
)
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
from octavo.kernels.triton.linear.tuning import TILE_INPUTS, TilesTuning

if TYPE_CHECKING:
    from octavo.kernels.triton.linear.grouped import GroupedWeight

PLANE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
REGISTERS = gl.constexpr([232, 40])
"""Of a thread of the second group of consumer warps, and of the producer warp."""
MIN_STEPS = gl.constexpr(4)
"""See `stream_k_hopper`."""

# As in `grouped_kernels`, with a scale, by which the values are multiplied.
SCALE_INT4 = gl.constexpr(
    "{" + INT4_VALUES + "".join(f"mul.rn.bf16x2 {x}, {x}, $10;\n" for x in "pqtu") + INT4_RESULTS + "}"
)
"""The scale comes twice, in bfloat16."""
WIDE_PAIR = """
shl.b32 s, {0}, 16;
mov.b32 x, s;
and.b32 s, {0}, 0xFFFF0000;
mov.b32 y, s;
mul.rn.f32 x, x, $10;
mul.rn.f32 y, y, $10;
cvt.rn.bf16x2.f32 {0}, y, x;
"""
SCALE_INT4_WIDE = gl.constexpr(
    "{.reg .f32 x, y;" + INT4_VALUES + "".join(WIDE_PAIR.format(x) for x in "pqtu") + INT4_RESULTS + "}"
)
"""The scale is in float32."""
SCALE_INT8 = gl.constexpr(
    "{" + INT8_VALUES + "".join(f"mul.rn.f32 {x}, {x}, $6;\n" for x in "abcd") + INT8_RESULTS + "}"
)
"""The scale is in float32."""


def launch(weight: GroupedWeight, x: Tensor, bias: Tensor | None, tuning: TilesTuning, *, out: Tensor) -> None:
    """Writes out = x @ weight.T + bias. Strides of x and out are multiples of 16 bytes, for TMA.

    Launches on a device must not overlap: they share flags.
    """
    num_tokens, rows = len(x), 2 * tuning.rows
    token_tiles, num_steps = cdiv(num_tokens, tuning.tokens), cdiv(weight.num_in, TILE_INPUTS)
    num_tiles = cdiv(weight.num_out, rows) * token_tiles
    programs = num_programs(x.device, num_tiles, num_steps, MIN_STEPS.value)
    chunk = min(weight.columns, 64)
    x_layout = gl.NVMMASharedLayout(swizzle_byte_width=2 * chunk, element_bitwidth=16, rank=2)
    y_layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    num_planes = 0 if weight.kind == "row" else cdiv(TILE_INPUTS, weight.scaled_inputs)
    _grouped_tiles[(programs,)](
        TensorDescriptor(x, [num_tokens, weight.num_in], [x.stride(0), 1], [tuning.tokens, chunk], x_layout),
        TensorDescriptor.from_tensor(
            weight.words.view(torch.int32).view(-1, 32), [lines_of_step(weight.format, TILE_INPUTS), 32], WORD_LAYOUT
        ),
        TensorDescriptor.from_tensor(
            weight.planes.view(torch.int32).view(-1, 16), [tuning.rows // 16, 16], PLANE_LAYOUT
        ),
        TensorDescriptor(out, [num_tokens, weight.num_out], [out.stride(0), 1], [tuning.tokens, tuning.rows], y_layout),
        weight.planes,
        *or_placeholder(out, bias),
        torch.empty(programs * rows * tuning.tokens, dtype=torch.float32, device=x.device),
        flags_of(x.device),
        num_tiles,
        token_tiles,
        num_steps,
        weight.num_out,
        weight.words.shape[1] // 32,
        weight.planes.stride(0) // 16,
        **weight.constants(),
        STEP=TILE_INPUTS,
        CHUNK=chunk,
        NUM_PLANES=num_planes,
        ROWS=tuning.rows,
        TOKENS=tuning.tokens,
        STAGES=tuning.stages,
        WITH_BIAS=bias is not None,
        num_warps=4,
        **pdl_options(x.device),
    )


# -- producer ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _produce(
    xs, words, planes, ring, num_tiles, token_tiles, num_steps, tile_lines, plane_lines,
    FORMAT: gl.constexpr, PLANES: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr, CHUNK: gl.constexpr,
    NUM_PLANES: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp, which issues TMA copies."""
    LINES: gl.constexpr = lines_of_step(FORMAT, STEP)
    WORD_TILES: gl.constexpr = ROWS // 64
    PLANE_STEPS: gl.constexpr = max(COLUMNS * (2 if PLANES == "pair" else 1) // STEP, 1)
    NUM_BYTES: gl.constexpr = (WORD_TILES * LINES * 32 + 2 * NUM_PLANES * ROWS) * 4 + TOKENS * STEP * 2
    word_tiles, plane_tiles, x_tiles, full, free = ring
    wait_for_predecessor(USE_PDL)
    rounds, _, _, begin, end = share(num_tiles, num_steps, MIN_STEPS)
    iteration = 0
    for item in range(num_items(rounds, begin, end, num_steps)):
        tile, first, stop = load_item(item, rounds, begin, end, num_steps)
        out_tile = tile // token_tiles
        first_token = tile % token_tiles * TOKENS
        for step in range(first, stop):
            stage = iteration % STAGES
            mbarrier.wait(free.index(stage), iteration // STAGES % 2 ^ 1)
            mbarrier.expect(full.index(stage), NUM_BYTES)
            for i in gl.static_range(WORD_TILES):
                place = [(out_tile * WORD_TILES + i) * tile_lines + step * LINES, 0]
                target = word_tiles.index(stage * WORD_TILES + i)
                tma.async_copy_global_to_shared(words, place, full.index(stage), target)
            for i in gl.static_range(2 * NUM_PLANES):
                plane = step // PLANE_STEPS * NUM_PLANES + i // 2
                place = [plane * plane_lines + (2 * out_tile + i % 2) * (ROWS // 16), 0]
                target = plane_tiles.index(stage * 2 * NUM_PLANES + i)
                tma.async_copy_global_to_shared(planes, place, full.index(stage), target)
            for i in gl.static_range(STEP // CHUNK):
                place = [first_token, step * STEP + i * CHUNK]
                target = x_tiles.index(stage * (STEP // CHUNK) + i)
                tma.async_copy_global_to_shared(xs, place, full.index(stage), target)
            iteration += 1


# -- consumers --------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _words_layout(format, lines):
    """Of lines of 32 words of a tile: a thread of four warps has those of its operand."""
    first, rep = (16, [0, 2]) if format == "int4" else (32, [16, 0])
    own = [[0, 1], rep] if format == "int4" else [[0, 1], [0, 2], rep]
    while first < lines:
        own.append([first, 0])
        first *= 2
    return gl.DistributedLinearLayout(own, [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[4, 0], [8, 0]], [], [lines, 32])


@gluon.jit
def _scaled(words, plane, half, FORMAT: gl.constexpr, PLANES: gl.constexpr, ZERO: gl.constexpr, SCALES: gl.constexpr):
    """Words [rows, words], a word of the planes for each row -> weights [rows, inputs] in bfloat16.

    half  of a pair, the index of the scale
    """
    zero = ZERO
    if PLANES == "zero":
        zero = (plane >> 16) & 255
        zero = zero[:, None]
    if PLANES == "pair":
        plane = plane >> (half * 16)
    if FORMAT == "int4":
        zeros = words * 0 + zero * 0x00010001
        if PLANES != "wide" and SCALES == "bfloat16":
            a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
                SCALE_INT4, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [words, zeros, ((plane & 0xFFFF) * 0x00010001)[:, None]],
                (gl.bfloat16,) * 8, True, 1,
            )  # fmt: skip
        else:
            scale = plane.to(gl.float32, bitcast=True) if PLANES == "wide" else read_half(plane, 0, SCALES)
            a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
                SCALE_INT4_WIDE, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,f", [words, zeros, scale[:, None]],
                (gl.bfloat16,) * 8, True, 1,
            )  # fmt: skip
        return join_int4(a, b, c, d, e, f, g, h)
    else:
        zeros = words * 0 + zero
        scale = plane.to(gl.float32, bitcast=True) if PLANES == "wide" else read_half(plane, 0, SCALES)
        a, b, c, d = gl.inline_asm_elementwise(
            SCALE_INT8, "=h,=h,=h,=h,r,r,f", [words, zeros, scale[:, None]], (gl.bfloat16,) * 4, True, 1
        )
        return join_int8(a, b, c, d)


@gluon.jit
def _operand(
    tile, plane_tile, first, half, GROUP: gl.constexpr, FORMAT: gl.constexpr, PLANES: gl.constexpr,
    ZERO: gl.constexpr, SCALES: gl.constexpr, CHUNK: gl.constexpr, ROWS: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """CHUNK inputs of the group's outputs, from `first` on: an operand of the matrix instruction."""
    LINES: gl.constexpr = lines_of_step(FORMAT, 32)
    BLOCKS: gl.constexpr = CHUNK // 32
    words = tile.slice(first // 32 * LINES, BLOCKS * LINES, dim=0).load(_words_layout(FORMAT, BLOCKS * LINES))
    if ROWS == 128:
        words = order_words(words, FORMAT, CHUNK)
    else:  # half of the tile's outputs
        if FORMAT == "int4":
            words = words.reshape([BLOCKS, 4, 8, 4, 2, 2]).permute((1, 5, 2, 0, 3, 4)).reshape([64, BLOCKS * 4, 2])
        else:
            words = words.reshape([BLOCKS, 2, 4, 8, 4, 2, 2]).permute((2, 5, 3, 0, 6, 4, 1))
            words = words.reshape([64, BLOCKS * 8, 2])
        lower, upper = gl.split(words)
        words = lower if GROUP == 0 else upper
    if PLANES == "row":
        values = unpack(words, ZERO, FORMAT, gl.bfloat16, True)
    else:
        plane = plane_tile.load(rows_layout(ROWS)).reshape([ROWS])
        plane = gl.convert_layout(plane, gl.SliceLayout(1, words.type.layout), assert_trivial=True)
        values = _scaled(words, plane, half, FORMAT, PLANES, ZERO, SCALES)
    return gl.convert_layout(values, gl.DotOperandLayout(0, ACC, 2), assert_trivial=True)


@gluon.jit
def _consume(
    ys, row_scales, bias, partial_sums, flags, ring, y_tiles, num_tiles, token_tiles, num_steps, num_out,
    GROUP: gl.constexpr, FORMAT: gl.constexpr, PLANES: gl.constexpr, COLUMNS: gl.constexpr, ZERO: gl.constexpr,
    SCALES: gl.constexpr, STEP: gl.constexpr, CHUNK: gl.constexpr, NUM_PLANES: gl.constexpr, ROWS: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, WITH_BIAS: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """One of the two groups of four consumer warps: ROWS outputs of each tile."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16])
    CHUNKS: gl.constexpr = STEP // CHUNK
    PAIRS: gl.constexpr = 2 if PLANES == "pair" else 1
    WORD_TILES: gl.constexpr = ROWS // 64
    WORD_TILE: gl.constexpr = GROUP if ROWS == 128 else 0
    SIZE: gl.constexpr = ROWS * TOKENS
    word_tiles, plane_tiles, x_tiles, full, free = ring
    y_tile = y_tiles.index(GROUP)
    wait_for_predecessor(USE_PDL)
    program = gl.program_id(0)
    rounds, last_steps, num_parts, begin, end = share(num_tiles, num_steps, MIN_STEPS)
    iteration = 0
    for item in range(num_items(rounds, begin, end, num_steps)):
        tile, first, stop = load_item(item, rounds, begin, end, num_steps)
        first_row = (2 * (tile // token_tiles) + GROUP) * ROWS
        acc = warpgroup_mma_init(gl.zeros([ROWS, TOKENS], gl.float32, ACC))
        for step in range(first, stop):
            stage = iteration % STAGES
            mbarrier.wait(full.index(stage), iteration // STAGES % 2)
            words = word_tiles.index(stage * WORD_TILES + WORD_TILE)
            for i in gl.static_range(CHUNKS):
                if PLANES == "row":
                    plane_tile = words
                    half = 0
                else:
                    group = i * CHUNK // COLUMNS  # of the step
                    plane_tile = plane_tiles.index((stage * NUM_PLANES + group // PAIRS) * 2 + GROUP)
                    half = step % 2 if COLUMNS == STEP else group % 2
                operand = _operand(
                    words, plane_tile, i * CHUNK, half, GROUP, FORMAT, PLANES, ZERO, SCALES, CHUNK, ROWS, ACC
                )
                x_tile = x_tiles.index(stage * CHUNKS + i).permute((1, 0))
                acc = warpgroup_mma(operand, x_tile, acc, is_async=True)
                if i > 0 and i < CHUNKS - 1:
                    acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[acc]))  # its operand's registers are free
            # ptxas serialises matrix instructions that run on into the next iteration.
            acc = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[acc]))
            gl.thread_barrier()  # all warps have read the step
            mbarrier.arrive(free.index(stage), count=1)
            iteration += 1
        sums = warpgroup_mma_wait(0, deps=[acc])
        if first > 0:
            store_sums(partial_sums + (2 * program + GROUP) * SIZE, sums)
            signal(flags + 2 * program + GROUP)
        else:
            other = program + 1
            tile_end = gl.where(stop < num_steps, (end // num_steps + 1) * num_steps, 0)
            while boundary(other, num_steps, last_steps, num_parts, MIN_STEPS) < tile_end:
                wait(flags + 2 * other + GROUP)
                sums = add_sums(partial_sums + (2 * other + GROUP) * SIZE, sums)
                other += 1
            row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
            if PLANES == "row":
                sums *= gl.load(row_scales + row, mask=row < num_out, other=0.0)[:, None]
            if WITH_BIAS:
                sums += gl.load(bias + row, mask=row < num_out, other=0.0).to(gl.float32)[:, None]
            tma.store_wait(0)  # of the tile before
            gl.thread_barrier()
            y_tile.store(sums.to(gl.bfloat16).permute((1, 0)))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(ys, [tile % token_tiles * TOKENS, first_row], y_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tiles", "token_tiles", "num_steps", "num_out", "tile_lines", "plane_lines"])
def _grouped_tiles(
    xs,
    words,
    planes,
    ys,
    row_scales,
    bias,
    partial_sums,
    flags,
    num_tiles,
    token_tiles,
    num_steps,
    num_out,
    tile_lines,
    plane_lines,
    FORMAT: gl.constexpr,
    PLANES: gl.constexpr,
    COLUMNS: gl.constexpr,
    ZERO: gl.constexpr,
    SCALES: gl.constexpr,
    STEP: gl.constexpr,
    CHUNK: gl.constexpr,
    NUM_PLANES: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    WITH_BIAS: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """Persistent kernel: at most one program for each multiprocessor. Tiles of the same outputs are adjacent.

    ROWS         outputs of a group of warps: half of a tile
    CHUNK        inputs of an operand in registers, of one group of the weight
    tile_lines   lines of 32 words of 128 outputs
    plane_lines  lines of 16 words of a plane, of all outputs
    """
    word_tiles = gl.allocate_shared_memory(
        gl.int32, [STAGES * (ROWS // 64), lines_of_step(FORMAT, STEP), 32], words.layout
    )
    plane_tiles = gl.allocate_shared_memory(gl.int32, [STAGES * 2 * max(NUM_PLANES, 1), ROWS // 16, 16], planes.layout)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * (STEP // CHUNK), TOKENS, CHUNK], xs.layout)
    y_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, ROWS], ys.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    ring = (word_tiles, plane_tiles, x_tiles, full, free)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    ys, row_scales, bias, partial_sums, flags, ring, y_tiles, num_tiles, token_tiles, num_steps,
                    num_out, 0, FORMAT, PLANES, COLUMNS, ZERO, SCALES, STEP, CHUNK, NUM_PLANES, ROWS, TOKENS, STAGES,
                    WITH_BIAS, USE_PDL,
                ),
            ),
            (
                _consume,
                (
                    ys, row_scales, bias, partial_sums, flags, ring, y_tiles, num_tiles, token_tiles, num_steps,
                    num_out, 1, FORMAT, PLANES, COLUMNS, ZERO, SCALES, STEP, CHUNK, NUM_PLANES, ROWS, TOKENS, STAGES,
                    WITH_BIAS, USE_PDL,
                ),
            ),
            (
                _produce,
                (
                    xs, words, planes, ring, num_tiles, token_tiles, num_steps, tile_lines, plane_lines,
                    FORMAT, PLANES, COLUMNS, STEP, CHUNK, NUM_PLANES, ROWS, TOKENS, STAGES, USE_PDL,
                ),
            ),
        ],
        [4, 1],
        REGISTERS.value,
    )  # fmt: skip
