"""InternLM3: Llama with its own keys for biases."""

from __future__ import annotations

from octavo.models.config_values import DECODER_KEYS, Config, read_decoder_spec, read_flag
from octavo.models.family import Family
from octavo.models.spec import DecoderSpec


def read(config: Config, common: Config) -> DecoderSpec:
    bias = read_flag(config, "bias")
    return read_decoder_spec(config, common, qkv_bias=read_flag(config, "qkv_bias"), o_bias=bias, mlp_bias=bias)


FAMILY = Family(
    read=read,
    keys=(*DECODER_KEYS, "bias", "qkv_bias"),
    defaults={"num_key_value_heads": 32, "bos_token_id": 1, "eos_token_id": 2},
)
