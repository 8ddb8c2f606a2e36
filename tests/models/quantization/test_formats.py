"""Quantised checkpoints give the logits of Transformers on the dequantised weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError
from octavo.kernels.cpu import ops as cpu
from octavo.models.linear import TensorParallel
from octavo.models.linear_methods import find_linear_method
from octavo.models.loading import loader
from tests.models.quantization.writers import VARIANTS, Variant, compressed_tensors, gptq, quantise
from tests.models.tiny import (
    PagedRun,
    assert_close,
    load_tiny,
    make_tiny_checkpoint,
    random_prompts,
    read_spec,
    transformers_logits,
)

PROMPTS = random_prompts(23, 9)


def stored_weights(directory: Path, **kwargs: Any) -> dict[str, list[torch.Tensor]]:
    """The model's tensors by the checkpoint's names; several may be parts of one."""
    found: dict[str, list[torch.Tensor]] = {}
    for weight in load_tiny(directory, **kwargs).weights():
        found.setdefault(weight.name, []).append(weight.target)
    return found


def assert_same_weights(directory: Path, twin: Path, *, but: str = "") -> None:
    actual, expected = stored_weights(directory), stored_weights(twin)
    assert actual.keys() == expected.keys()
    for name in expected.keys() - {but}:
        for one, other in zip(actual[name], expected[name], strict=True):
            assert torch.equal(one, other), name


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_logits_are_those_of_the_dequantised_weights(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "CHUNK_ELEMENTS", 700)  # several chunks a weight, which begin inside words and blocks
    variant = VARIANTS[name]
    directory = make_tiny_checkpoint(kind, tmp_path / "model", **variant.sizes)
    twin = quantise(directory, variant)
    expected = transformers_logits(twin, PROMPTS)
    model = load_tiny(directory)
    plain = load_file(twin / "model.safetensors")
    for weight in model.weights():
        assert torch.equal(weight.target, plain[weight.name]), weight.name  # not one rounding apart
    for actual, logits in zip(PagedRun(model, PROMPTS, block_size=4).run(7), expected, strict=True):
        assert_close(actual, logits)
        assert torch.equal(actual.argmax(-1), logits.argmax(-1))


MERGED = {
    "phi3": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 64},
    "qwen2": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
}


@pytest.mark.parametrize("name", ["awq g32", "gptq 8 v2, order", "fp8 blocks", "ct int4 zeros"])
@pytest.mark.parametrize("kind", MERGED)
def test_merged_tensors_and_biases(kind: str, name: str, tmp_path: Path) -> None:
    directory = make_tiny_checkpoint(kind, tmp_path / "model", **MERGED[kind])
    twin = quantise(directory, VARIANTS[name])
    for actual, logits in zip(
        PagedRun(load_tiny(directory), PROMPTS, block_size=4).run(30), transformers_logits(twin, PROMPTS), strict=True
    ):
        assert_close(actual, logits)


@pytest.mark.parametrize("name", ["gptq 4, zeros", "fp8 row", "ct int4 zeros"])
def test_rows_in_another_order(name: str, tmp_path: Path) -> None:
    """InternLM2 merges Q, K and V by groups of heads: rows are read by lists of indices."""
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 64}
    variant = {"gptq 4, zeros": gptq(4, 16, sym=False)}.get(name, VARIANTS[name])
    directory = make_tiny_checkpoint("internlm2", tmp_path / "model", **sizes)
    twin = quantise(directory, variant)
    assert_same_weights(directory, twin)


@pytest.mark.parametrize("name", VARIANTS)
def test_tensor_parallel_ranks_have_parts_of_the_same_weights(name: str, tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **VARIANTS[name].sizes | {"intermediate_size": 96})
    plain = load_file(quantise(directory, VARIANTS[name]) / "model.safetensors")
    for rank in range(2):
        for weight in load_tiny(directory, tp=TensorParallel(rank, 2)).weights():
            part = tuple(
                slice(first, first + size) for first, size in zip(weight.start, weight.target.shape, strict=True)
            )
            assert torch.equal(weight.target, plain[weight.name][part]), weight.name


@pytest.mark.parametrize("name", ["awq g32", "fp8 blocks", "ct int4 group"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_once_to_the_models_dtype(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **VARIANTS[name].sizes)
    plain = load_file(quantise(directory, VARIANTS[name]) / "model.safetensors")
    for key, (tensor,) in stored_weights(directory, dtype=dtype).items():
        assert torch.equal(tensor, plain[key].to(dtype))


def test_modules_that_are_left_out_are_read_as_they_are(tmp_path: Path) -> None:
    variant = compressed_tensors("pack-quantized", 4, "group", group=32)
    variant.config["ignore"] = ["lm_head", "re:.*layers.1.*", "model.layers.0.mlp.down_proj"]
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **variant.sizes)

    def choose(module: str) -> Variant | None:
        return None if "layers.1." in module or module == "model.layers.0.mlp.down_proj" else variant

    assert_same_weights(directory, quantise(directory, variant, choose=choose))


def test_a_group_of_modules_is_found_by_name_then_pattern_then_class(tmp_path: Path) -> None:
    """Three schemes in one file; one module is the target of all, the others of two or one."""
    one = "model.layers.0.mlp.up_proj"
    variants = {
        "Linear": compressed_tensors("int-quantized", 8, "channel"),
        "re:.*mlp.*": compressed_tensors("pack-quantized", 4, "group", group=32),
        one: compressed_tensors("float-quantized", 8, "channel", type="float"),
    }
    groups = {}
    for target, variant in variants.items():
        group = variant.config["config_groups"]["group_0"] | {"targets": [target], "format": variant.config["format"]}
        groups[f"group_{len(groups)}"] = group
    whole = compressed_tensors("pack-quantized", 4, "group", group=32)
    whole.config |= {"config_groups": groups, "format": "mixed-precision"}
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **whole.sizes)

    def choose(module: str) -> Variant:
        return variants[one if module == one else "re:.*mlp.*" if "mlp" in module else "Linear"]

    assert_same_weights(directory, quantise(directory, whole, choose=choose))


def test_names_in_lists_may_be_those_of_the_file(tmp_path: Path) -> None:
    """A multimodal checkpoint's names differ from those of its language model."""
    variant = compressed_tensors("pack-quantized", 4, "group", group=32)
    variant.config["config_groups"]["group_0"]["targets"] = ["re:language_model.model.layers.*"]
    sizes = variant.sizes | {"sliding_window": 6}
    directory = make_tiny_checkpoint("gemma3", tmp_path / "model", **sizes)
    twin = quantise(directory, variant)
    path = directory / "model.safetensors"
    save_file({f"language_model.{name}": tensor for name, tensor in load_file(path).items()}, path)
    assert_same_weights(directory, twin)


@pytest.mark.parametrize("name", ["gptq 4", "fp8 row", "ct int8 row"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_quantised_head_is_used_even_if_config_json_ties_it(name: str, tied: bool, tmp_path: Path) -> None:
    variant = replace(VARIANTS[name], config={k: v for k, v in VARIANTS[name].config.items() if k != "ignore"})
    directory = make_tiny_checkpoint(
        "llama", tmp_path / "model", **variant.sizes | {"tie_word_embeddings": False, "vocab_size": 104}
    )
    twin = quantise(directory, variant, head=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    assert not read_spec(directory).tie_word_embeddings
    assert_same_weights(directory, twin)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    variant = VARIANTS["ct int4 group"]
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **variant.sizes | {"tie_word_embeddings": True})
    twin = quantise(directory, variant)
    assert read_spec(directory).tie_word_embeddings
    expected = transformers_logits(twin, PROMPTS)
    for actual, logits in zip(PagedRun(load_tiny(directory), PROMPTS, block_size=4).run(30), expected, strict=True):
        assert_close(actual, logits)


def test_a_quantised_embedding(tmp_path: Path) -> None:
    variant = compressed_tensors("int-quantized", 8, "channel")
    variant.config["config_groups"]["group_0"]["targets"] = ["Embedding"]
    directory = make_tiny_checkpoint("llama", tmp_path / "model")
    path = directory / "model.safetensors"
    twin = quantise(directory, variant, choose=lambda module: None)
    tensors = load_file(path)
    parts, plain = variant.write(tensors.pop("model.embed_tokens.weight"), torch.Generator().manual_seed(0))
    save_file(tensors | {f"model.embed_tokens.{part}": tensor for part, tensor in parts.items()}, path)
    assert torch.equal(stored_weights(directory)["model.embed_tokens.weight"][0], plain)
    assert_same_weights(directory, twin, but="model.embed_tokens.weight")


def test_biases_of_zero_that_the_model_lacks_change_nothing(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **VARIANTS["gptq 4"].sizes)
    twin = quantise(directory, VARIANTS["gptq 4"])
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.bias"
    save_file(tensors | {name: torch.zeros(96, dtype=torch.float16)}, path)
    assert_same_weights(directory, twin)
    save_file(tensors | {name: torch.tensor([0.0] * 95 + [1e-3])}, path)
    with pytest.raises(CheckpointError, match=f"{name} is unexpected"):
        load_tiny(directory)


def test_an_order_of_zeros_is_none(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **VARIANTS["gptq 4, zeros"].sizes)
    twin = quantise(directory, VARIANTS["gptq 4, zeros"])
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name].zero_()
    save_file(tensors, path)
    assert_same_weights(directory, twin)


def test_int8_is_computed_from_the_dequantised_rows(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **VARIANTS["gptq 8 v2, order"].sizes)
    twin = quantise(directory, VARIANTS["gptq 8 v2, order"])  # whose groups are too small for a CPU's products
    runs = [
        PagedRun(
            load_tiny(path, cpu, torch.bfloat16, linear_method=find_linear_method("int8", "cpu")), PROMPTS, block_size=4
        ).run(30)
        for path in (directory, twin)
    ]
    for actual, expected in zip(*runs, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["awq g32", "gptq 4, order", "fp8 blocks", "ct int4 zeros"])
def test_an_engine_gives_transformers_greedy_tokens(name: str, tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("qwen3", tmp_path / "model", **VARIANTS[name].sizes)
    twin = quantise(directory, VARIANTS[name])
    reference = transformers.AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)
    with LLM(str(directory), device="cpu", dtype="float32", skip_tokenizer_init=True) as llm:
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        inputs = torch.tensor([prompt])
        whole = reference.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=20, do_sample=False, eos_token_id=None
        )
        assert list(output.outputs[0].token_ids) == whole[0, len(prompt) :].tolist()
