"""Products that sum over ranks: compiled for Hopper without a GPU, and their launch arguments."""

from __future__ import annotations

import math
import re

import pytest
import torch

from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton import reduce
from octavo.kernels.triton.linear import skinny, skinny_hopper
from octavo.kernels.triton.linear.tuning import HopperTuning, skinny_hopper_tuning
from tests.kernels.triton.compiled import SHARED_BYTES, record_launches, register_usage
from tests.kernels.triton.linear.test_skinny_hopper_compiled import compile_skinny


@pytest.mark.parametrize("num_tokens", [1, 32, 64])
@pytest.mark.parametrize(("num_out", "num_in", "num_ranks"), [(4096, 7168, 2), (1024, 1536, 4), (12288, 1024, 2)])
def test_a_product_that_sums_over_ranks_compiles_and_fits(
    num_out: int, num_in: int, num_ranks: int, num_tokens: int
) -> None:
    tuning = skinny_hopper_tuning(num_out, num_in, num_tokens, False)
    kernel = compile_skinny(tuning, num_tokens, gate="", sums=True, num_ranks=num_ranks)
    assert kernel.metadata.shared <= SHARED_BYTES
    assert tuning.splits == 1 or register_usage(kernel)[1] == 0  # large tiles spill without ranks, too
    ptx = kernel.asm["ptx"]
    # Words are sent and read whole, with their epoch. Every read goes to memory.
    assert "st.global.b64" in ptx and "ld.volatile.global.b64" in ptx
    assert len(re.findall(r"ld\.global\.b64", ptx)) == num_ranks  # addresses of the ranks' words
    # The launch is counted after the wait for the preceding one, when all threads of the program know its number.
    wait, number = ptx.index("griddepcontrol.wait"), ptx.index("ld.volatile.global.b32")
    counted = ptx.index("atom.global.gpu.acq_rel.add")
    assert wait < number < counted and "bar.sync" in ptx[number:counted]


def test_launch_arguments_of_a_product_that_sums_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    args = record_launches(monkeypatch, skinny_hopper, "_skinny_hopper")
    shapes = reduce.buffer_shapes(2, 1 << 16)
    buffer = torch.zeros(sum(map(math.prod, shapes)), dtype=torch.int64)
    peers = reduce.split_buffer(1, buffer, [1 << 20, 1 << 21], shapes, spin_limit=99)
    x, weight, norm = (torch.zeros(n, dtype=torch.bfloat16) for n in ((5, 96), (304, 96), 304))
    residual = NormedResidual(*(torch.zeros(5, 304, dtype=torch.bfloat16) for _ in range(2)), torch.zeros(5, 16))
    skinny.add_linear(residual, x, weight, None, norm, tuning=HopperTuning(128, 64, 4, 3), peers=peers)
    words = {"words": peers.words.mine, "peers": peers.words.peers, "launch_counters": peers.words.counters}
    assert all(args[name] is tensor for name, tensor in (words | {"status": peers.status, "stop": peers.stop}).items())
    assert (args["rank"], args["capacity"], args["spin_limit"], args["NUM_RANKS"]) == (1, 1 << 14, 99, 2)
    begin = 8 * sum(map(math.prod, shapes[:2]))
    assert peers.words.peers.tolist() == [(1 << 20) + begin, (1 << 21) + begin]
    assert peers.words.mine.shape == (2, 2, 1 << 14)
    skinny.add_linear(residual, x, weight, None, norm, tuning=HopperTuning(128, 64, 4, 3))
    assert args["NUM_RANKS"] == 1
