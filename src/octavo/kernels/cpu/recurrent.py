"""Gated DeltaNets on the CPU: `recurrent.h`. Without a compiler, and in float64, the operations are the reference's."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import native
from octavo.kernels.metadata import RaggedBatch


def causal_conv(x: Tensor, weight: Tensor, states: Tensor, first: int, batch: RaggedBatch) -> Tensor:
    """See `reference.causal_conv`."""
    library = _library_for(x, weight, states)
    operation = reference.causal_conv if library is None else library.causal_conv
    return operation(x, weight, states, first, batch)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, first: int, batch: RaggedBatch
) -> Tensor:
    """See `reference.gated_delta_rule`. Bits of a position do not depend on where slices begin and end."""
    library = _library_for(v, decay, beta, states)
    operation = reference.gated_delta_rule if library is None else library.delta_rule
    return operation(q, k, v, decay, beta, states, first, batch)


def delta_gates(a: Tensor, b: Tensor, log_decay: Tensor, step_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.delta_gates`."""
    library = _library_for(a, log_decay, step_bias)
    operation = reference.delta_gates if library is None else library.delta_gates
    return operation(a, b, log_decay, step_bias)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """See `reference.gated_rms_norm`."""
    library = _library_for(x, weight)
    operation = reference.gated_rms_norm if library is None else library.gated_rms_norm
    return operation(x, weight, gate, eps)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See `reference.sigmoid_mul`."""
    library = _library_for(x, *(() if gate.dtype == x.dtype else (gate,)))
    return reference.sigmoid_mul(x, gate) if library is None else library.sigmoid_mul(x, gate)


def _library_for(x: Tensor, *others: Tensor) -> native.Library | None:
    """x: float32 or bfloat16, its rows may be apart    others: float32"""
    has_functions = native.supports(x) and all(other.dtype == torch.float32 for other in others)
    return native.library() if has_functions else None
