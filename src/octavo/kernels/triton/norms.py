"""RMS norms on a GPU, in Triton: one pass over the data, whose bytes are all that they cost."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.launch import overlapped, wait_for_predecessor


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
    rows = max(1, min(1024 // columns, 16))  # small ones together, so that a program has enough to do
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
        **overlapped(x.device),
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
    OVERLAPPED: tl.constexpr,
):
    """ROWS rows of SIZE; with ADD, of x + residual, rounded to their dtype and kept in total."""
    wait_for_predecessor(OVERLAPPED)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    here = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    place = row[:, None] * SIZE + column[None, :]
    values = tl.load(x + place, mask=here, other=0.0)
    if ADD:
        values = (values.to(tl.float32) + tl.load(residual + place, mask=here, other=0.0).to(tl.float32)).to(
            values.dtype
        )
        tl.store(total + place, values, mask=here)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)
    factors = tl.load(weight + column, mask=column < SIZE, other=0.0)
    normed = wide * scale[:, None]
    if factors.dtype == values.dtype:  # a wider weight is applied before rounding
        normed = normed.to(values.dtype).to(tl.float32)
    normed = normed * factors.to(tl.float32)[None, :]
    tl.store(out + place, normed.to(values.dtype), mask=here)
