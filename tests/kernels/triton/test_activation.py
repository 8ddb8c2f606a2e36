"""Gated activations against the reference."""

from __future__ import annotations

import torch

from octavo.kernels import reference
from octavo.kernels.triton import ops as cuda
from tests.kernels.triton.device import DEVICE, close


def test_gated_activations_match_the_reference() -> None:
    gate_up = torch.randn(3, 2 * 1100, device=DEVICE) * 2
    assert close(cuda.silu_mul(gate_up), reference.silu_mul(gate_up.double()))
    assert close(cuda.gelu_mul(gate_up), reference.gelu_mul(gate_up.double()))
