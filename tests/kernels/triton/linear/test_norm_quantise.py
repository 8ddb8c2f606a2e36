"""The norm that is rounded to float8 without being stored: the bits of the norm, then rounded."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.triton.linear.grouped_kernels import FLOAT8_GROUP, quantise
from octavo.kernels.triton.linear.norm_quantise import add_norm_quantise
from octavo.kernels.triton.norms import add_rms_norm
from tests.kernels.triton.device import DEVICE, DTYPES


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("norm_dtype", [DTYPES[-1], torch.float32])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 544), (3, 800), (16, 1056), (17, 1440), (40, 2048)])
def test_bits_are_those_of_the_norm_and_the_rounding(
    num_rows: int, size: int, norm_dtype: torch.dtype, by_row: bool
) -> None:
    """x has rows further apart, as the library's product of another size has."""
    x, residual = torch.randn(2, num_rows, size + 32, device=DEVICE).to(DTYPES[-1])[..., :size].unbind()
    weight, group = (torch.rand(size, device=DEVICE) * 3 - 1).to(norm_dtype), size if by_row else FLOAT8_GROUP
    (values, scales), total = add_norm_quantise(x, residual, weight, 1e-5, group)
    normed, expected_total = add_rms_norm(x.contiguous(), residual.contiguous(), weight, 1e-5)
    expected, expected_scales = quantise(normed, group)
    assert torch.equal(total, expected_total) and total.is_contiguous()
    assert (values.shape, scales.shape) == (expected.shape, expected_scales.shape)
    assert torch.equal(values[:num_rows].view(torch.uint8), expected[:num_rows].view(torch.uint8))
    assert torch.equal(scales[:, :num_rows], expected_scales[:, :num_rows])
