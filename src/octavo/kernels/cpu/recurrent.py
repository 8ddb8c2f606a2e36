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


def _library_for(x: Tensor, *others: Tensor) -> native.Library | None:
    """x: float32 or bfloat16, its rows may be apart    others: float32"""
    has_functions = native.supports(x) and all(other.dtype == torch.float32 for other in others)
    return native.library() if has_functions else None
