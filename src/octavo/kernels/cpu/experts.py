"""Mixtures of experts on the CPU: the products of `experts.h`, one call for each operation.

The bits of a token's result do not depend on the other tokens. Weights in bfloat16 and float32 are used as they are,
those in groups as `grouped_linear` packs them. Without a compiler, and in other dtypes, the operations are the
reference's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import grouped_linear, native
from octavo.kernels.groups import Groups, PackedExperts
from octavo.kernels.reference.experts import ExpertGate, Routing


def route(logits: Tensor, top_k: int, *, softmax_first: bool, renormalise: bool) -> Routing:
    """See `reference.route`."""
    if logits.dtype == torch.float32 and (library := native.library_for(logits)) is not None:
        return library.route(logits, top_k, softmax_first, renormalise)
    return reference.route(logits, top_k, softmax_first=softmax_first, renormalise=renormalise)


def experts_in(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, num_experts: int, gate: ExpertGate
) -> Tensor:
    """See `reference.experts_in`."""
    if (library := _library_for(x, weight, bias)) is None:
        return reference.experts_in(x, weight, bias, routing, num_experts, gate)
    own = native.ExpertsWeight(weight, num_experts, len(weight) // num_experts)
    return library.experts_in(x.contiguous(), own, bias, routing, gate)


def experts_out(h: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, num_experts: int) -> Tensor:
    """See `reference.experts_out`."""
    if (library := _library_for(h, weight, bias)) is None:
        return reference.experts_out(h, weight, bias, routing, num_experts)
    own = native.ExpertsWeight(weight, num_experts, len(weight) // num_experts)
    return library.experts_out(h.contiguous(), own, bias, routing)


def _library_for(x: Tensor, weight: Tensor, bias: Tensor | None) -> native.Library | None:
    if x.dtype != weight.dtype or (bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous())):
        return None
    return native.library_for(weight)


def pack_experts(groups: Groups, num_experts: int) -> PackedExperts | None:
    """See `reference.pack_experts`. None if `keeps_groups` refuses the form, or float16 does not hold the scales."""
    if not grouped_linear.keeps_groups(groups.form, groups.shape[1], torch.bfloat16):
        return None
    num_out = groups.shape[0] // num_experts
    padding = 0, 0, 0, -num_out % grouped_linear.TILE
    packed = grouped_linear.pack_groups(
        groups.map(lambda plane: F.pad(plane.view(num_experts, num_out, -1), padding).flatten(0, 1))
    )
    return None if packed is None else GroupedExperts(packed, num_experts, num_out)


class GroupedExperts:
    """Weights of experts in a kind of grouped.h: `groups.PackedExperts`."""

    def __init__(self, packed: grouped_linear.GroupedWeight, num_experts: int, num_out: int) -> None:
        self.nbytes = packed.nbytes
        self.weight = native.ExpertsWeight(packed.blocks, num_experts, num_out, packed.kind, packed.zero)

    def experts_in(self, x: Tensor, bias: Tensor | None, routing: Routing, gate: ExpertGate) -> Tensor:
        return _native().experts_in(x.contiguous(), self.weight, bias, routing, gate)

    def experts_out(self, h: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
        return _native().experts_out(h.contiguous(), self.weight, bias, routing)


def _native() -> native.Library:
    library = native.library()
    assert library is not None  # weights are packed only where it is there
    return library
