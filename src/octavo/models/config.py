"""Model configuration: reads a checkpoint's config.json into a `ModelSpec`. No other module reads config.json.

`spec_from_config` returns a `DecoderSpec` for the Llama family, a `GPTSpec` for GPT-2 and OPT. The spec describes the
model completely, apart from its weights. Imports no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import CheckpointError, UnsupportedModelError, cut

Config = dict[str, Any]

# Far above any model's. A larger value is a damaged file, and must not become a loop or an allocation.
MAX_LAYERS = 10_000
MAX_HEADS = 2**16
MAX_HEAD_DIM = 2**12
MAX_NUMBER = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The fields that all models have.

    num_heads, num_kv_heads, head_dim
                             query heads, K/V heads, and the size of both; num_heads * head_dim may differ from
                             hidden_size
    intermediate_size        width of the MLP
    max_position_embeddings  number of positions that were trained
    windows                  sliding window of each layer: the keys that a query sees, its own included. 0: all keys.
                             Empty: no layer has a window
    dtype                    the checkpoint's, a name such as "bfloat16"
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    windows: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"

    def window_of(self, layer: int) -> int:
        """Sliding window of a layer, in keys; 0: none."""
        return self.windows[layer] if self.windows else 0

    @property
    def kv_window(self) -> int | None:
        """Number of last keys that the KV cache must keep; None: all, because some layer has no window."""
        return max(self.windows) if self.windows and all(self.windows) else None

    def max_model_len(self, requested: int | None = None) -> int:
        """The longest sequence that the model supports; some models extend it if more positions are requested."""
        return self.max_position_embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """A decoder of the Llama family: RMS norms, rotary positions, gated MLPs.

    activation          of the gate, "silu" or "gelu_tanh"
    qkv_bias, o_bias, mlp_bias
                        the projections have a bias
    qk_norm             each head of Q and K is normalised before rotary embedding
    post_norms          outputs of attention and MLP are normalised before they are added to the residual stream
    unit_offset_norms   norms multiply by 1 + weight, in float32 for any model dtype
    embedding_scale     factor on embeddings
    attention_scale     factor on attention scores; None: 1 / sqrt(head_dim)
    rope_scaling        validated dict with config.json's keys, the argument of `rope_table`; None: no scaling
    local_rope_theta    theta of the layers with a sliding window, which are then not scaled; None: rope_theta
    """

    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    local_rope_theta: float | None = None
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    unit_offset_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None

    def max_model_len(self, requested: int | None = None) -> int:
        """See `ModelSpec`. Dynamic scaling and YaRN extend the trained length by `factor`, if more is requested.

        Dynamic scaling is not the default because its one table for all lengths changes short sequences, too. For YaRN,
        max_position_embeddings includes the factor in some files, and not in those edited as Qwen's authors advise.
        """
        known = self.max_position_embeddings
        scaling = self.rope_scaling or {}
        if requested is None or requested <= known or scaling.get("rope_type") not in ("dynamic", "yarn"):
            return known
        return max(known, int(scaling["original_max_position_embeddings"] * scaling["factor"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSpec(ModelSpec):
    """GPT-2 and OPT: layer norms, learned positions, an MLP of two projections.

    embedding_size      width of the embeddings; if it is not hidden_size, projections convert between them (OPT-350m)
    position_offset     row of the position table for position 0
    activation          of the MLP, a key of `gpt.ACTIVATIONS`
    norm_first          norms precede attention and MLP; else they follow the addition to the residual stream
    final_norm          a norm precedes the head
    norm_weights        norms have a weight and a bias
    bias                projections have a bias
    attention_scale     factor on attention scores
    scale_by_layer      attention scores are also divided by the layer's number, from 1
    """

    layer_norm_eps: float
    embedding_size: int
    position_offset: int = 0
    activation: str = "gelu_tanh"
    norm_first: bool = True
    final_norm: bool = True
    norm_weights: bool = True
    bias: bool = True
    attention_scale: float = 1.0
    scale_by_layer: bool = False


def spec_from_config(config: Config, generation_config: Config | None = None) -> ModelSpec:
    """Convert a parsed config.json to a spec; `generation_config` only adds end-of-sequence ids.

    Raises `UnsupportedModelError` for an unsupported architecture or feature, `CheckpointError` for a missing or
    invalid value.
    """
    _reject_custom_code(config)
    architecture = _architecture(config)
    _check_model_type(config)
    if isinstance(text := config.get("text_config"), dict):  # a multimodal model: only text is served
        config = config | {key: value for key, value in text.items() if value is not None}
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"quantization_config: weights quantised by {cut(repr(method))} are not supported; "
            "use the unquantised checkpoint or a GGUF file",
            param="quantization_config",
        )
    config = DEFAULTS.get(architecture, {}) | config
    common: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": _size(config, "vocab_size"),
        "tie_word_embeddings": _flag(config, "tie_word_embeddings"),
        "eos_token_ids": _eos_token_ids(config, generation_config or {}),
        "bos_token_id": _token_id(config, "bos_token_id"),
        "dtype": _dtype(config),
    }
    if architecture in GPT_ARCHITECTURES:
        return GPTSpec(**common, **GPT_ARCHITECTURES[architecture](config))
    return _decoder_spec(config, common, DECODER_ARCHITECTURES[architecture])


def _decoder_spec(config: Config, common: Config, traits_of: Callable[[Config], Config]) -> DecoderSpec:
    hidden_size = _size(config, "hidden_size")
    num_heads = _size(config, "num_attention_heads", maximum=MAX_HEADS)
    num_kv_heads = _size(config, "num_key_value_heads", default=num_heads, maximum=MAX_HEADS)
    if num_heads % num_kv_heads:
        raise _value_error("num_attention_heads", num_heads, f"a multiple of num_key_value_heads, {num_kv_heads}")
    head_dim = _size(config, "head_dim", default=hidden_size // num_heads or None, maximum=MAX_HEAD_DIM)
    traits: Config = {"activation": _activation(config, "hidden_act", "silu", GATED_ACTIVATIONS)} | traits_of(config)
    if "rope_theta" not in traits:
        traits["rope_theta"], traits["rope_scaling"] = _rope(config)
    if head_dim % 2:
        raise _value_error("head_dim", head_dim, "an even number, for rotary embedding of pairs")
    if head_dim == 2 and (traits["rope_scaling"] or {}).get("rope_type") == "dynamic":
        raise _value_error("head_dim", head_dim, "at least 4, for dynamic rope scaling")
    return DecoderSpec(
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_num_layers(config),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(config, "rms_norm_eps", default=1e-6),
        max_position_embeddings=_size(config, "max_position_embeddings"),
        **common,
        **traits,
    )


# -- architectures ----------------------------------------------------------------------------------------------------

GATED_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations of gated MLPs: config.json's name -> Octavo's."""

MLP_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Activations of GPT-2 and OPT: config.json's name -> Octavo's."""

_GEMMA3: Config = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
DEFAULTS: Mapping[str, Config] = {
    "MistralForCausalLM": {"sliding_window": 4096},
    "Qwen3ForCausalLM": {"head_dim": 128},
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "GPT2LMHeadModel": {"tie_word_embeddings": True, "eos_token_id": 50256, "bos_token_id": 50256},
    "OPTForCausalLM": {"tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 2},
}
"""Transformers' defaults for keys that published config.json files omit. A key with the value null is not omitted."""


def _llama(config: Config) -> Config:
    bias = _flag(config, "attention_bias")
    # Octavo's own key: GGUF files may have biases on Q, K and V alone.
    o_bias = _flag(config, "attention_output_bias") if "attention_output_bias" in config else bias
    return {"qkv_bias": bias, "o_bias": o_bias, "mlp_bias": _flag(config, "mlp_bias")}


def _mistral(config: Config) -> Config:
    return {"windows": _windows(config, lambda layer: True)}


def _qwen2(config: Config) -> Config:
    return {"qkv_bias": True, "windows": _qwen_windows(config)}


def _qwen3(config: Config) -> Config:
    bias = _flag(config, "attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True, "windows": _qwen_windows(config)}


def _gemma3(config: Config) -> Config:
    """Gemma 3 (arXiv 2503.19786): five layers with a sliding window, then one without, and so on."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise UnsupportedModelError(f"{key} {cut(repr(config[key]))} is not supported; supported: none", param=key)
    bias = _flag(config, "attention_bias")
    period = _size(config, "sliding_window_pattern", default=6)
    by_layer_type = config.get("rope_parameters")
    if not isinstance(by_layer_type, dict) or "full_attention" not in by_layer_type:  # before Transformers 5
        by_layer_type = {"sliding_attention": {"rope_theta": config.get("rope_local_base_freq")}}
    local_theta, local_scaling = _rope({"rope_parameters": by_layer_type.get("sliding_attention")}, theta=1e4)
    if local_scaling:
        raise UnsupportedModelError(
            f"rope scaling {local_scaling['rope_type']!r} of sliding window layers is not supported",
            param="rope_parameters",
        )
    rope_theta, rope_scaling = _rope(config | {"rope_parameters": by_layer_type.get("full_attention")}, theta=1e6)
    return {
        "activation": _activation(config, "hidden_activation", "gelu_pytorch_tanh", GATED_ACTIVATIONS),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "post_norms": True,
        "unit_offset_norms": True,
        "embedding_scale": _size(config, "hidden_size") ** 0.5,
        "attention_scale": _number(config, "query_pre_attn_scalar") ** -0.5,
        "windows": _windows(config, lambda layer: (layer + 1) % period != 0),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "local_rope_theta": local_theta,
    }


DECODER_ARCHITECTURES: Mapping[str, Callable[[Config], Config]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
}


def _gpt2(config: Config) -> Config:
    if config.get("add_cross_attention"):
        raise UnsupportedModelError("add_cross_attention is not supported: there is no encoder")
    sizes = _even_heads(config, "n_embd", "n_head")
    return sizes | {
        "embedding_size": sizes["hidden_size"],
        "intermediate_size": _size(config, "n_inner", default=4 * sizes["hidden_size"]),
        "num_layers": _num_layers(config, "n_layer"),
        "max_position_embeddings": _size(config, "n_positions", default=1024),
        "layer_norm_eps": _number(config, "layer_norm_epsilon", default=1e-5),
        "activation": _activation(config, "activation_function", "gelu_new", MLP_ACTIVATIONS),
        "attention_scale": sizes["head_dim"] ** -0.5 if _flag(config, "scale_attn_weights", default=True) else 1.0,
        "scale_by_layer": _flag(config, "scale_attn_by_inverse_layer_idx"),
    }


def _opt(config: Config) -> Config:
    sizes = _even_heads(config, "hidden_size", "num_attention_heads")
    norm_first = _flag(config, "do_layer_norm_before", default=True)
    return sizes | {
        "embedding_size": _size(config, "word_embed_proj_dim", default=sizes["hidden_size"]),
        "intermediate_size": _size(config, "ffn_dim"),
        "num_layers": _num_layers(config),
        "max_position_embeddings": _size(config, "max_position_embeddings"),
        "position_offset": 2,  # two rows were padding
        "layer_norm_eps": 1e-5,
        "activation": _activation(config, "activation_function", "relu", MLP_ACTIVATIONS),
        "norm_first": norm_first,
        "final_norm": norm_first and not _flag(config, "_remove_final_layer_norm"),
        "norm_weights": _flag(config, "layer_norm_elementwise_affine", default=True),
        "bias": _flag(config, "enable_bias", default=True),
        "attention_scale": sizes["head_dim"] ** -0.5,
    }


GPT_ARCHITECTURES: Mapping[str, Callable[[Config], Config]] = {"GPT2LMHeadModel": _gpt2, "OPTForCausalLM": _opt}
ARCHITECTURES = (*DECODER_ARCHITECTURES, *GPT_ARCHITECTURES)
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma3_text", "gpt2", "opt")


def _even_heads(config: Config, hidden_key: str, heads_key: str) -> Config:
    hidden_size, num_heads = _size(config, hidden_key), _size(config, heads_key, maximum=MAX_HEADS)
    if hidden_size % num_heads or hidden_size // num_heads > MAX_HEAD_DIM:
        raise _value_error(
            heads_key, num_heads, f"a divisor of {hidden_key}, {hidden_size}, into heads of {MAX_HEAD_DIM} at maximum"
        )
    head_dim = hidden_size // num_heads
    return {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_heads, "head_dim": head_dim}


# -- sliding windows --------------------------------------------------------------------------------------------------


def _qwen_windows(config: Config) -> tuple[int, ...]:
    """Qwen's sliding_window applies only with use_sliding_window, from layer max_window_layers on."""
    if not _flag(config, "use_sliding_window"):
        return ()
    first = config.get("max_window_layers", 28)
    if not _is_int(first):
        raise _value_error("max_window_layers", first, "a whole number")
    return _windows({"sliding_window": 4096} | config, lambda layer: layer >= first)


def _windows(config: Config, has_window: Callable[[int], bool]) -> tuple[int, ...]:
    """Sliding window of each layer, 0 for none; `layer_types`, if given, overrides `has_window`."""
    if config.get("sliding_window") is None:
        return ()
    window = _size(config, "sliding_window")
    num_layers = _num_layers(config)
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if has_window(layer) else 0 for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise _value_error("layer_types", kinds, f"a list of {num_layers} layer types")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise UnsupportedModelError(
                f"layer_types: {cut(repr(kind))} is not supported; supported: sliding_attention, full_attention",
                param="layer_types",
            )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


# -- rotary embedding -------------------------------------------------------------------------------------------------

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
}


def _rope(config: Config, theta: float = 10000.0) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from `rope_parameters` (Transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise _value_error("rope_scaling", scaling, "an object")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise UnsupportedModelError("rope_parameters by layer type are not supported", param="rope_parameters")
    theta = _number(config | scaling, "rope_theta", default=theta)
    if (part := (config | scaling).get("partial_rotary_factor") or 1.0) != 1.0:
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
    trained = {"original_max_position_embeddings": config.get("max_position_embeddings")}
    scaling = {key: value for key, value in scaling.items() if key not in ("rope_theta", "type")}
    scaling = scaling | trained if kind == "dynamic" else trained | scaling
    needed = ROPE_SCALING[kind]
    given = [key for key in _YARN_OPTIONS if kind == "yarn" and scaling.get(key) not in (None, 0)]
    numbers = {key: _number(scaling, key) for key in (*needed, *given)}
    if kind == "yarn" and theta <= 1:
        raise _value_error("rope_theta", theta, "a number above 1, for yarn")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise _value_error("low_freq_factor", scaling["low_freq_factor"], "a number below high_freq_factor")
    return theta, scaling | numbers | {"rope_type": kind}


# -- tokens -----------------------------------------------------------------------------------------------------------


def _eos_token_ids(config: Config, generation_config: Config) -> tuple[int, ...]:
    """End-of-sequence ids of both files, without duplicates: the end of a turn is often in only one of them."""
    ids: dict[int, None] = {}
    for source in (generation_config, config):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                if not _is_int(token_id) or token_id < 0:
                    raise _value_error("eos_token_id", value, "a token id or a list of them")
                ids[token_id] = None
    return tuple(ids)


def _token_id(config: Config, key: str) -> int | None:
    value = config.get(key)
    if value is not None and (not _is_int(value) or value < 0):
        raise _value_error(key, value, "a token id")
    return value


# -- validation -------------------------------------------------------------------------------------------------------


def _reject_custom_code(config: Config) -> None:
    for key in ("auto_map", "custom_code", "trust_remote_code"):
        if config.get(key):
            raise UnsupportedModelError(
                f"custom code is not supported: config.json has {key!r}; Octavo runs no code of a model directory",
                param=key,
            )


def _architecture(config: Config) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise _value_error("architectures", names, "a list of names")
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return name
    found = cut(", ".join(map(str, names))) or "missing in config.json"
    raise UnsupportedModelError(
        f"architecture {found} is not supported; {_supported(found, ARCHITECTURES)}", param="architectures"
    )


def _check_model_type(config: Config) -> None:
    """Transformers selects the model by model_type, so an unknown one is another model."""
    name = config.get("model_type")
    if name is not None and name not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"model_type {cut(repr(name))} is not supported; {_supported(str(name), MODEL_TYPES)}", param="model_type"
        )


def _supported(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.8)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}supported: {', '.join(known)}"


def _activation(config: Config, key: str, default: str, known: Mapping[str, str]) -> str:
    name = config.get(key) or default
    if not isinstance(name, str) or name not in known:
        raise UnsupportedModelError(
            f"{key} {cut(repr(name))} is not supported; supported: {', '.join(known)}", param=key
        )
    return known[name]


def _dtype(config: Config) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in ("float32", "float16", "bfloat16"):
        raise UnsupportedModelError(
            f"dtype {cut(repr(name))} is not supported; supported: float32, float16, bfloat16", param="dtype"
        )
    return str(name)


def _num_layers(config: Config, key: str = "num_hidden_layers") -> int:
    return _size(config, key, maximum=MAX_LAYERS)


def _size(config: Config, key: str, *, default: int | None = None, maximum: int = 2**28) -> int:
    """An integer from 1 to `maximum`. null is the same as absent, as in Transformers."""
    value: Any = config.get(key)
    if value is None:
        value = default
    if not _is_int(value) or not 1 <= value <= maximum:
        raise _value_error(key, value, f"a whole number from 1 to {maximum}")
    return int(value)


def _number(config: Config, key: str, *, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 / MAX_NUMBER < value < MAX_NUMBER:
        raise _value_error(key, value, f"a number above 0, and below {MAX_NUMBER:g}")
    return float(value)


def _flag(config: Config, key: str, *, default: bool = False) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _value_error(key, value, "true or false")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _value_error(key: str, value: object, expected: str) -> CheckpointError:
    found = "is missing" if value is None else f"is {cut(repr(value))}"
    return CheckpointError(f"config.json: {key} {found}; expected {expected}", param=key)
