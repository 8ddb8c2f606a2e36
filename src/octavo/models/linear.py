"""Linear layers, embeddings and the LM head: names, merging and tensor parallelism of their weights.

Each part of a model lists its weights under their names in checkpoints (`Weight`), so loading is one loop that copies
into the merged tensors. How a layer stores its weight and multiplies with it is a `linear_methods.LinearMethod`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.groups import Groups
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.ops import ModelOps, RankSums
from octavo.kernels.reference.norms import Gate, NormedResidual
from octavo.models.linear_methods import HeadNorms, LinearMethod, PlainMethod, Role
from octavo.models.spec import LinearShape, ModelSpec
from octavo.models.spec.ranks import heads_per_rank


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One of `size` tensor parallel ranks (Megatron-LM, arXiv 1909.08053).

    A rank has some attention heads, some columns of the MLP and some rows of the vocabulary: `ModelSpec.of_rank` has
    its sizes. What it computes besides is equal on all ranks.

    all_reduce  the sum of the ranks' tensors, in equal bits on all ranks; may reuse the argument's memory. It sums
                partial outputs, once after attention and once after the MLP
    all_gather  [n, m] -> [n, size * m], the columns of rank r from r * m on: the logits, or the winners of their slices
    sums        of the ranks' partial outputs, fused with what follows; None: there is no small-batch path
    sums_in_norms  outputs of layers and embeddings stay partial until the next norm sums them (`sums.add_rms_norm`)
    """

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] | None = None
    all_gather: Callable[[Tensor], Tensor] | None = None
    sums: RankSums | None = None
    sums_in_norms: bool = False

    def reduced(self, partial: Tensor) -> Tensor:
        """The sum of the ranks' partial outputs, unless the next norm takes it."""
        return partial if self.all_reduce is None or self.sums_in_norms else self.all_reduce(partial)

    def add_rms_norm(
        self, ops: ModelOps, x: Tensor, residual: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(the RMS norm of x + residual, the sum); x as `reduced` returned it."""
        if self.sums_in_norms and self.sums is not None and len(x):
            return self.sums.add_rms_norm(x, residual, norm, eps)
        return ops.add_rms_norm(x, residual, norm, eps)

    def kv_heads(self, total: int) -> int:
        """K/V heads of this rank. If ranks are more than heads, rank r has the head r * total // size."""
        return heads_per_rank(total, self.size)

    def start(self, total: int, own: int) -> int:
        """First index of this rank's `own` ones of `total`; of all, or of those of a head, several ranks may have the
        same."""
        return self.rank * total // (self.size * own) * own


SINGLE_RANK = TensorParallel()


class VocabSlice(NamedTuple):
    """The part of the vocabulary whose logits a rank computes: tokens from `first` on, of equally many on all ranks but
    the last.

    rank, all_gather  see `TensorParallel`
    """

    first: int
    rank: int
    all_gather: Callable[[Tensor], Tensor]


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
    def whole(cls, name: str, tensor: Tensor) -> Weight:
        return cls(name, tuple(tensor.shape), tensor, (0,) * tensor.ndim)

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

    def method(self, num_out: int, num_in: int, role: Role = "linear", **options: Any) -> LinearMethod:
        """options: of `LinearMethod`"""
        options |= {"ops": self.ops, "dtype": self.dtype, "device": self.device}
        return self.linear_method(num_out, num_in, role=role, **options)


class Linear:
    """y = x @ weight.T + bias, with several projections of the same input merged into one product.

        split outputs: a rank has rows of each projection    split inputs: a rank has columns; results are summed
        weight  | q  rank 0 |                                weight  | rank 0 | rank 1 |
                | q  rank 1 |
                | k  rank 0 | ...

    shape  of the whole layer    own  of this rank's part    role  its key in `ModelSpec.linears`
    x [num_tokens, own.in_size] -> y [num_tokens, own.num_out]

    The projections of `num_experts` experts are merged likewise, whose products are the method's `experts_in` and
    `experts_out`; 0: it is no layer of experts.
    """

    def __init__(
        self, shape: LinearShape, own: LinearShape, factory: LayerFactory, role: str = "", num_experts: int = 0
    ) -> None:
        self.tp = tp = factory.tp
        self.shape, self.own = shape, own
        kind: Role = "experts" if num_experts else "linear"
        self.method = factory.method(*own.shape, kind, layer=role, num_experts=num_experts or 1)
        self.is_partial = own.in_size < shape.in_size
        # Where results are summed over ranks, only one rank adds the bias.
        has_bias = shape.bias and not (self.is_partial and tp.rank)
        self.bias = factory.empty(own.num_out) if has_bias else None
        self.ops = factory.ops
        self.sums = tp.sums if self.is_partial else None

    def __call__(self, x: Tensor) -> Tensor:
        return self.reduced(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the output."""
        return self.method.apply(x, self.bias)

    def after_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(this layer's output for the RMS norm of x + residual, the sum); its inputs are not split."""
        if self.tp.sums_in_norms:
            normed, total = self.tp.add_rms_norm(self.ops, x, residual, norm, eps)
            return self.method.apply(normed, self.bias), total
        return self.method.add_norm_linear(x, residual, norm, eps, self.bias)

    def gated_partial(self, gate_up: Tensor, gate: Gate) -> Tensor:
        """The same for a gated MLP's activation of gate_up [num_tokens, 2 * own.in_size]."""
        return self.method.gated(gate_up, self.bias, gate)

    def reduced(self, y: Tensor) -> Tensor:
        """The sum of the ranks' parts, if inputs are split; see `TensorParallel.reduced`."""
        return self.tp.reduced(y) if self.is_partial else y

    @property
    def max_small_batch_tokens(self) -> int:
        """Maximum tokens for the fused products below; 0: none."""
        return 0 if self.is_partial and self.sums is None else self.method.max_small_batch_tokens

    def norm_linear(self, residual: NormedResidual, eps: float, gate: Gate = "") -> Tensor:
        """The residual's RMS norm, this layer, and a gated MLP's activation; see `kernels.reference.norm_linear`."""
        return self.method.norm_linear(residual, eps, self.bias, gate)

    def add_linear(self, residual: NormedResidual, x: Tensor, norm: Tensor) -> NormedResidual:
        """residual + this layer's output for x. norm: weight of the next RMS norm."""
        return self.method.add_linear(residual, x, self.bias, norm, self.sums)

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
        shape, rows = self.shape, self.own.out_sizes
        first_in = self.tp.start(shape.in_size, self.own.in_size)
        biases = [None] * len(rows) if self.bias is None else torch.split(self.bias, list(rows))
        bases: dict[str, int] = {}  # of each tensor, its first row in the whole layer
        sizes: dict[str, int] = {}
        for name, size in shape.parts:
            bases.setdefault(name, sum(sizes.values()))
            sizes[name] = sizes.get(name, 0) + size
        offset = row = 0
        for (name, size), num_rows, bias in zip(shape.parts, rows, biases, strict=True):
            base, order = bases[name], shape.order
            if order is not None:
                order = tuple(index - base for index in order[base : base + sizes[name]])
            first_out = offset - base + self.tp.start(size, num_rows)
            whole, start = (sizes[name], shape.in_size), (first_out, first_in)
            slot = Slot(self.method, row, row + num_rows, shape.is_conv1d)
            if shape.is_conv1d:
                yield Weight(f"{prefix}{name}.weight", whole[::-1], slot, start[::-1])
            else:
                yield Weight(f"{prefix}{name}.weight", whole, slot, start, order)
            if bias is not None:
                yield Weight(f"{prefix}{name}.bias", whole[:1], bias, start[:1], order)
            offset, row = offset + size, row + num_rows


class VocabEmbedding:
    """Embedding table and LM head, both [vocab_size, width]. In tied models they are one tensor, packed or not.

    A rank has the rows of as many tokens as the others; the last one has fewer, and its logits are padded.
    """

    def __init__(self, spec: ModelSpec, factory: LayerFactory) -> None:
        self.names, self.shape, self.tp = spec.names, spec.vocabulary, factory.tp
        self.logits_scaling, self.cap = spec.logits_scaling, spec.logits_cap
        self.tied = spec.tie_word_embeddings
        self.num_rows, width = spec.of_rank(self.tp.size).vocabulary
        self.first = self.tp.rank * self.num_rows
        own = min(self.num_rows, spec.vocab_size - self.first), width
        self.head = factory.method(*own, "tied" if self.tied else "head")
        self.table = self.head if self.tied else factory.method(*own, "table")

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, width]; see `TensorParallel.reduced`."""
        if self.tp.all_reduce is None:
            return self.table.gather_rows(token_ids)
        return self.tp.reduced(self.table.gather_own_rows(token_ids, self.first))

    @property
    def slice(self) -> VocabSlice | None:
        """None for a single rank."""
        return None if self.tp.all_gather is None else VocabSlice(self.first, self.tp.rank, self.tp.all_gather)

    def logits(self, x: Tensor, *, sliced: bool = False) -> Tensor:
        """[num_rows, width] -> [num_rows, vocab_size] float32; on a GPU in x's dtype. sliced: only this rank's slice"""
        logits = self.head.logits(x)
        logits = logits if self.logits_scaling == 1.0 else logits.div_(self.logits_scaling)
        logits = logits.div_(self.cap).tanh_().mul_(self.cap) if self.cap else logits
        if self.tp.all_gather is None or sliced:
            return logits
        padding = self.num_rows - logits.shape[1]
        gathered = self.tp.all_gather(F.pad(logits, (0, padding)) if padding else logits)
        return gathered[:, : self.shape[0]].contiguous()

    def weights(self) -> Iterator[Weight]:
        methods = {self.names.embedding: self.table} | ({} if self.tied else {self.names.head: self.head})
        for name, method in methods.items():
            yield Weight(f"{name}.weight", self.shape, Slot(method, 0, method.weight.shape[0]), (self.first, 0))
