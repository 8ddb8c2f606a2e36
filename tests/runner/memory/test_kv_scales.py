"""Scales of K and V in float8 are those of a text, and logits with them are close to those without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.kernels.cpu import ops
from octavo.kernels.metadata import RaggedBatch
from octavo.models.loading.loader import Model
from octavo.runner.memory.kv_scales import HEADROOM, calibrate
from tests.models.tiny import load_tiny, make_tiny_checkpoint, random_prompts, read_spec


def logits(model: Model, pool: torch.Tensor, ids: list[int], cut: int) -> torch.Tensor:
    """Of the last token, computed after the others."""
    for first, last in ((0, cut), (cut, len(ids))):
        batch = RaggedBatch.from_lists([last - first], [last], [list(range(1, len(pool)))], pool.shape[4])
        out = model.forward(torch.tensor(ids[first:last]), batch, pool, torch.tensor([last - first - 1]))
    return out


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt2", "starcoder2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float8_e4m3fn", 0.2), ("float8_e5m2", 0.5)])
def test_logits_are_close(kind: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    path = make_tiny_checkpoint(kind, tmp_path / kind)
    model, spec = load_tiny(path, ops), read_spec(path)
    (text,), (ids,) = random_prompts(60), random_prompts(23, seed=1)
    layout = KVCacheSpec.of(spec, 4, dtype)
    expected = logits(model, torch.zeros(layout.pool_shape(6)), ids, 22)
    calibrate(model, text, layout, dtype=torch.float32, device="cpu")
    pool = torch.zeros(layout.pool_shape(6), dtype=getattr(torch, dtype))
    found = logits(model, pool, ids, 22)
    assert 0 < (found - expected).norm() / expected.norm() < tolerance
    largest = pool.float().abs().amax((0, 4, 5)) * HEADROOM / torch.finfo(pool.dtype).max  # of each layer and head
    assert (largest > 0.4).all() and (largest < 2.0).all()


def test_without_a_text_scales_are_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_tiny_checkpoint("llama", tmp_path / "llama")
    model = load_tiny(path, ops)
    calibrate(model, [], KVCacheSpec.of(read_spec(path), 4, "float8_e4m3fn"), dtype=torch.float32, device="cpu")
    assert all((layer.attention.head_norms["kv_scales"] == 1).all() for layer in model.layers)
    assert caplog.text.count("scales of 1") == 1
