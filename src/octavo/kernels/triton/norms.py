"""RMS norms, in Triton: one pass over the data, bound by memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.launch import pdl_options, wait_for_predecessor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x.contiguous(), None, weight, out, None, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x.contiguous(), residual.contiguous(), weight, out, total, eps)
    return out, total


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None, eps: float) -> None:
    size = x.shape[-1]
    num_rows = x.numel() // size
    if num_rows == 0:
        return
    columns = triton.next_power_of_2(size)
    rows = max(1, min(1024 // columns, 16))  # several short rows for each program, so that it has enough work
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        out if total is None else total,
        num_rows,
        eps,
        SIZE=size,
        ROWS=rows,
        COLUMNS=columns,
        ADD=residual is not None,
        num_warps=max(1, min(rows * columns // 512, 16)),
        **pdl_options(x.device),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x,
    residual,
    weight,
    out,
    total,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """ROWS rows of SIZE numbers. With ADD, of x + residual, which is rounded to its dtype and stored in `total`."""
    wait_for_predecessor(USE_PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    normed, offsets, mask = normed_rows(x, residual, weight, total, row, num_rows, eps, SIZE, COLUMNS, ADD)
    tl.store(out + offsets, normed, mask=mask)


@triton.jit
def normed_rows(
    x, residual, weight, total, row, num_rows, eps, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """row [rows] -> their norms [rows, COLUMNS], zero from SIZE on, their offsets, and what of them there is."""
    column = tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    offsets = row[:, None] * SIZE + column[None, :]
    values = tl.load(x + offsets, mask=mask, other=0.0)
    if ADD:
        values = (values.to(tl.float32) + tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)).to(
            values.dtype
        )
        tl.store(total + offsets, values, mask=mask)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)
    norm_weight = tl.load(weight + column, mask=column < SIZE, other=0.0)
    return weigh(wide * scale[:, None], norm_weight[None, :], values.dtype), offsets, mask


@triton.jit
def weigh(normed, weight, dtype: tl.constexpr):
    """Norms in float32, times their weight, in dtype."""
    if weight.dtype == dtype:  # a wider weight is applied before rounding
        normed = normed.to(dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(dtype)
