"""The parts of a decoder layer: plain objects that own their tensors and are called with activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from octavo.errors import ParameterError
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference import split_heads
from octavo.kernels.reference.norms import Gate, NormedResidual
from octavo.models.linear import LayerFactory, Linear, Weight
from octavo.models.linear_methods import HeadNorms
from octavo.models.spec import DecoderSpec


def empty_norm(spec: DecoderSpec, size: int, factory: LayerFactory) -> Tensor:
    """The weight of an RMS norm, [size]. float32 if it is 1 + the checkpoint's value, which float16 would round."""
    return torch.empty(size, dtype=torch.float32 if spec.unit_offset_norms else factory.dtype, device=factory.device)


class Attention:
    """Self-attention over the paged KV cache, with its projections, rotary embedding and KV write.

    norms: those of `spec.norms`
    """

    def __init__(self, spec: DecoderSpec, layer: int, factory: LayerFactory, norms: dict[str, Tensor]) -> None:
        self.ops = factory.ops
        self.eps = spec.rms_norm_eps
        self.scale = spec.attention_scale or spec.head_dim**-0.5
        self.window = spec.window_of(layer)
        factory.tp.per_rank(spec.num_heads, "attention heads")  # raises if they are not divisible
        factory.tp.per_rank(spec.num_kv_heads, "K/V heads")
        self.qkv = Linear(spec.linears["qkv"], factory, split="out")
        self.out = Linear(spec.linears["out"], factory, split="in")
        self.head_norms: HeadNorms = {"q_norm": norms.get("q"), "k_norm": norms.get("k"), "kv_scales": None}
        self.joint_norms = [norms[role] for role in ("joint_q", "joint_k") if role in norms]
        if self.joint_norms and factory.tp.size > 1:
            raise ParameterError(
                f"tensor_parallel_size {factory.tp.size} is not supported for {spec.architecture}: it normalises all "
                "heads together; use 1",
                param="tensor_parallel_size",
            )

    def __call__(self, x: Tensor, batch: RaggedBatch, kv_layer: Tensor, cos_sin: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> [num_tokens, hidden_size]; writes the tokens' K and V to kv_layer."""
        q, k, v = split_heads(self.qkv(x), kv_layer)
        for heads, norm in zip((q, k), self.joint_norms, strict=False):  # in place: q, k and v are rows of one tensor
            heads.copy_(self.ops.rms_norm(heads.flatten(1), norm, self.eps).view_as(heads))
        q = self.ops.rope_kv_write(
            q, k, v, batch.positions, cos_sin, kv_layer, batch.slot_mapping, eps=self.eps, **self.head_norms
        )
        return self.out(self._attend(q, batch, kv_layer))

    @property
    def max_small_batch_tokens(self) -> int:
        return 0 if self.joint_norms else min(self.qkv.max_small_batch_tokens, self.out.max_small_batch_tokens)

    def forward_small_batch(
        self,
        residual: NormedResidual,
        eps: float,
        batch: RaggedBatch,
        kv_layer: Tensor,
        cos_sin: Tensor,
        next_norm: Tensor,
    ) -> NormedResidual:
        """Small-batch path: the norm before attention, attention, and the addition; next_norm as for `MLP`."""
        q = self.qkv.project_qkv(residual, eps, kv_layer, batch, cos_sin, norm_eps=self.eps, **self.head_norms)
        return self.out.add_linear(residual, self._attend(q, batch, kv_layer), next_norm)

    def _attend(self, q: Tensor, batch: RaggedBatch, kv_layer: Tensor) -> Tensor:
        scales = self.head_norms["kv_scales"]
        out = self.ops.paged_attention(q, kv_layer, batch, scale=self.scale, window=self.window, kv_scales=scales)
        return out.flatten(1)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.qkv.weights(prefix)
        yield from self.out.weights(prefix)


class Mixer(Protocol):
    """The part of a decoder layer that sees other tokens: attention, or a recurrence."""

    @property
    def max_small_batch_tokens(self) -> int:
        """As of `MLP`."""
        ...

    def __call__(self, x: Tensor, batch: RaggedBatch, memory: Tensor, cos_sin: Tensor, /) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape. memory: the layer's K and V, or its states; modified"""
        ...

    def forward_small_batch(
        self,
        residual: NormedResidual,
        eps: float,
        batch: RaggedBatch,
        memory: Tensor,
        cos_sin: Tensor,
        next_norm: Tensor,
        /,
    ) -> NormedResidual:
        """Small-batch path: the norm before it, itself, and the addition; next_norm as for `MLP`."""
        ...

    def weights(self, prefix: str) -> Iterator[Weight]: ...


class MLP(Protocol):
    """The part of a decoder layer after attention: a gated MLP, or experts."""

    @property
    def max_small_batch_tokens(self) -> int:
        """Maximum tokens for `forward_small_batch`; 0: it has none."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape."""
        ...

    def forward_small_batch(self, residual: NormedResidual, eps: float, next_norm: Tensor) -> NormedResidual:
        """Small-batch path: the norm before the MLP, the MLP, and the addition. next_norm: the next norm's weight."""
        ...

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Its tensors in a checkpoint; prefix: the layer's."""
        ...


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up in one product (arXiv 2002.05202)."""

    def __init__(self, spec: DecoderSpec, factory: LayerFactory) -> None:
        self.gate_name: Gate = "gelu" if spec.activation == "gelu_tanh" else "silu"
        self.gate = factory.ops.gelu_mul if self.gate_name == "gelu" else factory.ops.silu_mul
        self.gate_up = Linear(spec.linears["mlp_in"], factory, split="out")
        self.down = Linear(spec.linears["down"], factory, split="in")

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate(self.gate_up(x)))

    @property
    def max_small_batch_tokens(self) -> int:
        return min(self.gate_up.max_small_batch_tokens, self.down.max_small_batch_tokens)

    def forward_small_batch(self, residual: NormedResidual, eps: float, next_norm: Tensor) -> NormedResidual:
        inner = self.gate_up.norm_linear(residual, eps, self.gate_name)
        return self.down.add_linear(residual, inner, next_norm)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.gate_up.weights(prefix)
        yield from self.down.weights(prefix)
