"""Gemma 3 (arXiv 2503.19786), text only: five layers with a sliding window, then one without, and so on.

Norms multiply by 1 + weight, stand before and after attention and MLP, and on the heads of Q and K. Layers with a
sliding window have rotary tables of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.errors import UnsupportedModelError, cut
from octavo.models.config_values import (
    GATED_ACTIVATIONS,
    Config,
    read_activation,
    read_decoder_spec,
    read_flag,
    read_number,
    read_rope,
    read_size,
    read_windows,
)
from octavo.models.family import GGUF_PARTS, Family, GGUFFormat
from octavo.models.spec import DecoderSpec, TensorNames

NAMES = TensorNames(
    mlp_norm="pre_feedforward_layernorm", post_norms=("post_attention_layernorm", "post_feedforward_layernorm")
)


def read(config: Config, common: Config) -> DecoderSpec:
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise UnsupportedModelError(f"{key} {cut(repr(config[key]))} is not supported; supported: none", param=key)
    bias = read_flag(config, "attention_bias")
    period = read_size(config, "sliding_window_pattern", default=6)
    by_layer_type = config.get("rope_parameters")
    if not isinstance(by_layer_type, dict) or "full_attention" not in by_layer_type:  # before Transformers 5
        by_layer_type = {"sliding_attention": {"rope_theta": config.get("rope_local_base_freq")}}
    local_theta, local_scaling = read_rope({"rope_parameters": by_layer_type.get("sliding_attention")}, theta=1e4)
    if local_scaling:
        raise UnsupportedModelError(
            f"rope scaling {local_scaling['rope_type']!r} of sliding window layers is not supported",
            param="rope_parameters",
        )
    rope_theta, rope_scaling = read_rope(config | {"rope_parameters": by_layer_type.get("full_attention")}, theta=1e6)
    return read_decoder_spec(
        config,
        common,
        activation=read_activation(config, "hidden_activation", "gelu_pytorch_tanh", GATED_ACTIVATIONS),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        unit_offset_norms=True,
        embedding_scale=read_size(config, "hidden_size") ** 0.5,
        rounded_scale=True,
        attention_scale=read_number(config, "query_pre_attn_scalar") ** -0.5,
        windows=read_windows(config, lambda layer: (layer + 1) % period != 0),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        local_rope_theta=local_theta,
        names=NAMES,
    )


def gguf_config(config: Config, get: Callable[..., Any]) -> Config:
    """GGUF states neither which layers have the sliding window (all but every sixth) nor the scale of queries:
    head_dim, but hidden_size / num_heads in the largest model, recognised by its 62 layers."""
    share = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": get("attention.sliding_window", 0) or None,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": share if config["num_hidden_layers"] == 62 else config["head_dim"],
        "rope_theta": get("rope.freq_base", 1e6),
        "rope_local_base_freq": get("rope.freq_base_swa", 1e4),
    }


FAMILY = Family(
    read=read,
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
        config=gguf_config,
    ),
)
