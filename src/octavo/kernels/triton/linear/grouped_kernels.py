"""The kernels of `grouped`, which also describes the order of a weight's words."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.reference.norms import Gate
from octavo.kernels.triton.activation import gated
from octavo.kernels.triton.launch import pdl_options, wait_for_predecessor
from octavo.kernels.triton.linear.skinny import finish_tile, load_squares

TILE_OUTPUTS = 128
OUTPUTS = tl.constexpr(TILE_OUTPUTS)
FLOAT8_GROUP = 128
"""Inputs of a token that share a scale, where x is quantised."""
INTERPRETED = triton.knobs.runtime.interpret
"""Triton's interpreter has no assembler, and its conversion to float8 loses a carry."""
LOSES_CARRY = tl.constexpr(INTERPRETED)
PREFETCH_BYTES = tl.constexpr(32768)
"""Of the weight, by a program before its predecessor has ended."""

# Words -> the values of a word, each less its zero, in bfloat16; exact. Results, then the word and its zero.
INT4_VALUES = """
.reg .b32 a, s, t, u, p, q, z;
mov.b32 a, 0x3F803F80;
or.b32 z, $9, 0xC300C300;
lop3.b32 p, $8, 0x000F000F, 0x43004300, 0xEA;
shr.u32 s, $8, 4;
lop3.b32 q, s, 0x000F000F, 0x43004300, 0xEA;
shr.u32 s, $8, 8;
lop3.b32 t, s, 0x000F000F, 0x43004300, 0xEA;
shr.u32 s, $8, 12;
lop3.b32 u, s, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 p, p, a, z;
fma.rn.bf16x2 q, q, a, z;
fma.rn.bf16x2 t, t, a, z;
fma.rn.bf16x2 u, u, a, z;
"""
"""Pairs p, q, t and u. 128 + a value has the bits 0x4300 | value. A zero comes twice."""
INT4_RESULTS = """
mov.b32 {$0, $4}, p;
mov.b32 {$1, $5}, q;
mov.b32 {$2, $6}, t;
mov.b32 {$3, $7}, u;
"""
UNPACK_INT4 = tl.constexpr("{" + INT4_VALUES + INT4_RESULTS + "}")
INT8_VALUES = """
.reg .b32 t, p;
.reg .f32 z, a, b, c, d;
or.b32 t, $5, 0xCB000000;
mov.b32 z, t;
prmt.b32 t, $4, 0x4B000000, 0x7440;
mov.b32 a, t;
prmt.b32 t, $4, 0x4B000000, 0x7441;
mov.b32 b, t;
prmt.b32 t, $4, 0x4B000000, 0x7442;
mov.b32 c, t;
prmt.b32 t, $4, 0x4B000000, 0x7443;
mov.b32 d, t;
add.rn.f32 a, a, z;
add.rn.f32 b, b, z;
add.rn.f32 c, c, z;
add.rn.f32 d, d, z;
"""
"""In float32. 2^23 + a value has the bits 0x4B000000 | value."""
INT8_RESULTS = """
cvt.rn.bf16x2.f32 p, c, a;
mov.b32 {$0, $2}, p;
cvt.rn.bf16x2.f32 p, d, b;
mov.b32 {$1, $3}, p;
"""
UNPACK_INT8 = tl.constexpr("{" + INT8_VALUES + INT8_RESULTS + "}")
UNPACK_FLOAT8 = tl.constexpr("""{
.reg .b32 p, q, m;
mov.b32 m, 0x7B807B80;
prmt.b32 p, $4, 0, 0x9180;
prmt.b32 q, $4, 0, 0xB3A2;
shl.b32 p, p, 4;
shl.b32 q, q, 4;
and.b32 p, p, 0x87F087F0;
and.b32 q, q, 0x87F087F0;
mul.rn.bf16x2 p, p, m;
mul.rn.bf16x2 q, q, m;
mov.b32 {$0, $2}, p;
mov.b32 {$1, $3}, q;
}""")
"""A value's sign and bits, moved, are a number in bfloat16 that is 2^120 times less. NaN, if there were any, is 480."""


@triton.jit
def _value(words, zero, n: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Value n of each word, less its zero."""
    bits: tl.constexpr = 4 if FORMAT == "int4" else 8
    return (((words >> (bits * n)) & ((1 << bits) - 1)) - zero).to(DTYPE)


@triton.jit
def join_int4(a, b, c, d, e, f, g, h):
    """The values of words [outputs, words] of 4 bits, in their order in a word -> [outputs, 8 * words]."""
    even, odd = tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h))
    values = tl.join(even, odd).reshape(a.shape[0], a.shape[1] // 4, 4, 2, 2, 2)  # ..., lane, half, step, odd
    return values.permute(0, 1, 4, 3, 2, 5).reshape(a.shape[0], 8 * a.shape[1])


@triton.jit
def join_int8(a, b, c, d):
    """The same of 8 bits -> [outputs, 4 * words]."""
    values = tl.join(tl.join(a, b), tl.join(c, d)).reshape(a.shape[0], a.shape[1] // 4, 4, 2, 2)  # ..., half, odd
    return values.permute(0, 1, 3, 2, 4).reshape(a.shape[0], 4 * a.shape[1])


@triton.jit
def float8_inputs(column):
    """The inputs in the columns of a float8 weight."""
    return column // 16 * 16 + column % 16 // 4 * 2 + column % 4 // 2 * 8 + column % 2


@triton.jit
def order_words(words, FORMAT: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile's words in memory order -> [OUTPUTS, words of an output]."""
    BLOCKS: tl.constexpr = COLUMNS // 32
    if FORMAT == "int4":
        return words.reshape(BLOCKS, 4, 8, 4, 2, 2).permute(4, 1, 5, 2, 0, 3).reshape(OUTPUTS, BLOCKS * 4)
    else:
        words = words.reshape(BLOCKS, 2, 4, 8, 4, 2, 2).permute(1, 2, 5, 3, 0, 6, 4)
        return words.reshape(OUTPUTS, BLOCKS * 8)


@triton.jit
def unpack(words, zero, FORMAT: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Words in the order of `order_words`, and a zero or those of the outputs -> values less zeros [OUTPUTS, inputs].

    float8  is NATIVE, and has no zero
    """
    if FORMAT == "int4":
        if NATIVE:
            zeros = words * 0 + zero * 0x00010001
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                UNPACK_INT4, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, zeros], (tl.bfloat16,) * 8, True, 1
            )
        else:
            a, b = _value(words, zero, 0, FORMAT, DTYPE), _value(words, zero, 1, FORMAT, DTYPE)
            c, d = _value(words, zero, 2, FORMAT, DTYPE), _value(words, zero, 3, FORMAT, DTYPE)
            e, f = _value(words, zero, 4, FORMAT, DTYPE), _value(words, zero, 5, FORMAT, DTYPE)
            g, h = _value(words, zero, 6, FORMAT, DTYPE), _value(words, zero, 7, FORMAT, DTYPE)
        return join_int4(a, b, c, d, e, f, g, h)
    elif FORMAT == "float8":
        a, b, c, d = tl.inline_asm_elementwise(UNPACK_FLOAT8, "=h,=h,=h,=h,r", [words], (tl.bfloat16,) * 4, True, 1)
        return join_int8(a, b, c, d)
    else:
        if NATIVE:
            zeros = words * 0 + zero
            a, b, c, d = tl.inline_asm_elementwise(
                UNPACK_INT8, "=h,=h,=h,=h,r,r", [words, zeros], (tl.bfloat16,) * 4, True, 1
            )
        else:
            a, b = _value(words, zero, 0, FORMAT, DTYPE), _value(words, zero, 1, FORMAT, DTYPE)
            c, d = _value(words, zero, 2, FORMAT, DTYPE), _value(words, zero, 3, FORMAT, DTYPE)
        return join_int8(a, b, c, d)


@triton.jit
def read_half(words, i: tl.constexpr, SCALES: tl.constexpr):
    """The 16 bits of half i of each word, a number of type SCALES, in float32."""
    bits = (words >> (16 * i)) & 0xFFFF
    if SCALES == "bfloat16":
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_and_zero(planes, i: tl.constexpr, PLANES: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr):
    """A word of the planes for each output -> scales in float32, and a zero or those of the outputs, for broadcasting.

    i  group of a pair
    """
    if PLANES == "wide":
        return planes.to(tl.float32, bitcast=True), ZERO
    elif PLANES == "zero":
        return read_half(planes, 0, SCALES), ((planes >> 16) & 255)[:, None]
    elif PLANES == "pair":
        return read_half(planes, i, SCALES), ZERO
    else:
        return planes, ZERO


@triton.jit
def _widen(bits, DTYPE: tl.constexpr):
    """The bits of numbers in float8_e4m3fn, uint8 -> the numbers."""
    bits = bits.to(tl.int32)
    moved = (bits & 127) << 7 | (bits & 128) << 8  # a float16, times 2^-8
    return (moved.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0).to(DTYPE)


@triton.jit
def _to_float8(wide):
    if LOSES_CARRY:
        bits = wide.to(tl.int32, bitcast=True)
        wide = ((bits + 0x7FFFF + (bits >> 20 & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return wide.to(tl.float8e4nv)


@triton.jit
def round_to_float8(xs):
    """xs [tokens, inputs] -> numbers in float8, what rounding them left, times 16, and the tokens' scales [tokens].

    Scales are powers of two. So a number in bfloat16 is the sum of both parts unless it is 2^13 times smaller than the
    largest of its token, which comes to at least 128.
    """
    wide = xs.to(tl.float32)
    exponent = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum(exponent, 8)
    scales = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    wide *= ((261 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    rounded = _to_float8(wide)
    return rounded, _to_float8((wide - rounded.to(tl.float32)) * 16.0), scales


@triton.jit
def _dot(
    acc, xs, ptrs, zero, FORMAT: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """acc + the product of some columns of a tile; xs [COLUMNS, tokens]."""
    words = tl.load(ptrs)
    if FORMAT == "float8":
        return tl.dot(_widen(words, DTYPE), xs, acc)
    else:
        return tl.dot(unpack(order_words(words, FORMAT, COLUMNS), zero, FORMAT, DTYPE, NATIVE), xs, acc)


@triton.jit
def _float8_dot(ptrs, upper, lower, x_scale, PARTS: tl.constexpr):
    """The product of some columns of a tile with x, of which `round_to_float8` made two parts; see PARTS."""
    values = tl.load(ptrs)
    part = tl.dot(values, upper.trans())
    if PARTS == 2:
        part += tl.dot(values, lower.trans()) * 0.0625
    return part * x_scale[None, :]


@triton.jit(do_not_specialize=["num_tokens", "num_squares"])
def grouped_product(
    x,
    words,
    planes,
    bias,
    squares,
    residual,
    norm,
    y,
    weighted,
    out_squares,
    partial_sums,
    counters,
    num_tokens,
    num_out,
    num_in,
    x_stride,
    y_stride,
    num_squares,
    eps,
    FORMAT: tl.constexpr,
    PLANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ZERO: tl.constexpr,
    SCALES: tl.constexpr,
    EVEN: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    GATE: tl.constexpr,
    SCALED: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    WITH_RESIDUAL: tl.constexpr,
    WITH_NORM: tl.constexpr,
    NATIVE: tl.constexpr,
    PARTS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """A tile of outputs (with a gate, of each half), TOKENS tokens, and one of SPLITS ranges of their inputs.

    PARTS  of x in float8: 0, x keeps its dtype; 1, it is rounded; 2, it is the sum of two parts
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    IN_PLACE: tl.constexpr = PLANES == "row" and PARTS == 0
    BY_ROW: tl.constexpr = FORMAT == "float8"
    WORDS: tl.constexpr = OUTPUTS * COLUMNS // (8 if FORMAT == "int4" else 1 if BY_ROW else 4)
    token_tiles = (num_tokens + TOKENS - 1) // TOKENS
    tile = tl.program_id(0) // token_tiles
    split = tl.program_id(1)
    row = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(0) % token_tiles * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, CHUNK)
    num_steps = (num_in + COLUMNS * PAIRS - 1) // (COLUMNS * PAIRS)
    begin = split * num_steps // SPLITS
    end = (split + 1) * num_steps // SPLITS
    halves = 2 if GATE != "" else 1
    width = num_steps * COLUMNS
    stride = (halves * num_out + OUTPUTS - 1) // OUTPUTS * OUTPUTS
    words += tile.to(tl.int64) * (num_steps * PAIRS * WORDS)
    up_offset = (num_out // OUTPUTS).to(tl.int64) * (num_steps * PAIRS * WORDS)
    if USE_PDL:
        line = tl.arange(0, PREFETCH_BYTES // 128)
        if BY_ROW:
            ahead = line % OUTPUTS * width + tl.minimum(begin + line // OUTPUTS, end - 1) * COLUMNS
        else:
            ahead = tl.minimum(begin * PAIRS * WORDS + line * 32, tl.maximum(end * PAIRS * WORDS - 1, 0))
        PREFETCH: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(PREFETCH, "=r,l", [(words + ahead).to(tl.int64, bitcast=True)], tl.int32, False, 1)
        if GATE != "":
            ahead += up_offset
            tl.inline_asm_elementwise(
                PREFETCH, "=r,l", [(words + ahead).to(tl.int64, bitcast=True)], tl.int32, False, 1
            )
    wait_for_predecessor(USE_PDL)
    first_squares = load_squares(squares, token, num_squares, TOKENS, SCALED)
    acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    acc_up = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    if BY_ROW:
        word = tl.arange(0, OUTPUTS)[:, None] * width + column[None, :]
    else:
        word = tl.arange(0, WORDS * CHUNK // COLUMNS)
    plane = row
    up_plane = row
    for step in tl.range(begin, end, num_stages=STAGES):
        if PLANES != "row":
            plane = tl.load(planes + step * stride + row)
            if GATE != "":
                up_plane = tl.load(planes + step * stride + num_out + row)
        for i in tl.static_range(PAIRS):
            group = step * PAIRS + i
            scale, zero = scale_and_zero(plane, i, PLANES, ZERO, SCALES)
            up_scale, up_zero = scale_and_zero(up_plane, i, PLANES, ZERO, SCALES)
            part = acc if IN_PLACE else tl.zeros([OUTPUTS, TOKENS], tl.float32)
            up_part = acc_up if IN_PLACE else tl.zeros([OUTPUTS, TOKENS], tl.float32)
            for chunk in tl.static_range(COLUMNS // CHUNK):
                columns = group * COLUMNS + chunk * CHUNK + column
                if BY_ROW:
                    ptrs = words + step * COLUMNS + chunk * CHUNK + word
                else:
                    ptrs = words + group * WORDS + chunk * (WORDS * CHUNK // COLUMNS) + word
                if PARTS > 0:
                    valid = (token < num_tokens)[:, None]
                    if not EVEN:
                        valid = valid & (columns < num_in)[None, :]
                    inputs = float8_inputs(columns) if BY_ROW else columns
                    xs = tl.load(x + token[:, None] * x_stride + inputs[None, :], mask=valid, other=0.0)
                    upper, lower, x_scale = round_to_float8(xs)
                    part = _float8_dot(ptrs, upper, lower, x_scale, PARTS)
                    if GATE != "":
                        up_part = _float8_dot(ptrs + up_offset, upper, lower, x_scale, PARTS)
                else:
                    valid = (token < num_tokens)[None, :]
                    if not EVEN:
                        valid = valid & (columns < num_in)[:, None]
                    inputs = float8_inputs(columns) if BY_ROW else columns
                    xs = tl.load(x + token[None, :] * x_stride + inputs[:, None], mask=valid, other=0.0)
                    part = _dot(part, xs, ptrs, zero, FORMAT, CHUNK, DTYPE, NATIVE)
                    if GATE != "":
                        up_part = _dot(up_part, xs, ptrs + up_offset, up_zero, FORMAT, CHUNK, DTYPE, NATIVE)
            if PLANES == "row":
                acc = part if IN_PLACE else acc + part
                acc_up = up_part if IN_PLACE else acc_up + up_part
            else:
                acc += part * scale[:, None]
                acc_up += up_part * up_scale[:, None]
    if PLANES == "row":
        acc *= tl.load(planes + row, mask=row < num_out, other=0.0)[:, None]
        if GATE != "":
            acc_up *= tl.load(planes + num_out + row, mask=row < num_out, other=0.0)[:, None]
    finish_tile(
        acc, acc_up, first_squares, tl.program_id(0), split, row, token, bias, squares, residual, norm, y, weighted,
        out_squares, partial_sums, counters, num_tokens, num_out, num_in, y_stride, num_squares, eps,
        TOKENS, SPLITS, GATE, SCALED, WITH_BIAS, WITH_RESIDUAL, WITH_NORM,
    )  # fmt: skip


def dequantise(words: Tensor, planes: Tensor, weight: Tensor, first: int, constants: dict[str, object]) -> None:
    """Write weight [outputs, num_in], which are those from `first` on; see `GroupedWeight`."""
    num_out, num_in = weight.shape
    columns = constants["COLUMNS"]
    assert isinstance(columns, int)
    words = words.view(torch.uint8) if constants["FORMAT"] == "float8" else words
    _dequantise[(cdiv(num_out, TILE_OUTPUTS), cdiv(num_in, columns))](
        words[first // TILE_OUTPUTS :],
        planes[..., first:],
        weight,
        num_out,
        num_in,
        words.shape[1],
        planes.stride(0),
        **constants,
        PAIRS=2 if constants["PLANES"] == "pair" else 1,
        NATIVE=weight.dtype == torch.bfloat16 and not INTERPRETED,
        num_warps=4,
    )


@triton.jit
def _dequantise(
    words, planes, weight, num_out, num_in, words_stride, planes_stride,
    FORMAT: tl.constexpr, PLANES: tl.constexpr, COLUMNS: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
    PAIRS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A tile of outputs and COLUMNS inputs."""
    WORDS: tl.constexpr = OUTPUTS * COLUMNS // (8 if FORMAT == "int4" else 1 if FORMAT == "float8" else 4)
    DTYPE: tl.constexpr = weight.dtype.element_ty
    group = tl.program_id(1)
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = group * COLUMNS + tl.arange(0, COLUMNS)
    words += tl.program_id(0).to(tl.int64) * words_stride
    zero = ZERO
    if PLANES == "row":
        scale = tl.load(planes + row, mask=row < num_out, other=0.0)
    else:
        plane = tl.load(planes + group // PAIRS * planes_stride + row)
        if PLANES == "pair":
            scale = read_half(plane >> (group % 2 * 16), 0, SCALES)
        else:
            scale, zero = scale_and_zero(plane, 0, PLANES, ZERO, SCALES)
    if FORMAT == "float8":
        line = tl.arange(0, OUTPUTS)[:, None] * (words_stride // OUTPUTS)
        values = _widen(tl.load(words + line + column[None, :]), DTYPE)
    else:
        tile = order_words(tl.load(words + group * WORDS + tl.arange(0, WORDS)), FORMAT, COLUMNS)
        values = unpack(tile, zero, FORMAT, DTYPE, NATIVE)
    if FORMAT == "float8":
        column = float8_inputs(column)
    mask = (row < num_out)[:, None] & (column < num_in)[None, :]
    scaled = (values.to(tl.float32) * scale[:, None]).to(DTYPE)
    tl.store(weight + row.to(tl.int64)[:, None] * num_in + column[None, :], scaled, mask=mask)


def quantise(x: Tensor, group: int, gate: Gate = "") -> tuple[Tensor, Tensor]:
    """x [num_tokens, num_in] -> float8 [num_tokens, num_in], rounded up to groups, and scales [groups, num_tokens].

    gate  x is the activation of a gated MLP, and what is given its input [num_tokens, 2 * num_in]

    Columns are in the order of a float8 weight's.

    The number of tokens is rounded up to a multiple of 16; those of the further ones are not initialised.

    group  inputs of a token that share a scale: FLOAT8_GROUP, or all
    """
    num_tokens, num_in = len(x), x.shape[1] // (2 if gate else 1)
    values, scales = empty_float8(num_tokens, num_in, group, x.device)
    groups, padded = scales.shape
    per_program = 1024 // group if group == FLOAT8_GROUP else 1
    _quantise[(num_tokens, cdiv(groups, per_program))](
        x,
        values,
        scales,
        num_in,
        groups,
        x.stride(0),
        values.shape[1],
        padded,
        GROUP=max(triton.next_power_of_2(group), FLOAT8_GROUP),
        GROUPS=per_program,
        GATE=gate,
        num_warps=4 if group == FLOAT8_GROUP else 8,
        **pdl_options(x.device),
    )
    return values, scales


def empty_float8(num_tokens: int, num_in: int, group: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The results of `quantise`, not initialised."""
    padded, width = cdiv(num_tokens, 16) * 16, cdiv(num_in, FLOAT8_GROUP) * FLOAT8_GROUP
    values = torch.empty(padded, width, dtype=torch.float8_e4m3fn, device=device)
    return values, torch.empty(cdiv(num_in, group), padded, dtype=torch.float32, device=device)


@triton.jit
def in_float8_order(values):
    """values [groups, inputs], each 16 of which are put in the order of `float8_inputs`."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    return values.reshape(ROWS * COLUMNS // 16, 2, 4, 2).permute(0, 2, 1, 3).reshape(ROWS, COLUMNS)


@triton.jit(do_not_specialize=["padded"])
def _quantise(
    x, values, scales, num_in, groups, x_stride, width, padded, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    GATE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """GROUPS groups of a token."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    wait_for_predecessor(USE_PDL)
    inputs = x + token * x_stride + columns
    xs = tl.load(inputs, mask=columns < num_in, other=0.0)
    if GATE != "":
        xs = gated(xs, tl.load(inputs + num_in, mask=columns < num_in, other=0.0), GATE == "gelu")
    rounded, _, scale = round_to_float8(xs)
    tl.store(values + token * width + columns, in_float8_order(rounded), mask=columns < width)
    tl.store(scales + group * padded + token, scale, mask=group < groups)
