"""StarCoder2 (arXiv 2402.19173): layer norms, a plain MLP, rotary embedding, groups of query heads."""

from __future__ import annotations

from octavo.models.config_values import (
    DECODER_KEYS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MLP_ACTIVATIONS,
    Config,
    check_rotary_dim,
    read_activation,
    read_even_heads,
    read_flag,
    read_num_layers,
    read_number,
    read_rope,
    read_size,
    read_windows,
    value_error,
)
from octavo.models.family import Family
from octavo.models.spec import GPTSpec, TensorNames

NAMES = TensorNames(mlp_in=("mlp.c_fc",), down="mlp.c_proj")


def read(config: Config, common: Config) -> GPTSpec:
    sizes = read_even_heads(config, "hidden_size", "num_attention_heads")
    num_kv_heads = read_size(config, "num_key_value_heads", maximum=MAX_HEADS)
    if sizes["num_heads"] % num_kv_heads:
        raise value_error(
            "num_attention_heads", sizes["num_heads"], f"a multiple of num_key_value_heads, {num_kv_heads}"
        )
    head_dim = read_size(config, "head_dim", default=sizes["head_dim"], maximum=MAX_HEAD_DIM)
    rope_theta, rope_scaling = read_rope(config)
    check_rotary_dim(rope_scaling, head_dim)
    return GPTSpec(
        **common,
        **sizes | {"num_kv_heads": num_kv_heads, "head_dim": head_dim},
        embedding_size=sizes["hidden_size"],
        intermediate_size=read_size(config, "intermediate_size"),
        num_layers=read_num_layers(config),
        max_position_embeddings=read_size(config, "max_position_embeddings"),
        layer_norm_eps=read_number(config, "norm_epsilon", default=1e-5),
        activation=read_activation(config, "hidden_act", "gelu_pytorch_tanh", MLP_ACTIVATIONS),
        bias=read_flag(config, "use_bias", default=True),
        attention_scale=head_dim**-0.5,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        windows=read_windows(config | {"layer_types": None}, lambda layer: True),
        names=NAMES,
    )


FAMILY = Family(
    read=read,
    keys=(*DECODER_KEYS, "norm_epsilon", "use_bias", "sliding_window"),
    defaults={
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
)
