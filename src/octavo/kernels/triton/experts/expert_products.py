"""The two products of a mixture of experts, in Triton.

A program computes some outputs of one expert for a tile of its tokens. In a batch of at most `SCAN_TOKENS` tokens, a
tile has the whole batch, and programs find the tokens of their expert by themselves: decoding needs no kernel for that.
Others read the tiles of `assign`. Programs without tokens leave at once, so the grid depends on sizes alone.

A token's bits do not depend on the batch: each output is one sum in the order of the inputs, by the same instruction in
tiles of any size, and the sum over a token's experts is a kernel of its own.

Quantised weights are read in their bits. In registers, they become the numbers of x's dtype that a dequantised weight
has, so that its products have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.reference.experts import ExpertGate, Routing
from octavo.kernels.triton.activation import GELU_SLOPE
from octavo.kernels.triton.experts.assign import TiledRouting, assign
from octavo.kernels.triton.experts.tuning import STEP_COLUMNS, ExpertTuning, expert_tuning
from octavo.kernels.triton.launch import (
    or_placeholder,
    pdl_options,
    wait_before_successor,
    wait_for_predecessor,
)
from octavo.kernels.triton.linear.grouped_kernels import join_int4, join_int8, read_half

SUM_COLUMNS = 512
"""Outputs of a program that adds the experts of a token."""


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Quantised weights of all experts, [num_rows, num_in], whose values `_load_groups` turns into x's dtype.

    Rows are filled with zeros to steps of 64 inputs.

    words   [num_rows, words of a row] int32: of each 32 inputs, see `linear.grouped`
            4 bits  words [lane 4], values in a word [odd 2, step 2, half 2]
            8 bits  words [step 2, lane 4], values in a word [odd 2, half 2]
    planes  what some groups of a row have, [words of a row's groups, num_rows] int32
    format  int4, int8 or e2m1
    kind    of the planes:
            byte  exponents of four groups, biased by 127
            pair  the scales of two groups, in 16 bits
            zero  a scale, and a zero in the upper half
            wide  a scale in float32
    group   inputs of a group: 32, 64 or 128
    zero    taken off each value, without zeros of its group
    scales  the dtype of scales in 16 bits
    """

    words: Tensor
    planes: Tensor
    num_in: int
    format: str
    kind: str
    group: int
    zero: int
    scales: torch.dtype

    def __len__(self) -> int:
        return len(self.words)

    def constants(self) -> dict[str, object]:
        """What the kernel knows of the weights when it is compiled."""
        scales = "bfloat16" if self.scales == torch.bfloat16 else "float16"
        return {"FORMAT": self.format, "PLANES": self.kind, "GROUP": self.group, "ZERO": self.zero, "SCALES": scales}


PLAIN: dict[str, object] = {"FORMAT": "", "PLANES": "", "GROUP": 0, "ZERO": 0, "SCALES": ""}
"""The constants of weights in x's dtype."""


def experts_in(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, num_experts: int, gate: ExpertGate
) -> Tensor:
    """See `reference.experts_in`."""
    return product_in(x, weight, bias, routing, num_experts, gate)


def experts_out(h: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, num_experts: int) -> Tensor:
    """See `reference.experts_out`."""
    return product_out(h, weight, bias, routing, num_experts)


def product_in(
    x: Tensor,
    weight: Tensor | GroupedRows,
    bias: Tensor | None,
    routing: Routing,
    num_experts: int,
    gate: ExpertGate,
    tuning: ExpertTuning | None = None,
) -> Tensor:
    """`experts_in` of plain or quantised weights, in another tuning if given."""
    out = x.new_empty(*routing.experts.shape, len(weight) // (2 * num_experts))
    if out.numel():
        _launch(x, weight, bias, assign(routing, num_experts), num_experts, gate, out, tuning)
    return out


def product_out(
    h: Tensor,
    weight: Tensor | GroupedRows,
    bias: Tensor | None,
    routing: Routing,
    num_experts: int,
    tuning: ExpertTuning | None = None,
) -> Tensor:
    """`experts_out`, see `product_in`."""
    num_tokens, top_k, _ = h.shape
    size = len(weight) // num_experts
    out = h.new_empty(num_tokens, size)
    if out.numel() == 0:
        return out
    terms = h.new_empty(num_tokens, top_k, size, dtype=torch.float32)
    _launch(h.flatten(0, 1), weight, bias, assign(routing, num_experts), num_experts, None, terms, tuning)
    columns = min(triton.next_power_of_2(size), SUM_COLUMNS)
    _sum_terms[(num_tokens, triton.cdiv(size, columns))](
        terms, routing.weights, out, size, TOP_K=top_k, COLUMNS=columns, num_warps=4, **pdl_options(h.device)
    )
    return out


def _launch(
    x: Tensor,
    weight: Tensor | GroupedRows,
    bias: Tensor | None,
    routing: TiledRouting,
    num_experts: int,
    gate: ExpertGate | None,
    out: Tensor,
    tuning: ExpertTuning | None,
) -> None:
    """out [num_tokens, top_k, num_out]; x has a row for each token with a gate, else for each pair."""
    num_tokens, top_k, num_out = out.shape
    tuning = tuning or expert_tuning(x, routing.tokens, gate is not None)
    if isinstance(weight, GroupedRows):
        values, planes, constants = weight.words, weight.planes, weight.constants()
        tuning = replace(tuning, tma=False)
        assert x.shape[1] == weight.num_in and tuning.columns == STEP_COLUMNS, (x.shape, weight.num_in, tuning)
    else:
        values, planes, constants = weight, None, PLAIN
    assert values.is_contiguous() and x.stride(1) == 1, (values.stride(), x.stride())
    scan = len(routing.tiles) == 0
    tiles = min(num_experts, num_tokens * top_k) if scan else len(routing.tiles)
    _expert_product[(tiles * triton.cdiv(num_out, tuning.rows),)](
        x,
        TensorDescriptor.from_tensor(values, [tuning.rows, tuning.columns]) if tuning.tma else values,
        *or_placeholder(values, planes, bias),
        routing.experts,
        routing.order,
        routing.tiles,
        out,
        num_tokens,
        num_experts,
        num_out,
        x.shape[1],
        x.stride(0),
        0.0 if gate is None else gate.alpha,
        0.0 if gate is None else gate.limit,
        TOP_K=top_k,
        PLACES=triton.next_power_of_2(top_k),
        ROWS=tuning.rows,
        TOKENS=routing.tokens,
        COLUMNS=tuning.columns,
        EVEN=x.shape[1] % tuning.columns == 0,
        STAGES=tuning.num_stages,
        SCAN=scan,
        GATE="" if gate is None else gate.name,
        WITH_BIAS=bias is not None,
        TMA=tuning.tma,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **constants,
        num_warps=tuning.num_warps,
        **pdl_options(x.device),
    )


@triton.jit
def _scan(experts, candidate, num_tokens, num_experts, TOP_K: tl.constexpr, PLACES: tl.constexpr, TOKENS: tl.constexpr):
    """-> an expert, the pair of each token with it, which tokens have one, and whether this program does the work.

    candidate  an expert; of fewer pairs than experts, a pair, of which the expert's first does the work
    """
    token = tl.arange(0, TOKENS)
    place = tl.arange(0, PLACES)
    valid = (token < num_tokens)[:, None] & (place < TOP_K)[None, :]
    pairs = token[:, None] * TOP_K + place[None, :]
    ids = tl.load(experts + pairs, mask=valid, other=-1)
    by_pair = num_tokens * TOP_K < num_experts
    expert = tl.load(experts + tl.where(by_pair, candidate, 0))
    expert = tl.where(by_pair, expert, candidate)
    pair = tl.max(tl.where(ids == expert, pairs, -1), 1)
    first = tl.min(tl.where(pair >= 0, token, TOKENS), 0)
    works = tl.where(by_pair, first == candidate // TOP_K, first < TOKENS)
    return expert, pair, pair >= 0, works


@triton.jit
def _read_tile(order, tiles, tile, TOKENS: tl.constexpr):
    """See `_scan`."""
    index = tl.arange(0, TOKENS)
    expert = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    num = tl.load(tiles + tile * 3 + 2)
    return expert, tl.load(order + first + index, mask=index < num, other=0), index < num, num > 0


@triton.jit
def _float_bits(words, n: tl.constexpr, FORMAT: tl.constexpr):
    """Value n of each word -> the bits of a float32: of 2^23 + value; of e2m1, of value / 2^126."""
    if FORMAT == "e2m1":
        code = words >> (4 * n)
        return (code & 8) << 28 | (code & 7) << 22
    else:
        bits: tl.constexpr = 4 if FORMAT == "int4" else 8
        return (words >> (bits * n) & ((1 << bits) - 1)) | 0x4B000000


@triton.jit
def _load_groups(
    words, planes, rows, start, num_in, num_rows, COLUMNS: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of `rows` from `start` on, (value - zero) * scale in float32; see `GroupedRows`."""
    WORDS: tl.constexpr = COLUMNS // (4 if FORMAT == "int8" else 8)
    SIZE: tl.constexpr = GROUP if GROUP < COLUMNS else COLUMNS
    PER_WORD: tl.constexpr = 4 if PLANES == "byte" else 2 if PLANES == "pair" else 1
    row_words = (num_in + COLUMNS - 1) // COLUMNS * WORDS
    w = tl.load(words + rows[:, None] * row_words + (start // COLUMNS * WORDS + tl.arange(0, WORDS))[None, :])
    group = start // GROUP + tl.arange(0, COLUMNS // SIZE)
    plane = tl.load(planes + (group // PER_WORD).to(tl.int64)[None, :] * num_rows + rows[:, None])
    plane = plane >> (group % PER_WORD * (32 // PER_WORD))[None, :]
    if PLANES == "byte":
        exponent = plane & 255
        scale = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    elif PLANES == "wide":
        scale = plane.to(tl.float32, bitcast=True)
    else:
        scale = read_half(plane, 0, SCALES)
    a, b = _float_bits(w, 0, FORMAT), _float_bits(w, 1, FORMAT)
    c, d = _float_bits(w, 2, FORMAT), _float_bits(w, 3, FORMAT)
    if FORMAT == "int8":
        bits = join_int8(a, b, c, d)
    else:
        e, f = _float_bits(w, 4, FORMAT), _float_bits(w, 5, FORMAT)
        g, h = _float_bits(w, 6, FORMAT), _float_bits(w, 7, FORMAT)
        bits = join_int4(a, b, c, d, e, f, g, h)
    values = bits.reshape(rows.shape[0], COLUMNS // SIZE, SIZE).to(tl.float32, bitcast=True)
    if FORMAT == "e2m1":
        values *= 2.0**126
    elif PLANES == "zero":
        values -= ((plane >> 16 & 255) + (1 << 23)).to(tl.float32)[:, :, None]
    else:
        values -= 2.0**23 + ZERO
    return (values * scale[:, :, None]).reshape(rows.shape[0], COLUMNS)


@triton.jit
def _load_weight(
    weight, planes, first_row, rows, start, num_in, num_rows, DTYPE: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Columns from `start` on, of the rows from first_row on with TMA, else of `rows`; num_rows: of all experts."""
    if FORMAT != "":
        wide = _load_groups(weight, planes, rows, start, num_in, num_rows, COLUMNS, FORMAT, PLANES, GROUP, ZERO, SCALES)
        return wide.to(DTYPE)
    elif TMA:
        return weight.load([first_row, start])
    else:
        column = start + tl.arange(0, COLUMNS)
        ptrs = weight + rows[:, None] * num_in + column[None, :]
        return tl.load(ptrs) if EVEN else tl.load(ptrs, mask=(column < num_in)[None, :], other=0.0)


@triton.jit
def _gated(gate, up, alpha, limit, GATE: tl.constexpr):
    """See `ExpertGate`."""
    if GATE == "silu":
        return gate * tl.sigmoid(gate) * up
    elif GATE == "gelu":  # 1 + tanh(z) is 2 * sigmoid(2 * z)
        return gate * tl.sigmoid(GELU_SLOPE * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        tl.static_assert(GATE == "swiglu")
        gate = tl.where(gate > limit, limit, gate)  # NaN stays
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        return (up + 1) * gate * tl.sigmoid(alpha * gate)


@triton.jit(do_not_specialize=["num_tokens", "alpha", "limit"])
def _expert_product(
    x,
    weight,
    planes,
    bias,
    experts,
    order,
    tiles,
    out,
    num_tokens,
    num_experts,
    num_out,
    num_in,
    x_stride,
    alpha,
    limit,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    SCAN: tl.constexpr,
    GATE: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
    PLANES: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    SCALES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """ROWS outputs of one expert (with a gate, of each half of its weight) for at most TOKENS pairs.

    Programs that read the same tokens are adjacent, then those that read the same weights.
    """
    wait_before_successor(USE_PDL)
    num_row_tiles = (num_out + ROWS - 1) // ROWS
    tile = tl.program_id(0) // num_row_tiles
    if SCAN:
        expert, pair, valid, works = _scan(experts, tile, num_tokens, num_experts, TOP_K, PLACES, TOKENS)
    else:
        expert, pair, valid, works = _read_tile(order, tiles, tile, TOKENS)
    if works:
        HALVES: tl.constexpr = 2 if GATE != "" else 1
        DTYPE: tl.constexpr = x.dtype.element_ty
        num_rows = num_experts * HALVES * num_out
        first_row = tl.program_id(0) % num_row_tiles * ROWS
        row = first_row + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        # Rows past the last are clamped to it, so that no load needs a mask for rows; TMA reads those that follow.
        weight_row = expert.to(tl.int64) * (HALVES * num_out) + tl.minimum(row, num_out - 1)
        w_row = expert * (HALVES * num_out) + first_row
        x_row = pair // TOP_K if GATE != "" else pair
        x_ptrs = x + x_row.to(tl.int64)[None, :] * x_stride + column[:, None]
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
        for start in tl.range(0, num_in, COLUMNS, num_stages=STAGES):
            mask = valid[None, :] if EVEN else valid[None, :] & (start + column < num_in)[:, None]
            xs = tl.load(x_ptrs + start, mask=mask, other=0.0)
            w = _load_weight(
                weight, planes, w_row, weight_row, start, num_in, num_rows, DTYPE, COLUMNS, EVEN, TMA,
                FORMAT, PLANES, GROUP, ZERO, SCALES,
            )  # fmt: skip
            acc = tl.dot(w, xs, acc, input_precision=PRECISION)
            if GATE != "":
                w = _load_weight(
                    weight, planes, w_row + num_out, weight_row + num_out, start, num_in, num_rows, DTYPE, COLUMNS,
                    EVEN, TMA, FORMAT, PLANES, GROUP, ZERO, SCALES,
                )  # fmt: skip
                acc_up = tl.dot(w, xs, acc_up, input_precision=PRECISION)
        if WITH_BIAS:
            acc += tl.load(bias + weight_row).to(tl.float32)[:, None]
            if GATE != "":
                acc_up += tl.load(bias + weight_row + num_out).to(tl.float32)[:, None]
        if GATE != "":
            acc = _gated(acc, acc_up, alpha, limit, GATE)
        out_ptrs = out + pair.to(tl.int64)[None, :] * num_out + row[:, None]
        tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=valid[None, :] & (row < num_out)[:, None])


@triton.jit
def _sum_terms(terms, weights, out, size, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, USE_PDL: tl.constexpr):
    """Some outputs of one token: the sum over its experts, in their order."""
    wait_for_predecessor(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        total += tl.load(weights + pair) * tl.load(terms + pair * size + column, mask=column < size, other=0.0)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=column < size)
