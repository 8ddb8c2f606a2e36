"""The two products of a mixture of experts, in Triton.

A program computes some outputs of one expert for a tile of its tokens. In a batch of at most `SCAN_TOKENS` tokens, a
tile has the whole batch, and programs find the tokens of their expert by themselves: decoding needs no kernel for that.
Others read the tiles of `assign`. Programs without tokens leave at once, so the grid depends on sizes alone.

A token's bits do not depend on the batch: each output is one sum in the order of the inputs, by the same instruction in
tiles of any size, and the sum over a token's experts is a kernel of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.reference.experts import ExpertGate, Routing
from octavo.kernels.triton.activation import GELU_SLOPE
from octavo.kernels.triton.experts.assign import TiledRouting, assign
from octavo.kernels.triton.experts.tuning import ExpertTuning, expert_tuning
from octavo.kernels.triton.launch import (
    or_placeholder,
    pdl_options,
    wait_before_successor,
    wait_for_predecessor,
)

SUM_COLUMNS = 512
"""Outputs of a program that adds the experts of a token."""


def experts_in(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Routing,
    num_experts: int,
    gate: ExpertGate,
    *,
    tuning: ExpertTuning | None = None,
) -> Tensor:
    """See `reference.experts_in`."""
    out = x.new_empty(*routing.experts.shape, len(weight) // (2 * num_experts))
    if out.numel():
        _launch(x, weight, bias, assign(routing, num_experts), num_experts, gate, out, tuning)
    return out


def experts_out(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Routing,
    num_experts: int,
    *,
    tuning: ExpertTuning | None = None,
) -> Tensor:
    """See `reference.experts_out`."""
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
    weight: Tensor,
    bias: Tensor | None,
    routing: TiledRouting,
    num_experts: int,
    gate: ExpertGate | None,
    out: Tensor,
    tuning: ExpertTuning | None,
) -> None:
    """out [num_tokens, top_k, num_out]; x has a row for each token with a gate, else for each pair."""
    assert weight.is_contiguous() and x.stride(1) == 1, (weight.stride(), x.stride())
    num_tokens, top_k, num_out = out.shape
    tuning = tuning or expert_tuning(x, routing.tokens, gate is not None)
    scan = len(routing.tiles) == 0
    tiles = min(num_experts, num_tokens * top_k) if scan else len(routing.tiles)
    _expert_product[(tiles * triton.cdiv(num_out, tuning.rows),)](
        x,
        TensorDescriptor.from_tensor(weight, [tuning.rows, tuning.columns]) if tuning.tma else weight,
        *or_placeholder(weight, bias),
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
def _load_weight(weight, first_row, rows, start, num_in, COLUMNS: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr):
    """Columns from `start` on, of the rows from first_row on with TMA, else of `rows`."""
    if TMA:
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
            w = _load_weight(weight, w_row, weight_row, start, num_in, COLUMNS, EVEN, TMA)
            acc = tl.dot(w, xs, acc, input_precision=PRECISION)
            if GATE != "":
                w = _load_weight(weight, w_row + num_out, weight_row + num_out, start, num_in, COLUMNS, EVEN, TMA)
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
