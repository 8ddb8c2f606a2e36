"""Norms, gated activations, and the fused products of the small-batch path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Gate = Literal["", "silu", "gelu"]


def max_small_batch_tokens(weight: Tensor) -> int:
    """Maximum tokens of a pass for the small-batch path (`norm_linear`, `add_linear`), in layers with this weight."""
    return 0


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; x [..., size], weight [size].

    The result is rounded to x's dtype before the weight is applied, as in training of the Llama family. A weight of
    another dtype, float32 for x of 16 bits, is applied before the rounding (Gemma).
    """
    wide = x.to(accumulation_dtype(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype != x.dtype:
        return (weight * (wide * scale)).to(x.dtype)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): the end of a layer and the next layer's norm in one operation."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


@dataclass(frozen=True, slots=True)
class NormedResidual:
    """The residual stream of the small-batch path, with its next RMS norm half computed.

    x         [num_tokens, size], the residual stream
    weighted  [num_tokens, size], x times the next norm's weight, in x's dtype
    squares   [num_parts, num_tokens or more], in `accumulation_dtype`: parts of each token's sum(x^2)
    """

    x: Tensor
    weighted: Tensor
    squares: Tensor

    def scale(self, eps: float) -> Tensor:
        """What normalises `weighted`, [num_tokens, 1] in `accumulation_dtype`."""
        num_tokens, size = self.x.shape
        return torch.rsqrt(self.squares.sum(0)[:num_tokens, None] / size + eps)


def make_normed_residual(x: Tensor, norm: Tensor) -> NormedResidual:
    """A residual from x [num_tokens, size] and the next norm's weight, norm [size]."""
    wide = x.to(accumulation_dtype(x.dtype))
    return NormedResidual(x, (wide * norm).to(x.dtype), wide.square().sum(1)[None])


def norm_linear(
    residual: NormedResidual, eps: float, weight: Tensor, bias: Tensor | None = None, gate: Gate = ""
) -> Tensor:
    """rms_norm(residual) @ weight.T + bias, then `silu_mul` or `gelu_mul` if there is a gate -> [num_tokens, num_out].

    weight [num_out, size], or [2 * num_out, size] with a gate; bias [num_out] or [2 * num_out]
    """
    scale = residual.scale(eps)
    wide = scale.dtype
    y = F.linear(residual.weighted.to(wide), weight.to(wide)) * scale
    y = (y if bias is None else y + bias).to(residual.x.dtype)
    return y if not gate else silu_mul(y) if gate == "silu" else gelu_mul(y)


def add_linear(
    residual: NormedResidual, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor
) -> NormedResidual:
    """residual + x @ weight.T + bias; x [num_tokens, num_in], weight [size, num_in], norm [size], the next norm's."""
    return make_normed_residual(residual.x + F.linear(x, weight, bias), norm)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias; x [num_tokens, num_in], weight [num_out, num_in], bias [num_out] or None."""
    return F.linear(x, weight, bias)


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias of the small-batch path where `add_linear` needs other ranks' sums."""
    return F.linear(x, weight, bias)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (arXiv 1607.06450).

    x [..., size], weight and bias [size] or None. Rounded once, at the end.
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU of each number (arXiv 1606.08415), exact or by its approximation "tanh" -> the same shape and dtype."""
    return F.gelu(x, approximate=approximate)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; gate_up [num_tokens, 2 * size] holds gate, then up -> [num_tokens, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, gelu by its tanh approximation (arXiv 1606.08415, 2); shapes as for `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
