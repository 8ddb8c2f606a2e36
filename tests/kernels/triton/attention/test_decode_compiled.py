"""Decode and cascade attention, compiled for Hopper without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.kernels.triton.attention import cascade, decode
from octavo.kernels.triton.attention.decode_schedule import DecodeTuning, decode_tuning
from tests.kernels.triton.compiled import (
    MULTIPROCESSOR_REGISTERS,
    MULTIPROCESSOR_SHARED_BYTES,
    compile_for_hopper,
    register_usage,
)

POINTERS = {
    **dict.fromkeys(("q", "kv", "out"), "*bf16"),
    **dict.fromkeys(
        ("kv_scales", "lse", "sinks", "partial", "partial_ml", "prefix_partial", "prefix_partial_ml"), "*fp32"
    ),
    **dict.fromkeys(("arrivals", "block_tables", "query_start", "seq_lens", "segments", "starts", "totals"), "*i32"),
    **dict.fromkeys(("prefixes", "splits", "count"), "*i32"),
}


def types_of(kernel: Any) -> dict[str, str]:
    return {"scale": "fp32"} | {name: kind for name, kind in POINTERS.items() if name in kernel.arg_names}


def compile_decode(
    tuning: DecodeTuning,
    group: int,
    head_dim: int,
    *,
    cascaded: bool = False,
    queries: int = 1,
    float8: bool = False,
    sinks: bool = False,
) -> Any:
    constants = {
        "NUM_KV_HEADS": 8,
        "GROUP": group,
        "QUERIES": queries,
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "TILE": tuning.tile,
        "STAGES": tuning.num_stages,
        "SPLIT_TILES": 0,
        "SEQ_OVERHEAD": tuning.seq_overhead,
        "SLIDING_WINDOW": False,
        "WITH_LSE": False,
        "MERGE_INLINE": True,
        "USE_CASCADE": cascaded,
        "SCALED": float8,
        "WITH_SINKS": sinks,
        "WRITE_EMPTY_ROWS": True,
        "USE_PDL": True,
    }
    options = {"num_warps": tuning.num_warps, "maxnreg": tuning.registers}
    types = types_of(decode._decode) | ({"kv": "*fp8e4nv"} if float8 else {})
    return compile_for_hopper(decode._decode, constants, types, **options)


def check_resident(kernel: Any, tuning: Any) -> int:
    """All programs fit on the multiprocessors; returns the bytes that a thread spills."""
    programs = tuning.programs_per_multiprocessor
    assert programs * (kernel.metadata.shared + 1024) <= MULTIPROCESSOR_SHARED_BYTES
    registers, spilled = register_usage(kernel)
    assert programs * tuning.num_warps * 32 * registers <= MULTIPROCESSOR_REGISTERS
    return spilled


@pytest.mark.parametrize(("group", "head_dim"), [(2, 128), (4, 128), (7, 64), (8, 512)])
@pytest.mark.parametrize(("num_seqs", "cascaded"), [(1, False), (256, False), (32, True), (256, True)])
def test_all_programs_of_decode_are_resident(group: int, head_dim: int, num_seqs: int, cascaded: bool) -> None:
    """Each has an equal share of the keys: a program that starts when others end would double the time."""
    tuning = decode_tuning(torch.empty(num_seqs, 8 * group, head_dim, dtype=torch.bfloat16), num_seqs)
    kernel = compile_decode(tuning, group, head_dim, cascaded=cascaded)
    assert check_resident(kernel, tuning) <= 8  # a value that the loop over keys does not use


@pytest.mark.parametrize(("num_seqs", "cascaded"), [(1, False), (256, False), (256, True)])
def test_all_programs_of_decode_with_sinks_are_resident(num_seqs: int, cascaded: bool) -> None:
    tuning = decode_tuning(torch.empty(num_seqs, 64, 64, dtype=torch.bfloat16), num_seqs)
    assert check_resident(compile_decode(tuning, 8, 64, cascaded=cascaded, sinks=True), tuning) <= 8


@pytest.mark.parametrize(("group", "head_dim"), [(4, 128), (7, 64)])
def test_decode_of_float8_is_resident_and_reads_ahead(group: int, head_dim: int) -> None:
    tuning = decode_tuning(torch.empty(256, 8 * group, head_dim, dtype=torch.bfloat16), 256)
    kernel = compile_decode(tuning, group, head_dim, float8=True)
    assert check_resident(kernel, tuning) <= 96  # the tuning is bfloat16's
    ptx = kernel.asm["ptx"]
    assert "cp.async" in ptx and "cvt.rn.f16x2.e4m3x2" in ptx


@pytest.mark.parametrize(
    ("group", "head_dim", "wide"), [(1, 128, 0), (4, 128, 0), (4, 128, 1), (7, 64, 0), (8, 512, 0)]
)
@pytest.mark.parametrize("num_packs", [1, 256])
def test_all_programs_of_packed_decode_are_resident(group: int, head_dim: int, wide: bool, num_packs: int) -> None:
    q = torch.empty(num_packs, 8 * group, head_dim, dtype=torch.bfloat16)
    tuning = decode_tuning(q, num_packs, packed=True, wide=wide)
    kernel = compile_decode(tuning, group, head_dim, queries=(decode.MATRIX_ROWS << wide) // group)
    assert check_resident(kernel, tuning) <= 112  # addresses of rows, which the loop over keys does not use


@pytest.mark.parametrize(("group", "head_dim"), [(2, 128), (7, 64), (8, 512)])
def test_all_programs_of_cascade_are_resident(group: int, head_dim: int) -> None:
    tuning = cascade.cascade_tuning(torch.empty(1, 1, head_dim, dtype=torch.bfloat16))
    constants = {
        "NUM_KV_HEADS": 8,
        "GROUP": group,
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "ROWS": tuning.rows,
        "TILE": tuning.tile,
        "STAGES": tuning.num_stages,
        "SCALED": False,
        "USE_PDL": True,
    }
    attend_common = cascade._attend_common
    kernel = compile_for_hopper(attend_common, constants, types_of(attend_common), num_warps=tuning.num_warps)
    assert check_resident(kernel, tuning) <= (8 if head_dim == 512 else 0)


def test_the_successor_starts_after_the_keys_are_read() -> None:
    """After the loop that reads the keys, and before the results are written."""
    tuning = decode_tuning(torch.empty(256, 16, 128, dtype=torch.bfloat16), 256)
    code = compile_decode(tuning, 2, 128).asm["ttir"]  # in program order
    assert code.count("griddepcontrol.launch_dependents") == 1
    wait, launch = code.index("griddepcontrol.wait"), code.index("griddepcontrol.launch_dependents")
    assert wait < code.index("tt.dot") < code.rindex("tt.dot") < launch < code.index("tt.store")
