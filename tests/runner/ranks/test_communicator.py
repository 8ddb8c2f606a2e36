"""Numbers and bytes that ranks tell each other, over real connections."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from octavo.runner.ranks.communicator import Communicator
from octavo.runner.ranks.rank_group import make_file, make_shared


def of_ranks(work: Callable[[Communicator], Any], size: int = 2) -> list[Any]:
    """What `work` returns on each of the ranks, which are threads."""
    memory_fd, store_fd = make_file(), make_file()
    memory, board, ring = make_shared(memory_fd, 0, size, create=True)

    def run(rank: int) -> Any:
        communicator = Communicator(board, rank, size, store_fd, torch.device("cpu"))
        return work(communicator)

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, range(size)))
    ring.release()
    board.release()
    memory.close()
    os.close(memory_fd)
    os.close(store_fd)
    return results


def test_all_ranks_know_the_least_number() -> None:
    assert of_ranks(lambda ranks: ranks.least(5 + ranks.rank), 3) == [5, 5, 5]
    assert of_ranks(lambda ranks: ranks.least(ranks.rank == 0)) == [0, 0]
    assert of_ranks(lambda ranks: ranks.least(True)) == [1, 1]


def test_all_ranks_get_the_numbers_of_rank_0() -> None:
    assert of_ranks(lambda ranks: ranks.share([7 + ranks.rank, 1 << 40])) == [[7, 1 << 40]] * 2


def test_all_ranks_get_the_bytes_of_each() -> None:
    assert of_ranks(lambda ranks: ranks.exchange(bytes([ranks.rank, 9])), 3) == [[b"\0\t", b"\1\t", b"\2\t"]] * 3
