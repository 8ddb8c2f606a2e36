"""Embeddings of a rank's part of the vocabulary, also on the CPU."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.cpu import ops as cpu


@pytest.mark.parametrize("ops", [reference, cpu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_over_ranks_is_the_embedding(ops: ModuleType, dtype: torch.dtype) -> None:
    whole = torch.randn(29, 40).to(dtype)
    token_ids = torch.tensor([0, 9, 10, 17, 19, 20, 28, 12])
    parts = [ops.gather_own_rows(whole[first : first + 10], token_ids, first) for first in (0, 10, 20)]
    assert torch.equal(torch.stack(parts).sum(0), whole[token_ids])
    assert [int(part.any(1).sum()) for part in parts] == [2, 4, 2]
