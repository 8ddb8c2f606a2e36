"""Sizes of models for simulations, by name or from a config.json."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from octavo.checkpoint import catalog
from octavo.core.kv_cache_spec import ITEMSIZE, KVCacheSpec
from octavo.errors import ModelNotFoundError, ParameterError
from octavo.models.config import read_spec, spec_from_config
from octavo.models.spec import DecoderSpec, LayerGroups, ModelSpec, group_layers
from octavo.models.spec.ranks import heads_per_rank


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model. `num_heads` query heads share `num_kv_heads` K/V heads of size `head_dim`. Parameters, K and V
    have one dtype; sequences have at most `max_len` tokens.

    num_head_params        of the head, which only tokens to sample from go through
    num_embedding_params   of a separate embedding table, of which a pass reads a few rows
    windows                sliding window of each layer, as of `ModelSpec`
    recurrent_layers       layers without K and V, as of `ModelSpec`
    state_size             float32 numbers of these layers' states, of a sequence
    num_expert_params      of experts, of which a layer has `num_experts`, and a token goes to `top_k`
    full_heads             K/V heads of layers without a window, and the size of all their heads; None: as of the others
    spec                   None: a model by sizes alone, of which nothing but the weights takes memory
    """

    name: str
    num_params: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int
    dtype: str = "bfloat16"
    num_head_params: int = 0
    num_embedding_params: int = 0
    windows: tuple[int, ...] = ()
    recurrent_layers: tuple[int, ...] = ()
    state_size: int = 0
    num_expert_params: int = 0
    num_experts: int = 1
    top_k: int = 1
    full_heads: tuple[int, int] | None = None
    spec: ModelSpec | None = field(default=None, repr=False)

    @classmethod
    def of(cls, name: str, spec: ModelSpec) -> ModelShape:
        vocabulary = math.prod(spec.vocabulary)
        experts = spec.experts if isinstance(spec, DecoderSpec) else None
        return cls(
            name,
            spec.num_params,
            spec.num_layers,
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.max_position_embeddings,
            "bfloat16" if spec.dtype == "float32" else spec.dtype,
            vocabulary,
            0 if spec.tie_word_embeddings else vocabulary,
            spec.windows,
            spec.recurrent_layers,
            spec.state_size,
            spec.num_expert_params,
            1 if experts is None else experts.num,
            1 if experts is None else experts.top_k,
            None if spec.full_kv_heads == (spec.num_kv_heads, spec.head_dim) else spec.full_kv_heads,
            spec,
        )

    def of_rank(self, size: int) -> ModelShape:
        """The sizes of one of `size` tensor parallel ranks. Raises `ParameterError` if they cannot share the model."""
        if size == 1:
            return self
        if self.spec is not None:
            own = ModelShape.of(self.name, self.spec.of_rank(size))
            num_params = round(own.num_params * self.num_params / self.spec.num_params)
            return replace(own, num_params=num_params, dtype=self.dtype, max_len=self.max_len, windows=self.windows)
        if self.num_heads % size:
            problem = f"tensor_parallel_size {size} does not divide the model's {self.num_heads} attention heads"
            raise ParameterError(problem, param="tensor_parallel_size")
        names = "num_params", "num_heads", "num_head_params", "num_embedding_params", "state_size", "num_expert_params"
        parts = {name: getattr(self, name) // size for name in names}
        full_heads = self.full_heads and (heads_per_rank(self.full_heads[0], size), self.full_heads[1])
        return replace(self, num_kv_heads=heads_per_rank(self.num_kv_heads, size), full_heads=full_heads, **parts)

    @property
    def layer_groups(self) -> LayerGroups:
        sizes = (self.num_kv_heads, self.head_dim), self.full_kv_heads
        return group_layers(self.num_layers, self.windows, self.recurrent_layers, sizes)

    @property
    def full_kv_heads(self) -> tuple[int, int]:
        return self.full_heads or (self.num_kv_heads, self.head_dim)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def weight_bytes(self) -> int:
        return self.num_params * self.itemsize

    def bytes_per_pass(self, device: str, num_tokens: float) -> float:
        """Weights that a pass of so many tokens reads on "cpu" or "cuda". Tokens go to experts at random."""
        whole = self.weight_bytes if self.spec is None else _weight_bytes(self.spec, self.itemsize, device)
        unused: float = (1 - self.top_k / self.num_experts) ** num_tokens * self.num_expert_params / self.num_params
        return whole * (1 - unused) - self.num_embedding_params * self.itemsize

    @property
    def num_layer_params(self) -> float:
        """Parameters that a token goes through, besides the head's."""
        unused = (1 - self.top_k / self.num_experts) * self.num_expert_params
        return self.num_params - self.num_embedding_params - self.num_head_params - unused

    def max_model_len(self, requested: int | None = None) -> int:
        return self.max_len if self.spec is None else self.spec.max_model_len(requested)

    def kv_cache(self, block_size: int, max_len: int = 0, dtype: str = "") -> KVCacheSpec:
        """max_len: as of `KVCacheSpec.of`. dtype: of K and V; "": the model's"""
        return KVCacheSpec.of(self, block_size, dtype or self.dtype, max_len=max_len)

    def flops_per_pair(self, window: int) -> int:
        """Multiplications and additions of one query with one key and its value, over the heads of a layer with this
        window; 0: without one."""
        return 4 * self.num_heads * (self.head_dim if window else self.full_kv_heads[1])

    @property
    def num_layers_by_window(self) -> dict[int, int]:
        """Layers with K and V."""
        windows = self.windows or (0,) * self.num_layers
        return Counter(window for layer, window in enumerate(windows) if layer not in self.recurrent_layers)


@cache
def _weight_bytes(spec: ModelSpec, itemsize: int, device: str) -> int:
    """Once for a model: each step of a simulation needs it."""
    return spec.weight_bytes(itemsize, device=device)


def _shape(
    name: str,
    layers: int,
    hidden: int,
    heads: tuple[int, int],
    head_dim: int,
    mlp: int,
    vocab: int,
    max_len: int,
    **more: Any,
) -> ModelShape:
    family = name.split("-")[0]
    tied = name in TIED
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    if family == "opt":
        return ModelShape.of(name, spec_from_config(config | {"ffn_dim": mlp, "tie_word_embeddings": True}))
    config |= {"num_key_value_heads": heads[1], "head_dim": head_dim, "intermediate_size": mlp, "rms_norm_eps": 1e-5}
    return ModelShape.of(name, spec_from_config(config | more))


ARCHITECTURES = {
    "opt": "OPTForCausalLM",
    "llama": "LlamaForCausalLM",
    "smollm2": "LlamaForCausalLM",
    "qwen2.5": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
TIED = ("qwen2.5-0.5b", "qwen3-0.6b", "smollm2-135m", "gemma3-270m", "gemma3-27b")
MODELS = {
    shape.name: shape
    for shape in (
        _shape("opt-13b", 40, 5120, (40, 40), 128, 20480, 50272, 2048),
        _shape("opt-66b", 64, 9216, (72, 72), 128, 36864, 50272, 2048),
        _shape("opt-175b", 96, 12288, (96, 96), 128, 49152, 50272, 2048),
        _shape("llama-13b", 40, 5120, (40, 40), 128, 13824, 32000, 2048),
        _shape("llama-3.1-8b", 32, 4096, (32, 8), 128, 14336, 128256, 131072),
        _shape("llama-3.1-70b", 80, 8192, (64, 8), 128, 28672, 128256, 131072),
        _shape("qwen2.5-0.5b", 24, 896, (14, 2), 64, 4864, 151936, 32768),
        _shape("qwen2.5-7b", 28, 3584, (28, 4), 128, 18944, 152064, 32768),
        _shape("qwen3-0.6b", 28, 1024, (16, 8), 128, 3072, 151936, 40960),
        _shape("qwen3-8b", 36, 4096, (32, 8), 128, 12288, 151936, 40960),
        _shape("smollm2-135m", 30, 576, (9, 3), 64, 1536, 49152, 8192),
        _shape("gemma3-270m", 18, 640, (4, 1), 256, 2048, 262144, 32768, sliding_window=512),
        _shape("gemma3-27b", 62, 5376, (32, 16), 128, 21504, 262208, 131072, sliding_window=1024),
    )
}
"""Published sizes; the number of parameters follows from them."""


def find_shape(name: str) -> ModelShape | None:
    """A model of `MODELS`, by its name or the catalogue's."""
    entry = catalog.find(name)
    names = [name.lower()] if entry is None else [entry.name, *entry.aliases]
    return next((MODELS[n] for n in names if n in MODELS), None)


def find_model(name: str) -> ModelShape:
    """A model of `MODELS` or of the catalogue, or any model by directory or hub name: its config.json, without weights.

    Raises `ModelNotFoundError`, or the error of reading that model.
    """
    path = Path(name).expanduser()
    if path.exists():
        return _from_config(path.parent if path.name == "config.json" else path)
    if (shape := find_shape(name)) is not None:
        entry = catalog.find(name)
        return shape if entry is None or not entry.path.exists() else replace(_from_config(entry.path), name=shape.name)
    if "/" in name:
        return _from_config(path)
    near = difflib.get_close_matches(name.lower(), MODELS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(MODELS)}"
    raise ModelNotFoundError(f"no model {name!r} to simulate; pass a directory with a config.json, or a name; {hint}")


def _from_config(path: Path) -> ModelShape:
    from octavo.checkpoint.resolve import open_checkpoint

    checkpoint = open_checkpoint(path, download=False, weights=False)
    return ModelShape.of(path.name or str(path), read_spec(checkpoint))
