"""Every key of config.json: obeyed as by Transformers, or refused by name.

A variant changes a few keys of a tiny model's config.json: absent, null, another value, at either level, contradicting.
If Transformers loads it, Octavo's logits are equal, or its error names a changed key (or the tensors that the change
asks for).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from octavo.errors import ModelError
from octavo.models import config as model_config
from octavo.models import registry
from octavo.models.config_keys import config_keys
from tests.models.tiny import (
    HYBRIDS,
    INTERNLM,
    KINDS,
    PagedRun,
    assert_close,
    load_tiny,
    make_tiny_checkpoint,
    random_prompts,
    transformers_logits,
)

Change = dict[str, Any]
ABSENT = object()
PROMPTS = random_prompts(40, 33)  # beyond the trained length of scaled rotary embedding
SHARED_KINDS = [kind for kind in (*KINDS, *HYBRIDS) if kind not in INTERNLM]
"""Families that Transformers has, too."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = YARN | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 99.0}


def config_class(config: Change) -> Any:
    return CONFIG_MAPPING[config["model_type"]]


def other_values(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, 1]
    if isinstance(value, float):
        return [3 * value + 0.5]
    return [1, 0.5] if value is None else ["gelu"]


def single_keys(config: Change) -> Iterator[Change]:
    """Each key of the file and of Transformers' configuration: absent, null, and with other values."""
    for key, default in sorted((config_class(config)().to_dict() | config).items()):
        for value in (ABSENT, None, *other_values(default)):
            yield {key: value}


def rotary(config: Change) -> Iterator[Change]:
    """Spellings of Transformers 4 and 5, alone, together and contradicting."""
    # Transformers 5.24 looks for `truncate` beside the layer types, not inside, where the format has it.
    untruncated = [{**YARN, "truncate": False}] if "full_attention" not in config["rope_parameters"] else []
    for scaling in (
        *(LINEAR, {"type": "linear", "factor": 2.0}, {**LINEAR, "type": "default"}, {"type": "linear", **DEFAULT}),
        *(YARN, {"rope_type": "yarn", "factor": 4.0}, {**YARN, "rope_theta": 300.0}, {**YARN, "factor": None}),
        *({**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}, {**YARN, "mscale": 0.7, "attention_factor": 0.5}),
        *(LLAMA3, {"rope_type": "dynamic", "factor": 2.0}, {**YARN, "rope_type": "dynamic"}, {}, None),
        *({**YARN, key: value} for key in ("attention_factor", "attn_factor") for value in (0.7, None)),
        *({**YARN, key: value} for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim") for value in (3.0, 0)),
        *({**YARN, "partial_rotary_factor": 0.5}, {"full_attention": DEFAULT}, *untruncated),
    ):
        yield {"rope_parameters": ABSENT, "rope_theta": 500.0, "rope_scaling": scaling}
        yield {"rope_parameters": DEFAULT, "rope_theta": 500.0, "rope_scaling": scaling}
        yield {"rope_parameters": scaling, "rope_scaling": {**DEFAULT, "rope_theta": 7.0}}
        if scaling:
            yield {"rope_parameters": {"rope_theta": 500.0, **scaling}, "original_max_position_embeddings": 40}
            yield {"rope_parameters": {"full_attention": DEFAULT | scaling, "sliding_attention": DEFAULT}}
    yield {"rope_parameters": ABSENT, "rope_theta": 77.0, "rope_local_base_freq": 55.0}
    yield {"rope_parameters": ABSENT, "rope_theta": ABSENT, "rope_local_base_freq": ABSENT}
    yield {"rope_theta": 77.0, "rope_local_base_freq": 55.0, "partial_rotary_factor": 0.5}
    yield {"partial_rotary_factor": 1.0}


def windows(config: Change) -> Iterator[Change]:
    sliding = ["sliding_attention"] * 3
    for use in (True, False, None, ABSENT):
        for first in (1, 0, None, ABSENT):
            yield {"use_sliding_window": use, "sliding_window": 6, "max_window_layers": first, "layer_types": ABSENT}
        for kinds in (sliding, ["full_attention", *sliding[1:]], ["attention", *sliding[1:]], None):
            yield {"use_sliding_window": use, "sliding_window": 6, "max_window_layers": 0, "layer_types": kinds}
    yield {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0, "layer_types": ABSENT}
    yield {"use_sliding_window": True, "sliding_window": ABSENT, "max_window_layers": 0, "layer_types": ABSENT}
    yield {"sliding_window_pattern": 2, "layer_types": ABSENT}
    yield {"_sliding_window_pattern": 2, "layer_types": ABSENT}


def foreign(config: Change) -> Iterator[Change]:
    """Keys of other families and of whole configurations."""
    yield from (
        *({"architectures": names} for names in (ABSENT, None, [], ["LlamaForCausalLM"], ["OPTForCausalLM"])),
        *({"model_type": name} for name in ("llama", "mistral", "qwen2")),
        {"per_layer_config": {"1": {"hidden_act": "relu"}}},
        {"is_encoder_decoder": True},
        {"add_cross_attention": True},
        {"quantization_config": {"quant_method": "fp8"}},
        {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}},
        {"tie_word_embeddings": True},
        *({"torch_dtype": name} for name in ("float16", None)),
        *({key: 5.0} for key in ("final_logit_softcapping", "logits_scaling", "embedding_multiplier", "temperature")),
        *({key: 0.1} for key in ("norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")),
        *({key: "relu"} for key in ("hidden_act", "hidden_activation", "activation_function")),
        *({key: 2} for key in ("num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "pretraining_tp")),
        *({key: True} for key in ("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "is_decoder", "do_sample")),
        *({key: [[3]]} for key in ("bad_words_ids", "suppress_tokens")),
        {"no_rope_layers": [0, 0, 0]},
    )


GROUPS: dict[str, Callable[[Change], Iterator[Change]]] = {
    "single_keys": single_keys,
    "rotary": rotary,
    "windows": windows,
    "foreign": foreign,
}


def octavo_logits(directory: Path) -> list[Tensor] | ModelError:
    try:
        return PagedRun(load_tiny(directory, max_len=40), PROMPTS, block_size=8).run(64)
    except ModelError as error:
        return error


def problem(directory: Path, config: Change, change: Change) -> str | None:
    """What is wrong with Octavo's reading of a variant; None: nothing."""
    new = {key: value for key, value in (config | change).items() if value is not ABSENT}
    (directory / "config.json").write_text(json.dumps(new))
    actual = octavo_logits(directory)
    try:
        expected = transformers_logits(directory, PROMPTS)
    except Exception:  # whatever Transformers raises for a configuration that it does not run
        return None
    if isinstance(actual, ModelError):
        names = {*change, *(name for value in change.values() if isinstance(value, dict) for name in value)}
        names |= {"rope_scaling"} if any(name.startswith("rope") for name in change) else set()
        names |= {" is missing", " is unexpected"}  # of a tensor
        return None if any(name in f"{actual} {actual.param}" for name in names) else str(actual)
    try:
        for a, b in zip(actual, expected, strict=True):
            assert_close(a, b)
    except AssertionError as error:
        return str(error)
    return None


def problems(kind: str, group: str, directory: Path) -> list[str]:
    make_tiny_checkpoint(kind, directory)
    config = json.loads((directory / "config.json").read_text())
    if not config_class(config)().to_dict().get("rope_parameters") and group == "rotary":
        pytest.skip("no rotary embedding")
    for actual, expected in zip(octavo_logits(directory), transformers_logits(directory, PROMPTS), strict=True):
        assert_close(actual, expected)  # both run the model before anything changes
    found = {str(change): problem(directory, config, change) for change in GROUPS[group](config)}
    return [f"{change}: {text}" for change, text in found.items() if text]


@pytest.mark.parametrize("group", ["rotary", "foreign"])
def test_variants_of_llama_equal_transformers_or_are_refused(group: str, tmp_path: Path) -> None:
    assert problems("llama", group, tmp_path / "model") == []


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_variants_equal_transformers_or_are_refused(kind: str, group: str, tmp_path: Path) -> None:
    assert problems(kind, group, tmp_path / "model") == []


@pytest.mark.parametrize("outer", [{}, {"tie_word_embeddings": False}, {"hidden_size": 8, "rope_theta": 5.0}])
@pytest.mark.parametrize("inner", [{}, {"tie_word_embeddings": False}, {"rope_theta": 5.0, "rope_parameters": None}])
def test_keys_at_either_level_of_a_multimodal_config(outer: Change, inner: Change, tmp_path: Path) -> None:
    """Transformers reads the head's tying beside text_config, everything else in it."""
    directory = make_tiny_checkpoint("gemma3", tmp_path / "model")
    text = json.loads((directory / "config.json").read_text()) | inner
    names = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    vision |= {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = names | outer | {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    (directory / "config.json").write_text(json.dumps(config))
    actual = octavo_logits(directory)
    if not outer.get("tie_word_embeddings", True):
        assert isinstance(actual, ModelError) and "lm_head.weight is missing" in str(actual)
        return
    assert not isinstance(actual, ModelError)
    (directory / "config.json").write_text(json.dumps(text | {"tie_word_embeddings": True}))
    for a, b in zip(actual, transformers_logits(directory, PROMPTS), strict=True):
        assert_close(a, b)


class Recorder(dict[str, Any]):
    """A config.json that records which keys are looked up."""

    def __init__(self, values: Change, seen: set[str]) -> None:
        super().__init__(values)
        self.seen = seen

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __or__(self, other: Change) -> Recorder:  # type: ignore[override]
        return Recorder({**self, **other}, self.seen)


@pytest.mark.parametrize("kind", [*KINDS, *HYBRIDS])
def test_the_table_lists_all_keys_that_the_family_reads(kind: str, tmp_path: Path) -> None:
    config = json.loads((make_tiny_checkpoint(kind, tmp_path / kind) / "config.json").read_text())
    family = registry.find_family(config["architectures"][0])
    spec = model_config.read_spec(model_config.Checkpoint(tmp_path, "safetensors", config))
    names = ("architecture", "vocab_size", "tie_word_embeddings", "eos_token_ids", "bos_token_id", "dtype")
    seen: set[str] = set()
    family.read(Recorder(family.defaults | config, seen), {name: getattr(spec, name) for name in names})
    assert config_keys(family).sort(seen, "config.json").read == tuple(sorted(seen))


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_the_table_knows_all_keys_of_transformers_configuration(kind: str, tmp_path: Path) -> None:
    config = json.loads((make_tiny_checkpoint(kind, tmp_path / kind) / "config.json").read_text())
    keys = config_class(config)().to_dict() | transformers.PreTrainedConfig().to_dict()
    family = registry.find_family(config["architectures"][0])
    assert config_keys(family).sort(family.rename_keys(keys), "config.json").unknown == ()


def hybrids(config: Change) -> Iterator[Change]:
    linear, full = "linear_attention", "full_attention"
    yield from ({"layer_types": ABSENT, "full_attention_interval": value} for value in (1, 2, 3, ABSENT, None, 0, 9))
    yield from ({"layer_types": kinds} for kinds in ([linear] * 4, [full] * 4, [linear, full] * 2, [linear, full], 3))
    yield from ({key: value} for key in ("attn_output_gate", "output_gate") for value in (True, False, None))
    for key, values in (
        *(
            ("linear_num_key_heads", (3, 6, 4, 0)),
            ("linear_num_value_heads", (2, 3, "2")),
            ("linear_key_head_dim", (1,)),
        ),
        *(
            ("linear_conv_kernel_dim", (1, 3)),
            ("hidden_act", ("gelu", "swish", "relu")),
            ("mtp_num_hidden_layers", (1,)),
        ),
        *(("mrope_interleaved", (True,)), ("head_dim", (None, 12))),
    ):
        yield from ({key: value} for value in values)
    for factor in (0.5, 1.0, None, ABSENT, 0.1):
        rope = {"rope_type": "default", "rope_theta": 99.0, "mrope_section": [1, 1, 1], "mrope_interleaved": True}
        yield {"rope_parameters": {**rope, **({} if factor is ABSENT else {"partial_rotary_factor": factor})}}
        yield {"rope_parameters": rope, "partial_rotary_factor": factor}
        yield {"rope_parameters": ABSENT, "rope_theta": 50.0, "partial_rotary_factor": factor}


GROUPS["hybrids"] = hybrids


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_variants_of_a_hybrid_equal_transformers_or_are_refused(kind: str, tmp_path: Path) -> None:
    assert problems(kind, "hybrids", tmp_path / "model") == []


def experts(config: Change) -> Iterator[Change]:
    """Values of the keys of experts."""
    for key in ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"):
        yield from ({key: value} for value in (ABSENT, None, 0, 1, 10**9, -1, "2", 2.0, True))
    yield from ({"norm_topk_prob": value} for value in (ABSENT, None, True, False, 1))
    yield from ({"decoder_sparse_step": value} for value in (ABSENT, None, 1, 2, 3, 9, -1, "1"))
    yield from ({"mlp_only_layers": value} for value in (ABSENT, None, [], [0], [0, 2], [9], [-1], [0.5], 1, "0"))
    yield from ({"hidden_act": value} for value in ("silu", "gelu_pytorch_tanh", "gelu", "relu"))
    yield from ({key: value} for key in ("swiglu_alpha", "swiglu_limit") for value in (ABSENT, None, 0.7, 0, "1"))
    yield from ({"experts_per_token": value} for value in (ABSENT, None, 1, 3, "3"))
    yield from ({"initial_context_length": value} for value in (None, 32, 64))
    yield from ({"attention_bias": value} for value in (ABSENT, None, False, 1))
    yield from ({"layer_types": value} for value in (ABSENT, None, ["full_attention"] * 3, ["sliding_attention"]))
    yield {"rope_parameters": ABSENT}
    yield from ({"shared_expert_intermediate_size": value} for value in (ABSENT, None, 0, 3, 20))


GROUPS["experts"] = experts


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "qwen3_5_moe"])
def test_variants_of_experts_equal_transformers_or_are_refused(kind: str, tmp_path: Path) -> None:
    assert problems(kind, "experts", tmp_path / "model") == []
