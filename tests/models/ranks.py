"""Tensor parallel ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.reference.norms import NormedResidual, add_rms_norm, make_normed_residual
from octavo.models.linear import TensorParallel

T = TypeVar("T")


class ThreadSums:
    """`ops.RankSums` of operations one by one."""

    def __init__(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        self.all_reduce = all_reduce

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

    def __init__(self, size: int, *, fuses_sums: bool = False) -> None:
        self.fuses_sums = fuses_sums
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

        return TensorParallel(
            rank,
            len(self.parts),
            all_reduce,
            all_gather=lambda part: torch.cat(exchange(part), dim=1),
            sums=ThreadSums(all_reduce) if self.fuses_sums else None,
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
