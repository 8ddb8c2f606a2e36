"""Sampling of a plan on the host, which waits for the logits of each column."""

from __future__ import annotations

import torch

from octavo.core.plan import StepPlan, StepResult
from octavo.engine.executor import GrammarBitmask
from octavo.runner.output_buffers import OutputBuffers, StepOutput
from octavo.runner.passes.pass_shape import Column, Pass
from octavo.runner.passes.passes import Passes
from octavo.runner.sampling.host_sampling import Continued, HostSampler
from octavo.runner.sampling.pipeline import Lines

MAX_GRAPH_CANDIDATES = 64
"""Most beam candidates per row that a graph finds."""


class HostColumns:
    """Samples the columns of a plan on the host.

    num_candidates  beam candidates per slice, if the device may find them; see `HostSampler.num_beam_candidates`
    """

    def __init__(
        self,
        host: HostSampler,
        passes: Passes,
        ring: OutputBuffers,
        output: StepOutput,
        plan: StepPlan,
        *,
        num_candidates: int,
    ) -> None:
        self._host, self._passes, self._ring, self._output, self._plan = host, passes, ring, output, plan
        self._lines: Lines | None = None  # of the column that is queued
        self._num_candidates = num_candidates if num_candidates <= MAX_GRAPH_CANDIDATES else 0
        if not self._num_candidates:
            host.refresh_done(plan)

    def queue(self, column: Column) -> None:
        if column[0].has_work:
            self._lines = self._passes.logits(column[0])

    def sample(self, column: Column, bitmask: GrammarBitmask | None) -> None:
        """Sample its passes one by one. All tokens are committed once, at its end."""
        continued: list[Continued] = []
        for p in column:
            if p is not column[0]:
                self._lines = self._passes.logits(p)
            lines, self._lines = self._lines, None
            result = StepResult([[] for _ in self._plan.rows])
            if lines is not None:
                result, tokens = self._sample_pass(p, lines, bitmask)
                continued.append(tokens)
            self._ring.record_result(self._output, result)
        if continued:
            rows, sampled, positions = (torch.cat(parts) for parts in zip(*continued, strict=True))
            self._passes.pipeline.commit(rows, sampled, positions, sampled)

    def _sample_pass(self, p: Pass, lines: Lines, bitmask: GrammarBitmask | None) -> tuple[StepResult, Continued]:
        specs = self._host.samples_of(self._plan, list(dict.fromkeys(p.slices)), lines)
        result, continued = self._host.sample(self._plan, lines, specs, bitmask)
        if p.batch is not None:
            prompt_logits = lines.logits[len(p.slices) : p.batch.size.num_samples]
            self._host.read_prompt_logprobs(p.batch.parts, prompt_logits, result)
        return result, continued

    def sample_and_queue(self, column: Column, bitmask: GrammarBitmask | None) -> None:
        self.sample(column, bitmask)
        self.queue(column)

    def run(self, column: Column, num_columns: int) -> None:
        for _ in range(num_columns):
            if self._num_candidates:
                packed = self._passes.candidates(column[0], self._num_candidates)
                self._ring.record_result(self._output, self._host.read_candidates(self._plan, packed))
            else:
                self.queue(column)
                self.sample(column, None)
