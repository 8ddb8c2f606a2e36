"""Ways of running the same prompts that must all give the same tokens, and a few that cover them in pairs."""

from __future__ import annotations

import random
from itertools import combinations, product
from typing import Any, NamedTuple

from octavo.core.policy import PreemptionMode
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler


class Case(NamedTuple):
    """kind         the model's family
    warm         the same prompts have run before
    chunk        positions a step computes at most (but room for the samples of one request)
    preemption   how a victim gives way at random steps, None: nobody is preempted
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
            self.preemption or "calm",
            f"block{self.block_size}",
            f"batch{self.batch}",
            "overlap" if self.overlap else "alone",
            f"window{self.window}",
            f"n{self.n}",
        ]
        return "-".join(parts)


LEVELS: dict[str, tuple[Any, ...]] = {
    "kind": ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt2", "opt"),
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
    """Few cases in which every two levels of any two factors meet: each adds the most pairs of `num_tries` guesses."""
    rng = random.Random(seed)
    open_pairs = {pair for case in product(*LEVELS.values()) for pair in pairs_of(case)}
    chosen = []
    while open_pairs:
        i, a, j, b = min(open_pairs, key=str)  # one that must be met; the rest of the case is by lot
        guesses = []
        for _ in range(num_tries):
            guess = [rng.choice(levels) for levels in LEVELS.values()]
            guess[i], guess[j] = a, b
            guesses.append(Case(*guess))
        best = max(guesses, key=lambda case: len(pairs_of(case) & open_pairs))
        open_pairs -= pairs_of(best)
        chosen.append(best)
    return chosen


class Shaky(Scheduler):
    """Preempts the last of the running at random steps, as if it had run out of blocks; soon after the start at first,
    so that even short runs see it, and `most` times at most, so that long ones end."""

    def shake(self, mode: PreemptionMode, seed: int, most: int) -> None:
        self.policy.mode = mode
        self._random = random.Random(seed)
        self._most = most
        self._calm_steps = self._random.randrange(2)

    def _plan_running(self, draft: Any, window: int) -> bool:
        if self.running and self._most:
            if self._calm_steps:
                self._calm_steps -= 1
            else:
                victim: Request = self.running[-1]
                draft.preempted = True
                self._preempt(victim, victim, 0, draft.plan)
                self._most -= 1
                self._calm_steps = self._random.randrange(6)
        return super()._plan_running(draft, window)
