"""Decoders of the Llama family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from octavo.models.spec.experts import ExpertsSpec
from octavo.models.spec.model import ModelSpec
from octavo.models.spec.tensors import LayerKind, LinearShape, NormShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """A decoder of the Llama family: RMS norms, rotary positions, gated MLPs.

    activation          of the gate, "silu" or "gelu_tanh"
    qkv_bias, o_bias, mlp_bias
                        the projections have a bias
    qk_norm             each head of Q and K is normalised before rotary embedding
    joint_qk_norm       all heads of Q are normalised together, and those of K
    embedding_scale     factor on embeddings
    rounded_scale       embedding_scale is rounded to the model's dtype
    attention_scale     factor on attention scores; None: 1 / sqrt(head_dim)
    sinks               each query head of a layer with attention has a sink; see `reference.paged_attention`
    rotary_dim          the first dimensions of a head are rotated, an even number of them; None: all
    nope_layers         layers without rotary embedding
    local_rope_theta    theta of the layers with a sliding window, which are then not scaled; None: rope_theta
    experts             in place of MLPs; None: no layer has experts
    """

    model: ClassVar[str] = "octavo.models.decoder:Decoder"
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int | None = None
    nope_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    embedding_scale: float = 1.0
    rounded_scale: bool = False
    attention_scale: float | None = None
    sinks: bool = False
    experts: ExpertsSpec | None = None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def layer_kinds(self) -> Sequence[LayerKind]:
        alike: dict[tuple[bool, bool], list[int]] = {}
        recurrent = set(self.recurrent_layers)
        for layer in range(self.num_layers):
            alike.setdefault((layer in recurrent, self.has_experts(layer)), []).append(layer)
        return tuple(self.kind_of(layers[0])._replace(num_layers=len(layers)) for layers in alike.values())

    def kind_of(self, layer: int) -> LayerKind:
        """The tensors of one layer."""
        num_floats = self.num_heads if self.sinks else 0
        return LayerKind(1, self.attention_linears | self.mlp_linears_of(layer), self.norms, num_floats)

    @property
    def linears(self) -> dict[str, LinearShape]:
        return self.attention_linears | self.mlp_linears

    @property
    def attention_linears(self) -> dict[str, LinearShape]:
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv": self._qkv_shape((q_size, kv_size, kv_size)),
            "out": LinearShape((self.names.out,), q_size, (self.hidden_size,), self.o_bias),
        }

    @property
    def mlp_linears(self) -> dict[str, LinearShape]:
        names, hidden, inner = self.names, self.hidden_size, self.intermediate_size
        return {
            "mlp_in": LinearShape(names.mlp_in, hidden, (inner, inner), self.mlp_bias),
            "down": LinearShape((names.down,), inner, (hidden,), self.mlp_bias),
        }

    def mlp_linears_of(self, layer: int) -> dict[str, LinearShape]:
        """Those of the MLP, or of the experts, of a layer."""
        if self.experts is not None and self.has_experts(layer):
            return self.experts.linears(self.hidden_size)
        return self.mlp_linears

    @property
    def activation_size(self) -> int:
        size = super(DecoderSpec, self).activation_size
        return size if self.experts is None else max(size, self.experts.activation_size(self.hidden_size))

    def split_sizes(self) -> dict[str, int]:
        sizes, experts = ModelSpec.split_sizes(self), self.experts
        if experts is None:
            return sizes
        sizes["columns of an expert"] = experts.inner
        if experts.shared_inner:
            sizes["columns of the shared expert"] = experts.shared_inner
        if not experts.dense_layers:
            del sizes["columns of the MLP"]
        return sizes

    def sizes_of_rank(self, size: int) -> dict[str, Any]:
        sizes, experts = ModelSpec.sizes_of_rank(self, size), self.experts
        if experts is not None:
            inner, shared = experts.inner // size, experts.shared_inner // size
            sizes["experts"] = replace(experts, inner=inner, shared_inner=shared)
        return sizes

    def _qkv_shape(self, sizes: tuple[int, int, int]) -> LinearShape:
        return LinearShape(self.names.qkv, self.hidden_size, sizes, self.qkv_bias, order=self._qkv_order)

    @property
    def norms(self) -> dict[str, NormShape]:
        names, hidden = self.names, self.hidden_size
        roles = {"attention": names.attention_norm, "mlp": names.mlp_norm}
        roles |= zip(("after_attention", "after_mlp"), names.post_norms, strict=False)
        norms = {role: NormShape(name, hidden) for role, name in roles.items() if name}
        q, k = names.qk_norms
        if self.joint_qk_norm:
            norms["joint_q"] = NormShape(q, self.num_heads * self.head_dim)
            norms["joint_k"] = NormShape(k, self.num_kv_heads * self.head_dim)
        elif self.qk_norm:
            order = None if self.rotary_dim is None else self._head_order
            norms |= {role: NormShape(name, self.head_dim, order=order) for role, name in (("q", q), ("k", k))}
        return norms

    @property
    def has_norms_before_only(self) -> bool:
        return {"attention", "mlp", "after_attention", "after_mlp"} & set(self.norms) == {"attention", "mlp"}

    @property
    def _head_order(self) -> tuple[int, ...]:
        """Row in the checkpoint of each row of a head of Q or K. Pairs are half a head apart, rotated ones first.

        head_dim 6, rotary_dim 2:   in the checkpoint, r are a pair   r r 0 1 2 3      here   r 0 1 r 2 3
        """
        rotated = self.head_dim if self.rotary_dim is None else self.rotary_dim
        pairs, split = rotated // 2, rotated + (self.head_dim - rotated) // 2
        return (*range(pairs), *range(rotated, split), *range(pairs, rotated), *range(split, self.head_dim))

    @property
    def _qkv_order(self) -> tuple[int, ...] | None:
        if self.rotary_dim is None and not self.names.qkv_by_group:
            return None
        num_heads, num_groups = self.num_heads, self.num_kv_heads
        heads = list(range(num_heads + 2 * num_groups))
        if self.names.qkv_by_group:
            queries = num_heads // num_groups
            first = range(0, len(heads), queries + 2)  # of each group
            heads = [start + i for start in first for i in range(queries)]
            heads += [start + queries + i for i in range(2) for start in first]
        rows = [self._head_order] * (num_heads + num_groups) + [tuple(range(self.head_dim))] * num_groups
        return tuple(head * self.head_dim + row for head, order in zip(heads, rows, strict=True) for row in order)
