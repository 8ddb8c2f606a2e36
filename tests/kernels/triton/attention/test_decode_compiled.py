"""Decode and cascade attention, compiled for Hopper without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.kernels.triton.attention import cascade, decode
from octavo.kernels.triton.attention.decode_schedule import DecodeTuning, decode_tuning
from tests.kernels.triton.hopper import REGISTERS_OF_ALL, SHARED_BYTES_OF_ALL, compile_for_hopper, registers_of

POINTERS = {
    **dict.fromkeys(("q", "kv", "out"), "*bf16"),
    **dict.fromkeys(("lse", "partial", "partial_ml", "prefix_partial", "prefix_partial_ml"), "*fp32"),
    **dict.fromkeys(("arrivals", "block_tables", "query_start", "seq_lens", "segments", "starts", "totals"), "*i32"),
    **dict.fromkeys(("prefixes", "splits", "count"), "*i32"),
}


def types_of(kernel: Any) -> dict[str, str]:
    return {"scale": "fp32"} | {name: kind for name, kind in POINTERS.items() if name in kernel.arg_names}


def compiled(tuning: DecodeTuning, group: int, head_dim: int, *, cascaded: bool = False) -> Any:
    constants = {
        "NUM_KV_HEADS": 8,
        "GROUP": group,
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": head_dim,
        "TILE": tuning.tile,
        "STAGES": tuning.num_stages,
        "SPLIT_TILES": 0,
        "SEQ_OVERHEAD": tuning.seq_overhead,
        "SLIDING_WINDOW": False,
        "WITH_LSE": False,
        "MERGE_INLINE": True,
        "USE_CASCADE": cascaded,
        "DECODE_ONLY": True,
        "GROUP_PADDED": 1 << (group - 1).bit_length(),
        "KV_HEADS_PADDED": 8,
        "PRECISION": "tf32",
        "USE_PDL": True,
    }
    options = {"num_warps": tuning.num_warps, "maxnreg": tuning.registers}
    return compile_for_hopper(decode._decode, constants, types_of(decode._decode), **options)


@pytest.mark.parametrize(("group", "head_dim"), [(2, 128), (4, 128), (7, 64)])
@pytest.mark.parametrize(("num_seqs", "cascaded"), [(1, False), (256, False), (32, True), (256, True)])
def test_all_programs_of_a_tuning_are_there_at_once(group: int, head_dim: int, num_seqs: int, cascaded: bool) -> None:
    """Each has an equal share of the keys: one that begins when others end takes as long again."""
    tuning = decode_tuning(torch.empty(num_seqs, 8 * group, head_dim, dtype=torch.bfloat16), num_seqs)
    kernel = compiled(tuning, group, head_dim, cascaded=cascaded)
    programs = tuning.programs_per_multiprocessor
    assert programs * (kernel.metadata.shared + 1024) <= SHARED_BYTES_OF_ALL
    registers, spilled = registers_of(kernel)
    assert programs * tuning.num_warps * 32 * registers <= REGISTERS_OF_ALL
    assert spilled <= 8  # a number that the loop over keys has no use for


@pytest.mark.parametrize(("group", "head_dim"), [(2, 128), (7, 64)])
def test_all_programs_that_read_what_is_common_are_there_at_once(group: int, head_dim: int) -> None:
    tuning = cascade.cascade_tuning(torch.empty(1, 1, head_dim, dtype=torch.bfloat16))
    constants = {
        "NUM_KV_HEADS": 8,
        "GROUP": group,
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": head_dim,
        "ROWS": tuning.rows,
        "TILE": tuning.tile,
        "STAGES": tuning.num_stages,
        "PRECISION": "tf32",
        "USE_PDL": True,
    }
    common = cascade._attend_common
    kernel = compile_for_hopper(common, constants, types_of(common), num_warps=tuning.num_warps)
    programs = tuning.programs_per_multiprocessor
    assert programs * (kernel.metadata.shared + 1024) <= SHARED_BYTES_OF_ALL
    registers, spilled = registers_of(kernel)
    assert programs * tuning.num_warps * 32 * registers <= REGISTERS_OF_ALL
    assert spilled == 0


def test_the_next_kernel_is_let_go_behind_the_keys() -> None:
    """And no earlier: behind the loop that reads them, before the last sums are written."""
    tuning = decode_tuning(torch.empty(256, 16, 128, dtype=torch.bfloat16), 256)
    code = compiled(tuning, 2, 128).asm["ttir"]  # in which what comes later is further down
    assert code.count("griddepcontrol.launch_dependents") == 1
    wait, let_go = code.index("griddepcontrol.wait"), code.index("griddepcontrol.launch_dependents")
    assert wait < code.index("tt.dot") < code.rindex("tt.dot") < let_go < code.index("tt.store")
