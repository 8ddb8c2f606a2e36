"""Tiny models with random weights in Transformers' format, and `PagedRun` to compute their logits.

Transformers' initial weights hide bugs: biases are 0, norms are 1, attention is almost uniform. Here no bias is 0, all
norms differ, and attention is far from uniform.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.checkpoint.resolve import open_checkpoint
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.integers import cdiv
from octavo.kernels import reference
from octavo.kernels.metadata import RaggedBatch
from octavo.models import config as model_config
from octavo.models.family import Family
from octavo.models.loading.gguf_groups import KINDS as KINDS_OF_BLOCKS
from octavo.models.loading.loader import Model, load_model
from octavo.models.registry import find_family
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
    "gemma4": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size": 40,
        "num_hidden_layers": 5,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")],
        "sliding_window": 6,
        "final_logit_softcapping": 7.0,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 3,
        "moe_intermediate_size": 20,
    },
    "gpt2": {"n_embd": 60, "n_head": 3, "n_inner": 37},  # head_dim 20
    "opt": {"num_attention_heads": 7, "hidden_size": 56, "ffn_dim": 37},  # head_dim 8
    "phi3": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 96,  # head_dim 16, of which 12 are rotated
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
            "long_factor": [1.0, 1.4, 2.2, 4.0, 7.0, 11.0],
        },
    },
    "olmo2": {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 72},  # head_dim 24
    "smollm3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "no_rope_layers": [1, 0, 1],
        "tie_word_embeddings": False,
    },
    "granite": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 48,  # head_dim 12
        "embedding_multiplier": 3.7,
        "attention_multiplier": 0.21,
        "residual_multiplier": 0.31,
        "logits_scaling": 1.7,
    },
    "starcoder2": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 48,  # head_dim 8
        "sliding_window": 11,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
    },
    "mixtral": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "hidden_size": 72,
        "intermediate_size": 36,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "hidden_size": 40,
        "intermediate_size": 36,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 9,
        "swiglu_limit": 2.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "internlm2": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
    "internlm3": {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 36, "head_dim": 20},
}


HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 48,
        "head_dim": 24,  # of which 6 are rotated
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 10,
    },
    "qwen3_next": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 48,
        "head_dim": 24,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "mlp_only_layers": [2],
    },
    "qwen3_5_moe": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 48,
        "head_dim": 24,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 10,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
    },
}
"""Kinds with recurrent layers, which some features do not support."""


def make_tiny_checkpoint(kind: str, directory: Path, *, seed: int = 0, **sizes: Any) -> Path:
    """Write a random float32 model of a kind of `KINDS` or `HYBRIDS` to a new directory -> the directory.

    `sizes` are values of config.json that override those of the kind.
    """
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
        "gemma4": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
        "opt": (transformers.OPTConfig, transformers.OPTForCausalLM),
        "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
        "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
        "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
        "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM),
        "starcoder2": (transformers.Starcoder2Config, transformers.Starcoder2ForCausalLM),
        "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
        "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
        "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
        "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
        "internlm2": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "internlm3": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
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
    model = model_class(config_class(**(defaults | {**KINDS, **HYBRIDS}[kind] | sizes)))
    randomise(model, seed)
    model.save_pretrained(directory)
    if kind in INTERNLM:
        _rewrite_as_internlm(directory, *INTERNLM[kind])
    return directory


INTERNLM = {"internlm2": ("InternLM2ForCausalLM", False), "internlm3": ("InternLM3ForCausalLM", True)}
INTERNLM2_NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def transformers_directory(directory: Path) -> Path:
    """The same model for Transformers, which has no InternLM 2 and 3."""
    twin = directory / "llama"
    return twin if twin.exists() else directory


def _rewrite_as_internlm(directory: Path, architecture: str, is_third: bool) -> None:
    """Move a Llama to a subdirectory, and write the same weights as InternLM."""
    twin = directory / "llama"
    twin.mkdir()
    for name in ("config.json", "model.safetensors"):
        (directory / name).rename(twin / name)
    config = json.loads((twin / "config.json").read_text())
    tensors = load_file(twin / "model.safetensors")
    bias = config.pop("attention_bias")
    config |= {"architectures": [architecture], "model_type": architecture.lower().removesuffix("forcausallm")}
    config |= {"bias": bias, "qkv_bias": bias} if is_third else {"bias": bias}
    if not is_third:
        groups = config["num_key_value_heads"]
        for name in [name for name in tensors if "q_proj" in name]:
            parts = [tensors.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
            grouped = [part.unflatten(0, (groups, -1)) for part in parts]
            merged = torch.cat(grouped, dim=1).flatten(0, 1)  # [groups, (queries + 2) * head_dim, ...]
            tensors[name.replace("self_attn.q_proj", "attention.wqkv")] = merged
        for old, new in INTERNLM2_NAMES.items():
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def randomise(model: Any, seed: int) -> None:
    """Set all weights to random values that keep the activations of all layers at a similar scale."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1 and not name.endswith("_bias"):
                is_conv1d = type(model.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"
                is_transposed = type(model).__name__.startswith("GptOss")  # the weights of its experts
                inputs = 0 if is_conv1d else 2 if "experts" in name and not is_transposed else 1
                parameter.copy_(noise * 1.5 / parameter.shape[inputs] ** 0.5)
            elif name.endswith(("weight", "scale")):  # a norm; those of some models are added to 1
                adds = type(model).__name__.startswith(("Gemma3", "Qwen3_5", "Qwen3Next")) and "linear_attn" not in name
                parameter.copy_(0.2 * noise + (0 if adds else 1))
            else:
                parameter.copy_(0.3 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn(1, generator=generator))


def transformers_logits(directory: Path, prompts: Sequence[Sequence[int]], **kwargs: Any) -> list[Tensor]:
    """Transformers' float32 logits, one sequence at a time -> [num_tokens, vocab_size] each."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        transformers_directory(directory), dtype=torch.float32, attn_implementation="eager", **kwargs
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
    return sum(weight.target.nbytes for weight in model.weights())


class SmallBatchPath(ModuleType):
    """The reference, with the small-batch path for up to 6 tokens."""

    def __init__(self) -> None:
        super().__init__("small batches")
        self.__dict__.update(vars(reference))
        self.max_small_batch_tokens = lambda weight: 6


def random_prompts(*lengths: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def empty_pool(
    spec: ModelSpec, num_blocks: int, block_size: int, *, dtype: torch.dtype = torch.float32, tp_size: int = 1
) -> Tensor:
    """A KV cache full of NaN: reading an unwritten slot makes the result NaN."""
    kv = KVCacheSpec.of(spec.of_rank(tp_size), block_size, str(dtype).removeprefix("torch."))
    return torch.full(kv.pool_shape(num_blocks), torch.nan, dtype=dtype)


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
        dtype = decoder.vocabulary.head.weight.dtype
        block_bytes = empty_pool(decoder.spec, 0, block_size, dtype=dtype, tp_size=tp_size).nbytes
        state_blocks = cdiv(decoder.spec.of_rank(tp_size).state_size * max(4, dtype.itemsize), block_bytes)
        num_blocks = sum(counts) + 2 * len(prompts) * state_blocks + 3
        ids = random.Random(seed).sample(range(1, num_blocks + 1), num_blocks)
        self.block_tables = [[ids.pop() for _ in range(count)] for count in counts]
        states = [[[ids.pop() for _ in range(state_blocks)] for _ in prompts] for _ in range(2)]
        self.states = torch.tensor(states, dtype=torch.int32) if state_blocks else None  # written by turns
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
        if self.states is not None:
            reads, tables = self.states[:, active]
            batch = replace(batch, state_tables=tables, state_reads=reads)
            self.states[:, active] = torch.stack((tables, reads))
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
    "Gemma4ForCausalLM": "gemma4",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "MixtralForCausalLM": "llama",
    "GptOssForCausalLM": "gpt-oss",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
}
GGUF_PARTS = {
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
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
GEMMA4_PARTS = GEMMA3_PARTS | {
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    **{f"post_feedforward_layernorm_{i}": f"post_ffw_norm_{i}" for i in (1, 2)},
    "layer_scalar": "layer_output_scale.weight",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
GPT_OSS_PARTS = GGUF_PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.router": "ffn_gate_inp",
}
HYBRID_PARTS = GGUF_PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    **{f"linear_attn.in_proj_{name}": f"ssm_{part}" for name, part in (("a", "alpha"), ("b", "beta"), ("ba", "ba"))},
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "nextn.eh_proj": "nextn.eh_proj",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    **{f"linear_attn.{name}": f"ssm_{part}" for name, part in (("conv1d", "conv1d"), ("norm", "norm"))},
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
PARTS_OF_ARCH = {"gemma3": GEMMA3_PARTS, "gemma4": GEMMA4_PARTS, "gpt-oss": GPT_OSS_PARTS}
PARTS_OF_ARCH |= dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), HYBRID_PARTS)


def gguf_name(name: str, parts: dict[str, str]) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, kind = name.rpartition(".")
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    _, _, layer, part = name.split(".", 3)
    if part in parts:
        return f"blk.{layer}.{parts[part]}"
    return f"blk.{layer}.{parts[part.rpartition('.')[0]]}.{kind}"


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The order of Q and K rows in llama.cpp's files: the two rows of a rotary pair are neighbours."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def random_blocks(kind: str, rows: np.ndarray, *, scale: float = 0.01) -> np.ndarray:
    """Random blocks for a matrix, [num_rows, bytes of a row]; their scales and minima are around `scale`."""
    rng = np.random.default_rng(len(rows) + rows.shape[1])
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (len(rows) * rows.shape[1] // block_size, block_bytes), dtype=np.uint8)
    start = 0
    for name, size in KINDS_OF_BLOCKS[kind].fields:
        if name == "e":
            blocks[:, start] = rng.integers(100, 128, len(blocks))
        if name in ("d", "m", "dmin"):
            values = rng.uniform(-scale, scale, len(blocks)).astype(np.float16)
            blocks[:, start : start + 2] = values.view(np.uint8).reshape(-1, 2)
        start += size
    return blocks.reshape(len(rows), -1)


def split_merged(tensors: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Merged weights as those of each expert. Gate and up are halves of the outputs, or the even and odd ones."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.partition("experts.")
        if "_proj" not in part or part[0].isdigit():
            split[name] = tensor
            continue
        role, _, kind = part.partition("_proj")
        for i, own in enumerate(tensor if kind or not family.experts.transposed else tensor.mT):
            for j, each in enumerate(("gate", "up") if role == "gate_up" else (role,)):
                rows = own[j::2] if family.experts.interleaved else own.chunk(2)[j]
                rows = rows if role == "gate_up" else own
                split[f"{prefix}experts.{i}.{each}_proj{kind or '.weight'}"] = rows
    return split


def merge_experts(directory: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By Transformers' names today, with the weights of all experts in one tensor, as llama.cpp has them."""
    family = find_family(json.loads((directory / "config.json").read_text())["architectures"][0])
    merged: dict[str, dict[int, Tensor]] = {}
    whole = {}
    for name, tensor in split_merged({family.tensor_name(n): t for n, t in tensors.items()}, family).items():
        name = name.replace(".sinks", ".sinks.weight")
        if match := re.fullmatch(r"(.*\.experts\.)(\d+)\.(.*)", name):
            merged.setdefault(match[1] + match[3], {})[int(match[2])] = tensor
        else:
            whole[name] = tensor
    return whole | {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in merged.items()}


def add_hybrid_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What llama.cpp's converter writes for models with recurrent layers."""
    num_heads = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(num_heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * num_heads)
    writer.add_full_attention_interval(4)
    if config["model_type"] != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def hybrid_tensors(
    config: dict[str, Any], tensors: dict[str, Tensor], arch: str, *, merged_qkvz: bool
) -> dict[str, Tensor]:
    """What llama.cpp's converter changes in the numbers and their order, by Transformers' names."""
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    key_size = 2 * num_keys * key_dim

    def tiled(tensor: Tensor, head_dim: int, first: int = 0) -> Tensor:
        """Heads of V, which lie key head by key head from row `first` on, in tiled order."""
        heads = tensor[first:].unflatten(0, (num_keys, num_values // num_keys, head_dim))
        return torch.cat([tensor[:first], heads.transpose(0, 1).flatten(0, 2)])

    changed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = name.rpartition("linear_attn.")[2].removesuffix(".weight")
        if arch != "qwen3next":
            if part in ("in_proj_qkv", "conv1d"):
                tensor = tiled(tensor, value_dim, key_size)
            elif part == "in_proj_z":
                tensor = tiled(tensor, value_dim)
            elif part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
                tensor = tiled(tensor, 1)
            elif part == "out_proj":
                tensor = tiled(tensor.T, value_dim).T.contiguous()
        if part == "in_proj_qkvz" and not merged_qkvz:
            parts = tensor.unflatten(0, (num_keys, -1))  # of each key head
            inner = value_dim * num_values // num_keys
            *qkv, z = (each.flatten(0, 1) for each in parts.split([key_dim, key_dim, inner, inner], dim=1))
            changed[name.replace("qkvz", "qkv")], changed[name.replace("qkvz", "z")] = torch.cat(qkv), z
            continue
        if part == "A_log":
            tensor = -tensor.exp()
        elif part == "conv1d":
            tensor = tensor.squeeze(1)
        elif name.endswith("norm.weight") and part != "norm":
            tensor = tensor + 1
        elif name.endswith("shared_expert_gate.weight"):
            tensor = tensor.squeeze(0)
        changed[name] = tensor
    return changed


def add_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What llama.cpp's converter writes for Gemma 4 only."""
    kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
    own, rope = config["head_dim"], config["rope_parameters"]
    full = config | config["per_layer_config"].get(str(kinds.index(False)), {})
    writer.add_head_count_kv([(config if kind else full)["num_key_value_heads"] for kind in kinds])
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_rope_dimension_count(full["head_dim"])
    writer.add_key_length_swa(own)
    writer.add_value_length_swa(own)
    writer.add_rope_dimension_count_swa(own)
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_sliding_window_pattern(kinds)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    num_rotated = int(full["head_dim"] * rope["full_attention"]["partial_rotary_factor"] / 2)
    divisors = [1.0] * num_rotated + [1e30] * (full["head_dim"] // 2 - num_rotated)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def write_tiny_gguf(
    directory: Path,
    path: Path,
    *,
    quantisation: str | Callable[[str], str] = "F32",
    arch: str | None = None,
    metadata: dict[str, Any] | None = None,
    merged_qkvz: bool = False,
) -> Path:
    """Write the safetensors model as a GGUF file; matrices whose rows are whole blocks are quantised.

    quantisation: a GGUF type, or one for each of llama.cpp's names; K quants have random blocks
    merged_qkvz: of Qwen3-Next, as llama.cpp's first converter did
    """
    config = json.loads((directory / "config.json").read_text())
    arch = arch or GGUF_ARCHITECTURES[config["architectures"][0]]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    rope = config["rope_parameters"]
    if arch == "gemma4":
        add_gemma4(writer, config)
    else:
        writer.add_head_count_kv(kv_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch == "gpt-oss" and rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch in ("gemma3", "gemma4", "gpt-oss"):
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
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch in ("qwen3moe", "gpt-oss", "qwen3next", "qwen35moe"):
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    tensors = load_file(directory / "model.safetensors")
    if "linear_num_key_heads" in config:
        add_hybrid_metadata(writer, config)
        tensors = hybrid_tensors(config, tensors, arch, merged_qkvz=merged_qkvz)
    for name, tensor in (tensors if arch == "gemma4" else merge_experts(directory, tensors)).items():
        rows = tensor.numpy()
        stored_name = gguf_name(name, PARTS_OF_ARCH.get(arch, GGUF_PARTS))
        if arch == "llama" and "q_proj" in name:
            rows = interleave(rows, heads)
        if arch == "llama" and "k_proj" in name:
            rows = interleave(rows, kv_heads)
        if arch == "gemma3" and name.endswith("norm.weight"):
            rows = rows + 1
        chosen = quantisation if isinstance(quantisation, str) else quantisation(stored_name)
        kind = gguf.GGMLQuantizationType[chosen]
        if rows.ndim > 1 and chosen != "F32" and rows.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            flat = rows.reshape(-1, rows.shape[-1])
            blocks = random_blocks(chosen, flat) if chosen.endswith("_K") else gguf.quants.quantize(flat, kind)
            blocks = blocks.reshape(*rows.shape[:-1], -1)
            writer.add_tensor(stored_name, blocks, raw_dtype=kind)
        else:
            writer.add_tensor(stored_name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
