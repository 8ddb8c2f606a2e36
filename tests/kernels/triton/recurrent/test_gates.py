"""Gates against the reference: of slices of wider tensors, as projections are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.triton import ops as cuda
from tests.kernels.pool import relative_error
from tests.kernels.triton.device import DEVICE, DTYPES, TOLERANCE


def parts(num_tokens: int, sizes: list[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Columns of one tensor, [num_tokens, size] each."""
    whole = 4 * torch.randn(num_tokens, sum(sizes) + 3, device=DEVICE)
    return torch.split(whole.to(dtype)[:, 3:], sizes, dim=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_heads", [1, 6, 32])
def test_delta_gates(num_heads: int, dtype: torch.dtype) -> None:
    a, b = parts(9, [num_heads, num_heads], dtype)
    a[0], a[1], a[2] = -30, -10, 40
    log_decay, step_bias = torch.randn(2, num_heads, device=DEVICE)
    found, expected = (ops.delta_gates(a, b, log_decay, step_bias) for ops in (cuda, reference))
    for out, wanted in zip(found, expected, strict=True):
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, wanted, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_gated_rms_norm(weight_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    x, (gate,) = torch.randn(7, 3, 20, device=DEVICE).to(dtype), parts(7, [60], dtype)
    weight = torch.randn(20, device=DEVICE).to(weight_dtype or dtype)
    out, expected = (ops.gated_rms_norm(x, weight, gate, 1e-6) for ops in (cuda, reference))
    assert out.dtype == dtype and relative_error(out, expected.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 40, 1500])
def test_sigmoid_mul(size: int, dtype: torch.dtype) -> None:
    x, gate = parts(5, [size, size], dtype)
    for gates in (gate, torch.randn(5, 1, device=DEVICE)):
        out, expected = (ops.sigmoid_mul(x, gates) for ops in (cuda, reference))
        assert out.dtype == dtype and relative_error(out, expected.double()) < TOLERANCE[dtype]


def test_no_tokens() -> None:
    none = torch.empty(0, 8, device=DEVICE)
    assert cuda.sigmoid_mul(none, none).shape == (0, 8)
    assert cuda.gated_rms_norm(none.view(0, 2, 4), torch.ones(4, device=DEVICE), none, 1e-6).shape == (0, 8)
    assert [x.shape for x in cuda.delta_gates(none, none, none.new_zeros(8), none.new_zeros(8))] == [(0, 8)] * 2
