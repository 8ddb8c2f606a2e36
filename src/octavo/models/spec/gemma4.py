"""Decoders whose layers with and without a sliding window differ in their attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from octavo.models.spec.decoder import DecoderSpec
from octavo.models.spec.model import ModelSpec
from octavo.models.spec.ranks import heads_per_rank
from octavo.models.spec.tensors import LayerKind, LinearShape, NormShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Spec(DecoderSpec):
    """Gemma 4: V is normalised, too, and each layer's output is multiplied by a number. An MLP may have experts beside.

    full_heads  K/V heads of layers without a window, and the size of all their heads; None: as of the others
    shares_kv   layers without a window have no projection for V: it is K before norm and rotary embedding
    """

    model: ClassVar[str] = "octavo.models.gemma4:Gemma4Decoder"
    full_heads: tuple[int, int] | None = None
    shares_kv: bool = False

    @property
    def full_kv_heads(self) -> tuple[int, int]:
        return self.full_heads or (self.num_kv_heads, self.head_dim)

    def of_layer(self, layer: int) -> Gemma4Spec:
        """A spec whose layers are all like this one, but for their windows."""
        if self.window_of(layer):
            return replace(self, full_heads=None, shares_kv=False, forms=())
        num_kv_heads, head_dim = self.full_kv_heads
        return replace(self, num_kv_heads=num_kv_heads, head_dim=head_dim, full_heads=None, forms=())

    def has_experts(self, layer: int) -> bool:
        return False  # in place of the MLP

    @property
    def layer_kinds(self) -> Sequence[LayerKind]:
        alike: dict[bool, list[int]] = {}
        for layer in range(self.num_layers):
            alike.setdefault(self.window_of(layer) > 0, []).append(layer)
        return tuple(self.kind_of(layers[0])._replace(num_layers=len(layers)) for layers in alike.values())

    def kind_of(self, layer: int) -> LayerKind:
        own, linears = self.of_layer(layer), {}
        num_floats = 1  # the output's factor
        if self.experts is not None:
            linears = self.experts.linears(self.hidden_size)
            num_floats += self.hidden_size + self.experts.num  # factors of the router's inputs, and of its weights
        return LayerKind(1, own.linears | linears, own.norms, num_floats)

    def _qkv_shape(self, sizes: tuple[int, int, int]) -> LinearShape:
        shape = DecoderSpec._qkv_shape(self, sizes)
        return replace(shape, names=shape.names[:2], out_sizes=sizes[:2]) if self.shares_kv else shape

    @property
    def norms(self) -> dict[str, NormShape]:
        norms = super(Gemma4Spec, self).norms
        if self.experts is not None:
            norms["experts"] = NormShape("pre_feedforward_layernorm_2", self.hidden_size)
            norms["after_dense"] = NormShape("post_feedforward_layernorm_1", self.hidden_size)
            norms["after_experts"] = NormShape("post_feedforward_layernorm_2", self.hidden_size)
        return norms

    def split_sizes(self) -> dict[str, int]:
        return DecoderSpec.split_sizes(self) | {"columns of the MLP": self.intermediate_size}

    def shared_sizes(self) -> dict[str, int]:
        return ModelSpec.shared_sizes(self) | {"K/V heads without a sliding window": self.full_kv_heads[0]}

    def sizes_of_rank(self, size: int) -> dict[str, Any]:
        sizes = DecoderSpec.sizes_of_rank(self, size)
        if self.full_heads is not None:
            sizes["full_heads"] = heads_per_rank(self.full_heads[0], size), self.full_heads[1]
        return sizes
