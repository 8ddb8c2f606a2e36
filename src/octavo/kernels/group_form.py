"""What a quantised weight stores. Imports no torch: memory plans count its bytes."""

from __future__ import annotations

from dataclasses import dataclass

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
