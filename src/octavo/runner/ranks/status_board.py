"""Where each rank is: one line of numbers a rank in shared memory, which the rank alone writes and all read."""

from __future__ import annotations

import time

from octavo.engine.executor import RankPlace
from octavo.runner.ranks.shared_memory import SharedMemory

LINE = 8
PLAN, COLLECTIVE, IS_INSIDE, TIME_NS, CHECKED, RESULTS = range(6)
BEHIND_S = 1.0
"""A rank that is not as far as others is behind once it has not moved for this long: ranks differ within each step."""


class StatusBoard:
    """The lines of all ranks, at the start of the memory.

    A line: plans that the rank has begun, collectives that it has entered, 1 inside one, the time of its last change
    in ns, and plans whose swapped blocks it has compared; of rank 0, those whose blocks the others must compare. Then,
    of rank 0 alone, plans whose results it has. Pushed sums are no collectives here: no host is inside them.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int) -> None:
        self.size, self._first = size, rank * LINE
        self.numbers = memory.numbers[: size * LINE]
        self.numbers[self._first + TIME_NS] = time.monotonic_ns()

    @staticmethod
    def num_bytes(size: int) -> int:
        return 8 * LINE * size

    def begin_plan(self) -> None:
        self.numbers[self._first + PLAN] += 1
        self.numbers[self._first + TIME_NS] = time.monotonic_ns()

    def begin_collective(self) -> None:
        first = self._first
        self.numbers[first + COLLECTIVE] += 1
        self.numbers[first + IS_INSIDE] = 1
        self.numbers[first + TIME_NS] = time.monotonic_ns()

    def end_collective(self) -> None:
        self.numbers[self._first + IS_INSIDE] = 0

    def set_checked(self, num_plans: int) -> None:
        """The blocks that this plan and those before it swapped in are as they were; of rank 0: shall be compared."""
        self.numbers[self._first + CHECKED] = num_plans

    def set_results(self, num_plans: int) -> None:
        """Rank 0 has the results of this plan and those before it."""
        self.numbers[self._first + RESULTS] = num_plans

    def num_checked(self) -> int:
        """Plans whose swapped blocks all other ranks have compared."""
        return min(self.numbers[rank * LINE + CHECKED] for rank in range(self.size) if rank * LINE != self._first)

    def place(self, rank: int) -> str:
        plan, collective, is_inside, *_ = self.numbers[rank * LINE : (rank + 1) * LINE].tolist()
        return f"plan {plan}, {'in' if is_inside else 'after'} collective {collective}"

    def places(self) -> list[RankPlace]:
        """Where each rank is."""
        numbers, now_ns = self.numbers.tolist(), time.monotonic_ns()
        lines = [numbers[first : first + LINE] for first in range(0, len(numbers), LINE)]
        last_plan, last_collective = (max(line[column] for line in lines) for column in (PLAN, COLLECTIVE))
        places = []
        for plan, collective, is_inside, time_ns, *_ in lines:
            # Rank 0 begins plans ahead of those that run: inside one collective, that says nothing.
            age_s = (now_ns - time_ns) / 1e9
            is_less = collective < last_collective or (plan < last_plan and not is_inside)
            places.append(RankPlace(plan, collective, bool(is_inside), age_s, is_less and age_s > BEHIND_S))
        return places

    def age_s(self, rank: int) -> float:
        """Seconds since the rank's last change."""
        return (time.monotonic_ns() - self.numbers[rank * LINE + TIME_NS]) / 1e9

    def __str__(self) -> str:
        """The ranks by where they are, those that are furthest behind first."""
        lines = {rank: tuple(self.numbers[rank * LINE : rank * LINE + 2].tolist()) for rank in range(self.size)}
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, line in sorted(lines.items(), key=lambda entry: entry[1]):
            groups.setdefault(line, []).append(rank)
        names = ["rank " + " and ".join(map(str, ranks)) for ranks in groups.values()]
        places = [f"plan {plan}, collective {collective}" for plan, collective in groups]
        return "; ".join(f"{name} at {place}" for name, place in zip(names, places, strict=True))

    def release(self) -> None:
        self.numbers.release()


class Standstill:
    """How long no rank has moved while some wait for others.

    rank  one for which the others wait, if there is one
    """

    def __init__(self, board: StatusBoard) -> None:
        self._board = board
        self._before: list[int] = []
        self.seconds, self.rank = 0.0, 0

    def tick(self, seconds: float) -> float:
        """Count a time after which the board is read again; returns the sum of those without a change.

        A clock would count times in which this process, too, was stopped.
        """
        numbers, before = self._board.numbers.tolist(), self._before
        self._before = numbers
        lines = [numbers[first : first + LINE] for first in range(0, len(numbers), LINE)]
        places = [(line[COLLECTIVE], line[CHECKED], line[PLAN]) for line in lines]
        waits = len(set(places)) > 1 or any(line[IS_INSIDE] for line in lines) or lines[0][PLAN] > lines[0][RESULTS]
        self.seconds = self.seconds + seconds if waits and numbers == before else 0.0
        # Where all are equally far, any of the others may hang; rank 0 is this process.
        self.rank = min(range(len(lines)), key=lambda rank: (places[rank], rank == 0))
        return self.seconds
