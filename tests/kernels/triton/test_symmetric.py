"""Which messages of a group are pushed, and that all others give the same by torch.distributed: gloo here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from octavo.kernels.triton import symmetric
from octavo.kernels.triton.reduce import buffer_shape
from octavo.kernels.triton.symmetric import PeerReducer
from tests.kernels.triton.peers import Case, Inputs, check, collect, shared_buffers

CASES = [
    Case(2, 96, torch.float32),
    Case(8, 600, torch.float32),
    Case(1, 75, torch.float16),
    Case(4, 96, torch.float16),
]
USES = [3, 0, 0, 3]
"""Of the first slot, by each case: with 4 slots, the second has too many units, and the third no whole words."""


def run_rank(rank: int, mine: Sequence[Tensor], has_peers: bool, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    buffers = shared_buffers(rank, mine, 0, spin_limit=200_000) if has_peers else None
    symmetric.open_buffers = lambda *_: buffers  # type: ignore[assignment]
    assert dist.group.WORLD is not None
    reducer, results, epoch = PeerReducer(dist.group.WORLD, torch.device("cpu")), [], 0
    for case, uses in zip(CASES, USES, strict=True):
        inputs = Inputs.of(case, 0, 2)
        results.append(collect(reducer, case, inputs, rank))
        check(results[-1], inputs, is_pushed=has_peers and uses > 0)
        epoch += uses
        assert buffers is None or int(buffers.epochs[0]) == epoch, case
    assert not reducer.gave_up()
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("has_peers", [True, False])
def test_messages_are_pushed_where_they_fit(has_peers: bool, tmp_path: Path) -> None:
    mine = [torch.zeros(buffer_shape(2, 1 << 13), dtype=torch.int64).share_memory_() for _ in range(2)]
    mp.spawn(run_rank, (mine, has_peers, tmp_path), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
