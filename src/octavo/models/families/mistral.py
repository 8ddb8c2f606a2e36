"""Mistral 7B (arXiv 2310.06825): Llama with a sliding window in all layers."""

from __future__ import annotations

from octavo.models.config_values import DECODER_KEYS, Config, read_decoder_spec, read_windows
from octavo.models.family import Family
from octavo.models.spec import DecoderSpec


def read(config: Config, common: Config) -> DecoderSpec:
    return read_decoder_spec(config, common, windows=read_windows(config, lambda layer: True))


FAMILY = Family(read=read, keys=(*DECODER_KEYS, "sliding_window"), defaults={"sliding_window": 4096})
