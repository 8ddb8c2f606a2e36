"""Memory for weights, mapped 2 MB at a time where the system can."""

from __future__ import annotations

import gc

import pytest
import torch

from octavo.kernels.cpu import huge_memory
from octavo.kernels.cpu.huge_memory import CHUNK, HUGE, LINE, empty_huge, move_to_huge


def test_small_tensors_share_a_mapping_and_large_ones_have_their_own() -> None:
    small = [empty_huge(size).fill_(i) for i, size in enumerate((1000, HUGE, 3, CHUNK - 5, 1 << 20))]
    large = empty_huge(CHUNK + 1).fill_(9)
    assert large.data_ptr() % HUGE == 0 and all(tensor.data_ptr() % LINE == 0 for tensor in small)
    gc.collect()
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(small)) and bool((large == 9).all())


def test_systems_without_such_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmap.MADV_HUGEPAGE")
    monkeypatch.setattr(huge_memory, "_free", huge_memory._free[:0])
    assert empty_huge(100).fill_(1).sum() == 100
    monkeypatch.setattr("sys.platform", "win32")
    assert empty_huge(100).shape == (100,)


def test_a_copy_is_contiguous() -> None:
    values = torch.arange(6.0).view(2, 3).T
    moved = move_to_huge(values)
    assert moved.is_contiguous() and torch.equal(moved, values)
