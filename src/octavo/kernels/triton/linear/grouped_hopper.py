"""Products of quantised weights for few tokens on Hopper, in Gluon: the words stream through shared memory.

As in `skinny_hopper`, a producer warp copies the weight by TMA, and begins before the preceding kernel has ended. The
consumer warps turn a step's words into bfloat16 in registers, which are an operand of the matrix instruction: the order
of the words is that of its registers. So x is what it is, and the sums of a group of inputs are exact as in `grouped`.

A step is some lines of 32 words. Of integers, 16 lines (8 bits: 32) are 32 inputs of a tile; of float8, a line is 128
inputs of an output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.integers import cdiv
from octavo.kernels.reference.norms import Gate
from octavo.kernels.triton.launch import or_placeholder, pdl_options, wait_for_predecessor
from octavo.kernels.triton.linear.grouped_kernels import TILE_OUTPUTS, order_words, scale_and_zero, unpack
from octavo.kernels.triton.linear.skinny_hopper import (
    PRODUCER_REGISTERS,
    barrier_counters,
    finish_tile,
    finished_layout,
    load_epilogue_inputs,
    load_squares,
)
from octavo.kernels.triton.linear.tuning import HopperTuning, padded_tokens

if TYPE_CHECKING:
    from octavo.kernels.triton.linear.grouped import GroupedWeight

NUM_WARPS = 8
"""Consumer warps: 16 rows each."""
ROWS = gl.constexpr(TILE_OUTPUTS)
WORD_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
PLANE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)
"""A plane of a tile is [8, 16]: its 128 words in their order."""


def launch(
    weight: GroupedWeight,
    x: Tensor,
    bias: Tensor | None,
    gate: Gate,
    tuning: HopperTuning,
    *,
    out: Tensor,
    squares: Tensor | None,
    eps: float,
    residual: Tensor | None,
    norm: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """Writes out; with a norm -> (weighted, squares). As `skinny_hopper.launch`; tuning: its rows are 128."""
    num_tokens, num_out, padded = len(x), out.shape[1], padded_tokens(len(x))
    tokens, programs = tile_tokens(num_tokens), cdiv(num_out, TILE_OUTPUTS) * tuning.splits
    norm_outputs = None
    if norm is not None:
        norm_outputs = torch.empty_like(out), torch.empty(programs, padded, dtype=torch.float32, device=x.device)
    num_sums = programs * (2 if gate else 1) * TILE_OUTPUTS * tokens if tuning.splits > 1 else 0
    _grouped_hopper[(programs,)](
        *describe(weight, x, tuning.columns),
        weight.planes,
        *or_placeholder(out, bias, squares, residual, norm, out, *(norm_outputs or (None, None))),
        torch.empty(num_sums, dtype=torch.float32, device=x.device),
        barrier_counters(x.device),
        num_tokens,
        num_out,
        weight.num_in,
        *lines_of(weight),
        0 if squares is None else len(squares),
        eps,
        **weight.constants(),
        STEP=tuning.columns,
        TOKENS=tokens,
        PADDED=padded,
        SPLITS=tuning.splits,
        STAGES=tuning.stages,
        GATE=gate,
        SCALED=squares is not None,
        WITH_BIAS=bias is not None,
        WITH_RESIDUAL=residual is not None,
        WITH_NORM=norm is not None,
        num_warps=NUM_WARPS,
        maxnreg=tuning.registers,
        **pdl_options(x.device),
    )
    return norm_outputs


def tile_tokens(num_tokens: int) -> int:
    """Tokens of a tile, for at most 64."""
    return 8 if num_tokens <= 8 else padded_tokens(num_tokens)


def describe(weight: GroupedWeight, x: Tensor, step: int) -> tuple[TensorDescriptor, ...]:
    """Of x, words and planes, for copies of steps of so many inputs."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=min(2 * weight.columns, 128), element_bitwidth=16, rank=2)
    box = [tile_tokens(len(x)), weight.columns]
    words = weight.words.view(torch.int32)
    words = words.view(len(words) * TILE_OUTPUTS, -1) if weight.form.is_float else words.view(-1, 32)
    plane_lines = weight.planes.view(torch.int32).view(-1, 16)
    return (
        TensorDescriptor(x, [len(x), weight.num_in], [x.stride(0), 1], box, layout),
        TensorDescriptor.from_tensor(words, [lines_of_step(weight.format, step), 32], WORD_LAYOUT),
        TensorDescriptor.from_tensor(plane_lines, [TILE_OUTPUTS // 16, 16], PLANE_LAYOUT),
    )


def lines_of(weight: GroupedWeight) -> tuple[int, int]:
    """(lines of a tile's integers, lines of a plane)."""
    return weight.words.shape[1] // 32, weight.planes.stride(0) // 16


@gluon.constexpr_function
def planes_of_step(planes, columns, step):
    return 0 if planes == "row" else step // (columns * (2 if planes == "pair" else 1))


@gluon.constexpr_function
def lines_of_step(format, step):
    return 128 if format == "float8" else step // 32 * (16 if format == "int4" else 32)


@gluon.constexpr_function
def plane_layout():
    """Of a plane [8, 16]: as a vector, a thread has the rows of its sums."""
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout([[0, 8]], lanes, [[1, 0], [2, 0], [4, 0]], [], [8, 16])


@gluon.jit
def _copy_step(
    words, planes, ring, stage, tile, step, num_out, tile_lines, plane_lines, pred,
    FORMAT: gl.constexpr, LINES: gl.constexpr, NUM_PLANES: gl.constexpr, HALVES: gl.constexpr, NUM_BYTES: gl.constexpr,
):  # fmt: skip
    """Copy the words and planes of a step. NUM_BYTES includes the tokens, which `_copy_tokens` copies."""
    word_tiles, plane_tiles, _, full, _ = ring
    mbarrier.expect(full.index(stage), NUM_BYTES, pred=pred)
    for half in gl.static_range(HALVES):
        first = tile * ROWS + half * num_out
        if FORMAT == "float8":
            place = [first, step * 32]
        else:
            place = [first // ROWS * tile_lines + step * LINES, 0]
        target = word_tiles.index(stage * HALVES + half)
        tma.async_copy_global_to_shared(words, place, full.index(stage), target, pred=pred)
        for i in gl.static_range(NUM_PLANES):
            target = plane_tiles.index((stage * HALVES + half) * NUM_PLANES + i)
            place = [(step * NUM_PLANES + i) * plane_lines + first // 16, 0]
            tma.async_copy_global_to_shared(planes, place, full.index(stage), target, pred=pred)


@gluon.jit
def _copy_tokens(xs, ring, stage, step, pred, STEP: gl.constexpr, COLUMNS: gl.constexpr):
    _, _, x_tiles, full, _ = ring
    for i in gl.static_range(STEP // COLUMNS):
        place = [0, step * STEP + i * COLUMNS]
        target = x_tiles.index(stage * (STEP // COLUMNS) + i)
        tma.async_copy_global_to_shared(xs, place, full.index(stage), target, pred=pred)


@gluon.jit
def producer(
    xs, words, planes, ring, tile, begin, end, num_out, tile_lines, plane_lines,
    FORMAT: gl.constexpr, STEP: gl.constexpr, NUM_PLANES: gl.constexpr, COLUMNS: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, HALVES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp, which issues TMA copies."""
    LINES: gl.constexpr = lines_of_step(FORMAT, STEP)
    NUM_BYTES: gl.constexpr = HALVES * (LINES * 32 + NUM_PLANES * ROWS) * 4 + TOKENS * STEP * 2
    _, _, _, _, free = ring
    for i in gl.static_range(STAGES):
        _copy_step(
            words, planes, ring, i, tile, begin + i, num_out, tile_lines, plane_lines, begin + i < end,
            FORMAT, LINES, NUM_PLANES, HALVES, NUM_BYTES,
        )  # fmt: skip
    wait_for_predecessor(USE_PDL)
    for i in gl.static_range(STAGES):
        _copy_tokens(xs, ring, i, begin + i, begin + i < end, STEP, COLUMNS)
    for iteration in range(STAGES, end - begin):
        stage = iteration % STAGES
        mbarrier.wait(free.index(stage), iteration // STAGES % 2 ^ 1)
        _copy_step(
            words, planes, ring, stage, tile, begin + iteration, num_out, tile_lines, plane_lines, True,
            FORMAT, LINES, NUM_PLANES, HALVES, NUM_BYTES,
        )  # fmt: skip
        _copy_tokens(xs, ring, stage, begin + iteration, True, STEP, COLUMNS)


@gluon.constexpr_function
def sums_layout(tokens):
    """Few tokens are multiplied by the instruction of one warp, which waits for no other."""
    if tokens <= 16:
        return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, 8])
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, tokens, 16])


@gluon.constexpr_function
def _words_layout(format, lines):
    """Of lines of 32 words of a tile: a thread has those of its operand."""
    if format == "float8":
        lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
        warps = [[16, 0], [32, 0], [64, 0]]
        own = [[8, 0], [0, 4], [0, 8], [0, 16]]
    else:
        first, last = (16, [0, 2]) if format == "int4" else (32, [16, 0])
        lanes = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
        warps = [[4, 0], [8, 0], last]
        own = [[0, 1], *([] if format == "int4" else [[0, 2]])]
        while first < lines:
            own.append([first, 0])
            first *= 2
    return gl.DistributedLinearLayout(own, lanes, warps, [], [lines, 32])


@gluon.jit
def _operand(
    tile, zero, first, FORMAT: gl.constexpr, PLANES: gl.constexpr, COLUMNS: gl.constexpr, ACC: gl.constexpr
):  # fmt: skip
    """COLUMNS inputs of a step's tile, from `first` on, each less its zero: an operand of the matrix instruction."""
    if FORMAT == "float8":
        words = tile.load(_words_layout(FORMAT, ROWS))
    else:
        LINES: gl.constexpr = 16 if FORMAT == "int4" else 32  # for 32 inputs
        NUM_LINES: gl.constexpr = COLUMNS // 32 * LINES
        words = tile.slice(first // 32 * LINES, NUM_LINES, dim=0).load(_words_layout(FORMAT, NUM_LINES))
        words = order_words(words, FORMAT, COLUMNS)
    if PLANES == "zero":
        zero = gl.convert_layout(zero, words.type.layout, assert_trivial=True)
    values = unpack(words, zero, FORMAT, gl.bfloat16, True)
    return gl.convert_layout(values, gl.DotOperandLayout(0, ACC, 2), assert_trivial=True)


@gluon.jit
def _multiply(
    acc, tile, plane_tiles, first_plane, x_tiles, first_x,
    FORMAT: gl.constexpr, PLANES: gl.constexpr, COLUMNS: gl.constexpr, ZERO: gl.constexpr, SCALES: gl.constexpr,
    STEP: gl.constexpr,
):  # fmt: skip
    """acc + the product of a step."""
    ACC: gl.constexpr = acc.type.layout
    PAIRS: gl.constexpr = 2 if PLANES == "pair" else 1
    for group in gl.static_range(STEP // COLUMNS):
        scale = 1.0
        zero = ZERO
        if PLANES != "row":
            plane = plane_tiles.index(first_plane + group // PAIRS).load(plane_layout()).reshape([ROWS])
            plane = gl.convert_layout(plane, gl.SliceLayout(1, ACC), assert_trivial=True)
            scale, zero = scale_and_zero(plane, group % PAIRS, PLANES, ZERO, SCALES)
            scale = scale[:, None]
        operand = _operand(tile, zero, group * COLUMNS, FORMAT, PLANES, COLUMNS, ACC)
        x_tile = x_tiles.index(first_x + group).permute((1, 0))
        part = acc if PLANES == "row" else gl.zeros(acc.shape, gl.float32, ACC)
        if acc.shape[1] <= 16:
            part = mma_v2(operand, x_tile.load(gl.DotOperandLayout(1, ACC, 2)), part)
        else:
            part = warpgroup_mma(operand, x_tile, part)
        acc = part if PLANES == "row" else acc + part * scale
    return acc


@gluon.jit
def sum_products(
    row_scales, ring, tile, begin, end, num_out,
    FORMAT: gl.constexpr, PLANES: gl.constexpr, COLUMNS: gl.constexpr, ZERO: gl.constexpr, SCALES: gl.constexpr,
    STEP: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """A tile's sums over steps [begin, end), [ROWS, TOKENS]; and those of the weight's second half, or zeros."""
    ACC: gl.constexpr = sums_layout(TOKENS)
    GROUPS: gl.constexpr = STEP // COLUMNS
    NUM_PLANES: gl.constexpr = planes_of_step(PLANES, COLUMNS, STEP)
    word_tiles, plane_tiles, x_tiles, full, free = ring
    acc = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
    up = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
    for iteration in range(end - begin):
        stage = iteration % STAGES
        mbarrier.wait(full.index(stage), iteration // STAGES % 2)
        acc = _multiply(
            acc, word_tiles.index(stage * HALVES), plane_tiles, stage * HALVES * NUM_PLANES, x_tiles, stage * GROUPS,
            FORMAT, PLANES, COLUMNS, ZERO, SCALES, STEP,
        )  # fmt: skip
        if HALVES == 2:
            up = _multiply(
                up, word_tiles.index(stage * HALVES + 1), plane_tiles, (stage * HALVES + 1) * NUM_PLANES, x_tiles,
                stage * GROUPS, FORMAT, PLANES, COLUMNS, ZERO, SCALES, STEP,
            )  # fmt: skip
        fence_async_shared()  # else a copy may arrive before a read that was issued earlier
        gl.thread_barrier()  # all warps have read the step
        mbarrier.arrive(free.index(stage), count=1)
    if PLANES == "row":
        row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
        acc *= gl.load(row_scales + row)[:, None]
        if HALVES == 2:
            up *= gl.load(row_scales + num_out + row)[:, None]
    return acc, up


@gluon.jit
def make_ring(
    xs, words, planes, FORMAT: gl.constexpr, PLANES: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """A ring of STAGES steps of words, planes and tokens, with a full and a free barrier for each."""
    LINES: gl.constexpr = lines_of_step(FORMAT, STEP)
    NUM_PLANES: gl.constexpr = max(planes_of_step(PLANES, COLUMNS, STEP), 1)
    word_tiles = gl.allocate_shared_memory(gl.int32, [STAGES * HALVES, LINES, 32], words.layout)
    plane_tiles = gl.allocate_shared_memory(gl.int32, [STAGES * HALVES * NUM_PLANES, 8, 16], planes.layout)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * (STEP // COLUMNS), TOKENS, COLUMNS], xs.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    return word_tiles, plane_tiles, x_tiles, full, free


# As in `skinny_hopper`: two kernels call these.
_ = producer.cache_key, sum_products.cache_key, make_ring.cache_key


@gluon.jit
def _consumer(
    row_scales, bias, squares, residual, norm, y, weighted, out_squares, partial_sums, barriers,
    ring, tile, split, begin, end, num_tokens, num_out, num_in, num_squares, eps,
    FORMAT: gl.constexpr, PLANES: gl.constexpr, COLUMNS: gl.constexpr, ZERO: gl.constexpr, SCALES: gl.constexpr,
    STEP: gl.constexpr, TOKENS: gl.constexpr, PADDED: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    GATE: gl.constexpr, SCALED: gl.constexpr, WITH_BIAS: gl.constexpr, WITH_RESIDUAL: gl.constexpr,
    WITH_NORM: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The consumer warps, which multiply."""
    HALVES: gl.constexpr = 2 if GATE != "" else 1
    SHARE: gl.constexpr = ROWS // SPLITS
    wait_for_predecessor(USE_PDL)
    first_squares = load_squares(squares, 0, num_squares, TOKENS, PADDED, SCALED)
    inputs = load_epilogue_inputs(
        bias, residual, norm, tile * ROWS + split * SHARE, 0, num_tokens, num_out,
        SHARE, TOKENS, finished_layout(sums_layout(TOKENS), ROWS, SPLITS), GATE, WITH_BIAS, WITH_RESIDUAL, WITH_NORM,
    )  # fmt: skip
    acc, up = sum_products(
        row_scales, ring, tile, begin, end, num_out,
        FORMAT, PLANES, COLUMNS, ZERO, SCALES, STEP, TOKENS, STAGES, HALVES,
    )  # fmt: skip
    finish_tile(
        acc, up, first_squares, inputs, squares, y, weighted, out_squares, partial_sums, barriers, 0,
        tile, 0, split, num_tokens, num_out, num_in, num_squares, eps,
        PADDED, SPLITS, GATE, SCALED, WITH_BIAS, WITH_RESIDUAL, WITH_NORM, 1,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens", "num_squares"])
def _grouped_hopper(
    xs,
    words,
    planes,
    row_scales,
    bias,
    squares,
    residual,
    norm,
    y,
    weighted,
    out_squares,
    partial_sums,
    barriers,
    num_tokens,
    num_out,
    num_in,
    tile_lines,
    plane_lines,
    num_squares,
    eps,
    FORMAT: gl.constexpr,
    PLANES: gl.constexpr,
    COLUMNS: gl.constexpr,
    ZERO: gl.constexpr,
    SCALES: gl.constexpr,
    STEP: gl.constexpr,
    TOKENS: gl.constexpr,
    PADDED: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    GATE: gl.constexpr,
    SCALED: gl.constexpr,
    WITH_BIAS: gl.constexpr,
    WITH_RESIDUAL: gl.constexpr,
    WITH_NORM: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """A tile of outputs and one of SPLITS ranges of the inputs, as in `_skinny_hopper`.

    STEP         inputs of a step: whole groups, or pairs of them
    tile_lines   of integers, lines of a tile
    plane_lines  lines of 16 words of a plane, of all outputs
    """
    HALVES: gl.constexpr = 2 if GATE != "" else 1
    NUM_PLANES: gl.constexpr = planes_of_step(PLANES, COLUMNS, STEP)
    tile = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    num_steps = (num_in + STEP - 1) // STEP
    begin = split * num_steps // SPLITS
    end = (split + 1) * num_steps // SPLITS
    ring = make_ring(xs, words, planes, FORMAT, PLANES, COLUMNS, STEP, TOKENS, STAGES, HALVES)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    row_scales, bias, squares, residual, norm, y, weighted, out_squares, partial_sums, barriers,
                    ring, tile, split, begin, end, num_tokens, num_out, num_in, num_squares, eps,
                    FORMAT, PLANES, COLUMNS, ZERO, SCALES, STEP, TOKENS, PADDED, SPLITS, STAGES, GATE, SCALED,
                    WITH_BIAS, WITH_RESIDUAL, WITH_NORM, USE_PDL,
                ),
            ),
            (
                producer,
                (
                    xs, words, planes, ring, tile, begin, end, num_out, tile_lines, plane_lines,
                    FORMAT, STEP, NUM_PLANES, COLUMNS, TOKENS, STAGES, HALVES, USE_PDL,
                ),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
