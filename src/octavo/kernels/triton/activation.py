"""Activations of the gated MLP, in Triton."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.launch import pdl_options, wait_for_predecessor

GELU_SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi))


def silu_mul(gate_up: Tensor) -> Tensor:
    """`reference.silu_mul`, rounded once, at the end."""
    return _gated(gate_up, gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """`reference.gelu_mul`, rounded once, at the end."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    num_tokens, double = gate_up.shape
    assert gate_up.is_contiguous(), gate_up.stride()
    out = gate_up.new_empty(num_tokens, double // 2)
    if out.numel():
        columns = min(triton.next_power_of_2(double // 2), 1024)
        # Only the grid's first dimension may exceed 65,535.
        _gated_mul[(num_tokens, triton.cdiv(double // 2, columns))](
            gate_up, out, SIZE=double // 2, COLUMNS=columns, GELU=gelu, num_warps=4, **pdl_options(out.device)
        )
    return out


@triton.jit
def _gated_mul(gate_up, out, SIZE: tl.constexpr, COLUMNS: tl.constexpr, GELU: tl.constexpr, USE_PDL: tl.constexpr):
    wait_for_predecessor(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < SIZE
    gate = tl.load(gate_up + token * 2 * SIZE + column, mask=mask, other=0.0)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + column, mask=mask, other=0.0)
    tl.store(out + token * SIZE + column, gated(gate, up, GELU), mask=mask)


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """silu(gate) * up, or with GELU gelu_tanh(gate) * up, rounded once, to their dtype."""
    wide = gate.to(tl.float32)
    slope = wide
    if GELU:  # 1 + tanh(z) is 2 * sigmoid(2 * z)
        slope = GELU_SLOPE * (wide + 0.044715 * wide * wide * wide)
    return (wide * tl.sigmoid(slope) * up.to(tl.float32)).to(gate.dtype)
