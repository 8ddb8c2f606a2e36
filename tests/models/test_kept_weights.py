"""Quantised weights that keep their bits, with a platform that keeps all forms and multiplies in float32."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import native
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.cpu.grouped_linear import GroupedWeight
from octavo.kernels.cpu.packed_linear import TiledWeight
from octavo.kernels.groups import GroupForm, Groups
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference.norms import Gate, NormedResidual
from octavo.models.linear import TensorParallel
from octavo.models.linear_methods import MergedWeight, OrderedWeight, PackedMethod, Role, find_linear_method
from tests.models.quantization.writers import VARIANTS, quantise
from tests.models.tiny import (
    PagedRun,
    assert_close,
    load_tiny,
    make_tiny_checkpoint,
    random_prompts,
    read_spec,
    write_tiny_gguf,
)

PROMPTS = random_prompts(23, 9)
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
NESTED = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}


class Kept:
    """A weight that is dequantised for each product."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.nbytes = sum(plane.nbytes for plane in groups.planes())

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        y = torch.nn.functional.linear(x, self.groups.dequantised(), bias)
        return y if out is None else out.copy_(y)

    def gather_rows(self, indices: Tensor) -> Tensor:
        return self.groups.map(lambda plane: plane[indices]).dequantised()


class Fused(Kept):
    """With fused products for up to 6 rows."""

    calls: list[str] = []  # noqa: RUF012 - cleared by each test
    max_small_batch_tokens = 6

    def norm_linear(self, residual: NormedResidual, eps: float, bias: Tensor | None, gate: Gate = "") -> Tensor:
        self.calls.append("norm_linear" + gate)
        return reference.norm_linear(residual, eps, self.groups.dequantised(), bias, gate)

    def add_linear(self, residual: NormedResidual, x: Tensor, bias: Tensor | None, norm: Tensor) -> NormedResidual:
        self.calls.append("add_linear")
        return reference.add_linear(residual, x, self.groups.dequantised(), bias, norm)

    def gated(self, gate_up: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        self.calls.append("gated")
        return self(reference.silu_mul(gate_up) if gate == "silu" else reference.gelu_mul(gate_up), bias)

    def add_norm_linear(
        self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        self.calls.append("add_norm_linear")
        normed, total = reference.add_rms_norm(x, residual, norm, eps)
        return self(normed, bias), total

    def project_qkv(
        self, residual: NormedResidual, eps: float, bias: Tensor | None, *args: Tensor | RaggedBatch, **norms: Any
    ) -> Tensor:
        self.calls.append("project_qkv")
        return reference.project_qkv(residual, eps, self.groups.dequantised(), bias, *args, **norms)  # type: ignore[arg-type]


class KeepingOps:
    """The reference's operations, of a platform that keeps all forms; `packed` are those that it was given."""

    def __init__(self, *, rounds: bool = False, kept: type[Kept] = Kept) -> None:
        self.packed: list[GroupForm] = []
        self.rounds, self.kept = rounds, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    def keeps_groups(self, form: GroupForm, num_in: int, dtype: torch.dtype) -> bool:
        return True

    def pack_groups(self, groups: Groups) -> Kept | None:
        assert groups.is_finite()
        self.packed.append(groups.form)
        return None if self.rounds else self.kept(groups)


def assert_same_logits(path: Path, ops: Any, **kwargs: Any) -> None:
    expected = PagedRun(load_tiny(path), PROMPTS, block_size=4).run(7)
    model = load_tiny(path, ops, linear_method=PackedMethod, **kwargs)
    for actual, wanted in zip(PagedRun(model, PROMPTS, block_size=4).run(7), expected, strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("quantisation", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_gguf_blocks_are_kept(kind: str, quantisation: str, tmp_path: Path) -> None:
    directory = make_tiny_checkpoint(kind, tmp_path / "model", **WIDE)
    path = write_tiny_gguf(directory, tmp_path / "m.gguf", quantisation=quantisation)
    ops = KeepingOps()
    assert_same_logits(path, ops)
    assert {form.bits for form in ops.packed} == {int(quantisation[1])}
    assert len(ops.packed) >= 4 * 3


@pytest.mark.parametrize("quantisation", ["Q4_K", "Q5_K", "Q6_K"])
def test_nested_gguf_blocks_are_kept(quantisation: str, tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **NESTED)
    path = write_tiny_gguf(directory, tmp_path / "m.gguf", quantisation=quantisation)
    ops = KeepingOps()
    assert_same_logits(path, ops)
    assert {(form.bits, form.is_nested) for form in ops.packed} == {(int(quantisation[1]), True)}


INT4, MXFP4, FLOAT8 = GroupForm(4, 32, zero=8), GroupForm(4, 32, is_float=True), GroupForm(8, 128, is_float=True)


@pytest.mark.parametrize(
    ("role", "kept"),
    [("linear", {INT4, FLOAT8}), ("experts", {INT4, MXFP4}), ("head", {INT4}), ("tied", set()), ("table", set())],
)
def test_what_a_gpu_keeps_by_role(role: Role, kept: set[GroupForm]) -> None:
    """Only experts have products in MXFP4, and none in float8."""
    method = PackedMethod(64, 256, ops=KeepingOps(), dtype=torch.bfloat16, device="cuda", role=role)  # type: ignore[arg-type]
    assert {form for form in (INT4, MXFP4, FLOAT8) if method.keeps(form)} == kept


DEQUANTISED = {"gptq 4, rest", "ct int4 tensor"}
"""A last group of another size, and zeros of another offset than the values have no form."""
ORDERED = ["gptq 4, order", "gptq 8 v2, order", "ct int4 order"]


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_of_other_formats_are_kept_or_dequantised(name: str, tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("qwen3", tmp_path / "model", **VARIANTS[name].sizes)
    quantise(directory, VARIANTS[name])
    ops = KeepingOps()
    assert_same_logits(directory, ops)
    assert bool(ops.packed) == (name not in DEQUANTISED), ops.packed


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_each_part_of_a_layer_has_its_order_of_columns(kind: str, rounds: bool, name: str, tmp_path: Path) -> None:
    """Phi-3's file has one tensor, and so one order, for Q, K and V."""
    directory = make_tiny_checkpoint(kind, tmp_path / "model", **VARIANTS[name].sizes)
    quantise(directory, VARIANTS[name])
    ops = KeepingOps(rounds=rounds)
    assert_same_logits(directory, ops)
    assert {form.ordered_in for form in ops.packed} == {64, 96}
    layer = load_tiny(directory, KeepingOps(), linear_method=PackedMethod).layers[1]  # type: ignore[attr-defined, arg-type]
    packed = layer.attention.qkv.method.packed
    assert [type(part) for part in packed.parts] == [OrderedWeight] * 3
    assert type(layer.mlp.down.method.packed) is OrderedWeight
    with_orders = sum(part.weight.nbytes for part in packed.parts) + 3 * 4 * 64
    assert packed.nbytes == with_orders


def test_groups_of_other_sizes_are_dequantised(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **VARIANTS["gptq 4, order"].sizes)
    quantise(directory, VARIANTS["gptq 4, order"])
    tensors = load_file(directory / "model.safetensors")
    for name, groups in tensors.items():
        if name.endswith("down_proj.g_idx"):
            groups[groups.argmin()] = 1  # 31 and 33 columns
    save_file(tensors, directory / "model.safetensors")
    ops = KeepingOps()
    assert_same_logits(directory, ops)
    assert {form.ordered_in for form in ops.packed} == {64}


def test_what_would_be_rounded_is_dequantised(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **WIDE)
    path = write_tiny_gguf(directory, tmp_path / "m.gguf", quantisation="Q8_0")
    ops = KeepingOps(rounds=True)
    assert_same_logits(path, ops)
    assert ops.packed


def test_parts_of_several_forms(tmp_path: Path) -> None:
    """As in llama.cpp's mixed files: V has other blocks than Q and K, and one layer's K has none."""
    directory = make_tiny_checkpoint("qwen2", tmp_path / "model", **WIDE)

    def choose(name: str) -> str:
        if name == "blk.1.attn_k.weight":
            return "F16"
        return "Q8_0" if "attn_v" in name else "Q4_0"

    path = write_tiny_gguf(directory, tmp_path / "m.gguf", quantisation=choose)
    ops = KeepingOps()
    assert_same_logits(path, ops)
    model = load_tiny(path, ops, linear_method=PackedMethod)  # type: ignore[arg-type]
    merged = [layer.attention.qkv.method.packed for layer in model.layers]  # type: ignore[attr-defined]
    assert [len(weight.parts) for weight in merged if isinstance(weight, MergedWeight)] == [2, 3, 2]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("mixed", ["no layer", "blk.1"])
def test_few_rows_use_fused_products(kind: str, mixed: str, tmp_path: Path) -> None:
    """Also where the weight of a later layer has parts of several forms, and so none."""
    directory = make_tiny_checkpoint(kind, tmp_path / "model", **WIDE)

    def choose(name: str) -> str:
        return "Q8_0" if name.startswith(mixed) and "attn_v" in name else "Q4_0"

    path = write_tiny_gguf(directory, tmp_path / "m.gguf", quantisation=choose)
    Fused.calls.clear()
    assert_same_logits(path, KeepingOps(kept=Fused))
    model = load_tiny(path, KeepingOps(kept=Fused), linear_method=PackedMethod)  # type: ignore[arg-type]
    expected = {"project_qkv", "norm_linearsilu", "add_linear", "gated", "add_norm_linear"}
    assert model.max_small_batch_tokens == 6 and set(Fused.calls) == expected
    qkv, gate_up = Fused.calls.count("project_qkv"), Fused.calls.count("norm_linearsilu")
    num_layers = len(model.layers)  # type: ignore[attr-defined]
    assert qkv == (gate_up if mixed == "no layer" else gate_up * (num_layers - 1) // num_layers)


@pytest.mark.parametrize("name", ["awq g32", "fp8 blocks", "ct int4 zeros", *ORDERED])
def test_ranks_keep_their_parts(name: str, tmp_path: Path) -> None:
    sizes = VARIANTS[name].sizes | {"intermediate_size": 128}
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **sizes)
    quantise(directory, VARIANTS[name])
    for rank in range(2):
        tp = TensorParallel(rank, 2, lambda part: part)
        plain = load_tiny(directory, tp=tp).layers[1]  # type: ignore[attr-defined]
        kept = load_tiny(directory, KeepingOps(), tp=tp, linear_method=PackedMethod).layers[1]  # type: ignore[attr-defined, arg-type]
        for linear, other in zip(
            (plain.attention.qkv, plain.attention.out, plain.mlp.gate_up, plain.mlp.down),
            (kept.attention.qkv, kept.attention.out, kept.mlp.gate_up, kept.mlp.down),
            strict=True,
        ):
            x = torch.randn(3, linear.method.weight.shape[1])
            assert_close(other.method.apply(x, None), linear.method.apply(x, None))


@pytest.mark.parametrize(("quantization", "expected"), [(None, [4]), ("int8", [4, 8])])
def test_rounding_leaves_what_is_quantised(quantization: str | None, expected: list[int], tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **WIDE)
    path = write_tiny_gguf(directory, tmp_path / "m.gguf", quantisation=lambda name: "Q4_0" if "ffn" in name else "F32")
    ops = KeepingOps()
    load_tiny(path, ops, linear_method=find_linear_method(quantization, "cpu"))  # type: ignore[arg-type]
    assert sorted({form.bits for form in ops.packed}) == expected


@pytest.mark.parametrize("name", ORDERED)
def test_columns_in_order_of_activation_are_not_cut(name: str, tmp_path: Path) -> None:
    """A rank dequantises layers whose inputs it has a part of."""
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **VARIANTS[name].sizes | {"intermediate_size": 128})
    quantise(directory, VARIANTS[name])
    tp = TensorParallel(1, 2, lambda part: part)
    layer = load_tiny(directory, KeepingOps(), tp=tp, linear_method=PackedMethod).layers[0]  # type: ignore[attr-defined, arg-type]
    kept = [
        linear.method.packed for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    ]
    assert [weight is None for weight in kept] == [False, True, False, True]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_int4_leaves_8_bits_to_layers_that_lose_most(kind: str, device: str, tmp_path: Path) -> None:
    """On a GPU merged layers have fused products of one form."""
    directory = make_tiny_checkpoint(kind, tmp_path / "model")
    model = load_tiny(directory, linear_method=find_linear_method("int4", device))
    bits = {
        weight.method.layer: weight.method.form.bits
        for weight in model.weights()
        if isinstance(weight.method, PackedMethod) and weight.method.form is not None and weight.method.layer
    }
    fine = 8 if device == "cpu" else 4
    assert bits == {"qkv": fine, "out": 4, "mlp_in": 4, "down": fine}


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", ["gptq 4, order", "ct int4 order"])
def test_native_products_of_ordered_weights(name: str, tmp_path: Path) -> None:
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **VARIANTS[name].sizes)
    twin = quantise(directory, VARIANTS[name])
    expected = torch.cat(PagedRun(load_tiny(twin, cpu, torch.bfloat16), PROMPTS, block_size=4).run(7))
    model = load_tiny(directory, cpu, torch.bfloat16, linear_method=PackedMethod)
    assert type(model.layers[0].mlp.down.method.packed) is OrderedWeight  # type: ignore[attr-defined]
    actual = torch.cat(PagedRun(model, PROMPTS, block_size=4).run(7))
    assert 1e-5 < float((actual - expected).norm() / expected.norm()) < 0.06


@pytest.mark.parametrize("name", ORDERED)
def test_experts_and_heads_with_an_order_are_dequantised(name: str, tmp_path: Path) -> None:
    variant = replace(VARIANTS[name], config={k: v for k, v in VARIANTS[name].config.items() if k != "ignore"})
    sizes = variant.sizes | {"moe_intermediate_size": 64, "tie_word_embeddings": False, "vocab_size": 104}
    directory = make_tiny_checkpoint("qwen3_moe", tmp_path / "model", **sizes)
    quantise(directory, variant, head=True, choose=lambda module: None if module.endswith("mlp.gate") else variant)
    assert_same_logits(directory, KeepingOps())
    model = load_tiny(directory, KeepingOps(), linear_method=PackedMethod)  # type: ignore[arg-type]
    methods = {weight.name: weight.method for weight in model.weights() if isinstance(weight.method, PackedMethod)}
    kept = {name for name, method in methods.items() if method.packed or method.packed_experts}
    assert kept == {name for name in methods if "self_attn" in name or "layers.1.mlp." in name}
    planned = sum(count for _, count in read_spec(directory).forms) - 2 * 6 * 64  # these count routers
    assert planned == sum(math.prod(weight.shape) for weight in model.weights() if weight.name in kept)


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("quantisation", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_native_products_of_kept_weights(quantisation: str, tmp_path: Path) -> None:
    """On the CPU's own operations in bfloat16: near the dequantised weights', and the same in every chunk."""
    directory = make_tiny_checkpoint("llama", tmp_path / "model", **(NESTED if quantisation.endswith("K") else WIDE))
    path = write_tiny_gguf(directory, tmp_path / "m.gguf", quantisation=quantisation)
    expected = torch.cat(PagedRun(load_tiny(path, cpu, torch.bfloat16), PROMPTS, block_size=4).run(7))
    model = load_tiny(path, cpu, torch.bfloat16, linear_method=PackedMethod)
    assert {type(weight.method.packed) for weight in model.weights() if weight.method} <= {GroupedWeight, TiledWeight}
    actual = torch.cat(PagedRun(model, PROMPTS, block_size=4).run(7))
    assert 1e-5 < float((actual - expected).norm() / expected.norm()) < (0.2 if quantisation == "Q5_K" else 0.05)
