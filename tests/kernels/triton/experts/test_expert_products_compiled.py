"""A row's bits depend on no batch: all tiles have one matrix instruction, whose first operand is the weight."""

from __future__ import annotations

import json
import re

import pytest
import torch

from octavo.kernels.triton.precompile import compile_kernel
from tests.kernels.triton.compiled import list_launches
from tests.kernels.triton.launches import expert_layer


@pytest.mark.parametrize(
    ("capability", "instruction"),
    [
        ((8, 0), r"mma\.sync\.aligned\.(m16n8k16)"),
        ((9, 0), r"wgmma\.mma_async\.sync\.aligned\.(m64)n\d+k16\."),
    ],
    ids=str,
)
def test_tiles_of_all_sizes_have_one_matrix_instruction(capability: tuple[int, int], instruction: str) -> None:
    def launch() -> None:
        for num_tokens in (1, 20, 50, 300, 9999):
            expert_layer(num_tokens, (2048, 768, 128, 8), dtype=torch.bfloat16)

    lines = [line for line in list_launches(*capability, launch) if json.loads(line)[1] == "_expert_product"]
    assert len(lines) == 10
    for line in lines:
        ptx = compile_kernel(line).asm["ptx"]
        products = re.findall(r"^.*\bw?g?mma[._](?:sync|mma_async).*$", ptx, re.MULTILINE)
        assert products and all(re.search(instruction, product) for product in products)
        assert "cp.async.cg.shared.global" in ptx and "cp.async.ca" not in ptx  # 16 bytes at a time
