"""The launches of a model with float8 weights on Hopper, without a GPU: no layer stores a norm."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from octavo.kernels.triton import ops
from octavo.kernels.triton.linear import grouped
from octavo.models.linear_methods import LinearMethod, PackedMethod, find_linear_method
from tests.kernels.triton.compiled import list_launches
from tests.models.tiny import PagedRun, load_tiny, make_tiny_checkpoint, random_prompts

NUM_LAYERS = 3
SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 384,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    return make_tiny_checkpoint("llama", path, num_hidden_layers=NUM_LAYERS, **SIZES)


def count_launches(path: Path, num_rows: int) -> Counter[str]:
    """Launches of a pass of so many rows, by kernel."""
    model = load_tiny(path, ops, torch.bfloat16, linear_method=find_linear_method("fp8", "cuda"))
    run = PagedRun(model, random_prompts(num_rows), block_size=16)
    names: list[str] = []
    launch = JITFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(self.fn.__name__)
        return launch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", counted)
        list_launches(9, 0, lambda: run.step([num_rows]))
    return Counter(names)


def test_a_layer_with_float8_weights_has_two_launches_less(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last norm, before the head, remains."""
    monkeypatch.setattr(grouped, "multiplies_float8", lambda device, by_row: True)
    monkeypatch.setattr(grouped, "float8_product", lambda x, weight, *_: torch.zeros(len(x), len(weight)).bfloat16())
    fused = count_launches(tiny, 100)
    monkeypatch.setattr(PackedMethod, "add_norm_linear", LinearMethod.add_norm_linear)
    separate = count_launches(tiny, 100)
    assert fused["_rms_norm"] == 1 and fused["_quantise"] == 2 * NUM_LAYERS  # before attention's output and the MLP's
    assert fused - separate == Counter(_add_norm_quantise=2 * NUM_LAYERS)
    assert separate - fused == Counter(_rms_norm=2 * NUM_LAYERS, _quantise=2 * NUM_LAYERS)


def test_without_a_product_of_float8_norms_are_stored(tiny: Path) -> None:
    launches = count_launches(tiny, 100)
    assert launches["_rms_norm"] == 2 * NUM_LAYERS + 1 and not launches["_add_norm_quantise"]
