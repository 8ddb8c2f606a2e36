"""Rounds weights to forms with few bits, while they are loaded."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from octavo.kernels.groups import GroupForm, Groups

CHUNK_NUMBERS = 1 << 20
"""Numbers rounded at a time: on a CPU they stay in the second-level cache."""
FLOAT8_MAX = 448.0
SHRUNK_RANGES = (
    *((0.0, 0.0), (0.025, 0.025), (0.05, 0.05)),
    *((0.025, 0.0), (0.0, 0.025), (0.05, 0.0), (0.0, 0.05), (0.075, 0.025), (0.025, 0.075)),
)
"""Shares of a group's range that 4 bits may give up at its ends."""


def round_to_groups(weight: Tensor, form: GroupForm) -> Groups:
    """Round a weight [num_out, num_in] to a form; num_in is a multiple of its groups.

    8 bits         scale = the largest magnitude / 127, as in llama.cpp's Q8_0
    4 bits         the scale and the zero or minimum of each group with the least square error of those tried
    float8_e4m3fn  scale = the largest magnitude / 448
    """
    num_out, num_in = weight.shape
    step = max(1, CHUNK_NUMBERS // num_in)
    to_4 = partial(_round_to_4, has_zeros=form.has_zeros)
    rounded = _round_to_float8 if form.is_float else _round_to_8 if form.bits == 8 else to_4
    groups = Groups.empty(form, num_out, num_in, weight.device)
    for first in range(0, num_out, step):
        rows = weight[first : first + step]
        planes = rounded(rows.float().view(len(rows), -1, form.group_size))
        for plane, part in zip(groups.planes(), planes, strict=True):
            plane[first : first + step] = part
    return groups


def _round_to_float8(rows: Tensor) -> tuple[Tensor, ...]:
    """[num_rows, num_groups, group size] -> values [num_rows, num_in], scales [num_rows, num_groups]."""
    scales = rows.abs().amax(2).clamp_(min=1e-12) / FLOAT8_MAX
    return (rows / scales.unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn), scales


def _round_to_8(rows: Tensor) -> tuple[Tensor, ...]:
    """As `_round_to_float8`."""
    scales = (rows.abs().amax(2) / 127).half()
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0).unsqueeze(2)
    values = (rows * inverse).round_().clamp_(-127, 127).add_(128)
    return values.to(torch.uint8).flatten(1), scales


def _round_to_4(rows: Tensor, *, has_zeros: bool) -> tuple[Tensor, ...]:
    """As `_round_to_float8`, then zeros or minima.

    Tries ranges within the smallest and the largest number. For the values of each, least squares give the scale and
    the minimum.
    """
    low, high = rows.amin(2, keepdim=True), rows.amax(2, keepdim=True)
    best = [torch.zeros_like(rows), torch.zeros_like(low), torch.zeros_like(low), torch.full_like(low, torch.inf)]
    for shrink_low, shrink_high in SHRUNK_RANGES:
        first = low + shrink_low * (high - low)
        scale = ((1 - shrink_low - shrink_high) * (high - low) / 15).clamp_(min=1e-7)
        if has_zeros:
            second = (-first / scale).round_().clamp_(0, 15)
            values = ((rows / scale).round_() + second).clamp_(0, 15)
            scale = _slope(values - second, rows)
            error = (scale * (values - second) - rows).square_().sum(2, keepdim=True)
        else:
            values = ((rows - first) / scale).round_().clamp_(0, 15)
            scale = _slope(values - values.mean(2, keepdim=True), rows)
            second = (scale * values - rows).mean(2, keepdim=True).half().float()
            error = (scale * values - second - rows).square_().sum(2, keepdim=True)
        better = error < best[3]
        for kept, tried in zip(best, (values, scale, second, error), strict=True):
            torch.where(better, tried, kept, out=kept)
    values, scale, second, _ = best
    second = second.to(torch.uint8) if has_zeros else second.half()
    return values.to(torch.uint8).flatten(1), scale.squeeze(2).half(), second.squeeze(2)


def _slope(values: Tensor, rows: Tensor) -> Tensor:
    """The scale with the least square error, rounded to float16."""
    squares = values.square().sum(2, keepdim=True)
    return torch.where(squares > 0, (values * rows).sum(2, keepdim=True) / squares, 0.0).half().float()
