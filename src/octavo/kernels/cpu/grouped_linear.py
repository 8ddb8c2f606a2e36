"""Quantised weights that stay in their bits on the CPU: packing, products and rows of `grouped.h`.

A product rounds x to int8 in groups of 32 inputs, each with a scale. That adds about 1 % to the error of a layer, and
the weights are used as they are. The bits of a row's result do not depend on the other rows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.cpu import native
from octavo.kernels.cpu.huge_memory import empty_huge
from octavo.kernels.groups import GroupForm, Groups

TILE, GROUP, WIDE_GROUP = 16, 32, 128  # outputs; inputs, as in grouped.h
E2M1_ZERO = 12


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
        scales = "e2m1" if form.is_e2m1 else "wide_zeros" if _is_wide(form) else scales
        fits = form.group_size % GROUP == 0
    kind = f"{form.bits}_{scales}"
    return (
        kind
        if fits
        and (form.is_e2m1 or not form.is_float)
        and not (form.has_zeros and form.has_minima)
        and kind in native.GROUPED_BLOCKS
        else None
    )


def _is_wide(form: GroupForm) -> bool:
    return form.bits == 4 and form.group_size % WIDE_GROUP == 0 and not (form.has_minima or form.is_e2m1)


def pack_groups(groups: Groups) -> GroupedWeight | None:
    """Pack a weight of a form that `keeps_groups` accepts; None if its kind does not hold its scales exactly."""
    scales = groups.scales
    if groups.form.is_e2m1:
        bits = scales.float().view(torch.int32)
        if not ((bits & 0x807F_FFFF == 0) | (bits == 0x0040_0000)).all():
            return None  # no powers of two; 0 is that of padding
        scales = (bits >> 23).to(torch.uint8)
    elif not groups.form.is_nested:
        scales = scales.half()
        if not torch.equal(scales.to(groups.scales.dtype), groups.scales):
            return None
    return GroupedWeight(groups, scales)


class GroupedWeight:
    """A weight [num_out, num_in] in a kind of grouped.h."""

    backend: Literal["native"] = "native"

    def __init__(self, groups: Groups, scales: Tensor) -> None:
        form, (num_out, num_in) = groups.form, groups.shape
        kind = _kind(form)
        assert kind is not None
        self.kind, self.shape = kind, (num_out, num_in)
        self.zero = E2M1_ZERO if form.is_e2m1 else form.zero
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
