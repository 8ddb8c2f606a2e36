"""Drafters that know what a request's tokens will be, in place of the engine's, and what became of all drafts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from torch import Tensor

from octavo import LLM
from octavo.core.scheduler import Scheduler
from octavo.engine.executor import GrammarDrafts
from octavo.kernels.row_state import RowState
from octavo.runner.drafter import MAX_LINES, PassTimes
from octavo.runner.model_runner import ModelRunner
from tests.models.tiny import VOCAB_SIZE
from tests.runner.stub_platform import StubPlatform, use_platform

PLACES = ("cpu", "stub", "graphs")
HABITS = ("suffix", "right", "wrong", "mixed")


class Replay:
    """Drafts that continue one of the known sequences.

    habit   "right"; "wrong": always another token; "mixed": some of both, any number up to the limits
    known   prompts with their outputs. One that ends before the drafts do goes on with random tokens
    """

    def __init__(self, habit: str, known: Seq[Seq[int]], state: RowState) -> None:
        self.habit, self.known, self.state, self.chance = habit, known, state, random.Random(0)

    def choose(
        self, rows: np.ndarray, ends: np.ndarray, limits: np.ndarray, grammars: Mapping[int, GrammarDrafts]
    ) -> np.ndarray:
        counts, left = np.zeros_like(rows), MAX_LINES - len(rows)
        for i, (row, end, limit) in enumerate(zip(rows.tolist(), ends.tolist(), limits.tolist(), strict=True)):
            given = list(grammars[row].tokens) if row in grammars else None  # its bitmasks follow these drafts
            counts[i] = self._draft(row, end, min(limit, left), given)
            left -= counts[i]
        return counts

    def propose(self, state: RowState, rows: Tensor, ends: Tensor, num_drafts: int) -> None:
        for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
            self._draft(row, end, num_drafts)

    def _draft(self, row: int, end: int, limit: int, given: list[int] | None = None) -> int:
        state, chance = self.state, self.chance
        state.drafts[row] = -1
        last = int(state.num_computed[row])
        num = 0 if state.done[row] else max(0, min(limit, end - 1 - last))
        num = num if given is None else min(num, len(given))
        if self.habit == "mixed":
            num = chance.randint(0, num)
        if num:
            guesses = given or self._guess(state.history[row, : last + 1].tolist(), num)
            state.drafts[row, :num] = state.drafts.new_tensor(guesses[:num])
        return num

    def _guess(self, tokens: list[int], num: int) -> list[int]:
        chance, begin = self.chance, len(tokens)
        same = [sequence for sequence in self.known if list(sequence[:begin]) == tokens]
        right = list(chance.choice(same)[begin : begin + num]) if same else []
        right += [chance.randrange(VOCAB_SIZE) for _ in range(num - len(right))]
        odds = {"right": 0.0, "wrong": 1.0, "mixed": 0.2}[self.habit]
        return [(t + chance.randrange(1, VOCAB_SIZE)) % VOCAB_SIZE if chance.random() < odds else t for t in right]


class DraftingOps:
    """Operations whose drafts are those of a `Replay`."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.replay: Replay | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def propose_drafts(self, state: RowState, rows: Tensor, ends: Tensor, num_drafts: int) -> None:
        propose = self._ops.propose_drafts if self.replay is None else self.replay.propose
        propose(state, rows, ends, num_drafts)


def draft_by(llm: LLM, place: str, habit: str, known: Seq[Seq[int]] = ()) -> LLM:
    """Let an engine draft on the CPU or on a `StubPlatform`, as a habit says. "suffix": by itself or by its draft
    model, as if passes took the same time on every machine."""
    ops = DraftingOps(StubPlatform().ops)
    if place != "cpu":
        use_platform(llm, StubPlatform(ops, graphs=place == "graphs"))
        llm.engine._request_builder._num_grammar_drafts = 0  # type: ignore[attr-defined]  # as on a GPU
    runner: ModelRunner = llm.engine.executor.runner  # type: ignore[attr-defined]
    replay = Replay(habit, known, runner.state.rows) if habit != "suffix" else None
    ops.replay = replay
    if runner.state.draft is not None:
        runner.draft_limit.times = ConstantTimes()
    if runner.drafter is not None:
        runner.drafter.times = ConstantTimes()
        if replay is not None:
            runner.drafter.choose = replay.choose  # type: ignore[method-assign]
    return llm


class ConstantTimes(PassTimes):
    """Drafts that are right half the time pay off."""

    def line(self) -> tuple[float, float]:
        return 1.0, 0.02

    def record(self, num_lines: int, seconds: float, num_drafts: int = 0) -> None:
        pass


def count_drafts(llm: LLM) -> Counter[str]:
    """What becomes of the drafts from now on, as results tell it: "right" ones, "wrong" ones, "passes" with drafts, and
    of these the "unwanted" ones of requests that do not speculate."""
    counts: Counter[str] = Counter()
    scheduler = llm.engine.scheduler
    update: Any = Scheduler.update

    def counted(step: Any, result: Any, **options: Any) -> Any:
        for i, passes in result.drafts.items():
            params = step.sequences[i].request.sampling_params
            counts["unwanted"] += not params.spec or (
                params.structured_outputs is not None and params.logprobs is not None
            )
            for num, num_right in passes:
                counts.update(right=num_right, wrong=num - num_right, passes=1)
        return update(scheduler, step, result, **options)

    scheduler.update = counted  # type: ignore[method-assign]
    return counts
