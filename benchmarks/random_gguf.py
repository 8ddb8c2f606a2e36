"""GGUF files with random weights in the shapes of published models, for llama.cpp and Octavo alike.

A file has no vocabulary: prompts are token ids. Matrices are random blocks of one type, whose numbers have the size of
1 / sqrt(inputs); norms are 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType


class Shape(NamedTuple):
    """metadata: of the architecture, without its prefix    tensors: name -> shape, as in PyTorch"""

    arch: str
    metadata: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]


def _head(vocab_size: int, hidden: int, *, is_tied: bool) -> dict[str, tuple[int, ...]]:
    head = {} if is_tied else {"output": (vocab_size, hidden)}
    return {"token_embd": (vocab_size, hidden), "output_norm": (hidden,), **head}


def _attention(
    layer: str, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, *, gated: bool = False
) -> dict[str, tuple[int, ...]]:
    return {
        f"{layer}attn_q": ((1 + gated) * num_heads * head_dim, hidden),
        f"{layer}attn_k": (num_kv_heads * head_dim, hidden),
        f"{layer}attn_v": (num_kv_heads * head_dim, hidden),
        f"{layer}attn_output": (hidden, num_heads * head_dim),
        f"{layer}attn_q_norm": (head_dim,),
        f"{layer}attn_k_norm": (head_dim,),
    }


def qwen3_30b_a3b(num_layers: int) -> Shape:
    """Some of the 48 layers of Qwen3-30B-A3B."""
    hidden, inner, num_experts, vocab_size = 2048, 768, 128, 151936
    tensors = _head(vocab_size, hidden, is_tied=False)
    for layer in (f"blk.{i}." for i in range(num_layers)):
        tensors |= _attention(layer, hidden, 32, 4, 128)
        tensors |= {f"{layer}attn_norm": (hidden,), f"{layer}ffn_norm": (hidden,)}
        tensors |= {f"{layer}ffn_gate_inp": (num_experts, hidden)}
        tensors |= {f"{layer}ffn_{part}_exps": (num_experts, inner, hidden) for part in ("gate", "up")}
        tensors |= {f"{layer}ffn_down_exps": (num_experts, hidden, inner)}
    metadata = {
        "context_length": 40960,
        "embedding_length": hidden,
        "block_count": num_layers,
        "feed_forward_length": 6144,
        "attention.head_count": 32,
        "attention.head_count_kv": 4,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "expert_count": num_experts,
        "expert_used_count": 8,
        "expert_feed_forward_length": inner,
        "vocab_size": vocab_size,
    }
    return Shape("qwen3moe", metadata, tensors)


def qwen35_08b() -> Shape:
    """Qwen3.5-0.8B: 18 of 24 layers are recurrent."""
    hidden, inner, num_heads, dim, vocab_size, num_layers = 1024, 3584, 16, 128, 248320, 24
    tensors = _head(vocab_size, hidden, is_tied=True)
    for i in range(num_layers):
        layer = f"blk.{i}."
        tensors |= {f"{layer}attn_norm": (hidden,), f"{layer}post_attention_norm": (hidden,)}
        tensors |= {f"{layer}ffn_{part}": (inner, hidden) for part in ("gate", "up")}
        tensors |= {f"{layer}ffn_down": (hidden, inner)}
        if i % 4 == 3:
            tensors |= _attention(layer, hidden, 8, 2, 256, gated=True)
            continue
        tensors |= {
            f"{layer}attn_qkv": (3 * num_heads * dim, hidden),
            f"{layer}attn_gate": (num_heads * dim, hidden),
            f"{layer}ssm_alpha": (num_heads, hidden),
            f"{layer}ssm_beta": (num_heads, hidden),
            f"{layer}ssm_conv1d": (3 * num_heads * dim, 4),
            f"{layer}ssm_a": (num_heads,),
            f"{layer}ssm_dt.bias": (num_heads,),
            f"{layer}ssm_norm": (dim,),
            f"{layer}ssm_out": (hidden, num_heads * dim),
        }
    metadata = {
        "context_length": 262144,
        "embedding_length": hidden,
        "block_count": num_layers,
        "feed_forward_length": inner,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.state_size": dim,
        "ssm.group_count": num_heads,
        "ssm.time_step_rank": num_heads,
        "ssm.inner_size": num_heads * dim,
        "vocab_size": vocab_size,
    }
    return Shape("qwen35", metadata, tensors)


def write(path: Path, shape: Shape, kind: str, seed: int = 0) -> Path:
    """kind: the type of matrices, BF16, Q8_0 or Q4_0; those of routers and convolutions are float32."""
    if path.exists():
        return path
    part, rng = path.with_suffix(".part"), np.random.default_rng(seed)
    writer = gguf.GGUFWriter(part, shape.arch)
    for key, value in shape.metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"{shape.arch}.{key}", value)
    writer.add_tokenizer_model("no_vocab")
    for name, size in shape.tensors.items():
        own = "F32" if len(size) == 1 or "gate_inp" in name or "conv1d" in name else kind
        rows = _random_rows(rng, name, size, own)
        whole = name if name.endswith(".bias") or name.endswith("ssm_a") else f"{name}.weight"
        writer.add_tensor(whole, rows, raw_dtype=None if own == "F32" else GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)
    return path


def _random_rows(rng: np.random.Generator, name: str, size: tuple[int, ...], kind: str) -> np.ndarray:
    """A tensor's numbers, or the bytes of its blocks: [..., bytes of a row]."""
    if len(size) == 1:
        values = (
            -rng.uniform(0.01, 1.0, size) if name.endswith("ssm_a") else np.full(size, 0.0 if "dt" in name else 1.0)
        )
        return values.astype(np.float32)
    deviation = size[-1] ** -0.5
    if kind == "F32":
        return rng.normal(0, deviation, size).astype(np.float32)
    if kind == "BF16":
        values = rng.standard_normal(size, dtype=np.float32) * np.float32(deviation)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    num_bytes, largest = {"Q8_0": (32, 127), "Q4_0": (16, 8)}[kind]
    blocks = np.empty((*size[:-1], size[-1] // 32), dtype=[("scale", "<f2"), ("values", "u1", (num_bytes,))])
    blocks["scale"] = deviation * 3**0.5 / largest  # uniform numbers of the same deviation
    blocks["values"] = np.frombuffer(rng.bytes(blocks.size * num_bytes), np.uint8).reshape(blocks["values"].shape)
    return blocks.view(np.uint8)
