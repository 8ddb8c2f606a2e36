"""Readers of config.json's values: each validates one and raises an error with its key, value and the expected range.

Shared by the families in `families`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import CheckpointError, UnsupportedModelError, cut
from octavo.models.spec import DecoderSpec, ModelSpec

Config = dict[str, Any]

# Far above any model's. A larger value is a damaged file, and must not become a loop or an allocation.
MAX_LAYERS = 10_000
MAX_HEADS = 2**16
MAX_HEAD_DIM = 2**12
MAX_NUMBER = 1e15


GATED_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations of gated MLPs: config.json's name -> Octavo's."""
MLP_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Activations of GPT-2, OPT and StarCoder2: config.json's name -> Octavo's."""

# -- sizes and numbers


def read_activation(config: Config, key: str, default: str, known: Mapping[str, str]) -> str:
    name = config.get(key) or default
    if not isinstance(name, str) or name not in known:
        raise UnsupportedModelError(
            f"{key} {cut(repr(name))} is not supported; supported: {', '.join(known)}", param=key
        )
    return known[name]


def read_dtype(config: Config) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in ("float32", "float16", "bfloat16"):
        raise UnsupportedModelError(
            f"dtype {cut(repr(name))} is not supported; supported: float32, float16, bfloat16", param="dtype"
        )
    return str(name)


def read_num_layers(config: Config, key: str = "num_hidden_layers") -> int:
    return read_size(config, key, maximum=MAX_LAYERS)


def read_size(config: Config, key: str, *, default: int | None = None, maximum: int = 2**28) -> int:
    """An integer from 1 to `maximum`. null is the same as absent, as in Transformers."""
    value: Any = config.get(key)
    if value is None:
        value = default
    if not is_int(value) or not 1 <= value <= maximum:
        raise value_error(key, value, f"a whole number from 1 to {maximum}")
    return int(value)


def read_number(config: Config, key: str, *, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 / MAX_NUMBER < value < MAX_NUMBER:
        raise value_error(key, value, f"a number above 0, and below {MAX_NUMBER:g}")
    return float(value)


def read_flag(config: Config, key: str, *, default: bool = False) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise value_error(key, value, "true or false")
    return value


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def value_error(key: str, value: object, expected: str) -> CheckpointError:
    found = "is missing" if value is None else f"is {cut(repr(value))}"
    return CheckpointError(f"config.json: {key} {found}; expected {expected}", param=key)


# -- heads


def read_even_heads(config: Config, hidden_key: str, heads_key: str) -> Config:
    hidden_size, num_heads = read_size(config, hidden_key), read_size(config, heads_key, maximum=MAX_HEADS)
    if hidden_size % num_heads or hidden_size // num_heads > MAX_HEAD_DIM:
        raise value_error(
            heads_key, num_heads, f"a divisor of {hidden_key}, {hidden_size}, into heads of {MAX_HEAD_DIM} at maximum"
        )
    head_dim = hidden_size // num_heads
    return {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_heads, "head_dim": head_dim}


# -- sliding windows


def read_windows(config: Config, has_window: Callable[[int], bool]) -> tuple[int, ...]:
    """Sliding window of each layer, 0 for none; `layer_types`, if given, overrides `has_window`."""
    if config.get("sliding_window") is None:
        return ()
    window = read_size(config, "sliding_window")
    num_layers = read_num_layers(config)
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if has_window(layer) else 0 for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise value_error("layer_types", kinds, f"a list of {num_layers} layer types")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise UnsupportedModelError(
                f"layer_types: {cut(repr(kind))} is not supported; supported: sliding_attention, full_attention",
                param="layer_types",
            )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def check_layer_types(config: Config, spec: ModelSpec) -> None:
    """Refuse `layer_types` of a family that does not read them, if they differ from the family's windows."""
    kinds = config.get("layer_types")
    expected = ["sliding_attention" if spec.window_of(layer) else "full_attention" for layer in range(spec.num_layers)]
    for layer in spec.recurrent_layers:
        expected[layer] = "linear_attention"
    if kinds is not None and kinds != expected:
        raise UnsupportedModelError(
            f"layer_types {cut(repr(kinds))} is not supported; this model's layers are {cut(repr(expected))}",
            param="layer_types",
        )


# -- rotary embedding

_FACTOR = ("factor",)
_TRAINED_LENGTH = ("factor", "original_max_position_embeddings")
# Optional keys of YaRN; 0 is the same as absent.
_YARN_OPTIONS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
# Required keys of each kind of scaling.
ROPE_SCALING: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": _FACTOR,
    "dynamic": _TRAINED_LENGTH,
    "llama3": (*_TRAINED_LENGTH, "low_freq_factor", "high_freq_factor"),
    "yarn": _TRAINED_LENGTH,
    "longrope": _TRAINED_LENGTH,
}


def rope_parameters(config: Config) -> dict[str, Any]:
    """`rope_parameters` (Transformers 5), which `rope_scaling` (before) replaces as a whole, as in Transformers."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise value_error("rope_scaling", scaling, "an object")
    return scaling


def read_rope(config: Config, theta: float = 10000.0, *, partial: bool = False) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from `rope_parameters`, with `rope_theta` inside or outside.

    partial  the family rotates a part of each head, see `read_rotary_dim`
    """
    scaling = rope_parameters(config)
    if any(isinstance(value, dict) for value in scaling.values()):
        raise UnsupportedModelError("rope_parameters by layer type are not supported", param="rope_parameters")
    theta = read_number(config | scaling, "rope_theta", default=theta)
    if (part := (config | scaling).get("partial_rotary_factor") or 1.0) != 1.0 and not partial:
        raise UnsupportedModelError(
            f"partial_rotary_factor {part} is not supported; supported: 1.0", param="partial_rotary_factor"
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_SCALING:
        raise UnsupportedModelError(
            f"rope scaling {cut(repr(kind))} is not supported; supported: {', '.join(ROPE_SCALING)}",
            param="rope_scaling",
        )
    if kind == "default":
        return theta, None
    scaling = _with_trained_length(config, {k: v for k, v in scaling.items() if k not in ("rope_theta", "type")}, kind)
    needed = ROPE_SCALING[kind]
    options = {"yarn": _YARN_OPTIONS, "longrope": ("attention_factor",)}.get(kind, ())
    given = [key for key in options if scaling.get(key) not in (None, 0)]
    numbers = {key: read_number(scaling, key) for key in (*needed, *given)}
    if kind == "longrope" and (trained := numbers["original_max_position_embeddings"]) <= 1:
        raise value_error("original_max_position_embeddings", trained, "a number above 1, for longrope")
    if kind == "yarn" and theta <= 1:
        raise value_error("rope_theta", theta, "a number above 1, for yarn")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise value_error("low_freq_factor", scaling["low_freq_factor"], "a number below high_freq_factor")
    return theta, scaling | numbers | {"rope_type": kind}


def _with_trained_length(config: Config, scaling: Config, kind: str) -> Config:
    """Add the length that was trained, and the factor that follows from it if the config has none."""
    key, whole = "original_max_position_embeddings", config.get("max_position_embeddings")
    outside = whole if kind == "dynamic" else config.get(key)  # as in Transformers
    scaling = {key: whole} | scaling | ({} if outside is None else {key: outside})
    follows = kind == "longrope" or (kind == "yarn" and "factor" in scaling)
    if follows and scaling.get("factor") is None:
        scaling["factor"] = read_number(config, "max_position_embeddings") / read_number(scaling, key)
    return scaling


def check_rotary_dim(scaling: Config | None, rotary_dim: int) -> None:
    """Raise for a scaling that does not fit the rotated dimensions of a head."""
    kind = (scaling or {}).get("rope_type")
    if rotary_dim % 2:
        raise value_error("head_dim", rotary_dim, "an even number, for rotary embedding of pairs")
    if rotary_dim == 2 and kind == "dynamic":
        raise value_error("head_dim", rotary_dim, "at least 4, for dynamic rope scaling")
    if scaling is None or kind != "longrope":
        return
    for key in ("short_factor", "long_factor"):
        factors = scaling.get(key)
        if not isinstance(factors, list) or len(factors) != rotary_dim // 2:
            raise value_error(key, factors, f"a list of {rotary_dim // 2} numbers")
        for i, factor in enumerate(factors):
            read_number({f"{key}[{i}]": factor}, f"{key}[{i}]")
    for key in ("short_mscale", "long_mscale"):
        if scaling.get(key) is not None:
            raise UnsupportedModelError(f"{key} is not supported; remove it to scale by factor", param="rope_scaling")


def read_rotary_dim(config: Config, head_dim: int) -> int:
    """The dimensions of a head that are rotated, by `partial_rotary_factor`."""
    factor = read_number(config | rope_parameters(config), "partial_rotary_factor", default=1.0)
    rotary_dim = int(head_dim * factor)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2 or head_dim % 2:
        raise value_error("partial_rotary_factor", factor, f"an even part of head_dim, {head_dim}, an even number")
    return rotary_dim


# -- tokens


def read_eos_token_ids(*sources: Config) -> tuple[int, ...]:
    """End-of-sequence ids of all sources, without duplicates: the end of a turn is often in only one of them."""
    ids: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                if not is_int(token_id) or token_id < 0:
                    raise value_error("eos_token_id", value, "a token id or a list of them")
                ids[token_id] = None
    return tuple(ids)


def read_token_id(config: Config, key: str) -> int | None:
    value = config.get(key)
    if value is not None and (not is_int(value) or value < 0):
        raise value_error(key, value, "a token id")
    return value


# -- the Llama family

DECODER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
"""Keys that `read_decoder_spec` reads."""


def read_decoder_spec(
    config: Config,
    common: Config,
    *,
    partial_rotary: bool = False,
    spec_class: type[DecoderSpec] = DecoderSpec,
    **traits: Any,
) -> DecoderSpec:
    """The spec of a model of the Llama family.

    common          fields of all models
    partial_rotary  `partial_rotary_factor` is a key of the family
    traits          fields of the family
    """
    hidden_size = read_size(config, "hidden_size")
    num_heads = read_size(config, "num_attention_heads", maximum=MAX_HEADS)
    num_kv_heads = read_size(config, "num_key_value_heads", default=num_heads, maximum=MAX_HEADS)
    if num_heads % num_kv_heads:
        raise value_error("num_attention_heads", num_heads, f"a multiple of num_key_value_heads, {num_kv_heads}")
    head_dim = read_size(config, "head_dim", default=hidden_size // num_heads or None, maximum=MAX_HEAD_DIM)
    if "activation" not in traits:
        traits["activation"] = read_activation(config, "hidden_act", "silu", GATED_ACTIVATIONS)
    if "rope_theta" not in traits:
        traits["rope_theta"], traits["rope_scaling"] = read_rope(config, partial=partial_rotary)
    if partial_rotary and (rotary_dim := read_rotary_dim(config, head_dim)) < head_dim:
        traits["rotary_dim"] = rotary_dim
    check_rotary_dim(traits["rope_scaling"], traits.get("rotary_dim", head_dim))
    return spec_class(
        hidden_size=hidden_size,
        intermediate_size=read_size(config, "intermediate_size"),
        num_layers=read_num_layers(config),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=traits.pop("rms_norm_eps", None) or read_number(config, "rms_norm_eps", default=1e-6),
        max_position_embeddings=read_size(config, "max_position_embeddings"),
        **common,
        **traits,
    )
