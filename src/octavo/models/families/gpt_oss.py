"""gpt-oss (arXiv 2508.10925): experts, attention sinks, and a sliding window in every other layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.models.config_values import (
    DECODER_KEYS,
    Config,
    read_activation,
    read_decoder_spec,
    read_flag,
    read_number,
    read_size,
    read_windows,
    value_error,
)
from octavo.models.families.qwen3_moe import gguf_experts, read_experts
from octavo.models.family import GGUF_PARTS, Family, GGUFFormat, MergedExperts
from octavo.models.spec import DecoderSpec

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(config: Config, common: Config) -> DecoderSpec:
    read_activation(config, "hidden_act", "silu", {"silu": "silu", "swish": "silu"})
    experts = read_experts(
        config,
        inner=read_size(config, "intermediate_size"),
        gate="swiglu",
        alpha=read_number(config, "swiglu_alpha", default=1.702),
        limit=read_number(config, "swiglu_limit", default=7.0),
        softmax_first=False,
        renormalise=False,
        router="mlp.router",
        router_bias=True,
        bias=True,
    )
    if not config.get("rope_scaling") and config.get("rope_parameters") is None:
        config = {**config, "rope_parameters": YARN}
    bias = read_flag(config, "attention_bias", default=True)
    windows = read_windows(config, lambda layer: layer % 2 == 0)
    spec = read_decoder_spec(
        config, common, qkv_bias=bias, o_bias=bias, sinks=True, windows=windows, experts=experts, activation="silu"
    )
    _check_copies(config, spec)
    return spec


def _check_copies(config: Config, spec: DecoderSpec) -> None:
    """Refuse OpenAI's names of keys whose values differ from those that are obeyed."""
    copies: dict[str, Any] = {"experts_per_token": config["num_experts_per_tok"]}
    if spec.rope_scaling is not None:
        copies["initial_context_length"] = spec.rope_scaling.get("original_max_position_embeddings")
    for key, obeyed in copies.items():
        if (value := config.get(key)) is not None and obeyed is not None and value != obeyed:
            raise value_error(key, value, f"{obeyed}, as the key of Transformers")


def gguf_config(config: Config, get: Callable[..., Any]) -> Config:
    """YaRN is not truncated, as in training: no key says so, and llama.cpp truncates."""
    experts, scaling = gguf_experts(config, get), config["rope_scaling"]
    return experts | {
        "intermediate_size": experts["moe_intermediate_size"],
        "sliding_window": get("attention.sliding_window"),
        "rope_scaling": scaling and scaling | {"truncate": False},
        "rope_parameters": {"rope_type": "default"},  # without scaling
    }


FAMILY = Family(
    read=read,
    keys=(
        *DECODER_KEYS,
        *("sliding_window", "attention_bias", "num_experts", "num_experts_per_tok", "experts_per_token"),
        *("initial_context_length", "swiglu_alpha", "swiglu_limit"),
    ),
    aliases={"num_local_experts": "num_experts"},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "rope_theta": 150000.0,
        "rms_norm_eps": 1e-5,
    },
    renamed=(
        (r"(.*\.mlp\.experts\.(?:gate_up|down)_proj)_(\w+)", r"\1.\2"),
        (r"(.*\.self_attn\.sinks)\.weight", r"\1"),
    ),
    experts=MergedExperts(transposed=True, interleaved=True),
    gguf=GGUFFormat(
        parts={
            **GGUF_PARTS,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        keys=("attention.sliding_window", "expert_feed_forward_length"),
        config=gguf_config,
    ),
)
