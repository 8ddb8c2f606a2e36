"""Embeddings of a rank's part of the vocabulary, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.launch import pdl_options, wait_for_predecessor


def gather_own_rows(table: Tensor, token_ids: Tensor, first: int) -> Tensor:
    """See `reference.gather_own_rows`."""
    num_tokens, (num_rows, size) = len(token_ids), table.shape
    assert table.is_contiguous() and token_ids.is_contiguous(), (table.stride(), token_ids.stride())
    out = table.new_empty(num_tokens, size)
    if num_tokens:
        columns = min(triton.next_power_of_2(size), 1024)
        # Only the grid's first dimension may exceed 65,535.
        _gather_own_rows[(num_tokens, triton.cdiv(size, columns))](
            table, token_ids, out, first, num_rows, SIZE=size, COLUMNS=columns, num_warps=4, **pdl_options(out.device)
        )
    return out


@triton.jit(do_not_specialize=["first", "num_rows"])
def _gather_own_rows(
    table, token_ids, out, first, num_rows, SIZE: tl.constexpr, COLUMNS: tl.constexpr, USE_PDL: tl.constexpr
):
    wait_for_predecessor(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_ids + token) - first
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < SIZE
    values = tl.load(table + row * SIZE + column, mask=valid & (row >= 0) & (row < num_rows), other=0.0)
    tl.store(out + token * SIZE + column, values, mask=valid)
