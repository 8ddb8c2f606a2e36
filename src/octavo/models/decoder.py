"""The decoder of the Llama family, configured by `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference.norms import NormedResidual
from octavo.models.experts import Experts
from octavo.models.layers import MLP, Attention, GatedMLP, Mixer, empty_norm
from octavo.models.linear import LayerFactory, Linear, VocabEmbedding, Weight
from octavo.models.spec import DecoderSpec


class DecoderLayer:
    """Norm, attention, norm, MLP; the outputs of attention and MLP are added to the residual stream.

    The next layer's norm computes the last addition: layers exchange the pair (x, residual), whose sum is the residual
    stream. Of ranks, x may be one's part, see `TensorParallel.reduced`. Gemma 3 also normalises both outputs before
    they are added, OLMo 2 nothing else.
    """

    def __init__(
        self, spec: DecoderSpec, factory: LayerFactory, attention: Mixer, mlp: MLP, norms: dict[str, Tensor]
    ) -> None:
        """norms: this rank's parts of the weights of `spec.norms`."""
        self.shapes, self.norms, self.tp = spec.norms, norms, factory.tp
        self.ops = factory.ops
        self.eps = spec.rms_norm_eps
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = norms.get("attention"), norms.get("mlp")
        self.after_attention, self.after_mlp = norms.get("after_attention"), norms.get("after_mlp")

    def __call__(
        self, x: Tensor, residual: Tensor, batch: RaggedBatch, kv_layer: Tensor, cos_sin: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(x, residual) -> (x, residual) after this layer, all [num_tokens, hidden_size].

        rows  [num_rows] int64, the tokens of the result, [num_rows, hidden_size]: no MLP sees the others. None: all
        """
        projected, residual = self._after_norm(self.attention.qkv, x, residual, self.attention_norm)
        return self.after_projection(projected, residual, batch, kv_layer, cos_sin, rows)

    def after_projection(
        self,
        projected: Tensor,
        residual: Tensor,
        batch: RaggedBatch,
        kv_layer: Tensor,
        cos_sin: Tensor,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`__call__` without its first norm and product. projected: `attention.qkv` of the tokens"""
        x = self.attention.out(self.attention.mix(projected, batch, kv_layer, cos_sin))
        if rows is not None:
            x, residual = x[rows], residual[rows]
            if not len(rows):  # a chunk that is not a prompt's last
                return x, residual
        if self.after_attention is not None:
            x = self.ops.rms_norm(x, self.after_attention, self.eps)
        x, residual = self._transform(x, residual)
        if self.after_mlp is not None:
            x = self.ops.rms_norm(x, self.after_mlp, self.eps)
        return x, residual

    def forward_in_parts(
        self,
        projected: Tensor,
        residual: list[Tensor],
        batch: RaggedBatch,
        kv_layer: Tensor,
        cos_sin: Tensor,
        following: DecoderLayer,
    ) -> tuple[Tensor, list[Tensor]]:
        """`after_projection`, and the first norm and product of the layer that follows, of two parts of the tokens.

        While a part's sums are on their way between the ranks, products of the other part run.
        """
        sums = self.tp.sums
        assert sums is not None and self.mlp_norm is not None and following.attention_norm is not None
        mixed = self.attention.mix(projected, batch, kv_layer, cos_sin)
        parts = torch.split(mixed, [len(part) for part in residual])
        attended = [sums.send(self.attention.out(part), slot) for slot, part in enumerate(parts)]
        outputs, projections, totals = [], [], []
        for slot, (x, before) in enumerate(zip(attended, residual, strict=True), start=len(attended)):
            normed, total = x.add_rms_norm(before, self.mlp_norm, self.eps)
            outputs.append((sums.send(self.mlp(normed), slot), total))
        for x, before in outputs:
            normed, total = x.add_rms_norm(before, following.attention_norm, self.eps)
            projections.append(following.attention.qkv(normed))
            totals.append(total)
        return torch.cat(projections), totals

    def _transform(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The addition, the norm and the MLP -> (the MLP's output, the sum)."""
        return self._after_norm(self.mlp, x, residual, self.mlp_norm)

    def _after_norm(
        self, part: Linear | MLP, x: Tensor, residual: Tensor, norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(the part's output for the norm of x + residual, the sum). norm None (OLMo 2): for the sum itself"""
        if norm is not None:
            return part.after_norm(x, residual, norm, self.eps)
        x = x + residual
        return part(x), x

    def forward_small_batch(
        self, residual: NormedResidual, batch: RaggedBatch, kv_layer: Tensor, cos_sin: Tensor, next_norm: Tensor
    ) -> NormedResidual:
        """Small-batch path: norms, activations and additions are fused into the products.

        next_norm  [hidden_size], the weight of the norm after this layer
        """
        norm = self.norms["mlp"]
        residual = self.attention.forward_small_batch(residual, self.eps, batch, kv_layer, cos_sin, norm)
        return self.mlp.forward_small_batch(residual, norm, self.eps, next_norm)

    @property
    def max_small_batch_tokens(self) -> int:
        """Maximum tokens for `forward_small_batch`, which has norms before attention and MLP only; 0: none."""
        if self.after_attention is not None or self.attention_norm is None or self.mlp_norm is None:
            return 0
        return min(self.attention.max_small_batch_tokens, self.mlp.max_small_batch_tokens)

    def weights(self, prefix: str) -> Iterator[Weight]:
        for role, norm in self.norms.items():
            shape = self.shapes[role]
            start = self.tp.start(shape.size, len(norm))
            yield Weight(f"{prefix}{shape.name}.weight", (shape.size,), norm, (start,), shape.order)
        yield from self.attention.weights(prefix)
        yield from self.mlp.weights(prefix)


class Decoder:
    """A causal language model over the paged KV cache. `loading.loader.load_model` fills its weights.

    max_len  positions of the rotary tables; default: those that were trained, without extension
    """

    def __init__(self, spec: DecoderSpec, factory: LayerFactory, *, max_len: int | None = None) -> None:
        self.spec = spec
        self.stored_kv_scales: Tensor | None = None
        self.ops = ops = factory.ops
        if factory.tp.sums is not None and spec.has_norms_before_only:
            factory = replace(factory, tp=replace(factory.tp, sums_in_norms=True))
        self.tp = factory.tp
        self.vocabulary = VocabEmbedding(spec, factory)
        self.embedding_scale = spec.embedding_scale
        if spec.rounded_scale:  # as in training: bfloat16 rounds sqrt(640) of Gemma 3 270M to 25.25
            self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=factory.dtype).item()
        self.layers = [self.make_layer(layer, factory) for layer in range(spec.num_layers)]
        self.norm = empty_norm(spec, spec.hidden_size, factory)
        self.dtype = factory.dtype
        # [max_len, head_dim], computed on the CPU: the same numbers for every device, also for a model on "meta".
        max_len = max_len or spec.max_model_len()
        table = partial(ops.rope_table, spec.full_kv_heads[1], max_len)
        self.cos_sin = table(spec.rope_theta, scaling=spec.rope_scaling, rotary_dim=spec.rotary_dim).to(factory.device)
        self.local_cos_sin = self.nope_cos_sin = self.cos_sin
        if spec.local_rope_theta is not None:
            self.local_cos_sin = ops.rope_table(spec.head_dim, max_len, spec.local_rope_theta).to(factory.device)
        if spec.nope_layers:
            self.nope_cos_sin = table(spec.rope_theta, rotary_dim=0).to(factory.device)
        self.tables = [self._table_of(layer) for layer in range(spec.num_layers)]
        self.groups = spec.layer_groups

    def make_layer(self, layer: int, factory: LayerFactory) -> DecoderLayer:
        spec = self.spec
        shapes = spec.of_rank(factory.tp.size).kind_of(layer).norms
        norms = {role: empty_norm(spec, norm.size, factory) for role, norm in shapes.items()}
        return DecoderLayer(spec, factory, self.make_mixer(layer, factory, norms), self.make_mlp(layer, factory), norms)

    def make_mixer(self, layer: int, factory: LayerFactory, norms: dict[str, Tensor]) -> Mixer:
        """norms: the layer's"""
        return Attention(self.spec, layer, factory, norms)

    def make_mlp(self, layer: int, factory: LayerFactory) -> MLP:
        spec = self.spec
        if spec.has_experts(layer):
            return Experts(spec, factory)
        shapes, own = spec.mlp_linears, spec.of_rank(factory.tp.size).mlp_linears
        gate_up, down = (Linear(shape, own[role], factory, role) for role, shape in shapes.items())
        return GatedMLP(gate_up, down, spec.activation)

    @cached_property
    def max_small_batch_tokens(self) -> int:
        """Maximum tokens of a pass on the small-batch path. Known once the weights are loaded, and maybe packed.

        Not for float16, in which the residual stream times a norm's weight may overflow.
        """
        if self.dtype == torch.float16:
            return 0
        # The first layer of each kind: in mixed files, another may lack the fused products, and does without.
        kinds = {(type(layer.attention), type(layer.mlp)): layer for layer in reversed(self.layers)}
        return min(layer.max_small_batch_tokens for layer in kinds.values())

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None, sliced: bool = False
    ) -> Tensor:
        """Forward pass: write K and V of the batch's tokens to the KV cache and return logits.

        token_ids    [num_tokens] int64
        kv           [num_blocks + 1, layers of a block, 2, num_kv_heads, block_size, head_dim], the KV cache, modified.
                     A block has all layers, or those of a group: see `LayerGroups`
        logits_rows  [num_rows] int64, tokens whose logits are returned, usually the last of each sequence. None: all
        sliced       of several ranks, each returns the logits of its slice of the vocabulary

        -> [num_rows, vocab_size] float32; on a GPU in the model's dtype
        """
        x = self.vocabulary.embed(token_ids)  # [num_tokens, hidden_size]
        if self.embedding_scale != 1.0:
            x *= self.embedding_scale
        if len(x) <= self.max_small_batch_tokens:
            if self.tp.sums_in_norms and self.tp.all_reduce is not None:
                x = self.tp.all_reduce(x)  # this path begins with a whole sum
            return self.vocabulary.logits(self._forward_small_batch(x, batch, kv, logits_rows), sliced=sliced)
        places = [(*m, table) for m, table in zip(self._memory_of_layers(batch, kv), self.tables, strict=True)]
        if size := self._part_size(x):
            x, residual = self._forward_in_parts(x, size, places, logits_rows)
        else:
            residual = torch.zeros_like(x)
            for layer, place in zip(self.layers, places, strict=True):
                x, residual = layer(x, residual, *place, logits_rows if layer is self.layers[-1] else None)
        x, _ = self.tp.add_rms_norm(self.ops, x, residual, self.norm, self.spec.rms_norm_eps)
        return self.vocabulary.logits(x, sliced=sliced)

    def _part_size(self, x: Tensor) -> int:
        """Tokens of the first part of a batch that is computed in parts; 0: it is not."""
        if not self.tp.sums_in_norms or self.tp.sums is None or len(self.layers) < 2:
            return 0
        return self.tp.sums.part_size(len(x), x.shape[1] * x.itemsize)

    def _forward_in_parts(
        self, x: Tensor, size: int, places: list[tuple[RaggedBatch, Tensor, Tensor]], rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """This rank's part of the embeddings -> the last layer's (x, residual). places: of the layers"""
        norm = self.layers[0].attention_norm
        assert self.tp.all_reduce is not None and norm is not None
        x = self.tp.all_reduce(x)
        projected = self.layers[0].attention.qkv(self.ops.rms_norm(x, norm, self.spec.rms_norm_eps))
        residual = list(torch.split(x, [size, len(x) - size]))
        for layer, following, place in zip(self.layers, self.layers[1:], places, strict=False):
            projected, residual = layer.forward_in_parts(projected, residual, *place, following)
        return self.layers[-1].after_projection(projected, torch.cat(residual), *places[-1], rows)

    def _forward_small_batch(self, x: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor:
        """Small-batch path: embeddings of at most `max_small_batch_tokens` tokens -> the head's input."""
        norms = [*(layer.norms["attention"] for layer in self.layers), self.norm]
        residual = self.ops.make_normed_residual(x, norms[0])
        for index, (layer, memory) in enumerate(zip(self.layers, self._memory_of_layers(batch, kv), strict=True)):
            residual = layer.forward_small_batch(residual, *memory, self.tables[index], norms[index + 1])
        x = residual.x if logits_rows is None else residual.x[logits_rows]
        return self.ops.rms_norm(x, self.norm, self.spec.rms_norm_eps)

    def _memory_of_layers(self, batch: RaggedBatch, kv: Tensor) -> Iterator[tuple[RaggedBatch, Tensor]]:
        """For each layer the batch with the block tables of its group, and its K and V in the blocks."""
        if kv.shape[1] == self.spec.num_layers:
            return ((batch, kv[:, layer]) for layer in range(self.spec.num_layers))
        batches = [batch.group(group) for group in range(1 + len(self.groups.windows))]
        return ((batches[group], kv[:, index]) for group, index in self.groups.places)

    def set_kv_scales(self, scales: Tensor) -> None:
        """The scales of K and V for pools in float8; scales [num_layers, 2, num_kv_heads] float32."""
        for layer, layer_scales in zip(self.layers, scales, strict=True):
            assert isinstance(layer.attention, Attention)
            layer.attention.head_norms["kv_scales"] = layer_scales

    def _table_of(self, layer: int) -> Tensor:
        if layer in self.spec.nope_layers:
            return self.nope_cos_sin
        return self.local_cos_sin if self.spec.window_of(layer) else self.cos_sin

    def weights(self) -> Iterator[Weight]:
        """All tensors of a checkpoint of this model."""
        yield from self.vocabulary.weights()
        for index, layer in enumerate(self.layers):
            yield from layer.weights(self.spec.names.layer.format(index))
        yield Weight.whole(f"{self.spec.names.final_norm}.weight", self.norm)
