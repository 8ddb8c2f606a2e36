"""Which messages of ranks are pushed, and that all others give the same by torch.distributed: gloo here."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from octavo.kernels.triton.peer_memory import PeerReducer, open_buffers
from tests.kernels.triton.peers import Case, Inputs, Memory, check, collect

CASES = [
    Case(2, 96, torch.float32),
    Case(8, 600, torch.float32),
    Case(1, 75, torch.float16),
    Case(4, 96, torch.float16),
    Case(2, 2000, torch.float32),
]
USES = [4, 0, 0, 3, 4]
"""Of the first slot or block, by each case: with 2 blocks, the second has too many units, the third no whole words.

The fourth has too many rows for its whole norm, and fits in pairs.
"""


def all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def all_gather(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x)
    return torch.cat(parts, dim=1)


def run_rank(rank: int, memory: Memory, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    buffers = memory.of_rank(rank, 0, spin_limit=200_000)
    reducer, results, epoch = PeerReducer(buffers, all_reduce, all_gather), [], 0
    for case, uses in zip(CASES, USES, strict=True):
        inputs = Inputs.of(case, 0, 2)
        results.append(collect(reducer, case, inputs, rank))
        check(results[-1], inputs, is_pushed=uses == 4)
        epoch += uses
        assert int(buffers.pairs.epochs[0] + buffers.blocks.epochs[0]) == epoch, case
    assert not buffers.status.item()
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_messages_are_pushed_where_they_fit(tmp_path: Path) -> None:
    mp.spawn(run_rank, (Memory.allocate(2, 1 << 14, 1 << 13), tmp_path), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is peer memory")
def test_without_peer_memory_every_rank_learns_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[bytes] = []

    def exchange(data: bytes) -> list[bytes]:
        sent.append(data)
        return [data, bytes(len(data))]

    with caplog.at_level(logging.WARNING, "octavo"):
        assert open_buffers(0, 2, torch.device("cpu"), exchange) is None
    assert "sums over ranks take NCCL: this process has not loaded libcudart" in caplog.text
    assert [len(data) for data in sent] == [64, 64] and sent[1].startswith(b"this process has not")
