"""gpt-oss's experts in MXFP4: the numbers of Transformers, kept in their bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from octavo.checkpoint.resolve import open_checkpoint
from octavo.errors import CheckpointError
from octavo.kernels.cpu import native
from octavo.kernels.cpu import ops as cpu
from octavo.models.experts import Experts
from octavo.models.linear import TensorParallel
from octavo.models.linear_methods import PackedMethod
from octavo.models.loading import loader
from tests.models.ranks import Ranks
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

PROMPTS = random_prompts(23, 9)
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
LISTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
QUANTISED = "model.layers.1.mlp.experts.gate_up_proj"


def quantise(directory: Path, dtype: torch.dtype = torch.float32, listed: list[str] = LISTED) -> Path:
    """Give the experts of a tiny gpt-oss random MXFP4 weights -> the twin with Transformers' numbers of them."""
    twin = directory / "twin"
    twin.mkdir()
    config = json.loads((directory / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config))
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": listed}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    generator = torch.Generator().manual_seed(0)
    plain = load_file(directory / "model.safetensors")
    stored = {}
    for name, tensor in sorted(plain.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        num_experts, num_in, num_out = tensor.shape
        shape = num_experts, num_out, num_in // 32
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 124, shape, dtype=torch.uint8, generator=generator)
        scales[0, :3, 0] = torch.tensor([0, 1, 125])
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, twin / "model.safetensors", metadata={"format": "pt"})
    return twin


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    return make_tiny_checkpoint("gpt_oss", tmp_path / "model", **SIZES)


def assert_same_bits(directory: Path, twin: Path, **options: Any) -> None:
    actual, expected = (load_tiny(path, **options).weights() for path in (directory, twin))
    for one, other in zip(actual, expected, strict=True):
        assert one.name == other.name
        ours, theirs = one.target, other.target
        assert isinstance(ours, Tensor) and isinstance(theirs, Tensor)
        integers = {4: torch.int32, 2: torch.int16}[ours.itemsize]
        assert torch.equal(ours.view(integers), theirs.view(integers)), one.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_transformers_bits(gpt_oss: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CHUNK_ELEMENTS", 700)  # chunks that begin inside an expert
    assert_same_bits(gpt_oss, quantise(gpt_oss, dtype), dtype=dtype)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_parts_of_the_same_weights(gpt_oss: Path, size: int) -> None:
    twin = quantise(gpt_oss)
    for rank in range(size):
        assert_same_bits(gpt_oss, twin, tp=TensorParallel(rank, size))


def test_logits_are_transformers(gpt_oss: Path) -> None:
    quantise(gpt_oss)
    expected = transformers_logits(gpt_oss, PROMPTS)  # which dequantises on a CPU
    for actual, logits in zip(PagedRun(load_tiny(gpt_oss), PROMPTS, block_size=4).run(7), expected, strict=True):
        assert_close(actual, logits)


def experts_of(model: Any) -> list[Experts]:
    return [layer.mlp for layer in model.layers]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
def test_a_cpu_keeps_the_bits_of_experts(tmp_path: Path, size: int) -> None:
    """Columns of three ranks are whole groups."""
    sizes = SIZES | {"num_attention_heads": 3, "num_key_value_heads": 3, "num_experts_per_tok": 6}
    directory = make_tiny_checkpoint("gpt_oss", tmp_path / "model", **sizes)
    twin = quantise(directory)
    expected = transformers_logits(twin, PROMPTS)

    def run(tp: TensorParallel) -> list[Tensor]:
        model = load_tiny(directory, cpu, torch.bfloat16, linear_method=PackedMethod, tp=tp)
        for experts in experts_of(model):
            for method in (experts.up.method, experts.down.method):
                assert isinstance(method, PackedMethod) and method.packed_experts is not None
        kept = sum(e.up.method.packed_experts.nbytes + e.down.method.packed_experts.nbytes for e in experts_of(model))  # type: ignore[attr-defined]
        plain = sum(e.up.method.weight.nbytes + e.down.method.weight.nbytes for e in experts_of(model))
        assert kept < plain  # 4.25 of 16 bits, but for the padding of tiny sizes
        return PagedRun(model, PROMPTS, block_size=4, tp_size=size).run(7)

    for result in Ranks(size).run(run):
        for actual, logits in zip(result, expected, strict=True):
            assert_close(actual, logits, 0.1)


def test_the_plan_counts_the_bits(gpt_oss: Path) -> None:
    twin = quantise(gpt_oss)
    spec, plain = read_spec(gpt_oss), read_spec(twin)
    assert (spec.quant_method, spec.stored_as) == ("mxfp4", "mxfp4 (e2m1), 4 bits in groups of 32")
    num_weights = spec.num_layers * 6 * 3 * 64 * 96
    for device in ("cpu", "cuda"):
        saved = plain.weight_bytes(2, device=device) - spec.weight_bytes(2, device=device)
        assert saved == num_weights * 2 - num_weights * 17 // 32
    assert plain.weight_bytes(4) == spec.weight_bytes(4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gguf_files(gpt_oss: Path, dtype: torch.dtype, tmp_path: Path) -> None:
    def choose(name: str) -> str:
        return "MXFP4" if "exps.weight" in name else "F32"

    path = write_tiny_gguf(gpt_oss, tmp_path / "model.gguf", quantisation=choose)
    assert read_spec(path).stored_as == "MXFP4"
    for weight in load_tiny(path, dtype=dtype).weights():
        if "experts" in weight.name and weight.name.endswith("weight"):
            assert isinstance(weight.target, Tensor)
            values = weight.target.float().unflatten(1, (-1, 32))
            exponents = (values.abs().amax(2, keepdim=True) / 4).log2().floor()
            codes = (values / exponents.exp2()).abs()
            assert torch.isin(codes, torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])).all(), weight.name
    if dtype == torch.bfloat16 and native.library() is not None:
        model = load_tiny(path, cpu, dtype, linear_method=PackedMethod)
        assert all(experts.down.method.packed_experts is not None for experts in experts_of(model))  # type: ignore[attr-defined]


def test_a_gguf_scale_of_nan(gpt_oss: Path, tmp_path: Path) -> None:
    path = write_tiny_gguf(
        gpt_oss, tmp_path / "m.gguf", quantisation=lambda n: "MXFP4" if "down_exps.w" in n else "F32"
    )
    tensor = next(t for t in open_checkpoint(path).gguf.tensors if t.name == "blk.1.ffn_down_exps.weight")
    data = bytearray(path.read_bytes())
    data[int(tensor.data_offset)] = 255
    path.write_bytes(data)
    for options in ({}, {"dtype": torch.bfloat16, "ops": cpu, "linear_method": PackedMethod}):
        with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj\.weight contains NaN or infinity"):
            load_tiny(path, **options)  # type: ignore[arg-type]


Damage = Callable[[dict[str, Tensor]], Any]


def change(part: str, new: Callable[[Tensor], Tensor]) -> Damage:
    name = f"{QUANTISED}_{part}"
    return lambda tensors: tensors.update({name: new(tensors[name]).contiguous()})


def put_nan(tensors: dict[str, Tensor]) -> None:
    tensors[f"{QUANTISED}_scales"][4, 191, 1] = 255


CASES: dict[str, tuple[Damage, str]] = {
    "no scales": (lambda t: t.pop(f"{QUANTISED}_scales"), "experts.0.gate_proj.scales is missing"),
    "no blocks": (lambda t: t.pop(f"{QUANTISED}_blocks"), "experts.0.gate_proj.blocks is missing"),
    "nan": (put_nan, "experts.4.up_proj.scales contains 0, NaN or infinity"),
    "few scales": (change("scales", lambda t: t[..., :1]), "gate_proj.scales has shape [96, 1], expected [96, 2]"),
    "few rows": (change("blocks", lambda t: t[:, :190]), "gate_proj.scales has shape [96, 2], expected [95, 2]"),
    "an odd row": (change("scales", lambda t: t[:, :191]), "experts.0.gate_proj.scales is missing"),
    "half blocks": (change("blocks", lambda t: t[..., :8]), "gate_proj.scales has shape [96, 2], expected [96, 1]"),
    "one expert": (change("blocks", lambda t: t[0]), "gate_proj.scales has shape [96, 2], expected [1, 1]"),
    "fewer experts": (change("blocks", lambda t: t[:5]), "experts.5.gate_proj.blocks is missing"),
    "floats": (change("blocks", lambda t: t.half()), "gate_proj.blocks has dtype F16, expected U8"),
    "integers": (change("scales", lambda t: t.int()), "gate_proj.scales has dtype I32, expected U8"),
    "both": (
        lambda t: t.update({QUANTISED: torch.zeros(6, 64, 192)}),
        "experts.0.gate_proj.weight is there beside model.layers.1.mlp.experts.0.gate_proj.blocks",
    ),
    "an odd bias": (change("bias", lambda t: t[:, :191]), "experts.0.gate_proj.bias is missing"),
    "many experts": (
        lambda t: t.update({f"{QUANTISED}_blocks": torch.zeros(10**9, 0, 2, 16, dtype=torch.uint8)}),
        "experts.0.gate_proj.blocks is missing",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_damaged_files_end_in_one_line(gpt_oss: Path, case: str) -> None:
    damage, message = CASES[case]
    quantise(gpt_oss)
    tensors = load_file(gpt_oss / "model.safetensors")
    damage(tensors)
    save_file(tensors, gpt_oss / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        load_tiny(gpt_oss)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("listed", ["model.layers.*.mlp", "model.layers.1.mlp.experts", "mlp.experts"])
def test_a_quantised_module_that_is_listed(gpt_oss: Path, listed: str) -> None:
    quantise(gpt_oss, listed=[*LISTED, listed])
    with pytest.raises(CheckpointError, match="is quantised, although modules_to_not_convert lists it"):
        load_tiny(gpt_oss)
