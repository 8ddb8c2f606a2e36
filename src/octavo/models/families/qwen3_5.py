"""Qwen3.5, text only: three layers with a Gated DeltaNet (arXiv 2412.06464), then one with attention.

Norms multiply by 1 + weight, attention has a gate for its output, and a quarter of each head is rotated. The larger
models have experts, of which one is for all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.errors import UnsupportedModelError, cut
from octavo.models.config_values import (
    DECODER_KEYS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    Config,
    read_activation,
    read_decoder_spec,
    read_flag,
    read_num_layers,
    read_size,
    value_error,
)
from octavo.models.families.qwen3_moe import gguf_experts, read_experts
from octavo.models.family import GGUF_PARTS, Family, GGUFFormat
from octavo.models.spec import DecoderSpec, HybridSpec

SHARED_KEY = "shared_expert_intermediate_size"


def read_recurrent_layers(config: Config) -> tuple[int, ...]:
    """The layers of `layer_types` with "linear_attention"; without the list, all but every interval-th."""
    num_layers, kinds = read_num_layers(config), config.get("layer_types")
    interval = read_size(config, "full_attention_interval", default=4)
    if kinds is None:
        kinds = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise value_error("layer_types", kinds, f"a list of {num_layers} layer types")
    if "full_attention" not in kinds:
        raise UnsupportedModelError(
            f"layer_types {cut(repr(kinds))} is not supported: no layer has full_attention", param="layer_types"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")


def read(config: Config, common: Config, **traits: Any) -> DecoderSpec:
    """traits: further fields of the spec"""
    bias = read_flag(config, "attention_bias")
    num_key_heads, num_value_heads = (
        read_size(config, f"linear_num_{name}_heads", maximum=MAX_HEADS) for name in ("key", "value")
    )
    if num_value_heads % num_key_heads:
        raise value_error(
            "linear_num_value_heads", num_value_heads, f"a multiple of linear_num_key_heads, {num_key_heads}"
        )
    return read_decoder_spec(
        config,
        common,
        partial_rotary=True,
        spec_class=HybridSpec,
        activation=read_activation(config, "hidden_act", "silu", {"silu": "silu", "swish": "silu"}),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        unit_offset_norms=True,
        recurrent_layers=read_recurrent_layers(config),
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=read_size(config, "linear_key_head_dim", maximum=MAX_HEAD_DIM),
        value_dim=read_size(config, "linear_value_head_dim", maximum=MAX_HEAD_DIM),
        conv_size=read_size(config, "linear_conv_kernel_dim", maximum=64),
        **traits,
    )


def read_moe(config: Config, common: Config) -> DecoderSpec:
    shared = read_size(config, SHARED_KEY)
    return read(config, common, experts=read_experts(config, shared_inner=shared))


HYBRID_KEYS = (
    *DECODER_KEYS,
    "attention_bias",
    "full_attention_interval",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
HYBRID_DEFAULTS: Config = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
REFUSED = {"attn_output_gate": (True,)}
DT_BIAS = (r"(.*\.linear_attn\.dt)\.bias", r"\1_bias")
RENAMED = ((r"model\.language_model\.", "model."), DT_BIAS)

GGUF_HYBRID_KEYS = (
    *("full_attention_interval", "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank"),
    *("ssm.group_count", "nextn_predict_layers"),
    "rope.dimension_sections",  # of the positions in an image; those of text are equal
)
GGUF_EXPERT_KEYS = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
GGUF_HYBRID_PARTS = {
    **GGUF_PARTS,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}


def gguf_hybrid(config: Config, get: Callable[..., Any]) -> Config:
    """The layers that predict further tokens are counted in the file, and not served."""
    inner, num_heads = get("ssm.inner_size"), get("ssm.time_step_rank")
    if num_heads < 1 or inner % num_heads:
        raise value_error("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank, {num_heads}")
    return {
        "num_hidden_layers": config["num_hidden_layers"] - get("nextn_predict_layers", 0),
        "full_attention_interval": get("full_attention_interval", 4),
        "linear_conv_kernel_dim": get("ssm.conv_kernel"),
        "linear_num_key_heads": get("ssm.group_count"),
        "linear_key_head_dim": get("ssm.state_size"),
        "linear_num_value_heads": num_heads,
        "linear_value_head_dim": inner // num_heads,
    }


def gguf_moe(config: Config, get: Callable[..., Any]) -> Config:
    shared = get("expert_shared_feed_forward_length", config["intermediate_size"])
    return gguf_hybrid(config, get) | gguf_experts(config, get) | {SHARED_KEY: shared}


FAMILY = Family(
    read=read,
    keys=HYBRID_KEYS,
    refused=REFUSED,
    defaults=HYBRID_DEFAULTS,
    renamed=RENAMED,
    gguf=GGUFFormat(parts=GGUF_HYBRID_PARTS, keys=GGUF_HYBRID_KEYS, config=gguf_hybrid, traits={"pairing": "tiled"}),
)
MOE_FAMILY = Family(
    read=read_moe,
    keys=(*HYBRID_KEYS, "num_experts", "num_experts_per_tok", "moe_intermediate_size", SHARED_KEY),
    refused=REFUSED,
    defaults={
        **HYBRID_DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        SHARED_KEY: 512,
        "intermediate_size": 512,  # of dense layers, which it has not
    },
    renamed=RENAMED,
    gguf=GGUFFormat(
        parts=GGUF_HYBRID_PARTS,
        keys=(*GGUF_HYBRID_KEYS, *GGUF_EXPERT_KEYS),
        config=gguf_moe,
        traits={"pairing": "tiled"},
    ),
)
