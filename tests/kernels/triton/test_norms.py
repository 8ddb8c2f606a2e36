"""RMS norms against the reference."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.triton import ops as cuda
from tests.kernels.triton.device import DEVICE, close


@pytest.mark.parametrize("size", [40, 576])
def test_rms_norms_match_the_reference(size: int) -> None:
    x, residual = torch.randn(2, 5, size, device=DEVICE)
    weight = torch.randn(size, device=DEVICE)
    normed, total = cuda.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = reference.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)
    assert close(normed, expected) and close(total, expected_total)
    assert close(cuda.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))


def test_a_wider_weight_is_applied_before_rounding() -> None:
    x, residual = torch.randn(2, 5, 40, device=DEVICE).half()
    weight = torch.randn(40, device=DEVICE)
    expected, _ = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(cuda.add_rms_norm(x, residual, weight, 1e-5)[0], expected)

    q, k, v = torch.randn(6, 5 + 3 + 3, 40, device=DEVICE).half().split([5, 3, 3], dim=1)
    positions, slots = torch.randint(99, (6,), device=DEVICE), torch.randperm(32, device=DEVICE)[:6] + 8
    table = reference.rope_table(40, 99, 10000.0, device=DEVICE)
    kv = torch.zeros(5, 2, 3, 8, 40, device=DEVICE).half()
    expected_kv = kv.clone()
    norms = {"q_norm": weight, "k_norm": weight + 1, "eps": 1e-5}
    expected = reference.rope_kv_write(q, k, v, positions, table, expected_kv, slots, **norms)
    out = cuda.rope_kv_write(q, k, v, positions, table, kv, slots, **norms)
    assert close(out, expected, 1e-3) and close(kv, expected_kv, 1e-3)  # within rounding
    assert (out == expected).float().mean() > 0.9 and (kv == expected_kv).float().mean() > 0.9
