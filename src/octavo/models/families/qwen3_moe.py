"""Qwen3 with mixtures of experts (arXiv 2505.09388), such as Qwen3-30B-A3B."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.models.config_values import (
    DECODER_KEYS,
    Config,
    is_int,
    read_activation,
    read_decoder_spec,
    read_flag,
    read_num_layers,
    read_size,
    read_windows,
    value_error,
)
from octavo.models.family import Family, GGUFFormat
from octavo.models.spec import DecoderSpec, ExpertsSpec

MAX_EXPERTS = 4096
EXPERT_KEYS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
DENSE_KEYS = ("decoder_sparse_step", "mlp_only_layers")


def read_experts(config: Config, num_key: str = "num_experts", **traits: Any) -> ExpertsSpec:
    """traits: further fields of the spec; inner, if it is not `moe_intermediate_size`"""
    num = read_size(config, num_key, maximum=MAX_EXPERTS)
    top_k = read_size(config, "num_experts_per_tok", maximum=num)
    if "inner" not in traits:
        traits["inner"] = read_size(config, "moe_intermediate_size")
    gates = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}
    traits.setdefault("gate", read_activation(config, "hidden_act", "silu", gates))
    return ExpertsSpec(num=num, top_k=top_k, **traits)


def num_key(config: Config) -> str:
    """The key of the number of experts: Transformers 5's, which overrides the one before."""
    return "num_local_experts" if "num_local_experts" in config else "num_experts"


def read_dense_layers(config: Config) -> tuple[int, ...]:
    """Layers with an MLP: `mlp_only_layers`, and all but every decoder_sparse_step-th."""
    num_layers, step = read_num_layers(config), read_size(config, "decoder_sparse_step", default=1)
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(is_int(layer) for layer in listed):
        raise value_error("mlp_only_layers", listed, "a list of layers")
    chosen = set(listed)
    return tuple(layer for layer in range(num_layers) if layer in chosen or (layer + 1) % step)


def read_one_window(config: Config) -> tuple[int, ...]:
    """The sliding window of all layers, whatever `layer_types` says."""
    return read_windows(config | {"layer_types": None}, lambda layer: True)


def gguf_experts(config: Config, get: Callable[..., Any]) -> Config:
    """llama.cpp renormalises the weights of experts in these families."""
    return {
        "num_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length", config["intermediate_size"]),
        "norm_topk_prob": True,
    }


def read(config: Config, common: Config) -> DecoderSpec:
    bias = read_flag(config, "attention_bias")
    experts = read_experts(
        config, num_key(config), renormalise=read_flag(config, "norm_topk_prob"), dense_layers=read_dense_layers(config)
    )
    windows = read_one_window(config) if read_flag(config, "use_sliding_window") else ()
    return read_decoder_spec(config, common, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=windows, experts=experts)


FAMILY = Family(
    read=read,
    keys=(
        *DECODER_KEYS,
        *EXPERT_KEYS,
        *DENSE_KEYS,
        "num_local_experts",
        "attention_bias",
        "sliding_window",
        "use_sliding_window",
    ),
    defaults={
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
    },
    gguf=GGUFFormat(keys=("expert_feed_forward_length",), config=gguf_experts),
)
