"""Gemma 4: layers with and without a sliding window have K/V heads of two sizes, in blocks of one pool."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.errors import ModelError, ParameterError
from octavo.models.config import spec_from_config
from octavo.models.spec import ModelSpec
from tests.models.tiny import (
    PagedRun,
    assert_close,
    load_tiny,
    make_tiny_checkpoint,
    random_prompts,
    read_spec,
    transformers_logits,
    write_tiny_gguf,
)

PROMPTS = random_prompts(9, 23)
LIKE_31B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": {
        "vocab_size": 262_144,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision",
        "max_position_embeddings": 262_144,
    },
}
LIKE_26B = LIKE_31B | {
    "text_config": LIKE_31B["text_config"]
    | {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    }
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("gemma4", tmp_path_factory.mktemp("gemma4") / "model")


@pytest.mark.parametrize(
    ("config", "num_params", "num_full", "per_group", "num_groups", "rows"),
    [(LIKE_31B, 30.7, 10, 5, 10, 10 * 4 * 512), (LIKE_26B, 25.2, 5, 3, 9, 3 * 8 * 256)],
)
def test_blocks_of_the_published_sizes(
    config: dict[str, Any], num_params: float, num_full: int, per_group: int, num_groups: int, rows: int
) -> None:
    """Two layers without a window take the place of one with it: a row of 4 x 512 numbers, and of 16 x 256."""
    spec = spec_from_config(config)
    assert spec.num_params / 1e9 == pytest.approx(num_params, abs=0.05)
    grouped, alike = (KVCacheSpec.of(spec, 16, "bfloat16", max_len=n) for n in (32_768, 0))
    assert grouped.full is not None and grouped.full[0] == num_full
    assert (grouped.num_layers, grouped.windows) == (per_group, (1024,) * num_groups)
    assert grouped.bytes_per_block == 2 * 2 * 16 * rows
    each = [heads * size for heads, size in (spec.full_kv_heads, (spec.num_kv_heads, spec.head_dim))]
    num_sliding = spec.num_layers - num_full
    assert alike.bytes_per_block == 2 * 2 * 16 * (num_full * each[0] + num_sliding * each[1]) and not alike.windows
    assert grouped.num_places == num_full + per_group * num_groups and alike.num_places == spec.num_layers


def test_a_rank_has_its_heads_of_both_sizes() -> None:
    spec = spec_from_config(LIKE_31B)
    kv = [KVCacheSpec.of(spec.of_rank(size), 16, "bfloat16", max_len=32_768) for size in (2, 8)]
    assert [(each.num_kv_heads, each.full) for each in kv] == [(8, (10, 2, 512)), (2, (10, 1, 512))]
    assert [each.num_layers for each in kv] == [5, 10]  # on 8 ranks, both sizes take the same bytes


def test_float8_is_refused() -> None:
    spec = spec_from_config(LIKE_31B)
    with pytest.raises(ParameterError, match="float8_e4m3fn is not supported for K/V heads of two sizes; choose int8"):
        KVCacheSpec.of(spec, 16, "float8_e4m3fn")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input 256 is not supported"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input None is not supported"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers 2 is not supported"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp True is not supported"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config .* supported: equal num_key_value_heads"),
        ({"per_layer_config": [1]}, "per_layer_config .* is not supported"),
        ({"num_global_key_value_heads": 3}, "num_global_key_value_heads is 3; expected a divisor of 32"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters is .*sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 60}, "layer_types .* is not supported"),
    ],
)
def test_what_differs_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config(LIKE_31B | {"text_config": LIKE_31B["text_config"] | change})


def test_the_keys_of_google_and_of_transformers_are_one_model(tiny: Path) -> None:
    written = json.loads((tiny / "config.json").read_text())
    google = {key: value for key, value in written.items() if key != "per_layer_config"}
    google |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    assert spec_from_config(google) == spec_from_config(written)
    del google["num_global_key_value_heads"]
    other = spec_from_config(google)
    assert other.full_kv_heads == (2, 32) and spec_from_config(written).full_kv_heads == (1, 32)


def test_a_multimodal_checkpoint_is_read_without_its_other_parts(tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    text = json.loads((tiny / "config.json").read_text())
    names = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}
    config = names | {"text_config": text, "vision_config": {}, "audio_config": None, "image_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tiny / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = ("model.vision_tower.std_bias", "model.embed_vision.embedding_projection.weight", "model.audio_tower.x")
    save_file(tensors | {name: torch.ones(3) for name in others}, tmp_path / "model.safetensors")
    runs = [PagedRun(load_tiny(path), PROMPTS, block_size=4).run(5) for path in (tmp_path, tiny)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"enable_moe_block": False},
        {"attention_k_eq_v": False, "tie_word_embeddings": False},
        {"enable_moe_block": False, "global_head_dim": 24, "num_global_key_value_heads": 2},
        {"layer_types": ["full_attention"] * 5},
    ],
)
def test_a_gguf_file_is_the_model_of_transformers(sizes: dict[str, Any], tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("gemma4", tmp_path / "model", **sizes)
    path = write_tiny_gguf(directory, tmp_path / "model.gguf")
    expected = transformers_logits(directory, PROMPTS)
    for actual, logits in zip(PagedRun(load_tiny(path), PROMPTS, block_size=4).run(5), expected, strict=True):
        assert_close(actual, logits)
        assert torch.equal(actual.argmax(-1), logits.argmax(-1))
    stored, of_gguf = read_spec(directory), read_spec(path)
    assert stored.rope_scaling is not None
    part = {"partial_rotary_factor": (4.5 if stored.full_kv_heads[1] == 32 else 3.5) / (stored.full_kv_heads[1] / 2)}
    assert of_gguf == replace(stored, rope_scaling=stored.rope_scaling | part, quant_method="gguf")


def no_v_norm(layer: Any) -> None:
    layer.attention.ops = SimpleNamespace(**vars(layer.ops) | {"rms_norm": lambda x, weight, eps: x})


def no_factor(layer: Any) -> None:
    layer.factor.fill_(1.0)


def equal_experts(layer: Any) -> None:
    layer.experts.expert_scale.fill_(1.0)


def plain_router(layer: Any) -> None:
    layer.experts.input_scale.fill_(1.0)


def no_window(layer: Any) -> None:
    layer.attention.window = 0


@pytest.mark.parametrize("plant", [no_v_norm, no_factor, equal_experts, plain_router, no_window])
def test_what_is_new_matters(tiny: Path, plant: Callable[[Any], None]) -> None:
    """Else the comparisons with Transformers would not notice that it lacks."""
    model: Any = load_tiny(tiny)
    expected = transformers_logits(tiny, PROMPTS)
    run = PagedRun(model, PROMPTS, block_size=4).run(7)
    for a, b in zip(run, expected, strict=True):
        assert_close(a, b)
    plant(model.layers[0])
    changed = PagedRun(model, PROMPTS, block_size=4).run(7)
    with pytest.raises(AssertionError):
        assert_close(changed[1], expected[1])


def test_a_pool_of_groups_has_both_sizes_in_turn(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logprobs of a sequence that outlasts its windows, whose blocks then go to the other kind of layers."""
    monkeypatch.setattr("octavo.core.kv_cache_spec.MIN_CHUNK", 5)  # else sequences are too short for groups
    prompts = random_prompts(40, 31, 12, seed=3)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    expected = [logits.log_softmax(-1) for logits in transformers_logits(tiny, prompts)]
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 8, "num_gpu_blocks_override": 45}
    with LLM(str(tiny), device="cpu", dtype="float32", skip_tokenizer_init=True, **options) as llm:
        kv = llm.config.kv
        assert (kv.num_layers, kv.windows, kv.full) == (2, (6, 6), (2, 1, 32))
        assert kv.pool_shape(45) == (46, 1, 1, 1, 4, 2 * 2 * 2 * 24)
        for _ in range(2):  # the second time, all blocks have been used
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            for prompt, output, rows in zip(prompts, outputs, expected, strict=True):
                entries = zip(prompt[1:], (output.prompt_logprobs or [])[1:], strict=True)
                found = [entry[token].logprob for token, entry in entries if entry is not None]
                wanted = rows[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
                assert (torch.tensor(found) - wanted).abs().max() < 1e-4
        assert llm.kv_stats().num_dropped


def kinds(spec: ModelSpec) -> dict[int, tuple[int, ...]]:
    return {kind.num_layers: kind.linears["qkv"].out_sizes for kind in spec.layer_kinds}


def test_layers_without_a_window_have_no_v() -> None:
    assert kinds(spec_from_config(LIKE_31B)) == {50: (8192, 4096, 4096), 10: (16_384, 2048)}
