"""Linear layers for small batches (skinny products), fused with norms, activations and residual sums, in Triton.

Such a product is bound by reading the weight once. Library kernels leave half of the memory bandwidth unused for small
weights, because too few programs keep too few bytes in flight. The norm before the product, and the activation or the
sum after it, are kernels that take as long to start as to run. Here they are fused:

    make_normed_residual  x -> residual
    norm_linear           residual -> rms_norm(residual) @ weight.T; for a gated MLP also the activation
    add_linear            residual, x -> residual + x @ weight.T
    few_rows_linear       x -> x @ weight.T, one rank's part of what `reduce.push_add` adds to the residual; on Hopper,
                          `add_linear` of ranks sums the parts itself
    project_qkv           residual -> q, and K and V to their slots: `norm_linear` and `rope_kv_write`, on Hopper in one

A layer is then four products, attention, and at most one kernel before it. The norm's scale is the same for all outputs
of a token, so it is applied to the finished sums. The kernel that writes the residual also writes the sums of squares
for the scale, in parts.

A program takes a few rows of the weight and, if there are few rows in all, a split of their columns. The last program
to finish adds the partial sums in a fixed order, so results do not depend on which one is last. On Hopper,
`skinny_hopper` is faster.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference import split_heads
from octavo.kernels.reference.norms import Gate, NormedResidual
from octavo.kernels.triton.activation import GELU_SLOPE
from octavo.kernels.triton.kv.write import rope_kv_write
from octavo.kernels.triton.launch import or_placeholder, pdl_options, wait_for_predecessor
from octavo.kernels.triton.linear.tuning import (
    MAX_TOKENS,
    HopperTuning,
    Tuning,
    fuses_qkv,
    linear_tuning,
    padded_tokens,
    supports_hopper,
)

if TYPE_CHECKING:
    from octavo.kernels.triton.reduce import PeerBuffers

CACHE_LINE_BYTES = tl.constexpr(128)
PREFETCH_COLUMNS = tl.constexpr(1024)
"""Columns of the weight that a program prefetches before its predecessor has ended."""
SQUARES_PER_LOAD = tl.constexpr(64)
"""Partial sums of squares that are read at a time."""


def make_normed_residual(x: Tensor, norm: Tensor) -> NormedResidual:
    """`reference.make_normed_residual`."""
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
    """`reference.norm_linear` for at most `max_small_batch_tokens`; weight is contiguous. Rounded once, at the end."""
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
    peers: PeerBuffers | None = None,
) -> NormedResidual:
    """`reference.add_linear` for at most `max_small_batch_tokens`; weight is contiguous. Rounded once, at the end.

    peers  the product is the sum of the ranks' products, each rounded before; on Hopper, for an even number of outputs
           whose words fit into `peers.words`
    """
    y, norm_outputs = _launch(x, weight, bias, "", tuning, residual=residual.x, norm=norm, peers=peers)
    assert norm_outputs is not None
    return NormedResidual(y, *norm_outputs)


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, tuning: Tuning | None = None) -> Tensor:
    """`reference.few_rows_linear` for at most `max_small_batch_tokens`; weight is contiguous."""
    return _launch(x, weight, bias, "", tuning)[0]


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
    kv_scales: Tensor | None = None,
) -> Tensor:
    """`reference.project_qkv` for at most `max_small_batch_tokens`."""
    if fuses_qkv(kv_layer, kv_scales) and supports_hopper(weight):
        from octavo.kernels.triton.linear import qkv_hopper  # only where the GPU has its instructions

        return qkv_hopper.launch(
            residual, eps, weight, bias, kv_layer, batch, cos_sin, q_norm=q_norm, k_norm=k_norm, norm_eps=norm_eps
        )
    q, k, v = split_heads(norm_linear(residual, eps, weight, bias), kv_layer)
    return rope_kv_write(
        q, k, v, batch.positions, cos_sin, kv_layer, batch.slot_mapping, q_norm=q_norm, k_norm=k_norm, eps=norm_eps,
        kv_scales=kv_scales,
    )  # fmt: skip


@functools.cache
def finished_counters(device: torch.device) -> Tensor:
    """For each tile of rows, how many programs have stored their partial sums; zeros between launches."""
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
    peers: PeerBuffers | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """-> y, and with a norm its (weighted, squares). Launches on a device must not overlap: they share the counters."""
    num_tokens, num_in = x.shape
    num_out = weight.shape[0] // (2 if gate else 1)
    assert num_tokens > 0 and weight.is_contiguous() and x.stride(1) == 1, (x.shape, x.stride())
    tuning = tuning or linear_tuning(weight, num_tokens, bool(gate))
    if isinstance(tuning, HopperTuning):
        from octavo.kernels.triton.linear import skinny_hopper  # only where the GPU has its instructions

        return skinny_hopper.launch(
            x, weight, bias, gate, tuning, squares=squares, eps=eps, residual=residual, norm=norm, peers=peers
        )
    assert num_tokens <= MAX_TOKENS and peers is None
    assert not (gate and tuning.splits > 1), tuning
    y = torch.empty(num_tokens, num_out, dtype=x.dtype, device=x.device)
    tiles, tokens = triton.cdiv(num_out, tuning.rows), padded_tokens(num_tokens)
    norm_outputs = None
    if norm is not None:
        norm_outputs = torch.empty_like(y), torch.empty(tiles, tokens, dtype=torch.float32, device=x.device)
    num_sums = tuning.splits * num_tokens * num_out if tuning.splits > 1 else 0
    _skinny[(tiles, tuning.splits)](
        x,
        weight,
        *or_placeholder(y, bias, squares, residual, norm, y, *(norm_outputs or (None, None))),
        torch.empty(num_sums, dtype=torch.float32, device=x.device),
        finished_counters(x.device),
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
        **pdl_options(x.device),
    )
    return y, norm_outputs


@triton.jit(do_not_specialize=["num_tokens"])
def _make_normed_residual(x, norm, weighted, squares, num_tokens, size, SIZE: tl.constexpr):
    """One token, or padding after the last."""
    token = tl.program_id(0)
    column = tl.arange(0, SIZE)
    mask = (column < size) & (token < num_tokens)
    values = tl.load(x + token * size + column, mask=mask, other=0.0)
    wide = values.to(tl.float32)
    tl.store(squares + token, tl.sum(wide * wide, 0))
    norm_weight = tl.load(norm + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(weighted + token * size + column, (wide * norm_weight).to(values.dtype), mask=mask)


@triton.jit
def _prefetch_weight(row_ptrs, begin, end):
    """Prefetch columns of some rows of the weight into the L2 cache: from begin on, at most PREFETCH_COLUMNS.

    Addresses are clamped to [begin, end), or to begin if the range is empty.
    """
    step: tl.constexpr = CACHE_LINE_BYTES // (row_ptrs.dtype.element_ty.primitive_bitwidth // 8)
    column = tl.minimum(begin + tl.arange(0, PREFETCH_COLUMNS // step) * step, tl.maximum(end - 1, begin))
    ptrs = (row_ptrs + column[None, :]).to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs], tl.int32, False, 1)


@triton.jit(do_not_specialize=["num_tokens", "num_squares"])
def _skinny(
    x,
    weight,
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
    USE_PDL: tl.constexpr,
):
    """ROWS rows of the weight (with a gate, of each half) and one of SPLITS ranges of their columns."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    num_steps = (num_in + COLUMNS - 1) // COLUMNS
    begin = split * num_steps // SPLITS * COLUMNS
    end = (split + 1) * num_steps // SPLITS * COLUMNS
    # Rows past the last are clamped to it, so that no load needs a mask for rows.
    row_ptrs = weight + tl.minimum(row, num_out - 1).to(tl.int64)[:, None] * num_in
    up_ptrs = row_ptrs + num_out.to(tl.int64) * num_in
    if USE_PDL:
        _prefetch_weight(row_ptrs, begin, tl.minimum(end, num_in))
        if GATE != "":
            _prefetch_weight(up_ptrs, begin, tl.minimum(end, num_in))
    wait_for_predecessor(USE_PDL)
    first_squares = load_squares(squares, token, num_squares, TOKENS, SCALED)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        columns = start + column
        valid = (token < num_tokens)[None, :] & (columns < num_in)[:, None]
        xs = tl.load(x + token[None, :] * x_stride + columns[:, None], mask=valid, other=0.0)
        if EVEN:
            w = tl.load(row_ptrs + columns[None, :])
        else:
            w = tl.load(row_ptrs + columns[None, :], mask=(columns < num_in)[None, :], other=0.0)
        acc = tl.dot(w, xs, acc, input_precision=PRECISION)
        if GATE != "":
            if EVEN:
                w = tl.load(up_ptrs + columns[None, :])
            else:
                w = tl.load(up_ptrs + columns[None, :], mask=(columns < num_in)[None, :], other=0.0)
            acc_up = tl.dot(w, xs, acc_up, input_precision=PRECISION)
    finish_tile(
        acc, acc_up, first_squares, tile, split, row, token, bias, squares, residual, norm, y, weighted, out_squares,
        partial_sums, counters, num_tokens, num_out, num_in, num_out, num_squares, eps,
        TOKENS, SPLITS, GATE, SCALED, WITH_BIAS, WITH_RESIDUAL, WITH_NORM,
    )  # fmt: skip


@triton.jit
def load_squares(squares, token, num_squares, TOKENS: tl.constexpr, SCALED: tl.constexpr):
    """The first parts of the sums of squares: loaded early, used by `finish_tile`."""
    part = tl.arange(0, SQUARES_PER_LOAD)
    mask = (part < num_squares)[:, None]
    return tl.load(squares + part[:, None] * TOKENS + token, mask=mask, other=0.0) if SCALED else mask


@triton.jit
def finish_tile(
    acc, acc_up, first_squares, tile, split, row, token, bias, squares, residual, norm, y, weighted, out_squares,
    partial_sums, counters, num_tokens, num_out, num_in, y_stride, num_squares, eps,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, GATE: tl.constexpr, SCALED: tl.constexpr, WITH_BIAS: tl.constexpr,
    WITH_RESIDUAL: tl.constexpr, WITH_NORM: tl.constexpr,
):  # fmt: skip
    """Add the sums of all splits, apply scale, bias, gate, residual and norm, and store: the last program of a tile.

    acc, acc_up  [rows, tokens], this split's sums; acc_up only with a gate
    """
    mask = (row < num_out)[:, None] & (token < num_tokens)[None, :]
    offsets = token[None, :] * num_out + row[:, None]
    is_last = True
    if SPLITS > 1:
        size = num_tokens * num_out
        up_sums = partial_sums + SPLITS * size
        tl.store(partial_sums + split * size + offsets, acc, mask=mask)
        if GATE != "":
            tl.store(up_sums + split * size + offsets, acc_up, mask=mask)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            acc = tl.zeros_like(acc)
            acc_up = tl.zeros_like(acc_up)
            for other_split in tl.static_range(SPLITS):
                acc += tl.load(partial_sums + other_split * size + offsets, mask=mask, other=0.0, cache_modifier=".cg")
                if GATE != "":
                    acc_up += tl.load(
                        up_sums + other_split * size + offsets, mask=mask, other=0.0, cache_modifier=".cg"
                    )
            tl.store(counters + tile, 0)
    if is_last:
        if SCALED:
            part = tl.arange(0, SQUARES_PER_LOAD)
            total = tl.sum(first_squares, 0)
            for base in range(SQUARES_PER_LOAD, num_squares, SQUARES_PER_LOAD):
                valid = (base + part < num_squares)[:, None]
                total += tl.sum(tl.load(squares + (base + part[:, None]) * TOKENS + token, mask=valid, other=0.0), 0)
            scale = tl.rsqrt(total / num_in + eps)
            acc *= scale[None, :]
            acc_up *= scale[None, :]
        if WITH_BIAS:
            acc += tl.load(bias + row, mask=row < num_out, other=0.0).to(tl.float32)[:, None]
            if GATE != "":
                acc_up += tl.load(bias + num_out + row, mask=row < num_out, other=0.0).to(tl.float32)[:, None]
        if GATE == "silu":
            acc = acc * tl.sigmoid(acc) * acc_up
        if GATE == "gelu":
            acc = acc * tl.sigmoid(GELU_SLOPE * (acc + 0.044715 * acc * acc * acc)) * acc_up
        if WITH_RESIDUAL:
            acc += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = acc.to(y.dtype.element_ty)
        tl.store(y + token[None, :] * y_stride + row[:, None], rounded, mask=mask)
        if WITH_NORM:
            wide = tl.where(mask, rounded.to(tl.float32), 0.0)
            tl.store(out_squares + tile * TOKENS + token, tl.sum(wide * wide, 0))
            norm_weight = tl.load(norm + row, mask=row < num_out, other=0.0).to(tl.float32)
            tl.store(weighted + offsets, (wide * norm_weight[:, None]).to(y.dtype.element_ty), mask=mask)
