"""Blocks that go to the host and come back elsewhere are the same blocks."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from octavo.kernels import cpu, reference

BOTH = pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])


@BOTH
def test_out_and_back_into_other_blocks(ops: ModuleType) -> None:
    kv, host = torch.randn(8, 2, 2, 2, 4, 8), torch.zeros(4, 2, 2, 2, 4, 8)
    original = kv.clone()
    ops.swap_out(kv, host, torch.tensor([5, 2]), torch.tensor([3, 0]))
    assert torch.equal(host[3], original[5])
    assert torch.equal(host[0], original[2])
    assert float(host[1:3].abs().sum()) == 0
    assert torch.equal(kv, original)
    kv[5], kv[2] = 0.0, 0.0  # somebody else's now
    ops.swap_in(host, kv, torch.tensor([3, 0]), torch.tensor([1, 7]))
    assert torch.equal(kv[1], original[5])
    assert torch.equal(kv[7], original[2])
    untouched = torch.tensor([0, 3, 4, 6])
    assert torch.equal(kv[untouched], original[untouched])
