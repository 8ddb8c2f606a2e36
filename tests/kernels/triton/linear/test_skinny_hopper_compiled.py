"""Hopper's kernel for linear layers of few tokens: compiled without a GPU, and its launch arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton.linear import skinny, skinny_hopper
from octavo.kernels.triton.linear.skinny_hopper import SkinnyHopperTuning, skinny_hopper_tuning
from tests.kernels.triton.hopper import SHARED_BYTES, compile_for_hopper

POINTERS = {
    **dict.fromkeys(("bias", "residual", "norm", "y", "weighted"), "*bf16"),
    **dict.fromkeys(("squares", "out_squares", "partial_sums"), "*fp32"),
    "barriers": "*i32",
}


def compiled(tuning: SkinnyHopperTuning, num_tokens: int, *, gate: str, sums: bool) -> Any:
    """A product behind a norm, or one that is added to a stream."""
    padded = skinny_hopper.padded_tokens(num_tokens)
    tokens = min(padded, skinny_hopper.TILE_TOKENS)
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
def test_it_compiles_for_hopper_and_fits(num_out: int, num_in: int, gate: str, sums: bool, num_tokens: int) -> None:
    """Products of a layer of Llama 3.1 8B, and a small one."""
    tuning = skinny_hopper_tuning(num_out, num_in, num_tokens, bool(gate))
    kernel = compiled(tuning, num_tokens, gate=gate, sums=sums)
    assert kernel.metadata.shared <= SHARED_BYTES
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor.2d" in ptx and "setmaxnreg" in ptx
    # The copies of weights come before the wait for the kernel in front, those of what it may have written behind it
    first, wait, last = ptx.index("cp.async.bulk"), ptx.rindex("griddepcontrol.wait"), ptx.rindex("cp.async.bulk")
    assert first < wait < last
    assert ("atom" in ptx) == (tuning.splits > 1)  # where programs meet
    # What is added in the end is asked for before the first product.
    assert not sums or "ld.global" in ptx[ptx.index("griddepcontrol.wait") : ptx.index("wgmma.mma_async")]


def test_every_program_of_a_tuning_is_at_work_at_once() -> None:
    """Those that share a tile wait for each other."""
    for num_out in range(128, 40_000, 128):
        for num_tokens in (1, 32, 33, 64, 65, 256):
            for gated in (False, True):
                tuning = skinny_hopper_tuning(num_out, 4096, num_tokens, gated)
                padded = skinny_hopper.padded_tokens(num_tokens)
                rows = tuning.rows * (2 if gated else 1) + min(padded, skinny_hopper.TILE_TOKENS)
                used = rows * tuning.columns * 2 * tuning.stages + 2048
                programs = -(-num_out // tuning.rows) * tuning.splits * -(-padded // skinny_hopper.TILE_TOKENS)
                assert used <= SHARED_BYTES and tuning.rows // tuning.splits >= 8
                assert programs <= skinny_hopper.NUM_MULTIPROCESSORS * (SHARED_BYTES // used) or tuning.splits == 1


def test_what_the_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor under its name; what is not there is none that it would follow."""
    told: dict[str, Any] = {}
    names = skinny_hopper._skinny_hopper.arg_names

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *given, **options: told.update(
                {"grid": grid} | dict(zip(names, given, strict=False)) | options
            )

    monkeypatch.setattr(skinny_hopper, "_skinny_hopper", Kernel())
    x, weight, bias, norm = (torch.zeros(n, dtype=torch.bfloat16) for n in ((70, 96), (304, 96), 304, 304))
    stream = NormedResidual(*(torch.zeros(70, 304, dtype=torch.bfloat16) for _ in range(2)), torch.zeros(5, 128))
    after = skinny.add_linear(stream, x, weight, bias, norm, tuning=SkinnyHopperTuning(128, 64, 4, 3))
    expected = {"bias": bias, "residual": stream.x, "norm": norm, "y": after.x, "weighted": after.weighted}
    assert all(told[name] is tensor for name, tensor in expected.items()) and told["out_squares"] is after.squares
    assert after.squares.shape == (12, 128) and told["grid"] == (24,)  # 3 tiles of rows, 4 shares, 2 tiles of tokens
    assert told["partial_sums"].numel() == 24 * 128 * 64 and told["squares"] is after.x and not told["SCALED"]
    assert (told["num_tokens"], told["num_out"], told["num_in"]) == (70, 304, 96)
    gate_up = torch.zeros(608, 304, dtype=torch.bfloat16)
    y = skinny.norm_linear(stream, 1e-6, gate_up, None, "silu", tuning=SkinnyHopperTuning(64, 64, 1, 3))
    assert y.shape == (70, 304) and told["y"] is y and told["bias"] is y and not told["WITH_BIAS"]
    assert told["squares"] is stream.squares and told["num_squares"] == 5 and told["grid"] == (10,)
    assert told["xs"].base is stream.weighted and told["weights"].base is gate_up and not told["WITH_NORM"]


def test_who_takes_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def weight(megabytes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(megabytes << 10, 1024 // dtype.itemsize, dtype=dtype, device="meta")

    assert skinny.max_small_batch_tokens(weight(30)) == skinny.MAX_TRITON_TOKENS  # no Hopper
    assert skinny.max_small_batch_tokens(weight(200)) == 0
    assert not isinstance(skinny._tuning(weight(30), 8, False), SkinnyHopperTuning)
    monkeypatch.setattr(skinny_hopper, "_is_hopper", lambda device: True)
    assert [skinny.max_small_batch_tokens(weight(size)) for size in (30, 32, 33, 200)] == [256, 256, 64, 64]
    assert isinstance(skinny._tuning(weight(30), 40, False), SkinnyHopperTuning)
    assert skinny.max_small_batch_tokens(weight(200, torch.float32)) == 0  # the matrix units multiply bfloat16
    assert not isinstance(skinny._tuning(weight(30, torch.float32), 8, False), SkinnyHopperTuning)
