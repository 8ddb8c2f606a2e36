"""Projections, embeddings and the head; how their weights are named, merged, split over ranks, filled and packed.

Each part of a model knows its weights under the names that checkpoints use (`Weight`), so that loading is one loop over
them, straight into the merged tensors. Once filled, a matrix may be packed: then it lies where and as its product is
fastest, and what is left of the plain one is its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import ParameterError
from octavo.kernels.cpu.packed_linear import (
    PackedHead,
    PackedWeight,
    Quantization,
    blockwise_linear,
    embed,
    pack,
    pack_head,
    packed_bytes,
)


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


SINGLE_RANK = TensorParallel()


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


def _empty_like(weight: Tensor, device: torch.device | str) -> Tensor:
    """As torch's, which on "meta" imports a system for algebra first: half a second, and two on a slow disk."""
    return torch.empty(weight.shape, dtype=weight.dtype, device=device)


class PackableWeight:
    """A weight [num_out, num_in] and what it is multiplied as: itself, or packed by `kernels.packed`."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.packed: PackedWeight | None = None

    def pack(self, quantization: Quantization | None = None) -> None:
        """Once the weight is filled: put it into the layout that its product is fastest in, and give the plain one up.
        Nothing happens where there is no such layout."""
        self.packed = pack(self.weight, quantization)
        if self.packed is not None:
            self.weight = _empty_like(self.weight, "meta")

    def num_bytes(self, quantization: Quantization | None = None) -> int:
        """What it takes when it is packed."""
        return packed_bytes(self.weight, quantization)


class Linear(PackableWeight):
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
        super().__init__(torch.empty(sum(self.rows), columns, dtype=dtype, device=device))
        # Where results are summed over ranks, the bias is one rank's to add.
        own_bias = bias and (split == "out" or tp.rank == 0)
        self.bias = torch.empty(sum(self.rows), dtype=dtype, device=device) if own_bias else None
        self.all_reduce = tp.all_reduce if split == "in" and tp.size > 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias) if self.packed is None else self.packed(x, self.bias)
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


class VocabEmbedding(PackableWeight):
    """Tokens in and logits out: the table of embeddings [vocab_size, width], and the head of the same shape. In tied
    models these are one table, read forwards and backwards; also when it is packed, there is one."""

    def __init__(
        self, vocab_size: int, width: int, *, tied: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.embedding = torch.empty(vocab_size, width, dtype=dtype, device=device)
        self.tied = tied
        super().__init__(self.embedding if tied else _empty_like(self.embedding, device))
        self.packed: PackedHead | None = None

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, width]."""
        if self.tied and self.packed is not None:
            return self.packed.gather_rows(token_ids)
        return embed(self.embedding, token_ids)

    def logits(self, x: Tensor) -> Tensor:
        """[num_rows, width] -> [num_rows, vocab_size] float32; on a GPU in x's dtype, which its sampler widens as it
        reads: a copy of such a table takes longer than a layer."""
        if self.packed is not None:
            return self.packed(x, None, float32_out=True)
        if x.is_cuda:
            return F.linear(x, self.weight)
        if x.dtype in (torch.bfloat16, torch.float16):  # in which the product would come rounded
            return blockwise_linear(x, self.weight)
        return F.linear(x, self.weight).float()

    def pack(self, quantization: Quantization | None = None) -> None:
        self.packed = pack_head(self.weight, quantization)
        if self.packed is None:
            return
        self.weight = _empty_like(self.weight, "meta")
        if self.tied:
            self.embedding = self.weight

    def weights(self, embedding: str) -> Iterator[Weight]:
        yield Weight.whole(f"{embedding}.weight", self.embedding)
        if not self.tied:
            yield Weight.whole("lm_head.weight", self.weight)
