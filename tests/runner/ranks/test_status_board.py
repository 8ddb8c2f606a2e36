"""The status board: where each rank is, and which one is behind."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from octavo.runner.ranks.shared_memory import SharedMemory, make_file
from octavo.runner.ranks.status_board import BEHIND_S, Standstill, StatusBoard


def test_a_rank_is_behind_once_it_has_not_moved_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    clock: Any = lambda: int(1e9 * now[0])  # noqa: E731
    monkeypatch.setattr(time, "monotonic_ns", clock)
    fd = make_file()
    memory = SharedMemory(fd, StatusBoard.num_bytes(2))
    boards = [StatusBoard(memory, rank, 2) for rank in range(2)]
    now[0] = 6.0
    assert [place for place in boards[0].places() if place != (0, 0, False, 1.0, False)] == []
    for board in boards:
        board.begin_plan()
        board.begin_collective()
    boards[0].end_collective()
    boards[0].begin_collective()
    now[0] += BEHIND_S / 2
    assert boards[1].places() == [(1, 2, True, 0.5, False), (1, 1, True, 0.5, False)]
    now[0] += BEHIND_S
    assert boards[1].places() == [(1, 2, True, 1.5, False), (1, 1, True, 1.5, True)]  # rank 0 waits, and is not behind
    boards[1].end_collective()
    boards[1].begin_collective()
    now[0] += 100.0
    assert [place.is_behind for place in boards[0].places()] == [False, False]  # equally far: idle
    boards[0].begin_plan()
    now[0] += 2.0
    assert [place.is_behind for place in boards[0].places()] == [False, False]  # both are in one collective
    boards[1].end_collective()
    assert [place.is_behind for place in boards[0].places()] == [False, True]  # it has not begun the plan
    for board in boards:
        board.release()
    memory.close()
    os.close(fd)


def test_a_standstill_counts_while_some_wait_for_others() -> None:
    fd = make_file()
    memory = SharedMemory(fd, StatusBoard.num_bytes(2))
    boards = [StatusBoard(memory, rank, 2) for rank in range(2)]
    standstill = Standstill(boards[0])

    def ticks() -> list[float]:
        return [standstill.tick(0.5) for _ in range(3)]

    assert ticks() == [0.0, 0.0, 0.0]  # equally far: idle
    boards[0].begin_plan()
    assert ticks() == [0.0, 0.5, 1.0] and standstill.rank == 1
    boards[1].begin_plan()
    assert ticks() == [0.0, 0.5, 1.0] and standstill.rank == 1  # inside a pushed sum, which no host sees
    boards[0].set_results(1)
    assert ticks() == [0.0, 0.0, 0.0]
    boards[1].begin_collective()
    assert ticks() == [0.0, 0.5, 1.0] and standstill.rank == 0
    boards[0].begin_collective()
    assert ticks() == [0.0, 0.5, 1.0] and standstill.rank == 1  # both are in one: this process does not hang
    boards[0].begin_plan()  # ahead of those that run
    assert ticks() == [0.0, 0.5, 1.0] and standstill.rank == 1
    boards[1].begin_plan()
    boards[0].set_results(2)
    for board in boards:
        board.end_collective()
    assert ticks() == [0.0, 0.0, 0.0]
    boards[0].set_checked(2)
    assert ticks() == [0.0, 0.5, 1.0] and standstill.rank == 1
    boards[1].set_checked(2)
    assert ticks() == [0.0, 0.0, 0.0]
    for board in boards:
        board.release()
    memory.close()
    os.close(fd)
