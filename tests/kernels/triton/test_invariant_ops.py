"""Each query has the same bits alone, in a batch, and in chunks of any size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton import invariant_ops
from octavo.kernels.triton import ops as cuda
from tests.kernels.pool import Case, make_case, naive_attention, relative_error
from tests.kernels.triton.attention.checks import quantised
from tests.kernels.triton.device import DEVICE, DTYPES, TOLERANCE, on_device

BLOCK_SIZE = 16
QUERY_LENS, SEQ_LENS = [9, 1, 5, 1], [700, 40, 5, 513]


def attend(case: Case, window: int = 0) -> Tensor:
    kv, sinks = case.kv.to(DEVICE)[:, 1], case.sinks if case.sinks is None else case.sinks.to(DEVICE)
    out = invariant_ops.paged_attention(
        case.q.to(DEVICE), kv, on_device(case.batch), scale=case.scale, window=window, sinks=sinks
    )
    return out.cpu()


def part_of(case: Case, seq: int, first: int, last: int) -> Case:
    """Queries [first, last) of a sequence, as a chunk of its own."""
    before = sum(QUERY_LENS[:seq]) + first
    end = SEQ_LENS[seq] - QUERY_LENS[seq] + last
    batch = RaggedBatch.from_lists([last - first], [end], [case.tables[seq]], BLOCK_SIZE)
    return replace(case, q=case.q[before : before + last - first], batch=batch)


@pytest.mark.parametrize(
    ("group_size", "sinks", "window", "launch"),
    [(1, False, 0, 256), (3, True, 0, 4), (3, True, 9, 256), (2, True, 600, 8), (8, False, 600, 256)],
)
def test_queries_have_the_same_bits_alone_and_in_chunks(
    group_size: int, sinks: bool, window: int, launch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """launch: most queries of one"""
    monkeypatch.setattr(invariant_ops, "MAX_QUERIES", launch)
    sizes: dict[str, Any] = {"num_kv_heads": 2, "group_size": group_size, "block_size": BLOCK_SIZE, "sinks": sinks}
    case = make_case(QUERY_LENS, SEQ_LENS, **sizes)
    together = attend(case, window)
    assert relative_error(together, naive_attention(case, window)[0]) < TOLERANCE[torch.float32]
    for seq, first, last in ((0, 0, 9), (0, 0, 1), (0, 3, 8), (0, 8, 9), (1, 0, 1), (2, 0, 1), (2, 1, 5), (3, 0, 1)):
        begin = sum(QUERY_LENS[:seq]) + first
        part = attend(part_of(case, seq, first, last), window)
        assert torch.equal(part, together[begin : begin + last - first]), (seq, first, last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_matches_its_definition_in_every_dtype(dtype: torch.dtype) -> None:
    case = make_case(QUERY_LENS, SEQ_LENS, block_size=BLOCK_SIZE, dtype=dtype)
    assert relative_error(attend(case), naive_attention(case)[0]) < TOLERANCE[dtype]


def test_lines_of_a_row_have_the_bits_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with three lines each, in one launch and in several."""
    case = make_case([3] * 5, [600, 30, 3, 90, 7], group_size=2, block_size=BLOCK_SIZE)
    expected = attend(case)
    seen = [length - 2 + i for length in (600, 30, 3, 90, 7) for i in range(3)]
    tables = [table for table in case.tables for _ in range(3)]
    lines = RaggedBatch.from_lists([1] * 15, seen, tables, BLOCK_SIZE)
    case.batch = replace(lines, lines_per_row=3)
    assert torch.equal(attend(case), expected)
    monkeypatch.setattr(invariant_ops, "MAX_QUERIES", 12)
    assert torch.equal(attend(case), expected)


def test_scales_of_float8_are_kept() -> None:
    case, scales = quantised(make_case([5, 1], [40, 20], block_size=BLOCK_SIZE), torch.float8_e5m2)
    q, kv, batch = case.q.to(DEVICE), case.kv.to(DEVICE)[:, 1], on_device(case.batch)
    found = invariant_ops.paged_attention(q, kv, batch, scale=case.scale, kv_scales=scales.to(DEVICE))
    assert relative_error(found.cpu(), naive_attention(case, 0)[0]) < TOLERANCE[torch.bfloat16]


def test_rows_without_keys_are_zero() -> None:
    case = make_case([2, 1], [20, 8], block_size=BLOCK_SIZE)
    batch = on_device(case.batch)
    batch.seq_lens[1] = 0
    out = invariant_ops.paged_attention(case.q.to(DEVICE), case.kv.to(DEVICE)[:, 1], batch, scale=case.scale)
    assert not out[2].any() and out[:2].isfinite().all()


def test_operations_that_depend_on_the_batch_are_replaced() -> None:
    """All others are those of every GPU."""
    assert {name for name in cuda.__all__ if getattr(cuda, name) is not getattr(invariant_ops, name)} == {
        "linear", "max_small_batch_tokens", "paged_attention", "token_logprobs",
    }  # fmt: skip
    assert invariant_ops.max_small_batch_tokens(torch.zeros(64, 64, dtype=torch.bfloat16)) == 0
