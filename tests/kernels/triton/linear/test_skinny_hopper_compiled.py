"""Hopper's kernel for linear layers of few tokens: compiled without a GPU, and its launch arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.integers import cdiv
from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton.linear import skinny, skinny_hopper
from octavo.kernels.triton.linear import tuning as tunings
from octavo.kernels.triton.linear.tuning import (
    HopperTuning,
    linear_tuning,
    max_small_batch_tokens,
    padded_tokens,
    skinny_hopper_tuning,
)
from tests.kernels.triton.compiled import SHARED_BYTES, compile_for_hopper, fake_gpu, record_launches

POINTERS = {
    **dict.fromkeys(("bias", "residual", "norm", "y", "weighted"), "*bf16"),
    **dict.fromkeys(("squares", "out_squares", "partial_sums"), "*fp32"),
    **dict.fromkeys(("words", "peers"), "*i64"),
    **dict.fromkeys(("barriers", "launch_counters", "status", "stop"), "*i32"),
}


def compile_skinny(tuning: HopperTuning, num_tokens: int, *, gate: str, sums: bool, num_ranks: int = 1) -> Any:
    """Compile the product after a norm, or with `sums` the one that is added to the residual."""
    padded = padded_tokens(num_tokens)
    tokens = min(padded, tunings.TILE_TOKENS)
    constants = {
        "ROWS": tuning.rows,
        "TOKENS": tokens,
        "PADDED": padded,
        "COLUMNS": tuning.columns,
        "SPLITS": tuning.splits,
        "STAGES": tuning.stages,
        "GATE": gate,
        "SCALED": not sums,
        "WITH_BIAS": True,
        "WITH_RESIDUAL": sums,
        "WITH_NORM": sums,
        "NUM_RANKS": num_ranks,
        "USE_PDL": True,
    }
    types = {
        "xs": f"tensordesc<bf16[{tokens}, {tuning.columns}],{skinny_hopper.LAYOUT!r}>",
        "weights": f"tensordesc<bf16[{tuning.rows}, {tuning.columns}],{skinny_hopper.LAYOUT!r}>",
        "eps": "fp32",
        **POINTERS,
    }
    return compile_for_hopper(skinny_hopper._skinny_hopper, constants, types, maxnreg=tuning.registers)


@pytest.mark.parametrize("num_tokens", [1, 32, 64, 130])
@pytest.mark.parametrize(
    ("num_out", "num_in", "gate", "sums"),
    [
        (14336, 4096, "silu", False),
        (4096, 14336, "", True),
        (6144, 4096, "", False),
        (1024, 2048, "", True),
        (2048, 1024, "silu", False),
    ],
    ids=str,
)
def test_the_skinny_kernel_compiles_and_fits(num_out: int, num_in: int, gate: str, sums: bool, num_tokens: int) -> None:
    """Products of a layer of Llama 3.1 8B, and of a small model."""
    tuning = skinny_hopper_tuning(num_out, num_in, num_tokens, bool(gate))
    kernel = compile_skinny(tuning, num_tokens, gate=gate, sums=sums)
    assert kernel.metadata.shared <= SHARED_BYTES
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor.2d" in ptx and "setmaxnreg" in ptx
    # Weights are copied before the wait for the preceding kernel, tokens after it
    first, wait, last = ptx.index("cp.async.bulk"), ptx.rindex("griddepcontrol.wait"), ptx.rindex("cp.async.bulk")
    assert first < wait < last
    assert ("atom" in ptx) == (tuning.splits > 1)  # the barrier of programs
    # The epilogue's inputs are loaded before the first product.
    assert not sums or "ld.global" in ptx[ptx.index("griddepcontrol.wait") : ptx.index("wgmma.mma_async")]


def test_all_programs_of_skinny_are_resident() -> None:
    """Programs that share a tile wait for each other."""
    for num_out in range(128, 40_000, 128):
        for num_tokens in (1, 32, 33, 64, 65, 256):
            for gated in (False, True):
                tuning = skinny_hopper_tuning(num_out, 4096, num_tokens, gated)
                padded = padded_tokens(num_tokens)
                rows = tuning.rows * (2 if gated else 1) + min(padded, tunings.TILE_TOKENS)
                used = rows * tuning.columns * 2 * tuning.stages + 2048
                programs = cdiv(num_out, tuning.rows) * tuning.splits * cdiv(padded, tunings.TILE_TOKENS)
                assert used <= SHARED_BYTES and tuning.rows // tuning.splits >= 8
                assert programs <= tunings.NUM_MULTIPROCESSORS * (SHARED_BYTES // used) or tuning.splits == 1


def test_launch_arguments_of_the_skinny_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor is passed under its name; absent tensors get a placeholder."""
    args = record_launches(monkeypatch, skinny_hopper, "_skinny_hopper")
    x, weight, bias, norm = (torch.zeros(n, dtype=torch.bfloat16) for n in ((70, 96), (304, 96), 304, 304))
    residual = NormedResidual(*(torch.zeros(70, 304, dtype=torch.bfloat16) for _ in range(2)), torch.zeros(5, 128))
    after = skinny.add_linear(residual, x, weight, bias, norm, tuning=HopperTuning(128, 64, 4, 3))
    expected = {"bias": bias, "residual": residual.x, "norm": norm, "y": after.x, "weighted": after.weighted}
    assert all(args[name] is tensor for name, tensor in expected.items()) and args["out_squares"] is after.squares
    assert after.squares.shape == (12, 128) and args["grid"] == (24,)  # 3 tiles of rows, 4 shares, 2 tiles of tokens
    assert args["partial_sums"].numel() == 24 * 128 * 64 and args["squares"] is after.x and not args["SCALED"]
    assert (args["num_tokens"], args["num_out"], args["num_in"]) == (70, 304, 96)
    gate_up = torch.zeros(608, 304, dtype=torch.bfloat16)
    y = skinny.norm_linear(residual, 1e-6, gate_up, None, "silu", tuning=HopperTuning(64, 64, 1, 3))
    assert y.shape == (70, 304) and args["y"] is y and args["bias"] is y and not args["WITH_BIAS"]
    assert args["squares"] is residual.squares and args["num_squares"] == 5 and args["grid"] == (10,)
    assert args["xs"].base is residual.weighted and args["weights"].base is gate_up and not args["WITH_NORM"]


def test_the_kernel_is_chosen_by_device_size_and_dtype() -> None:
    def weight(megabytes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(megabytes << 10, 1024 // dtype.itemsize, dtype=dtype, device="meta")

    for capability in ((8, 0), (10, 0)):
        with fake_gpu(*capability):
            assert [max_small_batch_tokens(weight(size)) for size in (30, 200)] == [tunings.MAX_TRITON_TOKENS, 0]
            assert not isinstance(linear_tuning(weight(30), 8, False), HopperTuning)
    with fake_gpu(9, 0):
        assert [max_small_batch_tokens(weight(size)) for size in (30, 32, 33, 200)] == [256, 256, 64, 64]
        assert isinstance(linear_tuning(weight(30), 40, False), HopperTuning)
        assert max_small_batch_tokens(weight(200, torch.float32)) == 0  # the kernel multiplies bfloat16 only
        assert not isinstance(linear_tuning(weight(30, torch.float32), 8, False), HopperTuning)
