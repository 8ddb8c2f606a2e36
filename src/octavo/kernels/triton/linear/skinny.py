"""Products of few tokens with a weight on a GPU, in Triton, together with what stands around them in a layer.

Such a product is bound by reading the weight once. What a library chooses for it leaves half of the memory's speed
unused where the weight is small, since it has too few programs to keep enough bytes in flight; and a norm before it, an
activation or a sum behind it are kernels that take as long to start as to run. Here they are part of it:

    make_normed_residual   x -> stream
    norm_linear    stream -> rms_norm(stream) @ weight.T, and of a gated MLP's weight the activation, too
    add_linear     stream, x -> stream + x @ weight.T
    project_qkv  stream -> q; K and V into their slots: `norm_linear` and `rope_kv_write`, on Hopper in one

so that a layer is four products, attention, and at most one kernel that prepares that. A norm's factor is the same for
all outputs of a token, so it is applied to them in the end; the sums of squares that it takes are left, in parts, by
whoever wrote the stream.

A program takes a few rows of the weight and, where these are few in all, a part of their columns: the last program to
finish adds up the parts, in a fixed order, so that results do not depend on who was last. On Hopper, `stream_linear` is
faster.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference import split_heads
from octavo.kernels.reference.norms import Gate, NormedResidual
from octavo.kernels.triton.activation import GELU_SLOPE
from octavo.kernels.triton.kv.write import rope_kv_write
from octavo.kernels.triton.launch import given, overlapped, wait_for_predecessor
from octavo.kernels.triton.linear import qkv_hopper as stream_heads
from octavo.kernels.triton.linear import skinny_hopper as stream_linear
from octavo.kernels.triton.linear.skinny_hopper import StreamTuning, can_stream, padded_tokens, stream_tuning

MOST_TOKENS = 32
"""That there are tunings for."""
EDGE_TOKENS = 24
"""Beyond, the library has the edge, with all the kernels around it."""
LARGE_BYTES = 128 << 20
"""Of a weight: from there on the library reads at the memory's speed, and has the edge with any number of tokens."""
LINE_BYTES = tl.constexpr(128)
FETCHED = tl.constexpr(1024)
"""Columns of its rows that a program asks for before its predecessor has ended."""
SQUARES = tl.constexpr(64)
"""Parts of a stream's squares that are read at a time."""


@dataclass(frozen=True, slots=True)
class ThinTuning:
    """rows, columns: of the weight, a program's tile; splits: programs that share a row."""

    rows: int
    columns: int
    splits: int
    num_warps: int
    num_stages: int


Tuning = ThinTuning | StreamTuning


def thin_tuning(num_out: int, num_in: int, num_tokens: int, gated: bool) -> ThinTuning:
    """What was fastest on an H200; see benchmarks/kernels/bench_thin_linear.py."""
    few = num_tokens <= 16
    if gated and num_in > 2048:
        return ThinTuning(32, 256, 1, num_warps=4, num_stages=3)
    if gated:
        return ThinTuning(32, 128, 1, num_warps=2, num_stages=4) if few else ThinTuning(64, 128, 1, 4, 3)
    if few and num_out > 4096:
        return ThinTuning(16, 256, 2, num_warps=2, num_stages=3)
    if max(num_out // 2, num_in) <= 1024:
        return ThinTuning(16, 128, 1 if num_out > 1024 else 2, num_warps=2, num_stages=4)
    if few:
        splits = max(1, min(512 * 32 // num_out, num_in // 256, 16))
        return ThinTuning(32, 256, 1 << (splits.bit_length() - 1), num_warps=4, num_stages=3)
    if num_in <= 1024:
        return ThinTuning(32, 128, 2, num_warps=2, num_stages=4)
    return ThinTuning(64, 64, 16, num_warps=4, num_stages=5)


def max_small_batch_tokens(weight: Tensor) -> int:
    """See `reference.max_small_batch_tokens`."""
    if can_stream(weight):
        small = weight.nbytes <= stream_linear.SMALL_BYTES
        return stream_linear.MOST_TOKENS_OF_SMALL if small else stream_linear.MOST_TOKENS
    return EDGE_TOKENS if weight.nbytes <= LARGE_BYTES else 0


def make_normed_residual(x: Tensor, norm: Tensor) -> NormedResidual:
    """See `reference.make_normed_residual`."""
    num_tokens, size = x.shape
    padded = padded_tokens(num_tokens)
    weighted, squares = torch.empty_like(x), torch.empty(1, padded, dtype=torch.float32, device=x.device)
    _make_normed_residual[(padded,)](
        x, norm, weighted, squares, num_tokens, size, SIZE=triton.next_power_of_2(size), num_warps=4
    )
    return NormedResidual(x, weighted, squares)


def norm_linear(
    residual: NormedResidual,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: Gate = "",
    *,
    tuning: Tuning | None = None,
) -> Tensor:
    """See `reference.norm_linear`, for at most `max_small_batch_tokens`; weight contiguous. Rounded at the end."""
    y, _ = _launch(residual.weighted, weight, bias, gate, tuning, squares=residual.squares, eps=eps)
    return y


def add_linear(
    residual: NormedResidual,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor,
    *,
    tuning: Tuning | None = None,
) -> NormedResidual:
    """See `reference.add_linear`, for at most `max_small_batch_tokens`; weight contiguous. Rounded at the end."""
    y, written = _launch(x, weight, bias, "", tuning, residual=residual.x, norm=norm)
    assert written is not None
    return NormedResidual(y, *written)


def project_qkv(
    residual: NormedResidual,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    kv_layer: Tensor,
    batch: RaggedBatch,
    cos_sin: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    """See `reference.project_qkv`, for at most `max_small_batch_tokens`."""
    if can_stream(weight) and kv_layer.shape[4] in stream_heads.HEAD_DIMS:
        return stream_heads.launch(
            residual, eps, weight, bias, kv_layer, batch, cos_sin, q_norm=q_norm, k_norm=k_norm, norm_eps=norm_eps
        )
    q, k, v = split_heads(norm_linear(residual, eps, weight, bias), kv_layer)
    return rope_kv_write(
        q, k, v, batch.positions, cos_sin, kv_layer, batch.slot_mapping, q_norm=q_norm, k_norm=k_norm, eps=norm_eps
    )


def _tuning(weight: Tensor, num_tokens: int, gated: bool) -> Tuning:
    num_rows, num_in = weight.shape
    num_out = num_rows // 2 if gated else num_rows
    if can_stream(weight):
        return stream_tuning(num_out, num_in, num_tokens, gated)
    return thin_tuning(num_out, num_in, num_tokens, gated)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Programs that have finished their part of a row, for every tile of rows; each use leaves zeros behind."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Gate,
    tuning: Tuning | None,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """-> y, and with a norm (weighted, squares) of it. Calls on a device must not overlap: they share the counters."""
    num_tokens, num_in = x.shape
    num_out = weight.shape[0] // (2 if gate else 1)
    assert num_tokens > 0 and weight.is_contiguous() and x.stride(1) == 1, (x.shape, x.stride())
    tuning = tuning or _tuning(weight, num_tokens, bool(gate))
    if isinstance(tuning, StreamTuning):
        return stream_linear.launch(
            x, weight, bias, gate, tuning, squares=squares, eps=eps, residual=residual, norm=norm
        )
    assert num_tokens <= MOST_TOKENS
    assert not (gate and tuning.splits > 1), tuning
    y = torch.empty(num_tokens, num_out, dtype=x.dtype, device=x.device)
    tiles, tokens = triton.cdiv(num_out, tuning.rows), padded_tokens(num_tokens)
    written = None
    if norm is not None:
        written = torch.empty_like(y), torch.empty(tiles, tokens, dtype=torch.float32, device=x.device)
    num_sums = tuning.splits * num_tokens * num_out if tuning.splits > 1 else 0
    _thin_linear[(tiles, tuning.splits)](
        x,
        weight,
        *given(y, bias, squares, residual, norm, y, *(written or (None, None))),
        torch.empty(num_sums, dtype=torch.float32, device=x.device),
        _counters(x.device),
        num_tokens,
        num_out,
        num_in,
        x.stride(0),
        0 if squares is None else len(squares),
        eps,
        ROWS=tuning.rows,
        TOKENS=tokens,
        COLUMNS=tuning.columns,
        EVEN=num_in % tuning.columns == 0,
        SPLITS=tuning.splits,
        STAGES=tuning.num_stages,
        GATE=gate,
        SCALED=squares is not None,
        WITH_BIAS=bias is not None,
        WITH_RESIDUAL=residual is not None,
        WITH_NORM=norm is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
        **overlapped(x.device),
    )
    return y, written


@triton.jit(do_not_specialize=["num_tokens"])
def _make_normed_residual(x, norm, weighted, squares, num_tokens, size, SIZE: tl.constexpr):
    """One token, or padding behind the last."""
    token = tl.program_id(0)
    column = tl.arange(0, SIZE)
    here = (column < size) & (token < num_tokens)
    values = tl.load(x + token * size + column, mask=here, other=0.0)
    wide = values.to(tl.float32)
    tl.store(squares + token, tl.sum(wide * wide, 0))
    factor = tl.load(norm + column, mask=here, other=0.0).to(tl.float32)
    tl.store(weighted + token * size + column, (wide * factor).to(values.dtype), mask=here)


@triton.jit
def _fetch(lines, begin, end):
    """Ask for columns from begin on, FETCHED at most, of some rows of a weight, for the level-2 cache; never for
    what is not theirs, also where there is nothing to ask for."""
    step: tl.constexpr = LINE_BYTES // (lines.dtype.element_ty.primitive_bitwidth // 8)
    at = tl.minimum(begin + tl.arange(0, FETCHED // step) * step, tl.maximum(end - 1, begin))
    places = (lines + at[None, :]).to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], tl.int32, False, 1)


@triton.jit(do_not_specialize=["num_tokens", "num_squares"])
def _thin_linear(
    x,
    weight,
    bias,
    squares,
    residual,
    norm,
    y,
    weighted,
    own_squares,
    parts,
    counters,
    num_tokens,
    num_out,
    num_in,
    x_stride,
    num_squares,
    eps,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    GATE: tl.constexpr,
    SCALED: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    WITH_RESIDUAL: tl.constexpr,
    WITH_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """ROWS rows of the weight, with a gate ROWS of each half, and one of SPLITS parts of their columns."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    out = tile * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    steps = (num_in + COLUMNS - 1) // COLUMNS
    begin = part * steps // SPLITS * COLUMNS
    end = (part + 1) * steps // SPLITS * COLUMNS
    # Rows past the last are the last again: what is not there is not read, and no load needs a mask for it.
    lines = weight + tl.minimum(out, num_out - 1).to(tl.int64)[:, None] * num_in
    upper = lines + num_out.to(tl.int64) * num_in
    if OVERLAPPED:
        _fetch(lines, begin, tl.minimum(end, num_in))
        if GATE != "":
            _fetch(upper, begin, tl.minimum(end, num_in))
    wait_for_predecessor(OVERLAPPED)
    some = tl.arange(0, SQUARES)
    if SCALED:  # asked for now, needed at the end
        first_squares = tl.load(squares + some[:, None] * TOKENS + token, mask=(some < num_squares)[:, None], other=0.0)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        at = start + column
        inside = (token < num_tokens)[None, :] & (at < num_in)[:, None]
        xs = tl.load(x + token[None, :] * x_stride + at[:, None], mask=inside, other=0.0)
        if EVEN:
            w = tl.load(lines + at[None, :])
        else:
            w = tl.load(lines + at[None, :], mask=(at < num_in)[None, :], other=0.0)
        acc = tl.dot(w, xs, acc, input_precision=PRECISION)
        if GATE != "":
            if EVEN:
                w = tl.load(upper + at[None, :])
            else:
                w = tl.load(upper + at[None, :], mask=(at < num_in)[None, :], other=0.0)
            acc_up = tl.dot(w, xs, acc_up, input_precision=PRECISION)
    here = (out < num_out)[:, None] & (token < num_tokens)[None, :]
    place = token[None, :] * num_out + out[:, None]
    mine = True
    if SPLITS > 1:
        size = num_tokens * num_out
        tl.store(parts + part * size + place, acc, mask=here)
        tl.debug_barrier()
        mine = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
        if mine:
            acc = tl.zeros([ROWS, TOKENS], tl.float32)
            for other in tl.static_range(SPLITS):
                acc += tl.load(parts + other * size + place, mask=here, other=0.0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if mine:
        if SCALED:
            total = tl.sum(first_squares, 0)
            for first in range(SQUARES, num_squares, SQUARES):
                inside = (first + some < num_squares)[:, None]
                total += tl.sum(tl.load(squares + (first + some[:, None]) * TOKENS + token, mask=inside, other=0.0), 0)
            scale = tl.rsqrt(total / num_in + eps)
            acc *= scale[None, :]
            acc_up *= scale[None, :]
        if WITH_BIAS:
            acc += tl.load(bias + out, mask=out < num_out, other=0.0).to(tl.float32)[:, None]
            if GATE != "":
                acc_up += tl.load(bias + num_out + out, mask=out < num_out, other=0.0).to(tl.float32)[:, None]
        if GATE == "silu":
            acc = acc * tl.sigmoid(acc) * acc_up
        if GATE == "gelu":
            acc = acc * tl.sigmoid(GELU_SLOPE * (acc + 0.044715 * acc * acc * acc)) * acc_up
        if WITH_RESIDUAL:
            acc += tl.load(residual + place, mask=here, other=0.0).to(tl.float32)
        rounded = acc.to(y.dtype.element_ty)
        tl.store(y + place, rounded, mask=here)
        if WITH_NORM:
            wide = tl.where(here, rounded.to(tl.float32), 0.0)
            tl.store(own_squares + tile * TOKENS + token, tl.sum(wide * wide, 0))
            factor = tl.load(norm + out, mask=out < num_out, other=0.0).to(tl.float32)
            tl.store(weighted + place, (wide * factor[:, None]).to(y.dtype.element_ty), mask=here)
