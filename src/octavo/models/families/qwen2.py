"""Qwen2 and Qwen2.5 (arXiv 2412.15115): biases on Q, K and V, and sliding windows in the last layers."""

from __future__ import annotations

from octavo.models.config_values import (
    DECODER_KEYS,
    Config,
    is_int,
    read_decoder_spec,
    read_flag,
    read_windows,
    value_error,
)
from octavo.models.family import Family
from octavo.models.spec import DecoderSpec

WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers")


def read_qwen_windows(config: Config) -> tuple[int, ...]:
    """Qwen's sliding_window applies only with use_sliding_window, from layer max_window_layers on."""
    if not read_flag(config, "use_sliding_window"):
        return ()
    first = config.get("max_window_layers", 28)
    if not is_int(first):
        raise value_error("max_window_layers", first, "a whole number")
    return read_windows({"sliding_window": 4096} | config, lambda layer: layer >= first)


def read(config: Config, common: Config) -> DecoderSpec:
    return read_decoder_spec(config, common, qkv_bias=True, windows=read_qwen_windows(config))


FAMILY = Family(read=read, keys=(*DECODER_KEYS, *WINDOW_KEYS))
