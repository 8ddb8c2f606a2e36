"""Llama 2 and 3 (arXiv 2407.21783), and the many models stored as Llama: SmolLM2, for example."""

from __future__ import annotations

from octavo.models.config_values import DECODER_KEYS, Config, read_decoder_spec, read_flag
from octavo.models.family import Family, GGUFFormat
from octavo.models.spec import DecoderSpec


def read(config: Config, common: Config) -> DecoderSpec:
    bias = read_flag(config, "attention_bias")
    # Octavo's own key: GGUF files may have biases on Q, K and V alone.
    o_bias = read_flag(config, "attention_output_bias", default=bias)
    return read_decoder_spec(config, common, qkv_bias=bias, o_bias=o_bias, mlp_bias=read_flag(config, "mlp_bias"))


FAMILY = Family(
    read=read,
    keys=(*DECODER_KEYS, "attention_bias", "attention_output_bias", "mlp_bias"),
    gguf=GGUFFormat(interleaved_qk=True),
)
