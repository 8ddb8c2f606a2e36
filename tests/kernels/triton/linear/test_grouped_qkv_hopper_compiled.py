"""Hopper's QKV projection of quantised weights: compiled without a GPU, and its launch arguments. tests/gpu runs it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.groups import GroupForm
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton.linear import grouped, grouped_qkv_hopper
from octavo.kernels.triton.linear.grouped import GroupedWeight
from octavo.kernels.triton.linear.tuning import HopperTuning, grouped_hopper_tuning
from tests.kernels.triton.compiled import SHARED_BYTES, fake_gpu, record_launches, register_usage
from tests.kernels.triton.linear.quantised import compile_grouped, packed

LLAMA, QWEN_05B, SMOLLM = (32, 8, 128, 4096), (14, 2, 64, 896), (9, 3, 64, 576)
"""Query heads, K/V heads, head size and inputs; of the last, a tile has one head."""
INT4, FLOAT8 = ("int4", "pair", 128), ("float8", "wide", 128)
POINTERS = {
    **dict.fromkeys(("bias", "q_norm", "k_norm", "q", "kv"), "*bf16"),
    **dict.fromkeys(("positions", "slots"), "*i64"),
    "cos_sin": "*fp32",
    "norm_eps": "fp32",
}


def choose(weight: tuple[str, str, int], sizes: tuple[int, int, int, int], num_tokens: int) -> HopperTuning:
    (format, planes, columns), (heads, kv_heads, head_dim, num_in) = weight, sizes
    bits, scaled = 4 if format == "int4" else 8, columns * (2 if planes == "pair" else 1)
    return grouped_hopper_tuning((heads + 2 * kv_heads) * head_dim, num_in, bits, scaled, num_tokens, False)


def check(
    weight: tuple[str, str, int], sizes: tuple[int, int, int, int], num_tokens: int, normed: bool, chosen: HopperTuning
) -> None:
    heads, kv_heads, head_dim, _ = sizes
    constants = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "WITH_BIAS": not normed,
        "NORM": normed,
    }
    kernel: Any = compile_grouped(
        grouped_qkv_hopper._grouped_qkv_hopper, chosen, weight, num_tokens, POINTERS, constants
    )
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED_BYTES and register_usage(kernel)[1] == 0
    assert ("wgmma.mma_async" in ptx) == (num_tokens > 16) and ("mma.sync" in ptx) == (num_tokens <= 16)
    assert ("atom" in ptx) == (chosen.splits > 1)
    assert ptx.count("griddepcontrol.wait") == 2, "one in the producer, one in the consumers"
    first, wait = ptx.index("cp.async.bulk"), ptx.rindex("griddepcontrol.wait")
    assert first < wait < ptx.rindex("cp.async.bulk")


@pytest.mark.parametrize("num_tokens", [1, 16, 32, 64])
@pytest.mark.parametrize("weight", [INT4, FLOAT8], ids=str)
@pytest.mark.parametrize(("sizes", "normed"), [(LLAMA, False), (LLAMA, True), (QWEN_05B, False), (SMOLLM, True)])
def test_the_kernel_compiles_and_fits(
    weight: tuple[str, str, int], sizes: tuple[int, int, int, int], normed: bool, num_tokens: int
) -> None:
    check(weight, sizes, num_tokens, normed, choose(weight, sizes, num_tokens))


@pytest.mark.parametrize("num_tokens", [1, 16, 32, 64])
def test_any_number_of_splits_compiles(num_tokens: int) -> None:
    for splits in (1, 2, 4, 8):
        check(INT4, LLAMA, num_tokens, True, replace(choose(INT4, LLAMA, num_tokens), splits=splits, registers=168))


@pytest.mark.parametrize("weight", [("int4", "zero", 32), ("int8", "row", 128), ("int8", "pair", 32)], ids=str)
def test_every_kind_of_planes_compiles(weight: tuple[str, str, int]) -> None:
    for num_tokens in (3, 20):
        check(weight, LLAMA, num_tokens, True, choose(weight, LLAMA, num_tokens))


def inputs(num_tokens: int, head_dim: int, num_in: int) -> tuple[NormedResidual, Tensor, RaggedBatch, Tensor]:
    """(residual, K/V of a layer with 2 heads, batch, table)"""
    x = torch.zeros(num_tokens, num_in, dtype=torch.bfloat16)
    kv = torch.zeros(9, 3, 2, 2, 16, head_dim, dtype=torch.bfloat16)
    batch = RaggedBatch.from_lists([1] * num_tokens, [5] * num_tokens, [[1]] * num_tokens, 16)
    return NormedResidual(x, x + 1, torch.zeros(3, 16)), kv[:, 1], batch, torch.zeros(99, head_dim)


def test_launch_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    args = record_launches(monkeypatch, grouped_qkv_hopper, "_grouped_qkv_hopper")
    residual, kv, batch, table = inputs(5, 128, 512)
    weight, norm = packed(GroupForm(4, 128, zero=8), 8 * 128, 512), torch.ones(128, dtype=torch.bfloat16)
    bias, norms = torch.zeros(8 * 128, dtype=torch.bfloat16), {"q_norm": norm, "k_norm": norm + 1}
    with fake_gpu(9, 0):
        q = weight.project_qkv(residual, 1e-5, bias, kv, batch, table, norm_eps=1e-6, **norms)
        assert q.shape == (5, 4, 128) and args["q"] is q and args["bias"] is bias
        assert args["q_norm"] is norm and args["k_norm"] is norms["k_norm"] and args["NORM"] and args["WITH_BIAS"]
        assert args["positions"] is batch.positions and args["slots"] is batch.slot_mapping
        assert args["xs"].base is residual.weighted and args["squares"] is residual.squares
        assert args["words"].base.shape == (8 * 2 * 128, 32) and args["tile_lines"] == 2 * 128  # two steps
        assert args["planes"].base.shape == (2 * 1024 // 16, 16) and args["plane_lines"] == 64
        assert args["row_scales"] is weight.planes and args["TOKENS"] == 8 and args["PADDED"] == 16
        assert (args["HEADS"], args["KV_HEADS"], args["eps"], args["norm_eps"]) == (4, 2, 1e-5, 1e-6)
        assert args["grid"] == (8 * args["SPLITS"],)
        weight.project_qkv(residual, 1e-5, bias, kv, batch, table, tuning=HopperTuning(128, 256, 16, 2))
        assert args["SPLITS"] == 8, "a program has at least a token"
        residual, kv, batch, table = inputs(5, 64, 512)
        weight = packed(GroupForm(8, 128, is_float=True), 9 * 64, 512)
        q = weight.project_qkv(residual, 1e-5, None, kv, batch, table)
        assert q.shape == (5, 5, 64) and args["grid"] == (5 * args["SPLITS"],) and args["FORMAT"] == "float8"


def test_other_pools_and_rows_take_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[GroupedWeight] = []

    def multiply(weight: GroupedWeight, residual: NormedResidual, *_: object) -> Tensor:
        products.append(weight)
        return residual.x.new_empty(len(residual.x), weight.num_out)

    monkeypatch.setattr(GroupedWeight, "norm_linear", multiply)
    monkeypatch.setattr(grouped, "rope_kv_write", lambda q, *_, **__: q)
    monkeypatch.setattr(grouped_qkv_hopper, "launch", lambda *_, **__: None)
    form = GroupForm(4, 128, zero=8)
    with fake_gpu(9, 0):
        for num_tokens, head_dim, scales, fused in (
            (5, 128, None, True),
            (64, 64, None, True),
            (65, 128, None, False),
            (5, 128, torch.ones(2, 2), False),
            (5, 96, None, False),
        ):
            weight = packed(form, 8 * head_dim, 512)
            residual, kv, batch, table = inputs(num_tokens, head_dim, 512)
            q = weight.project_qkv(residual, 1e-5, None, kv, batch, table, kv_scales=scales)
            assert (q is None) == fused and products == ([] if fused else [weight]), (num_tokens, head_dim)
            products.clear()
    residual, kv, batch, table = inputs(5, 128, 512)
    assert packed(form, 8 * 128, 512).project_qkv(residual, 1e-5, None, kv, batch, table).shape == (5, 4, 128)
