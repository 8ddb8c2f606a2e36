"""A simulated executor: steps take the time of a cost model, and sampled tokens are constants or come from a
`TokenSource`."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

from octavo.core.plan import RowSetup, StepPlan, StepResult
from octavo.core.types import Row
from octavo.engine.executor import Capacity, GrammarBitmask
from octavo.simulate.clock import VirtualClock
from octavo.simulate.cost import CostModel

OUTPUT_TOKEN = 1
"""The token that every simulated model samples. Prompts use other tokens, so that a chat's next turn hits the prefix
cache only for what was generated."""


class TokenSource(Protocol):
    """Sampled tokens, where they matter: for beam search, or to follow another run."""

    def samples(self, setup: RowSetup, position: int, count: int) -> Seq[Any]:
        """`count` samples from the logits at `position`: tokens, or (logprob, token) pairs, best first, for beam
        search."""

    def tokens(self, setup: RowSetup, position: int, count: int) -> Seq[int]:
        """The `count` tokens sampled from `position` on."""


class SimulatedStep:
    """A submitted step whose end time is known; waiting for it advances the clock."""

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
        """Grammar bitmasks have no effect here."""

    def result(self) -> StepResult:
        self._clock.advance_to(self.done_s)
        return StepResult(self._tokens)


class SimulatedExecutor:
    """Runs steps in stream order: each starts when the previous one ends."""

    def __init__(
        self,
        cost: CostModel,
        clock: VirtualClock,
        token_source: TokenSource | None = None,
        *,
        num_blocks: int,
        num_host_blocks: int = 0,
    ) -> None:
        self.cost = cost
        one = StepPlan()
        one.set_slices([0], [1], [1], [1])
        self.capacity = Capacity(num_blocks, num_host_blocks, cost.move_s, cost.step_s(one))
        self.clock = clock
        self.token_source = token_source
        self.busy_s = 0.0  # device time spent computing
        self._device_free_s = 0.0  # when all submitted steps are done
        self._rows: dict[Row, RowSetup] = {}
        self._columns: list[tuple[int, ...]] = [()]

    def start(self) -> Capacity:
        return self.capacity

    def submit(self, plan: StepPlan) -> SimulatedStep:
        cost = self.cost
        self.clock.now += cost.host_s + cost.host_slice_s * len(plan.rows)
        if cost.host_chunk_s and plan.host_tokens:
            self.clock.now += cost.host_chunk_s * sum(plan.counts[i] > 1 for i in plan.host_tokens)
        step_s = cost.step_s(plan)
        self.busy_s += step_s
        self._device_free_s = max(self._device_free_s, self.clock.now) + step_s
        return SimulatedStep(self.clock, self._device_free_s, self._sample(plan))

    def _sample(self, plan: StepPlan) -> list[Seq[Any]]:
        if self.token_source is not None:
            return self._sample_from(plan, self.token_source)
        columns = self._columns
        longest = max(plan.num_sampled, default=0)
        while len(columns) <= longest:
            columns.append((OUTPUT_TOKEN,) * len(columns))
        tokens: list[Seq[Any]] = [columns[n] for n in plan.num_sampled]
        for i, count in plan.num_samples.items():
            if plan.num_sampled[i]:
                tokens[i] = (OUTPUT_TOKEN,) * count
        return tokens

    def _sample_from(self, plan: StepPlan, token_source: TokenSource) -> list[Seq[Any]]:
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
