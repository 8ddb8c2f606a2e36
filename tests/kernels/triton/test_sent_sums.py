"""Sums of two ranks that copies send: processes that share memory, as GPUs do, and threads that copy late."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from octavo.kernels.reference.norms import rms_norm
from octavo.kernels.triton import reduce
from octavo.kernels.triton.reduce import FLAG_BYTES, SEND_SLOTS, PeerBuffers
from octavo.kernels.triton.sent_sums import CopiedSum
from tests.kernels.triton.peers import EPS, Case, HostCopies, Inputs, Memory, check_norm, rounds

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES = [Case(3, 96, F32), Case(9, 1030, BF16), Case(1, 4096, F16), Case(5, 75, F16, norm=F32), Case(2, 2500, F32)]
MAX_BYTES = 20_000
NUM_LAYERS = 6


def pass_in_parts(buffers: PeerBuffers, copies: HostCopies, case: Case, rank: int) -> list[list[Tensor]]:
    """Two sums for each layer, of two parts each, in the order of a model's pass -> their norms and totals."""
    inputs = [Inputs.of(case, seed, 2) for seed in range(SEND_SLOTS * NUM_LAYERS)]
    results, late = [], random.Random(rank)
    for layer in range(NUM_LAYERS):
        sent: dict[int, CopiedSum] = {}
        first = SEND_SLOTS * layer
        for step in ((0, None), (1, None), (2, 0), (3, 1), (None, 2), (None, 3)):  # (slot to send, to receive)
            sending, receiving = step
            if receiving is not None:
                given = inputs[first + receiving]
                results.append([*sent[receiving].add_rms_norm(given.residual, given.norm, EPS)])
            if sending is not None:
                time.sleep(0.004 * late.random())
                partial = inputs[first + sending].partials[rank].clone()
                sent[sending] = CopiedSum.send(buffers, copies, partial, sending)
    return results


def run_rank(rank: int, memory: Memory, use: int, folder: Path) -> None:
    torch.set_num_threads(1)
    buffers, copies = memory.of_rank(rank, 0, spin_limit=200_000), HostCopies(rank, 0.003)
    buffers.sends.counters[:, 0] = use
    results = [pass_in_parts(buffers, copies, case, rank) for case in CASES]
    torch.save((results, buffers.sends.counters, buffers.status), folder / f"{rank}.pt")


@pytest.mark.parametrize("use", [1, (1 << 31) - 3])
def test_ranks_get_the_same_sums_in_every_order_of_copies(tmp_path: Path, use: int) -> None:
    """Of every shape, with late ranks and late copies, also while the numbers of uses overflow."""
    mp.spawn(run_rank, (Memory.allocate(2, 1 << 10, 0, MAX_BYTES), use, tmp_path), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    uses = use + NUM_LAYERS * len(CASES)
    for results, counters, status in ranks:
        assert not status.any()
        assert counters.tolist() == [[uses - (uses >= 1 << 31) * (1 << 32), 0]] * SEND_SLOTS
        for case, per_case, others in zip(CASES, results, ranks[0][0], strict=True):
            for seed, ((normed, total), other) in enumerate(zip(per_case, others, strict=True)):
                assert torch.equal(normed, other[0]) and torch.equal(total, other[1])
                given = Inputs.of(case, seed, 2)
                expected = sum(x.float() for x in given.partials) + given.residual.float()
                exact = rounds(case.dtype, total)
                torch.testing.assert_close(total, expected.to(case.dtype), rtol=0 if exact else 8e-3, atol=0)
                check_norm(normed, rms_norm(total, given.norm, EPS))


def lone_rank(spin_limit: int) -> tuple[PeerBuffers, Memory]:
    """Rank 0 of two, with rank 1's message of fives in slot 1, as the slot's third use; and the memory of both."""
    memory = Memory.allocate(2, 1 << 10, 0, MAX_BYTES)
    buffers = memory.of_rank(0, 0, spin_limit)
    slot = buffers.sends.mine[1]
    slot[FLAG_BYTES:][:4000].view(F32).fill_(5.0)
    slot[:4].view(torch.int32).fill_(3)
    buffers.sends.counters[1, 0] = 3
    return buffers, memory


def receive(buffers: PeerBuffers) -> Tensor:
    x = torch.ones(10, 100)
    return CopiedSum.send(buffers, HostCopies(0), x, 1).add_rms_norm(2 * x, x[0], EPS)[1]


def test_a_rank_takes_the_message_of_this_use_alone() -> None:
    buffers, _memory = lone_rank(spin_limit=3)
    assert torch.equal(receive(buffers), torch.full((10, 100), 8.0)) and not buffers.status.item()
    receive(buffers)
    assert buffers.status.item() == reduce.LATE
    receive(replace(buffers, spin_limit=reduce.NO_LIMIT))  # it waits no more


def test_another_thread_stops_a_rank_that_waits() -> None:
    buffers, _memory = lone_rank(20_000)
    buffers = replace(buffers, look_reads=256)
    buffers.sends.counters[1, 0] = 4
    stopper = threading.Timer(0.3, buffers.stop_waiting)
    stopper.start()
    receive(buffers)
    stopper.join()
    assert buffers.status.item() == reduce.STOPPED
