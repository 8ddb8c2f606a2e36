"""x @ weight.T for few rows of x on a GPU, in Triton.

Such a product is bound by reading the weight once, and what a library chooses for it leaves half of the memory's speed
unused where the weight is small: it has too few programs to keep enough bytes in flight. Here a program takes few rows
of the weight, and where these are few in all, a part of their columns: the last program to finish adds up the parts,
in a fixed order, so that results do not depend on who was last.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 16
"""Of x. A matrix instruction has that many columns, used or not."""
MAX_OUT = 2048
"""Rows of a weight up to which this was faster than cuBLAS on an H200, by 1.1 to 2.8 times; above they were even."""


@dataclass(frozen=True, slots=True)
class SkinnyTuning:
    """rows, columns: of the weight, a program's tile; splits: programs that share a row."""

    rows: int
    columns: int
    splits: int
    num_warps: int
    num_stages: int


def skinny_tuning(num_out: int, num_in: int) -> SkinnyTuning:
    """What was fastest on an H200; see benchmarks/kernels/bench_skinny_linear.py."""
    splits = 1 if num_in <= 1024 else max(1, min(8, 512 // triton.cdiv(num_out, 16)))
    return SkinnyTuning(rows=16, columns=128, splits=splits, num_warps=2, num_stages=4)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Programs that have finished their part of a row, for every tile of rows; each use leaves zeros behind."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tuning: SkinnyTuning | None = None
) -> Tensor:
    """`torch.nn.functional.linear` for x [num_rows, num_in] with at most MAX_ROWS rows; weight [num_out, num_in],
    contiguous, bias [num_out] -> [num_rows, num_out] in x's dtype; sums in float32.

    Calls on one device must not overlap: they share the counters.
    """
    num_rows, num_in = x.shape
    num_out = weight.shape[0]
    assert num_rows <= MAX_ROWS and weight.is_contiguous() and x.stride(1) == 1, (x.shape, x.stride(), weight.stride())
    tuning = tuning or skinny_tuning(num_out, num_in)
    y = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(num_out, tuning.rows)
    parts = torch.empty(
        tuning.splits * num_rows * num_out if tuning.splits > 1 else 0, dtype=torch.float32, device=x.device
    )
    _skinny_linear[(tiles, tuning.splits)](
        x,
        weight,
        y if bias is None else bias,
        y,
        parts,
        _counters(x.device),
        num_rows,
        x.stride(0),
        NUM_OUT=num_out,
        NUM_IN=num_in,
        ROWS=tuning.rows,
        COLUMNS=tuning.columns,
        SPLITS=tuning.splits,
        STAGES=tuning.num_stages,
        WITH_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
    )
    return y


class SmallWeight:
    """A weight [num_out, num_in] on a GPU that is multiplied here for few rows of x, and by the library for many. In
    form one of `kernels.packed`, though nothing is moved."""

    has_rows = True

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
        few = x.shape[0] <= MAX_ROWS
        y = skinny_linear(x, self.weight, bias) if few else F.linear(x, self.weight, bias)
        return y.float() if wide else y

    def rows(self, indices: Tensor) -> Tensor:
        return self.weight[indices]


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_linear(
    x,
    weight,
    bias,
    y,
    parts,
    counters,
    num_rows,
    x_stride,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ROWS rows of the weight, and one of SPLITS parts of their columns."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    out = tile * ROWS + tl.arange(0, ROWS)
    row = tl.arange(0, 16)
    column = tl.arange(0, COLUMNS)
    steps: tl.constexpr = (NUM_IN + COLUMNS - 1) // COLUMNS
    begin = part * steps // SPLITS * COLUMNS
    end = (part + 1) * steps // SPLITS * COLUMNS
    # Rows past the last are the last again: what is not there is not read, and no load needs a mask for it.
    line = weight + tl.minimum(out, NUM_OUT - 1).to(tl.int64)[:, None] * NUM_IN
    acc = tl.zeros([ROWS, 16], tl.float32)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        at = start + column
        if NUM_IN % COLUMNS == 0:
            w = tl.load(line + at[None, :])
        else:
            w = tl.load(line + at[None, :], mask=(at < NUM_IN)[None, :], other=0.0)
        inside = (row < num_rows)[None, :] & (at < NUM_IN)[:, None]
        xs = tl.load(x + row[None, :] * x_stride + at[:, None], mask=inside, other=0.0)
        acc = tl.dot(w, xs, acc, input_precision=PRECISION)
    here = (out < NUM_OUT)[:, None] & (row < num_rows)[None, :]
    place = row[None, :] * NUM_OUT + out[:, None]
    if SPLITS > 1:
        size = num_rows * NUM_OUT
        tl.store(parts + part * size + place, acc, mask=here)
        tl.debug_barrier()
        finished = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if finished == SPLITS - 1:
            acc = tl.zeros([ROWS, 16], tl.float32)
            for other in tl.static_range(SPLITS):
                acc += tl.load(parts + other * size + place, mask=here, other=0.0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
            if WITH_BIAS:
                acc += tl.load(bias + out, mask=out < NUM_OUT, other=0.0).to(tl.float32)[:, None]
            tl.store(y + place, acc.to(y.dtype.element_ty), mask=here)
    else:
        if WITH_BIAS:
            acc += tl.load(bias + out, mask=out < NUM_OUT, other=0.0).to(tl.float32)[:, None]
        tl.store(y + place, acc.to(y.dtype.element_ty), mask=here)
