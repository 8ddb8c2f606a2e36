"""Quantised weights of experts, in the layout that `expert_products` multiplies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.groups import Groups, PackedExperts
from octavo.kernels.reference.experts import ExpertGate, Routing
from octavo.kernels.triton.experts.expert_products import GroupedRows, product_in, product_out
from octavo.kernels.triton.experts.tuning import STEP_COLUMNS
from octavo.kernels.triton.linear.grouped import GROUP_SIZES, keeps_groups


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """The quantised weights of a layer's experts for one of their products: `groups.PackedExperts`."""

    rows: GroupedRows
    num_experts: int

    @property
    def nbytes(self) -> int:
        return self.rows.words.nbytes + self.rows.planes.nbytes

    def experts_in(self, x: Tensor, bias: Tensor | None, routing: Routing, gate: ExpertGate) -> Tensor:
        return product_in(x, self.rows, bias, routing, self.num_experts, gate)

    def experts_out(self, h: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
        return product_out(h, self.rows, bias, routing, self.num_experts)


def pack_experts(groups: Groups, num_experts: int) -> PackedExperts | None:
    """See `reference.pack_experts`. None if `keeps_groups` does not name the form, for float8, and for some scales.

    Scales of e2m1 are powers of two from 2^-127 on, others have 16 bits, or 32 bits and their groups no zeros.
    """
    form, num_in = groups.form, groups.shape[1]
    if not keeps_groups(form, num_in, torch.bfloat16) or (form.is_float and not form.is_e2m1):
        return None
    if form.group_size not in GROUP_SIZES:  # one group
        groups = groups.in_groups(next(size for size in reversed(GROUP_SIZES) if num_in % size == 0))
    size, scales, zeros = groups.form.group_size, groups.scales, groups.zeros
    if form.is_e2m1:
        bits = scales.float().view(torch.int32)
        exponents = bits >> 23
        if (torch.where(exponents == 0, 1 << 22, exponents << 23) != bits).any() or (exponents < 0).any():
            return None
        kind, per_word, scales = "byte", 4, exponents.to(torch.uint8)
    elif scales.itemsize == 2:
        kind, per_word = ("pair", 2) if zeros is None else ("zero", 1)
    elif zeros is None:
        kind, per_word = "wide", 1
    else:
        return None
    width = cdiv(num_in, STEP_COLUMNS) * STEP_COLUMNS
    num_groups = cdiv(width, size * per_word) * per_word
    values, scales = _padded(groups.values, width), _padded(scales, num_groups)
    if zeros is None:
        planes = scales.view(torch.int32)
    else:
        planes = scales.view(torch.int16).int() & 0xFFFF | _padded(zeros, num_groups).int() << 16
    rows = GroupedRows(
        _words(values, form.bits),
        planes.T.contiguous(),
        num_in,
        "e2m1" if form.is_e2m1 else f"int{form.bits}",
        kind,
        size,
        form.zero,
        groups.scales.dtype,
    )
    return GroupedExperts(rows, num_experts)


def _padded(plane: Tensor, num_columns: int) -> Tensor:
    return F.pad(plane, (0, num_columns - plane.shape[1])).contiguous()


def _words(values: Tensor, bits: int) -> Tensor:
    """values [num_rows, inputs] uint8 -> int32 [num_rows, words], see `GroupedRows`."""
    values = values.view(len(values), -1, 2, 2, 4, 2)  # ..., step, half, lane, odd
    if bits == 4:
        low, high = values.permute(0, 1, 4, 5, 2, 3).unbind(-1)
        values = low | high << 4
    else:
        values = values.permute(0, 1, 2, 4, 5, 3)
    return values.reshape(len(values), -1).view(torch.int32)
