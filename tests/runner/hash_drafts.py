"""Drafters that know a `HashModel`'s next tokens: drafts are right, wrong or random, as a world's habit says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.engine.executor import GrammarDrafts
from octavo.kernels import reference
from octavo.kernels.row_state import DraftLines, RowState
from octavo.runner.model_runner import ModelRunner
from tests.proof import oracle as o
from tests.proof.workloads import World
from tests.runner.hash_model import logits_of, mix, visible, windows_of


class KnowingDrafter:
    """In place of `runner.drafter.Drafter` and of `propose_drafts`. Any number of drafts, up to the limits."""

    def record_pass(self, num_lines: int, seconds: float) -> None:
        pass

    def __init__(self, state: RowState, world: World, totals: Counter[str]) -> None:
        self.state, self.habit, self.is_lazy = state, world.habits.drafts, world.habits.lazy
        self.windows, self.chance, self.totals = windows_of(world), random.Random(world.seed), totals

    def forget(self, rows: Any) -> None:
        pass

    def choose(
        self, rows: np.ndarray, ends: np.ndarray, limits: np.ndarray, grammars: Mapping[int, GrammarDrafts]
    ) -> np.ndarray:
        """Drafts in grammars have any tokens: all bitmasks of a world are the same."""
        slices = zip(rows.tolist(), ends.tolist(), limits.tolist(), strict=True)
        most = {row: len(drafts.tokens) for row, drafts in grammars.items()}
        counts = [self.draft(row, end, min(limit, most.get(row, limit))) for row, end, limit in slices]
        self.totals["drafts in grammars"] += sum(
            num for row, num in zip(rows.tolist(), counts, strict=True) if row in grammars
        )
        return np.array(counts, dtype=np.int64)

    def propose(self, state: RowState, rows: Tensor, ends: Tensor, num_drafts: int) -> None:
        for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
            self.draft(row, end, num_drafts)

    def draft(self, row: int, end: int, limit: int) -> int:
        state = self.state
        state.drafts[row] = -1
        last = int(state.num_computed[row])
        room = end - 1 - last
        if bool(state.done[row]) or min(limit, room) <= 0:
            return 0
        self.totals["cut by the end"] += room < limit
        num = min(limit, room)
        if self.is_lazy:
            num = self.chance.randint(0, num)
        tokens = state.history[row, : last + 1].tolist()
        assert tokens[-1] == int(state.last_token[row])
        for depth in range(num):
            guess = self._next(row, tokens)
            if self.habit == "wrong" or (self.habit == "lot" and self.chance.random() < 0.3):
                guess = (guess + 1) % o.VOCAB
            if self.habit == "random":
                guess = self.chance.randrange(o.VOCAB)
            tokens.append(guess)
            state.drafts[row, depth] = guess
        return num

    def _next(self, row: int, tokens: list[int]) -> int:
        values = [0]
        for p, token in enumerate(tokens):
            values.append(mix(values[-1], p, token))
        logits = torch.tensor([logits_of(visible(values[1:], self.windows))])
        index = torch.tensor([row])
        sampling = self.state.sampling(index, torch.full_like(index, -1), torch.tensor([len(tokens)]))
        return int(reference.sample(logits, sampling))


class Overridden:
    """Operations, some of which are set."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


def guess_by_habit(runner: ModelRunner, world: World, totals: Counter[str]) -> None:
    """Let a runner draft by the habits of a world, and count what becomes of the drafts."""
    drafter = KnowingDrafter(runner.state.rows, world, totals)
    ops = Overridden(runner.platform.ops)

    def reject(state: RowState, rows: Tensor, tokens: Tensor, drafts: DraftLines) -> Tensor:
        kept = reject_drafts(state, rows, tokens, drafts)
        live = (rows != state.null_row) & (drafts.depths > 0)
        totals["accepted"] += int((live & (kept >= 0)).sum())
        totals["rejected"] += int((live & (kept == -3)).sum())
        return kept

    reject_drafts, ops.reject_drafts, ops.propose_drafts = ops.reject_drafts, reject, drafter.propose  # type: ignore[attr-defined]
    runner.platform.ops = runner.state.processors.ops = runner.passes.pipeline._ops = ops
    if runner.drafter is not None:
        runner.drafter = drafter  # type: ignore[assignment]
