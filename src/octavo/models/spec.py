"""Descriptions of models, complete apart from the weights: sizes, options, names and shapes of tensors. No torch here.

`config.spec_from_config` reads a `DecoderSpec` from a config.json of the Llama family, a `GPTSpec` for others.
A spec declares each layer's tensors once (`linears`, `norms`): models create them from it, and memory plans, the doctor
and the simulator count them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

from octavo.kernels.group_form import GroupForm
from octavo.models import quantization as methods
from octavo.models.rank_sizes import heads_per_rank, rows_per_rank, spec_of_rank


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


class LayerGroups(NamedTuple):
    """How the layers of a model share blocks. A block of any group has K and V of `num_layers` layers.

    windows  of each window group, in tokens
    places   of each layer: its group, 0 for the full one, and its index in that group's blocks. Of a recurrent layer,
             which has no K and V: -1, and its index among these
    """

    num_layers: int
    windows: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


def group_layers(num_layers: int, windows: Sequence[int], recurrent: Sequence[int] = ()) -> LayerGroups:
    """Group layers with these sliding windows; 0: none. Groups have as many layers as there are without a window.

    recurrent: layers that are in no group

        layers of Gemma 3    s s s s s f s s s s s f s s s s s f     s: slides, f: full
        group                1 1 1 2 2 0 2 3 3 3 4 0 4 4 5 5 5 0

    Layers that are alike, or that all slide, are one group.
    """
    places = {layer: (-1, index) for index, layer in enumerate(recurrent)}
    attending = [layer for layer in range(num_layers) if layer not in places]
    full = [layer for layer in attending if not (windows and windows[layer])]
    if len(full) in (0, len(attending)):
        places |= {layer: (0, index) for index, layer in enumerate(attending)}
        return LayerGroups(len(attending), (), tuple(places[layer] for layer in range(num_layers)))
    places |= {layer: (0, index) for index, layer in enumerate(full)}
    of_groups: list[int] = []
    for window in sorted({windows[layer] for layer in attending} - {0}):
        sliding = [layer for layer in attending if windows[layer] == window]
        for first in range(0, len(sliding), len(full)):
            of_groups.append(window)
            places |= {layer: (len(of_groups), i) for i, layer in enumerate(sliding[first : first + len(full)])}
    return LayerGroups(len(full), tuple(of_groups), tuple(places[layer] for layer in range(num_layers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The fields that all models have. Subclasses declare the tensors of one kind of model.

    num_heads, num_kv_heads, head_dim
                             query heads, K/V heads, and the size of both; num_heads * head_dim may differ from
                             hidden_size
    intermediate_size        width of the MLP
    max_position_embeddings  number of positions that were trained
    windows                  sliding window of each layer: the keys that a query sees, its own included. 0: all keys.
                             Empty: no layer has a window
    recurrent_layers         layers without K and V, which keep a state of a sequence
    logits_scaling           logits are divided by it
    unit_offset_norms        norms multiply by 1 + weight, in float32 for any model dtype
    rope_scaling             of rotary embedding: validated dict with config.json's keys, the argument of `rope_table`;
                             None: no scaling
    dtype                    the checkpoint's, a name such as "bfloat16"; for quantised GGUF files, "bfloat16"
    quant_method             vLLM's name of how the checkpoint is quantised, such as "awq"; None: it is not
    stored_as                how the files of a quantised checkpoint hold the weights, for people; "": they are not
    kv_scheme                how config.json wants K and V in float8: static, with scales in the files, or dynamic;
                             "": it does not
    forms                    of those of linear layers, and the number of weights in each
    vocabulary_forms         the same of embeddings and head
    head_form                of a head that is not tied: a GPU keeps integers, and dequantises embeddings
    names                    names of the checkpoint's tensors
    """

    model: ClassVar[str]
    """The model that a spec of this class configures, as "module:class"."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    windows: tuple[int, ...] = ()
    recurrent_layers: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    logits_scaling: float = 1.0
    unit_offset_norms: bool = False
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"
    quant_method: str | None = None
    stored_as: str = ""
    kv_scheme: Literal["", "static", "dynamic"] = ""
    forms: tuple[tuple[GroupForm, int], ...] = field(default=(), repr=False)
    vocabulary_forms: tuple[tuple[GroupForm, int], ...] = field(default=(), repr=False)
    head_form: GroupForm | None = field(default=None, repr=False)
    names: TensorNames = field(default=LLAMA_NAMES, repr=False)

    # -- tensors -------------------------------------------------------------------------------------------------------

    @property
    def linears(self) -> dict[str, LinearShape]:
        """Linear layers of a layer: "qkv", "out", "mlp_in" and "down". Names follow the layer's prefix."""
        raise NotImplementedError

    @property
    def norms(self) -> dict[str, NormShape]:
        """Norms of a layer. Names follow the layer's prefix."""
        raise NotImplementedError

    @property
    def layer_kinds(self) -> Sequence[LayerKind]:
        """The layers, by their tensors."""
        return (LayerKind(self.num_layers, self.linears, self.norms),)

    @property
    def last_norm(self) -> NormShape | None:
        """The norm after the last layer."""
        return NormShape(self.names.final_norm, self.hidden_size)

    def has_unit_offset(self, name: str) -> bool:
        """True for a norm's weight, by its name in the checkpoint, if the norm multiplies by 1 + weight."""
        return self.unit_offset_norms and name.endswith("norm.weight")

    @property
    def vocabulary(self) -> tuple[int, int]:
        """Shape of the embedding table, and of the head."""
        return self.vocab_size, self.hidden_size

    @property
    def others(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the other tensors, by name."""
        return {}

    @property
    def num_params(self) -> int:
        """Number of parameters; a tied head counts once."""
        layers = sum(
            kind.num_layers * linear.num_params for kind in self.layer_kinds for linear in kind.linears.values()
        )
        vocabularies = math.prod(self.vocabulary) * (1 if self.tie_word_embeddings else 2)
        others = sum(map(math.prod, self.others.values()))
        return layers + vocabularies + self._norm_params + self._num_floats + others

    def weight_bytes(self, itemsize: int, quantization: str | None = None, device: str = "cpu") -> int:
        """Bytes of the weights in a dtype of `itemsize` bytes. quantization: `EngineArgs.quantization`.

        Quantised weights keep their bits where the device's products do, in 16-bit dtypes.
        """
        forms = self.forms
        if device == "cpu":
            forms += self.vocabulary_forms
        elif self.head_form is not None and not self.head_form.is_float:
            forms += ((self.head_form, math.prod(self.vocabulary)),)
        kept = [(form, count) for form, count in forms if itemsize == 2 and form.is_kept_on(device)]
        num_kept = sum(count for _, count in kept)
        num_bytes = sum(form.num_bytes(count) for form, count in kept)
        entry = methods.METHODS[quantization]
        if (form := entry.forms.get(device)) is not None:
            rest = self._num_linear_weights - sum(count for form, count in self.forms if form.is_kept_on(device))
            num_kept, num_bytes = num_kept + rest, num_bytes + form.num_bytes(rest)
            if not self.vocabulary_forms and (form := entry.head_form(device)) is not None:
                head = math.prod(self.vocabulary)
                num_kept, num_bytes = num_kept + head, num_bytes + form.num_bytes(head)
        num_wide = self._num_floats + (self._norm_params if self.unit_offset_norms else 0)
        return (self.num_params - num_kept) * itemsize + num_wide * (4 - itemsize) + num_bytes

    def keeps_bits_on(self, device: str) -> bool:
        """True if the files are quantised, in forms whose products "cpu" or "cuda" has."""
        return bool(self.forms) and all(form.is_kept_on(device) for form, _ in self.forms)

    @property
    def _num_linear_weights(self) -> int:
        return sum(
            kind.num_layers * math.prod(linear.shape) for kind in self.layer_kinds for linear in kind.linears.values()
        )

    @property
    def _norm_params(self) -> int:
        last = self.last_norm.num_params if self.last_norm else 0
        return sum(kind.num_layers * kind.num_norm_params for kind in self.layer_kinds) + last

    @property
    def _num_floats(self) -> int:
        return sum(kind.num_layers * kind.num_floats for kind in self.layer_kinds)

    @property
    def activation_size(self) -> int:
        """Activations of a token inside attention or MLP: outputs of the first product and inputs of the last."""
        pairs = [
            (kind.linears[first], kind.linears[last])
            for kind in self.layer_kinds
            for first, last in (("qkv", "out"), ("mlp_in", "down"))
        ]
        return max(first.num_out + last.in_size for first, last in pairs)

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def of_rank(self, size: int) -> Self:
        """The same with the sizes of one of `size` tensor parallel ranks; `vocab_size` includes its padding.

        Raises `ParameterError` if they cannot share the model.
        """
        return self if size == 1 else spec_of_rank(self, size)

    def split_sizes(self) -> dict[str, int]:
        """What tensor parallel ranks have equal parts of, by its name for people."""
        return {"attention heads": self.num_heads, "columns of the MLP": self.intermediate_size}

    def shared_sizes(self) -> dict[str, int]:
        """The same of heads that several ranks may have, if ranks are more than heads."""
        return {"K/V heads": self.num_kv_heads}

    def sizes_of_rank(self, size: int) -> dict[str, Any]:
        """Fields that are smaller for one of `size` ranks."""
        return {
            "vocab_size": rows_per_rank(self.vocab_size, size),
            "intermediate_size": self.intermediate_size // size,
            "num_heads": self.num_heads // size,
            "num_kv_heads": heads_per_rank(self.num_kv_heads, size),
        }

    # -- lengths -------------------------------------------------------------------------------------------------------

    def window_of(self, layer: int) -> int:
        """Sliding window of a layer, in keys; 0: none."""
        return self.windows[layer] if self.windows else 0

    @property
    def layer_groups(self) -> LayerGroups:
        return group_layers(self.num_layers, self.windows, self.recurrent_layers)

    @property
    def state_size(self) -> int:
        """Numbers in the state of a sequence, over all recurrent layers."""
        return 0

    @property
    def kv_window(self) -> int | None:
        """Number of last keys that the KV cache must keep; None: all, because some layer has no window."""
        return max(self.windows) if self.windows and all(self.windows) else None

    def max_model_len(self, requested: int | None = None) -> int:
        """The longest sequence that the model supports. If more is requested, some rotary scalings extend it.

        Dynamic scaling and LongRoPE do so only then: their one table for all lengths changes short sequences, too. For
        YaRN, max_position_embeddings includes the factor in some files, and not in those edited as Qwen's authors
        advise.
        """
        known = self.max_position_embeddings
        scaling = self.rope_scaling or {}
        if scaling.get("rope_type") == "longrope":
            trained = min(known, int(scaling["original_max_position_embeddings"]))
            return trained if requested is None or requested <= trained else known
        if requested is None or requested <= known or scaling.get("rope_type") not in ("dynamic", "yarn"):
            return known
        return max(known, int(scaling["original_max_position_embeddings"] * scaling["factor"]))


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
    rotary_dim          the first dimensions of a head are rotated, an even number of them; None: all
    nope_layers         layers without rotary embedding
    local_rope_theta    theta of the layers with a sliding window, which are then not scaled; None: rope_theta
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

    @property
    def linears(self) -> dict[str, LinearShape]:
        names, hidden, inner = self.names, self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv": self._qkv_shape((q_size, kv_size, kv_size)),
            "out": LinearShape((names.out,), q_size, (hidden,), self.o_bias),
            "mlp_in": LinearShape(names.mlp_in, hidden, (inner, inner), self.mlp_bias),
            "down": LinearShape((names.down,), inner, (hidden,), self.mlp_bias),
        }

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


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridSpec(DecoderSpec):
    """Qwen3.5: a decoder of the Llama family with Gated DeltaNets (arXiv 2412.06464) as its recurrent layers.

    The outputs of its other layers' attention are gated: each head of Q has a gate of the same size beside it.

    num_key_heads, key_dim      heads of Q and of K in a recurrent layer, and their size
    num_value_heads, value_dim  of V
    conv_size                   tokens that the convolution of Q, K and V sees
    """

    model: ClassVar[str] = "octavo.models.hybrid:HybridDecoder"
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int

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
        hidden, num_heads, names = self.hidden_size, self.num_value_heads, ("qkv", "qkv", "qkv", "z", "b", "a")
        inner = num_heads * self.value_dim
        sizes = (*self.conv_sizes, inner, num_heads, num_heads)
        return self.linears | {
            "qkv": LinearShape(tuple(f"linear_attn.in_proj_{name}" for name in names), hidden, sizes),
            "out": LinearShape(("linear_attn.out_proj",), inner, (hidden,)),
        }

    @property
    def layer_kinds(self) -> Sequence[LayerKind]:
        num_recurrent, norms = len(self.recurrent_layers), self.norms
        num_floats = self.conv_channels * self.conv_size + 2 * self.num_value_heads + self.value_dim
        shared = {role: norm for role, norm in norms.items() if role not in ("q", "k")}
        return (
            LayerKind(self.num_layers - num_recurrent, self.linears, norms),
            LayerKind(num_recurrent, self.recurrent_linears, shared, num_floats),
        )

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
        return ModelSpec.split_sizes(self) | {"value heads": self.num_value_heads}

    def shared_sizes(self) -> dict[str, int]:
        return ModelSpec.shared_sizes(self) | {"key heads": self.num_key_heads}

    def sizes_of_rank(self, size: int) -> dict[str, Any]:
        return ModelSpec.sizes_of_rank(self, size) | {
            "num_key_heads": heads_per_rank(self.num_key_heads, size),
            "num_value_heads": self.num_value_heads // size,
        }


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
