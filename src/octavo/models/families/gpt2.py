"""GPT-2 (Radford et al., 2019)."""

from __future__ import annotations

from octavo.models.config_values import (
    MLP_ACTIVATIONS,
    Config,
    read_activation,
    read_even_heads,
    read_flag,
    read_num_layers,
    read_number,
    read_size,
)
from octavo.models.family import Family
from octavo.models.spec import GPTSpec, TensorNames

NAMES = TensorNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}.",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    mlp_norm="ln_2",
    mlp_in=("mlp.c_fc",),
    down="mlp.c_proj",
    is_conv1d=True,
)


def read(config: Config, common: Config) -> GPTSpec:
    sizes = read_even_heads(config, "n_embd", "n_head")
    return GPTSpec(
        **common,
        **sizes,
        embedding_size=sizes["hidden_size"],
        intermediate_size=read_size(config, "n_inner", default=4 * sizes["hidden_size"]),
        num_layers=read_num_layers(config, "n_layer"),
        max_position_embeddings=read_size(config, "n_positions", default=1024),
        layer_norm_eps=read_number(config, "layer_norm_epsilon", default=1e-5),
        activation=read_activation(config, "activation_function", "gelu_new", MLP_ACTIVATIONS),
        attention_scale=sizes["head_dim"] ** -0.5 if read_flag(config, "scale_attn_weights", default=True) else 1.0,
        scale_by_layer=read_flag(config, "scale_attn_by_inverse_layer_idx"),
        names=NAMES,
    )


FAMILY = Family(
    read=read,
    keys=(
        "n_embd",
        "n_head",
        "n_inner",
        "n_layer",
        "n_positions",
        "layer_norm_epsilon",
        "activation_function",
        "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx",
    ),
    aliases={
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
    },
    defaults={"tie_word_embeddings": True, "eos_token_id": 50256, "bos_token_id": 50256},
    renamed=((r"(wte|wpe|h|ln_f)\.", r"transformer.\1."),),
)
