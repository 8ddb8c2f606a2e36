"""Granite 3: Llama with multipliers of embeddings, attention scores, residual additions and logits."""

from __future__ import annotations

from octavo.models.config_values import DECODER_KEYS, Config, read_decoder_spec, read_flag, read_number
from octavo.models.family import Family
from octavo.models.spec import DecoderSpec


def read(config: Config, common: Config) -> DecoderSpec:
    """The residual stream is divided by the residual multiplier m, so that additions need none: norms undo any scale
    of their input, with eps / m^2.
    """
    bias, residual = read_flag(config, "attention_bias"), read_number(config, "residual_multiplier", default=1.0)
    return read_decoder_spec(
        config,
        common | {"logits_scaling": read_number(config, "logits_scaling", default=1.0)},
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=read_flag(config, "mlp_bias"),
        embedding_scale=read_number(config, "embedding_multiplier", default=1.0) / residual,
        attention_scale=read_number(config, "attention_multiplier", default=1.0),
        rms_norm_eps=read_number(config, "rms_norm_eps", default=1e-6) / residual**2,
    )


FAMILY = Family(
    read=read,
    keys=(
        *DECODER_KEYS,
        "attention_bias",
        "mlp_bias",
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ),
    defaults={"bos_token_id": 1, "eos_token_id": 2},
)
