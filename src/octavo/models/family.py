"""What one module of `families` declares."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.models.config_values import Config
from octavo.models.spec import ModelSpec

GGUF_PARTS: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
"""llama.cpp's names of a layer's parts -> Transformers' names, in the Llama family."""


@dataclass(frozen=True, slots=True)
class MergedExperts:
    """How safetensors files store the weights of all experts of a layer in one tensor, if they do.

    transposed   weights are [num_experts, num_in, num_out]; quantised ones are not
    interleaved  rows of gate and up alternate; else the gate's come first
    """

    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class GGUFFormat:
    """How llama.cpp stores the models of a family.

    parts           llama.cpp's names of a layer's parts -> Transformers'; or the names of both with their ends
    interleaved_qk  rows of Q and K are in the order of llama.cpp's rotary embedding, which pairs neighbouring rows
    keys            metadata that `config` reads, after the prefix "architecture."
    config          (keys of config.json so far, reader of the metadata "architecture.KEY") -> further keys
    traits          fields of the spec, other than in safetensors files
    split           spec -> for a part that is several parts of the spec: for each of these, its rows
    """

    parts: Mapping[str, str] = field(default_factory=lambda: GGUF_PARTS)
    interleaved_qk: bool = False
    keys: tuple[str, ...] = ()
    config: Callable[[Config, Callable[..., Any]], Config] = lambda config, get: {}
    traits: Mapping[str, Any] = field(default_factory=dict)
    split: Callable[[Any], Mapping[str, Mapping[str, tuple[int, ...]]]] = lambda spec: {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models.

    read      (config.json with `defaults`, spec fields that all models have) -> spec; the names of tensors are in it
    keys      keys of config.json that `read` reads
    refused   keys that change the model and are not supported -> values that change nothing, see `KeyTable`
    aliases   other names of keys, which override them
    defaults  Transformers' defaults for keys that published config.json files omit. A key that is null is not omitted
    renamed   (pattern, replacement): names of tensors in older and multimodal checkpoints -> Transformers' names today
    interleaved  pattern of names of Q and K in files whose rows are in the order of neighbouring rotary pairs
    experts   how merged weights of experts are stored
    gguf      how GGUF files store it
    """

    read: Callable[[Config, Config], ModelSpec]
    keys: tuple[str, ...] = ()
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Config = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    interleaved: str = ""
    experts: MergedExperts = MergedExperts()
    gguf: GGUFFormat = GGUFFormat()

    def is_interleaved(self, stored: str) -> bool:
        return bool(self.interleaved and re.match(self.interleaved, stored))

    def rename_keys(self, config: Config) -> Config:
        """config.json without aliases."""
        plain = {key: value for key, value in config.items() if key not in self.aliases}
        return plain | {key: config[alias] for alias, key in self.aliases.items() if alias in config}

    def tensor_name(self, stored: str) -> str:
        """Transformers' name today of a tensor in a file."""
        return next((re.sub(old, new, stored) for old, new in self.renamed if re.match(old, stored)), stored)
