"""Tiny models with random weights in Transformers' format, and `PagedRun` to compute their logits.

Transformers' initial weights hide bugs: biases are 0, norms are 1, attention is almost uniform. Here no bias is 0, all
norms differ, and attention is far from uniform.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from octavo.checkpoint.resolve import open_checkpoint
from octavo.integers import cdiv
from octavo.kernels import reference
from octavo.kernels.metadata import RaggedBatch
from octavo.models import config as model_config
from octavo.models.loading.loader import Model, load_model
from octavo.models.spec import ModelSpec

VOCAB_SIZE = 97

# Odd sizes, so that a transposed or swapped dimension does not fit.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64},
    "mistral": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "hidden_size": 72,
        "sliding_window": 9,
    },
    "qwen2": {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 112},  # head_dim 8
    "qwen3": {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 24, "hidden_size": 40},
    "gemma3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "hidden_size": 56,
        "query_pre_attn_scalar": 19,
        "sliding_window": 6,
        "sliding_window_pattern": 3,  # two layers with a sliding window, then one without
    },
    "gpt2": {"n_embd": 60, "n_head": 3, "n_inner": 37},  # head_dim 20
    "opt": {"num_attention_heads": 7, "hidden_size": 56, "ffn_dim": 37},  # head_dim 8
}


def make_tiny_checkpoint(kind: str, directory: Path, *, seed: int = 0, **sizes: Any) -> Path:
    """Write a random float32 model of a kind of `KINDS` to a new directory -> the directory.

    `sizes` are values of config.json that override those of the kind.
    """
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
        "opt": (transformers.OPTConfig, transformers.OPTForCausalLM),
    }[kind]
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "intermediate_size": 37,
        "num_hidden_layers": 3,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "dtype": "float32",
    }
    model = model_class(config_class(**(defaults | KINDS[kind] | sizes)))
    randomise(model, seed)
    model.save_pretrained(directory)
    return directory


def randomise(model: Any, seed: int) -> None:
    """Set all weights to random values that keep the activations of all layers at a similar scale."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                is_conv1d = type(model.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"
                parameter.copy_(noise * 1.5 / parameter.shape[0 if is_conv1d else 1] ** 0.5)
            elif name.endswith("weight"):  # a norm; Gemma's weights are added to 1
                parameter.copy_(0.2 * noise + (0 if "Gemma" in type(model).__name__ else 1))
            else:
                parameter.copy_(0.3 * noise)


def transformers_logits(directory: Path, prompts: Sequence[Sequence[int]], **kwargs: Any) -> list[Tensor]:
    """Transformers' float32 logits, one sequence at a time -> [num_tokens, vocab_size] each."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", **kwargs
    )
    with torch.inference_mode():
        return [model(torch.tensor([list(prompt)])).logits[0] for prompt in prompts]


def read_spec(path: Path) -> ModelSpec:
    return model_config.read_spec(open_checkpoint(path))


def load_tiny(path: Path, ops: ModuleType = reference, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Model:
    """Load the model of a directory or a .gguf file on the CPU."""
    return load_model(open_checkpoint(path), read_spec(path), dtype=dtype, device="cpu", ops=ops, **kwargs)


def num_bytes(model: Model) -> int:
    """Bytes of all weights before they are packed; a tied head counts once."""
    return sum(weight.tensor.nbytes for weight in model.weights())


def random_prompts(*lengths: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def empty_pool(
    spec: ModelSpec, num_blocks: int, block_size: int, *, dtype: torch.dtype = torch.float32, tp_size: int = 1
) -> Tensor:
    """A KV cache full of NaN: reading an unwritten slot makes the result NaN."""
    shape = (num_blocks + 1, spec.num_layers, 2, spec.num_kv_heads // tp_size, block_size, spec.head_dim)
    return torch.full(shape, torch.nan, dtype=dtype)


class PagedRun:
    """Computes the logits of several sequences, with any number of tokens of each in a step.

    The blocks of a sequence are in random order all over the KV cache.
    """

    def __init__(
        self, decoder: Model, prompts: Sequence[Sequence[int]], *, block_size: int, seed: int = 0, tp_size: int = 1
    ) -> None:
        self.decoder = decoder
        self.prompts = prompts
        self.block_size = block_size
        self.num_computed = [0] * len(prompts)
        counts = [cdiv(len(prompt), block_size) for prompt in prompts]
        num_blocks = sum(counts) + 3
        ids = random.Random(seed).sample(range(1, num_blocks + 1), num_blocks)
        self.block_tables = [[ids.pop() for _ in range(count)] for count in counts]
        dtype = decoder.vocabulary.head.weight.dtype
        self.kv = empty_pool(decoder.spec, num_blocks, block_size, dtype=dtype, tp_size=tp_size)

    def step(self, num_tokens: Sequence[int]) -> list[Tensor]:
        """Compute the next `num_tokens[s]` tokens of each sequence s in one call -> the logits of each sequence."""
        active = [s for s, count in enumerate(num_tokens) if count]
        if not active:
            return [torch.empty(0, self.decoder.spec.vocab_size) for _ in num_tokens]
        query_lens = [num_tokens[s] for s in active]
        before = [self.num_computed[s] for s in active]
        seq_lens = [start + count for start, count in zip(before, query_lens, strict=True)]
        flat = [t for s, a, b in zip(active, before, seq_lens, strict=True) for t in self.prompts[s][a:b]]
        tables = [self.block_tables[s][: cdiv(n, self.block_size)] for s, n in zip(active, seq_lens, strict=True)]
        batch = RaggedBatch.from_lists(query_lens, seq_lens, tables, self.block_size)
        logits = self.decoder.forward(torch.tensor(flat), batch, self.kv, torch.arange(len(flat)))
        for s, n in zip(active, seq_lens, strict=True):
            self.num_computed[s] = n
        parts = iter(logits.split(query_lens))
        return [next(parts) if count else logits[:0] for count in num_tokens]

    def run(self, chunk: int | Sequence[Sequence[int]]) -> list[Tensor]:
        """Compute all remaining tokens: at most `chunk` tokens of a sequence in a step, or by a list of steps."""
        parts: list[list[Tensor]] = [[] for _ in self.prompts]
        steps = iter(chunk) if not isinstance(chunk, int) else None
        while any(len(p) > n for p, n in zip(self.prompts, self.num_computed, strict=True)):
            left = [len(p) - n for p, n in zip(self.prompts, self.num_computed, strict=True)]
            limits = [chunk] * len(left) if isinstance(chunk, int) else next(steps)  # type: ignore[arg-type]
            for s, logits in enumerate(self.step([min(a, b) for a, b in zip(left, limits, strict=True)])):
                parts[s].append(logits)
        return [torch.cat(p) for p in parts]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    """Assert that the largest error is at most `tolerance` times the largest logit."""
    assert actual.shape == expected.shape
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"off by {error:.2e} of the largest logit, {tolerance:.0e} is allowed"


# -- GGUF -------------------------------------------------------------------------------------------------------------

GGUF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA3_PARTS = GGUF_PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, parts: dict[str, str]) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, kind = name.rpartition(".")
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{parts[part]}.{kind}"


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The order of Q and K rows in llama.cpp's files: the two rows of a rotary pair are neighbours."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_tiny_gguf(
    directory: Path,
    path: Path,
    *,
    quantisation: str = "F32",
    arch: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write the safetensors model as a GGUF file; matrices whose row size is a multiple of 32 are quantised."""
    config = json.loads((directory / "config.json").read_text())
    arch = arch or GGUF_ARCHITECTURES[config["architectures"][0]]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    for key, value in (metadata or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        rows = tensor.numpy()
        stored_name = gguf_name(name, GEMMA3_PARTS if arch == "gemma3" else GGUF_PARTS)
        if arch == "llama" and "q_proj" in name:
            rows = interleave(rows, heads)
        if arch == "llama" and "k_proj" in name:
            rows = interleave(rows, kv_heads)
        if arch == "gemma3" and name.endswith("norm.weight"):
            rows = rows + 1
        kind = gguf.GGMLQuantizationType[quantisation]
        if rows.ndim == 2 and kind != gguf.GGMLQuantizationType.F32 and rows.shape[1] % 32 == 0:
            writer.add_tensor(stored_name, gguf.quants.quantize(rows, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored_name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
