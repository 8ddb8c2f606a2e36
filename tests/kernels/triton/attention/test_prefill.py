"""The portable prefill kernel; test_paged_attention.py has further cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from tests.kernels.pool import Case, make_case, naive_attention, norm_error
from tests.kernels.triton.attention.checks import attend
from tests.kernels.triton.device import DTYPES, NORM_TOLERANCE


@pytest.mark.parametrize(("dtype", "window"), [*((dtype, 0) for dtype in DTYPES), (torch.float16, 50)], ids=str)
def test_fixed_split_gives_the_same_bits_in_any_order_in_chunks_and_after_a_prefix(
    dtype: torch.dtype, window: int
) -> None:
    """Whole prompts and decodes in one batch; then in another order, one by one, in chunks, and after a cached prefix.

    A chunk of one token would be computed by the decode kernel.
    """
    size, lens, query_lens = 16, [70, 45, 600, 130], [70, 45, 1, 1]
    case = make_case(query_lens, lens, num_kv_heads=1, group_size=2, block_size=size, dtype=dtype)
    queries = case.q.split(query_lens)

    def run(*parts: tuple[int, int, int]) -> list[tuple[Tensor, Tensor]]:
        """Attention of each (sequence, first position, end position) -> its rows of out and lse."""
        rows = [(s, begin - lens[s] + query_lens[s], end - lens[s] + query_lens[s]) for s, begin, end in parts]
        counts, ends = [end - begin for _, begin, end in parts], [end for _, _, end in parts]
        batch = RaggedBatch.from_lists(counts, ends, [case.tables[s] for s, _, _ in parts], size)
        q = torch.cat([queries[s][begin:end] for s, begin, end in rows])
        now = Case(q, case.kv, replace(batch, fixed_split=True), [], [], [], case.scale)
        return list(zip(*(x.split(counts) for x in attend(now, window)), strict=True))

    all_parts = [(s, n - num, n) for s, (n, num) in enumerate(zip(lens, query_lens, strict=True))]
    whole = run(*all_parts)
    out, lse = (torch.cat(parts) for parts in zip(*whole, strict=True))
    expected, expected_lse = naive_attention(case, window)
    assert norm_error(out, expected) < NORM_TOLERANCE[dtype] and norm_error(lse, expected_lse) < 3e-6

    used = {block for table in case.tables for block in table}
    copy = next(block for block in range(1, case.kv.shape[0]) if block not in used)
    case.kv[copy] = case.kv[case.tables[0][-1]]  # the last block of a sequence whose other blocks are cached
    case.tables.append([*case.tables[0][:-1], copy])
    lens, query_lens, queries = [*lens, 70], [*query_lens, 70], (*queries, queries[0])

    def same(found: list[tuple[Tensor, Tensor]], *parts: tuple[int, int, int]) -> None:
        for (s, begin, end), results in zip(parts, found, strict=True):
            first = begin - lens[s] + query_lens[s]
            for actual, expected in zip(results, whole[s % 4], strict=True):
                assert torch.equal(actual, expected[first : first + end - begin]), (s, begin, end)

    for parts in (
        all_parts[::-1],
        *([part] for part in all_parts),
        all_parts[2:],  # decodes only
        [all_parts[3], (0, 0, 20), all_parts[2]],
        [(0, 20, 57), (1, 12, 45)],
        [(0, 57, 70)],
        [(4, 64, 70), all_parts[2], (1, 0, 12)],
    ):
        same(run(*parts), *parts)
