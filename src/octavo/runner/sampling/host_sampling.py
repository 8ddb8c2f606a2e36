"""Host sampling path, for features without a device kernel: bad_words, more than 20 logprobs, beam candidates.

A step with such a request computes its logits as other steps do. The host then samples from them, pass by pass, and
waits for the tokens of each pass. Prompt log-probabilities occur once per request, so a step that returns them runs as
on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.core.plan import StepPlan, StepResult
from octavo.engine.executor import GrammarBitmask
from octavo.kernels.metadata import RaggedBatch, SamplingTensors
from octavo.kernels.ops import Ops
from octavo.kernels.row_state import RowState
from octavo.runner.executor import append_columns
from octavo.runner.model_runner import ModelRunner
from octavo.runner.recorded_graphs import Model
from octavo.runner.sampling.logits_state import fits_on_device
from octavo.runner.sampling.sampler import NOT_FINITE, Sampler, SampleSpec
from octavo.runner.streams import index_tensor, to_device


class PassLogits(NamedTuple):
    """Logits of a pass, which may be computed already or only queued. One line for each sample:

    logits    [num_samples or more, vocab_size] float32
    rows      [num_samples or more] int64, on the device like all others
    sampling  likewise
    indices   [num_samples] int64, index among several samples of a row, -1 for a token that continues its row. None:
              all tokens continue their rows
    """

    logits: Tensor
    rows: Tensor
    sampling: SamplingTensors
    indices: Tensor | None = None


class _InputsToDevice:
    """A model whose inputs come from the host."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model = model
        self.device = device

    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor:
        on_device = RaggedBatch(
            batch.positions.to(self.device),
            batch.slot_mapping.to(self.device),
            batch.query_start.to(self.device),
            batch.seq_lens.to(self.device),
            batch.block_tables.to(self.device),
            batch.max_query_len,
            batch.max_seq_len,
        )
        rows = None if logits_rows is None else logits_rows.to(self.device)
        logits = self.model.forward(token_ids.to(self.device), on_device, kv, rows)
        return logits.float()


class HostSamplingRunner(ModelRunner):
    """A `ModelRunner` that samples for a `CudaModelRunner`, which moves the blocks and writes the block tables."""

    def __init__(self, model: Model, state: RowState, kv: Tensor, *, max_model_len: int, ops: Ops) -> None:
        num_rows = state.null_row
        super().__init__(
            _InputsToDevice(model, kv.device), kv, kv[:0], num_rows=num_rows, max_model_len=max_model_len, ops=ops
        )
        self.sampler = Sampler(num_rows + 1, max_model_len + 1, ops, kv.device)  # one more for the null row
        self._state = state
        self._host_rows: set[int] = set()  # rows that need host sampling
        self.is_stale = False  # the device has run passes since `refresh_done`

    def apply(self, plan: StepPlan) -> None:
        """Apply the row setups of a plan. Called for every plan, also for those that the device samples."""
        for setup in plan.row_setups:
            self.input_batch.setup[setup.row] = setup
        self.sampler.apply(plan)
        for setup in plan.row_setups:
            processors = self.sampler.processors[setup.row]
            if setup.returns_candidates or (processors is not None and not fits_on_device(processors)):
                self._host_rows.add(setup.row)
            else:
                self._host_rows.discard(setup.row)

    def is_needed(self, plan: StepPlan) -> bool:
        return not self._host_rows.isdisjoint(plan.rows) or self.has_prompt_logprobs(plan)

    def has_prompt_logprobs(self, plan: StepPlan) -> bool:
        count = self.sampler.num_prompt_logits
        return any(count(plan.rows[i], plan.starts[i], plan.counts[i]) for i in plan.host_tokens)

    def samples_of(self, plan: StepPlan, slices: Seq[int], column: int) -> list[SampleSpec | None]:
        """The samples of these slices in a column, one for each line of logits; None for rows that are done.

        Call `refresh_done` before the first column.
        """
        if not column:
            for i in plan.host_tokens:
                self.input_batch.done[plan.rows[i]] = False
        specs: list[SampleSpec | None] = []
        for i in slices:
            if plan.num_sampled[i] <= column:
                specs.append(None)
                continue
            position = plan.starts[i] + plan.counts[i] - plan.num_sampled[i] + column + 1
            samples = self._slice_samples(plan, i, position)
            specs += [None] * len(samples) if self.input_batch.done[plan.rows[i]] else samples
        return specs

    def is_beam(self, row: int) -> bool:
        """True if the host chooses the tokens of this row's sequence."""
        return self._setup_of(row).returns_candidates

    def num_beam_candidates(self, plan: StepPlan) -> int:
        """Beam candidates per slice, for a decode step of beams without logits processors; 0 for other steps."""
        if plan.bitmask_slices or len(plan.num_samples) < len(plan.rows):
            return 0
        only_beams = all(self.is_beam(row) and self.sampler.processors[row] is None for row in plan.rows)
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

    def refresh_done(self) -> None:
        """Read which rows are done, if the device has run passes since the last read. Waits for all queued work."""
        if self.is_stale:
            self.input_batch.done = self._state.done[:-1].tolist()
            self.is_stale = False

    def sample(
        self, plan: StepPlan, logits: PassLogits, specs: list[SampleSpec | None], bitmask: GrammarBitmask | None
    ) -> tuple[StepResult, Tensor, Tensor, Tensor]:
        """Sample one column; waits for its logits.

        Returns (column, rows, tokens, positions): also the rows that continue, with their tokens and the positions of
        these, [num_rows] int64 on the device. The token of a row with an error is -1.
        """
        tokens: list[list[Any]] = [[] for _ in plan.rows]
        column = StepResult(tokens)
        active = [line for line, spec in enumerate(specs) if spec is not None]
        samples = [spec for spec in specs if spec is not None]
        device = logits.logits.device
        if len(active) == len(specs):
            n = len(specs)
            logits = PassLogits(logits.logits[:n], logits.rows[:n], logits.sampling.first(n))
        else:
            ids = index_tensor(active, device)
            logits = PassLogits(logits.logits[ids], logits.rows[ids], logits.sampling.select(ids))
        if not samples:
            return column, logits.rows, logits.rows, logits.rows
        self._sample(logits.logits, samples, bitmask, tokens, column, logits.sampling)
        lines = [line for line, sample in enumerate(samples) if sample.continues_row]
        last = [-1 if i in column.errors else tokens[i][-1] for i in (samples[line].slice_index for line in lines)]
        on_device = to_device(torch.tensor([lines, last], dtype=torch.int64), device)
        return column, logits.rows[on_device[0]], on_device[1], logits.sampling.position[on_device[0]]

    def continued_tokens(self, plan: StepPlan, columns: list[StepResult]) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, positions, tokens) [num] int64: the tokens of the last column that continue their rows."""
        column = columns[-1]
        lines: list[tuple[int, int, int]] = []
        for i, tokens in enumerate(column.tokens):
            if tokens and i not in plan.num_samples and i not in column.errors:
                position = plan.starts[i] + plan.counts[i] - plan.num_sampled[i] + len(columns)
                lines.append((plan.rows[i], position, tokens[0]))
        # Transposed on the host: kernels need each of the three to be contiguous.
        table = torch.tensor(lines, dtype=torch.int64).reshape(-1, 3).T.contiguous()
        rows, positions, token_ids = to_device(table, self._state.done.device)
        return rows, positions, token_ids

    @torch.inference_mode()
    def run_column(self, plan: StepPlan, column: int, bitmask: GrammarBitmask | None) -> StepResult:
        """Run one column of a step that returns prompt log-probabilities.

        Copies the state of the rows from the device before the pass, and back after it.
        """
        state, batch = self._state, self.input_batch
        batch.block_tables = state.block_tables[:-1].cpu()
        batch.last_token = state.last_token[:-1].tolist()
        batch.done, self.is_stale = state.done[:-1].tolist(), False
        results: list[StepResult] = []
        if column:
            self._decode_pass(plan, column, results.append, lambda _: bitmask)
        else:
            self._first_pass(plan, results.append, lambda _: bitmask)
        for more in results[1:]:  # many prompt logits take several passes
            append_columns(results[0], more)
        state.last_token[:-1] = torch.tensor(batch.last_token, device=state.last_token.device)
        state.done[:-1] = torch.tensor(batch.done, device=state.done.device)
        return results[0]
