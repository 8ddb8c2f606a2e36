"""What a quantised weight stores. Imports no torch: memory plans count its bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

SUPER_SIZE = 256
"""Inputs that share a scale of scales (llama.cpp's K quants)."""


@dataclass(frozen=True, slots=True)
class GroupForm:
    """What a quantised weight [num_out, num_in] stores.

    bits        of a value: 4, 5, 6 or 8
    group_size  inputs that share a scale; divides num_in
    zero        taken off each value
    is_float    values are float8_e4m3fn, not integers; of 4 bits: codes of e2m1, with powers of two as scales (MXFP4)
    has_zeros   groups have zeros of their own
    has_minima  groups have minima
    is_nested   scales and minima are integers, multiples of a super scale and a super minimum
    ordered_in  num_in of a weight whose columns are sorted by group and not in the model's order; 0: in that order
    """

    bits: int
    group_size: int
    zero: int = 0
    is_float: bool = False
    has_zeros: bool = False
    has_minima: bool = False
    is_nested: bool = False
    ordered_in: int = 0

    @property
    def is_e2m1(self) -> bool:
        return self.is_float and self.bits == 4

    def num_bytes(self, num_weights: int) -> int:
        """Bytes of so many weights whose scales, if they are neither integers nor powers of two, have two bytes.

        Without orders of columns.
        """
        group_bytes = 1 if self.is_nested or self.is_e2m1 else 2
        group_bytes += self.has_minima * group_bytes + self.has_zeros
        super_bytes = 2 * (1 + self.has_minima) if self.is_nested else 0
        groups, supers = num_weights // self.group_size, num_weights // SUPER_SIZE
        return num_weights * self.bits // 8 + groups * group_bytes + supers * super_bytes

    def of_columns(self, num_in: int) -> GroupForm | None:
        """The form of the same numbers in rows of `num_in` inputs, cut from longer ones; None: there is none.

        Groups that are cut are smaller, and have the scale of the whole. Columns with an order of their own are not
        cut: their groups lie anywhere.
        """
        if self.ordered_in:
            return self if num_in == self.ordered_in else None
        if self.is_nested:
            return self if num_in % SUPER_SIZE == 0 else None
        size = math.gcd(self.group_size, num_in)
        if self.is_float and size not in (self.group_size, num_in):
            return None  # which no product has
        return replace(self, group_size=size)

    def is_kept_on(self, device: str) -> bool:
        """True if the products of "cpu" or "cuda" keep weights of this form in their bits."""
        if device == "cpu":
            return (self.is_e2m1 or not self.is_float) and (self.is_nested or self.group_size % 32 == 0)
        return not (self.is_nested or self.has_minima) and self.bits in (4, 8)


GGUF_FORMS: dict[str, GroupForm] = {
    "Q4_0": GroupForm(4, 32, zero=8),
    "Q4_1": GroupForm(4, 32, has_minima=True),
    "Q5_0": GroupForm(5, 32, zero=16),
    "Q5_1": GroupForm(5, 32, has_minima=True),
    "Q8_0": GroupForm(8, 32, zero=128),
    "Q4_K": GroupForm(4, 32, has_minima=True, is_nested=True),
    "Q5_K": GroupForm(5, 32, has_minima=True, is_nested=True),
    "Q6_K": GroupForm(6, 16, zero=32, is_nested=True),
    "MXFP4": GroupForm(4, 32, is_float=True),
}
"""llama.cpp's types whose numbers have a form."""
