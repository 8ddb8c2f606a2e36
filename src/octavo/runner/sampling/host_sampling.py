"""Host sampling path, for features without a device kernel: bad_words, more than 20 logprobs, beam candidates.

A step with such a request computes its logits as other steps do. The host then samples from them, pass by pass, over
the same row state, and waits for the tokens of each pass. So does a step that returns prompt log-probabilities, which
occur once per request.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.core.plan import RowSetup, StepPlan, StepResult
from octavo.engine.executor import GrammarBitmask
from octavo.kernels.row_state import RowState
from octavo.runner.passes.prefill_batch import SlicePart
from octavo.runner.platform import Platform
from octavo.runner.sampling.logits_state import LogitsProcessors
from octavo.runner.sampling.pipeline import Lines
from octavo.runner.sampling.sampler import NOT_FINITE, Sampler, SampleSpec


class Continued(NamedTuple):
    """Sampled tokens that continue their rows, all [num_rows] int64 on the device; -1 for a row with an error."""

    rows: Tensor
    tokens: Tensor
    positions: Tensor


class HostSampler:
    """Samples the rows of a model runner on the host.

    sampler   has every row's logits processors, also of rows that the device samples
    is_stale  the device has run passes since `refresh_done`
    """

    def __init__(self, state: RowState, processors: LogitsProcessors, platform: Platform) -> None:
        self.sampler = Sampler(processors)
        self.is_stale = False
        self._processors = processors
        self._state = state
        self._platform = platform
        self._setups: list[RowSetup | None] = [None] * state.null_row
        self._done = [False] * state.null_row
        self._rows: set[int] = set()  # rows that need host sampling

    def apply(self, plan: StepPlan) -> None:
        """Apply the row setups of any plan, after `LogitsProcessors.apply`."""
        for setup in plan.row_setups:
            self._setups[setup.row] = setup
            processors = self._processors.of_row[setup.row]
            if setup.returns_candidates or (processors is not None and not processors.fits_on_device):
                self._rows.add(setup.row)
            else:
                self._rows.discard(setup.row)

    def is_needed(self, plan: StepPlan) -> bool:
        return not self._rows.isdisjoint(plan.rows) or self.has_prompt_logprobs(plan)

    def has_prompt_logprobs(self, plan: StepPlan) -> bool:
        count = self.sampler.num_prompt_logits
        return any(count(plan.rows[i], plan.starts[i], plan.counts[i]) for i in plan.host_tokens)

    def is_beam(self, row: int) -> bool:
        """True if the host chooses the tokens of this row's sequence."""
        return self._setup_of(row).returns_candidates

    def num_beam_candidates(self, plan: StepPlan) -> int:
        """Beam candidates per slice, for a decode step of beams without logits processors; 0 for other steps."""
        if plan.bitmask_slices or len(plan.num_samples) < len(plan.rows):
            return 0
        only_beams = all(self.is_beam(row) and self._processors.of_row[row] is None for row in plan.rows)
        return max(plan.num_samples.values()) if only_beams else 0

    def read_candidates(self, plan: StepPlan, packed: Tensor) -> StepResult:
        """Read beam candidates; waits for them.

        packed   [num_slices, 2 + 2 * num]: see `reference.packed_top_logprobs`
        """
        ints = packed.cpu()[: len(plan.rows)]  # without a graph's padding
        half = 1 + ints.shape[1] // 2
        tokens, logprobs = ints[:, 2:half].tolist(), ints[:, half:].view(torch.float32).tolist()
        found = [list(zip(logprobs[i], tokens[i], strict=True))[: plan.num_samples[i]] for i in range(len(plan.rows))]
        return StepResult(found, {i: NOT_FINITE for i, rank in enumerate(ints[:, 1].tolist()) if not rank})

    def refresh_done(self, plan: StepPlan) -> None:
        """Read which rows are done, if the device has run passes since the last read; waits for all queued work.

        Rows with host tokens are not done. Call this before the first column.
        """
        if self.is_stale:
            self._done = self._state.done[:-1].tolist()
            self.is_stale = False
        for i in plan.host_tokens:
            self._done[plan.rows[i]] = False

    def samples_of(self, plan: StepPlan, slices: Seq[int], lines: Lines) -> list[SampleSpec | None]:
        """The samples of these slices, one for each line of logits; None for rows without work."""
        specs: list[SampleSpec | None] = []
        rows, positions = self._platform.to_lists([lines.rows, lines.sampling.position])
        for i in slices:
            samples = self._slice_samples(plan, i, positions[len(specs)])
            is_idle = rows[len(specs)] == self._state.null_row or self._done[plan.rows[i]]
            specs += [None] * len(samples) if is_idle else samples
        return specs

    def _slice_samples(self, plan: StepPlan, slice_index: int, position: int) -> list[SampleSpec]:
        setup, num_samples = self._setup_of(plan.rows[slice_index]), plan.num_samples.get(slice_index)
        if num_samples is None:
            return [SampleSpec(slice_index, setup, setup.sample_index, position)]
        if setup.returns_candidates:
            return [SampleSpec(slice_index, setup, 0, position, continues_row=False, num_candidates=num_samples)]
        return [SampleSpec(slice_index, setup, j, position, continues_row=False) for j in range(num_samples)]

    def _setup_of(self, row: int) -> RowSetup:
        setup = self._setups[row]
        assert setup is not None
        return setup

    def sample(
        self, plan: StepPlan, logits: Lines, specs: list[SampleSpec | None], bitmask: GrammarBitmask | None
    ) -> tuple[StepResult, Continued]:
        """Sample one column, or a part of one; waits for its logits."""
        column = StepResult([[] for _ in plan.rows])
        active = [line for line, spec in enumerate(specs) if spec is not None]
        samples = [spec for spec in specs if spec is not None]
        if len(active) == len(specs):
            n = len(specs)
            logits = Lines(logits.logits[:n], logits.rows[:n], logits.sampling.first(n))
        else:
            ids = self._platform.index_tensor(active)
            logits = Lines(logits.logits[ids], logits.rows[ids], logits.sampling.select(ids))
        if not samples:
            return column, Continued(logits.rows, logits.rows, logits.rows)
        lines, tokens = self._sample(column, logits, samples, bitmask)
        on_device = self._platform.to_device(torch.tensor([lines, tokens], dtype=torch.int64))
        rows, positions = logits.rows[on_device[0]], logits.sampling.position[on_device[0]]
        return column, Continued(rows, on_device[1], positions)

    def _sample(
        self, column: StepResult, logits: Lines, samples: list[SampleSpec], bitmask: GrammarBitmask | None
    ) -> tuple[list[int], list[int]]:
        """Add the sampled tokens to a column -> (lines of samples that continue their rows, their tokens)."""
        lines: list[int] = []
        continued: list[int] = []
        found: Seq[Any] = column.tokens
        output = self.sampler.sample(logits.logits, samples, logits.rows, logits.sampling, bitmask)
        for line, (sample, token, error, logprobs) in enumerate(zip(samples, *output, strict=True)):
            found[sample.slice_index].extend(token if isinstance(token, list) else [token])
            if logprobs is not None:
                column.logprobs.setdefault(sample.slice_index, []).append(logprobs)
            if error:
                column.errors[sample.slice_index] = error
            if isinstance(token, int) and sample.continues_row:
                lines.append(line)
                continued.append(-1 if error else token)
                self._done[sample.setup.row] = bool(error) or token in sample.setup.stop_ids
            elif error:
                self._done[sample.setup.row] = True
        return lines, continued

    def read_prompt_logprobs(self, parts: Seq[SlicePart], logits: Tensor, result: StepResult) -> None:
        """logits [num_logits, vocab_size]: those of prompt positions, in the order of the parts."""
        for part in parts:
            part_logits, logits = logits[: part.num_prompt_logits], logits[part.num_prompt_logits :]
            if len(part_logits):
                entries = self.sampler.prompt_logprobs(part_logits, part.row, part.start)
                result.prompt_logprobs[part.slice_index] = (part.start + 1, entries)
