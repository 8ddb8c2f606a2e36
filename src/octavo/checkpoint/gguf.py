"""Opens and checks a GGUF file, and translates its metadata to the keys of config.json.

The `gguf` library reads the format; this module adds three things. Arrays are read in one pass: the library creates
three numpy objects per string of the vocabulary, 1.9 s for 49,152 tokens. A truncated or damaged file is rejected on
opening, not in the middle of the weights. The metadata is translated, so that the rest of Octavo uses one set of keys.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from octavo.errors import CheckpointError, UnsupportedModelError, cut

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
"""`general.architecture` -> (config.json's architecture, model_type)."""

VALUE_TYPES: dict[str, type] = {
    "general.architecture": str,
    "split.count": int,
    ".embedding_length": int,
    ".rope.freq_base": Real,
    "tokenizer.ggml.model": str,
    "tokenizer.ggml.pre": str,
    "tokenizer.ggml.tokens": list,
    "tokenizer.ggml.token_type": list,
    "tokenizer.ggml.scores": list,
    "tokenizer.ggml.merges": list,
    "_token_id": int,
    "tokenizer.chat_templates": list,
}
"""Required type of the metadata whose key ends so: all that is computed with or indexed before other code checks it."""


class GGUFFile(gguf.GGUFReader):
    """`gguf.GGUFReader` that reads arrays in one pass instead of creating three numpy views per element.

    As in the library, an array field holds its element type and length before the elements, and `contents()` returns
    the elements. Here an array of numbers is one part, not one part per number.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        item_type, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kind, count, start = gguf.GGUFValueType(item_type[0]), int(length[0]), orig_offs + 12
        types = [gguf.GGUFValueType.ARRAY, kind]
        if kind == gguf.GGUFValueType.STRING:
            strings, end = self._read_strings(start, count)
            return end - orig_offs, [item_type, length, *strings], list(range(2, 2 + count)), types
        if kind not in self.gguf_scalar_to_np:  # nested arrays, which do not occur in practice
            return super()._get_field_parts(orig_offs, raw_type)
        values = self._get(start, self.gguf_scalar_to_np[kind], count)
        if len(values) != count:
            raise ValueError(f"an array of {count} values reaches past the end of the file")
        return 12 + values.nbytes, [item_type, length, values], [2] if count else [], types

    def _read_strings(self, start: int, count: int) -> tuple[list[memoryview], int]:
        """Read `count` strings from offset `start`, each a 64-bit length and its bytes: (strings, end offset)."""
        data, length_at, at = self.data.data, struct.Struct("=Q").unpack_from, start
        strings = []
        for _ in range(count):
            begin = at + 8
            at = begin + length_at(data, at)[0]
            strings.append(data[begin:at])
        if at > len(data):
            raise ValueError("a string reaches past the end of the file")
        return strings, at

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata value of `key`: a number, bool, str, or a list of them. Raises `CheckpointError` for a wrong
        type."""
        if (field := self.fields.get(key)) is None:
            return default
        try:
            value = field.contents()
        except UnicodeDecodeError as e:
            raise CheckpointError(f"the GGUF metadata {key} is not UTF-8 ({e}); convert the model again") from e
        kind = next((kind for end, kind in VALUE_TYPES.items() if key.endswith(end)), object)
        if not isinstance(value, kind):
            text = f"the GGUF metadata {key} is {value!r:.60}, it must be of type {kind.__name__}"
            raise CheckpointError(f"{text}; convert the model again")
        return value


def open_gguf(path: Path) -> GGUFFile:
    """Open and check a file. Raises `CheckpointError` with the place of the damage."""
    try:
        with np.errstate(all="raise"):  # a corrupt offset must not wrap around to a legal one
            reader = GGUFFile(path)
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e
    except Exception as e:
        # The library checks little: a damaged file raises any error of numpy, struct or an enum.
        detail = cut(e, 200) or type(e).__name__
        raise CheckpointError(
            f"{path} is not an intact GGUF file ({detail}); fetch it again, or convert the model again"
        ) from e
    _check_tensors(path, reader)
    return reader


def _check_tensors(path: Path, reader: GGUFFile) -> None:
    num_bytes = len(reader.data)
    for tensor in reader.tensors:
        num_elements = math.prod(tensor.shape.tolist())  # Python integers: the library's product wraps at 2^64
        end = tensor.data_offset + tensor.n_bytes
        if num_elements != tensor.n_elements or end > num_bytes:
            raise CheckpointError(
                f"{path} is cut short: tensor {cut(tensor.name)} of shape {tensor.shape.tolist()} ends at byte {end}, "
                f"the file at {num_bytes}; fetch it again"
            )
    if reader.value("split.count", 1) > 1:
        raise UnsupportedModelError(
            f"{path.name} is one of {reader.value('split.count')} parts; join them with llama-gguf-split --merge"
        )


def read_config(reader: GGUFFile, name: str) -> dict[str, Any]:
    """The metadata in the keys of config.json. `name` is the file name for messages."""
    arch = reader.value("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{name} has the architecture {cut(repr(arch))}; supported in GGUF files: {', '.join(ARCHITECTURES)}"
        )
    architecture, model_type = ARCHITECTURES[arch]
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
        "architectures": [architecture],
        "model_type": model_type,
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
        "eos_token_id": reader.value("tokenizer.ggml.eos_token_id"),
        "bos_token_id": reader.value("tokenizer.ggml.bos_token_id"),
    }
    if arch == "gemma3":
        config |= _gemma3_config(config, get)
    dtype = _float_dtype(reader)
    if dtype:
        config["dtype"] = dtype
    return config


def _gemma3_config(config: dict[str, Any], get: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Keys specific to Gemma 3. GGUF states neither which layers have the sliding window (all but every sixth) nor the
    scale of queries: head_dim, but hidden_size / num_heads in the largest model, recognised by its 62 layers."""
    share = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": get("attention.sliding_window", 0) or None,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": share if config["num_hidden_layers"] == 62 else config["head_dim"],
        "rope_theta": get("rope.freq_base", 1e6),
        "rope_local_base_freq": get("rope.freq_base_swa", 1e4),
    }


def read_generation_config(reader: GGUFFile) -> dict[str, Any]:
    """Ids that end an output: GGUF has separate entries for end of sequence, of turn and of message."""
    ends = [reader.value(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    eos_ids = sorted({i for i in ends if i is not None})
    return {"eos_token_id": eos_ids} if eos_ids else {}


def _vocab_size(reader: GGUFFile, arch: str, name: str) -> int:
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    size = len(tokens.data) if tokens is not None else reader.value(f"{arch}.vocab_size")
    if not size:
        raise CheckpointError(f"{name} holds no token list and no {arch}.vocab_size; convert the model again")
    return int(size)


def _float_dtype(reader: GGUFFile) -> str | None:
    """The dtype of an unquantised file; None for a quantised one."""
    names = {t.tensor_type.name for t in reader.tensors if t.name.endswith("attn_q.weight")}
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(names.pop()) if len(names) == 1 else None


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
