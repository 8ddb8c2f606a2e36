"""Decode attention: the partition of sequences over programs changes no result, nor do packs of a row's lines."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention import decode
from octavo.kernels.triton.attention.decode_schedule import DecodeSchedule, make_packs
from tests.kernels.pool import Case, make_case, naive_attention, relative_error
from tests.kernels.triton.attention.checks import attend, check
from tests.kernels.triton.device import DEVICE, TOLERANCE


def test_programs_may_share_a_sequence_or_have_several() -> None:
    for sinks in (False, True):
        check(make_case([1], [1500], num_kv_heads=1, group_size=1, sinks=sinks))
        check(make_case([1] * 20, [3] * 19 + [70], num_kv_heads=1, group_size=2, sinks=sinks))
        check(make_case([1] * 40, [3] * 19 + [170] + [5] * 20, num_kv_heads=2, group_size=2, sinks=sinks))


@pytest.mark.parametrize("window", [0, 600])
@pytest.mark.parametrize("query_len", [1, 3], ids=["decode", "mixed"])
def test_fixed_split_gives_the_same_bits_in_any_batch(query_len: int, window: int) -> None:
    lens = [1300, 5, 512, 700]
    case = make_case([query_len, 1, 1, 1], lens, num_kv_heads=1, group_size=2, block_size=16, sinks=True)
    case.batch = replace(case.batch, fixed_split=True)
    together = attend(case, window)
    expected, expected_lse = naive_attention(case, window)
    assert relative_error(together[0], expected) < 3e-6 and relative_error(together[1], expected_lse) < 3e-6
    begin = 0
    for s, n in enumerate([query_len, 1, 1, 1]):
        batch = RaggedBatch.from_lists([n], lens[s : s + 1], case.tables[s : s + 1], 16)
        alone = replace(case, q=case.q[begin : begin + n], batch=replace(batch, fixed_split=True))
        for batched, single in zip(together, attend(alone, window), strict=True):
            assert torch.equal(batched[begin : begin + n], single)
        begin += n


def test_more_parts_than_one_merge_step_takes() -> None:
    """18 parts: 16 at once and then 2. A program has several parts of a sequence, then some of the next."""
    case = make_case([1, 1], [17 * 512 + 3, 6 * 512 + 5], num_kv_heads=2, group_size=2, block_size=16, sinks=True)
    case.batch = replace(case.batch, fixed_split=True)
    check(case)


# -- packs: a row's keys are read once for several of its lines --------------------------------------------------------

Row = tuple[int, int]
"""The context length of a row's first line, and how many of its lines have keys."""


def make_rows(rows: Sequence[Row], lines: int, **sizes: int | bool) -> tuple[Case, Case]:
    """(a case with `lines` lines a row, the same with the live lines alone, each a sequence of its own).

    As in the engine, a line's block table is filled up to its own context, and what follows is not its row's.
    """
    block_size = sizes.setdefault("block_size", 4)
    longest = [first + live - 1 if live else 0 for first, live in rows]
    case = make_case([min(n, 1) for n in longest], longest, **sizes)
    tables, seq_lens, live_tables, live_lens, kv = [], [], [], [], []
    for s, (first, live) in enumerate(rows):
        for i in range(lines):
            n = first + i if i < live else 0
            seq_lens.append(n)
            tables.append(case.tables[s][: -(-n // block_size)])
            if n:
                live_tables.append(tables[-1])
                live_lens.append(n)
                kv.append((case.keys[s][:, :n], case.values[s][:, :n]))
    g = torch.Generator().manual_seed(1)
    q = torch.randn(len(seq_lens), *case.q.shape[1:], generator=g)
    batch = RaggedBatch.from_lists([1] * len(live_lens), live_lens, live_tables, block_size)
    keys, values = ([pair[i] for pair in kv] for i in range(2))
    live_q = q[torch.tensor(seq_lens) > 0]
    alone = replace(case, q=live_q, batch=batch, tables=live_tables, keys=keys, values=values)
    wrong = [[*table, *[0] * 2] for table in tables]  # the null block, which is NaN
    batch = RaggedBatch.from_lists([1] * len(seq_lens), [max(n, 1) for n in seq_lens], wrong, block_size)
    batch.seq_lens.copy_(torch.tensor(seq_lens))
    return replace(case, q=q, batch=replace(batch, lines_per_row=lines)), alone


def check_lines(rows: Sequence[Row], lines: int, window: int = 0, **sizes: int | bool) -> DecodeSchedule:
    """Compare with `naive_attention` -> the schedule."""
    case, alone = make_rows(rows, lines, **sizes)
    packed, schedule = attend_with_schedule(case, window)
    live = case.batch.seq_lens > 0
    for found, expected in zip(packed, naive_attention(alone, window), strict=True):
        assert relative_error(found[live], expected) < TOLERANCE[torch.float32]
    assert not packed[0][~live].any() and (packed[1][~live] == -torch.inf).all()
    return schedule


def attend_with_schedule(case: Case, window: int) -> tuple[tuple[Tensor, Tensor], DecodeSchedule]:
    schedules = []
    with pytest.MonkeyPatch.context() as patch:
        make = decode.make_decode_schedule
        patch.setattr(decode, "make_decode_schedule", lambda *args: schedules.append(make(*args)) or schedules[-1])
        result = attend(case, window)
    return result, schedules[0]


@pytest.mark.parametrize("lines", [2, 4, 5, 9])
@pytest.mark.parametrize("group_size", [1, 3, 4, 7, 8])
def test_lines_of_a_row_equal_sequences_of_their_own(group_size: int, lines: int) -> None:
    """Contexts end around the ends of tiles and blocks; lines without keys come last; some rows have none."""
    rnd = random.Random(100 * group_size + lines)
    rows = [(rnd.choice([1, 3, 13, 15, 16, 31, 62, 64, 100]), rnd.randint(1, lines)) for _ in range(4)]
    rows = [(0, 0), (64 - lines // 2, lines), *rows, (0, 0), (127, lines)]
    schedule = check_lines(rows, lines, group_size=group_size, head_dim=16)
    assert schedule.packs.capacity == 16 // group_size


@pytest.mark.parametrize("window", [1, 3, 20, 64, 1000])
@pytest.mark.parametrize(("group_size", "lines"), [(4, 5), (1, 9)])
def test_each_line_has_its_own_window(group_size: int, lines: int, window: int) -> None:
    rows = [(1, lines), (62, lines), (64, 2), (0, 0), (150, lines)]
    check_lines(rows, lines, window, group_size=group_size, sinks=window in (3, 64))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("num_rows", "lines"), [(1, 2), (1, 4), (3, 5), (40, 3)])
@pytest.mark.parametrize("sinks", [False, True])
def test_packs_that_several_programs_share(num_rows: int, lines: int, head_dim: int, sinks: bool) -> None:
    """Few packs, whose parts a second kernel merges, and many, whose last program does."""
    rows = [(300 + 7 * s if s < 3 else 5, lines - (s + 1) % 2) for s in range(num_rows)]
    schedule = check_lines(rows, lines, num_kv_heads=1, group_size=4, head_dim=head_dim, block_size=16, sinks=sinks)
    assert schedule.packs.capacity == (
        8 if lines > 4 and head_dim == 64 else 4
    )  # twice the rows, for tiles of 256 bytes
    if DEVICE == "cpu":  # a GPU has more programs
        assert bool(schedule.num_merges) == (num_rows == 1)


def test_non_finite_numbers_of_a_later_line_reach_no_earlier_one() -> None:
    """A wrong draft may overflow."""
    case, alone = make_rows([(30, 4)], 4, group_size=4, head_dim=16)
    last = 32
    case.kv[case.tables[0][last // 4], :, :, last % 4] = torch.nan
    found, expected = attend(case, 0), naive_attention(alone, 0)
    assert relative_error(found[0][:3], expected[0][:3]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("group_size", "lines", "num_splits"), [(1, 9, 2), (4, 5, 2), (8, 2, 16)])
def test_a_fixed_split_gives_the_same_bits_as_lines_alone(group_size: int, lines: int, num_splits: int) -> None:
    """Also where only the last lines reach another split, and with 16 where they need one more step of the merge."""
    rows = [(510, lines), (num_splits * 512 - 1, lines), (5, lines), (1024, 1), (0, 0), (700, 2)]
    packed, alone = make_rows(rows, lines, num_kv_heads=1, group_size=group_size, block_size=16)
    packed.batch, alone.batch = (replace(case.batch, fixed_split=True) for case in (packed, alone))
    result, schedule = attend_with_schedule(packed, 0)
    assert schedule.packs.capacity > 1
    live = packed.batch.seq_lens > 0
    for found, single in zip(result, attend(alone), strict=True):
        assert torch.equal(found[live], single)


def test_a_fixed_split_with_a_window_is_not_packed() -> None:
    case, alone = make_rows([(700, 3), (40, 2)], 3, num_kv_heads=1, group_size=2, block_size=16)
    case.batch, alone.batch = (replace(c.batch, fixed_split=True) for c in (case, alone))
    result, schedule = attend_with_schedule(case, 100)
    assert schedule.packs.capacity == 1
    live = case.batch.seq_lens > 0
    for found, single in zip(result, attend(alone, 100), strict=True):
        assert torch.equal(found[live], single)


def test_a_line_without_keys_between_others() -> None:
    """A draft model may fail to give one draft. Its line's result is of any value; the others are right."""
    case, alone = make_rows([(30, 4), (62, 4)], 4, group_size=2)
    case.batch.seq_lens[torch.tensor([1, 4])] = 0
    expected = naive_attention(alone)[0]
    live = case.batch.seq_lens > 0
    assert relative_error(attend(case)[0][live], expected[live]) < TOLERANCE[torch.float32]


def test_packs_are_of_balanced_size() -> None:
    def sizes(lines: int, capacity: int) -> list[int]:
        tables = [[1]] * 3 * lines
        batch = RaggedBatch.from_lists([1] * 3 * lines, [1] * 3 * lines, tables, 4)
        packs = make_packs(replace(batch, lines_per_row=lines), capacity)
        assert packs.num == 3 * packs.per_row
        return [min(packs.queries, lines - i * packs.queries) for i in range(packs.per_row)]

    assert sizes(5, 4) == [3, 2] and sizes(9, 4) == [3, 3, 3] and sizes(9, 5) == [5, 4] and sizes(2, 16) == [2]
    assert sizes(1, 16) == [1]
