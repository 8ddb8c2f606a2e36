"""OLMo 2 (arXiv 2501.00656): norms of the outputs of attention and MLP only, and of all heads of Q and K together."""

from __future__ import annotations

from octavo.models.config_values import DECODER_KEYS, Config, read_decoder_spec, read_flag
from octavo.models.family import Family
from octavo.models.spec import DecoderSpec, TensorNames

NAMES = TensorNames(
    attention_norm="", mlp_norm="", post_norms=("post_attention_layernorm", "post_feedforward_layernorm")
)


def read(config: Config, common: Config) -> DecoderSpec:
    bias = read_flag(config, "attention_bias")
    return read_decoder_spec(config, common, qkv_bias=bias, o_bias=bias, joint_qk_norm=True, names=NAMES)


FAMILY = Family(
    read=read, keys=(*DECODER_KEYS, "attention_bias"), defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279}
)
