"""GPT-2, OPT and StarCoder2: a decoder with layer norms and a plain MLP, configured by `GPTSpec`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.ops import ModelOps
from octavo.kernels.reference import split_heads
from octavo.models.linear import LayerFactory, Linear, VocabEmbedding, Weight
from octavo.models.spec import GPTSpec, NormShape


def activation_of(name: str, ops: ModelOps) -> Callable[[Tensor], Tensor]:
    """The activation of `GPTSpec.activation`."""
    named: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": ops.gelu}
    return named[name] if name in named else partial(ops.gelu, approximate="tanh")


class LayerNorm:
    """A layer norm over the last dimension, with a weight and a bias if it has a shape."""

    def __init__(self, shape: NormShape | None, eps: float, factory: LayerFactory) -> None:
        self.shape, self.eps, self.ops = shape, eps, factory.ops
        self.weight = None if shape is None else factory.empty(shape.size)
        self.bias = None if shape is None else factory.empty(shape.size)

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def weights(self, prefix: str) -> Iterator[Weight]:
        if self.shape is not None and self.weight is not None and self.bias is not None:
            yield Weight.whole(f"{prefix}{self.shape.name}.weight", self.weight)
            yield Weight.whole(f"{prefix}{self.shape.name}.bias", self.bias)


class GPTLayer:
    """Attention and MLP, each with a residual addition, and a norm before them or after the addition."""

    def __init__(self, spec: GPTSpec, layer: int, factory: LayerFactory) -> None:
        self.ops = factory.ops
        self.norm_first = spec.norm_first
        self.scale = spec.attention_scale / (layer + 1 if spec.scale_by_layer else 1)
        self.window = spec.window_of(layer)
        self.activation = activation_of(spec.activation, factory.ops)
        own, norms = spec.of_rank(factory.tp.size).linears, spec.norms
        self.qkv, self.out, self.up, self.down = (
            Linear(linear, own[role], factory, role) for role, linear in spec.linears.items()
        )
        self.attention_norm = LayerNorm(norms.get("attention"), spec.layer_norm_eps, factory)
        self.kv_scales: Tensor | None = None
        self.mlp_norm = LayerNorm(norms.get("mlp"), spec.layer_norm_eps, factory)

    def __call__(
        self, x: Tensor, batch: RaggedBatch, kv_layer: Tensor, cos_sin: Tensor | None, rows: Tensor | None
    ) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape; writes the tokens' K and V to kv_layer.

        cos_sin  the rotary table; None: positions are learned
        rows     as of `decoder.DecoderLayer`
        """
        attended = self._attend(self.attention_norm(x) if self.norm_first else x, batch, kv_layer, cos_sin)
        if rows is not None:
            x, attended = x[rows], attended[rows]
            if not len(rows):
                return x
        x = x + attended
        if self.norm_first:
            return x + self._mlp(self.mlp_norm(x))
        x = self.attention_norm(x)
        return self.mlp_norm(x + self._mlp(x))

    def _attend(self, x: Tensor, batch: RaggedBatch, kv_layer: Tensor, cos_sin: Tensor | None) -> Tensor:
        q, k, v = split_heads(self.qkv(x), kv_layer)
        if cos_sin is None:
            self.ops.kv_write(k, v, kv_layer, batch.slot_mapping, kv_scales=self.kv_scales)
        else:
            q = self.ops.rope_kv_write(
                q, k, v, batch.positions, cos_sin, kv_layer, batch.slot_mapping, kv_scales=self.kv_scales
            )
        output = self.ops.paged_attention(
            q, kv_layer, batch, scale=self.scale, window=self.window, kv_scales=self.kv_scales
        )
        return self.out(output.flatten(1))

    def _mlp(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))

    def weights(self, prefix: str) -> Iterator[Weight]:
        for part in (self.attention_norm, self.mlp_norm, self.qkv, self.out, self.up, self.down):
            yield from part.weights(prefix)


class GPT:
    """A causal language model over the paged KV cache, with the interface of `decoder.Decoder`.

    max_len  positions of the rotary table, as for a Decoder; learned positions are a whole table of the checkpoint
    """

    def __init__(self, spec: GPTSpec, factory: LayerFactory, *, max_len: int | None = None) -> None:
        self.spec = spec
        self.stored_kv_scales: Tensor | None = None
        self.vocabulary = VocabEmbedding(spec, factory)
        self.others = {name: factory.empty(*shape) for name, shape in spec.others.items()}
        self.positions = self.others.get(spec.names.positions)  # [num_positions, hidden_size]
        self.project_in = self.others.get(spec.names.project_in)  # [hidden_size, embedding_size]
        self.project_out = self.others.get(spec.names.project_out)  # [embedding_size, hidden_size]
        self.layers = [GPTLayer(spec, layer, factory) for layer in range(spec.num_layers)]
        self.norm = LayerNorm(spec.last_norm, spec.layer_norm_eps, factory) if spec.final_norm else None
        self.cos_sin: Tensor | None = None
        if spec.rope_theta is not None:
            table = factory.ops.rope_table(
                spec.head_dim, max_len or spec.max_model_len(), spec.rope_theta, scaling=spec.rope_scaling
            )
            self.cos_sin = table.to(factory.device)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None, sliced: bool = False
    ) -> Tensor:
        """See `decoder.Decoder.forward`."""
        x = self.vocabulary.embed(token_ids)  # [num_tokens, embedding_size]
        if self.project_in is not None:
            x = F.linear(x, self.project_in)
        if self.positions is not None:
            x = x + F.embedding(batch.positions + self.spec.position_offset, self.positions)
        for index, layer in enumerate(self.layers):
            rows = logits_rows if layer is self.layers[-1] else None
            x = layer(x, batch, kv[:, index], self.cos_sin, rows)  # [num_tokens or num_rows, hidden_size]
        if self.norm is not None:
            x = self.norm(x)
        if self.project_out is not None:
            x = F.linear(x, self.project_out)
        return self.vocabulary.logits(x, sliced=sliced)

    def set_kv_scales(self, scales: Tensor) -> None:
        """See `decoder.Decoder.set_kv_scales`."""
        for layer, layer_scales in zip(self.layers, scales, strict=True):
            layer.kv_scales = layer_scales

    def weights(self) -> Iterator[Weight]:
        """All tensors of a checkpoint of this model; several weights may be parts of one tensor."""
        yield from self.vocabulary.weights()
        for name, tensor in self.others.items():
            yield Weight.whole(f"{name}.weight", tensor)
        for index, layer in enumerate(self.layers):
            yield from layer.weights(self.spec.names.layer.format(index))
        if self.norm is not None:
            yield from self.norm.weights("")
