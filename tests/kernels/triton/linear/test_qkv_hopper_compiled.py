"""Hopper's fused QKV kernel: compiled without a GPU, and its launch arguments. tests/gpu runs it."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton.linear import qkv_hopper, skinny, skinny_hopper
from octavo.kernels.triton.linear.tuning import (
    NUM_MULTIPROCESSORS,
    QKV_HEAD_DIMS,
    TILE_TOKENS,
    padded_tokens,
    qkv_tuning,
)
from tests.kernels.triton.compiled import SHARED_BYTES, compile_for_hopper, fake_gpu, record_launches, register_usage

POINTERS = {
    **dict.fromkeys(("bias", "q_norm", "k_norm", "q", "kv"), "*bf16"),
    **dict.fromkeys(("squares", "cos_sin", "partial_sums"), "*fp32"),
    **dict.fromkeys(("positions", "slots"), "*i64"),
    "barriers": "*i32",
}


@pytest.mark.parametrize("num_tokens", [1, 32, 64, 130, 256])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "num_in", "normed"),
    [(16, 8, 128, 1024, True), (32, 8, 128, 4096, False), (12, 2, 128, 1536, False), (14, 2, 64, 896, False)],
)
def test_the_qkv_kernel_compiles_and_fits(
    heads: int, kv_heads: int, head_dim: int, num_in: int, normed: bool, num_tokens: int
) -> None:
    """Shapes of Qwen3-0.6B, Llama 3.1 8B, Qwen2.5-1.5B and 0.5B."""
    tuning = qkv_tuning(heads + 2 * kv_heads, head_dim, num_in, num_tokens)
    padded = padded_tokens(num_tokens)
    tokens = min(padded, TILE_TOKENS)
    constants = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "TOKENS": tokens,
        "PADDED": padded,
        "COLUMNS": tuning.columns,
        "SPLITS": tuning.splits,
        "STAGES": tuning.stages,
        "WITH_BIAS": not normed,
        "NORM": normed,
        "USE_PDL": True,
    }
    types = {
        "xs": f"tensordesc<bf16[{tokens}, {tuning.columns}],{skinny_hopper.LAYOUT!r}>",
        "weights": f"tensordesc<bf16[{head_dim}, {tuning.columns}],{skinny_hopper.LAYOUT!r}>",
        "eps": "fp32",
        "norm_eps": "fp32",
        **POINTERS,
    }
    kernel = compile_for_hopper(qkv_hopper._qkv_hopper, constants, types, maxnreg=tuning.registers)
    assert kernel.metadata.shared <= SHARED_BYTES and register_usage(kernel)[1] == 0
    ptx = kernel.asm["ptx"]
    assert ("atom" in ptx) == (tuning.splits > 1)
    assert ptx.count("griddepcontrol.wait") == 2, "one in the producer, one in the consumers"
    first, wait, last = ptx.index("cp.async.bulk"), ptx.rindex("griddepcontrol.wait"), ptx.rindex("cp.async.bulk")
    assert first < wait < last


def test_all_programs_of_qkv_are_resident() -> None:
    """Programs that share a tile wait for each other; a thread stores four rows of a token's share."""
    for num_heads in (6, 18, 24, 32, 48, 80):
        for head_dim in QKV_HEAD_DIMS:
            for num_tokens in (1, 16, 32, 33, 64, 65, 128, 256):
                for num_in in (576, 1024, 4096):
                    tuning = qkv_tuning(num_heads, head_dim, num_in, num_tokens)
                    padded = padded_tokens(num_tokens)
                    tokens = min(padded, TILE_TOKENS)
                    programs = num_heads * (padded // tokens) * tuning.splits
                    assert tuning.splits == 1 or programs <= NUM_MULTIPROCESSORS
                    assert tokens % tuning.splits == 0 and tuning.rows == head_dim
                    assert (head_dim + tokens) * tuning.columns * 2 * tuning.stages + 18432 <= SHARED_BYTES


def test_launch_arguments_and_fallback_of_the_qkv_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    args = record_launches(monkeypatch, qkv_hopper, "_qkv_hopper")
    x, bias = torch.zeros(70, 256, dtype=torch.bfloat16), torch.zeros(8 * 64, dtype=torch.bfloat16)
    weight, norm = torch.zeros(8 * 64, 256, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    residual = NormedResidual(x, x + 1, torch.zeros(3, 128))
    kv = torch.zeros(9, 3, 2, 2, 16, 64, dtype=torch.bfloat16)
    batch = RaggedBatch.from_lists([1] * 70, [5] * 70, [[1]] * 70, 16)
    table = torch.zeros(99, 64)
    norms = {"q_norm": norm, "k_norm": norm + 1, "norm_eps": 1e-6}
    with fake_gpu(9, 0):
        q = skinny.project_qkv(residual, 1e-5, weight, bias, kv[:, 1], batch, table, **norms)
    assert q.shape == (70, 4, 64) and args["q"] is q and args["bias"] is bias and args["squares"] is residual.squares
    assert args["q_norm"] is norm and args["k_norm"] is norms["k_norm"] and args["NORM"] and args["WITH_BIAS"]
    assert args["positions"] is batch.positions and args["slots"] is batch.slot_mapping and args["cos_sin"] is table
    assert args["xs"].base is residual.weighted and args["weights"].base is weight
    assert args["kv"].data_ptr() == kv[:, 1].data_ptr() and args["kv_head_stride"] == kv.stride(3)
    assert (args["HEADS"], args["KV_HEADS"], args["HEAD_DIM"], args["eps"], args["norm_eps"]) == (4, 2, 64, 1e-5, 1e-6)
    assert args["grid"] == (8 * 2 * args["SPLITS"],)
    args.clear()
    norm_linear_calls = []
    monkeypatch.setattr(skinny, "norm_linear", lambda *positional: norm_linear_calls.append(positional) or x)
    monkeypatch.setattr(skinny, "rope_kv_write", lambda *positional, **_: positional)
    narrow = torch.zeros(9, 3, 2, 2, 16, 32, dtype=torch.bfloat16)  # heads of 32 are not supported: two kernels
    with fake_gpu(9, 0):
        q, *_ = skinny.project_qkv(residual, 1e-5, weight, bias, narrow[:, 1], batch, table)
    assert not args and norm_linear_calls == [(residual, 1e-5, weight, bias)] and q.shape == (70, 4, 32)
