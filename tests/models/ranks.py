"""Tensor parallel ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.reference.norms import NormedResidual, add_rms_norm, make_normed_residual
from octavo.models.linear import TensorParallel

T = TypeVar("T")


class ThreadSum(NamedTuple):
    """`ops.SentSum`. The sum is computed when its norm is asked for.

    on_way  slots of messages that were sent and not yet summed
    """

    sums: ThreadSums
    partial: Tensor
    slot: int
    on_way: list[int]

    def add_rms_norm(self, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert self.on_way.pop(0) == self.slot  # in the order of sending
        return self.sums.add_rms_norm(self.partial, residual, norm, eps)


class ThreadSums:
    """`ops.RankSums` of operations one by one. sends: longer batches than a token are computed in halves"""

    def __init__(self, all_reduce: Callable[[Tensor], Tensor], *, sends: bool = False) -> None:
        self.all_reduce, self.sends = all_reduce, sends
        self.num_sent, self.on_way = 0, list[int]()

    def part_size(self, num_tokens: int, row_bytes: int) -> int:
        return num_tokens // 2 if self.sends else 0

    def send(self, partial: Tensor, slot: int) -> ThreadSum:
        assert slot == self.num_sent % 4 and len(self.on_way) < 2
        self.num_sent += 1
        self.on_way.append(slot)
        return ThreadSum(self, partial, slot, self.on_way)

    def add_reduced(self, residual: NormedResidual, partial: Tensor, norm: Tensor) -> NormedResidual:
        return make_normed_residual(residual.x + self.all_reduce(partial), norm)

    def add_linear(
        self, residual: NormedResidual, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor
    ) -> NormedResidual:
        return self.add_reduced(residual, F.linear(x, weight, bias), norm)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(self.all_reduce(x), residual, norm, eps)


class Ranks:
    """Ranks whose collectives exchange tensors through a list, with a barrier. Their sums are equal in all bits."""

    def __init__(self, size: int, *, fuses_sums: bool = False, sends: bool = False) -> None:
        self.fuses_sums, self.sends = fuses_sums, sends
        self.sums: list[ThreadSums] = []
        self.parts: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=120)

    def rank(self, rank: int) -> TensorParallel:
        def exchange(part: Tensor) -> list[Tensor]:
            self.parts[rank] = part
            self.barrier.wait()
            parts = [p.clone() for p in self.parts if p is not None]
            self.barrier.wait()
            return parts

        def all_reduce(part: Tensor) -> Tensor:
            return torch.stack(exchange(part)).sum(0)

        sums = ThreadSums(all_reduce, sends=self.sends)
        self.sums.append(sums)
        return TensorParallel(
            rank,
            len(self.parts),
            all_reduce,
            all_gather=lambda part: torch.cat(exchange(part), dim=1),
            sums=sums if self.fuses_sums else None,
        )

    def run(self, run: Callable[[TensorParallel], T]) -> list[T]:
        """run(rank) of each rank, all at the same time."""

        def run_rank(rank: int) -> T:
            try:
                return run(self.rank(rank))
            except BaseException:
                self.barrier.abort()  # the other ranks wait for this one
                raise

        with ThreadPoolExecutor(len(self.parts)) as threads:
            return list(threads.map(run_rank, range(len(self.parts))))
