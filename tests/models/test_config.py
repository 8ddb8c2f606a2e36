"""`spec_from_config`: fields of each architecture, and errors that name unsupported or invalid values."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest

from octavo.errors import CheckpointError, ModelError, UnsupportedModelError
from octavo.models import registry
from octavo.models.config import spec_from_config
from octavo.models.spec import DecoderSpec, GPTSpec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 72,
    "intermediate_size": 37,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def spec(generation_config: dict[str, Any] | None = None, **changes: Any) -> Any:
    return spec_from_config(CONFIG | changes, generation_config or {})


def test_sizes() -> None:
    s = spec()
    assert (s.vocab_size, s.hidden_size, s.intermediate_size, s.num_layers) == (97, 72, 37, 4)
    assert (s.num_heads, s.num_kv_heads, s.head_dim, s.rms_norm_eps) == (6, 2, 12, 1e-5)
    assert (s.max_position_embeddings, s.rope_theta, s.rope_scaling, s.windows) == (128, 10000.0, None, ())
    assert not (s.tie_word_embeddings or s.qkv_bias or s.o_bias or s.mlp_bias or s.qk_norm)
    assert s.dtype == "float32"
    assert hash(s) == hash(spec())


def test_head_dim_overrides_the_derived_size() -> None:
    assert spec(head_dim=40).head_dim == 40
    assert spec(head_dim=None, num_attention_heads=2).head_dim == 36


def test_num_key_value_heads_defaults_to_all_heads() -> None:
    assert spec(num_key_value_heads=None).num_kv_heads == 6


@pytest.mark.parametrize(
    ("changes", "qkv", "o", "mlp", "norm"),
    [
        ({"architectures": ["LlamaForCausalLM"], "attention_bias": True}, True, True, False, False),
        ({"architectures": ["LlamaForCausalLM"], "mlp_bias": True}, False, False, True, False),
        ({"architectures": ["MistralForCausalLM"]}, False, False, False, False),
        ({"architectures": ["Qwen2ForCausalLM"]}, True, False, False, False),
        ({"architectures": ["Qwen3ForCausalLM"]}, False, False, False, True),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, True, True, False, True),
    ],
)
def test_biases_and_qk_norm_of_each_architecture(
    changes: dict[str, Any], qkv: bool, o: bool, mlp: bool, norm: bool
) -> None:
    s = spec(**changes)
    assert (s.qkv_bias, s.o_bias, s.mlp_bias, s.qk_norm) == (qkv, o, mlp, norm)


def test_qwen3_head_dim_defaults_to_128() -> None:
    assert spec(architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert spec(architectures=["Qwen3ForCausalLM"], head_dim=16).head_dim == 16


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [
        (2, 2, (2,)),
        (2, [7, 2], (7, 2)),
        ([5, 6], 9, (9, 5, 6)),
        (None, 4, (4,)),
        (0, None, (0,)),
        (None, None, ()),
    ],
)
def test_eos_token_ids_are_the_union_of_both_files(
    config_eos: Any, generation_eos: Any, expected: tuple[int, ...]
) -> None:
    assert spec({"eos_token_id": generation_eos}, eos_token_id=config_eos).eos_token_ids == expected


# -- rotary embedding -------------------------------------------------------------------------------------------------

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_rope_theta_from_either_key() -> None:
    assert spec(rope_theta=5e5).rope_theta == 5e5
    assert spec(rope_parameters={"rope_type": "default", "rope_theta": 7e4}).rope_theta == 7e4
    assert spec(rope_parameters={"rope_type": "default", "rope_theta": 7e4}).rope_scaling is None


def test_rope_scaling_from_either_key() -> None:
    old = spec(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})
    new = spec(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert old.rope_theta == new.rope_theta == 5e5
    assert LLAMA3.items() <= old.rope_scaling.items() and LLAMA3.items() <= new.rope_scaling.items()
    assert spec(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling["rope_type"] == "linear"


def test_yarn_trained_length_defaults_to_max_position_embeddings() -> None:
    scaling = spec(rope_scaling={"rope_type": "yarn", "factor": 4.0}).rope_scaling
    assert scaling["original_max_position_embeddings"] == 128


@pytest.mark.parametrize("kind", ["su", "mrope", "ntk", ["linear"]])
def test_unknown_rope_scaling_is_rejected(kind: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(f"rope scaling {kind!r} is not supported; supported: ")):
        spec(rope_scaling={"rope_type": kind, "factor": 2.0})


def test_dynamic_scaling_extends_max_position_embeddings() -> None:
    s = spec(rope_scaling={"type": "dynamic", "factor": 2.5, "original_max_position_embeddings": 7})
    assert s.rope_scaling["original_max_position_embeddings"] == 128  # as in Transformers
    assert [s.max_model_len(requested) for requested in (None, -1, 128, 129)] == [128, 128, 128, 320]
    assert spec(rope_scaling={"type": "linear", "factor": 2.5}).max_model_len(129) == 128
    with pytest.raises(CheckpointError, match="head_dim is 2; expected at least 4"):
        spec(rope_scaling={"type": "dynamic", "factor": 2.0}, head_dim=2)


def test_yarn_extends_the_trained_length_by_its_factor() -> None:
    """Also where max_position_embeddings is the trained length, in files edited as Qwen's authors advise."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    assert [spec(rope_scaling=yarn).max_model_len(requested) for requested in (None, -1, 128, 129, 999)] == [
        *[128] * 3,
        *[400] * 2,
    ]
    assert spec(rope_scaling=yarn, max_position_embeddings=400).max_model_len(999) == 400
    assert spec(rope_scaling={"rope_type": "yarn", "factor": 2.0}).max_model_len(999) == 256


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "beta_slow": "x"}, "beta_slow is 'x'"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": float("inf")}, "beta_fast is inf"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": []}, "attention_factor is \\[\\]"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e308}, "attention_factor is 1e\\+308"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1}, "rope_theta is 1"),
        ({"rope_type": "linear", "factor": 10**30}, "factor is 10+;"),
        ({"rope_type": "linear", "factor": 1e-300}, "factor is 1e-300"),
        ({"rope_type": "dynamic", "factor": 1e308}, "factor is 1e\\+308"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor is 4.0"),
    ],
)
def test_invalid_rope_scaling_numbers_are_rejected(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec(rope_scaling=scaling)


@pytest.mark.parametrize("missing", sorted(LLAMA3.keys() - {"original_max_position_embeddings"}))
def test_missing_rope_scaling_numbers_are_rejected(missing: str) -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != missing}
    with pytest.raises(CheckpointError, match=f"{missing} is missing"):
        spec(rope_scaling={"rope_type": "llama3", **scaling})


# -- sliding windows --------------------------------------------------------------------------------------------------

MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 32, "use_sliding_window": True}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 32}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({**MISTRAL, "sliding_window": 32}, (32, 32, 32, 32)),
        ({**MISTRAL, "sliding_window": None}, ()),
        (MISTRAL, (4096, 4096, 4096, 4096)),
        (QWEN2, ()),
        ({**QWEN2, "max_window_layers": 0}, ()),
        ({**QWEN2, "use_sliding_window": True}, (0, 0, 0, 0)),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 32)),
        ({**QWEN3, "max_window_layers": 0}, (32, 32, 32, 32)),
        (
            {**QWEN3, "layer_types": [*["full_attention"] * 3, "sliding_attention"], "max_window_layers": 0},
            (0, 0, 0, 32),
        ),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 32}, ()),
        (GEMMA3, (32, 32, 32, 32)),
        ({**GEMMA3, "sliding_window_pattern": 2}, (32, 0, 32, 0)),
        ({**GEMMA3, "sliding_window_pattern": 2, "layer_types": ["full_attention"] * 4}, (0, 0, 0, 0)),
        ({**GEMMA3, "num_hidden_layers": 7}, (32, 32, 32, 32, 32, 0, 32)),
    ],
)
def test_windows(changes: dict[str, Any], expected: tuple[int, ...]) -> None:
    s = spec(**changes)
    assert s.windows == expected
    assert [s.window_of(layer) for layer in range(s.num_layers)] == list(expected or [0] * 4)


@pytest.mark.parametrize(
    ("windows", "expected"), [((), None), ((0, 0), None), ((8, 0), None), ((8, 8), 8), ((8, 32, 4), 32)]
)
def test_kv_window_is_the_widest_window_of_all_layers(windows: tuple[int, ...], expected: int | None) -> None:
    assert dataclasses.replace(spec(), windows=windows).kv_window == expected


@pytest.mark.parametrize("kinds", [["full_attention"], "full_attention", ["full_attention"] * 5])
def test_layer_types_must_list_every_layer(kinds: Any) -> None:
    with pytest.raises(CheckpointError, match=r"layer_types is .*; expected a list of 4 layer types"):
        spec(**MISTRAL, layer_types=kinds)


def test_unknown_layer_types_are_rejected() -> None:
    with pytest.raises(UnsupportedModelError, match="layer_types: 'chunked_attention' is not supported"):
        spec(**MISTRAL, layer_types=[*["full_attention"] * 3, "chunked_attention"])


# -- Gemma 3 ----------------------------------------------------------------------------------------------------------


def test_gemma3_rope_of_both_transformers_formats() -> None:
    old = spec(**GEMMA3, rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling={"rope_type": "linear", "factor": 8.0})
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    assert spec(**GEMMA3, rope_parameters=parameters) == old
    assert (old.rope_theta, old.local_rope_theta, old.rope_scaling["factor"]) == (5e5, 2e4, 8.0)
    plain = spec(**GEMMA3)
    assert (plain.rope_theta, plain.local_rope_theta, plain.rope_scaling) == (1e6, 1e4, None)


def test_gemma3_defaults() -> None:
    """The text_config of the published Gemma 3 4B has only values that differ from the defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    s = spec_from_config(config | {"torch_dtype": "bfloat16"})
    assert isinstance(s, DecoderSpec)
    assert (s.num_heads, s.num_kv_heads, s.head_dim, s.vocab_size) == (8, 4, 256, 262_208)
    assert (s.max_position_embeddings, s.dtype, s.eos_token_ids) == (131_072, "bfloat16", (1, 106))
    assert s.tie_word_embeddings and s.qk_norm and len(s.names.post_norms) == 2 and s.unit_offset_norms
    assert (s.embedding_scale, s.attention_scale, s.activation) == (2560**0.5, 1 / 16, "gelu_tanh")
    assert s.windows.count(0) == 5 and s.windows[5] == 0 and s.kv_window is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ({"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        (
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope scaling 'linear' of sliding window layers",
        ),
    ],
)
def test_unsupported_gemma3_options_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec(**(GEMMA3 | changes))


# -- GPT-2 and OPT ----------------------------------------------------------------------------------------------------


def gpt2(**changes: Any) -> GPTSpec:
    config = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 97, "n_embd": 60, "n_head": 3, "n_layer": 2}
    s = spec_from_config(config | changes)
    assert isinstance(s, GPTSpec)
    return s


def opt(**changes: Any) -> GPTSpec:
    config = {"architectures": ["OPTForCausalLM"], "vocab_size": 97, "hidden_size": 56, "num_attention_heads": 7}
    s = spec_from_config(config | {"ffn_dim": 37, "num_hidden_layers": 2, "max_position_embeddings": 64} | changes)
    assert isinstance(s, GPTSpec)
    return s


def test_gpt2() -> None:
    s = gpt2()
    assert (s.num_layers, s.num_heads, s.num_kv_heads, s.head_dim, s.intermediate_size) == (2, 3, 3, 20, 240)
    assert (s.max_position_embeddings, s.position_offset, s.embedding_size) == (1024, 0, 60)
    assert (s.activation, s.attention_scale, s.scale_by_layer) == ("gelu_tanh", 20**-0.5, False)
    assert s.tie_word_embeddings and s.bias and s.norm_first and s.final_norm and s.norm_weights
    assert (s.eos_token_ids, s.bos_token_id, s.kv_window) == ((50256,), 50256, None)
    other = gpt2(n_inner=37, scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True, n_positions=9)
    assert (other.intermediate_size, other.attention_scale, other.scale_by_layer) == (37, 1.0, True)
    assert other.max_model_len(50) == 9


def test_opt() -> None:
    s = opt()
    assert (s.head_dim, s.intermediate_size, s.max_position_embeddings, s.position_offset) == (8, 37, 64, 2)
    assert (s.activation, s.embedding_size, s.layer_norm_eps) == ("relu", 56, 1e-5)
    assert s.tie_word_embeddings and s.bias and s.norm_first and s.final_norm and s.norm_weights
    other = opt(do_layer_norm_before=False, word_embed_proj_dim=24, enable_bias=False)
    assert (other.norm_first, other.final_norm, other.embedding_size, other.bias) == (False, False, 24, False)
    assert not opt(_remove_final_layer_norm=True).final_norm


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (gpt2, {"n_head": 7}, "n_head is 7; expected a divisor of n_embd, 60"),
        (gpt2, {"n_embd": None}, "n_embd is missing"),
        (gpt2, {"add_cross_attention": True}, "add_cross_attention True is not supported"),
        (gpt2, {"activation_function": "silu"}, "activation_function 'silu' is not supported"),
        (gpt2, {"scale_attn_weights": 1}, "scale_attn_weights is 1; expected true or false"),
        (opt, {"num_attention_heads": 3}, "num_attention_heads is 3; expected a divisor of hidden_size, 56"),
        (opt, {"ffn_dim": 0}, "ffn_dim is 0"),
        (opt, {"activation_function": ["relu"]}, "is not supported; supported: relu, gelu"),
    ],
)
def test_invalid_gpt_values_are_rejected(make: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(**changes)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architectures", [["MambaForCausalLM"], [], None, [["x"]]])
def test_unknown_architecture_lists_the_known_ones(architectures: Any) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        spec(architectures=architectures)
    assert all(name in str(caught.value) for name in registry.architectures())
    assert architectures or str(caught.value).startswith("a config.json without architectures and model_type is not ")
    assert "MambaForCausalLM" in str(caught.value) or not architectures or architectures == [["x"]]


@pytest.mark.parametrize(("model_type", "near"), [("lama", "llama"), ("qwen22", "qwen2"), ("mamba", None), (7, None)])
def test_unknown_model_type_lists_the_known_ones(model_type: Any, near: str | None) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        spec(model_type=model_type)
    message = str(caught.value)
    assert repr(model_type) in message and "supported: llama, mistral, qwen2, qwen3, gemma3" in message
    assert (f"did you mean {near}?" in message) == (near is not None)


@pytest.mark.parametrize("key", ["architectures", "model_type", "hidden_size", "hidden_act", "dtype", "rope_scaling"])
def test_long_values_are_cut_in_messages(key: str) -> None:
    long = "x" * 1_000_000
    value = {"architectures": [long], "rope_scaling": {"rope_type": long}}.get(key, long)
    with pytest.raises(ModelError) as caught:
        spec(**{key: value})
    message = str(caught.value)
    for known in (registry.architectures(), registry.model_types()):
        message = message.replace(", ".join(known), "")
    assert len(message) < 300


@pytest.mark.parametrize("keys", [{"auto_map": {"AutoModel": "m.M"}}, {"custom_code": True}, {"trust_remote_code": 1}])
def test_custom_code_is_rejected_first(keys: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="custom code is not supported"):
        spec_from_config({"architectures": ["Anything"], **keys})


def test_quantised_weights_are_described() -> None:
    """Formats and refusals: tests/models/quantization."""
    assert spec().stored_as == ""
    assert spec(quantization_config={"quant_method": "gptq", "bits": 4}).stored_as == "gptq, 4 bits in groups of 128"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "72"}, "hidden_size is '72'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected a whole number from 1 to 10000"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": 97.5}, "vocab_size is 97.5"),
        ({"num_key_value_heads": 4}, "num_attention_heads is 6; expected a multiple of num_key_value_heads, 4"),
        ({"head_dim": 13}, "head_dim is 13; expected an even number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"eos_token_id": [2, -1]}, "eos_token_id is "),
        ({"bos_token_id": 1.0}, "bos_token_id is 1.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters by layer type"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
    ],
)
def test_invalid_values_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_reading_a_config_does_not_import_torch() -> None:
    program = "import sys, octavo.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
