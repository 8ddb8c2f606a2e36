"""The decoder of the Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3, Gemma 3 are one model with a few switches."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference.norms import NormedResidual
from octavo.models.config import DecoderSpec
from octavo.models.layers import Attention, GatedMLP, empty_norm
from octavo.models.linear import SINGLE_RANK, Linear, PackableWeight, TensorParallel, VocabEmbedding, Weight


class DecoderLayer:
    """Norm, attention, norm, MLP, each half added to the residual stream.

    The last addition is left to the next norm, which needs the sum anyway: what travels between layers is the pair
    (x, residual), and the stream's value is their sum. Gemma 3 also normalises each half before it is added.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        layer: int,
        *,
        ops: ModuleType,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.ops = ops
        self.eps = spec.rms_norm_eps
        self.attention = Attention(spec, layer, ops=ops, tp=tp, dtype=dtype, device=device)
        self.mlp = GatedMLP(spec, ops=ops, tp=tp, dtype=dtype, device=device)
        self.attention_norm, self.mlp_norm = (empty_norm(spec, spec.hidden_size, dtype, device) for _ in range(2))
        self.post_norms: tuple[Tensor, Tensor] | None = None  # behind attention, behind the MLP
        if spec.post_norms:
            self.post_norms = (
                empty_norm(spec, spec.hidden_size, dtype, device),
                empty_norm(spec, spec.hidden_size, dtype, device),
            )

    def __call__(
        self, x: Tensor, residual: Tensor, batch: RaggedBatch, kv_layer: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x, residual [num_tokens, hidden_size] -> the same, one layer on."""
        x, residual = self.ops.add_rms_norm(x, residual, self.attention_norm, self.eps)
        x = self.attention(x, batch, kv_layer, cos_sin)
        if self.post_norms is not None:
            x = self.ops.rms_norm(x, self.post_norms[0], self.eps)
        x, residual = self.ops.add_rms_norm(x, residual, self.mlp_norm, self.eps)
        x = self.mlp(x)
        if self.post_norms is not None:
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
        yield Weight.whole(f"{prefix}.input_layernorm.weight", self.attention_norm)
        yield from self.attention.weights(f"{prefix}.self_attn")
        if self.post_norms is None:
            yield Weight.whole(f"{prefix}.post_attention_layernorm.weight", self.mlp_norm)
        else:  # the same name for another place
            yield Weight.whole(f"{prefix}.post_attention_layernorm.weight", self.post_norms[0])
            yield Weight.whole(f"{prefix}.pre_feedforward_layernorm.weight", self.mlp_norm)
            yield Weight.whole(f"{prefix}.post_feedforward_layernorm.weight", self.post_norms[1])
        yield from self.mlp.weights(f"{prefix}.mlp")

    def linears(self) -> Iterator[Linear]:
        yield from self.attention.linears()
        yield from self.mlp.linears()


class Decoder:
    """A causal language model over paged K and V. Its tensors are empty until `weights.load_model` fills them.

    ops      the module of operations to compute with: `kernels.reference` or a fast path with the same signatures
    max_len  positions in the rotary table; default: all that the model knows
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        ops: ModuleType,
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
        # In the model's dtype, as it was trained: bfloat16 makes 25.25 of Gemma 3 270M's sqrt(640).
        self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()
        self.layers = [
            DecoderLayer(spec, layer, ops=ops, tp=tp, dtype=dtype, device=device) for layer in range(spec.num_layers)
        ]
        self.norm = empty_norm(spec, spec.hidden_size, dtype, device)
        # A rank's sums are not yet the stream's, and float16 has no room for a stream times a norm's weight.
        has_small_batch_path = not spec.post_norms and tp.size == 1 and dtype != torch.float16
        most = [ops.max_small_batch_tokens(matrix.weight) for layer in self.layers[:1] for matrix in layer.linears()]
        self.max_small_batch_tokens = min(most) if has_small_batch_path else 0
        # [max_len, head_dim], made on the CPU: the same numbers on every device, and none at all for a model on "meta".
        max_len = max_len or spec.max_position_embeddings
        table = ops.rope_table(spec.head_dim, max_len, spec.rope_theta, scaling=spec.rope_scaling)
        self.cos_sin: Tensor = table.to(device)
        self.local_cos_sin = self.cos_sin
        if spec.local_rope_theta is not None:
            self.local_cos_sin = ops.rope_table(spec.head_dim, max_len, spec.local_rope_theta).to(device)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor:
        """Compute the batch's tokens, write their K and V, and give the logits that were asked for.

        token_ids    [num_tokens] int64
        kv           [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim], the pool, written to
        logits_rows  [num_rows] int64, which of the tokens get logits: only the last of a sequence has a use for them.
                     None: all

        -> [num_rows, vocab_size] float32, on a GPU in the dtype of the model
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
        """From the embeddings of at most `max_small_batch_tokens` tokens to the head's input."""
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
        """Every tensor that a checkpoint of this model must hold."""
        yield from self.vocabulary.weights("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"model.layers.{index}")
        yield Weight.whole("model.norm.weight", self.norm)

    def matrices(self) -> Iterator[PackableWeight]:
        """Every matrix that is multiplied with, for what is done to each once it is filled."""
        yield self.vocabulary
        for layer in self.layers:
            yield from layer.linears()

    @property
    def num_bytes(self) -> int:
        """Memory of the weights, in bytes."""
        return sum(weight.tensor.nbytes for weight in self.weights())
