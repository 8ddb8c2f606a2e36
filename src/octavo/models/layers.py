"""The parts of a decoder layer: plain objects that own their tensors and are called with activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.ops import ModelOps
from octavo.kernels.reference import split_heads
from octavo.kernels.reference.norms import Gate, NormedResidual
from octavo.models.linear import Linear, TensorParallel, Weight
from octavo.models.spec import DecoderSpec, TensorNames


def empty_norm(spec: DecoderSpec, size: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """The weight of an RMS norm, [size]. float32 if it is 1 + the checkpoint's value, which float16 would round."""
    return torch.empty(size, dtype=torch.float32 if spec.unit_offset_norms else dtype, device=device)


class Attention:
    """Self-attention over the paged KV cache, with its projections, rotary embedding and KV write."""

    def __init__(
        self,
        spec: DecoderSpec,
        layer: int,
        *,
        ops: ModelOps,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.ops = ops
        self.eps = spec.rms_norm_eps
        self.scale = spec.attention_scale or spec.head_dim**-0.5
        self.window = spec.window_of(layer)
        tp.per_rank(spec.num_heads, "attention heads")  # raises if they are not divisible
        tp.per_rank(spec.num_kv_heads, "K/V heads")
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv = Linear(
            spec.hidden_size,
            (q_size, kv_size, kv_size),
            bias=spec.qkv_bias,
            split="out",
            tp=tp,
            dtype=dtype,
            device=device,
        )
        self.out = Linear(q_size, (spec.hidden_size,), bias=spec.o_bias, split="in", tp=tp, dtype=dtype, device=device)
        self.q_norm = empty_norm(spec, spec.head_dim, dtype, device) if spec.qk_norm else None
        self.k_norm = empty_norm(spec, spec.head_dim, dtype, device) if spec.qk_norm else None

    def __call__(self, x: Tensor, batch: RaggedBatch, kv_layer: Tensor, cos_sin: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> [num_tokens, hidden_size]; writes the tokens' K and V to kv_layer."""
        q, k, v = split_heads(self.qkv(x), kv_layer)
        q = self.ops.rope_kv_write(
            q,
            k,
            v,
            batch.positions,
            cos_sin,
            kv_layer,
            batch.slot_mapping,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self.eps,
        )
        return self.out(self._attend(q, batch, kv_layer))

    def forward_small_batch(
        self, residual: NormedResidual, eps: float, batch: RaggedBatch, kv_layer: Tensor, cos_sin: Tensor
    ) -> Tensor:
        """Small-batch path, without the output projection: residual -> [num_tokens, num_heads * head_dim]."""
        q = self.ops.project_qkv(
            residual,
            eps,
            self.qkv.weight,
            self.qkv.bias,
            kv_layer,
            batch,
            cos_sin,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            norm_eps=self.eps,
        )
        return self._attend(q, batch, kv_layer)

    def _attend(self, q: Tensor, batch: RaggedBatch, kv_layer: Tensor) -> Tensor:
        output: Tensor = self.ops.paged_attention(q, kv_layer, batch, scale=self.scale, window=self.window)
        return output.flatten(1)

    def weights(self, prefix: str, names: TensorNames) -> Iterator[Weight]:
        yield from self.qkv.weights(*(prefix + name for name in names.qkv))
        yield from self.out.weights(prefix + names.out)
        for name, norm in zip(names.qk_norms, (self.q_norm, self.k_norm), strict=True):
            if norm is not None:
                yield Weight.whole(f"{prefix}{name}.weight", norm)

    def linears(self) -> Iterator[Linear]:
        yield from (self.qkv, self.out)


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up in one product (arXiv 2002.05202)."""

    def __init__(
        self, spec: DecoderSpec, *, ops: ModelOps, tp: TensorParallel, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.gate_name: Gate = "gelu" if spec.activation == "gelu_tanh" else "silu"
        self.gate = ops.gelu_mul if self.gate_name == "gelu" else ops.silu_mul
        hidden, inner, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
        self.gate_up = Linear(hidden, (inner, inner), bias=bias, split="out", tp=tp, dtype=dtype, device=device)
        self.down = Linear(inner, (hidden,), bias=bias, split="in", tp=tp, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate(self.gate_up(x)))

    def weights(self, prefix: str, names: TensorNames) -> Iterator[Weight]:
        yield from self.gate_up.weights(*(prefix + name for name in names.mlp_in))
        yield from self.down.weights(prefix + names.down)

    def linears(self) -> Iterator[Linear]:
        yield from (self.gate_up, self.down)
