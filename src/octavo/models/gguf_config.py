"""Translates the metadata of a GGUF file to the keys of config.json. Defaults and precedence are llama.cpp's."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from octavo.checkpoint.gguf import GGUFFile
from octavo.checkpoint.keys import KeyTable, KeyUse
from octavo.errors import CheckpointError, UnsupportedModelError, cut
from octavo.models import registry
from octavo.models.config_keys import config_keys
from octavo.models.family import Family

# fmt: off
READ = (
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "expert_count",
    "expert_used_count",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
)
"""Keys that are read for every architecture, after the prefix "architecture."."""
INERT = ("rope.scaling.finetuned", "tensor_data_layout", "pooling_type", "decoder_start_token_id",
         "attention.layer_norm_epsilon")
REFUSED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,),
    "attention.output_scale": (1,), "attention.recurrent_layers": (), "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,), "attention.sliding_window_pattern": (), "attention.temperature_length": (),
    "attention.temperature_scale": (), "attn_logit_softcapping": (0,), "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0, 1), "expert_gating_func": (0, 1), "expert_group_count": (0, 1), "expert_shared_count": (0,),
    "expert_weights_norm": (True,), "expert_weights_scale": (0, 1), "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1), "nextn_predict_layers": (0,), "residual_scale": (0, 1), "rope.dimension_count_swa": (),
    "rope.dimension_sections": (), "rope.freq_base_swa": (), "rope.scaling.alpha": (),
    "rope.scaling.yarn_attn_factor": (1,), "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0,), "swin_norm": (False,), "use_parallel_residual": (False,),
}
# fmt: on


def gguf_keys(arch: str, family: Family) -> KeyTable:
    """The table of an architecture's metadata, apart from the tokenizer's, which its own reader checks."""
    prefixed = [f"{arch}.{key}" for key in (*READ, *family.gguf.keys)]
    return KeyTable(
        read=("general.architecture", "general.alignment", "general.sampling.*", "split.*", "tokenizer.*", *prefixed),
        inert=("GGUF.*", "general.*", "quantize.*", *(f"{arch}.{key}" for key in INERT)),
        refused={
            "general.type": ("model",),
            **{f"{arch}.{key}": neutral for key, neutral in REFUSED.items() if key not in family.gguf.keys},
        },
    )


def gguf_key_use(reader: GGUFFile, name: str) -> KeyUse:
    """What becomes of the metadata of a file whose spec could be read, for `octavo doctor`."""
    arch = reader.value("general.architecture")
    keys = gguf_keys(arch, registry.find_family(_entries(reader, arch)[arch].architectures[0]))
    return keys.sort((key for key in reader.fields if not key.startswith("tokenizer.")), name)


def read_gguf_config(reader: GGUFFile, name: str) -> dict[str, Any]:
    """The metadata in the keys of config.json. `name` is the file name for messages."""
    arch = reader.value("general.architecture")
    entries = _entries(reader, arch)
    if arch not in entries:
        kind = " with experts" if reader.value(f"{arch}.expert_count", 0) else ""
        raise UnsupportedModelError(
            f"{name} has the architecture {cut(repr(arch))}{kind}; supported in GGUF files{kind}: {', '.join(entries)}"
        )
    entry = entries[arch]
    tensors = {tensor.name for tensor in reader.tensors}
    parts = {re.sub(r"^blk\.\d+\.", "", tensor) for tensor in tensors}

    def get(key: str, default: Any = None) -> Any:
        value = reader.value(f"{arch}.{key}", default)
        if value is None:
            raise CheckpointError(f"{name} lacks the metadata {arch}.{key}; convert the model again")
        return value

    family = registry.find_family(entry.architectures[0])
    keys = gguf_keys(arch, family)
    # Only refused keys need their values: token lists take long to read.
    values = {key: reader.value(key) if key in keys.refused else None for key in reader.fields}
    keys.check(values, name, "convert the model again without it, or use its safetensors files")
    num_heads = get("attention.head_count")
    if not isinstance(num_heads, int) or num_heads < 1:
        raise UnsupportedModelError(f"{name} has {num_heads} attention heads; one positive number is supported")
    head_dim = get("attention.key_length", get("embedding_length") // num_heads)
    if not isinstance(head_dim, int) or head_dim < 1 or get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{name}: {arch}.attention.key_length and value_length must be one positive number")
    config: dict[str, Any] = {
        "architectures": [entry.architectures[0]],
        "model_type": entry.model_types[0],
        "vocab_size": _vocab_size(reader, arch, name),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length", family.defaults.get("intermediate_size")),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "partial_rotary_factor": get("rope.dimension_count", head_dim) / head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(reader, arch, name, get),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "attn_q.bias" in parts,
        "attention_output_bias": "attn_output.bias" in parts,
        "attention_k_eq_v": sum(tensor.endswith(".attn_v.weight") for tensor in tensors) < get("block_count"),
        "mlp_bias": "ffn_up.bias" in parts,
        "hidden_act": "silu",
        "dtype": _dtype(reader),
        "eos_token_id": reader.value("tokenizer.ggml.eos_token_id"),
        "bos_token_id": reader.value("tokenizer.ggml.bos_token_id"),
    }
    config |= family.gguf.config(config, get)
    return {key: value for key, value in config.items() if config_keys(family).reads(key)}


def _entries(reader: GGUFFile, arch: str) -> dict[str, registry.Entry]:
    return registry.gguf_entries(has_experts=bool(reader.value(f"{arch}.expert_count", 0)))


def stored_kinds(reader: GGUFFile, num_layers: int) -> tuple[Counter[str], Counter[str]]:
    """The types of a file's quantised weights, the most frequent first, and the number of weights in each.

    The first counter is of layers, the second of embeddings and head.
    """
    kinds, of_vocabulary = Counter[str](), Counter[str]()
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in ("F32", "F16", "BF16") and not is_beyond(tensor.name, num_layers):
            counter = kinds if tensor.name.startswith("blk.") else of_vocabulary
            counter[tensor.tensor_type.name] += int(np.prod(tensor.shape))
    return Counter(dict(kinds.most_common())), of_vocabulary


def is_beyond(name: str, num_layers: int) -> bool:
    """True for a tensor of a layer after the last one, such as those that predict several tokens."""
    match = re.match(r"blk\.(\d{1,9})\.", name)
    return match is not None and int(match[1]) >= num_layers


def _vocab_size(reader: GGUFFile, arch: str, name: str) -> int:
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    size = len(tokens.data) if tokens is not None else reader.value(f"{arch}.vocab_size")
    if not size:
        raise CheckpointError(f"{name} holds no token list and no {arch}.vocab_size; convert the model again")
    return int(size)


def _dtype(reader: GGUFFile) -> str:
    """The dtype of an unquantised file; "bfloat16" for a quantised one, whose weights are decoded to it."""
    names = {t.tensor_type.name for t in reader.tensors if t.name.endswith("attn_q.weight")}
    floats = {"F32": "float32", "F16": "float16"}
    return floats.get(names.pop(), "bfloat16") if len(names) == 1 else "bfloat16"


def _rope_scaling(reader: GGUFFile, arch: str, name: str, get: Callable[..., Any]) -> dict[str, Any] | None:
    """llama.cpp scales by a factor of any file without a type, linearly. Its YaRN multiplies `attn_factor` with the
    paper's temperature; it multiplies by `attn_factor` without YaRN, too, which is refused."""
    kind, factor = get("rope.scaling.type", "linear"), get("rope.scaling.factor", get("rope.scale_linear", 0.0))
    is_scaled, attention = kind != "none" and factor not in (0.0, 1.0), get("rope.scaling.attn_factor", 1.0)
    if attention != 1.0 and not (is_scaled and kind == "yarn"):
        raise UnsupportedModelError(f"{name}: {arch}.rope.scaling.attn_factor {attention} needs YaRN; convert it again")
    factors = next((t.data for t in reader.tensors if t.name == "rope_freqs.weight"), None)
    if factors is not None:
        if is_scaled:
            problem = f"{name} has both rope_freqs.weight and a factor in {arch}.rope.scaling"
            raise UnsupportedModelError(f"{problem}; convert the model again without the latter")
        divisors = np.asarray(factors, dtype=np.float64).reshape(-1)
        return _proportional_scaling(divisors) or _llama3_scaling(reader, arch, name, divisors)
    if not is_scaled:
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": get("rope.scaling.original_context_length", get("context_length")),
            "beta_fast": get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": get("rope.scaling.yarn_beta_slow", 1.0),
            "attention_factor": attention * (1.0 + 0.1 * math.log(max(factor, 1.0))),
        }
    return scaling


def _proportional_scaling(divisors: np.ndarray) -> dict[str, Any] | None:
    """RoPE of Gemma 4: the first pairs have a divisor of 1, and the others, which are not rotated, of 1e30."""
    num_rotated = int((divisors == 1.0).sum())
    if num_rotated == len(divisors) or not (divisors[:num_rotated] == 1.0).all() or divisors[num_rotated:].min() < 1e20:
        return None
    part = (num_rotated + 0.5) / len(divisors)  # readers round down to whole pairs
    return {"rope_type": "proportional", "partial_rotary_factor": part}


def _llama3_scaling(reader: GGUFFile, arch: str, name: str, factors: np.ndarray) -> dict[str, Any]:
    """RoPE scaling of Llama 3.1 and later. GGUF stores each frequency's divisor, [head_dim / 2], not the rule that
    produced it.

    The rule's constants have been the same since Llama 3.1 except `factor`, the largest divisor. They are used only if
    they reproduce the divisors in the file.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max(initial=0.0)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = reader.value(f"{arch}.rope.freq_base", 10000.0)
    wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    blend = np.clip((8192 / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)  # 1: unchanged, 0: divided by `factor`
    if not factors.size or not np.allclose(1.0 / ((1 - blend) / scaling["factor"] + blend), factors, rtol=1e-3):
        problem = f"{name} scales RoPE frequencies by an unsupported rule, not Llama 3's or Gemma 4's"
        raise UnsupportedModelError(f"{problem}; use its safetensors files")
    return scaling
