"""What a model says to beams, made up: how much its candidates differ decides on how much beams share.

Text is a mixture of places where the next token is all but certain and places where many would do. At a certain one
every beam goes on by itself; at an open one a beam loses some probability, and may come to be dropped for two heirs of
another. How many places are open is the one assumption; the search itself is the engine's own.
"""

from __future__ import annotations

import random
from typing import Any

from octavo.core.plan import RowSetup
from octavo.simulate.executor import OUTPUT_TOKEN

OPEN = 0.1
"""Share of the positions at which the next token is open."""
APART_NATS = 1.0
"""There, the mean of the best candidate's log-probability below 0, and of each next one's below the one before."""
NUM_LISTS, MOST_CANDIDATES = 4096, 64


class MadeUpBeams:
    """`TokenSource` for beam searches of up to 32 beams."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._lists = [self._candidates() for _ in range(NUM_LISTS)]

    def _candidates(self) -> list[tuple[float, int]]:
        if self._random.random() >= OPEN:
            return [(-12.0 * rank, OUTPUT_TOKEN + rank) for rank in range(MOST_CANDIDATES)]
        logprob, found = 0.0, []
        for rank in range(MOST_CANDIDATES):
            logprob -= self._random.expovariate(1 / APART_NATS)
            found.append((logprob, OUTPUT_TOKEN + rank))
        return found

    def samples(self, setup: RowSetup, position: int, count: int) -> list[Any]:
        if not setup.returns_candidates:
            return [OUTPUT_TOKEN] * count
        return self._lists[self._random.randrange(NUM_LISTS)][:count]

    def tokens(self, setup: RowSetup, position: int, count: int) -> list[int]:
        return [OUTPUT_TOKEN] * count
