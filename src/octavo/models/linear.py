"""A projection, and how its weights are named, merged, split over ranks and filled.

Each part of a model knows its weights under the names that checkpoints use (`Weight`), so that loading is one loop over
them, straight into the merged tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import ParameterError


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One rank of `size` that share every layer (Megatron-LM, arXiv 1909.08053): each has some heads of attention and
    some columns of the MLP; `all_reduce` sums their partial outputs, once after attention and once after the MLP."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] | None = None

    def share(self, total: int, what: str) -> int:
        """How many of `total` each rank has; raises `ParameterError` where they do not come out even."""
        if total % self.size:
            raise ParameterError(
                f"tensor_parallel_size {self.size} does not divide the model's {total} {what}; choose a divisor",
                param="tensor_parallel_size",
            )
        return total // self.size


ALONE = TensorParallel()


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a checkpoint, and where this rank's part of it goes.

    name    as Transformers names it
    shape   in the checkpoint, whole
    tensor  to be filled: a view into the tensor that is computed with
    start   [ndim] where in the checkpoint's tensor this rank's part begins; it ends where `tensor` does
    """

    name: str
    shape: tuple[int, ...]
    tensor: Tensor
    start: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Weight:
        return cls(name, tuple(tensor.shape), tensor, (0,) * tensor.ndim)


class Linear:
    """y = x @ weight.T + bias, with several projections of the same input merged into one product.

        split "out": a rank has rows of each projection    split "in": a rank has columns, and results are summed
        weight  | q  rank 0 |                              weight  | rank 0 | rank 1 |
                | q  rank 1 |
                | k  rank 0 | ...

    x [num_tokens, in_size] -> y [num_tokens, sum(out_sizes)], both this rank's part where they are split.
    """

    def __init__(
        self,
        in_size: int,
        out_sizes: Sequence[int],
        *,
        bias: bool,
        split: Literal["out", "in"],
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.tp = tp
        self.split = split
        self.in_size = in_size
        self.out_sizes = tuple(out_sizes)
        columns = tp.share(in_size, "inputs of a projection") if split == "in" else in_size
        self.rows = [tp.share(size, "outputs of a projection") if split == "out" else size for size in out_sizes]
        self.weight = torch.empty(sum(self.rows), columns, dtype=dtype, device=device)  # [out, in]
        # Where results are summed over ranks, the bias is one rank's to add.
        own_bias = bias and (split == "out" or tp.rank == 0)
        self.bias = torch.empty(sum(self.rows), dtype=dtype, device=device) if own_bias else None
        self.all_reduce = tp.all_reduce if split == "in" and tp.size > 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if self.all_reduce is None else self.all_reduce(y)

    def weights(self, *names: str) -> Iterator[Weight]:
        """The checkpoint's tensors that were merged here, one name a projection."""
        first_column = self.tp.rank * self.weight.shape[1] if self.split == "in" else 0
        parts = zip(names, self.out_sizes, self.rows, torch.split(self.weight, self.rows), strict=True)
        biases = [None] * len(names) if self.bias is None else torch.split(self.bias, self.rows)
        for (name, out_size, rows, weight), bias in zip(parts, biases, strict=True):
            first_row = self.tp.rank * rows if self.split == "out" else 0
            yield Weight(f"{name}.weight", (out_size, self.in_size), weight, (first_row, first_column))
            if bias is not None:
                yield Weight(f"{name}.bias", (out_size,), bias, (first_row,))
