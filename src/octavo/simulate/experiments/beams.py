"""Synthetic beam search candidates. How much they differ determines how much beams share.

Text alternates between positions where the next token is almost certain and open positions with many candidates. At a
certain position every beam continues alone. At an open one a beam loses probability, and may be dropped in favour of
two successors of another beam. The share of open positions is the one assumption; the search is the engine's own.
"""

from __future__ import annotations

import random
from typing import Any

from octavo.core.plan import RowSetup
from octavo.simulate.executor import OUTPUT_TOKEN

OPEN_SHARE = 0.02
"""Share of positions at which the next token is open: six beams then save what the paper's did, on both its traces."""
GAP_NATS = 1.0
"""At an open position, mean gap of log-probability from 0 to the best candidate and between successive candidates."""
NUM_LISTS, MAX_CANDIDATES = 4096, 64


class SyntheticBeams:
    """`TokenSource` for beam searches of up to 32 beams."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._lists = [self._candidates() for _ in range(NUM_LISTS)]

    def _candidates(self) -> list[tuple[float, int]]:
        if self._random.random() >= OPEN_SHARE:
            return [(-12.0 * rank, OUTPUT_TOKEN + rank) for rank in range(MAX_CANDIDATES)]
        logprob, found = 0.0, []
        for rank in range(MAX_CANDIDATES):
            logprob -= self._random.expovariate(1 / GAP_NATS)
            found.append((logprob, OUTPUT_TOKEN + rank))
        return found

    def samples(self, setup: RowSetup, position: int, count: int) -> list[Any]:
        if not setup.returns_candidates:
            return [OUTPUT_TOKEN] * count
        return self._lists[self._random.randrange(NUM_LISTS)][:count]

    def tokens(self, setup: RowSetup, position: int, count: int) -> list[int]:
        return [OUTPUT_TOKEN] * count
