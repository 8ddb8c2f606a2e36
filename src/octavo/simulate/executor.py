"""The seam's other side in a simulation: plans take what the cost model says, and every token is made up."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

from octavo.core.plan import RowSetup, StepPlan, StepResult
from octavo.core.types import Row
from octavo.engine.executor import GrammarBitmask
from octavo.simulate.clock import VirtualClock
from octavo.simulate.cost import CostModel

OUTPUT_TOKEN = 1
"""The token that every simulated model says. Prompts have others, so that a chat's next turn finds what was said."""


class TokenSource(Protocol):
    """What the model says where it matters: to beams, or when another run is followed."""

    def samples(self, setup: RowSetup, position: int, count: int) -> Seq[Any]:
        """`count` draws from the logits at `position`: tokens, or (log-probability, token) best first for beams."""

    def tokens(self, setup: RowSetup, position: int, count: int) -> Seq[int]:
        """The tokens sampled at `position` and after it."""


class SimulatedRunning:
    """A plan that is done at a time known when it was submitted; waiting for it takes the clock there."""

    __slots__ = ("_clock", "_tokens", "done_s")

    def __init__(self, clock: VirtualClock, done_s: float, tokens: list[Seq[Any]]) -> None:
        self._clock, self.done_s, self._tokens = clock, done_s, tokens

    @property
    def done(self) -> bool:
        return self._clock.now >= self.done_s

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        self._clock.advance_to(min(self.done_s, self._clock.now + timeout_s))
        return None

    def put_bitmask(self, masks: GrammarBitmask | None) -> None:
        """Its tokens are not drawn."""

    def result(self) -> StepResult:
        self._clock.advance_to(self.done_s)
        return StepResult(self._tokens)


class SimulatedExecutor:
    """Keeps stream order: a plan begins when the one before it has ended."""

    def __init__(self, cost: CostModel, clock: VirtualClock, token_source: TokenSource | None = None) -> None:
        self.cost = cost
        self.clock = clock
        self.token_source = token_source
        self.busy_s = 0.0  # in which the device computed
        self._free_s = 0.0  # when it is done with all that was submitted
        self._rows: dict[Row, RowSetup] = {}
        self._columns: list[tuple[int, ...]] = [()]

    def submit(self, plan: StepPlan) -> SimulatedRunning:
        cost = self.cost
        self.clock.now += cost.host_s + cost.host_slice_s * len(plan.rows)
        if cost.host_chunk_s and plan.host_tokens:
            self.clock.now += cost.host_chunk_s * sum(plan.counts[i] > 1 for i in plan.host_tokens)
        step_s = cost.step_s(plan)
        self.busy_s += step_s
        self._free_s = max(self._free_s, self.clock.now) + step_s
        return SimulatedRunning(self.clock, self._free_s, self._sample(plan))

    def _sample(self, plan: StepPlan) -> list[Seq[Any]]:
        if self.token_source is not None:
            return self._ask(plan, self.token_source)
        columns = self._columns
        longest = max(plan.num_sampled, default=0)
        while len(columns) <= longest:
            columns.append((OUTPUT_TOKEN,) * len(columns))
        tokens: list[Seq[Any]] = [columns[n] for n in plan.num_sampled]
        for i, count in plan.num_samples.items():
            if plan.num_sampled[i]:
                tokens[i] = (OUTPUT_TOKEN,) * count
        return tokens

    def _ask(self, plan: StepPlan, token_source: TokenSource) -> list[Seq[Any]]:
        for setup in plan.row_setups:
            self._rows[setup.row] = setup
        tokens: list[Seq[Any]] = []
        for i, count in enumerate(plan.num_sampled):
            setup, first = self._rows[plan.rows[i]], plan.starts[i] + plan.counts[i] - count
            if not count:
                tokens.append(())
            elif i in plan.num_samples:
                tokens.append(token_source.samples(setup, first, plan.num_samples[i]))
            else:
                tokens.append(token_source.tokens(setup, first, count))
        return tokens

    def close(self) -> None:
        self._rows.clear()
