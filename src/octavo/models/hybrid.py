"""Decoders with recurrent layers, configured by `HybridSpec`: Gated DeltaNets, and attention whose output is gated."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference import head_dim_of
from octavo.kernels.reference.norms import NormedResidual
from octavo.models.decoder import Decoder
from octavo.models.layers import Attention, Mixer
from octavo.models.linear import LayerFactory, Linear, Weight
from octavo.models.spec import HybridSpec


class GatedAttention(Attention):
    """Attention whose output is multiplied by the sigmoid of a gate."""

    def forward_small_batch(
        self,
        residual: NormedResidual,
        eps: float,
        batch: RaggedBatch,
        kv_layer: Tensor,
        cos_sin: Tensor,
        next_norm: Tensor,
    ) -> NormedResidual:
        x = self.mix(self.qkv.norm_linear(residual, eps), batch, kv_layer, cos_sin)
        return self.out.add_linear(residual, x, next_norm)

    def mix(self, projected: Tensor, batch: RaggedBatch, kv_layer: Tensor, cos_sin: Tensor) -> Tensor:
        """projected [num_tokens, Q, gates, K and V] -> [num_tokens, num_heads * head_dim]."""
        head_dim = head_dim_of(kv_layer)
        kv_size = kv_layer.shape[2] * head_dim
        q_size = projected.shape[1] // 2 - kv_size
        q, gate, k, v = torch.split(projected, [q_size, q_size, kv_size, kv_size], dim=1)
        q, k, v = (x.view(len(x), -1, head_dim) for x in (q, k, v))
        q = self.ops.rope_kv_write(
            q, k, v, batch.positions, cos_sin, kv_layer, batch.slot_mapping, eps=self.eps, **self.head_norms
        )
        return self.ops.sigmoid_mul(self._attend(q, batch, kv_layer), gate)


class GatedDeltaNet:
    """A recurrent layer; see `kernels.reference.recurrent`. index: among the recurrent layers"""

    def __init__(self, spec: HybridSpec, index: int, factory: LayerFactory) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, device=factory.device)

        self.tp, self.ops = factory.tp, factory.ops
        self.whole, self.spec = spec, (own := spec.of_rank(self.tp.size))
        linears, own_linears = spec.recurrent_linears, own.recurrent_linears
        self.qkv, self.out = (Linear(linears[role], own_linears[role], factory, role) for role in ("qkv", "out"))
        self.key_heads: Tensor | None = None  # of each head of V
        if spec.pairing == "tiled" and spec.num_value_heads > spec.num_key_heads:
            first = self.tp.start(spec.num_value_heads, own.num_value_heads)
            self.key_heads = (first + torch.arange(own.num_value_heads, device=factory.device)) % spec.num_key_heads
        self.conv, self.norm = empty(own.conv_channels, own.conv_size), empty(own.value_dim)
        self.log_decay, self.step_bias = empty(own.num_value_heads), empty(own.num_value_heads)
        self.first = index * own.layer_state_size
        self.first_matrix = self.first + own.conv_channels * (own.conv_size - 1)

    @property
    def max_small_batch_tokens(self) -> int:
        return min(self.qkv.max_small_batch_tokens, self.out.max_small_batch_tokens)

    def forward_small_batch(
        self,
        residual: NormedResidual,
        eps: float,
        batch: RaggedBatch,
        states: Tensor,
        cos_sin: Tensor,
        next_norm: Tensor,
    ) -> NormedResidual:
        x = self.mix(self.qkv.norm_linear(residual, eps), batch, states, cos_sin)
        return self.out.add_linear(residual, x, next_norm)

    def mix(self, projected: Tensor, batch: RaggedBatch, states: Tensor, cos_sin: Tensor) -> Tensor:
        """projected: see `HybridSpec.recurrent_linears`; states [num_blocks + 1, numbers of a block]."""
        spec = self.spec
        qkv, gate, b, a = torch.split(projected, [spec.conv_channels, *self.qkv.own.out_sizes[3:]], dim=1)
        qkv = self.ops.causal_conv(qkv, self.conv, states, self.first, batch)
        q, k, v = torch.split(qkv, list(spec.conv_sizes), dim=1)
        q, k = (x.view(len(x), -1, spec.key_dim) for x in (q, k))
        if self.key_heads is not None:
            q, k = q[:, self.key_heads], k[:, self.key_heads]
        v = v.view(len(v), -1, spec.value_dim)
        decay, beta = self.ops.delta_gates(a, b, self.log_decay, self.step_bias)
        x = self.ops.gated_delta_rule(q, k, v, decay, beta, states, self.first_matrix, batch)
        return self.ops.gated_rms_norm(x, self.norm, gate, spec.rms_norm_eps)

    def weights(self, prefix: str) -> Iterator[Weight]:
        prefix += "linear_attn."
        whole, first = self.whole, 0
        parts = torch.split(self.conv.unsqueeze(1), list(self.spec.conv_sizes))  # channels of Q, K and V
        for size, part in zip(whole.conv_sizes, parts, strict=True):
            start = first + self.tp.start(size, len(part))
            yield Weight(f"{prefix}conv1d.weight", (whole.conv_channels, *part.shape[1:]), part, (start, 0, 0))
            first += size
        yield Weight.whole(f"{prefix}norm.weight", self.norm)
        num_heads = whole.num_value_heads
        for name, tensor in {"A_log": self.log_decay, "dt_bias": self.step_bias}.items():
            yield Weight(f"{prefix}{name}", (num_heads,), tensor, (self.tp.start(num_heads, len(tensor)),))
        for linear in (self.qkv, self.out):
            yield from linear.weights(prefix.removesuffix("linear_attn."))


class HybridDecoder(Decoder):
    spec: HybridSpec

    def make_mixer(self, layer: int, factory: LayerFactory, norms: dict[str, Tensor]) -> Mixer:
        group, index = self.spec.layer_groups.places[layer]
        if group < 0:
            return GatedDeltaNet(self.spec, index, factory)
        return GatedAttention(self.spec, layer, factory, norms)

    def _memory_of_layers(self, batch: RaggedBatch, kv: Tensor) -> Iterator[tuple[RaggedBatch, Tensor]]:
        """As in `Decoder`; of recurrent layers, the pool as float32 numbers."""
        states = kv.flatten(1).view(torch.float32)
        return ((batch, states if group < 0 else kv[:, index]) for group, index in self.groups.places)
