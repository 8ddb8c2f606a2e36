"""config.json is read once, and whatever Octavo cannot do is said by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from octavo.errors import CheckpointError, ModelError, UnsupportedModelError
from octavo.models.spec import FAMILY, spec_from_config

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
    assert (s.max_position_embeddings, s.rope_theta, s.rope_scaling, s.sliding_window) == (128, 10000.0, None, None)
    assert not (s.tie_word_embeddings or s.qkv_bias or s.o_bias or s.mlp_bias or s.qk_norm)
    assert s.dtype == "float32"
    assert hash(s) == hash(spec())


def test_given_head_dim_wins_over_the_derived_one() -> None:
    assert spec(head_dim=40).head_dim == 40
    assert spec(head_dim=None, num_attention_heads=2).head_dim == 36


def test_heads_without_groups_share_nothing() -> None:
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
def test_switches_of_the_family(changes: dict[str, Any], qkv: bool, o: bool, mlp: bool, norm: bool) -> None:
    s = spec(**changes)
    assert (s.qkv_bias, s.o_bias, s.mlp_bias, s.qk_norm) == (qkv, o, mlp, norm)


def test_qwen3_heads_have_128_dimensions_unless_told() -> None:
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
def test_end_tokens_are_the_union_of_both_files(
    config_eos: Any, generation_eos: Any, expected: tuple[int, ...]
) -> None:
    assert spec({"eos_token_id": generation_eos}, eos_token_id=config_eos).eos_token_ids == expected


# -- rotary embedding -------------------------------------------------------------------------------------------------

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_theta_from_either_place() -> None:
    assert spec(rope_theta=5e5).rope_theta == 5e5
    assert spec(rope_parameters={"rope_type": "default", "rope_theta": 7e4}).rope_theta == 7e4
    assert spec(rope_parameters={"rope_type": "default", "rope_theta": 7e4}).rope_scaling is None


def test_scaling_from_either_place_and_under_either_name() -> None:
    old = spec(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})
    new = spec(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert old.rope_theta == new.rope_theta == 5e5
    assert LLAMA3.items() <= old.rope_scaling.items() and LLAMA3.items() <= new.rope_scaling.items()
    assert spec(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling["rope_type"] == "linear"


def test_yarn_without_a_trained_length_takes_the_models() -> None:
    scaling = spec(rope_scaling={"rope_type": "yarn", "factor": 4.0}).rope_scaling
    assert scaling["original_max_position_embeddings"] == 128


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "ntk"])
def test_unknown_scaling_is_named(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"rope scaling '{kind}' is not supported; supported: .*llama3"):
        spec(rope_scaling={"rope_type": kind, "factor": 2.0})


@pytest.mark.parametrize("missing", sorted(LLAMA3.keys() - {"original_max_position_embeddings"}))
def test_scaling_without_its_numbers_is_refused(missing: str) -> None:
    words = {key: value for key, value in LLAMA3.items() if key != missing}
    with pytest.raises(CheckpointError, match=f"{missing} is missing"):
        spec(rope_scaling={"rope_type": "llama3", **words})


# -- sliding windows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 32}, 32),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["MistralForCausalLM"]}, 4096),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 0}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": True}, None),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 32,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            32,
        ),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 32}, None),
    ],
)
def test_window(changes: dict[str, Any], expected: int | None) -> None:
    assert spec(**changes).sliding_window == expected


@pytest.mark.parametrize(
    "words",
    [{"max_window_layers": 3}, {"max_window_layers": 0, "layer_types": [*["full_attention"] * 3, "sliding_attention"]}],
)
def test_windows_on_some_layers_are_refused(words: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="on 1 of 4 layers is not supported"):
        spec(architectures=["Qwen2ForCausalLM"], sliding_window=32, use_sliding_window=True, **words)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architectures", [["MambaForCausalLM"], [], None, [["x"]]])
def test_unknown_architecture_lists_the_known_ones(architectures: Any) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        spec(architectures=architectures)
    assert all(name in str(caught.value) for name in FAMILY)
    assert "MambaForCausalLM" in str(caught.value) or not architectures or architectures == [["x"]]


@pytest.mark.parametrize("words", [{"auto_map": {"AutoModel": "m.M"}}, {"custom_code": True}, {"trust_remote_code": 1}])
def test_custom_code_is_refused_before_anything_else(words: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="custom code is not supported"):
        spec_from_config({"architectures": ["Anything"], **words})


def test_quantised_weights_are_refused_by_method() -> None:
    with pytest.raises(UnsupportedModelError, match="quantised by 'gptq'"):
        spec(quantization_config={"quant_method": "gptq", "bits": 4})


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
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters by kind of layer"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
    ],
)
def test_values_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_reading_a_config_loads_no_torch() -> None:
    program = "import sys, octavo.models.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
