"""Decode attention: how sequences are shared among programs changes no result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.kernels.metadata import RaggedBatch
from tests.kernels.pool import Case, make_case, naive_attention, relative_error
from tests.kernels.triton.attention.checks import attend, check


def test_many_programs_share_one_sequence_and_one_program_has_many() -> None:
    check(make_case([1], [1500], num_kv_heads=1, group_size=1))
    check(make_case([1] * 20, [3] * 19 + [70], num_kv_heads=1, group_size=2))
    check(make_case([1] * 40, [3] * 19 + [170] + [5] * 20, num_kv_heads=2, group_size=2))


@pytest.mark.parametrize("window", [0, 600])
@pytest.mark.parametrize("query_len", [1, 3], ids=["decode", "mixed"])
def test_with_a_fixed_split_a_sequence_gets_the_same_bits_in_any_batch(query_len: int, window: int) -> None:
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
        for of_both, own in zip(together, attend(alone, window), strict=True):
            assert torch.equal(of_both[begin : begin + n], own)
        begin += n


def test_more_parts_than_are_merged_at_a_time() -> None:
    """Of 18 pieces, 16 and then 2. A program has several of one sequence, and then some of the next."""
    case = make_case([1, 1], [17 * 512 + 3, 6 * 512 + 5], num_kv_heads=1, group_size=2, block_size=16)
    case.batch = replace(case.batch, fixed_split=True)
    check(case)
