"""How a linear layer stores its weight, and multiplies with it: plain, or packed for a CPU.

A layer (`linear.Linear`) owns a method. `quantization.METHODS` names the methods that an engine can choose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal, TypedDict, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.cpu import packed_linear
from octavo.kernels.cpu.huge_memory import empty_huge
from octavo.kernels.cpu.packed_linear import MatmulBackend
from octavo.kernels.groups import SUPER_SIZE, FusedWeight, GroupForm, Groups, PackedExperts, PackedHead, PackedWeight
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.ops import ModelOps, RankSums
from octavo.kernels.reference import split_heads
from octavo.kernels.reference.experts import ExpertGate, Routing
from octavo.kernels.reference.norms import Gate, NormedResidual
from octavo.kernels.rounding import round_to_groups
from octavo.models.quantization import METHODS
from octavo.models.registry import load


class HeadNorms(TypedDict):
    """Weights of the RMS norms of the heads of Q and K, [head_dim] each; None: no such norms.

    kv_scales  [2, num_kv_heads], of a pool in float8
    """

    q_norm: Tensor | None
    k_norm: Tensor | None
    kv_scales: Tensor | None


Role = Literal["linear", "experts", "router", "head", "tied", "table"]
"""What a weight is for: products, products of experts, logits of a router, logits of tokens, these and embeddings, or
embeddings alone."""

NO_LIMIT = 1 << 30
"""`max_small_batch_tokens` of what is as fast on any path."""


class LinearMethod:
    """The weight of a linear layer, [num_out, num_in], and its products.

    The loader calls `allocate`, fills `rows`, and calls `finish`. A subclass defines `apply`, `gather_rows` and
    `logits`; it may convert the weight in `finish`. `max_small_batch_tokens` offers the small-batch path. The fused
    products of that path follow from `apply`; a subclass with faster ones overrides them.

    weight       [num_out, num_in], as in the checkpoint; only its shape before it is allocated
    num_experts  equal parts of its rows that are weights of experts
    layer        of role "linear": the layer's role in `ModelSpec.linears`
    """

    def __init__(
        self,
        num_out: int,
        num_in: int,
        *,
        ops: ModelOps,
        dtype: torch.dtype,
        device: torch.device | str,
        role: Role = "linear",
        layer: str = "",
        num_experts: int = 1,
    ) -> None:
        self.ops, self.role, self.device, self.num_experts = ops, role, device, num_experts
        self.layer = layer
        self.weight = torch.empty(num_out, num_in, dtype=dtype, device="meta")

    # -- loading -------------------------------------------------------------------------------------------------------

    def keeps(self, form: GroupForm) -> bool:
        """True if a weight that is quantised in this form keeps its bits; else it is dequantised while it is loaded."""
        return False

    def allocate(self, forms: Sequence[tuple[int, GroupForm | None]]) -> None:
        """Allocate the weight. forms: of consecutive rows, (their number, the form if it is kept)"""
        self.weight = torch.empty(self.weight.shape, dtype=self.weight.dtype, device=self.device)

    def rows(self, first: int, last: int) -> Tensor | Groups:
        """Rows [first, last) of the weight, to be filled: within one of the forms."""
        return self.weight[first:last]

    def finish(self) -> None:
        """Called once, when the weight is filled: to pack it, for example."""

    # -- products ------------------------------------------------------------------------------------------------------

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias; x [num_tokens, num_in] -> [num_tokens, num_out] in x's dtype."""
        raise NotImplementedError

    def gather_rows(self, indices: Tensor) -> Tensor:
        """weight[indices], [num_indices, num_in]."""
        raise NotImplementedError

    def gather_own_rows(self, token_ids: Tensor, first: int) -> Tensor:
        """See `kernels.reference.gather_own_rows`."""
        rows = token_ids - first
        own = rows.clamp(0, self.weight.shape[0] - 1)
        return self.gather_rows(own).masked_fill_((rows != own).unsqueeze(1), 0.0)

    def logits(self, x: Tensor) -> Tensor:
        """x @ weight.T, unrounded: float32, on a GPU x's dtype."""
        raise NotImplementedError

    def experts_in(self, x: Tensor, bias: Tensor | None, routing: Routing, gate: ExpertGate) -> Tensor:
        """See `kernels.reference.experts_in`."""
        return self.ops.experts_in(x, self.weight, bias, routing, self.num_experts, gate)

    def gated(self, gate_up: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        """`apply` for a gated MLP's activation of gate_up [num_tokens, 2 * num_in]."""
        return self.apply(self.ops.silu_mul(gate_up) if gate == "silu" else self.ops.gelu_mul(gate_up), bias)

    def add_norm_linear(
        self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(`apply` for the RMS norm of x + residual, the sum)."""
        normed, total = self.ops.add_rms_norm(x, residual, norm, eps)
        return self.apply(normed, bias), total

    def experts_out(self, x: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
        """See `kernels.reference.experts_out`."""
        return self.ops.experts_out(x, self.weight, bias, routing, self.num_experts)

    # -- small-batch path ----------------------------------------------------------------------------------------------

    @property
    def max_small_batch_tokens(self) -> int:
        """Maximum tokens of a pass for which the fused products below are faster than separate operations; 0: none."""
        return 0

    def norm_linear(self, residual: NormedResidual, eps: float, bias: Tensor | None, gate: Gate = "") -> Tensor:
        """See `kernels.reference.norm_linear`."""
        y = self.apply((residual.weighted * residual.scale(eps)).to(residual.x.dtype), bias)
        return y if not gate else self.ops.silu_mul(y) if gate == "silu" else self.ops.gelu_mul(y)

    def add_linear(
        self, residual: NormedResidual, x: Tensor, bias: Tensor | None, norm: Tensor, sums: RankSums | None = None
    ) -> NormedResidual:
        """See `kernels.reference.add_linear`; with sums, of the sum of all ranks' products."""
        if sums is not None:
            return sums.add_reduced(residual, self.few_rows_linear(x, bias), norm)
        return self.ops.make_normed_residual(residual.x + self.apply(x, bias), norm)

    def few_rows_linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`apply` for at most `max_small_batch_tokens`."""
        return self.apply(x, bias)

    def project_qkv(
        self,
        residual: NormedResidual,
        eps: float,
        bias: Tensor | None,
        kv_layer: Tensor,
        batch: RaggedBatch,
        cos_sin: Tensor,
        *,
        norm_eps: float,
        **norms: Unpack[HeadNorms],
    ) -> Tensor:
        """See `kernels.reference.project_qkv`."""
        q, k, v = split_heads(self.norm_linear(residual, eps, bias), kv_layer)
        return self.ops.rope_kv_write(
            q, k, v, batch.positions, cos_sin, kv_layer, batch.slot_mapping, eps=norm_eps, **norms
        )


class PlainMethod(LinearMethod):
    """The weight as it is in the checkpoint, in the model's dtype. Fused products are the platform's."""

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.ops.linear(x, self.weight, bias)

    def gather_rows(self, indices: Tensor) -> Tensor:
        return packed_linear.embed(self.weight, indices)

    def gather_own_rows(self, token_ids: Tensor, first: int) -> Tensor:
        return self.ops.gather_own_rows(self.weight, token_ids, first)

    def logits(self, x: Tensor) -> Tensor:
        # On a GPU the sampler converts logits: a float32 copy would take longer than a layer.
        if x.is_cuda:
            return self.ops.linear(x, self.weight, None)
        if x.dtype in (torch.bfloat16, torch.float16):  # F.linear would round the logits
            return packed_linear.blockwise_linear(x, self.weight)
        return F.linear(x, self.weight).float()

    @property
    def max_small_batch_tokens(self) -> int:
        return self.ops.max_small_batch_tokens(self.weight)

    def norm_linear(self, residual: NormedResidual, eps: float, bias: Tensor | None, gate: Gate = "") -> Tensor:
        return self.ops.norm_linear(residual, eps, self.weight, bias, gate)

    def add_linear(
        self, residual: NormedResidual, x: Tensor, bias: Tensor | None, norm: Tensor, sums: RankSums | None = None
    ) -> NormedResidual:
        if sums is not None:
            return sums.add_linear(residual, x, self.weight, bias, norm)
        return self.ops.add_linear(residual, x, self.weight, bias, norm)

    def few_rows_linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.ops.few_rows_linear(x, self.weight, bias)

    def project_qkv(
        self,
        residual: NormedResidual,
        eps: float,
        bias: Tensor | None,
        kv_layer: Tensor,
        batch: RaggedBatch,
        cos_sin: Tensor,
        *,
        norm_eps: float,
        **norms: Unpack[HeadNorms],
    ) -> Tensor:
        return self.ops.project_qkv(
            residual, eps, self.weight, bias, kv_layer, batch, cos_sin, norm_eps=norm_eps, **norms
        )


class PackedMethod(PlainMethod):
    """The weight in the layout of its fastest products. Quantised parts keep their bits where the platform can.

    On a CPU, `kernels.cpu.packed_linear` packs the rest; else it stays plain. What is packed frees what it was made of.
    """

    def __init__(
        self,
        num_out: int,
        num_in: int,
        *,
        form: GroupForm | None = None,
        head_form: GroupForm | None = None,
        finer: Mapping[str, GroupForm] = MappingProxyType({}),
        backend: MatmulBackend | None = None,
        **options: Any,
    ) -> None:
        """form, head_form: to which the checkpoint's plain weights are rounded    backend: on a CPU, of the others

        finer  forms of layers that lose more, by their role in `ModelSpec.linears`
        """
        super().__init__(num_out, num_in, **options)
        self.form = {"linear": finer.get(self.layer, form), "experts": form, "head": head_form, "tied": head_form}.get(
            self.role
        )
        self.backend = backend
        self.packed: PackedWeight | None = None
        self.packed_experts: PackedExperts | None = None
        self._parts: list[Tensor | Groups] = []
        self.fused: FusedWeight | None = None  # `packed`, if it has fused products

    def keeps(self, form: GroupForm) -> bool:
        if torch.device(self.device).type != "cpu":  # where float8 products round activations
            kept = {"linear": not form.is_e2m1, "experts": form.is_e2m1 or not form.is_float, "head": not form.is_float}
            if not kept.get(self.role, False):  # embeddings in groups take longer to read
                return False
        if form.ordered_in and self.role != "linear":
            return False  # only plain products gather their inputs
        unit = SUPER_SIZE if form.is_nested else form.group_size
        num_in = self.weight.shape[1]
        return num_in % unit == 0 and self.ops.keeps_groups(form, num_in, self.weight.dtype)

    def allocate(self, forms: Sequence[tuple[int, GroupForm | None]]) -> None:
        self._parts = []
        num_in, dtype = self.weight.shape[1], self.weight.dtype
        if self.role == "experts" and len({form for _, form in forms}) > 1:
            forms = [(self.weight.shape[0], None)]  # their products take one form
        for (form, _), parts in groupby(enumerate(forms), key=_mergeable):
            num_out = sum(num_rows for _, (num_rows, _) in parts)
            if form is not None:
                self._parts.append(Groups.empty(form, num_out, num_in, self.device))
            elif self.role == "experts" and torch.device(self.device).type == "cpu":
                memory = empty_huge(num_out * num_in * dtype.itemsize)  # their products read it as it is
                self._parts.append(memory.view(dtype).view(num_out, num_in))
            else:
                self._parts.append(torch.empty(num_out, num_in, dtype=dtype, device=self.device))

    def rows(self, first: int, last: int) -> Tensor | Groups:
        for part in self._parts:
            if first < (num_rows := part.shape[0]):
                return part[first:last] if isinstance(part, Tensor) else part.rows(first, last)
            first, last = first - num_rows, last - num_rows
        return super().rows(first, last)

    def finish(self) -> None:
        if self.role == "experts":
            self._finish_experts()
            return
        parts: list[PackedWeight] = []
        sizes = [part.shape[0] for part in self._parts]
        while self._parts:
            made = self._pack(self._parts.pop(0))
            if isinstance(made, Tensor):
                if not parts and not self._parts:
                    self.weight = made
                    return
                made = PlainWeight(made)
            parts.append(made)
        self.packed = parts[0] if len(parts) == 1 else MergedWeight(parts, sizes)
        if hasattr(self.packed, "max_small_batch_tokens"):
            self.fused = cast("FusedWeight", self.packed)

    def _finish_experts(self) -> None:
        part = self._round(self._parts.pop())
        if isinstance(part, Groups):
            self.packed_experts = self.ops.pack_experts(part.with_narrow_scales(), self.num_experts)
            if self.packed_experts is not None:
                return
            part = part.dequantised().to(self.weight.dtype)
        self.weight = part

    def _round(self, part: Tensor | Groups) -> Tensor | Groups:
        """A plain part in `form`."""
        if isinstance(part, Groups) or self.form is None or part.shape[1] % self.form.group_size:
            return part
        return round_to_groups(part, self.form)

    def _pack(self, part: Tensor | Groups) -> PackedWeight | Tensor:
        """A plain weight is returned as it is where plain torch is as fast."""
        part = self._round(part)
        if isinstance(part, Groups):
            packed: PackedWeight | None = self.ops.pack_groups(replace(part.with_narrow_scales(), order=None))
            if packed is not None:
                return packed if part.order is None else OrderedWeight(packed, part.order)
            part = part.dequantised().to(self.weight.dtype)
        if self.role == "table":
            return part
        pack = packed_linear.pack if self.role == "linear" else packed_linear.pack_head
        return pack(part, self.backend) or part

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return super().apply(x, bias) if self.packed is None else self.packed(x, bias)

    def gather_rows(self, indices: Tensor) -> Tensor:
        if self.packed is None:
            return super().gather_rows(indices)
        return cast("PackedHead", self.packed).gather_rows(indices)

    def gather_own_rows(self, token_ids: Tensor, first: int) -> Tensor:
        method = PlainMethod if self.packed is None else LinearMethod
        return method.gather_own_rows(self, token_ids, first)

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) if self.packed is None else self.packed(x, None, float32_out=not x.is_cuda)

    def experts_in(self, x: Tensor, bias: Tensor | None, routing: Routing, gate: ExpertGate) -> Tensor:
        if self.packed_experts is None:
            return super().experts_in(x, bias, routing, gate)
        return self.packed_experts.experts_in(x, bias, routing, gate)

    def experts_out(self, x: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
        if self.packed_experts is None:
            return super().experts_out(x, bias, routing)
        return self.packed_experts.experts_out(x, bias, routing)

    @property
    def max_small_batch_tokens(self) -> int:
        if self.packed is None:
            return super().max_small_batch_tokens
        return 0 if self.fused is None else self.fused.max_small_batch_tokens

    def gated(self, gate_up: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        return super().gated(gate_up, bias, gate) if self.fused is None else self.fused.gated(gate_up, bias, gate)

    def add_norm_linear(
        self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        product = super().add_norm_linear if self.fused is None else self.fused.add_norm_linear
        return product(x, residual, norm, eps, bias)

    # A model's path is its first layer's: a weight of another layer may have no fused products.

    def norm_linear(self, residual: NormedResidual, eps: float, bias: Tensor | None, gate: Gate = "") -> Tensor:
        if self.fused is not None:
            return self.fused.norm_linear(residual, eps, bias, gate)
        if self.packed is None:
            return super().norm_linear(residual, eps, bias, gate)
        return LinearMethod.norm_linear(self, residual, eps, bias, gate)

    def add_linear(
        self, residual: NormedResidual, x: Tensor, bias: Tensor | None, norm: Tensor, sums: RankSums | None = None
    ) -> NormedResidual:
        if self.packed is None:
            return super().add_linear(residual, x, bias, norm, sums)
        if self.fused is not None and sums is None:
            return self.fused.add_linear(residual, x, bias, norm)
        return LinearMethod.add_linear(self, residual, x, bias, norm, sums)

    def few_rows_linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return super().few_rows_linear(x, bias) if self.packed is None else self.packed(x, bias)

    def project_qkv(
        self,
        residual: NormedResidual,
        eps: float,
        bias: Tensor | None,
        kv_layer: Tensor,
        batch: RaggedBatch,
        cos_sin: Tensor,
        *,
        norm_eps: float,
        **norms: Unpack[HeadNorms],
    ) -> Tensor:
        if self.fused is not None:
            return self.fused.project_qkv(residual, eps, bias, kv_layer, batch, cos_sin, norm_eps=norm_eps, **norms)
        method = PlainMethod if self.packed is None else LinearMethod
        return method.project_qkv(self, residual, eps, bias, kv_layer, batch, cos_sin, norm_eps=norm_eps, **norms)


class PlainWeight:
    """A plain part of a weight whose other parts are packed."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        y = F.linear(x, self.weight, bias)
        y = y.float() if float32_out else y
        return y if out is None else out.copy_(y)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class OrderedWeight:
    """A weight whose column i is the model's column order[i]."""

    def __init__(self, weight: PackedWeight, order: Tensor) -> None:
        self.weight, self.order = weight, order

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        return self.weight(packed_linear.gather_columns(x, self.order), bias, float32_out=float32_out, out=out)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.order.nbytes


class MergedWeight:
    """A weight in parts of different kinds, each packed by itself. sizes: their outputs"""

    def __init__(self, parts: Sequence[PackedWeight], sizes: list[int]) -> None:
        self.parts, self.sizes = parts, sizes

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        if out is None:
            out = x.new_empty(len(x), sum(self.sizes), dtype=torch.float32 if float32_out else x.dtype)
        biases = [None] * len(self.parts) if bias is None else torch.split(bias, self.sizes)
        for part, part_bias, y in zip(self.parts, biases, torch.split(out, self.sizes, dim=1), strict=True):
            part(x, part_bias, float32_out=float32_out, out=y)
        return out

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def _mergeable(part: tuple[int, tuple[int, GroupForm | None]]) -> tuple[GroupForm | None, int]:
    """What neighbours of one weight have in common; an order of columns is one part's. part: (index, (rows, form))"""
    index, (_, form) = part
    return form, index if form is not None and form.ordered_in else 0


def find_linear_method(
    quantization: str | None, device: str, *, batch_invariant: bool = False
) -> Callable[..., LinearMethod]:
    """The method of `EngineArgs.quantization`, a key of `quantization.METHODS`, on "cpu" or "cuda".

    batch_invariant  products have one order of addition for any number of rows: oneDNN's have not
    """
    entry = METHODS[quantization]
    options: dict[str, Any] = {"backend": "native"} if batch_invariant else {}
    if entry.forms:
        finer = entry.finer if device == "cpu" else {}
        options |= {"form": entry.forms[device], "head_form": entry.head_form(device), "finer": finer}
    return (
        partial(load(entry.method), **options) if options else cast("Callable[..., LinearMethod]", load(entry.method))
    )
