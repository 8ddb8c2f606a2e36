"""Names and shapes of a model's tensors in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of a checkpoint's tensors, without ".weight" and ".bias". Those after `layer` follow a layer's prefix.

    layer         format string for a layer's number
    qkv, mlp_in   a name for each projection, or one name for a tensor that merges them
    attention_norm, mlp_norm
                  before attention and before the MLP; empty: no such norm
    post_norms    after attention and after the MLP, before the addition to the residual stream; empty: no such norms
    qkv_by_group  the merged Q, K and V are stored group by group: a K/V head's query heads, its K, its V
    is_conv1d     matrices are stored as [in, out], as in GPT-2's first implementation
    """

    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    positions: str = ""
    project_in: str = "model.decoder.project_in"
    project_out: str = "model.decoder.project_out"
    final_norm: str = "model.norm"
    layer: str = "model.layers.{}."
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    post_norms: tuple[str, ...] = ()
    qkv_by_group: bool = False
    is_conv1d: bool = False


EXPERT_ROLES = "experts_in", "experts_out"
"""Linear layers of the experts that a router chooses from."""
LLAMA_NAMES = TensorNames()
"""Transformers' names in the Llama family."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer: projections of one input, merged into one weight [num_out, in_size].

    names      of the checkpoint's tensors, one for each projection, or one for all. Those of a name are merged in it
    is_conv1d  the checkpoint's tensors are [in_size, num_out]
    order      row i of the merged weight is row order[i] of the checkpoint's, merged likewise; None: the same order
    """

    names: tuple[str, ...]
    in_size: int
    out_sizes: tuple[int, ...]
    bias: bool = False
    is_conv1d: bool = False
    order: tuple[int, ...] | None = None

    @property
    def num_out(self) -> int:
        return sum(self.out_sizes)

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_out, self.in_size

    @property
    def parts(self) -> Iterator[tuple[str, int]]:
        """Name and size of each projection."""
        names = self.names * (len(self.out_sizes) if len(self.names) == 1 else 1)
        return zip(names, self.out_sizes, strict=True)

    @property
    def num_params(self) -> int:
        return self.num_out * (self.in_size + self.bias)


@dataclass(frozen=True, slots=True)
class NormShape:
    """A norm's weight [size], and its bias [size] if it has one. order: as of `LinearShape`."""

    name: str
    size: int
    bias: bool = False
    order: tuple[int, ...] | None = None

    @property
    def num_params(self) -> int:
        return self.size * (1 + self.bias)


class LayerKind(NamedTuple):
    """Layers of the same tensors. num_floats: parameters of each besides, which are float32 in any dtype"""

    num_layers: int
    linears: Mapping[str, LinearShape]
    norms: Mapping[str, NormShape]
    num_floats: int = 0

    @property
    def num_norm_params(self) -> int:
        return sum(norm.num_params for norm in self.norms.values())
