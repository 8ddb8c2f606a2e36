"""Linear layers, embeddings and the LM head: names, merging and tensor parallelism of their weights.

Each part of a model lists its weights under their names in checkpoints (`Weight`), so loading is one loop that copies
into the merged tensors. How a layer stores its weight and multiplies with it is a `linear_methods.LinearMethod`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Unpack

import torch
from torch import Tensor

from octavo.errors import ParameterError
from octavo.kernels.groups import Groups
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.ops import ModelOps
from octavo.kernels.reference.norms import Gate, NormedResidual
from octavo.models.linear_methods import HeadNorms, LinearMethod, PlainMethod, Role
from octavo.models.spec import LinearShape, ModelSpec


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One of `size` tensor parallel ranks (Megatron-LM, arXiv 1909.08053).

    A rank has some attention heads and some columns of the MLP. `all_reduce` sums the ranks' partial outputs, once
    after attention and once after the MLP.

    add_reduced  (residual, partial, norm) -> residual + the sum of the ranks' partial, with the next norm's weight;
                 None: there is no small-batch path
    """

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] | None = None
    add_reduced: Callable[[NormedResidual, Tensor, Tensor], NormedResidual] | None = None

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
class Slot:
    """Rows [first, last) of a linear layer's weight, the place of one tensor of the checkpoint.

    is_transposed  the checkpoint's tensor is [num_in, num_out]
    """

    method: LinearMethod
    first: int
    last: int
    is_transposed: bool = False

    def rows(self) -> Tensor | Groups:
        rows = self.method.rows(self.first, self.last)
        return rows.mT if self.is_transposed and isinstance(rows, Tensor) else rows


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a checkpoint, and the model's memory for this rank's part of it.

    name    Transformers' name
    shape   of the whole tensor in the checkpoint
    place   to be filled: a tensor of the model, or a linear layer's slot
    start   [len(shape)], first index of this rank's part in the checkpoint's tensor
    order   row i is row order[i] of the checkpoint's tensor; None: the same order
    """

    name: str
    shape: tuple[int, ...]
    place: Tensor | Slot
    start: tuple[int, ...]
    order: tuple[int, ...] | None = None

    @classmethod
    def whole(cls, name: str, tensor: Tensor, order: tuple[int, ...] | None = None) -> Weight:
        return cls(name, tuple(tensor.shape), tensor, (0,) * tensor.ndim, order)

    @property
    def method(self) -> LinearMethod | None:
        return self.place.method if isinstance(self.place, Slot) else None

    @property
    def target(self) -> Tensor | Groups:
        """What is to be filled: once a linear layer has allocated it."""
        return self.place.rows() if isinstance(self.place, Slot) else self.place


@dataclass(frozen=True, slots=True)
class LayerFactory:
    """What all layers of a model are created with: their operations, dtype, device, rank and linear method."""

    ops: ModelOps
    dtype: torch.dtype
    device: torch.device | str
    tp: TensorParallel = SINGLE_RANK
    linear_method: Callable[..., LinearMethod] = PlainMethod

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def method(self, num_out: int, num_in: int, role: Role = "linear") -> LinearMethod:
        return self.linear_method(num_out, num_in, ops=self.ops, dtype=self.dtype, device=self.device, role=role)


class Linear:
    """y = x @ weight.T + bias, with several projections of the same input merged into one product.

        split "out": a rank has rows of each projection    split "in": a rank has columns; results are summed
        weight  | q  rank 0 |                              weight  | rank 0 | rank 1 |
                | q  rank 1 |
                | k  rank 0 | ...

    x [num_tokens, in_size] -> y [num_tokens, sum(out_sizes)], of which a split dimension is this rank's part.
    """

    def __init__(self, shape: LinearShape, factory: LayerFactory, *, split: Literal["out", "in"]) -> None:
        tp = factory.tp
        self.shape, self.split, self.rank = shape, split, tp.rank
        columns = tp.per_rank(shape.in_size, "inputs of a projection") if split == "in" else shape.in_size
        self.rows = [
            tp.per_rank(size, "outputs of a projection") if split == "out" else size for size in shape.out_sizes
        ]
        self.method = factory.method(sum(self.rows), columns)
        # Where results are summed over ranks, only one rank adds the bias.
        has_bias = shape.bias and (split == "out" or tp.rank == 0)
        self.bias = factory.empty(sum(self.rows)) if has_bias else None
        self.is_partial = split == "in" and tp.size > 1
        self.all_reduce = tp.all_reduce if self.is_partial else None
        self.add_reduced = tp.add_reduced if self.is_partial else None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.method.apply(x, self.bias)
        return y if self.all_reduce is None else self.all_reduce(y)

    @property
    def max_small_batch_tokens(self) -> int:
        """Maximum tokens for the fused products below; 0: none."""
        return 0 if self.is_partial and self.add_reduced is None else self.method.max_small_batch_tokens

    def norm_linear(self, residual: NormedResidual, eps: float, gate: Gate = "") -> Tensor:
        """The residual's RMS norm, this layer, and a gated MLP's activation; see `kernels.reference.norm_linear`."""
        return self.method.norm_linear(residual, eps, self.bias, gate)

    def add_linear(self, residual: NormedResidual, x: Tensor, norm: Tensor) -> NormedResidual:
        """residual + this layer's output for x. norm: weight of the next RMS norm."""
        if self.add_reduced is not None:
            return self.add_reduced(residual, self.method.few_rows_linear(x, self.bias), norm)
        return self.method.add_linear(residual, x, self.bias, norm)

    def project_qkv(
        self,
        residual: NormedResidual,
        eps: float,
        kv_layer: Tensor,
        batch: RaggedBatch,
        cos_sin: Tensor,
        *,
        norm_eps: float,
        **norms: Unpack[HeadNorms],
    ) -> Tensor:
        """All operations between the residual and attention; see `kernels.reference.project_qkv`."""
        return self.method.project_qkv(residual, eps, self.bias, kv_layer, batch, cos_sin, norm_eps=norm_eps, **norms)

    def weights(self, prefix: str) -> Iterator[Weight]:
        """The checkpoint's tensors that are merged here: one for each projection, or a part of one for each."""
        shape, method = self.shape, self.method
        is_merged = len(shape.names) < len(shape.out_sizes)
        names = shape.names * (len(shape.out_sizes) if is_merged else 1)
        first_in = self.rank * method.weight.shape[1] if self.split == "in" else 0
        biases = [None] * len(names) if self.bias is None else torch.split(self.bias, self.rows)
        offset = row = 0
        for name, size, num_rows, bias in zip(names, shape.out_sizes, self.rows, biases, strict=True):
            before, order = (offset if is_merged else 0), shape.order
            if order is not None and not is_merged:
                order = tuple(index - offset for index in order[offset : offset + size])
            first_out = before + (self.rank * num_rows if self.split == "out" else 0)
            whole, start = (shape.num_out if is_merged else size, shape.in_size), (first_out, first_in)
            slot = Slot(method, row, row + num_rows, shape.is_conv1d)
            if shape.is_conv1d:
                yield Weight(f"{prefix}{name}.weight", whole[::-1], slot, start[::-1])
            else:
                yield Weight(f"{prefix}{name}.weight", whole, slot, start, order)
            if bias is not None:
                yield Weight(f"{prefix}{name}.bias", whole[:1], bias, start[:1], order)
            offset, row = offset + size, row + num_rows


class VocabEmbedding:
    """Embedding table and LM head, both [vocab_size, width]. In tied models they are one tensor, packed or not."""

    def __init__(self, spec: ModelSpec, factory: LayerFactory) -> None:
        self.names = spec.names
        self.logits_scaling = spec.logits_scaling
        self.tied = spec.tie_word_embeddings
        self.head = factory.method(*spec.vocabulary, "head")
        self.table = self.head if self.tied else factory.method(*spec.vocabulary, "table")

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, width]."""
        return self.table.gather_rows(token_ids)

    def logits(self, x: Tensor) -> Tensor:
        """[num_rows, width] -> [num_rows, vocab_size] float32; on a GPU in x's dtype."""
        logits = self.head.logits(x)
        return logits if self.logits_scaling == 1.0 else logits.div_(self.logits_scaling)

    def weights(self) -> Iterator[Weight]:
        methods = {self.names.embedding: self.table} | ({} if self.tied else {self.names.head: self.head})
        for name, method in methods.items():
            num_out, num_in = method.weight.shape
            yield Weight(f"{name}.weight", (num_out, num_in), Slot(method, 0, num_out), (0, 0))
