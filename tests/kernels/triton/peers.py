"""Ranks in processes of their own that sum and gather: inputs, expected results, and ranks in Triton's interpreter."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.multiprocessing as mp
from torch import Tensor

from octavo.kernels.reference.norms import NormedResidual, make_normed_residual
from octavo.kernels.triton import reduce
from octavo.kernels.triton.reduce import PeerBuffers


class Case(NamedTuple):
    rows: int
    width: int
    dtype: torch.dtype
    repeats: int = 1


class Collectives(Protocol):
    def all_reduce(self, x: Tensor) -> Tensor: ...

    def add_reduced(self, residual: NormedResidual, partial: Tensor, norm: Tensor) -> NormedResidual: ...

    def all_gather(self, x: Tensor) -> Tensor: ...


class Inputs(NamedTuple):
    """partials: of each rank"""

    partials: list[Tensor]
    residual: Tensor
    norm: Tensor

    @classmethod
    def of(cls, case: Case, repeat: int, size: int, device: str = "cpu") -> Inputs:
        make = torch.Generator().manual_seed(repeat)
        tensors = [torch.randn(case.rows, case.width, generator=make) for _ in range(size + 1)]
        *partials, residual = (x.to(device=device, dtype=case.dtype) for x in tensors)
        norm = torch.rand(case.width, generator=make).to(device=device, dtype=case.dtype)
        return cls(partials, residual, norm)


def collect(ranks: Collectives, case: Case, inputs: Inputs, rank: int) -> list[Tensor]:
    """A rank's results: sum, residual, weighted, sums of squares, gathered."""
    partial = inputs.partials[rank]
    stream = make_normed_residual(inputs.residual, inputs.norm)
    after = ranks.add_reduced(stream, partial.clone(), inputs.norm)
    gathered = ranks.all_gather(partial)
    total = ranks.all_reduce(partial.clone())
    return [total, after.x, after.weighted, after.squares[:, : case.rows].sum(0), gathered]


def check(results: Sequence[Tensor], inputs: Inputs, *, is_pushed: bool = True) -> None:
    """Pushed sums of two ranks are exact up to one rounding, NCCL's have two; `weighted` is of the rounded residual."""
    dtype, wide = inputs.residual.dtype, [x.float() for x in inputs.partials]
    total, stream, weighted, squares, gathered = results
    assert torch.equal(gathered, torch.cat(inputs.partials, 1))
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype] * (2 - is_pushed)
    for actual, expected in ((total, sum(wide)), (stream, sum(wide) + inputs.residual.float())):
        assert isinstance(expected, Tensor)
        if len(wide) == 2 and is_pushed and rounds(dtype, actual):
            torch.testing.assert_close(actual, expected.to(dtype), rtol=0, atol=0)
        torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)
    expected = make_normed_residual(stream.float(), inputs.norm.float())
    exact = 0 if rounds(dtype, weighted) else tolerance
    torch.testing.assert_close(weighted, expected.weighted.to(dtype), rtol=exact, atol=exact)
    torch.testing.assert_close(squares, expected.squares[0], rtol=1e-5, atol=1e-5)


def rounds(dtype: torch.dtype, result: Tensor) -> bool:
    """False in the interpreter, which truncates to bfloat16."""
    return result.is_cuda or dtype != torch.bfloat16


class Pushing:
    """The kernels alone, over given buffers."""

    def __init__(self, buffers: PeerBuffers) -> None:
        self.buffers = buffers

    def all_reduce(self, x: Tensor) -> Tensor:
        return reduce.push_reduce(self.buffers, x)

    def add_reduced(self, residual: NormedResidual, partial: Tensor, norm: Tensor) -> NormedResidual:
        return reduce.push_add(self.buffers, residual, partial, norm)

    def all_gather(self, x: Tensor) -> Tensor:
        return reduce.push_gather(self.buffers, x)


def shared_buffers(rank: int, mine: Sequence[Tensor], epoch: int, spin_limit: int) -> PeerBuffers:
    """Buffers in this process's memory; epoch: the last one, of all slots"""
    num_slots = mine[rank].shape[2]
    return PeerBuffers(
        rank,
        len(mine),
        mine[rank],
        torch.tensor([buffer.data_ptr() for buffer in mine]),
        torch.full((num_slots,), epoch, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        spin_limit,
    )


def run_interpreted(
    rank: int, mine: Sequence[Tensor], epoch: int, cases: Sequence[Case], delay_s: float, folder: Path
) -> None:
    """A rank's process: waits a random time before each case, and writes its results to a file."""
    torch.set_num_threads(1)
    buffers, late = shared_buffers(rank, mine, epoch, spin_limit=200_000), random.Random(rank)
    results: list[Any] = []
    for case in cases:
        for repeat in range(case.repeats):
            time.sleep(delay_s * late.random())
            results.append(collect(Pushing(buffers), case, Inputs.of(case, repeat, len(mine)), rank))
    torch.save((results, buffers.epochs, buffers.status), folder / f"{rank}.pt")


def interpret_ranks(size: int, epoch: int, cases: Sequence[Case], folder: Path, *, delay_s: float = 0.0) -> list[Any]:
    """(results, epochs, status) of each rank."""
    shape = reduce.buffer_shape(size, 1 << 20)
    mine = [torch.zeros(shape, dtype=torch.int64).share_memory_() for _ in range(size)]
    mp.spawn(run_interpreted, (mine, epoch, cases, delay_s, folder), nprocs=size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]
