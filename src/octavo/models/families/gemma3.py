"""Gemma 3 (arXiv 2503.19786), text only: five layers with a sliding window, then one without, and so on.

Norms multiply by 1 + weight, stand before and after attention and MLP, and on the heads of Q and K. Layers with a
sliding window have rotary tables of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.errors import UnsupportedModelError
from octavo.models.config_values import (
    DECODER_KEYS,
    GATED_ACTIVATIONS,
    Config,
    read_activation,
    read_decoder_spec,
    read_flag,
    read_number,
    read_rope,
    read_size,
    read_windows,
    value_error,
)
from octavo.models.family import GGUF_PARTS, Family, GGUFFormat
from octavo.models.spec import DecoderSpec, TensorNames

NAMES = TensorNames(
    mlp_norm="pre_feedforward_layernorm", post_norms=("post_attention_layernorm", "post_feedforward_layernorm")
)


def read_rotary(config: Config, layer_type: str, theta_key: str, theta: float) -> tuple[float, Config | None]:
    """(theta, scaling) of one type of layers: `rope_parameters` by layer type, or `theta_key` before Transformers 5.

    As in Transformers, `rope_scaling` overrides the parameters of layers with full attention.
    """
    by_type = config.get("rope_parameters") or {}
    if not isinstance(by_type, dict) or not set(by_type) <= {"full_attention", "sliding_attention"}:
        raise value_error("rope_parameters", by_type, "an object with full_attention and sliding_attention")
    parameters = by_type.get(layer_type) or {"rope_type": "default"}
    if layer_type == "full_attention":
        parameters = parameters | (config.get("rope_scaling") or {})
    common = {key: config.get(key) for key in ("max_position_embeddings", "partial_rotary_factor")}
    return read_rope({"rope_theta": config.get(theta_key), **common, "rope_parameters": parameters}, theta)


def read(config: Config, common: Config) -> DecoderSpec:
    bias = read_flag(config, "attention_bias")
    period = read_size(config, "sliding_window_pattern", default=6)
    rope_theta, rope_scaling = read_rotary(config, "full_attention", "rope_theta", 1e6)
    local_theta, local_scaling = read_rotary(config, "sliding_attention", "rope_local_base_freq", 1e4)
    if local_scaling:
        raise UnsupportedModelError(
            f"rope scaling {local_scaling['rope_type']!r} of sliding window layers is not supported",
            param="rope_parameters",
        )
    return read_decoder_spec(
        config,
        common,
        activation=read_activation(config, "hidden_activation", "gelu_pytorch_tanh", GATED_ACTIVATIONS),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        unit_offset_norms=True,
        embedding_scale=read_size(config, "hidden_size") ** 0.5,
        attention_scale=read_number(config, "query_pre_attn_scalar") ** -0.5,
        windows=read_windows(config, lambda layer: (layer + 1) % period != 0),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        local_rope_theta=local_theta,
        names=NAMES,
    )


def gguf_config(config: Config, get: Callable[..., Any]) -> Config:
    """GGUF does not state the scale of queries: head_dim, but hidden_size / num_heads in the largest model, which has
    62 layers."""
    share = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": get("attention.sliding_window", 0) or None,
        "sliding_window_pattern": get("attention.sliding_window_pattern", 6),
        "query_pre_attn_scalar": share if config["num_hidden_layers"] == 62 else config["head_dim"],
        "rope_theta": get("rope.freq_base", 1e4),
        "rope_local_base_freq": get("rope.freq_base_swa", 1e4),
    }


FAMILY = Family(
    read=read,
    keys=(
        *DECODER_KEYS,
        "hidden_activation",
        "attention_bias",
        "query_pre_attn_scalar",
        "sliding_window",
        "sliding_window_pattern",
        "rope_local_base_freq",
    ),
    refused={
        "attn_logit_softcapping": (),
        "final_logit_softcapping": (),
        "use_bidirectional_attention": (False,),
    },
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
    renamed=((r"language_model\.(model|lm_head)\.", r"\1."), (r"model\.language_model\.", "model.")),
    gguf=GGUFFormat(
        parts={
            **GGUF_PARTS,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        keys=("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"),
        config=gguf_config,
    ),
)
