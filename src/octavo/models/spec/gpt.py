"""Decoders with layer norms and an MLP of two projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from octavo.models.spec.model import ModelSpec
from octavo.models.spec.tensors import LinearShape, NormShape


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSpec(ModelSpec):
    """GPT-2, OPT and StarCoder2: layer norms, learned or rotary positions, an MLP of two projections.

    rope_theta          None: positions are learned
    embedding_size      width of the embeddings; if it is not hidden_size, projections convert between them (OPT-350m)
    position_offset     row of the position table for position 0
    activation          of the MLP, see `gpt.activation_of`
    norm_first          norms precede attention and MLP; else they follow the addition to the residual stream
    final_norm          a norm precedes the head
    norm_weights        norms have a weight and a bias
    bias                projections have a bias
    attention_scale     factor on attention scores
    scale_by_layer      attention scores are also divided by the layer's number, from 1
    """

    model: ClassVar[str] = "octavo.models.gpt:GPT"
    layer_norm_eps: float
    embedding_size: int
    rope_theta: float | None = None
    position_offset: int = 0
    activation: str = "gelu_tanh"
    norm_first: bool = True
    final_norm: bool = True
    norm_weights: bool = True
    bias: bool = True
    attention_scale: float = 1.0
    scale_by_layer: bool = False

    @property
    def linears(self) -> dict[str, LinearShape]:
        names, hidden, inner = self.names, self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = {
            "qkv": (names.qkv, hidden, (q_size, kv_size, kv_size)),
            "out": ((names.out,), q_size, (hidden,)),
            "mlp_in": (names.mlp_in, hidden, (inner,)),
            "down": ((names.down,), inner, (hidden,)),
        }
        return {role: LinearShape(*shape, self.bias, names.is_conv1d) for role, shape in shapes.items()}

    @property
    def norms(self) -> dict[str, NormShape]:
        if not self.norm_weights:
            return {}
        names = {"attention": self.names.attention_norm, "mlp": self.names.mlp_norm}
        return {role: NormShape(name, self.hidden_size, bias=True) for role, name in names.items()}

    @property
    def last_norm(self) -> NormShape | None:
        if not (self.final_norm and self.norm_weights):
            return None
        return NormShape(self.names.final_norm, self.hidden_size, bias=True)

    @property
    def vocabulary(self) -> tuple[int, int]:
        return self.vocab_size, self.embedding_size

    @property
    def others(self) -> Mapping[str, tuple[int, ...]]:
        """Learned positions, and the projections between embedding_size and hidden_size."""
        hidden, width = self.hidden_size, self.embedding_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.rope_theta is None:
            shapes[self.names.positions] = self.max_position_embeddings + self.position_offset, hidden
        if width != hidden:
            shapes |= {self.names.project_in: (hidden, width), self.names.project_out: (width, hidden)}
        return shapes
