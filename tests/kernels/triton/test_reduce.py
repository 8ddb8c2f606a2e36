"""Sums and gathers over ranks: processes that share memory, as GPUs do."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.kernels.triton import reduce
from tests.kernels.triton.peers import Case, Inputs, Memory, Pushing, check, interpret_ranks

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES = [
    *(Case(1, 96, F32, 3), Case(1, 4096, BF16), Case(64, 96, F16), Case(17, 1030, BF16), Case(5, 2050, F16)),
    *(Case(33, 130, F32), Case(2, 4096, F32), Case(3, 5000, F32), Case(1, 96, F32, 2), Case(7, 3, F32)),
    *(Case(17, 1030, BF16, norm=F32), Case(3, 4098, BF16, norm=F32), Case(2, 9000, F16), Case(2, 9000, F16, norm=F32)),
]
PAIRS, BLOCKS = 1 << 20, 0
"""Longest message in pairs, so that all are sent in one way."""


def check_ranks(
    size: int, epoch: int, cases: list[Case], folder: Path, *, paired_bytes: int, delay_s: float = 0.0
) -> None:
    """Every rank has the right results, with the same bits, and no rank gave up."""
    ranks = interpret_ranks(size, epoch, cases, folder, paired_bytes=paired_bytes, delay_s=delay_s)
    inputs = [Inputs.of(case, repeat, size) for case in cases for repeat in range(case.repeats)]
    for results, epochs, status in ranks:
        assert not status.any() and torch.equal(epochs, ranks[0][1])
        for actual, other, given in zip(results, ranks[0][0], inputs, strict=True):
            check(actual, given)
            assert all(torch.equal(a, b) for a, b in zip(actual, other, strict=True))


@pytest.mark.parametrize("paired_bytes", [PAIRS, BLOCKS])
def test_ranks_get_the_same_sums_for_every_shape(tmp_path: Path, paired_bytes: int) -> None:
    check_ranks(2, 0, CASES, tmp_path, paired_bytes=paired_bytes)


@pytest.mark.parametrize("paired_bytes", [PAIRS, BLOCKS])
def test_an_odd_number_of_ranks(tmp_path: Path, paired_bytes: int) -> None:
    check_ranks(
        3, 0, [Case(3, 96, F32, 3), Case(2, 2050, BF16), Case(2, 5000, F32)], tmp_path, paired_bytes=paired_bytes
    )


def test_repeated_launches_with_delayed_ranks_while_epochs_overflow(tmp_path: Path) -> None:
    """Both ways in turn, in the same buffers; epochs of each go from 2^31 - 31 past -2^31."""
    short, long = Case(2, 96, BF16, 3), Case(9, 96, BF16, 2)
    cases = [short, long] * 3 + [Case(2, 96, BF16, 1), Case(9, 96, BF16, 1)] * 6
    check_ranks(2, (1 << 31) - 31, cases, tmp_path, paired_bytes=512, delay_s=0.02)


def lone_rank(spin_limit: int, paired_bytes: int = PAIRS) -> tuple[Pushing, Memory]:
    """Rank 0 of two, and the memory of both."""
    memory = Memory.allocate(2, 1 << 14, paired_bytes)
    return Pushing(memory.of_rank(0, 0, spin_limit)), memory


@pytest.mark.parametrize("paired_bytes", [PAIRS, BLOCKS])
def test_a_rank_gives_up_after_the_limit_and_waits_no_more(paired_bytes: int) -> None:
    rank, memory = lone_rank(3, paired_bytes)
    rank.all_reduce(torch.ones(8, 96))
    assert rank.buffers.status.item() == reduce.LATE
    limitless = Pushing(memory.of_rank(0, 0, reduce.NO_LIMIT))
    limitless.buffers.status.fill_(reduce.LATE)
    limitless.all_reduce(torch.ones(8, 96))


@pytest.mark.parametrize("paired_bytes", [PAIRS, BLOCKS])
def test_another_thread_stops_a_rank_that_waits(paired_bytes: int) -> None:
    """A kernel that looked only once would reach the limit. Later ones do not even begin to wait."""
    rank, _memory = lone_rank(20_000, paired_bytes)
    rank = Pushing(replace(rank.buffers, look_reads=256))
    stopper = threading.Timer(0.3, rank.buffers.stop_waiting)
    stopper.start()
    rank.all_reduce(torch.ones(8, 96))
    stopper.join()
    assert rank.buffers.status.item() == reduce.STOPPED
    Pushing(replace(rank.buffers, spin_limit=reduce.NO_LIMIT)).all_reduce(torch.ones(8, 96))


@pytest.mark.parametrize("epoch", [-1, 0, (1 << 31) - 2])
def test_a_rank_can_be_one_use_ahead_and_no_way_reads_the_other(epoch: int) -> None:
    """Rank 1 sends twice in each way, and gives up waiting; then rank 0 begins, with all of it in its memory."""
    memory = Memory.allocate(2, 1 << 14, PAIRS)
    buffers = [memory.of_rank(rank, epoch, spin_limit=0) for rank in range(2)]
    both = [[Pushing(replace(way, paired_bytes=limit)) for limit in (PAIRS, BLOCKS)] for way in buffers]
    sent = [torch.full((3000,), float(value)) for value in range(1, 5)]
    for i, theirs in enumerate(sent):
        both[1][i % 2].all_reduce(theirs.clone())
    for i, theirs in enumerate(sent):
        assert torch.equal(both[0][i % 2].all_reduce(torch.ones(3000)), theirs + 1)
    assert not buffers[0].status.item() and buffers[1].status.item()


def test_a_rank_waits_for_every_word_of_the_epoch() -> None:
    """Of rank 1, the words come as if by NVLink in any order: without the last one, rank 0 gives up."""
    for missing in (None, 0, 1029):
        rank, _memory = lone_rank(spin_limit=3)
        theirs = torch.full((1030,), 5.0)
        words = theirs.view(torch.int32).long() & 0xFFFFFFFF | 1 << 32
        if missing is not None:
            words[missing] -= 2 << 32  # two uses ago
        rank.buffers.pairs.mine[1, 1].view(-1)[:1030] = words
        total = rank.all_reduce(torch.ones(1030))
        assert rank.buffers.status.item() == (missing is not None)
        assert missing is not None or torch.equal(total, theirs + 1)


@pytest.mark.parametrize("whole_norm", [False, True])
def test_a_rank_waits_for_every_flag_of_the_epoch(whole_norm: bool) -> None:
    """Rank 1's blocks have come, and the second's flag is that of another use or of this one."""
    for second in (-1, 1):
        rank, _memory = lone_rank(3, BLOCKS)
        theirs = torch.full((4000,), 5.0)  # one block and a part of another
        blocks = rank.buffers.blocks.mine.view(torch.int32)[1, 1]
        blocks[:, 0] = torch.tensor([1, second])
        data = theirs.view(torch.int32)
        blocks[0, 32:], blocks[1, 32 : 32 + 4000 - 2048] = data[:2048], data[2048:]
        ones, zeros = torch.ones(1, 4000), torch.zeros(1, 4000)
        total = rank.add_rms_norm(ones, zeros, zeros[0], 0.0)[1] if whole_norm else rank.all_reduce(ones)
        assert rank.buffers.status.item() == (second != 1)
        assert second != 1 or torch.equal(total[0], theirs + 1)


@pytest.mark.parametrize(
    ("rows", "row_bytes", "way"),
    [
        (1, 4096, "pairs"),
        (2, 2048, "pairs"),
        (1, 4100, "blocks"),
        (4, 4, "blocks"),
        (1, 1 << 15, "blocks"),
        (1, 10, ""),
        (5, 4, ""),
        (1, (1 << 15) + 4, ""),
        (0, 4, ""),
    ],
)
def test_a_message_fits_if_each_row_has_slots_of_its_own(rows: int, row_bytes: int, way: str) -> None:
    """Of two slots for pairs and four blocks."""
    buffers = Memory.allocate(2, 1 << 15, 4096).of_rank(0, 0, 3)
    assert buffers.slots_for(rows, row_bytes) is (getattr(buffers, way) if way else None)
