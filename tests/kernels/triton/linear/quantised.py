"""Quantised weights of Hopper's kernels, and these kernels compiled without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl

from octavo.kernels.groups import GroupForm, Groups
from octavo.kernels.triton.linear import grouped_hopper, tuning
from octavo.kernels.triton.linear.grouped import GroupedWeight, pack_groups
from tests.kernels.triton.compiled import compile_for_hopper


def compile_grouped(
    kernel: Any,
    chosen: tuning.HopperTuning,
    weight: tuple[str, str, int],
    num_tokens: int,
    types: dict[str, str],
    constants: dict[str, object],
) -> Any:
    """weight: (format, kind of its planes, columns); types, constants: of the other parameters"""
    format, planes, columns = weight
    tokens, lines = grouped_hopper.tile_tokens(num_tokens), grouped_hopper.lines_of_step(format, chosen.columns)
    x_layout = gl.NVMMASharedLayout(swizzle_byte_width=min(2 * columns, 128), element_bitwidth=16, rank=2)
    types = types | {
        "xs": f"tensordesc<bf16[{tokens}, {columns}],{x_layout!r}>",
        "words": f"tensordesc<i32[{lines}, 32],{grouped_hopper.WORD_LAYOUT!r}>",
        "planes": f"tensordesc<i32[8, 16],{grouped_hopper.PLANE_LAYOUT!r}>",
        "eps": "fp32",
        "barriers": "*i32",
        **dict.fromkeys(("row_scales", "squares", "partial_sums"), "*fp32"),
    }
    constants = constants | {
        "FORMAT": format,
        "PLANES": planes,
        "COLUMNS": columns,
        "ZERO": 0 if format == "float8" else 8,
        "SCALES": "bfloat16",
        "STEP": chosen.columns,
        "TOKENS": tokens,
        "PADDED": tuning.padded_tokens(num_tokens),
        "SPLITS": chosen.splits,
        "STAGES": chosen.stages,
        "USE_PDL": True,
    }
    return compile_for_hopper(kernel, constants, types, num_warps=grouped_hopper.NUM_WARPS, maxnreg=chosen.registers)


def packed(form: GroupForm, num_out: int, num_in: int) -> GroupedWeight:
    scales = torch.ones(num_out, num_in // form.group_size, dtype=torch.float32 if form.is_float else torch.bfloat16)
    values = torch.zeros(num_out, num_in, dtype=torch.uint8)
    weight = pack_groups(Groups(form, values.view(torch.float8_e4m3fn) if form.is_float else values, scales, None))
    assert isinstance(weight, GroupedWeight)
    return weight
