"""Random weights take the forms of the checkpoint's: as many bytes, and numbers of the size of a model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.checkpoint.resolve import open_checkpoint
from octavo.kernels.cpu import native
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.group_form import GGUF_FORMS, GroupForm
from octavo.kernels.groups import Groups
from octavo.models.config import read_spec
from octavo.models.linear_methods import PackedMethod
from octavo.models.loading.loader import Model, dummy_model, find_forms
from octavo.models.loading.random_weights import fill_randomly
from tests.models.quantization.writers import VARIANTS
from tests.models.ranks import Ranks
from tests.models.test_kept_weights import NESTED, WIDE, KeepingOps
from tests.models.tiny import PagedRun, make_tiny_checkpoint, random_prompts, write_tiny_gguf


class PlannedForms(KeepingOps):
    """Keeps the forms that memory plans count as kept on a device."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = device

    def keeps_groups(self, form: GroupForm, num_in: int, dtype: torch.dtype) -> bool:
        return form.is_kept_on(self.device)


class Unpacked(PackedMethod):
    def finish(self) -> None:
        """The parts stay as they were filled."""


class UnpackedOnGpu(Unpacked):
    """Keeps what it would keep on a GPU."""

    def keeps(self, form: GroupForm) -> bool:
        own, self.device = self.device, "cuda"
        kept = super().keeps(form)
        self.device = own
        return kept


def make_dummy(path: Path, method: Any = Unpacked, ops: Any = None, **options: Any) -> Model:
    checkpoint = open_checkpoint(path, weights=False)
    spec = read_spec(checkpoint)
    find_form = find_forms(checkpoint, spec)
    options = {
        "dtype": torch.bfloat16,
        "device": "cpu",
        "ops": ops or PlannedForms(),
        "linear_method": method,
    } | options
    return dummy_model(spec, find_form=find_form, **options)


def planes_of(model: Model) -> dict[str, list[Tensor]]:
    """Of each weight: its planes, or the weight."""
    found: dict[str, list[Tensor]] = {}
    for weight in model.weights():
        target = weight.target
        found.setdefault(weight.name, []).extend(target.planes() if isinstance(target, Groups) else [target])
    return found


def num_bytes(model: Model) -> int:
    return sum(
        target.form.num_bytes(target.values.numel()) + 4 * target.form.ordered_in
        if isinstance(target, Groups)
        else target.nbytes
        for target in (weight.target for weight in model.weights())
    )


def only_config(directory: Path, **quantization: Any) -> Path:
    """A checkpoint without files of weights."""
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").unlink()
    return directory


CONFIGS: dict[str, dict[str, Any]] = {
    "awq": VARIANTS["awq g32"].config,
    "awq, some": VARIANTS["awq g32"].config | {"modules_to_not_convert": ["v_proj", "down_proj"]},
    "gptq": VARIANTS["gptq 4"].config,
    "gptq, order": VARIANTS["gptq 4, order"].config,
    "ct int4": VARIANTS["ct int4 group"].config,
    "ct int8 with the head": VARIANTS["ct int4 group"].config | {"ignore": ["re:.*gate_proj"]},
    "fp8": {"quant_method": "fp8"},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_those_that_the_doctor_counts(name: str, tied: bool, tmp_path: Path) -> None:
    path = make_tiny_checkpoint("llama", tmp_path / "model", **WIDE, tie_word_embeddings=tied)
    model = make_dummy(only_config(path, **CONFIGS[name]))
    assert num_bytes(model) == model.spec.weight_bytes(2)
    kept = any(isinstance(weight.target, Groups) for weight in model.weights())
    assert kept == (name != "fp8")


ON_GPU = {
    "awq": (CONFIGS["awq"], False),
    "ct int8 with the head": (CONFIGS["ct int8 with the head"], True),
    "ct fp8 with the head": (VARIANTS["ct fp8 row"].config | {"ignore": []}, False),
    "Q8_0": (None, True),
    "Q4_K": (None, False),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ON_GPU)
def test_a_gpu_keeps_a_head_of_integers(name: str, tied: bool, tmp_path: Path) -> None:
    """Not a tied one, which is the embedding, too; nor one in float8."""
    config, keeps_head = ON_GPU[name]
    sizes = NESTED if name == "Q4_K" else WIDE
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **sizes, tie_word_embeddings=tied)
    gguf = config is None
    path = (
        write_tiny_gguf(directory, tmp_path / "m.gguf", quantisation=name) if gguf else only_config(directory, **config)
    )
    model = make_dummy(path, UnpackedOnGpu, PlannedForms("cuda"))
    assert num_bytes(model) == model.spec.weight_bytes(2, device="cuda")
    kept = {weight.name for weight in model.weights() if isinstance(weight.target, Groups)}
    assert ("lm_head.weight" in kept) == (keeps_head and not tied)
    assert "model.embed_tokens.weight" not in kept
    assert bool(kept) == (name != "Q4_K")


@pytest.mark.parametrize(
    ("kind", "quantisation"), [("llama", "Q8_0"), ("llama", "Q4_K"), ("llama", "Q6_K"), ("qwen3_5", "Q8_0")]
)
def test_bytes_of_gguf_files(kind: str, quantisation: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 4, "linear_value_head_dim": 32} if kind == "qwen3_5" else {}
    directory = make_tiny_checkpoint(kind, tmp_path / "model", **NESTED | sizes)
    path = write_tiny_gguf(directory, tmp_path / "m.gguf", quantisation=quantisation)
    model = make_dummy(path)
    kept = [weight for weight in model.weights() if isinstance(weight.target, Groups)]
    assert len(kept) >= 3 * 6 and all(weight.target.form == GGUF_FORMS[quantisation] for weight in kept)  # type: ignore[union-attr]
    assert num_bytes(model) == model.spec.weight_bytes(2)


FORMS = [
    *GGUF_FORMS.values(),
    GroupForm(4, 32, has_zeros=True),
    GroupForm(8, 128, zero=128),
    GroupForm(8, 256, has_zeros=True),
    GroupForm(8, 128, is_float=True),
]


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_numbers_have_a_models_size(form: GroupForm) -> None:
    groups = Groups.empty(form, 64, 512, "cpu")
    fill_randomly(groups, torch.Generator().manual_seed(1))
    weight = groups.dequantised()
    assert groups.is_finite()
    assert float(weight.std()) == pytest.approx(0.02, rel=0.2 if form.is_e2m1 else 0.03)  # scales are powers of two
    assert abs(float(weight.mean())) < 0.02 * (0.5 if form.bits == 4 else 0.1)
    assert form.is_nested or groups.with_narrow_scales().scales.dtype == torch.float16


def test_a_seed_gives_the_same_numbers(tmp_path: Path) -> None:
    path = only_config(make_tiny_checkpoint("qwen3", tmp_path / "model", **WIDE), **CONFIGS["ct int4"])
    first, second = (planes_of(make_dummy(path)) for _ in range(2))
    assert all(torch.equal(a, b) for name in first for a, b in zip(first[name], second[name], strict=True))
    matrices = [planes[0] for planes in first.values() if planes[0].ndim == 2]
    starts = {bytes(matrix.contiguous().view(torch.uint8).flatten()[:64].tolist()) for matrix in matrices}
    assert len(starts) == len(matrices) > 3 * 7


def test_ranks_have_equal_copies_and_other_parts(tmp_path: Path) -> None:
    sizes = WIDE | {"intermediate_size": 128}
    path = only_config(make_tiny_checkpoint("llama", tmp_path / "model", **sizes), **CONFIGS["ct int4"])
    first, second = Ranks(2).run(lambda tp: planes_of(make_dummy(path, tp=tp)))
    same = {name for name in first if all(torch.equal(a, b) for a, b in zip(first[name], second[name], strict=True))}
    assert {name for name in first if "norm" in name} == same


@pytest.mark.skipif(native.library() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["awq", "ct int4"])
def test_a_cpu_computes_with_them(name: str, tmp_path: Path) -> None:
    path = only_config(make_tiny_checkpoint("llama", tmp_path / "model", **WIDE), **CONFIGS[name])
    model = make_dummy(path, PackedMethod, cpu)
    logits = torch.cat(PagedRun(model, random_prompts(9, 5), block_size=4).run(4))
    assert logits.isfinite().all() and float(logits.std()) > 0
