"""How a linear layer stores its weight, and multiplies with it: plain, or packed for a CPU.

A layer (`linear.Linear`) owns a method. `quantization.METHODS` names the methods that an engine can choose.
"""

from __future__ import annotations

from typing import TypedDict, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.cpu import packed_linear
from octavo.kernels.cpu.packed_linear import PackedHead, PackedWeight, Quantization
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.ops import ModelOps
from octavo.kernels.reference import split_heads
from octavo.kernels.reference.norms import Gate, NormedResidual
from octavo.models.quantization import METHODS
from octavo.models.registry import load


class HeadNorms(TypedDict):
    """Weights of the RMS norms of the heads of Q and K, [head_dim] each; None: no such norms.

    kv_scales  [2, num_kv_heads], of a pool in float8
    """

    q_norm: Tensor | None
    k_norm: Tensor | None
    kv_scales: Tensor | None


class LinearMethod:
    """The weight of a linear layer, [num_out, num_in], and its products.

    A subclass defines `apply`, `gather_rows` and `logits`; `empty_weight` and `encode` if it stores other numbers than
    the checkpoint. `max_small_batch_tokens` offers the small-batch path. The fused products of that path follow from
    `apply`; a subclass with faster ones overrides them.

    weight   [..., num_out, num_in], filled by the loader; leading dimensions are the method's own
    is_head  products are logits, and rows may be read as embeddings
    """

    def __init__(
        self,
        num_out: int,
        num_in: int,
        *,
        ops: ModelOps,
        dtype: torch.dtype,
        device: torch.device | str,
        is_head: bool = False,
    ) -> None:
        self.ops = ops
        self.is_head = is_head
        self.weight = self.empty_weight(num_out, num_in, dtype, device)

    # -- loading -------------------------------------------------------------------------------------------------------

    def empty_weight(self, num_out: int, num_in: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """The uninitialised weight; dtype and device are the model's."""
        return torch.empty(num_out, num_in, dtype=dtype, device=device)

    def encode(self, rows: Tensor) -> Tensor:
        """Elements of a checkpoint's tensor -> what `weight` holds of them, [..., *rows.shape], in any float dtype."""
        return rows

    def finish(self) -> None:
        """Called once, when the weight is filled: to pack it, for example."""

    # -- products ------------------------------------------------------------------------------------------------------

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias; x [num_tokens, num_in] -> [num_tokens, num_out] in x's dtype."""
        raise NotImplementedError

    def gather_rows(self, indices: Tensor) -> Tensor:
        """weight[indices], [num_indices, num_in]."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """x @ weight.T, unrounded: float32, on a GPU x's dtype."""
        raise NotImplementedError

    # -- small-batch path ----------------------------------------------------------------------------------------------

    @property
    def max_small_batch_tokens(self) -> int:
        """Maximum tokens of a pass for which the fused products below are faster than separate operations; 0: none."""
        return 0

    def norm_linear(self, residual: NormedResidual, eps: float, bias: Tensor | None, gate: Gate = "") -> Tensor:
        """See `kernels.reference.norm_linear`."""
        y = self.apply((residual.weighted * residual.scale(eps)).to(residual.x.dtype), bias)
        return y if not gate else self.ops.silu_mul(y) if gate == "silu" else self.ops.gelu_mul(y)

    def add_linear(self, residual: NormedResidual, x: Tensor, bias: Tensor | None, norm: Tensor) -> NormedResidual:
        """See `kernels.reference.add_linear`."""
        return self.ops.make_normed_residual(residual.x + self.apply(x, bias), norm)

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
        return F.linear(x, self.weight, bias)

    def gather_rows(self, indices: Tensor) -> Tensor:
        return packed_linear.embed(self.weight, indices)

    def logits(self, x: Tensor) -> Tensor:
        # On a GPU the sampler converts logits: a float32 copy would take longer than a layer.
        if x.is_cuda:
            return F.linear(x, self.weight)
        if x.dtype in (torch.bfloat16, torch.float16):  # F.linear would round the logits
            return packed_linear.blockwise_linear(x, self.weight)
        return F.linear(x, self.weight).float()

    @property
    def max_small_batch_tokens(self) -> int:
        return self.ops.max_small_batch_tokens(self.weight)

    def norm_linear(self, residual: NormedResidual, eps: float, bias: Tensor | None, gate: Gate = "") -> Tensor:
        return self.ops.norm_linear(residual, eps, self.weight, bias, gate)

    def add_linear(self, residual: NormedResidual, x: Tensor, bias: Tensor | None, norm: Tensor) -> NormedResidual:
        return self.ops.add_linear(residual, x, self.weight, bias, norm)

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
    """The weight in the layout of its fastest product on a CPU, see `kernels.cpu.packed_linear`; else plain.

    Once packed, the plain weight is freed and only its shape remains.
    """

    quantization: Quantization | None = None
    packed: PackedWeight | None = None

    def finish(self) -> None:
        pack = packed_linear.pack_head if self.is_head else packed_linear.pack
        self.packed = pack(self.weight, self.quantization)
        if self.packed is not None:
            # torch.empty_like on "meta" would import sympy first: half a second, two on a slow disk.
            self.weight = torch.empty(self.weight.shape, dtype=self.weight.dtype, device="meta")

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias) if self.packed is None else self.packed(x, bias)

    def gather_rows(self, indices: Tensor) -> Tensor:
        return (
            super().gather_rows(indices)
            if self.packed is None
            else cast("PackedHead", self.packed).gather_rows(indices)
        )

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) if self.packed is None else self.packed(x, None, float32_out=True)

    @property
    def max_small_batch_tokens(self) -> int:
        return super().max_small_batch_tokens if self.packed is None else 0


class Int8Method(PackedMethod):
    """The weight rounded to int8, with a scale for each output; x is rounded, too. CPU and bfloat16 only."""

    quantization = "int8"


def find_linear_method(quantization: str | None) -> type[LinearMethod]:
    """The method of `EngineArgs.quantization`, a key of `quantization.METHODS`."""
    method: type[LinearMethod] = load(METHODS[quantization].method)
    return method
