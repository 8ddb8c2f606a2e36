"""Embeddings of a rank's part of the vocabulary against the reference."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.triton import ops as cuda
from tests.kernels.triton.device import DEVICE


@pytest.mark.parametrize("size", [40, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_gathers_its_rows_and_zeros_for_the_others(size: int, dtype: torch.dtype) -> None:
    whole = torch.randn(30, size, device=DEVICE).to(dtype)
    token_ids = torch.tensor([0, 9, 10, 17, 19, 20, 29, 12], device=DEVICE)
    parts = []
    for first in (0, 10, 20):
        # Rows before and after the rank's are other memory.
        memory = torch.full_like(whole, float("nan"))
        table = memory[10:20].copy_(whole[first : first + 10])
        parts.append(cuda.gather_own_rows(table, token_ids, first))
        assert torch.equal(parts[-1], reference.gather_own_rows(table, token_ids, first))
    assert torch.equal(torch.stack(parts).sum(0), whole[token_ids])
    assert cuda.gather_own_rows(whole, token_ids[:0], 0).shape == (0, size)
