"""Decoders with recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from octavo.models.spec.decoder import DecoderSpec
from octavo.models.spec.model import ModelSpec
from octavo.models.spec.ranks import heads_per_rank
from octavo.models.spec.tensors import LayerKind, LinearShape


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridSpec(DecoderSpec):
    """Qwen3.5 and Qwen3-Next: decoders whose recurrent layers are Gated DeltaNets (arXiv 2412.06464).

    The outputs of its other layers' attention are gated: each head of Q has a gate of the same size beside it.

    num_key_heads, key_dim      heads of Q and of K in a recurrent layer, and their size
    num_value_heads, value_dim  of V
    conv_size                   tokens that the convolution of Q, K and V sees
    pairing                     "grouped": the values of a key head are neighbours. "tiled": head i of V belongs to the
                                key head i % num_key_heads, in llama.cpp's files of Qwen3.5
    merged_by_key_head          the checkpoint's projections are two tensors (Qwen3-Next): for each key head its Q, K,
                                values and gates, and its two numbers for each of these
    """

    model: ClassVar[str] = "octavo.models.hybrid:HybridDecoder"
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    pairing: Literal["grouped", "tiled"] = "grouped"
    merged_by_key_head: bool = False

    def _qkv_shape(self, sizes: tuple[int, int, int]) -> LinearShape:
        """Of layers with attention: Q, its gates, K and V. Q and the gates are merged in one tensor."""
        shape = DecoderSpec._qkv_shape(self, sizes)
        return replace(shape, names=(shape.names[0], *shape.names), out_sizes=(sizes[0], *sizes))

    @property
    def _qkv_order(self) -> tuple[int, ...]:
        """Rows of Q, of its gates, of K and of V in the checkpoint, where a head's gate follows its Q."""
        dim, own = self.head_dim, tuple(range(self.head_dim))
        head = own if self.rotary_dim is None else self._head_order
        k, v = 2 * self.num_heads, 2 * self.num_heads + self.num_kv_heads
        parts = [(2 * i, head) for i in range(self.num_heads)]
        parts += [(2 * i + 1, own) for i in range(self.num_heads)]
        parts += [(i, head) for i in range(k, v)] + [(i, own) for i in range(v, v + self.num_kv_heads)]
        return tuple(part * dim + row for part, order in parts for row in order)

    @property
    def conv_sizes(self) -> tuple[int, int, int]:
        """Channels of Q, of K and of V in a recurrent layer."""
        key_size = self.num_key_heads * self.key_dim
        return key_size, key_size, self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return sum(self.conv_sizes)

    @property
    def recurrent_linears(self) -> dict[str, LinearShape]:
        """Of recurrent layers: "qkv" has Q, K and V, the output's gate, and two numbers for each head of V."""
        hidden, num_heads = self.hidden_size, self.num_value_heads
        names = ("qkvz",) * 4 + ("ba",) * 2 if self.merged_by_key_head else ("qkv", "qkv", "qkv", "z", "b", "a")
        inner = num_heads * self.value_dim
        sizes = (*self.conv_sizes, inner, num_heads, num_heads)
        order = None
        if self.merged_by_key_head:
            qkvz, ba = self.key_head_rows
            order = (*qkvz, *(len(qkvz) + row for row in ba))
        return {
            "qkv": LinearShape(tuple(f"linear_attn.in_proj_{name}" for name in names), hidden, sizes, order=order),
            "out": LinearShape(("linear_attn.out_proj",), inner, (hidden,)),
        }

    @property
    def key_head_rows(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows of Q, K, V and gates, and of the two numbers, in two tensors that have one key head after the other."""
        values = self.num_value_heads // self.num_key_heads
        widths = (self.key_dim, self.key_dim, *(values * self.value_dim,) * 2), (values, values)
        return self._rows_by_key_head(widths[0]), self._rows_by_key_head(widths[1])

    def _rows_by_key_head(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """sizes: rows of each part of a key head -> the rows of the first part of all key heads, and so on."""
        heads = range(0, self.num_key_heads * sum(sizes), sum(sizes))
        parts = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
        return tuple(first + row for part in parts for first in heads for row in part)

    def kind_of(self, layer: int) -> LayerKind:
        if layer not in self.recurrent_layers:
            return DecoderSpec.kind_of(self, layer)
        num_floats = self.conv_channels * self.conv_size + 2 * self.num_value_heads + self.value_dim
        norms = {role: norm for role, norm in self.norms.items() if role not in ("q", "k")}
        return LayerKind(1, self.recurrent_linears | self.mlp_linears_of(layer), norms, num_floats)

    def has_unit_offset(self, name: str) -> bool:
        return ModelSpec.has_unit_offset(self, name) and not name.endswith("linear_attn.norm.weight")

    @property
    def layer_state_size(self) -> int:
        """Numbers in the state of a recurrent layer: the last inputs of its convolution, and a matrix for each head."""
        return self.conv_channels * (self.conv_size - 1) + self.num_value_heads * self.key_dim * self.value_dim

    @property
    def state_size(self) -> int:
        return len(self.recurrent_layers) * self.layer_state_size

    def split_sizes(self) -> dict[str, int]:
        return DecoderSpec.split_sizes(self) | {"value heads": self.num_value_heads}

    def shared_sizes(self) -> dict[str, int]:
        key_heads = {"key heads": self.num_key_heads} if self.pairing == "grouped" else {}
        return ModelSpec.shared_sizes(self) | key_heads

    def sizes_of_rank(self, size: int) -> dict[str, Any]:
        is_grouped = self.pairing == "grouped"  # else neighbouring heads of V belong to all key heads
        return DecoderSpec.sizes_of_rank(self, size) | {
            "num_key_heads": heads_per_rank(self.num_key_heads, size) if is_grouped else self.num_key_heads,
            "num_value_heads": self.num_value_heads // size,
        }
