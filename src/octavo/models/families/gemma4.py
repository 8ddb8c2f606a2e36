"""Gemma 4, text only: five layers with a sliding window, then one without, which has fewer and larger K/V heads.

Those without a window may have no V: it is K. Each layer's output has a factor, and the logits are capped. An MLP may
have experts beside it (26B-A4B). Models with embeddings for each layer (E2B, E4B) are not supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.errors import CheckpointError, UnsupportedModelError, cut
from octavo.models.config_values import (
    GATED_ACTIVATIONS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    Config,
    check_rotary_dim,
    is_int,
    read_activation,
    read_decoder_spec,
    read_flag,
    read_num_layers,
    read_number,
    read_rope,
    read_size,
    read_windows,
    value_error,
)
from octavo.models.families.gemma3 import FAMILY as GEMMA3
from octavo.models.families.gemma3 import NAMES
from octavo.models.families.qwen3_moe import MAX_EXPERTS
from octavo.models.family import Family, GGUFFormat
from octavo.models.spec import DecoderSpec, ExpertsSpec
from octavo.models.spec.gemma4 import Gemma4Spec

ROPE_PARAMETERS: Config = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def read_full_heads(config: Config, windows: tuple[int, ...]) -> Config:
    """`num_key_value_heads` and `head_dim` of layers without a window: Google's keys, or Transformers' by layer."""
    keys = {"num_key_value_heads": MAX_HEADS, "head_dim": MAX_HEAD_DIM}
    if "per_layer_config" not in config:
        values = {"head_dim": config.get("global_head_dim", 512)}
        if read_flag(config, "attention_k_eq_v"):
            values["num_key_value_heads"] = config.get("num_global_key_value_heads")
    else:
        by_layer = config["per_layer_config"] or {}
        full = {str(layer) for layer, window in enumerate(windows) if not window}
        found = {str(layer): own for layer, own in by_layer.items()} if isinstance(by_layer, dict) else {}
        values = next(iter(found.values()), {})
        is_known = isinstance(values, dict) and set(values) <= set(keys)
        if by_layer and not (is_known and found == dict.fromkeys(full, values)):
            raise UnsupportedModelError(
                f"per_layer_config {cut(repr(by_layer))} is not supported; supported: equal "
                f"{' and '.join(keys)} of the layers without a sliding window",
                param="per_layer_config",
            )
    given = {key: value for key, value in values.items() if value is not None}
    return {key: read_size(config | given, key, maximum=maximum) for key, maximum in keys.items()}


def read_rotary(config: Config, layer_type: str, head_dim: int) -> tuple[float, Config | None]:
    """(theta, scaling) of one type of layers."""
    by_type = config.get("rope_parameters") or ROPE_PARAMETERS
    parameters = by_type.get(layer_type) if isinstance(by_type, dict) else None
    if not isinstance(parameters, dict):
        raise value_error("rope_parameters", by_type, "an object with full_attention and sliding_attention")
    if parameters.get("rope_type") != "proportional":
        max_len = config.get("max_position_embeddings")
        theta, scaling = read_rope({"max_position_embeddings": max_len, "rope_parameters": parameters})
        check_rotary_dim(scaling, head_dim)
        return theta, scaling
    part = read_number(parameters, "partial_rotary_factor", default=1.0)
    if part > 1:
        raise value_error("partial_rotary_factor", part, "a number above 0, up to 1")
    factor = read_number(parameters, "factor", default=1.0)
    scaling = {"rope_type": "proportional", "partial_rotary_factor": part, "factor": factor}
    return read_number(parameters, "rope_theta"), scaling


def read(config: Config, common: Config) -> DecoderSpec:
    per_layer = config.get("hidden_size_per_layer_input")
    if not is_int(per_layer) or per_layer:
        raise UnsupportedModelError(
            f"hidden_size_per_layer_input {cut(repr(per_layer))} is not supported: embeddings by layer",
            param="hidden_size_per_layer_input",
        )
    last = read_num_layers(config) - 1
    windows = read_windows(config, lambda layer: (layer + 1) % 6 != 0)
    windows = (*windows[:-1], 0) if windows else ()  # the last layer has none, as in Transformers
    full = read_full_heads(config, windows or (0,) * (last + 1))
    own = config if any(windows) else config | full
    num_heads = read_size(config, "num_attention_heads", maximum=MAX_HEADS)
    if num_heads % full["num_key_value_heads"]:
        raise value_error("num_global_key_value_heads", full["num_key_value_heads"], f"a divisor of {num_heads}")
    rope_theta, rope_scaling = read_rotary(config, "full_attention", full["head_dim"])
    local_theta, local_scaling = 1e4, None
    if any(windows):
        local_theta, local_scaling = read_rotary(config, "sliding_attention", read_size(config, "head_dim"))
    if local_scaling:
        raise UnsupportedModelError(
            f"rope scaling {local_scaling['rope_type']!r} of sliding window layers is not supported",
            param="rope_parameters",
        )
    differs = any(full[key] != read_size(own, key) for key in full)
    bias = read_flag(config, "attention_bias")
    activation = read_activation(config, "hidden_activation", "gelu_pytorch_tanh", GATED_ACTIVATIONS)
    traits: dict[str, Any] = {}
    if config.get("final_logit_softcapping") is not None:
        traits["logits_cap"] = read_number(config, "final_logit_softcapping")
    if read_flag(config, "enable_moe_block"):
        traits["experts"] = read_moe(config, activation)
    return read_decoder_spec(
        own,
        common,
        spec_class=Gemma4Spec,
        activation=activation,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        embedding_scale=read_size(config, "hidden_size") ** 0.5,
        rounded_scale=True,
        attention_scale=1.0,
        windows=windows if any(windows) else (),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        local_rope_theta=local_theta,
        full_heads=(full["num_key_value_heads"], full["head_dim"]) if differs else None,
        shares_kv=read_flag(config, "attention_k_eq_v"),
        names=NAMES,
        **traits,
    )


def read_moe(config: Config, activation: str) -> ExpertsSpec:
    num = read_size(config, "num_experts", maximum=MAX_EXPERTS)
    return ExpertsSpec(
        num=num,
        top_k=read_size(config, "top_k_experts", maximum=num),
        inner=read_size(config, "moe_intermediate_size"),
        gate="gelu" if activation == "gelu_tanh" else activation,
        router="router.proj",
    )


def gguf_config(config: Config, get: Callable[..., Any]) -> Config:
    """llama.cpp has the K/V heads of each layer. Its keys without "swa" are of layers without a window."""
    num_layers, full_dim, own_dim = config["num_hidden_layers"], config["head_dim"], get("attention.key_length_swa")
    kinds, heads = get("attention.sliding_window_pattern"), config["num_key_value_heads"]
    if not isinstance(kinds, list) or len(kinds) != num_layers or kinds[-1:] != [False]:
        raise value_error("attention.sliding_window_pattern", kinds, f"{num_layers} booleans, the last one false")
    heads = heads if isinstance(heads, list) else [heads] * num_layers
    own = [num for num, has_window in zip(heads, kinds, strict=False) if has_window]
    if len(heads) != num_layers or own != own[:1] * len(own):
        expected = f"{num_layers} numbers, equal in layers with a sliding window"
        raise value_error("attention.head_count_kv", heads, expected)
    for key, size in {
        "attention.value_length_swa": own_dim,
        "rope.dimension_count": full_dim,
        "rope.dimension_count_swa": own_dim,
    }.items():
        if (value := get(key, full_dim)) != size:
            raise value_error(key, value, f"{size}, as the length of keys")
    scaling = config["rope_scaling"] or {}
    if scaling.get("rope_type") not in ("proportional", "llama3"):
        raise CheckpointError("the GGUF file lacks rope_freqs.weight; convert the model again")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention" if has_window else "full_attention" for has_window in kinds],
        "sliding_window": get("attention.sliding_window"),
        "num_key_value_heads": (own or heads)[0],
        "head_dim": own_dim,
        "per_layer_config": {
            str(layer): {"num_key_value_heads": heads[layer], "head_dim": full_dim}
            for layer, has_window in enumerate(kinds)
            if not has_window
        },
        "rope_parameters": {
            "full_attention": {"rope_theta": config["rope_theta"], **scaling},
            "sliding_attention": {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 1e4)},
        },
        "final_logit_softcapping": get("final_logit_softcapping", 30.0) or None,
        "enable_moe_block": bool(get("expert_count", 0)),
        "num_experts": get("expert_count", 0),
        "top_k_experts": get("expert_used_count", 0),
        "moe_intermediate_size": get("expert_feed_forward_length", 0),
    }


FAMILY = Family(
    read=read,
    keys=(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_parameters",
        "hidden_activation",
        "attention_bias",
        "attention_k_eq_v",
        "sliding_window",
        "final_logit_softcapping",
        "hidden_size_per_layer_input",
        "global_head_dim",
        "num_global_key_value_heads",
        "per_layer_config",
        "enable_moe_block",
        "num_experts",
        "top_k_experts",
        "moe_intermediate_size",
    ),
    refused={
        "rope_theta": (),
        "rope_scaling": (),
        "partial_rotary_factor": (),
        "num_kv_shared_layers": (0,),
        "use_double_wide_mlp": (False,),
        "use_bidirectional_attention": ("vision",),
    },
    defaults={
        "vocab_size": 262_144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
    renamed=(
        (r"model\.(?:language_model\.)?(layers\.\d+\.)experts\.", r"model.\1mlp.experts."),
        (r"model\.language_model\.", "model."),
    ),
    gguf=GGUFFormat(
        parts={
            **GEMMA3.gguf.parts,
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        keys=(
            *GEMMA3.gguf.keys,
            "attention.key_length_swa",
            "attention.value_length_swa",
            "rope.dimension_count_swa",
            "final_logit_softcapping",
            "expert_feed_forward_length",
        ),
        config=gguf_config,
    ),
)
