"""GPT-2 and OPT: a decoder with layer norms, learned positions and a plain MLP, configured by `GPTSpec`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.ops import ModelOps
from octavo.models.linear import SINGLE_RANK, Linear, PackableWeight, TensorParallel, VocabEmbedding, Weight
from octavo.models.spec import GPTSpec

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def conv1d_weights(linear: Linear, name: str) -> Iterator[Weight]:
    """Parts of a checkpoint's [in, out] tensor that merges all projections of `linear`.

    in the file   | q | k | v |    a rank's part of each is a range of columns, which are rows of `linear`
    """
    shape = (linear.in_size, sum(linear.out_sizes))
    first_in = linear.tp.rank * linear.weight.shape[1] if linear.split == "in" else 0
    biases = [None] * len(linear.rows) if linear.bias is None else torch.split(linear.bias, linear.rows)
    before = 0
    for size, rows, weight, bias in zip(
        linear.out_sizes, linear.rows, torch.split(linear.weight, linear.rows), biases, strict=True
    ):
        first_out = before + (linear.tp.rank * rows if linear.split == "out" else 0)
        yield Weight(f"{name}.weight", shape, weight.T, (first_in, first_out))
        if bias is not None:
            yield Weight(f"{name}.bias", shape[1:], bias, (first_out,))
        before += size


class LayerNorm:
    """A layer norm over hidden_size, with weight and bias if the spec has norm_weights."""

    def __init__(self, spec: GPTSpec, *, ops: ModelOps, dtype: torch.dtype, device: torch.device | str) -> None:
        self.ops = ops
        self.eps = spec.layer_norm_eps
        size, has_weights = spec.hidden_size, spec.norm_weights
        self.weight = torch.empty(size, dtype=dtype, device=device) if has_weights else None
        self.bias = torch.empty(size, dtype=dtype, device=device) if has_weights else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape."""
        normed: Tensor = self.ops.layer_norm(x, self.weight, self.bias, self.eps)
        return normed

    def weights(self, name: str) -> Iterator[Weight]:
        if self.weight is not None and self.bias is not None:
            yield Weight.whole(f"{name}.weight", self.weight)
            yield Weight.whole(f"{name}.bias", self.bias)


class GPTLayer:
    """Attention and MLP, each with a residual addition, and a norm before them or after the addition."""

    def __init__(
        self,
        spec: GPTSpec,
        layer: int,
        *,
        ops: ModelOps,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.ops = ops
        self.names = spec.names
        self.prefix = self.names.layer.format(layer)
        self.norm_first = spec.norm_first
        self.head_dim = spec.head_dim
        self.scale = spec.attention_scale / (layer + 1 if spec.scale_by_layer else 1)
        self.window = spec.window_of(layer)
        self.activation = ACTIVATIONS[spec.activation]
        tp.per_rank(spec.num_heads, "attention heads")  # raises if they are not divisible

        def projection(in_size: int, *out_sizes: int, split: str) -> Linear:
            return Linear(in_size, out_sizes, bias=spec.bias, split=split, tp=tp, dtype=dtype, device=device)  # type: ignore[arg-type]

        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.attention_norm = LayerNorm(spec, ops=ops, dtype=dtype, device=device)
        self.qkv = projection(hidden, hidden, hidden, hidden, split="out")
        self.out = projection(hidden, hidden, split="in")
        self.mlp_norm = LayerNorm(spec, ops=ops, dtype=dtype, device=device)
        self.up = projection(hidden, inner, split="out")
        self.down = projection(inner, hidden, split="in")

    def __call__(self, x: Tensor, batch: RaggedBatch, kv_layer: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape; writes the tokens' K and V to kv_layer."""
        if self.norm_first:
            x = x + self._attend(self.attention_norm(x), batch, kv_layer)
            return x + self._mlp(self.mlp_norm(x))
        x = self.attention_norm(x + self._attend(x, batch, kv_layer))
        return self.mlp_norm(x + self._mlp(x))

    def _attend(self, x: Tensor, batch: RaggedBatch, kv_layer: Tensor) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [num_tokens, 3 * num_heads, head_dim]
        q, k, v = heads.chunk(3, dim=1)
        self.ops.kv_write(k, v, kv_layer, batch.slot_mapping)
        output = self.ops.paged_attention(q, kv_layer, batch, scale=self.scale, window=self.window)
        return self.out(output.flatten(1))

    def _mlp(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))

    def weights(self) -> Iterator[Weight]:
        names, prefix = self.names, self.prefix
        yield from self.attention_norm.weights(prefix + names.attention_norm)
        yield from self.mlp_norm.weights(prefix + names.mlp_norm)
        for linear, parts in zip(self.linears(), (names.qkv, [names.out], names.mlp_in, [names.down]), strict=True):
            if names.is_conv1d:
                yield from conv1d_weights(linear, prefix + parts[0])
            else:
                yield from linear.weights(*(prefix + part for part in parts))

    def linears(self) -> Iterator[Linear]:
        yield from (self.qkv, self.out, self.up, self.down)


class GPT:
    """A causal language model over the paged KV cache, with the interface of `decoder.Decoder`.

    max_len is unused: the checkpoint has the whole position table.
    """

    def __init__(
        self,
        spec: GPTSpec,
        *,
        ops: ModelOps,
        dtype: torch.dtype,
        device: torch.device | str,
        tp: TensorParallel = SINGLE_RANK,
        max_len: int | None = None,
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.names = spec.names
        hidden, width = spec.hidden_size, spec.embedding_size
        self.vocabulary = VocabEmbedding(
            spec.vocab_size, width, tied=spec.tie_word_embeddings, dtype=dtype, device=device
        )
        num_positions = spec.max_position_embeddings + spec.position_offset
        self.positions = torch.empty(num_positions, hidden, dtype=dtype, device=device)
        self.project_in: Tensor | None = None  # [hidden_size, embedding_size]
        self.project_out: Tensor | None = None  # [embedding_size, hidden_size]
        if width != hidden:
            self.project_in = torch.empty(hidden, width, dtype=dtype, device=device)
            self.project_out = torch.empty(width, hidden, dtype=dtype, device=device)
        self.layers = [
            GPTLayer(spec, layer, ops=ops, tp=tp, dtype=dtype, device=device) for layer in range(spec.num_layers)
        ]
        self.norm = LayerNorm(spec, ops=ops, dtype=dtype, device=device) if spec.final_norm else None

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor:
        """See `decoder.Decoder.forward`."""
        x = self.vocabulary.embed(token_ids)  # [num_tokens, embedding_size]
        if self.project_in is not None:
            x = F.linear(x, self.project_in)
        x = x + F.embedding(batch.positions + self.spec.position_offset, self.positions)  # [num_tokens, hidden_size]
        for index, layer in enumerate(self.layers):
            x = layer(x, batch, kv[:, index])
        if logits_rows is not None:
            x = x[logits_rows]
        if self.norm is not None:
            x = self.norm(x)
        if self.project_out is not None:
            x = F.linear(x, self.project_out)
        return self.vocabulary.logits(x)

    def weights(self) -> Iterator[Weight]:
        """All tensors of a checkpoint of this model; several weights may be parts of one tensor."""
        yield from self.vocabulary.weights(self.names.embedding, self.names.head)
        yield Weight.whole(f"{self.names.positions}.weight", self.positions)
        if self.project_in is not None and self.project_out is not None:
            yield Weight.whole("model.decoder.project_in.weight", self.project_in)
            yield Weight.whole("model.decoder.project_out.weight", self.project_out)
        for layer in self.layers:
            yield from layer.weights()
        if self.norm is not None:
            yield from self.norm.weights(self.names.final_norm)

    def matrices(self) -> Iterator[PackableWeight]:
        """All matrices, to be packed after loading."""
        yield self.vocabulary
        for layer in self.layers:
            yield from layer.linears()

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.tensor.nbytes for weight in self.weights())
