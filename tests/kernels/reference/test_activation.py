"""Gated activations of the reference and the CPU: silu(gate) * up and gelu(gate) * up."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from tests.kernels.pool import BOTH, relative_error


@BOTH
@pytest.mark.parametrize("num_tokens", [0, 1, 20])
def test_the_first_half_is_the_gate(ops: ModuleType, num_tokens: int) -> None:
    gate_up = torch.randn(num_tokens, 2 * 24) * 4
    kept = gate_up.clone()
    out = ops.silu_mul(gate_up)
    gate, up = gate_up[:, :24].double(), gate_up[:, 24:].double()
    assert out.shape == (num_tokens, 24)
    assert torch.equal(gate_up, kept)
    if num_tokens:
        assert relative_error(out, gate / (1 + (-gate).exp()) * up) < 1e-6
    out = ops.gelu_mul(gate_up)
    assert out.shape == (num_tokens, 24)
    assert torch.equal(gate_up, kept)
    if num_tokens:
        inner = (2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        assert relative_error(out, gate * (1 + inner.tanh()) / 2 * up) < 1e-6
