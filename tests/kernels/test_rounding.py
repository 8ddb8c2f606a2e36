"""Rounding weights to few bits loses little."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.kernels.groups import GroupForm, Groups
from octavo.kernels.rounding import round_to_groups

FORMS = {
    "int8": GroupForm(8, 32, zero=128),
    "int4": GroupForm(4, 32, has_minima=True),
    "int4 zeros": GroupForm(4, 32, has_zeros=True),
    "fp8": GroupForm(8, 128, is_float=True),
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def squared_error(groups: Groups, weight: Tensor) -> float:
    return float((groups.dequantised() - weight.float()).square().mean())


def test_8_bits_are_those_of_q8_0() -> None:
    weight = torch.randn(50, 96).bfloat16()
    groups = round_to_groups(weight, FORMS["int8"])
    error = (groups.dequantised() - weight.float()).abs().unflatten(1, (-1, 32))
    assert bool((error <= 0.502 * groups.scales.float().unsqueeze(2)).all())


def test_4_bits_have_a_small_error() -> None:
    """Less than that of either simple choice: the whole range, or a scale by the largest magnitude."""
    weight = torch.randn(64, 320)
    groups = round_to_groups(weight, FORMS["int4"])
    rows = weight.unflatten(1, (-1, 32))
    low, high = rows.amin(2, keepdim=True), rows.amax(2, keepdim=True)
    ranged = ((rows - low) / (high - low) * 15).round() / 15 * (high - low) + low
    scale = rows.gather(2, rows.abs().argmax(2, keepdim=True)) / -8
    signed = (rows / scale).round().clamp(-8, 7) * scale
    simple = min(float((ranged - rows).square().mean()), float((signed - rows).square().mean()))
    assert squared_error(groups, weight) < 0.85 * simple


@pytest.mark.parametrize("name", FORMS)
def test_constant_groups_are_exact(name: str) -> None:
    weight = torch.cat([torch.zeros(2, 128), torch.full((2, 128), -0.5), torch.eye(4, 128)]).bfloat16()
    groups = round_to_groups(weight, FORMS[name])
    assert groups.shape == (8, 128) and groups.is_finite()
    assert squared_error(groups, weight) < 1e-6


def test_float8_is_near() -> None:
    weight = torch.randn(8, 256)
    groups = round_to_groups(weight, FORMS["fp8"])
    assert float(((groups.dequantised() - weight).abs() / weight.abs().clamp(min=0.05)).max()) < 1 / 15
