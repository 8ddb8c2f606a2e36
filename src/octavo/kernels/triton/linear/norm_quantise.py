"""The norm before a product that reads float8: one pass adds, normalises and rounds, and stores no norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.launch import pdl_options, wait_for_predecessor
from octavo.kernels.triton.linear.grouped_kernels import FLOAT8_GROUP, empty_float8, in_float8_order, round_to_float8
from octavo.kernels.triton.norms import normed_rows


def add_norm_quantise(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(`quantise` of the RMS norm of x + residual, the sum); of over 512 inputs, in the bits of `add_rms_norm`.

    x, residual [num_tokens, num_in]    weight [num_in]    group: as of `quantise`
    """
    num_tokens, num_in = x.shape
    total = torch.empty_like(x)
    values, scales = empty_float8(num_tokens, num_in, group, x.device)
    columns = max(triton.next_power_of_2(num_in), FLOAT8_GROUP)
    _add_norm_quantise[(num_tokens,)](
        x.contiguous(),
        residual.contiguous(),
        weight,
        total,
        values,
        scales,
        num_tokens,
        scales.shape[1],
        eps,
        SIZE=num_in,
        COLUMNS=columns,
        WIDTH=values.shape[1],
        GROUP=FLOAT8_GROUP if group == FLOAT8_GROUP else columns,
        GROUPS=len(scales),
        num_warps=max(1, min(columns // 512, 16)),
        **pdl_options(x.device),
    )
    return (values, scales), total


@triton.jit(do_not_specialize=["num_tokens", "padded"])
def _add_norm_quantise(
    x, residual, weight, total, values, scales, num_tokens, padded, eps,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """A token: SIZE inputs, WIDTH values, and GROUPS scales, each of GROUP columns."""
    wait_for_predecessor(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    row = token + tl.arange(0, 1)
    normed, _, _ = normed_rows(x, residual, weight, total, row, num_tokens, eps, SIZE, COLUMNS, True)
    rounded, _, scale = round_to_float8(normed.reshape(COLUMNS // GROUP, GROUP))
    column = tl.arange(0, COLUMNS)
    tl.store(values + token * WIDTH + column, in_float8_order(rounded).reshape(COLUMNS), mask=column < WIDTH)
    group = tl.arange(0, COLUMNS // GROUP)
    tl.store(scales + group * padded + token, scale, mask=group < GROUPS)
