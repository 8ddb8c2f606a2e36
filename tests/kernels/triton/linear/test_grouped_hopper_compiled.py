"""Hopper's products of quantised weights: compiled without a GPU, and their launch arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.integers import cdiv
from octavo.kernels.groups import GroupForm
from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton.linear import grouped_hopper, tuning
from tests.kernels.triton.compiled import (
    MULTIPROCESSOR_REGISTERS,
    SHARED_BYTES,
    fake_gpu,
    record_launches,
    register_usage,
)
from tests.kernels.triton.linear.quantised import compile_grouped, packed

LLAMA = [(6144, 4096, ""), (14336, 4096, "silu"), (4096, 14336, "")]


def compile_product(
    format: str, planes: str, columns: int, num_out: int, num_in: int, gate: str, num_tokens: int
) -> tuple[Any, tuning.HopperTuning]:
    bits, scaled = 4 if format == "int4" else 8, columns * (2 if planes == "pair" else 1)
    chosen = tuning.grouped_hopper_tuning(num_out, num_in, bits, scaled, num_tokens, bool(gate))
    adds = num_out < num_in
    types = {
        "out_squares": "*fp32",
        **dict.fromkeys(("bias", "residual", "norm", "y", "weighted"), "*bf16"),
    }
    constants = {
        "GATE": gate,
        "SCALED": not adds,
        "WITH_BIAS": False,
        "WITH_RESIDUAL": adds,
        "WITH_NORM": adds,
    }
    weight = format, planes, columns
    return compile_grouped(grouped_hopper._grouped_hopper, chosen, weight, num_tokens, types, constants), chosen


@pytest.mark.parametrize("num_tokens", [1, 16, 32, 64])
@pytest.mark.parametrize("shape", LLAMA, ids=str)
@pytest.mark.parametrize(("format", "planes"), [("int4", "pair"), ("float8", "wide")])
def test_products_of_llama_8b_fit(format: str, planes: str, shape: tuple[int, int, str], num_tokens: int) -> None:
    kernel, chosen = compile_product(format, planes, 128, *shape, num_tokens)
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED_BYTES and (num_tokens > 32 or register_usage(kernel)[1] == 0)
    assert ("wgmma.mma_async" in ptx) == (num_tokens > 16) and "cp.async.bulk.tensor.2d" in ptx
    assert ("atom" in ptx) == (chosen.splits > 1)
    # The words come in pieces of 8 bytes, or by matrix instructions' own loads: never number by number.
    assert "ld.shared.v2.b8" not in ptx and ("ld.shared.v2.b32" if format == "int4" else "ldmatrix") in ptx
    first, wait = ptx.index("cp.async.bulk"), ptx.rindex("griddepcontrol.wait")
    assert first < wait < ptx.rindex("cp.async.bulk")  # words are copied before the wait, tokens after it


@pytest.mark.parametrize(
    ("format", "planes", "columns"),
    [
        ("int4", "zero", 32),
        ("int4", "row", 128),
        ("int8", "pair", 32),
        ("int8", "pair", 128),
        ("int8", "wide", 64),
        ("float8", "row", 128),
    ],
)
def test_a_step_is_read_before_the_next_is_copied_to_its_place(format: str, planes: str, columns: int) -> None:
    """A read may still be on its way when its warp comes to a barrier: without the fence, a copy overtakes it."""
    for num_tokens in (3, 20):
        ptx = compile_product(format, planes, columns, 4096, 4096, "", num_tokens)[0].asm["ptx"]
        free = ptx.index("mbarrier.arrive.shared")
        read = max(ptx.rfind(name, 0, free) for name in ("ld.shared", "ldmatrix"))
        assert 0 < read < ptx.rindex("fence.proxy.async", 0, free) < ptx.rindex("bar.sync", 0, free)


def test_all_programs_of_a_product_are_resident() -> None:
    """Programs that share a tile wait for each other."""
    for num_out in range(128, 40_000, 128):
        for num_in in (512, 4096, 14336):
            for bits, scaled, num_tokens in ((4, 256, 1), (8, 64, 1), (4, 32, 16), (8, 128, 32), (8, 256, 64)):
                chosen = tuning.grouped_hopper_tuning(num_out, num_in, bits, scaled, num_tokens, False)
                stage = 16 * chosen.columns * bits + tuning.padded_tokens(num_tokens) * chosen.columns * 2
                stage += 512 * chosen.columns // scaled
                assert chosen.stages * stage + 1024 <= SHARED_BYTES and 128 // chosen.splits >= 8
                warps = cdiv(grouped_hopper.NUM_WARPS + 1, 4) * 4
                by_registers = MULTIPROCESSOR_REGISTERS // (32 * warps * chosen.registers)
                resident = (
                    min(by_registers, SHARED_BYTES // (chosen.stages * stage + 2048)) * tuning.NUM_MULTIPROCESSORS
                )
                assert chosen.splits == 1 or cdiv(num_out, 128) * chosen.splits <= resident


def test_launch_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor is passed under its name; a step's words are lines of the descriptor's tensor."""
    args = record_launches(monkeypatch, grouped_hopper, "_grouped_hopper")
    with fake_gpu(9, 0):
        stream = NormedResidual(*(torch.zeros(5, 512, dtype=torch.bfloat16) for _ in range(2)), torch.zeros(4, 16))
        norm, weight = torch.ones(512, dtype=torch.bfloat16), packed(GroupForm(4, 128, zero=8), 512, 512)
        after = weight.add_linear(stream, torch.zeros(5, 512, dtype=torch.bfloat16), None, norm)
        assert args["residual"] is stream.x and args["norm"] is norm and args["y"] is after.x and args["WITH_NORM"]
        assert after.squares is args["out_squares"] and after.squares.shape == (4 * args["SPLITS"], 16)
        assert (
            args["words"].base.shape == (4 * 2 * 128, 32) and args["tile_lines"] == 2 * 128
        )  # two steps of 256 inputs
        assert args["planes"].base.shape == (2 * 512 // 16, 16) and args["plane_lines"] == 32
        assert args["TOKENS"] == 8 and args["PADDED"] == 16 and args["grid"] == (4 * args["SPLITS"],)
        weight = packed(GroupForm(8, 128, is_float=True), 512, 512)
        y = weight.norm_linear(stream, 1e-6, gate="silu")
        assert y.shape == (5, 256) and args["squares"] is stream.squares and args["num_squares"] == 4
        assert args["words"].base.shape == (512, 128) and args["num_out"] == 256 and args["FORMAT"] == "float8"
        assert weight.max_small_batch_tokens == 32
    assert weight.max_small_batch_tokens == tuning.MAX_ROWS_TWO_PARTS


def test_the_kernel_is_for_few_rows_in_bfloat16_that_tma_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    monkeypatch.setattr(grouped_hopper, "launch", lambda weight, x, *args, **options: launched.append(len(x)))
    weight = packed(GroupForm(4, 128, zero=8), 128, 512)
    with fake_gpu(9, 0):
        for num_rows in (1, 64):
            weight(torch.zeros(num_rows, 512, dtype=torch.bfloat16), None)
        assert launched == [1, 64]
        assert not weight._streams(torch.zeros(65, 512, dtype=torch.bfloat16), None)
        assert not weight._streams(torch.zeros(4, 512, dtype=torch.float16), None)
        assert not weight._streams(torch.zeros(4, 516, dtype=torch.bfloat16)[:, :512], None)
        x = torch.zeros(4, 512, dtype=torch.bfloat16)
        assert not weight._streams(x, torch.zeros(4, 200, dtype=torch.bfloat16)[:, :128])
    assert not weight._streams(x, None)
