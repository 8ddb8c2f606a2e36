"""The parts of a decoder layer: plain objects that own their tensors and are called with activations."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from octavo.kernels.batch import RaggedBatch
from octavo.models.linear import Linear, TensorParallel, Weight
from octavo.models.spec import DecoderSpec


class Attention:
    """Self-attention over the paged K and V of a batch: project, turn, write, attend, project back."""

    def __init__(
        self, spec: DecoderSpec, *, ops: ModuleType, tp: TensorParallel, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.ops = ops
        self.head_dim = spec.head_dim
        self.eps = spec.rms_norm_eps
        self.scale = spec.head_dim**-0.5
        self.window = spec.sliding_window or 0
        num_heads = tp.share(spec.num_heads, "attention heads")
        num_kv_heads = tp.share(spec.num_kv_heads, "K/V heads")
        self.head_counts = [num_heads, num_kv_heads, num_kv_heads]
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
        self.q_norm = torch.empty(spec.head_dim, dtype=dtype, device=device) if spec.qk_norm else None
        self.k_norm = torch.empty(spec.head_dim, dtype=dtype, device=device) if spec.qk_norm else None

    def __call__(self, x: Tensor, batch: RaggedBatch, kv_layer: Tensor, cos_sin: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> [num_tokens, hidden_size]; the tokens' K and V are in kv_layer afterwards."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        q, k, v = torch.split(heads, self.head_counts, dim=1)
        if self.q_norm is not None:
            q = self.ops.rms_norm(q, self.q_norm, self.eps)
            k = self.ops.rms_norm(k, self.k_norm, self.eps)
        q, k = self.ops.apply_rope(q, k, batch.positions, cos_sin)
        self.ops.kv_write(k, v, kv_layer, batch.slot_mapping)
        attended = self.ops.paged_attention(q, kv_layer, batch, scale=self.scale, window=self.window)
        return self.out(attended.flatten(1))

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.qkv.weights(f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        yield from self.out.weights(f"{prefix}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            yield Weight.whole(f"{prefix}.q_norm.weight", self.q_norm)
            yield Weight.whole(f"{prefix}.k_norm.weight", self.k_norm)


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up in one product (arXiv 2002.05202)."""

    def __init__(
        self, spec: DecoderSpec, *, ops: ModuleType, tp: TensorParallel, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.ops = ops
        hidden, inner, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
        self.gate_up = Linear(hidden, (inner, inner), bias=bias, split="out", tp=tp, dtype=dtype, device=device)
        self.down = Linear(inner, (hidden,), bias=bias, split="in", tp=tp, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.ops.silu_mul(self.gate_up(x)))

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.gate_up.weights(f"{prefix}.gate_proj", f"{prefix}.up_proj")
        yield from self.down.weights(f"{prefix}.down_proj")
