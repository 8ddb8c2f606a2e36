"""Keys of config.json of each family: defaults of absent ones, and errors that name unsupported ones."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import ModelError
from octavo.models.config import spec_from_config
from octavo.models.spec import DecoderSpec, GPTSpec

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 37,
    "num_hidden_layers": 9,
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
}
CLASSES = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "Gemma4ForCausalLM": "Gemma4TextConfig",
    "OPTForCausalLM": "OPTConfig",
    "GPT2LMHeadModel": "GPT2Config",
    "Phi3ForCausalLM": "Phi3Config",
    "Olmo2ForCausalLM": "Olmo2Config",
    "SmolLM3ForCausalLM": "SmolLM3Config",
    "GraniteForCausalLM": "GraniteConfig",
    "Starcoder2ForCausalLM": "Starcoder2Config",
    "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def spec(architecture: str, **changes: Any) -> Any:
    return spec_from_config(SIZES | {"architectures": [architecture]} | changes)


def sizes_of(architecture: str) -> dict[str, Any]:
    if architecture == "GPT2LMHeadModel":
        return {"vocab_size": 97, "n_embd": 64, "n_layer": 9, "n_head": 4, "n_positions": 128}
    own = {"OPTForCausalLM": {"ffn_dim": 41}, "Gemma4ForCausalLM": {"hidden_size_per_layer_input": 0}}
    return SIZES | own.get(architecture, {})


@pytest.mark.parametrize("architecture", CLASSES)
def test_absent_keys_have_the_values_of_transformers(architecture: str) -> None:
    import transformers

    sizes = sizes_of(architecture)
    whole = getattr(transformers, CLASSES[architecture])(**sizes).to_dict() | {"architectures": [architecture]}
    # Only the ids of Llama and Mistral have no default here: they would be added to those of generation_config.json.
    ids = {key: whole[key] for key in ("bos_token_id", "eos_token_id")} if architecture[:2] in ("Ll", "Mi") else {}
    sparse = spec_from_config(sizes | ids | {"architectures": [architecture]})
    full = spec_from_config(whole)
    assert sparse == full
    assert sparse.tie_word_embeddings == whole["tie_word_embeddings"]
    if "num_key_value_heads" in whole:
        assert sparse.num_kv_heads == whole["num_key_value_heads"]


def test_a_null_number_of_kv_heads_is_that_of_query_heads() -> None:
    assert spec("MistralForCausalLM").num_kv_heads == 8
    assert spec("MistralForCausalLM", num_key_value_heads=None).num_kv_heads == 32


def test_a_null_factor_of_yarn_follows_from_the_lengths() -> None:
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 2048}
    assert spec("Qwen3ForCausalLM", rope_scaling=yarn | {"factor": None}).rope_scaling["factor"] == 4.0
    with pytest.raises(ModelError, match="factor is missing"):
        spec("Qwen3ForCausalLM", rope_scaling=yarn)


def test_the_trained_length_outside_of_rope_scaling_has_priority() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    scaling = spec("Qwen3ForCausalLM", rope_scaling=yarn, original_max_position_embeddings=1024).rope_scaling
    assert scaling["original_max_position_embeddings"] == 1024


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi3_calls_longrope_by_three_names(kind: str) -> None:
    s = spec("Phi3ForCausalLM", rope_scaling=LONGROPE | {"type": kind})
    assert s.rope_scaling["rope_type"] == "longrope" and s.rope_scaling["factor"] == 2.0
    assert (s.max_model_len(), s.max_model_len(5000), s.rotary_dim) == (4096, 8192, None)


def test_smollm3_layers_without_rotary_embedding() -> None:
    assert spec("SmolLM3ForCausalLM").nope_layers == (3, 7)
    assert spec("SmolLM3ForCausalLM", no_rope_layer_interval=3).nope_layers == (2, 5, 8)
    assert spec("SmolLM3ForCausalLM", no_rope_layers=[1, 0, *[1] * 20]).nope_layers == (1,)
    assert spec("SmolLM3ForCausalLM", use_sliding_window=True, sliding_window=8).windows == (0, 0, 0, 8, 0, 0, 0, 8, 0)
    assert spec("SmolLM3ForCausalLM", sliding_window=8).windows == ()


def test_names_of_biases_differ_by_family() -> None:
    second, third = spec("InternLM2ForCausalLM"), spec("InternLM3ForCausalLM", qkv_bias=True)
    assert isinstance(second, DecoderSpec) and isinstance(third, DecoderSpec)
    assert (second.qkv_bias, second.o_bias, second.mlp_bias) == (True, True, False)
    assert (third.qkv_bias, third.o_bias, third.mlp_bias) == (True, False, False)
    code = spec("Starcoder2ForCausalLM", use_bias=False)
    assert isinstance(code, GPTSpec) and not code.bias and code.activation == "gelu_tanh" and code.others == {}


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not supported"),
        (
            "Phi3ForCausalLM",
            {"partial_rotary_factor": 0.45},
            "partial_rotary_factor is 0.45; expected an even part of head_dim",
        ),
        ("Phi3ForCausalLM", {"head_dim": 13, "partial_rotary_factor": 0.95}, "even part of head_dim, 13"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": LONGROPE | {"long_factor": [1.0]}},
            "long_factor is .*a list of 4 numbers",
        ),
        ("Phi3ForCausalLM", {"rope_scaling": LONGROPE | {"long_factor": [1, 2, 3, 0]}}, r"long_factor\[3\] is 0"),
        ("Phi3ForCausalLM", {"rope_scaling": LONGROPE | {"short_mscale": 1.2}}, "short_mscale is not supported"),
        ("LlamaForCausalLM", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1}, "a number above 1"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers is .*a list of 9 numbers"),
        ("GraniteForCausalLM", {"residual_multiplier": 0}, "residual_multiplier is 0"),
        ("GraniteForCausalLM", {"logits_scaling": "x"}, "logits_scaling is 'x'"),
        ("Starcoder2ForCausalLM", {"num_key_value_heads": 5}, "a multiple of num_key_value_heads, 5"),
        ("Starcoder2ForCausalLM", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
    ],
)
def test_unsupported_values_are_refused_by_name(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec(architecture, **changes)
