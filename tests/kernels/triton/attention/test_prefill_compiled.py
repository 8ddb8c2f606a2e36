"""The portable prefill kernel, compiled for Hopper without a GPU."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.triton import capability
from octavo.kernels.triton.attention import prefill
from octavo.kernels.triton.attention.prefill_tuning import prefill_tuning
from tests.kernels.triton.attention.test_decode_compiled import POINTERS
from tests.kernels.triton.compiled import compile_for_hopper, fake_gpu, register_usage

SMALLEST_SHARED_BYTES = 99 * 1024
"""Limit of a program on GPUs of consumers."""


@pytest.mark.parametrize("max_query_len", [1, 300])
@pytest.mark.parametrize("window", [False, True])
def test_heads_of_512_fit_on_every_gpu(max_query_len: int, window: bool) -> None:
    q = torch.empty(300, 32, 512, dtype=torch.bfloat16)
    with fake_gpu(9, 0):
        assert capability.kernels_for(q.device).hopper
        tuning = prefill_tuning(q, max_query_len, 8)
    constants = {
        "NUM_KV_HEADS": 4,
        "GROUP": 8,
        "BLOCK_SIZE": 16,
        "HEAD_DIM": 512,
        "ROWS": tuning.rows,
        "TILE": tuning.tile,
        "SLIDING_WINDOW": window,
        "WITH_LSE": False,
        "SCALED": False,
        "WITH_SINKS": False,
    }
    pointers = POINTERS | {"tiles": "*i32"}
    types = {"scale": "fp32"} | {name: kind for name, kind in pointers.items() if name in prefill._prefill.arg_names}
    options = {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages}
    kernel = compile_for_hopper(prefill._prefill, constants, types, **options)
    assert kernel.metadata.shared <= SMALLEST_SHARED_BYTES
    assert register_usage(kernel)[1] <= 24
