"""Swaps: blocks that move to the host and back to other blocks keep their contents."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from octavo.kernels import reference
from octavo.runner import kv_swap as swap
from octavo.runner.platform import CpuPlatform
from tests.kernels.pool import BOTH


@BOTH
def test_swap_out_and_in_to_other_blocks(ops: ModuleType) -> None:
    kv, host = torch.randn(8, 2, 2, 2, 4, 8), torch.zeros(4, 2, 2, 2, 4, 8)
    original = kv.clone()
    ops.swap_out(kv, host, torch.tensor([5, 2]), torch.tensor([3, 0]))
    assert torch.equal(host[3], original[5])
    assert torch.equal(host[0], original[2])
    assert float(host[1:3].abs().sum()) == 0
    assert torch.equal(kv, original)
    kv[5], kv[2] = 0.0, 0.0  # reused by another sequence
    ops.swap_in(host, kv, torch.tensor([3, 0]), torch.tensor([1, 7]))
    assert torch.equal(kv[1], original[5])
    assert torch.equal(kv[7], original[2])
    untouched = torch.tensor([0, 3, 4, 6])
    assert torch.equal(kv[untouched], original[untouched])


class Spy:
    """`reference`, with a record of the blocks that it moves."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int], list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        def op(source: torch.Tensor, target: torch.Tensor, src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
            self.asked.append((name, src_ids.tolist(), dst_ids.tolist()))
            getattr(reference, name)(source, target, src_ids, dst_ids)

        return op


@pytest.mark.parametrize(("blocks_for_the_engine", "kernel_outs"), [(1, []), (3, [1, 8, 9]), (9, [1, 4, 5, 6, 8, 9])])
def test_long_runs_are_copied_and_other_blocks_moved_in_one_call(
    monkeypatch: pytest.MonkeyPatch, blocks_for_the_engine: int, kernel_outs: list[int]
) -> None:
    kv, host = torch.randn(10, 2, 2, 2, 4, 8), torch.zeros(11, 2, 2, 2, 4, 8)
    monkeypatch.setattr(swap, "COPY_ENGINE_BYTES", blocks_for_the_engine * kv[0].nbytes)
    spy, original = Spy(), kv.clone()
    platform = CpuPlatform()
    platform.ops = spy  # type: ignore[assignment]
    swapper = swap.KVSwapper(kv, host, platform)
    outs = [(1, 10), (4, 1), (5, 2), (6, 3), (8, 5), (9, 6)]
    ins = [(5, 1), (10, 9)]  # blocks that were just swapped out
    swapper.move(outs, ins)
    for src, dst in outs:
        assert torch.equal(host[dst], original[src])
    assert not host[[0, 4, 7, 8, 9]].any()
    assert torch.equal(kv[1], original[8]) and torch.equal(kv[9], original[1])
    assert torch.equal(kv[2:9], original[2:9])
    targets = dict(outs)
    wanted = [("swap_out", kernel_outs, [targets[src] for src in kernel_outs])] if kernel_outs else []
    assert spy.asked == wanted + ([("swap_in", [5, 10], [1, 9])] if kernel_outs else [])
