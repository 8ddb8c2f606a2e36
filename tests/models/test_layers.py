"""Attention with sinks equals that of Transformers' gpt-oss, with and without windows, also on several ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.checkpoint.resolve import open_checkpoint
from octavo.errors import CheckpointError
from octavo.kernels import reference
from octavo.kernels.cpu import ops as cpu
from octavo.models.linear import TensorParallel
from octavo.models.loading.loader import Model, dummy_model, load_model
from octavo.models.spec import DecoderSpec
from tests.models.ranks import Ranks
from tests.models.tiny import (
    PagedRun,
    SmallBatchPath,
    assert_close,
    make_tiny_checkpoint,
    num_bytes,
    random_prompts,
    read_spec,
)

PROMPTS = random_prompts(1, 9, 23, 17)
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
NAME = "model.layers.{}.self_attn.sinks"
NUM_LAYERS, NUM_HEADS = 3, 4


@pytest.fixture(scope="module", params=[None, 5], ids=["all keys", "window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor]]:
    """A directory, and Transformers' logits."""
    directory = make_tiny_checkpoint("mistral", tmp_path_factory.mktemp("sinks"), **SIZES, sliding_window=request.param)
    generator = torch.Generator().manual_seed(0)
    sinks = [4 * torch.randn(NUM_HEADS, generator=generator) for _ in range(NUM_LAYERS)]
    expected = transformers_logits(directory, sinks)
    add_sinks(directory, sinks)
    return directory, expected


def transformers_logits(directory: Path, sinks: Sequence[Tensor]) -> list[Tensor]:
    """Those of a Mistral with the attention of gpt-oss."""
    from transformers import AutoModelForCausalLM
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    ALL_ATTENTION_FUNCTIONS.register("gpt_oss", eager_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register("gpt_oss", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    whole: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="gpt_oss")
    for layer, layer_sinks in zip(whole.model.layers, sinks, strict=True):
        layer.self_attn.sinks = layer_sinks
    with torch.inference_mode():
        return [whole(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]


def add_sinks(directory: Path, sinks: Sequence[Tensor]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file) | {NAME.format(layer): each for layer, each in enumerate(sinks)}
    save_file(tensors, file, metadata={"format": "pt"})


def spec_of(directory: Path) -> DecoderSpec:
    spec = read_spec(directory)
    assert isinstance(spec, DecoderSpec)
    return dataclasses.replace(spec, sinks=True)


def load(directory: Path, ops: ModuleType = reference, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    return load_model(open_checkpoint(directory), spec_of(directory), dtype=dtype, device="cpu", ops=ops, **options)


@pytest.mark.parametrize("ops", [reference, cpu, SmallBatchPath()], ids=["reference", "cpu", "small batches"])
def test_logits_equal_those_with_the_attention_of_gpt_oss(model: tuple[Path, list[Tensor]], ops: ModuleType) -> None:
    directory, expected = model
    loaded = load(directory, ops)
    for block_size, chunk in ((16, 999), (1, 4), (8, 1)):
        for actual, wanted in zip(PagedRun(loaded, PROMPTS, block_size=block_size).run(chunk), expected, strict=True):
            assert_close(actual, wanted)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_sinks_of_their_heads(model: tuple[Path, list[Tensor]], size: int) -> None:
    directory, expected = model

    def run(tp: TensorParallel) -> list[Tensor]:
        return PagedRun(load(directory, cpu, tp=tp), PROMPTS, block_size=8, tp_size=size).run(7)

    for result in Ranks(size).run(run):
        for actual, wanted in zip(result, expected, strict=True):
            assert_close(actual, wanted)


def test_sinks_are_float32_in_any_dtype_and_counted(model: tuple[Path, list[Tensor]]) -> None:
    directory, _ = model
    spec, number = spec_of(directory), NUM_LAYERS * NUM_HEADS
    plain = dataclasses.replace(spec, sinks=False)
    assert spec.num_params == plain.num_params + number
    assert spec.of_rank(2).num_params == plain.of_rank(2).num_params + number // 2
    for dtype in (torch.bfloat16, torch.float32):
        loaded = load(directory, dtype=dtype)
        assert num_bytes(loaded) == spec.weight_bytes(dtype.itemsize) == plain.weight_bytes(dtype.itemsize) + 4 * number
        stored = load_file(directory / "model.safetensors")
        sinks = {weight.name: weight.target for weight in loaded.weights() if weight.name.endswith("sinks")}
        assert len(sinks) == NUM_LAYERS and all(torch.equal(stored[name], each) for name, each in sinks.items())  # type: ignore[arg-type]


def test_a_file_without_sinks_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("mistral", tmp_path / "model", **SIZES)
    with pytest.raises(CheckpointError, match=r"model.layers.0.self_attn.sinks is missing"):
        load(directory)
    random = dummy_model(spec_of(directory), dtype=torch.bfloat16, device="cpu", ops=cpu)
    assert all(x.isfinite().all() for x in PagedRun(random, PROMPTS, block_size=8).run(7))
