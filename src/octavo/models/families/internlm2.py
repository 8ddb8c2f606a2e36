"""InternLM2 and 2.5 (arXiv 2403.17297): Llama with other names, and Q, K and V merged group by group."""

from __future__ import annotations

from octavo.models.config_values import DECODER_KEYS, Config, read_decoder_spec, read_flag
from octavo.models.family import Family
from octavo.models.spec import DecoderSpec, TensorNames

NAMES = TensorNames(
    embedding="model.tok_embeddings",
    head="output",
    attention_norm="attention_norm",
    qkv=("attention.wqkv",),
    qkv_by_group=True,
    out="attention.wo",
    mlp_norm="ffn_norm",
    mlp_in=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)


def read(config: Config, common: Config) -> DecoderSpec:
    bias = read_flag(config, "bias", default=True)
    return read_decoder_spec(config, common, qkv_bias=bias, o_bias=bias, names=NAMES)


FAMILY = Family(read=read, keys=(*DECODER_KEYS, "bias"), defaults={"bos_token_id": 1, "eos_token_id": 2})
