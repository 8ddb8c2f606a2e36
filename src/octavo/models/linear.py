"""Linear layers, embeddings and the LM head: names, merging, tensor parallelism and packing of their weights.

Each part of a model lists its weights under their names in checkpoints (`Weight`), so loading is one loop that copies
into the merged tensors. A loaded matrix may be packed into the layout of its fastest product; the plain tensor is then
freed, and only its shape remains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import ParameterError
from octavo.kernels.cpu import packed_linear
from octavo.kernels.cpu.packed_linear import PackedHead, PackedWeight, Quantization


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One of `size` tensor parallel ranks (Megatron-LM, arXiv 1909.08053).

    A rank has some attention heads and some columns of the MLP. `all_reduce` sums the ranks' partial outputs, once
    after attention and once after the MLP.
    """

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] | None = None

    def per_rank(self, total: int, name: str) -> int:
        """total / size; raises `ParameterError` if that is no whole number. `name` is used in the message."""
        if total % self.size:
            raise ParameterError(
                f"tensor_parallel_size {self.size} does not divide the model's {total} {name}; choose a divisor",
                param="tensor_parallel_size",
            )
        return total // self.size


SINGLE_RANK = TensorParallel()


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a checkpoint, and the model's tensor for this rank's part of it.

    name    Transformers' name
    shape   of the whole tensor in the checkpoint
    tensor  to be filled; a view into the tensor that the model computes with
    start   [ndim], first index of this rank's part in the checkpoint's tensor; its shape is that of `tensor`
    """

    name: str
    shape: tuple[int, ...]
    tensor: Tensor
    start: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Weight:
        return cls(name, tuple(tensor.shape), tensor, (0,) * tensor.ndim)


def _empty_like(weight: Tensor, device: torch.device | str) -> Tensor:
    """torch.empty_like, which on "meta" would import sympy first: half a second, two on a slow disk."""
    return torch.empty(weight.shape, dtype=weight.dtype, device=device)


class PackableWeight:
    """A weight [num_out, num_in] that is multiplied as it is, or packed by `kernels.cpu.packed_linear`."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.packed: PackedWeight | None = None

    def pack(self, quantization: Quantization | None = None) -> None:
        """Pack the loaded weight and free the plain one. Does nothing if no packed layout is faster."""
        self.packed = packed_linear.pack(self.weight, quantization)
        if self.packed is not None:
            self.weight = _empty_like(self.weight, "meta")

    def num_bytes(self, quantization: Quantization | None = None) -> int:
        """Bytes of the packed weight."""
        return packed_linear.packed_bytes(self.weight, quantization)


class Linear(PackableWeight):
    """y = x @ weight.T + bias, with several projections of the same input merged into one product.

        split "out": a rank has rows of each projection    split "in": a rank has columns; results are summed
        weight  | q  rank 0 |                              weight  | rank 0 | rank 1 |
                | q  rank 1 |
                | k  rank 0 | ...

    x [num_tokens, in_size] -> y [num_tokens, sum(out_sizes)], of which a split dimension is this rank's part.
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
        columns = tp.per_rank(in_size, "inputs of a projection") if split == "in" else in_size
        self.rows = [tp.per_rank(size, "outputs of a projection") if split == "out" else size for size in out_sizes]
        super().__init__(torch.empty(sum(self.rows), columns, dtype=dtype, device=device))
        # Where results are summed over ranks, only one rank adds the bias.
        has_bias = bias and (split == "out" or tp.rank == 0)
        self.bias = torch.empty(sum(self.rows), dtype=dtype, device=device) if has_bias else None
        self.all_reduce = tp.all_reduce if split == "in" and tp.size > 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias) if self.packed is None else self.packed(x, self.bias)
        return y if self.all_reduce is None else self.all_reduce(y)

    def weights(self, *names: str) -> Iterator[Weight]:
        """The checkpoint's tensors that are merged here; one name for each projection."""
        first_column = self.tp.rank * self.weight.shape[1] if self.split == "in" else 0
        parts = zip(names, self.out_sizes, self.rows, torch.split(self.weight, self.rows), strict=True)
        biases = [None] * len(names) if self.bias is None else torch.split(self.bias, self.rows)
        for (name, out_size, rows, weight), bias in zip(parts, biases, strict=True):
            first_row = self.tp.rank * rows if self.split == "out" else 0
            yield Weight(f"{name}.weight", (out_size, self.in_size), weight, (first_row, first_column))
            if bias is not None:
                yield Weight(f"{name}.bias", (out_size,), bias, (first_row,))


class VocabEmbedding(PackableWeight):
    """Embedding table and LM head, both [vocab_size, width]. In tied models they are one tensor, packed or not."""

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
        return packed_linear.embed(self.embedding, token_ids)

    def logits(self, x: Tensor) -> Tensor:
        """[num_rows, width] -> [num_rows, vocab_size] float32.

        On a GPU, logits have x's dtype and the sampler converts them: a float32 copy would take longer than a layer.
        """
        if self.packed is not None:
            return self.packed(x, None, float32_out=True)
        if x.is_cuda:
            return F.linear(x, self.weight)
        if x.dtype in (torch.bfloat16, torch.float16):  # F.linear would round the logits
            return packed_linear.blockwise_linear(x, self.weight)
        return F.linear(x, self.weight).float()

    def pack(self, quantization: Quantization | None = None) -> None:
        self.packed = packed_linear.pack_head(self.weight, quantization)
        if self.packed is None:
            return
        self.weight = _empty_like(self.weight, "meta")
        if self.tied:
            self.embedding = self.weight

    def weights(self, embedding: str, head: str) -> Iterator[Weight]:
        yield Weight.whole(f"{embedding}.weight", self.embedding)
        if not self.tied:
            yield Weight.whole(f"{head}.weight", self.weight)
