"""Quantised weights that stay in their bits on the CPU: packing, products and rows of `grouped.h`, and quantisation.

A product rounds x to int8 in groups of 32 inputs, each with a scale. That adds about 1 % to the error of a layer, and
the weights are used as they are. The bits of a row's result do not depend on the other rows.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.cpu import native
from octavo.kernels.cpu.huge_memory import empty_huge
from octavo.kernels.groups import GroupForm, Groups

TILE, GROUP, WIDE_GROUP = 16, 32, 128  # outputs; inputs, as in grouped.h

CHUNK_NUMBERS = 1 << 20
"""Numbers quantised at a time: they stay in the second-level cache."""


def keeps_groups(form: GroupForm, num_in: int, dtype: torch.dtype) -> bool:
    """True if `pack_groups` keeps weights of this form, if float16 holds their scales."""
    return dtype == torch.bfloat16 and _kind(form) is not None and num_in % GROUP == 0 and native.library() is not None


def _kind(form: GroupForm) -> str | None:
    """The kind of grouped.h that stores a form; None if there is none."""
    if form.is_nested:
        scales = "nested_16" if form.group_size == 16 and not form.has_minima else "nested"
        fits = form.group_size == 16 or (form.group_size == GROUP and form.has_minima)
    else:
        scales = "minima" if form.has_minima else "zeros" if form.has_zeros else "plain"
        scales = "wide_zeros" if _is_wide(form) else scales
        fits = form.group_size % GROUP == 0
    kind = f"{form.bits}_{scales}"
    return (
        kind
        if fits and not form.is_float and not (form.has_zeros and form.has_minima) and kind in native.GROUPED_BLOCKS
        else None
    )


def _is_wide(form: GroupForm) -> bool:
    return form.bits == 4 and form.group_size % WIDE_GROUP == 0 and not form.has_minima


def pack_groups(groups: Groups, num_in: int | None = None) -> GroupedWeight | None:
    """Pack a weight of a form that `keeps_groups` accepts; None if float16 does not hold its scales exactly.

    Inputs from num_in on are padding.
    """
    scales = groups.scales
    if not groups.form.is_nested:
        scales = scales.half()
        if not torch.equal(scales.to(groups.scales.dtype), groups.scales):
            return None
    return GroupedWeight(groups, scales, num_in or groups.shape[1])


class GroupedWeight:
    """A weight [num_out, num_in] in a kind of grouped.h."""

    backend: Literal["native"] = "native"

    def __init__(self, groups: Groups, scales: Tensor, num_in: int) -> None:
        form, num_out = groups.form, groups.shape[0]
        kind = _kind(form)
        assert kind is not None
        self.kind, self.zero, self.shape = kind, form.zero, (num_out, num_in)
        inputs, num_bytes = native.GROUPED_BLOCKS[kind]
        self.blocks = empty_huge(cdiv(num_out, TILE) * cdiv(num_in, inputs) * num_bytes).zero_()
        second = groups.minima if form.has_minima else groups.zeros
        if _is_wide(form) and second is None:
            second = torch.full(scales.shape, form.zero, dtype=torch.uint8)
        if not form.is_nested:  # the kind's groups are parts of the form's
            times = form.group_size // (WIDE_GROUP if _is_wide(form) else GROUP)
            scales = scales.repeat_interleave(times, 1)
            second = second if second is None else second.repeat_interleave(times, 1)
        _library().pack_groups(
            kind, groups.values, scales, second, groups.super_scales, groups.super_minima, blocks=self.blocks
        )

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        x = x.contiguous()
        return _library().grouped_linear(self, x, bias, native.make_out(x, self.shape[0], float32_out, out))

    def gather_rows(self, indices: Tensor) -> Tensor:
        return _library().embed_groups(self, indices.contiguous())

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes


def _library() -> native.Library:
    library = native.library()
    assert library is not None  # weights are packed only where it is there
    return library


# -- quantisation -----------------------------------------------------------------------------------------------------


def quantise_groups(weight: Tensor, bits: int) -> Groups:
    """Quantise a weight [num_out, num_in] to 8 or 4 bits in groups of 32, its inputs padded with zeros to these.

    8 bits   scale = the largest magnitude / 127, as in Q8_0
    4 bits   the scale and minimum of each group with the least square error of those tried, as in Q4_1
    """
    num_out, num_in = weight.shape
    step = max(1, CHUNK_NUMBERS // num_in)
    quantise = _quantise_8 if bits == 8 else _quantise_4
    parts = []
    for begin in range(0, num_out, step):
        rows = F.pad(weight[begin : begin + step].float(), (0, -num_in % GROUP))
        parts.append(quantise(rows.view(len(rows), -1, GROUP)))
    values, *planes = (torch.cat(plane) for plane in zip(*parts, strict=True))
    if bits == 8:
        return Groups(GroupForm(8, GROUP, zero=128), values, *planes)
    return Groups(GroupForm(4, GROUP, has_minima=True), values, planes[0], minima=planes[1])


def _quantise_8(rows: Tensor) -> tuple[Tensor, ...]:
    """[num_rows, num_groups, 32] -> values [num_rows, num_in], scales [num_rows, num_groups]."""
    scales = (rows.abs().amax(2) / 127).half()
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0).unsqueeze(2)
    values = (rows * inverse).round_().clamp_(-127, 127).add_(128)
    return values.to(torch.uint8).flatten(1), scales


def _quantise_4(rows: Tensor) -> tuple[Tensor, ...]:
    """As `_quantise_8`, then minima.

    Tries ranges within the smallest and the largest number. For the values of each, least squares give the scale and
    the minimum. A range that is symmetric around zero is one of these, so no scale without a minimum is better.
    """
    low, high = rows.amin(2, keepdim=True), rows.amax(2, keepdim=True)
    best = [torch.zeros_like(rows), torch.zeros_like(low), torch.zeros_like(low), torch.full_like(low, torch.inf)]
    for shrink_low in (0.0, 0.04, 0.08, 0.12, 0.16):
        for shrink_high in (0.0, 0.04, 0.08, 0.12):
            first = low + shrink_low * (high - low)
            scale = ((1 - shrink_low - shrink_high) * (high - low) / 15).clamp_(min=1e-7)
            values = ((rows - first) / scale).round_().clamp_(0, 15)
            centred = values - values.mean(2, keepdim=True)
            variance = centred.square().sum(2, keepdim=True)
            scale = torch.where(variance > 0, (centred * rows).sum(2, keepdim=True) / variance, 0.0).half().float()
            minimum = (scale * values - rows).mean(2, keepdim=True).half().float()
            error = (scale * values - minimum - rows).square_().sum(2, keepdim=True)
            better = error < best[3]
            for kept, tried in zip(best, (values, scale, minimum, error), strict=True):
                torch.where(better, tried, kept, out=kept)
    values, scale, minimum, _ = best
    return values.to(torch.uint8).flatten(1), scale.squeeze(2).half(), minimum.squeeze(2).half()
