"""SmolLM3: Llama with layers without rotary embedding (NoPE, arXiv 2501.18795)."""

from __future__ import annotations

from octavo.models.config_values import (
    DECODER_KEYS,
    Config,
    is_int,
    read_decoder_spec,
    read_flag,
    read_num_layers,
    read_size,
    read_windows,
    value_error,
)
from octavo.models.family import Family
from octavo.models.spec import DecoderSpec


def read_nope_layers(config: Config) -> tuple[int, ...]:
    """Layers whose number in `no_rope_layers` is 0; without the list, every `no_rope_layer_interval`-th."""
    num_layers = read_num_layers(config)
    has_rope = config.get("no_rope_layers")
    if has_rope is None:
        interval = read_size(config, "no_rope_layer_interval", default=4)
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(has_rope, list) or len(has_rope) < num_layers or not all(map(is_int, has_rope)):
        raise value_error("no_rope_layers", has_rope, f"a list of {num_layers} numbers, 0 for no rotary embedding")
    return tuple(layer for layer in range(num_layers) if not has_rope[layer])


def read(config: Config, common: Config) -> DecoderSpec:
    bias, nope_layers = read_flag(config, "attention_bias"), read_nope_layers(config)
    has_windows = read_flag(config, "use_sliding_window") or config.get("layer_types") is not None
    return read_decoder_spec(
        config,
        common,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=read_flag(config, "mlp_bias"),
        windows=read_windows(config, lambda layer: layer in nope_layers) if has_windows else (),
        nope_layers=nope_layers,
    )


FAMILY = Family(
    read=read,
    keys=(
        *DECODER_KEYS,
        "attention_bias",
        "mlp_bias",
        "no_rope_layers",
        "no_rope_layer_interval",
        "use_sliding_window",
        "sliding_window",
    ),
    defaults={
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
)
