"""Quantised checkpoints give the logits of Transformers on the dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from octavo.kernels.cpu import ops as cpu
from octavo.models.linear import TensorParallel
from octavo.models.loading import loader
from tests.models.quantization.writers import VARIANTS, compressed_tensors, fp8, gptq, quantise
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


def stored_weights(directory: Path, chunk: int | None = None, **kwargs: object) -> dict[str, torch.Tensor]:
    return {weight.name: weight.tensor for weight in load_tiny(directory, **kwargs).weights()}  # type: ignore[arg-type]


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
        assert torch.equal(weight.tensor, plain[weight.name]), weight.name  # not one rounding apart
    for actual, logits in zip(PagedRun(model, PROMPTS, block_size=4).run(7), expected, strict=True):
        assert_close(actual, logits)
        assert torch.equal(actual.argmax(-1), logits.argmax(-1))
