"""`DecoderSpec`: what a checkpoint's config.json says about the model, read here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import CheckpointError, UnsupportedModelError

Config = dict[str, Any]

# Far above any model's; what is above these is damage, and must not become a loop or an allocation.
MOST_LAYERS = 10_000
MOST_HEADS = 2**16
MOST_HEAD_DIM = 2**12


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The shape of a decoder of the Llama family, and the facts about its tokens that config.json holds.

    intermediate_size is the width of the gated MLP; head_dim * num_heads need not be hidden_size (Qwen3).
    qkv_bias, o_bias, mlp_bias say which projections add a bias; qk_norm, whether every head of Q and K is normalised
    before it is turned. sliding_window is the number of keys that a query sees, its own included; None: all.
    rope_scaling is None or a dict of config.json's words, checked, that `rope_table` takes.
    dtype is the checkpoint's, a name such as "bfloat16".
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"


def spec_from_config(config: Config, generation_config: Config | None = None) -> DecoderSpec:
    """Read config.json and generation_config.json, as parsed; `generation_config` only adds end-of-sequence ids.

    Raises `UnsupportedModelError` for an architecture or a feature that Octavo does not have, `CheckpointError` for
    a value that is missing or makes no sense.
    """
    _refuse_custom_code(config)
    architecture = _architecture(config)
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"quantization_config: weights quantised by {method!r} are not supported; "
            "use the unquantised checkpoint or a GGUF file",
            param="quantization_config",
        )
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; supported: silu", param="hidden_act")

    hidden_size = _size(config, "hidden_size")
    num_heads = _size(config, "num_attention_heads", most=MOST_HEADS)
    num_kv_heads = _size(config, "num_key_value_heads", default=num_heads, most=MOST_HEADS)
    if num_heads % num_kv_heads:
        raise _bad("num_attention_heads", num_heads, f"a multiple of num_key_value_heads, {num_kv_heads}")
    vocab_size = _size(config, "vocab_size")
    rope_theta, rope_scaling = _rope(config)
    traits: dict[str, Any] = {
        "head_dim": _size(config, "head_dim", default=hidden_size // num_heads or None, most=MOST_HEAD_DIM)
    }
    traits |= FAMILY[architecture](config)
    if traits["head_dim"] % 2:
        raise _bad("head_dim", traits["head_dim"], "an even number: rotary embedding turns pairs")
    return DecoderSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers", most=MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        rms_norm_eps=_number(config, "rms_norm_eps", default=1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=_size(config, "max_position_embeddings"),
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(config, generation_config or {}),
        bos_token_id=_token_id(config, "bos_token_id"),
        dtype=_dtype(config),
        **traits,
    )


# -- what the architectures differ in ---------------------------------------------------------------------------------


def _llama(config: Config) -> dict[str, Any]:
    bias = _flag(config, "attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": _flag(config, "mlp_bias")}


def _mistral(config: Config) -> dict[str, Any]:
    # A Mistral config without the key means a window of 4096; null means none.
    window = None if config.get("sliding_window", 4096) is None else _size(config, "sliding_window", default=4096)
    return {"sliding_window": _same_on_every_layer(config, window, first_layer=0)}


def _qwen2(config: Config) -> dict[str, Any]:
    return {"qkv_bias": True, "sliding_window": _qwen_window(config)}


def _qwen3(config: Config) -> dict[str, Any]:
    bias = _flag(config, "attention_bias")
    return {
        "head_dim": _size(config, "head_dim", default=128, most=MOST_HEAD_DIM),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "sliding_window": _qwen_window(config),
    }


FAMILY: dict[str, Callable[[Config], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


def _qwen_window(config: Config) -> int | None:
    """Qwen configs carry a sliding_window that counts only with use_sliding_window, from layer max_window_layers on."""
    if not _flag(config, "use_sliding_window") or config.get("sliding_window", 4096) is None:
        return None
    first_layer = config.get("max_window_layers", 28)
    return _same_on_every_layer(config, _size(config, "sliding_window", default=4096), first_layer=first_layer)


def _same_on_every_layer(config: Config, window: int | None, *, first_layer: int) -> int | None:
    """The window, if all layers have it; None, if none has. `layer_types`, where given, overrules `first_layer`."""
    if window is None:
        return None
    num_layers = _size(config, "num_hidden_layers", most=MOST_LAYERS)
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first_layer else "full_attention" for layer in range(num_layers)
    ]
    if len(set(kinds)) > 1:
        raise UnsupportedModelError(
            f"layer_types: sliding-window attention on {kinds.count('sliding_attention')} of {num_layers} layers is "
            "not supported; supported: on all or on none",
            param="layer_types",
        )
    return window if kinds[0] == "sliding_attention" else None


# -- rotary embedding -------------------------------------------------------------------------------------------------

_FACTOR = ("factor",)
_TRAINED = ("factor", "original_max_position_embeddings")
# Each kind of scaling, and the numbers that it cannot do without.
ROPE_SCALING: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": _FACTOR,
    "llama3": (*_TRAINED, "low_freq_factor", "high_freq_factor"),
    "yarn": _TRAINED,
}


def _rope(config: Config) -> tuple[float, dict[str, Any] | None]:
    """theta and scaling, from `rope_parameters` (Transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise _bad("rope_scaling", scaling, "an object")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise UnsupportedModelError("rope_parameters by kind of layer are not supported", param="rope_parameters")
    theta = _number(config | scaling, "rope_theta", default=10000.0)
    if (part := (config | scaling).get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor {part} is not supported; supported: 1.0", param="partial_rotary_factor"
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_SCALING:
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported; supported: {', '.join(ROPE_SCALING)}", param="rope_scaling"
        )
    if kind == "default":
        return theta, None
    scaling = {"original_max_position_embeddings": config.get("max_position_embeddings")} | scaling
    for key in ROPE_SCALING[kind]:
        _number(scaling, key)
    return theta, scaling | {"rope_type": kind}


# -- tokens -----------------------------------------------------------------------------------------------------------


def _eos_token_ids(config: Config, generation_config: Config) -> tuple[int, ...]:
    """Both files' ids, each once, in order: instruct models often name the end of a turn in only one of the two."""
    ids: dict[int, None] = {}
    for source in (generation_config, config):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                if not _is_int(token_id) or token_id < 0:
                    raise _bad("eos_token_id", value, "a token id or a list of them")
                ids[token_id] = None
    return tuple(ids)


def _token_id(config: Config, key: str) -> int | None:
    value = config.get(key)
    if value is not None and (not _is_int(value) or value < 0):
        raise _bad(key, value, "a token id")
    return value


# -- what is refused, and how a value is read -------------------------------------------------------------------------


def _refuse_custom_code(config: Config) -> None:
    for key in ("auto_map", "custom_code", "trust_remote_code"):
        if config.get(key):
            raise UnsupportedModelError(
                f"custom code is not supported: config.json has {key!r}; nothing from a model directory is ever run",
                param=key,
            )


def _architecture(config: Config) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise _bad("architectures", names, "a list of names")
    for name in names:
        if isinstance(name, str) and name in FAMILY:
            return name
    found = ", ".join(map(str, names)) or "none named in config.json"
    raise UnsupportedModelError(
        f"architecture {found} is not supported; supported: {', '.join(FAMILY)}", param="architectures"
    )


def _dtype(config: Config) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in ("float32", "float16", "bfloat16"):
        raise UnsupportedModelError(
            f"dtype {name!r} is not supported; supported: float32, float16, bfloat16", param="dtype"
        )
    return str(name)


def _size(config: Config, key: str, *, default: int | None = None, most: int = 2**28) -> int:
    """A count from 1 to `most`. null is as good as absent, as in Transformers."""
    value: Any = config.get(key)
    if value is None:
        value = default
    if not _is_int(value) or not 1 <= value <= most:
        raise _bad(key, value, f"a whole number from 1 to {most}")
    return int(value)


def _number(config: Config, key: str, *, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _bad(key, value, "a number above 0")
    return float(value)


def _flag(config: Config, key: str) -> bool:
    value = config.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _bad(key, value, "true or false")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bad(key: str, value: object, expected: str) -> CheckpointError:
    found = "is missing" if value is None else f"is {value!r}"
    return CheckpointError(f"config.json: {key} {found}; expected {expected}", param=key)
