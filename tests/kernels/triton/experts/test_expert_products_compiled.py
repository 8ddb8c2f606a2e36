"""A row's bits depend on no batch: all tiles have one matrix instruction, whose first operand is the weight."""

from __future__ import annotations

import json
import re

import pytest
import torch

from octavo.kernels.groups import GroupForm
from octavo.kernels.triton.precompile import compile_kernel
from tests.kernels.triton.compiled import list_launches, register_usage
from tests.kernels.triton.launches import MXFP4, expert_layer

INSTRUCTIONS = {
    (8, 0): r"mma\.sync\.aligned\.(m16n8k16)",
    (9, 0): r"wgmma\.mma_async\.sync\.aligned\.(m64)n\d+k16\.",
    (10, 0): r"tcgen05\.mma\.cta_group::1\.kind::f16",
}
PRODUCT = re.compile(r"^.*\b(?:w?g?mma[._](?:sync|mma_async)|tcgen05\.mma).*$", re.MULTILINE)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_tiles_of_all_sizes_have_one_matrix_instruction(capability: tuple[int, int]) -> None:
    def launch() -> None:
        for num_tokens in (1, 20, 50, 300, 9999):
            expert_layer(num_tokens, (2048, 768, 128, 8), dtype=torch.bfloat16)

    lines = [line for line in list_launches(*capability, launch) if json.loads(line)[1] == "_expert_product"]
    assert len(lines) == 10
    for line in lines:
        ptx = compile_kernel(line).asm["ptx"]
        check_products(ptx, capability)
        assert "cp.async.cg.shared.global" in ptx and "cp.async.ca" not in ptx  # 16 bytes at a time


@pytest.mark.parametrize("capability", INSTRUCTIONS, ids=str)
@pytest.mark.parametrize("form", [MXFP4, GroupForm(4, 32, has_zeros=True), GroupForm(8, 128, zero=128)], ids=str)
def test_quantised_weights_have_the_same_one(form: GroupForm, capability: tuple[int, int]) -> None:
    """They are copied 16 bytes at a time, no register is spilled, and the smallest numbers of float32 are kept."""

    def launch() -> None:
        for num_tokens in (1, 20, 50, 300):
            expert_layer(num_tokens, (512, 256, 4, 2), dtype=torch.bfloat16, form=form)

    lines = [line for line in list_launches(*capability, launch) if json.loads(line)[1] == "_expert_product"]
    assert len(lines) == 8
    for line in lines:
        kernel = compile_kernel(line)
        ptx = kernel.asm["ptx"]
        check_products(ptx, capability)
        assert register_usage(kernel)[1] == 0
        assert "cp.async.cg.shared.global" in ptx and ".ftz" not in ptx


def check_products(ptx: str, capability: tuple[int, int]) -> None:
    products = PRODUCT.findall(ptx)
    assert products and all(re.search(INSTRUCTIONS[capability], product) for product in products)
