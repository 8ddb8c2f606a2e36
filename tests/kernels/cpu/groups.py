"""Random quantised weights."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.groups import SUPER_SIZE, GroupForm, Groups


def make_groups(form: GroupForm, num_out: int, num_in: int) -> Groups:
    """Random planes of a form, with numbers as large as they can be and numbers around zero."""
    num_groups = num_in // form.group_size

    def integers(low: int, high: int, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.randint(low, high + 1, (num_out, size)).to(dtype)

    def numbers(size: int) -> Tensor:
        return (torch.rand(num_out, size) * 0.02 + 1e-5).half()

    values = integers(0, 2**form.bits - 1, num_in)
    zeros = integers(0, 2**form.bits - 1, num_groups) if form.has_zeros else None
    if form.is_e2m1:
        return Groups(form, values, 2.0 ** integers(-12, -8, num_groups, torch.float32))
    if not form.is_nested:
        minima = numbers(num_groups) * 2 ** (form.bits - 1) if form.has_minima else None
        return Groups(form, values, numbers(num_groups) * (1 - 2 * integers(0, 1, num_groups).half()), zeros, minima)
    if not form.has_minima:
        scales = integers(-128, 127, num_groups, torch.int8)
        return Groups(form, values, scales, super_scales=numbers(num_in // SUPER_SIZE))
    supers = [numbers(num_in // SUPER_SIZE) for _ in range(2)]
    scales, minima = integers(0, 63, num_groups), integers(0, 63, num_groups)
    return Groups(form, values, scales, None, minima, *supers)
