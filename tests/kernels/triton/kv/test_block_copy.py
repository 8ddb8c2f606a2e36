"""Block copies."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.triton import ops as cuda
from tests.kernels.triton.device import DEVICE


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_all_sources_are_read_before_any_target_is_written(dtype: torch.dtype) -> None:
    kv = torch.randn(8, 3, 2, 2, 4, 8, device=DEVICE).to(dtype)
    expected = kv.clone()
    src, dst = torch.tensor([1, 2, 3, 1], device=DEVICE), torch.tensor([2, 3, 1, 6], device=DEVICE)
    reference.block_copy(expected, src, dst)
    cuda.block_copy(kv, src, dst)
    assert torch.equal(kv, expected)
    cuda.block_copy(kv, src[:0], dst[:0])
    assert torch.equal(kv, expected)
