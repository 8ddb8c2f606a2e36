"""Sums and gathers over ranks: processes that share memory, as GPUs do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.kernels.triton import reduce
from tests.kernels.triton.peers import Case, Inputs, Pushing, check, interpret_ranks, shared_buffers

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES = [
    *(Case(1, 96, F32, 3), Case(1, 4096, BF16), Case(64, 96, F16), Case(17, 1030, BF16), Case(5, 2050, F16)),
    *(Case(33, 130, F32), Case(2, 4096, F32), Case(1, 96, F32, 2)),
]


def check_ranks(size: int, epoch: int, cases: list[Case], folder: Path, *, delay_s: float = 0.0) -> None:
    """Every rank has the right results, with the same bits, and no rank gave up."""
    ranks = interpret_ranks(size, epoch, cases, folder, delay_s=delay_s)
    inputs = [Inputs.of(case, repeat, size) for case in cases for repeat in range(case.repeats)]
    for results, epochs, status in ranks:
        assert not status.any() and torch.equal(epochs, ranks[0][1])
        for actual, other, given in zip(results, ranks[0][0], inputs, strict=True):
            check(actual, given)
            assert all(torch.equal(a, b) for a, b in zip(actual, other, strict=True))


def test_ranks_get_the_same_sums_for_every_shape(tmp_path: Path) -> None:
    check_ranks(2, 0, CASES, tmp_path)


def test_an_odd_number_of_ranks(tmp_path: Path) -> None:
    check_ranks(3, 0, [Case(3, 96, F32, 3), Case(2, 2050, BF16)], tmp_path)


def test_repeated_launches_with_delayed_ranks_while_epochs_overflow(tmp_path: Path) -> None:
    """The slots' epochs go from 2^31 - 31 past -2^31; more slots are used in between."""
    cases = [Case(2, 96, BF16, 10), Case(9, 96, BF16, 2), Case(2, 96, BF16, 8)]
    check_ranks(2, (1 << 31) - 31, cases, tmp_path, delay_s=0.02)


def lone_rank(spin_limit: int) -> tuple[Pushing, list[torch.Tensor]]:
    """Rank 0, and the buffers of both."""
    mine = [torch.zeros(reduce.buffer_shape(2, 1 << 14), dtype=torch.int64) for _ in range(2)]
    return Pushing(shared_buffers(0, mine, 0, spin_limit)), mine


def test_a_rank_gives_up_after_the_limit_and_waits_no_more() -> None:
    rank, _ = lone_rank(spin_limit=3)
    rank.all_reduce(torch.ones(8, 96))
    assert rank.buffers.status.item() == 1
    limitless, _ = lone_rank(reduce.NO_LIMIT)
    limitless.buffers.status.fill_(1)
    limitless.all_reduce(torch.ones(8, 96))


def test_a_rank_waits_for_every_word_of_the_epoch() -> None:
    """Of rank 1, the words come as if by NVLink in any order: without the last one, rank 0 gives up."""
    for missing in (None, 0, 1029):
        rank, mine = lone_rank(spin_limit=3)
        theirs = torch.full((1030,), 5.0)
        words = theirs.view(torch.int32).long() & 0xFFFFFFFF | 1 << 32
        if missing is not None:
            words[missing] -= 2 << 32  # two uses ago
        mine[0][1, 1].view(-1)[:1030] = words
        total = rank.all_reduce(torch.ones(1030))
        assert rank.buffers.status.item() == (missing is not None)
        assert missing is not None or torch.equal(total, theirs + 1)


@pytest.mark.parametrize(("rows", "row_bytes", "fits"), [(1, 1 << 14, True), (1, 10, False), (9, 4, False)])
def test_a_message_fits_if_each_row_has_slots_of_its_own(rows: int, row_bytes: int, fits: bool) -> None:
    rank, _ = lone_rank(3)
    assert rank.buffers.fits(rows, row_bytes) == fits
