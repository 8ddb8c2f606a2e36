"""Translates the metadata of a GGUF file to the keys of config.json."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.checkpoint.gguf import GGUFFile
from octavo.errors import CheckpointError, UnsupportedModelError, cut
from octavo.models import registry


def read_gguf_config(reader: GGUFFile, name: str) -> dict[str, Any]:
    """The metadata in the keys of config.json. `name` is the file name for messages."""
    arch = reader.value("general.architecture")
    entries = registry.gguf_entries()
    if arch not in entries:
        raise UnsupportedModelError(
            f"{name} has the architecture {cut(repr(arch))}; supported in GGUF files: {', '.join(entries)}"
        )
    entry = entries[arch]
    tensors = {tensor.name for tensor in reader.tensors}

    def get(key: str, default: Any = None) -> Any:
        value = reader.value(f"{arch}.{key}", default)
        if value is None:
            raise CheckpointError(f"{name} lacks the metadata {arch}.{key}; convert the model again")
        # float32 on disk; the intended number is the shortest that rounds to it: 1e-05, not 9.99999974e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    if get("expert_count", 0):
        raise UnsupportedModelError(f"{name} is a mixture of {get('expert_count')} experts; use a dense model")
    num_heads = get("attention.head_count")
    if not isinstance(num_heads, int) or num_heads < 1:
        raise UnsupportedModelError(f"{name} has {num_heads} attention heads; one positive number is supported")
    config: dict[str, Any] = {
        "architectures": [entry.architectures[0]],
        "model_type": entry.model_types[0],
        "vocab_size": _vocab_size(reader, arch, name),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": get("attention.key_length", get("rope.dimension_count", get("embedding_length") // num_heads)),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(reader, arch, name),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "attention_output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "hidden_act": "silu",
        "dtype": _dtype(reader),
        "eos_token_id": reader.value("tokenizer.ggml.eos_token_id"),
        "bos_token_id": reader.value("tokenizer.ggml.bos_token_id"),
    }
    return config | registry.find_family(entry.architectures[0]).gguf.config(config, get)


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


def _rope_scaling(reader: GGUFFile, arch: str, name: str) -> dict[str, Any] | None:
    kind = reader.value(f"{arch}.rope.scaling.type", "none")
    factors = next((t.data for t in reader.tensors if t.name == "rope_freqs.weight"), None)
    if factors is not None:
        return _llama3_scaling(reader, arch, name, np.asarray(factors, dtype=np.float64).reshape(-1))
    if kind == "none":
        return None
    scaling = {
        "rope_type": kind,
        "factor": reader.value(f"{arch}.rope.scaling.factor"),
        "original_max_position_embeddings": reader.value(f"{arch}.rope.scaling.original_context_length"),
    }
    return {key: value for key, value in scaling.items() if value is not None}


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
        raise UnsupportedModelError(f"{name} scales RoPE frequencies by an unsupported rule, not Llama 3's")
    return scaling
