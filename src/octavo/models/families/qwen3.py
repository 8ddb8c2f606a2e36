"""Qwen3 (arXiv 2505.09388): norms of the heads of Q and K."""

from __future__ import annotations

from octavo.models.config_values import DECODER_KEYS, Config, read_decoder_spec, read_flag
from octavo.models.families.qwen2 import WINDOW_KEYS, read_qwen_windows
from octavo.models.family import Family
from octavo.models.spec import DecoderSpec


def read(config: Config, common: Config) -> DecoderSpec:
    bias = read_flag(config, "attention_bias")
    windows = read_qwen_windows(config)
    return read_decoder_spec(config, common, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=windows)


FAMILY = Family(
    read=read,
    keys=(*DECODER_KEYS, *WINDOW_KEYS, "attention_bias"),
    defaults={"head_dim": 128},
)
