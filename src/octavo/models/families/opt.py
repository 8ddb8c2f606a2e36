"""OPT (arXiv 2205.01068)."""

from __future__ import annotations

from octavo.models.config_values import (
    MLP_ACTIVATIONS,
    Config,
    read_activation,
    read_even_heads,
    read_flag,
    read_num_layers,
    read_size,
)
from octavo.models.family import Family
from octavo.models.spec import GPTSpec, TensorNames

NAMES = TensorNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    final_norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{}.",
    attention_norm="self_attn_layer_norm",
    out="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    mlp_in=("fc1",),
    down="fc2",
)


def read(config: Config, common: Config) -> GPTSpec:
    sizes = read_even_heads(config, "hidden_size", "num_attention_heads")
    norm_first = read_flag(config, "do_layer_norm_before", default=True)
    return GPTSpec(
        **common,
        **sizes,
        embedding_size=read_size(config, "word_embed_proj_dim", default=sizes["hidden_size"]),
        intermediate_size=read_size(config, "ffn_dim"),
        num_layers=read_num_layers(config),
        max_position_embeddings=read_size(config, "max_position_embeddings"),
        position_offset=2,  # two rows were padding
        layer_norm_eps=1e-5,
        activation=read_activation(config, "activation_function", "relu", MLP_ACTIVATIONS),
        norm_first=norm_first,
        final_norm=norm_first and not read_flag(config, "_remove_final_layer_norm"),
        norm_weights=read_flag(config, "layer_norm_elementwise_affine", default=True),
        bias=read_flag(config, "enable_bias", default=True),
        attention_scale=sizes["head_dim"] ** -0.5,
        names=NAMES,
    )


FAMILY = Family(
    read=read,
    keys=(
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "max_position_embeddings",
        "word_embed_proj_dim",
        "ffn_dim",
        "activation_function",
        "do_layer_norm_before",
        "_remove_final_layer_norm",
        "layer_norm_elementwise_affine",
        "enable_bias",
    ),
    defaults={"tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 2},
    renamed=((r"decoder\.", "model.decoder."),),
)
