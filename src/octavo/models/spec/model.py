"""The fields that all models have, and what follows from any model's tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from octavo.kernels.group_form import GroupForm
from octavo.models import quantization as methods
from octavo.models.spec.groups import LayerGroups, group_layers
from octavo.models.spec.ranks import heads_per_rank, rows_per_rank, spec_of_rank
from octavo.models.spec.tensors import EXPERT_ROLES, LLAMA_NAMES, LayerKind, LinearShape, NormShape, TensorNames


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
    logits_cap               logits are cap * tanh(logit / cap); 0: they are not capped
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
    logits_cap: float = 0.0
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
    def has_norms_before_only(self) -> bool:
        """True if a layer has RMS norms before attention and MLP, and none after them."""
        return False

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

    @property
    def num_expert_params(self) -> int:
        """Parameters of experts that a router chooses from."""
        return sum(
            kind.num_layers * linear.num_params
            for kind in self.layer_kinds
            for role, linear in kind.linears.items()
            if role in EXPERT_ROLES
        )

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
        num_bytes = sum(form.num_bytes(count) + 4 * self._num_orders(form, count) for form, count in kept)
        entry = methods.METHODS[quantization]
        if device in entry.forms:
            weights = self._linear_weights
            total = sum(weights.values())
            rest = total - sum(count for form, count in self.forms if form.is_kept_on(device))
            counts: dict[GroupForm, int] = {}
            for role, count in weights.items():
                rounded = entry.form(device, role)
                counts[rounded] = counts.get(rounded, 0) + count * rest // total
            num_kept += rest
            num_bytes += sum(rounded.num_bytes(count) for rounded, count in counts.items())
            if not self.vocabulary_forms and (form := entry.head_form(device)) is not None:
                head = math.prod(self.vocabulary)
                num_kept, num_bytes = num_kept + head, num_bytes + form.num_bytes(head)
        num_wide = self._num_floats + (self._norm_params if self.unit_offset_norms else 0)
        return (self.num_params - num_kept) * itemsize + num_wide * (4 - itemsize) + num_bytes

    def keeps_bits_on(self, device: str) -> bool:
        """True if the files are quantised, in forms whose products "cpu" or "cuda" has."""
        return bool(self.forms) and all(form.is_kept_on(device) for form, _ in self.forms)

    def _num_orders(self, form: GroupForm, count: int) -> int:
        """Columns with an order of their own, of so many weights of a form: each projection has its order."""
        if not form.ordered_in:
            return 0
        pairs = [
            (kind.num_layers, linear.out_sizes)
            for kind in self.layer_kinds
            for role, linear in kind.linears.items()
            if linear.in_size == form.ordered_in and role not in EXPERT_ROLES
        ]
        num_out = sum(num_layers * sum(sizes) for num_layers, sizes in pairs)
        return count * sum(num_layers * len(sizes) for num_layers, sizes in pairs) // num_out

    @property
    def _linear_weights(self) -> dict[str, int]:
        """Those that `EngineArgs.quantization` quantises, by role: all but routers, and the gates of shared experts."""
        counts: dict[str, int] = {}
        for kind in self.layer_kinds:
            for role, linear in kind.linears.items():
                if role not in ("router", "shared_gate"):
                    counts[role] = counts.get(role, 0) + kind.num_layers * math.prod(linear.shape)
        return counts

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
            if first in kind.linears
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
        sizes = (self.num_kv_heads, self.head_dim), self.full_kv_heads
        return group_layers(self.num_layers, self.windows, self.recurrent_layers, sizes)

    @property
    def full_kv_heads(self) -> tuple[int, int]:
        """K/V heads of a layer without a sliding window, and their size."""
        return self.num_kv_heads, self.head_dim

    @property
    def kv_heads(self) -> set[tuple[int, int]]:
        """K/V heads of any layer, and their size."""
        return {(self.num_kv_heads, self.head_dim), self.full_kv_heads}

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
