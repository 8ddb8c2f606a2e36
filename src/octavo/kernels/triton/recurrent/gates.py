"""Gates of recurrent layers and of attention, in Triton: one pass over the data, bound by memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.launch import pdl_options, wait_for_predecessor

COLUMNS = 1024
"""Most numbers of a program of `sigmoid_mul`."""


def delta_gates(a: Tensor, b: Tensor, log_decay: Tensor, step_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.delta_gates`."""
    num_tokens, num_heads = a.shape
    decay, beta = torch.empty(2, num_tokens, num_heads, dtype=torch.float32, device=a.device)
    if num_tokens:
        _delta_gates[(num_tokens,)](
            a,
            b,
            log_decay,
            step_bias,
            decay,
            beta,
            a.stride(0),
            b.stride(0),
            NUM_HEADS=num_heads,
            HEADS=triton.next_power_of_2(num_heads),
            num_warps=1,
            **pdl_options(a.device),
        )
    return decay, beta


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """See `reference.gated_rms_norm`."""
    num_tokens, num_heads, size = x.shape
    out = torch.empty(num_tokens, num_heads * size, dtype=x.dtype, device=x.device)
    if num_tokens:
        _gated_rms_norm[(num_tokens * num_heads,)](
            x.contiguous(),
            weight,
            gate,
            out,
            gate.stride(0),
            eps,
            NUM_HEADS=num_heads,
            SIZE=size,
            COLUMNS=triton.next_power_of_2(size),
            num_warps=1,
            **pdl_options(x.device),
        )
    return out


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See `reference.sigmoid_mul`."""
    num_tokens, size = x.shape
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    if num_tokens:
        columns = min(triton.next_power_of_2(size), COLUMNS)
        _sigmoid_mul[(num_tokens, triton.cdiv(size, columns))](
            x,
            gate,
            out,
            x.stride(0),
            gate.stride(0),
            SIZE=size,
            COLUMNS=columns,
            IS_COLUMN=gate.shape[1] == 1 < size,
            num_warps=4,
            **pdl_options(x.device),
        )
    return out


@triton.jit
def _delta_gates(
    a,
    b,
    log_decay,
    step_bias,
    decay,
    beta,
    a_stride,
    b_stride,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """The heads of one token."""
    wait_for_predecessor(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    mask = head < NUM_HEADS
    step = tl.load(a + token * a_stride + head, mask=mask, other=0.0).to(tl.float32)
    step += tl.load(step_bias + head, mask=mask, other=0.0)
    rate = tl.exp(tl.load(log_decay + head, mask=mask, other=0.0).to(tl.float32))
    small = tl.exp(tl.minimum(step, 20.0))
    rounded = 1.0 + small  # its error is put right: log(1 + y) = log(1 + y + e) y / (y + e)
    excess = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    softplus = tl.where(rounded == 1.0, small, tl.log(rounded) * small / excess)
    softplus = tl.where(step > 20.0, step, softplus)
    tl.store(decay + token * NUM_HEADS + head, -rate * softplus, mask=mask)
    values = tl.load(b + token * b_stride + head, mask=mask, other=0.0).to(tl.float32)
    tl.store(beta + token * NUM_HEADS + head, tl.sigmoid(values), mask=mask)


@triton.jit
def _gated_rms_norm(
    x,
    weight,
    gate,
    out,
    gate_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One head of a token."""
    wait_for_predecessor(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    mask = column < SIZE
    values = tl.load(x + row * SIZE + column, mask=mask, other=0.0)
    wide = values.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    own_weight = tl.load(weight + column, mask=mask, other=0.0)
    if own_weight.dtype == values.dtype:  # a wider weight is applied before rounding
        normed = normed.to(values.dtype).to(tl.float32)
    normed = (normed * own_weight.to(tl.float32)).to(values.dtype).to(tl.float32)
    gates = gate + row // NUM_HEADS * gate_stride + row % NUM_HEADS * SIZE + column
    gates = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (normed * gates * tl.sigmoid(gates)).to(values.dtype), mask=mask)


@triton.jit
def _sigmoid_mul(
    x,
    gate,
    out,
    x_stride,
    gate_stride,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_COLUMN: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Some columns of one token. IS_COLUMN: it has one gate"""
    wait_for_predecessor(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < SIZE
    values = tl.load(x + token * x_stride + column, mask=mask, other=0.0)
    if IS_COLUMN:
        gates = tl.load(gate + token * gate_stride).to(tl.float32)
    else:
        gates = tl.load(gate + token * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    factor = tl.sigmoid(gates).to(values.dtype).to(tl.float32)
    tl.store(out + token * SIZE + column, (values.to(tl.float32) * factor).to(values.dtype), mask=mask)
