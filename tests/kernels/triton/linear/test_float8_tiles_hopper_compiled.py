"""Hopper's products of float8 weights with many rows: compiled without a GPU."""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile

import pytest
import torch
from triton import knobs

from octavo.kernels.groups import GroupForm, Groups
from octavo.kernels.triton import precompile
from octavo.kernels.triton.linear import float8_tiles_hopper, tuning
from octavo.kernels.triton.linear.grouped import GroupedWeight, pack_groups
from tests.kernels.triton.compiled import SHARED_BYTES, fake_gpu, list_launches, record_launches, register_usage
from tests.kernels.triton.linear.quantised import packed

FORMS = {"blocks": GroupForm(8, 128, is_float=True), "rows": GroupForm(8, 512, is_float=True)}


def loops(code: str) -> list[list[str]]:
    """The instructions from the first product of each group of warps to the branch after the last."""
    lines = code.splitlines()
    products = [i for i, line in enumerate(lines) if "QGMMA" in line]
    half, branches = len(products) // 2, [i for i, line in enumerate(lines) if " BRA " in line]
    ends = [next(i for i in branches if i > last) for last in (products[half - 1], products[-1])]
    return [lines[first:end] for first, end in zip((products[0], products[half]), ends, strict=True)]


@pytest.mark.parametrize(("kind", "num_tokens"), [("blocks", 300), ("blocks", 1000), ("rows", 60), ("rows", 150)])
def test_sums_stay_in_registers(kind: str, num_tokens: int) -> None:
    weight, x = packed(FORMS[kind], 256, 512), torch.zeros(num_tokens, 512, dtype=torch.bfloat16)
    (line,) = (
        line for line in list_launches(9, 0, lambda: weight._by_float8(x, None, None)) if "_float8_tiles" in line
    )
    with fake_gpu(9, 0):
        kernel = precompile.compile_kernel(line)
    assert kernel.metadata.shared <= SHARED_BYTES and register_usage(kernel)[1] <= 16
    chosen = tuning.float8_tiles_tuning(num_tokens, kind == "rows")
    assert chosen is not None
    ptx = kernel.asm["ptx"]
    assert len(re.findall(r"wgmma\.mma_async", ptx)) == 2 * 4 * chosen.tokens // 64
    if kind == "blocks":  # the scales are read before others are copied to their place
        free = ptx.index("mbarrier.arrive.shared")
        assert 0 < ptx.rfind("ld.shared", 0, free) < ptx.rindex("fence.proxy.async", 0, free)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for loop in loops(code):
        assert not [line for line in loop if "LDL" in line or "STL" in line]


def test_the_faster_product_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's for few rows of a weight in blocks, and for many of one with a scale an output."""
    library = []

    def multiply(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
        library.append(len(x))
        return torch.zeros(len(x), len(weight), dtype=torch.bfloat16)

    monkeypatch.setattr("octavo.kernels.triton.linear.grouped.float8_product", multiply)
    args = record_launches(monkeypatch, float8_tiles_hopper, "_float8_tiles")
    bias = torch.zeros(1000, dtype=torch.bfloat16)
    for (kind, form), num_tokens in itertools.product(FORMS.items(), (100, 300)):
        args.clear()
        library.clear()
        weight, x, y = packed(form, 1000, 512), torch.zeros(num_tokens, 512, dtype=torch.bfloat16), []
        list_launches(9, 0, lambda w=weight, x=x, y=y: y.append(w._by_float8(x, bias, None)))
        assert y[0].shape == (num_tokens, 1000) and bool(library) != bool(args)
        assert bool(args) == ((kind == "blocks") == (num_tokens == 300))
        if kind == "blocks" and args:
            assert args["ys"].base is y[0] and args["bias"] is bias and args["num_tiles"] == 8 * 3
            assert args["num_steps"] == 4 and args["x_lines"] == 19 and args["w_lines"] == 64
    args.clear()
    weight, x = packed(FORMS["blocks"], 1000, 512), torch.zeros(300, 512, dtype=torch.bfloat16)
    out = torch.zeros(300, 1001, dtype=torch.bfloat16)[:, :1000]  # rows that TMA does not write
    list_launches(9, 0, lambda: weight._by_float8(x, None, out))
    assert not args


def test_blocks_are_found_in_scales() -> None:
    """A block is 128 outputs; the last may have less. Rows that pad it have its scales."""
    blocks = torch.rand(3, 4).repeat_interleave(128, 0)[:300]
    values = torch.zeros(300, 512, dtype=torch.uint8).view(torch.float8_e4m3fn)

    def pack(scales: torch.Tensor) -> GroupedWeight:
        weight = pack_groups(Groups(FORMS["blocks"], values, scales))
        assert isinstance(weight, GroupedWeight)
        return weight

    weight = pack(blocks)
    assert weight.blocks and torch.equal(weight.planes.view(torch.float32)[:, 256:], blocks[-1:].T.expand(-1, 128))
    other = blocks.clone()
    other[299, 3] += 1
    assert not pack(other).blocks
