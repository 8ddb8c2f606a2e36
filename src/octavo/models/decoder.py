"""The decoder of the Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 are one model with a few switches."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.batch import RaggedBatch
from octavo.models.layers import Attention, GatedMLP
from octavo.models.linear import ALONE, TensorParallel, Weight
from octavo.models.spec import DecoderSpec


class DecoderLayer:
    """Norm, attention, norm, MLP, each half added to the residual stream.

    The last addition is left to the next norm, which needs the sum anyway: what travels between layers is the pair
    (x, residual), and the stream's value is their sum.
    """

    def __init__(
        self, spec: DecoderSpec, *, ops: ModuleType, tp: TensorParallel, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.ops = ops
        self.eps = spec.rms_norm_eps
        self.attention_norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)
        self.attention = Attention(spec, ops=ops, tp=tp, dtype=dtype, device=device)
        self.mlp_norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)
        self.mlp = GatedMLP(spec, ops=ops, tp=tp, dtype=dtype, device=device)

    def __call__(
        self, x: Tensor, residual: Tensor, batch: RaggedBatch, kv_layer: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x, residual [num_tokens, hidden_size] -> the same, one layer on."""
        x, residual = self.ops.add_rms_norm(x, residual, self.attention_norm, self.eps)
        x = self.attention(x, batch, kv_layer, cos_sin)
        x, residual = self.ops.add_rms_norm(x, residual, self.mlp_norm, self.eps)
        return self.mlp(x), residual

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield Weight.whole(f"{prefix}.input_layernorm.weight", self.attention_norm)
        yield from self.attention.weights(f"{prefix}.self_attn")
        yield Weight.whole(f"{prefix}.post_attention_layernorm.weight", self.mlp_norm)
        yield from self.mlp.weights(f"{prefix}.mlp")


class Decoder:
    """A causal language model over paged K and V. Its tensors are empty until `weights.load_decoder` fills them.

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
        tp: TensorParallel = ALONE,
        max_len: int | None = None,
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.embedding = torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.layers = [DecoderLayer(spec, ops=ops, tp=tp, dtype=dtype, device=device) for _ in range(spec.num_layers)]
        self.norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)
        # Tied models read the embedding backwards.
        self.head = self.embedding if spec.tie_word_embeddings else torch.empty_like(self.embedding)
        # [max_len, head_dim], made on the CPU: the same numbers on every device, and none at all for a model on "meta".
        table = ops.rope_table(
            spec.head_dim, max_len or spec.max_position_embeddings, spec.rope_theta, scaling=spec.rope_scaling
        )
        self.cos_sin = table.to(device)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor) -> Tensor:
        """Compute the batch's tokens, write their K and V, and give the logits that were asked for.

        token_ids    [num_tokens] int64
        kv           [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim], the pool, written to
        logits_rows  [num_rows] int64, which of the tokens get logits: only the last of a sequence has a use for them

        -> [num_rows, vocab_size] float32
        """
        x = F.embedding(token_ids, self.embedding)  # [num_tokens, hidden_size]
        residual = torch.zeros_like(x)
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, batch, kv[:, index], self.cos_sin)
        x, _ = self.ops.add_rms_norm(x[logits_rows], residual[logits_rows], self.norm, self.spec.rms_norm_eps)
        return F.linear(x, self.head).float()

    def weights(self) -> Iterator[Weight]:
        """Every tensor that a checkpoint of this model must hold."""
        yield Weight.whole("model.embed_tokens.weight", self.embedding)
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"model.layers.{index}")
        yield Weight.whole("model.norm.weight", self.norm)
        if not self.spec.tie_word_embeddings:
            yield Weight.whole("lm_head.weight", self.head)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights, in bytes."""
        return sum(weight.tensor.nbytes for weight in self.weights())
