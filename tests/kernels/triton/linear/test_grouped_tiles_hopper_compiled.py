"""Hopper's products of quantised weights with many rows: compiled without a GPU, and their share of the work."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from triton import knobs

from octavo.kernels.groups import GroupForm, Groups
from octavo.kernels.triton import precompile
from octavo.kernels.triton.linear import grouped_tiles_hopper, tuning
from octavo.kernels.triton.linear.grouped import GroupedWeight, pack_groups
from octavo.kernels.triton.linear.tuning import TilesTuning
from tests.kernels.triton.compiled import SHARED_BYTES, fake_gpu, list_launches, record_launches, register_usage


def packed(form: GroupForm, num_out: int, num_in: int, scales: torch.dtype) -> GroupedWeight:
    shape = num_out, num_in // form.group_size
    zeros = torch.zeros(shape, dtype=torch.uint8) if form.has_zeros else None
    values = torch.zeros(num_out, num_in, dtype=torch.uint8)
    weight = pack_groups(Groups(form, values, torch.ones(shape, dtype=scales), zeros))
    assert weight is not None
    return weight


def serialises(ptx: str) -> bool:
    """True if ptxas waits after each matrix instruction."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx, encoding="utf-8")
        command = [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", str(path), "-o", str(path.with_suffix(".cubin"))]
        return "serialized" in subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize(
    ("form", "scales"),
    [
        (GroupForm(4, 128, zero=8), torch.bfloat16),
        (GroupForm(4, 32, zero=8), torch.float16),
        (GroupForm(4, 32, has_zeros=True), torch.bfloat16),
        (GroupForm(8, 64, zero=128), torch.float32),
        (GroupForm(8, 256, zero=128), torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [100, 150, 1000])
def test_products_fit_and_overlap_with_unpacking(form: GroupForm, scales: torch.dtype, num_tokens: int) -> None:
    weight, x = packed(form, 256, 256, scales), torch.zeros(num_tokens, 256, dtype=torch.bfloat16)
    (line,) = list_launches(9, 0, lambda: weight(x, None))
    with fake_gpu(9, 0):
        kernel = precompile.compile_kernel(line)
    chosen, ptx = tuning.grouped_tiles_tuning(form.bits, weight.scaled_inputs, num_tokens), kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED_BYTES and register_usage(kernel)[1] <= 8
    assert len(re.findall(r"wgmma\.mma_async", ptx)) == 2 * 8 * chosen.rows // 64  # two groups, 8 times 16 inputs
    assert "stmatrix" in ptx and "st.global.v4" in ptx and "ld.global.cg.v4" in ptx
    assert not serialises(ptx)


def test_unpacking_takes_few_instructions() -> None:
    """A word of 4 bits, with its scale: 4 values of 2 each, moved, masked, less the zero, times the scale."""
    weight, x = (
        packed(GroupForm(4, 128, zero=8), 256, 256, torch.bfloat16),
        torch.zeros(1000, 256, dtype=torch.bfloat16),
    )
    (line,) = list_launches(9, 0, lambda: weight(x, None))
    with fake_gpu(9, 0):
        kernel = precompile.compile_kernel(line)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = 2 * 16  # of a thread: two groups of warps
    assert len(re.findall("HMUL2", code)) == 4 * words and "F2F." not in code
    assert len(re.findall("HFMA2|HADD2", code)) <= 4 * words + 8


def test_launch_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows in bfloat16 that TMA copies; all others have the portable kernel."""
    args = record_launches(monkeypatch, grouped_tiles_hopper, "_grouped_tiles")
    weight = packed(GroupForm(4, 128, zero=8), 1000, 640, torch.bfloat16)
    with fake_gpu(9, 0):
        x, bias = torch.zeros(300, 648, dtype=torch.bfloat16)[:, :640], torch.zeros(1000, dtype=torch.bfloat16)
        out = torch.zeros(300, 1008, dtype=torch.bfloat16)[:, :1000]
        assert weight(x, bias, out=out) is out and args["ys"].base is out and args["xs"].strides == [648, 1]
        assert args["bias"] is bias and args["WITH_BIAS"] and args["num_tiles"] == 4 * 3 and args["num_steps"] == 5
        assert args["tile_lines"] == 6 * 64 and args["plane_lines"] == 64 and args["grid"] == (15,)
        assert args["NUM_PLANES"] == 1  # of a pair of groups, for two steps
        args.clear()
        list_launches(9, 0, lambda: weight(x.half(), None), lambda: weight(x, None, float32_out=True))
        assert not args


def test_stages_fit() -> None:
    for bits, scaled, num_tokens in ((4, 256, 100), (4, 32, 100), (8, 32, 100), (8, 32, 1000), (4, 256, 1000)):
        chosen = tuning.grouped_tiles_tuning(bits, scaled, num_tokens)
        assert isinstance(chosen, TilesTuning) and 2 <= chosen.stages <= 5
