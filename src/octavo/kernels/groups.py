"""A quantised weight: groups of its numbers share a scale. Loaders fill it, each platform packs it for its products.

    weight = scale * (value - zero) - minimum

    scale    scales, or scales * super_scales
    zero     GroupForm.zero, or zeros
    minimum  0, minima, or minima * super_minima
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

SUPER_SIZE = 256
"""Inputs that share a scale of scales (llama.cpp's K quants)."""


@dataclass(frozen=True, slots=True)
class GroupForm:
    """What a quantised weight [num_out, num_in] stores.

    bits        of a value: 4, 5, 6 or 8
    group_size  inputs that share a scale; divides num_in
    zero        taken off each value
    is_float    values are float8_e4m3fn, not integers
    has_zeros   groups have zeros of their own
    has_minima  groups have minima
    is_nested   scales and minima are integers, multiples of a super scale and a super minimum
    """

    bits: int
    group_size: int
    zero: int = 0
    is_float: bool = False
    has_zeros: bool = False
    has_minima: bool = False
    is_nested: bool = False

    def num_bytes(self, num_out: int, num_in: int) -> int:
        """Bytes of a weight whose scales, if they are not integers, have two bytes."""
        group_bytes = 1 if self.is_nested else 2
        group_bytes += self.has_minima * group_bytes + self.has_zeros
        supers = num_out * num_in // SUPER_SIZE * (2 + 2 * self.has_minima) if self.is_nested else 0
        return num_out * num_in * self.bits // 8 + num_out * num_in // self.group_size * group_bytes + supers


@dataclass(frozen=True, slots=True)
class Groups:
    """A quantised weight, or some rows of one.

    values        [num_out, num_in] uint8, below 2 ** bits; or float8_e4m3fn
    scales        [num_out, num_groups] float16, bfloat16 or float32; nested: uint8 or int8
    zeros         [num_out, num_groups] uint8
    minima        [num_out, num_groups] float16; nested: uint8
    super_scales  [num_out, num_in / 256] float16
    super_minima  the same
    """

    form: GroupForm
    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    minima: Tensor | None = None
    super_scales: Tensor | None = None
    super_minima: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        num_out, num_in = self.values.shape
        return num_out, num_in

    def planes(self) -> Iterator[Tensor]:
        """The tensors that there are, in the order of their declaration."""
        for field in fields(self)[1:]:
            plane = getattr(self, field.name)
            if plane is not None:
                yield plane

    def rows(self, first: int, last: int) -> Groups:
        """Rows [first, last), as views."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return replace(self, **{name: part[first:last] for name, part in parts.items() if part is not None})

    def dequantised(self) -> Tensor:
        """The weight, [num_out, num_in] float32."""
        per_super = SUPER_SIZE // self.form.group_size

        def of_group(plane: Tensor, supers: Tensor | None) -> Tensor:
            return plane.float() if supers is None else plane.float() * supers.float().repeat_interleave(per_super, 1)

        values = self.values.float().unflatten(1, (self.scales.shape[1], self.form.group_size))
        values -= self.form.zero if self.zeros is None else self.zeros.float().unsqueeze(2)
        values *= of_group(self.scales, self.super_scales).unsqueeze(2)
        if self.minima is not None:
            values -= of_group(self.minima, self.super_minima).unsqueeze(2)
        return values.flatten(1)
