"""GGUF files of models whose numbers and their order llama.cpp changes, and quantised ones of Gemma 4."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.checkpoint.resolve import open_checkpoint
from octavo.errors import ModelError
from octavo.kernels import reference
from octavo.models.linear_methods import PackedMethod
from octavo.models.loading import gguf as gguf_loading
from octavo.models.loading import loader
from octavo.models.loading.loader import load_model
from octavo.models.loading.stored_tensor import StoredTensor
from octavo.models.spec import HybridSpec
from tests.kernels.pool import relative_error
from tests.models.test_kept_weights import KeepingOps
from tests.models.tiny import (
    HYBRIDS,
    KINDS,
    PagedRun,
    assert_close,
    load_tiny,
    make_tiny_checkpoint,
    random_prompts,
    read_spec,
    transformers_logits,
    write_tiny_gguf,
)

PROMPTS = random_prompts(11, 70, 1)
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5": {},
    "qwen3_next": {"mlp_only_layers": []},
    "qwen3_5_moe": {"linear_num_value_heads": 6},
    "gemma4": {"top_k_experts": 3},
}
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "num_experts": 3,
    "num_experts_per_tok": 3,  # all: rounding must not choose others
}


def make_checkpoint(kind: str, directory: Path, **sizes: Any) -> Path:
    known = {key: value for key, value in sizes.items() if key in (HYBRIDS | KINDS)[kind] or "expert" not in key}
    if kind == "qwen3_5":
        known.pop("moe_intermediate_size", None)
    return make_tiny_checkpoint(kind, directory, **SIZES[kind] | known)


def logits(model: Any) -> Tensor:
    return torch.cat(PagedRun(model, PROMPTS, block_size=8).run(9))


def edit(directory: Path, change: Callable[[dict[str, Tensor]], object], **config: Any) -> Path:
    tensors, keys = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(keys | config))
    return directory


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kind", "merged_qkvz"), [*((kind, False) for kind in HYBRIDS), ("qwen3_next", True)])
def test_hybrids_equal_transformers(
    kind: str, merged_qkvz: bool, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(kind, tmp_path / kind, tie_word_embeddings=tied)
    path = write_tiny_gguf(directory, tmp_path / "m.gguf", merged_qkvz=merged_qkvz)
    monkeypatch.setattr(loader, "CHUNK_ELEMENTS", 300)  # chunks that begin and end inside a head
    spec, model = read_spec(path), load_tiny(path)
    assert isinstance(spec, HybridSpec)
    assert spec.pairing == ("grouped" if kind == "qwen3_next" else "tiled")
    whole = replace(spec, pairing="grouped", merged_by_key_head=kind == "qwen3_next", quant_method=None)
    assert replace(whole, bos_token_id=1) == replace(read_spec(directory), bos_token_id=1)
    expected = torch.cat(transformers_logits(directory, PROMPTS))
    assert_close(logits(model), expected)
    assert torch.equal(logits(model).argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("kind", [*HYBRIDS, "gemma4"])
@pytest.mark.parametrize("quantisation", ["F16", "Q8_0", "Q4_0"])
def test_quantised_files(quantisation: str, kind: str, tmp_path: Path) -> None:
    """They equal Transformers with the same rounded weights, dequantised and in their bits."""
    directory = make_checkpoint(kind, tmp_path / kind, **WIDE)
    path = write_tiny_gguf(directory, tmp_path / "m.gguf", quantisation=quantisation)
    of_type = gguf.GGMLQuantizationType[quantisation]
    size, _ = gguf.GGML_QUANT_SIZES[of_type]

    def round_weights(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            rows = tensor.squeeze().numpy()
            if rows.ndim > 1 and rows.shape[-1] % size == 0:
                rows = gguf.quants.dequantize(gguf.quants.quantize(rows, of_type), of_type)
                tensors[name] = torch.from_numpy(rows).view(tensor.shape)

    edit(directory, round_weights)
    expected = torch.cat(transformers_logits(directory, PROMPTS))
    assert_close(logits(load_tiny(path)), expected)
    ops = KeepingOps()
    assert_close(logits(load_tiny(path, ops, linear_method=PackedMethod)), expected)  # type: ignore[arg-type]
    assert {form.bits for form in ops.packed} == (set() if quantisation == "F16" else {int(quantisation[1])})


def test_mistakes_in_order_norms_and_decay_change_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sizes above: the comparison with Transformers would find it."""
    path = write_tiny_gguf(make_checkpoint("qwen3_5", tmp_path / "model"), tmp_path / "m.gguf")
    right, options = logits(load_tiny(path)), {"dtype": torch.float32, "device": "cpu", "ops": reference}
    spec = replace(read_spec(path), pairing="grouped")  # type: ignore[call-arg]
    assert relative_error(logits(load_model(open_checkpoint(path), spec, **options)), right) > 0.1  # type: ignore[arg-type]
    with monkeypatch.context() as context:
        add_one = r"(?<!linear_attn)\.(?:\w*norm|\w*layernorm)\.weight$"
        stored_tensor = gguf_loading._stored_tensor

        def with_one_more(tensor: Any, name: str, *rest: Any) -> StoredTensor:
            stored = stored_tensor(tensor, name, *rest)
            return (
                replace(stored, read=lambda rows, _=None: stored.read(rows) + 1) if re.search(add_one, name) else stored
            )

        context.setattr(gguf_loading, "_stored_tensor", with_one_more)
        assert relative_error(logits(load_tiny(path)), right) > 0.1
    monkeypatch.delitem(gguf_loading.CHANGES, ".linear_attn.A_log")
    assert relative_error(logits(load_tiny(path)), right) > 0.1


@pytest.mark.parametrize("quantisation", ["F32", "Q8_0"])
def test_layers_that_predict_further_tokens_are_not_loaded(quantisation: str, tmp_path: Path) -> None:
    directory = make_checkpoint("qwen3_5", tmp_path / "model", **WIDE)
    plain = write_tiny_gguf(directory, tmp_path / "plain.gguf", quantisation=quantisation)
    further = {f"model.layers.4.{name}.weight": torch.ones(64, 64) for name in ("nextn.eh_proj", "self_attn.q_proj")}
    edit(directory, lambda tensors: tensors.update(further), num_hidden_layers=5)
    path = write_tiny_gguf(
        directory, tmp_path / "m.gguf", quantisation=quantisation, metadata={"qwen35.nextn_predict_layers": 1}
    )
    assert read_spec(path) == read_spec(plain)
    assert torch.equal(logits(load_tiny(path)), logits(load_tiny(plain)))


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(f"model.layers.0.linear_attn.{name}")


def cut_rows(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        name_in_file = f"model.layers.0.linear_attn.{name}"
        tensors[name_in_file] = tensors[name_in_file][:-1].clone()

    return change


MISTAKES: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], str]] = {
    "no decay": ("qwen3_5", drop("A_log"), "layers.0.linear_attn.A_log is missing"),
    "no bias": ("qwen3_5", drop("dt_bias"), "layers.0.linear_attn.dt_bias is missing"),
    "rows": ("qwen3_next", cut_rows("in_proj_ba.weight"), "in_proj_ba.weight is unexpected"),
    "channels": ("qwen3_next", cut_rows("conv1d.weight"), "conv1d.weight has shape [79, 1, 4], expected [80, 1, 4]"),
    "decay": (
        "qwen3_5",
        lambda tensors: tensors["model.layers.0.linear_attn.A_log"].fill_(torch.nan),
        "layers.0.linear_attn.A_log contains NaN or infinity",
    ),
    "a layer more": (
        "qwen3_5",
        lambda tensors: tensors.update({"model.layers.4.input_layernorm.weight": torch.ones(48)}),
        "layers.4.input_layernorm.weight is unexpected",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_file_with_one_thing_wrong(case: str, tmp_path: Path) -> None:
    kind, change, message = MISTAKES[case]
    directory = edit(make_checkpoint(kind, tmp_path / "model"), change)
    path = write_tiny_gguf(directory, tmp_path / "m.gguf")
    with pytest.raises(ModelError) as caught:
        load_tiny(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
