"""Random numbers in place of a quantised weight's, for benchmarks."""

from __future__ import annotations

import math

import torch

from octavo.kernels.groups import E2M1, Groups

SIGMA = 0.02
"""Standard deviation of random weights."""
UNITS = 32
"""Of nested scales and minima, which are integers below 64."""


def fill_randomly(groups: Groups, generator: torch.Generator) -> None:
    """Fill a quantised weight: its mean is about 0, and its standard deviation `SIGMA`. All groups share a scale.

    float16 has the scale, as it has those of most files: it stays narrow where weights are packed.
    """
    form, top = groups.form, 1 << groups.form.bits
    if form.is_float and not form.is_e2m1:
        groups.values.copy_(torch.empty_like(groups.values, dtype=torch.bfloat16).normal_(generator=generator))
    else:
        groups.values.random_(0, top, generator=generator)
    # Equally likely integers have a standard deviation of top / sqrt(12).
    scale = torch.tensor(SIGMA if form.is_float else SIGMA * 12**0.5 / top).half().item()
    if form.is_e2m1:
        scale = 2.0 ** round(math.log2(SIGMA / E2M1.std(correction=0).item()))
    middle = (top - 1) / 2
    units = UNITS if form.is_nested else 1
    for plane, value in (
        (groups.scales, units if form.is_nested else scale),
        (groups.super_scales, scale / units),
        (groups.zeros, top // 2),
        (groups.minima, units if form.is_nested else scale * (middle - form.zero)),
        (groups.super_minima, scale * (middle - form.zero) / units),
    ):
        if plane is not None:
            plane.fill_(value)
    if groups.order is not None:
        torch.randperm(len(groups.order), generator=generator, out=groups.order)
