"""What a checkpoint's config.json says about the model, read here and nowhere else.

`spec_from_config` gives a `ModelSpec`: a `DecoderSpec` for the Llama family, a `GPTSpec` for GPT-2 and OPT. Either is
all that the rest of Octavo knows of a model before its weights.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import CheckpointError, UnsupportedModelError, cut

Config = dict[str, Any]

# Far above any model's; what is above these is damage, and must not become a loop or an allocation.
MOST_LAYERS = 10_000
MOST_HEADS = 2**16
MOST_HEAD_DIM = 2**12
MOST_NUMBER = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What every model has: sizes, and the facts about its tokens that config.json holds.

    num_heads of Q share num_kv_heads of K and V, all of head_dim; head_dim * num_heads need not be hidden_size.
    intermediate_size is the width of the MLP, max_position_embeddings the number of positions that were trained.
    windows holds each layer's number of keys that a query sees, its own included, 0 for all; empty: all, in each layer.
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
    max_position_embeddings: int
    windows: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"

    def window_of(self, layer: int) -> int:
        """How many keys a query of the layer sees; 0: all."""
        return self.windows[layer] if self.windows else 0

    @property
    def kept_window(self) -> int | None:
        """How many of the last keys some query may still ask for; None: all, as one layer at least sees all."""
        return max(self.windows) if self.windows and all(self.windows) else None

    def num_positions(self, asked: int | None = None) -> int:
        """The longest sequence that the model can be given, where `asked` positions are wished for."""
        return self.max_position_embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """A decoder of the Llama family: RMS norms, rotary positions, gated MLPs.

    activation          of the gate, "silu" or "gelu_tanh"
    qkv_bias, o_bias, mlp_bias   which projections add a bias
    qk_norm             every head of Q and K is normalised before it is turned
    post_norms          attention and MLP are normalised behind, too, before they are added to the residual stream
    unit_offset_norms   norms multiply by 1 + weight, in float32 whatever the model's dtype
    embedding_scale     what embeddings are multiplied by
    attention_scale     what scores are multiplied by; None: 1 / sqrt(head_dim)
    rope_scaling        None or a dict of config.json's words, checked, that `rope_table` takes
    local_rope_theta    theta of the layers with a window, which are then not scaled; None: as everywhere
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

    def num_positions(self, asked: int | None = None) -> int:
        """See `ModelSpec`. Dynamic scaling and YaRN go `factor` times as far as was trained. The former only if it
        must: the one table for all lengths then differs from plain rope for short sequences, too. Of the latter some
        files say so in max_position_embeddings, and others, edited as Qwen's makers advise, do not."""
        known = self.max_position_embeddings
        scaling = self.rope_scaling or {}
        if asked is None or asked <= known or scaling.get("rope_type") not in ("dynamic", "yarn"):
            return known
        return max(known, int(scaling["original_max_position_embeddings"] * scaling["factor"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSpec(ModelSpec):
    """GPT-2 and OPT: layer norms, learned positions, an MLP of two projections.

    embedding_size      width of the embeddings; where it is not hidden_size, projections lead in and out (OPT-350m)
    position_offset     row of the position table that belongs to position 0
    activation          of the MLP, a key of `gpt.ACTIVATIONS`
    norm_first          norms stand before attention and MLP, else behind their addition to the residual stream
    final_norm          one more norm before the head
    norm_weights        norms have a weight and a bias
    bias                projections have a bias
    attention_scale     what scores are multiplied by
    scale_by_layer      and divided by the number of the layer, from 1
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
    """Read config.json and generation_config.json, as parsed; `generation_config` only adds end-of-sequence ids.

    Raises `UnsupportedModelError` for an architecture or a feature that Octavo does not have, `CheckpointError` for
    a value that is missing or makes no sense.
    """
    _refuse_custom_code(config)
    architecture = _architecture(config)
    _check_model_type(config)
    if isinstance(text := config.get("text_config"), dict):  # of a model that also sees: only its text is served
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
    if architecture in GPTS:
        return GPTSpec(**common, **GPTS[architecture](config))
    return _decoder_spec(config, common, FAMILY[architecture])


def _decoder_spec(config: Config, common: Config, traits_of: Callable[[Config], Config]) -> DecoderSpec:
    hidden_size = _size(config, "hidden_size")
    num_heads = _size(config, "num_attention_heads", most=MOST_HEADS)
    num_kv_heads = _size(config, "num_key_value_heads", default=num_heads, most=MOST_HEADS)
    if num_heads % num_kv_heads:
        raise _bad("num_attention_heads", num_heads, f"a multiple of num_key_value_heads, {num_kv_heads}")
    head_dim = _size(config, "head_dim", default=hidden_size // num_heads or None, most=MOST_HEAD_DIM)
    traits: Config = {"activation": _activation(config, "hidden_act", "silu", GATES)} | traits_of(config)
    if "rope_theta" not in traits:
        traits["rope_theta"], traits["rope_scaling"] = _rope(config)
    if head_dim % 2:
        raise _bad("head_dim", head_dim, "an even number: rotary embedding turns pairs")
    if head_dim == 2 and (traits["rope_scaling"] or {}).get("rope_type") == "dynamic":
        raise _bad("head_dim", head_dim, "at least 4: dynamic scaling stretches all pairs but the first")
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


# -- what the architectures differ in ---------------------------------------------------------------------------------

GATES = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""config.json's names of activations, and ours: for gated MLPs here, for GPT-2 and OPT below."""

PLAIN = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

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
"""What published config.json files leave out, as Transformers fills it in. A key that says null is not left out."""


def _llama(config: Config) -> Config:
    bias = _flag(config, "attention_bias")
    # A word of our own: GGUF files may have biases on Q, K and V alone.
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
    """arXiv 2503.19786. Five layers with a window, then one without, and so on."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise UnsupportedModelError(f"{key} {cut(repr(config[key]))} is not supported; supported: none", param=key)
    bias = _flag(config, "attention_bias")
    period = _size(config, "sliding_window_pattern", default=6)
    by_kind = config.get("rope_parameters")
    if not isinstance(by_kind, dict) or "full_attention" not in by_kind:  # as it was before Transformers 5
        by_kind = {"sliding_attention": {"rope_theta": config.get("rope_local_base_freq")}}
    local_theta, local_scaling = _rope({"rope_parameters": by_kind.get("sliding_attention")}, theta=1e4)
    if local_scaling:
        raise UnsupportedModelError(
            f"rope scaling {local_scaling['rope_type']!r} of layers with a window is not supported; supported: default",
            param="rope_parameters",
        )
    rope_theta, rope_scaling = _rope(config | {"rope_parameters": by_kind.get("full_attention")}, theta=1e6)
    return {
        "activation": _activation(config, "hidden_activation", "gelu_pytorch_tanh", GATES),
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


FAMILY: Mapping[str, Callable[[Config], Config]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
}


def _gpt2(config: Config) -> Config:
    if config.get("add_cross_attention"):
        raise UnsupportedModelError("add_cross_attention is not supported: there is no encoder to look at")
    sizes = _even_heads(config, "n_embd", "n_head")
    return sizes | {
        "embedding_size": sizes["hidden_size"],
        "intermediate_size": _size(config, "n_inner", default=4 * sizes["hidden_size"]),
        "num_layers": _num_layers(config, "n_layer"),
        "max_position_embeddings": _size(config, "n_positions", default=1024),
        "layer_norm_eps": _number(config, "layer_norm_epsilon", default=1e-5),
        "activation": _activation(config, "activation_function", "gelu_new", PLAIN),
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
        "position_offset": 2,  # the rows of what was once padding
        "layer_norm_eps": 1e-5,
        "activation": _activation(config, "activation_function", "relu", PLAIN),
        "norm_first": norm_first,
        "final_norm": norm_first and not _flag(config, "_remove_final_layer_norm"),
        "norm_weights": _flag(config, "layer_norm_elementwise_affine", default=True),
        "bias": _flag(config, "enable_bias", default=True),
        "attention_scale": sizes["head_dim"] ** -0.5,
    }


GPTS: Mapping[str, Callable[[Config], Config]] = {"GPT2LMHeadModel": _gpt2, "OPTForCausalLM": _opt}
ARCHITECTURES = (*FAMILY, *GPTS)
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma3_text", "gpt2", "opt")


def _even_heads(config: Config, hidden_key: str, heads_key: str) -> Config:
    hidden_size, num_heads = _size(config, hidden_key), _size(config, heads_key, most=MOST_HEADS)
    if hidden_size % num_heads or hidden_size // num_heads > MOST_HEAD_DIM:
        raise _bad(
            heads_key, num_heads, f"a divisor of {hidden_key}, {hidden_size}, into heads of {MOST_HEAD_DIM} at most"
        )
    head_dim = hidden_size // num_heads
    return {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_heads, "head_dim": head_dim}


# -- sliding windows --------------------------------------------------------------------------------------------------


def _qwen_windows(config: Config) -> tuple[int, ...]:
    """Qwen configs carry a sliding_window that counts only with use_sliding_window, from layer max_window_layers on."""
    if not _flag(config, "use_sliding_window"):
        return ()
    first = config.get("max_window_layers", 28)
    if not _is_int(first):
        raise _bad("max_window_layers", first, "a whole number")
    return _windows({"sliding_window": 4096} | config, lambda layer: layer >= first)


def _windows(config: Config, has_window: Callable[[int], bool]) -> tuple[int, ...]:
    """Each layer's window, 0 for none; `layer_types`, where given, overrules `has_window`."""
    if config.get("sliding_window") is None:
        return ()
    window = _size(config, "sliding_window")
    num_layers = _num_layers(config)
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if has_window(layer) else 0 for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise _bad("layer_types", kinds, f"a list of {num_layers} kinds of layer")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise UnsupportedModelError(
                f"layer_types: {cut(repr(kind))} is not supported; supported: sliding_attention, full_attention",
                param="layer_types",
            )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


# -- rotary embedding -------------------------------------------------------------------------------------------------

_FACTOR = ("factor",)
_TRAINED = ("factor", "original_max_position_embeddings")
# YaRN's, which may be absent; 0 is as good.
_YARN_OPTIONS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
# Each kind of scaling, and the numbers that it cannot do without.
ROPE_SCALING: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": _FACTOR,
    "dynamic": _TRAINED,
    "llama3": (*_TRAINED, "low_freq_factor", "high_freq_factor"),
    "yarn": _TRAINED,
}


def _rope(config: Config, theta: float = 10000.0) -> tuple[float, dict[str, Any] | None]:
    """theta and scaling, from `rope_parameters` (Transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise _bad("rope_scaling", scaling, "an object")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise UnsupportedModelError("rope_parameters by kind of layer are not supported", param="rope_parameters")
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
        raise _bad("rope_theta", theta, "a number above 1, for yarn to count turns by")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise _bad("low_freq_factor", scaling["low_freq_factor"], "a number below high_freq_factor")
    return theta, scaling | numbers | {"rope_type": kind}


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
        if isinstance(name, str) and name in ARCHITECTURES:
            return name
    found = cut(", ".join(map(str, names))) or "none named in config.json"
    raise UnsupportedModelError(
        f"architecture {found} is not supported; {_supported(found, ARCHITECTURES)}", param="architectures"
    )


def _check_model_type(config: Config) -> None:
    """Transformers chooses the model by this word, so one that is unknown here is another model."""
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
    return _size(config, key, most=MOST_LAYERS)


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
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 / MOST_NUMBER < value < MOST_NUMBER:
        raise _bad(key, value, f"a number above 0, and below {MOST_NUMBER:g}")
    return float(value)


def _flag(config: Config, key: str, *, default: bool = False) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _bad(key, value, "true or false")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bad(key: str, value: object, expected: str) -> CheckpointError:
    found = "is missing" if value is None else f"is {cut(repr(value))}"
    return CheckpointError(f"config.json: {key} {found}; expected {expected}", param=key)
