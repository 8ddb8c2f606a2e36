"""A row's bits depend on no batch: one compiled kernel, with one matrix instruction, for any number of rows."""

from __future__ import annotations

import json
import re

import pytest
import torch

from octavo.kernels.triton.linear.invariant import linear
from octavo.kernels.triton.precompile import compile_kernel
from tests.kernels.triton.compiled import list_launches, register_usage

SHAPES = [(4096, 4096), (151_936, 1024)]


@pytest.mark.parametrize(
    ("capability", "instruction"),
    [
        ((8, 0), r"mma\.sync\.aligned\.m16n8k16\."),
        ((9, 0), r"wgmma\.mma_async\.sync\.aligned\.m64n(?:64|128)k16\."),
    ],
    ids=str,
)
def test_any_number_of_rows_has_one_kernel_with_one_instruction(capability: tuple[int, int], instruction: str) -> None:
    def launch() -> None:
        for num_out, num_in in SHAPES:
            weight = torch.empty(num_out, num_in, dtype=torch.bfloat16)
            for num_rows in (1, 2, 16, 17, 64, 130, 8192):
                linear(torch.empty(num_rows, num_in, dtype=torch.bfloat16), weight, None)

    lines = list_launches(*capability, launch)
    assert len(lines) == len(SHAPES) and all(json.loads(line)[1] == "_linear" for line in lines)
    for line in lines:
        kernel = compile_kernel(line)
        products = re.findall(r"\bw?g?mma[._](?:sync|mma_async)\S*", kernel.asm["ptx"])
        assert products and all(re.fullmatch(instruction + r"\S*", product) for product in products)
        assert "cp.async.cg.shared.global" in kernel.asm["ptx"] and register_usage(kernel)[1] == 0
