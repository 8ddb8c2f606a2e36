"""Hopper's prefill kernel, compiled without a GPU: Gluon has no interpreter.

Every variant must compile, fit into a multiprocessor's shared memory, and keep its inner loop in registers: a spill
there costs more than all tuning gains.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.experimental.gluon import language as gl

from octavo.kernels.triton.attention import prefill_hopper, prefill_tuning
from tests.kernels.triton.compiled import SHARED_BYTES, compile_for_hopper

POINTERS = {"out": "*bf16", "lse": "*fp32", "sinks": "*fp32", "partial": "*fp32", "partial_lse": "*fp32"}
INDICES = ("tiles", "count", "block_tables", "query_start", "seq_lens")


def compile_prefill(head_dim: int, block_size: int, group: int, *, may_split: bool, sinks: bool) -> Any:
    tuning = prefill_tuning.hopper_prefill_tuning(head_dim)
    padded, packed, rows = 1 << (head_dim - 1).bit_length(), group & -group, min(block_size, tuning.keys)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    constants = {
        "NUM_HEADS": 2 * group,
        "GROUP": group,
        "PACKED": packed,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": padded,
        "KEYS": tuning.keys,
        "K_STAGES": tuning.k_stages,
        "V_STAGES": tuning.v_stages,
        "REGISTERS": prefill_tuning.HOPPER_REGISTERS,
        "MAY_SPLIT": may_split,
        "WITH_LSE": True,
        "WITH_SINKS": sinks,
    }
    types = {
        "queries": f"tensordesc<bf16[{64 // packed}, {packed}, {padded}],{layout!r}>",
        "pool": f"tensordesc<bf16[1, {rows}, {padded}],{layout!r}>",
        "scale": "fp32",
        **POINTERS,
        **dict.fromkeys(INDICES, "*i32"),
    }
    return compile_for_hopper(prefill_hopper._hopper_prefill, constants, types)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "group", "may_split", "sinks"),
    [(128, 16, 4, False, False), (64, 64, 7, True, False), (64, 16, 8, True, True)],
    ids=str,
)
def test_the_prefill_kernel_compiles_and_fits(
    head_dim: int, block_size: int, group: int, may_split: bool, sinks: bool
) -> None:
    kernel = compile_prefill(head_dim, block_size, group, may_split=may_split, sinks=sinks)
    assert kernel.metadata.shared <= SHARED_BYTES
    ptx = kernel.asm["ptx"]
    # One producer warp, two consumer groups, and a register limit for each
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor.3d" in ptx and ptx.count("setmaxnreg") >= 3


def test_other_gpus_use_the_portable_kernel() -> None:
    q, kv = torch.zeros(200, 8, 64, dtype=torch.bfloat16), torch.zeros(5, 2, 2, 16, 64, dtype=torch.bfloat16)
    assert not prefill_tuning.supports_hopper_prefill(q, kv)  # not a Hopper GPU
