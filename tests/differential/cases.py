"""Engine configurations that must all give the same tokens, and a subset that covers all pairs of their options."""

from __future__ import annotations

import random
from itertools import combinations, product
from typing import Any, NamedTuple
from unittest import mock

from octavo.core.in_flight import InFlightStep
from octavo.core.policy import PreemptionMode
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.scheduling import planning
from octavo.core.scheduling.planning import plan_running
from octavo.core.scheduling.preemption import preempt
from octavo.core.scheduling.step_draft import StepDraft
from tests.models.tiny import KINDS


class Case(NamedTuple):
    """One configuration.

    kind         the model family
    warm         the prefix cache contains the prompts
    chunk        maximum tokens of a step, at least the samples of one request
    preemption   mode of preemptions at random steps; None: no preemption
    """

    kind: str
    warm: bool
    chunk: int
    preemption: str | None
    block_size: int
    batch: int
    overlap: bool
    window: int
    n: int

    @property
    def name(self) -> str:
        parts = [
            self.kind,
            "warm" if self.warm else "cold",
            f"chunk{self.chunk}",
            self.preemption or "none",
            f"block{self.block_size}",
            f"batch{self.batch}",
            "overlap" if self.overlap else "plain",
            f"window{self.window}",
            f"n{self.n}",
        ]
        return "-".join(parts)


LEVELS: dict[str, tuple[Any, ...]] = {
    "kind": tuple(KINDS),
    "warm": (False, True),
    "chunk": (1, 7, 512),
    "preemption": (None, "recompute", "swap"),
    "block_size": (1, 8, 16),
    "batch": (1, 20),
    "overlap": (False, True),
    "window": (1, 8),
    "n": (1, 3),
}

Pair = tuple[int, Any, int, Any]


def pairs_of(case: tuple[Any, ...]) -> set[Pair]:
    return {(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)}


def all_cases() -> list[Case]:
    return [Case(*levels) for levels in product(*LEVELS.values())]


def pairwise_cases(seed: int = 0, num_tries: int = 60) -> list[Case]:
    """A few cases that contain every pair of levels of any two options. Each is the best of `num_tries` random ones."""
    rng = random.Random(seed)
    open_pairs = {pair for case in product(*LEVELS.values()) for pair in pairs_of(case)}
    chosen = []
    while open_pairs:
        i, a, j, b = min(open_pairs, key=str)  # a missing pair; the other options are random
        guesses = []
        for _ in range(num_tries):
            guess = [rng.choice(levels) for levels in LEVELS.values()]
            guess[i], guess[j] = a, b
            guesses.append(Case(*guess))
        best = max(guesses, key=lambda case: len(pairs_of(case) & open_pairs))
        open_pairs -= pairs_of(best)
        chosen.append(best)
    return chosen


class PreemptingScheduler(Scheduler):
    """Preempts the last running request at random steps, as if the blocks had run out.

    The first preemption comes early, so that short runs have one. `max_preemptions` limits them, so that long runs end.
    """

    def preempt_randomly(self, mode: PreemptionMode, seed: int, max_preemptions: int) -> None:
        self.policy.mode = mode
        self._random = random.Random(seed)
        self._preemptions_left = max_preemptions
        self._steps_until_next = self._random.randrange(2)

    def schedule(self) -> InFlightStep:
        with mock.patch.object(planning, "plan_running", PreemptingScheduler._plan_running):
            return super().schedule()

    def _plan_running(self, draft: StepDraft, window: int) -> bool:
        if self.running and self._preemptions_left:
            if self._steps_until_next:
                self._steps_until_next -= 1
            else:
                victim: Request = self.running[-1]
                draft.preempted = True
                preempt(self, victim, victim, 0, draft.step)
                self._preemptions_left -= 1
                self._steps_until_next = self._random.randrange(6)
        return plan_running(self, draft, window)
