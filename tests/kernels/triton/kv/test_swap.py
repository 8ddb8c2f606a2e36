"""Swaps of whole blocks between the device and pinned host memory."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.triton import ops as cuda
from octavo.kernels.triton.kv.swap import SwapTuning, copy_blocks
from tests.kernels.triton.device import DEVICE, INTERPRETED, synchronize


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 2, 2, 4, 8), torch.float16), ((2, 2, 1, 4, 6), torch.float32), ((1, 2, 1, 8, 8), torch.float16)],
    ids=["chunks", "a partial chunk", "one chunk"],
)
def test_swaps_copy_whole_blocks_and_nothing_else(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """With more chunks than programs, and blocks that are no multiple of a chunk; host_kv has other blocks."""
    host = torch.full((12, *shape), -1.0, dtype=dtype, pin_memory=not INTERPRETED)
    kv = torch.randn(9, *shape, device=DEVICE).to(dtype)
    original, before = kv.clone(), host.clone()
    ids = torch.tensor([[5, 2, 7, 1, 8], [11, 0, 3, 1, 6]], device=DEVICE)
    for tuning in (SwapTuning(2, 512, 4), SwapTuning(), SwapTuning(64, 256, 1)):
        host.copy_(before)
        kv.copy_(original)
        assert copy_blocks(kv, host, ids[0], ids[1], tuning)
        synchronize()
        assert torch.equal(host[ids[1].cpu()], original[ids[0]].cpu()) and torch.equal(kv, original)
        others = torch.tensor([2, 4, 5, 7, 8, 9, 10])
        assert torch.equal(host[others], before[others])
        kv[ids[0]] = 0.0  # the device block is reused
        expected = kv.clone()
        targets = torch.tensor([0, 8, 3, 2, 6], device=DEVICE)
        reference.swap_in(host, expected, ids[1], targets)
        assert copy_blocks(host, kv, ids[1], targets, tuning)
        assert torch.equal(kv, expected) and torch.equal(kv[targets], original[ids[0]])


def test_unsupported_blocks_are_swapped_by_torch() -> None:
    """Blocks that are no multiple of 16 bytes; and an empty list."""
    kv, host = torch.randn(5, 1, 2, 1, 1, 3, device=DEVICE), torch.zeros(4, 1, 2, 1, 1, 3, pin_memory=not INTERPRETED)
    original, ids = kv.clone(), torch.tensor([[4, 1], [0, 3]], device=DEVICE)
    assert not copy_blocks(kv, host, ids[0], ids[1], SwapTuning())
    cuda.swap_out(kv, host, ids[0], ids[1])
    assert torch.equal(host[[0, 3]], original[[4, 1]].cpu())
    cuda.swap_in(host, kv, ids[1], ids[0].flip(0))
    assert torch.equal(kv[[1, 4]], original[[4, 1]])
    kv, host = torch.randn(2, 5, 1, 2, 1, 4, 4, device=DEVICE)
    before = kv.clone()
    assert copy_blocks(kv, host, ids[0, :0], ids[1, :0], SwapTuning())
    assert torch.equal(kv, before)
