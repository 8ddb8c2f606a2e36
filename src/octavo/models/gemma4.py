"""Decoders configured by `Gemma4Spec`: layers with K/V heads of two sizes, and experts beside the MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference import split_heads
from octavo.kernels.reference.experts import Routing
from octavo.kernels.reference.kv import SCALE_BYTES
from octavo.models.decoder import Decoder, DecoderLayer
from octavo.models.experts import Experts
from octavo.models.layers import MLP, Attention, Mixer
from octavo.models.linear import LayerFactory, Weight
from octavo.models.spec import DecoderSpec, Gemma4Spec


class NormedAttention(Attention):
    """Attention that normalises V, which may be K before its norm. spec: of this layer"""

    def __init__(self, spec: Gemma4Spec, layer: int, factory: LayerFactory, norms: dict[str, Tensor]) -> None:
        super().__init__(spec, layer, factory, norms)
        self.shares_kv = spec.shares_kv
        self.v_norm = torch.ones(spec.head_dim, dtype=factory.dtype, device=factory.device)

    def mix(self, projected: Tensor, batch: RaggedBatch, kv_layer: Tensor, cos_sin: Tensor) -> Tensor:
        if self.shares_kv:
            heads = projected.view(len(projected), -1, len(self.v_norm))
            q, k = torch.split(heads, [heads.shape[1] - kv_layer.shape[2], kv_layer.shape[2]], dim=1)
            v = k
        else:
            q, k, v = split_heads(projected, kv_layer)
        v = self.ops.rms_norm(v.reshape(-1, len(self.v_norm)), self.v_norm, self.eps).view(v.shape)
        q = self.ops.rope_kv_write(
            q, k, v, batch.positions, cos_sin, kv_layer, batch.slot_mapping, eps=self.eps, **self.head_norms
        )
        return self._attend(q, batch, kv_layer)


class ScaledExperts(Experts):
    """Experts whose router normalises its input, and multiplies each expert's weight by a number.

    norm  [hidden_size], weight of the norm before the experts
    """

    def __init__(self, spec: DecoderSpec, factory: LayerFactory, norm: Tensor) -> None:
        super().__init__(spec, factory)
        self.norm, self.eps = norm, spec.rms_norm_eps
        self.input_scale = torch.empty(spec.hidden_size, device=factory.device)
        self.expert_scale = torch.empty(self.spec.num, device=factory.device)

    def _route(self, x: Tensor) -> Routing:
        logits = self.router(self.ops.rms_norm(x, self.input_scale, self.eps)) * len(self.input_scale) ** -0.5
        routing = self.ops.route(logits, self.spec.top_k, softmax_first=True, renormalise=True)
        return replace(routing, weights=routing.weights * self.expert_scale[routing.experts.long()])

    def _partial(self, x: Tensor) -> Tensor:
        return self._sum(self.ops.rms_norm(x, self.norm, self.eps), self._route(x))

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from super().weights(prefix)
        yield Weight.whole(f"{prefix}router.scale", self.input_scale)
        yield Weight.whole(f"{prefix}router.per_expert_scale", self.expert_scale)


class ScaledLayer(DecoderLayer):
    """A decoder layer whose output is multiplied by a number. experts: beside the MLP; None: it has none"""

    def __init__(
        self,
        spec: DecoderSpec,
        factory: LayerFactory,
        attention: Mixer,
        mlp: MLP,
        norms: dict[str, Tensor],
        experts: ScaledExperts | None,
    ) -> None:
        super().__init__(spec, factory, attention, mlp, norms)
        self.experts = experts
        self.factor = torch.empty(1, device=factory.device)

    def __call__(
        self, x: Tensor, residual: Tensor, batch: RaggedBatch, kv_layer: Tensor, cos_sin: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, residual = super().__call__(x, residual, batch, kv_layer, cos_sin, rows)
        return (x + residual).mul_(self.factor), torch.zeros_like(x)

    def _transform(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = super()._transform(x, residual)
        if self.experts is None:
            return x, residual
        outputs = {"after_dense": x, "after_experts": self.experts(residual)}
        dense, chosen = (self.ops.rms_norm(y, self.norms[role], self.eps) for role, y in outputs.items())
        return dense + chosen, residual

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from super().weights(prefix)
        if self.experts is not None:
            yield from self.experts.weights(prefix)
        yield Weight.whole(f"{prefix}layer_scalar", self.factor)


class Gemma4Decoder(Decoder):
    spec: Gemma4Spec

    def __init__(self, spec: Gemma4Spec, factory: LayerFactory, *, max_len: int | None = None) -> None:
        super().__init__(spec, factory, max_len=max_len)
        own = spec.of_rank(factory.tp.size)
        self.groups = own.layer_groups
        layers = map(own.of_layer, range(spec.num_layers))
        self.kv_heads = [(layer.num_kv_heads, layer.head_dim) for layer in layers]

    def make_layer(self, layer: int, factory: LayerFactory) -> ScaledLayer:
        spec = self.spec.of_layer(layer)
        parts = super().make_layer(layer, factory)
        experts = None if spec.experts is None else ScaledExperts(spec, factory, parts.norms["experts"])
        return ScaledLayer(spec, factory, parts.attention, parts.mlp, parts.norms, experts)

    def make_mixer(self, layer: int, factory: LayerFactory, norms: dict[str, Tensor]) -> Mixer:
        return NormedAttention(self.spec.of_layer(layer), layer, factory, norms)

    def _memory_of_layers(self, batch: RaggedBatch, kv: Tensor) -> Iterator[tuple[RaggedBatch, Tensor]]:
        """As in `Decoder`. Of layers with two sizes, a block is [block_size, elements of a token], in their order."""
        if self.spec.full_heads is None:
            yield from super()._memory_of_layers(batch, kv)
            return
        scale, block_size = SCALE_BYTES if kv.dtype == torch.int8 else 0, kv.shape[4]
        sizes = [2 * num_heads * (head_dim + scale) for num_heads, head_dim in self.kv_heads]
        is_one_group = kv.shape[5] == sum(sizes)
        batches = [batch] if is_one_group else [batch.group(group) for group in range(1 + len(self.groups.windows))]
        ends = [0] * len(batches)
        for (group, _), size, (num_heads, head_dim) in zip(self.groups.places, sizes, self.kv_heads, strict=True):
            group = 0 if is_one_group else group
            row = head_dim + scale
            strides = kv.stride(0), num_heads * block_size * row, block_size * row, row, 1
            start = kv.storage_offset() + ends[group] * block_size
            yield batches[group], kv.as_strided((len(kv), 2, num_heads, block_size, row), strides, start)
            ends[group] += size
