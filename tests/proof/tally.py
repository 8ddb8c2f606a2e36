"""Inputs and results of the trials of `make reliability`."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo import SamplingParams
from octavo.errors import OctavoError

LONG_S = 60.0
"""A request that takes longer, engine faults included, counts as hung."""


@dataclass
class Tally:
    """The results of a trial. `late`: a time exceeded its bound, with a note. `figures`: further measurements."""

    name: str
    runs: int = 0
    lost: int = 0
    hung: int = 0
    wrong: int = 0
    leaked: int = 0
    noticed_s: float = 0.0
    back_s: float = 0.0
    late: bool = False
    figures: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not (self.lost or self.hung or self.wrong or self.leaked or self.late)

    def line(self) -> str:
        times = f"{self.noticed_s:8.3f} s {self.back_s:6.2f} s" if self.back_s else " " * 19
        text = f"{self.name:<40} {self.runs:>6} {self.lost:>6} {self.hung:>6} {self.wrong:>6} {self.leaked:>7} {times}"
        return "\n    ".join([text, *filter(None, [self.figures])])

    def miss(self, note: str) -> None:
        """Records an exceeded bound."""
        self.late = True
        self.notes.append(note)

    async def check(self, result: Awaitable[Any], expected: Any, limit_s: float | None = LONG_S) -> None:
        """Runs one request to its end and counts its result. limit_s None: `result` has a limit of its own."""
        self.runs += 1
        try:
            got = await asyncio.wait_for(result, limit_s)
        except TimeoutError:
            self.hung += 1
        except (OctavoError, OSError) as error:
            self.lost += 1
            self.notes.append(str(error))
        else:
            if got != expected:
                self.wrong += 1
                self.notes.append(f"got {got}, expected {expected}")

    async def until(self, condition: Callable[[], bool], limit_s: float) -> float:
        """Returns the seconds until `condition` holds, and records a miss if they exceed `limit_s`."""
        begin = time.monotonic()
        while not condition() and time.monotonic() - begin < max(limit_s, LONG_S):
            await asyncio.sleep(0.005)
        if (took := time.monotonic() - begin) > limit_s:
            self.miss(f"{took:.1f} s, over the bound of {limit_s:.1f} s")
        return took


@dataclass(frozen=True)
class World:
    """A tiny model, its undisturbed outputs, the scale of the trials, a folder for files, and how many engines run."""

    model: str
    wanted: dict[str, list[list[int]]]
    scale: float
    folder: Path
    engines: int = 1

    def times(self, number: int) -> int:
        return max(1, round(number * self.scale))

    def share(self, number: int) -> str:
        """An engine's part of something that all of them have together, as an option."""
        return str(number // self.engines)


PARAMS = [
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=60, ignore_eos=True),
    SamplingParams(seed=2, n=3, max_tokens=40, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=60, repetition_penalty=1.2, stop=["qq", "3H"]),
]
PROMPTS = [f"{i}:tell-me" for i in range(16)]


def params_of(prompt: str) -> SamplingParams:
    return PARAMS[PROMPTS.index(prompt) % len(PARAMS)]


def oracle_prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(5), k=3 + number % 20)
