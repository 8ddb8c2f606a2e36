"""The decoder of the Llama family, configured by `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.ops import ModelOps
from octavo.kernels.reference.norms import NormedResidual
from octavo.models.layers import Attention, GatedMLP, empty_norm
from octavo.models.linear import SINGLE_RANK, Linear, PackableWeight, TensorParallel, VocabEmbedding, Weight
from octavo.models.spec import DecoderSpec


class DecoderLayer:
    """Norm, attention, norm, MLP; the outputs of attention and MLP are added to the residual stream.

    The next layer's norm computes the last addition: layers exchange the pair (x, residual), whose sum is the residual
    stream. Gemma 3 also normalises both outputs before they are added.
    """

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
        self.attention = Attention(spec, layer, ops=ops, tp=tp, dtype=dtype, device=device)
        self.mlp = GatedMLP(spec, ops=ops, tp=tp, dtype=dtype, device=device)
        norm = partial(empty_norm, spec, spec.hidden_size, dtype, device)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.names = spec.names
        self.post_norms = [norm() for _ in spec.names.post_norms]  # after attention, after the MLP

    def __call__(
        self, x: Tensor, residual: Tensor, batch: RaggedBatch, kv_layer: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(x, residual) -> (x, residual) after this layer, all [num_tokens, hidden_size]."""
        x, residual = self.ops.add_rms_norm(x, residual, self.attention_norm, self.eps)
        x = self.attention(x, batch, kv_layer, cos_sin)
        if self.post_norms:
            x = self.ops.rms_norm(x, self.post_norms[0], self.eps)
        x, residual = self.ops.add_rms_norm(x, residual, self.mlp_norm, self.eps)
        x = self.mlp(x)
        if self.post_norms:
            x = self.ops.rms_norm(x, self.post_norms[1], self.eps)
        return x, residual

    def forward_small_batch(
        self, residual: NormedResidual, batch: RaggedBatch, kv_layer: Tensor, cos_sin: Tensor, next_norm: Tensor
    ) -> NormedResidual:
        """Small-batch path: norms, activations and additions are fused into the products.

        next_norm  [hidden_size], the weight of the norm after this layer
        """
        ops, out, gate_up, down = self.ops, self.attention.out, self.mlp.gate_up, self.mlp.down
        attended = self.attention.forward_small_batch(residual, self.eps, batch, kv_layer, cos_sin)
        residual = ops.add_linear(residual, attended, out.weight, out.bias, self.mlp_norm)
        inner = ops.norm_linear(residual, self.eps, gate_up.weight, gate_up.bias, self.mlp.gate_name)
        residual = ops.add_linear(residual, inner, down.weight, down.bias, next_norm)
        return residual

    def weights(self, prefix: str) -> Iterator[Weight]:
        names = self.names
        yield Weight.whole(f"{prefix}{names.attention_norm}.weight", self.attention_norm)
        yield from self.attention.weights(prefix, names)
        for name, norm in zip(names.post_norms, self.post_norms, strict=True):
            yield Weight.whole(f"{prefix}{name}.weight", norm)
        yield Weight.whole(f"{prefix}{names.mlp_norm}.weight", self.mlp_norm)
        yield from self.mlp.weights(prefix, names)

    def linears(self) -> Iterator[Linear]:
        yield from self.attention.linears()
        yield from self.mlp.linears()


class Decoder:
    """A causal language model over the paged KV cache. `loading.loader.load_model` fills its weights.

    ops      module of operations: `kernels.reference`, or a fast path with the same signatures
    max_len  positions of the rotary table; default: max_position_embeddings
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        ops: ModelOps,
        dtype: torch.dtype,
        device: torch.device | str,
        tp: TensorParallel = SINGLE_RANK,
        max_len: int | None = None,
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.vocabulary = VocabEmbedding(
            spec.vocab_size, spec.hidden_size, tied=spec.tie_word_embeddings, dtype=dtype, device=device
        )
        # Rounded to the model's dtype, as in training: bfloat16 rounds sqrt(640) of Gemma 3 270M to 25.25.
        self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()
        self.layers = [
            DecoderLayer(spec, layer, ops=ops, tp=tp, dtype=dtype, device=device) for layer in range(spec.num_layers)
        ]
        self.norm = empty_norm(spec, spec.hidden_size, dtype, device)
        # Not for tensor parallel ranks, whose sums are partial, and not for float16, in which the residual stream times
        # a norm's weight may overflow.
        has_small_batch_path = not spec.names.post_norms and tp.size == 1 and dtype != torch.float16
        limits = [ops.max_small_batch_tokens(matrix.weight) for layer in self.layers[:1] for matrix in layer.linears()]
        self.max_small_batch_tokens = min(limits) if has_small_batch_path else 0
        # [max_len, head_dim], computed on the CPU: the same numbers for every device, also for a model on "meta".
        max_len = max_len or spec.max_position_embeddings
        table = ops.rope_table(spec.head_dim, max_len, spec.rope_theta, scaling=spec.rope_scaling)
        self.cos_sin: Tensor = table.to(device)
        self.local_cos_sin = self.cos_sin
        if spec.local_rope_theta is not None:
            self.local_cos_sin = ops.rope_table(spec.head_dim, max_len, spec.local_rope_theta).to(device)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor:
        """Forward pass: write K and V of the batch's tokens to the KV cache and return logits.

        token_ids    [num_tokens] int64
        kv           [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim], the KV cache, modified
        logits_rows  [num_rows] int64, tokens whose logits are returned, usually the last of each sequence. None: all

        -> [num_rows, vocab_size] float32; on a GPU in the model's dtype
        """
        x = self.vocabulary.embed(token_ids)  # [num_tokens, hidden_size]
        if self.embedding_scale != 1.0:
            x *= self.embedding_scale
        if len(x) <= self.max_small_batch_tokens:
            return self.vocabulary.logits(self._forward_small_batch(x, batch, kv, logits_rows))
        residual = torch.zeros_like(x)
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, batch, kv[:, index], self._cos_sin_of(layer))
        if logits_rows is not None:
            x, residual = x[logits_rows], residual[logits_rows]
        x, _ = self.ops.add_rms_norm(x, residual, self.norm, self.spec.rms_norm_eps)
        return self.vocabulary.logits(x)

    def _forward_small_batch(self, x: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor:
        """Small-batch path: embeddings of at most `max_small_batch_tokens` tokens -> the head's input."""
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        residual = self.ops.make_normed_residual(x, norms[0])
        for index, layer in enumerate(self.layers):
            residual = layer.forward_small_batch(
                residual, batch, kv[:, index], self._cos_sin_of(layer), norms[index + 1]
            )
        x = residual.x if logits_rows is None else residual.x[logits_rows]
        normed: Tensor = self.ops.rms_norm(x, self.norm, self.spec.rms_norm_eps)
        return normed

    def _cos_sin_of(self, layer: DecoderLayer) -> Tensor:
        return self.local_cos_sin if layer.attention.window else self.cos_sin

    def weights(self) -> Iterator[Weight]:
        """All tensors of a checkpoint of this model."""
        names = self.spec.names
        yield from self.vocabulary.weights(names.embedding, names.head)
        for index, layer in enumerate(self.layers):
            yield from layer.weights(names.layer.format(index))
        yield Weight.whole(f"{names.final_norm}.weight", self.norm)

    def matrices(self) -> Iterator[PackableWeight]:
        """All matrices, to be packed after loading."""
        yield self.vocabulary
        for layer in self.layers:
            yield from layer.linears()

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.tensor.nbytes for weight in self.weights())
