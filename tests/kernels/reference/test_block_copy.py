"""Block copies (copy-on-write): whole blocks of all layers, all reads before all writes."""

from __future__ import annotations

from types import ModuleType

import torch

from tests.kernels.pool import BOTH


@BOTH
def test_targets_are_copies_and_other_blocks_are_unchanged(ops: ModuleType) -> None:
    kv = torch.randn(6, 3, 2, 2, 4, 8)
    expected = kv.clone()
    expected[4], expected[5] = kv[1], kv[1]
    ops.block_copy(kv, torch.tensor([1, 1]), torch.tensor([4, 5]))
    assert torch.equal(kv, expected)


@BOTH
def test_all_reads_come_before_all_writes(ops: ModuleType) -> None:
    """A target may be the source of another copy: a block can be freed and allocated again in one step."""
    kv = torch.arange(4.0).view(4, 1, 1, 1, 1, 1).repeat(1, 2, 2, 1, 2, 3)
    ops.block_copy(kv, torch.tensor([1, 2, 3]), torch.tensor([2, 3, 1]))
    assert kv[:, 0, 0, 0, 0, 0].tolist() == [0, 3, 1, 2]
    assert torch.equal(kv, kv[:, :1, :1, :, :1, :1].expand_as(kv))


@BOTH
def test_copying_no_blocks(ops: ModuleType) -> None:
    kv = torch.randn(3, 1, 2, 1, 2, 2)
    before = kv.clone()
    ops.block_copy(kv, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    assert torch.equal(kv, before)
