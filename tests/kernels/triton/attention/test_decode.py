"""Decode attention: the partition of sequences over programs changes no result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.kernels.metadata import RaggedBatch
from tests.kernels.pool import Case, make_case, naive_attention, relative_error
from tests.kernels.triton.attention.checks import attend, check


def test_programs_may_share_a_sequence_or_have_several() -> None:
    check(make_case([1], [1500], num_kv_heads=1, group_size=1))
    check(make_case([1] * 20, [3] * 19 + [70], num_kv_heads=1, group_size=2))
    check(make_case([1] * 40, [3] * 19 + [170] + [5] * 20, num_kv_heads=2, group_size=2))


@pytest.mark.parametrize("window", [0, 600])
@pytest.mark.parametrize("query_len", [1, 3], ids=["decode", "mixed"])
def test_fixed_split_gives_the_same_bits_in_any_batch(query_len: int, window: int) -> None:
    lens = [1300, 5, 512, 700]
    case = make_case([query_len, 1, 1, 1], lens, num_kv_heads=1, group_size=2, block_size=16)
    case.batch = replace(case.batch, fixed_split=True)
    together = attend(case, window)
    expected, expected_lse = naive_attention(case, window)
    assert relative_error(together[0], expected) < 3e-6 and relative_error(together[1], expected_lse) < 3e-6
    begin = 0
    for s, n in enumerate([query_len, 1, 1, 1]):
        batch = RaggedBatch.from_lists([n], lens[s : s + 1], case.tables[s : s + 1], 16)
        alone = Case(case.q[begin : begin + n], case.kv, replace(batch, fixed_split=True), [], [], [], case.scale)
        for batched, single in zip(together, attend(alone, window), strict=True):
            assert torch.equal(batched[begin : begin + n], single)
        begin += n


def test_more_parts_than_one_merge_step_takes() -> None:
    """18 parts: 16 at once and then 2. A program has several parts of a sequence, then some of the next."""
    case = make_case([1, 1], [17 * 512 + 3, 6 * 512 + 5], num_kv_heads=1, group_size=2, block_size=16)
    case.batch = replace(case.batch, fixed_split=True)
    check(case)
