"""Ranks in processes of their own that sum and gather: inputs, expected results, and ranks in Triton's interpreter."""

from __future__ import annotations

import ctypes
import math
import queue
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.multiprocessing as mp
from torch import Tensor

from octavo.kernels.reference.norms import NormedResidual, make_normed_residual, rms_norm
from octavo.kernels.triton import reduce
from octavo.kernels.triton.reduce import PeerBuffers

EPS = 1e-5


class Case(NamedTuple):
    """norm: the dtype of the norm's weight, if it is another one"""

    rows: int
    width: int
    dtype: torch.dtype
    repeats: int = 1
    norm: torch.dtype | None = None


class Collectives(Protocol):
    def all_reduce(self, x: Tensor) -> Tensor: ...

    def add_reduced(self, residual: NormedResidual, partial: Tensor, norm: Tensor) -> NormedResidual: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

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
        norm = torch.rand(case.width, generator=make).to(device=device, dtype=case.norm or case.dtype)
        return cls(partials, residual, norm)


def collect(ranks: Collectives, case: Case, inputs: Inputs, rank: int) -> list[Tensor]:
    """A rank's results: sum, residual, weighted, sums of squares, gathered, whole norm, its residual."""
    partial = inputs.partials[rank]
    stream = make_normed_residual(inputs.residual, inputs.norm)
    after = ranks.add_reduced(stream, partial.clone(), inputs.norm)
    gathered = ranks.all_gather(partial)
    whole = ranks.add_rms_norm(partial.clone(), inputs.residual, inputs.norm, EPS)
    total = ranks.all_reduce(partial.clone())
    return [total, after.x, after.weighted, after.squares[:, : case.rows].sum(0), gathered, *whole]


def check(results: Sequence[Tensor], inputs: Inputs, *, is_pushed: bool = True) -> None:
    """Pushed sums of two ranks are exact up to one rounding; NCCL's have one a rank. Norms are of the stored sum."""
    dtype, wide = inputs.residual.dtype, [x.float() for x in inputs.partials]
    total, stream, weighted, squares, gathered, normed, normed_stream = results
    assert torch.equal(gathered, torch.cat(inputs.partials, 1))
    num_roundings = 1 if is_pushed else len(wide)
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype] * num_roundings
    expected_stream = sum(wide) + inputs.residual.float()
    for actual, expected in ((total, sum(wide)), (stream, expected_stream), (normed_stream, expected_stream)):
        assert isinstance(expected, Tensor)
        if len(wide) == 2 and is_pushed and rounds(dtype, actual):
            torch.testing.assert_close(actual, expected.to(dtype), rtol=0, atol=0)
        torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)
    expected = make_normed_residual(stream.float(), inputs.norm.float())
    exact = 0 if rounds(dtype, weighted) else tolerance
    torch.testing.assert_close(weighted, expected.weighted.to(dtype), rtol=exact, atol=exact)
    torch.testing.assert_close(squares, expected.squares[0], rtol=1e-5, atol=1e-5)
    check_norm(normed, rms_norm(normed_stream, inputs.norm, EPS))


def check_norm(normed: Tensor, expected: Tensor) -> None:
    """Few numbers are another one of 16 bits: by another order of the squares, not by other roundings of the norm."""
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[normed.dtype]
    torch.testing.assert_close(normed, expected, rtol=tolerance, atol=tolerance)
    if normed.dtype != torch.float32 and rounds(normed.dtype, normed):
        assert (normed != expected).float().mean() < 0.02


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

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return reduce.push_add_norm(self.buffers, x, residual, norm, eps)

    def all_gather(self, x: Tensor) -> Tensor:
        return reduce.push_gather(self.buffers, x)


class HostCopies:
    """The `CopyEngine` of memory of this host: a thread that copies in order, each a random time later."""

    def __init__(self, seed: int, delay_s: float = 0.0) -> None:
        self._queue: queue.SimpleQueue[tuple[Sequence[tuple[Tensor, int]], threading.Event]] = queue.SimpleQueue()
        self._late, self._delay_s = random.Random(seed), delay_s
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            copies, end = self._queue.get()
            for tensor, address in copies:
                time.sleep(self._delay_s * self._late.random())
                ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)
            end.set()

    def copy(self, copies: Sequence[tuple[Tensor, int]]) -> threading.Event:
        end = threading.Event()
        self._queue.put((copies, end))
        return end

    def wait(self, end: threading.Event) -> None:
        assert end.wait(60)


class Memory(NamedTuple):
    """Ranks' buffers in the memory of this host."""

    mine: Sequence[Tensor]
    shapes: tuple[tuple[int, ...], ...]
    paired_bytes: int

    @classmethod
    def allocate(cls, size: int, max_bytes: int, paired_bytes: int, sent_bytes: int = 0) -> Memory:
        shapes = reduce.buffer_shapes(size, max_bytes, paired_bytes, sent_bytes)
        num_words = sum(map(math.prod, shapes))
        mine = [torch.zeros(num_words, dtype=torch.int64).share_memory_() for _ in range(size)]
        return cls(mine, shapes, paired_bytes)

    def of_rank(self, rank: int, epoch: int, spin_limit: int) -> PeerBuffers:
        """epoch: the last one, of all slots"""
        addresses, shapes = [buffer.data_ptr() for buffer in self.mine], self.shapes
        limits = {"spin_limit": spin_limit, "paired_bytes": self.paired_bytes}
        buffers = reduce.split_buffer(rank, self.mine[rank], addresses, shapes, **limits)
        for slots in (buffers.pairs, buffers.blocks):
            slots.epochs.fill_(epoch)
        return buffers


def run_interpreted(rank: int, memory: Memory, epoch: int, cases: Sequence[Case], delay_s: float, folder: Path) -> None:
    """A rank's process: waits a random time before each case, and writes its results to a file."""
    torch.set_num_threads(1)
    buffers, late = memory.of_rank(rank, epoch, spin_limit=200_000), random.Random(rank)
    results: list[Any] = []
    for case in cases:
        for repeat in range(case.repeats):
            time.sleep(delay_s * late.random())
            results.append(collect(Pushing(buffers), case, Inputs.of(case, repeat, buffers.size), rank))
    epochs = torch.cat([buffers.pairs.epochs, buffers.blocks.epochs])
    torch.save((results, epochs, buffers.status), folder / f"{rank}.pt")


def interpret_ranks(
    size: int, epoch: int, cases: Sequence[Case], folder: Path, *, paired_bytes: int, delay_s: float = 0.0
) -> list[Any]:
    """(results, epochs, status) of each rank."""
    memory = Memory.allocate(size, 1 << 20, paired_bytes)
    mp.spawn(run_interpreted, (memory, epoch, cases, delay_s, folder), nprocs=size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]
