"""The way round for requests that ask more of sampling than a row on the device keeps: words that are ruled out, very
many log-probabilities, beams. A step that holds one of them computes its logits as any other does, and the host draws
from them, pass by pass, each waiting for its tokens. What the model thought of a prompt is asked for but once, so a
step that has to tell runs as on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.core.plan import StepPlan, StepResult
from octavo.engine.executor import GrammarBitmask
from octavo.kernels.metadata import RaggedBatch, SamplingTensors
from octavo.kernels.row_state import RowState
from octavo.runner.executor import append
from octavo.runner.model_runner import ModelRunner
from octavo.runner.recorded_graphs import Model
from octavo.runner.sampling.logits_state import is_for_device
from octavo.runner.sampling.sampler import NOT_FINITE, Sampler, SampleSpec, to_device


class Logits(NamedTuple):
    """What a pass has computed, or will have: for each draw that may follow it one line of

    logits    [num_draws or more, vocab_size] float32
    rows      [num_draws or more] int64, on the device as the others are
    sampling  likewise
    indices   [num_draws] int64: which of several draws of its row it is, -1 of a row that goes on with its draw. None:
              all do
    """

    logits: Tensor
    rows: Tensor
    sampling: SamplingTensors
    indices: Tensor | None = None

    def lines(self, ids: Tensor) -> Logits:
        return Logits(self.logits[ids], self.rows[ids], self.sampling.rows(ids))


class HostSampledColumn(NamedTuple):
    """A column for the host, and for the rows that go on: which they are, and their tokens and these ones' positions,
    -1 for a token where something is wrong with a row; all [num_rows] int64 on the device."""

    column: StepResult
    rows: Tensor
    tokens: Tensor
    positions: Tensor


class _OnDevice:
    """A model whose inputs come from the host."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model = model
        self.device = device

    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor:
        own = RaggedBatch(
            batch.positions.to(self.device),
            batch.slot_mapping.to(self.device),
            batch.query_start.to(self.device),
            batch.seq_lens.to(self.device),
            batch.block_tables.to(self.device),
            batch.max_query_len,
            batch.max_seq_len,
        )
        rows = None if logits_rows is None else logits_rows.to(self.device)
        logits = self.model.forward(token_ids.to(self.device), own, kv, rows)
        return logits.float()


class HostSamplingRunner(ModelRunner):
    """A `ModelRunner` over the rows of a device. Blocks have been moved, and tables written, by who owns these rows."""

    def __init__(self, model: Model, state: RowState, kv: Tensor, *, max_model_len: int, ops: ModuleType) -> None:
        num_rows = state.null_row
        super().__init__(
            _OnDevice(model, kv.device), kv, kv[:0], num_rows=num_rows, max_model_len=max_model_len, ops=ops
        )
        self.sampler = Sampler(num_rows + 1, max_model_len + 1, ops, kv.device)  # one for the null row
        self._state = state
        self._asking: set[int] = set()  # rows whose requests ask for it
        self.is_behind = False  # the device has computed what this has not seen

    def apply(self, plan: StepPlan) -> None:
        """Of every plan, what has to be known when one wants this way."""
        for setup in plan.row_setups:
            self.rows.setup[setup.row] = setup
        self.sampler.apply(plan)
        for setup in plan.row_setups:
            rules = self.sampler.rules[setup.row]
            if setup.returns_candidates or (rules is not None and not is_for_device(rules)):
                self._asking.add(setup.row)
            else:
                self._asking.discard(setup.row)

    def wants(self, plan: StepPlan) -> bool:
        return not self._asking.isdisjoint(plan.rows) or self.tells_prompts(plan)

    def tells_prompts(self, plan: StepPlan) -> bool:
        wanted = self.sampler.num_prompt_logits
        return any(wanted(plan.rows[i], plan.starts[i], plan.counts[i]) for i in plan.host_tokens)

    def draws(self, plan: StepPlan, slices: Seq[int], column: int) -> list[SampleSpec | None]:
        """What follows the pass that computes this column of these slices, line by line of its logits; None where a row
        is done. The rows' own word on that was read before the first."""
        if not column:
            for i in plan.host_tokens:
                self.rows.done[plan.rows[i]] = False
        wanted: list[SampleSpec | None] = []
        for i in slices:
            if plan.num_sampled[i] <= column:
                wanted.append(None)
                continue
            position = plan.starts[i] + plan.counts[i] - plan.num_sampled[i] + column + 1
            draws = self._draws_of(plan, i, position)
            wanted += [None] * len(draws) if self.rows.done[plan.rows[i]] else draws
        return wanted

    def decides(self, row: int) -> bool:
        """Whether the host chooses its tokens: a beam's."""
        return self._setup_of(row).returns_candidates

    def candidates_wanted(self, plan: StepPlan) -> int:
        """How many of the likeliest tokens to find for every slice, where that is all that a decode step is for; else
        0."""
        if plan.bitmask_slices or len(plan.num_samples) < len(plan.rows):
            return 0
        free = all(self._setup_of(row).returns_candidates and self.sampler.rules[row] is None for row in plan.rows)
        return max(plan.num_samples.values()) if free else 0

    def candidates(self, plan: StepPlan, best: Tensor) -> StepResult:
        """best [num_slices, 2 + 2 * num]: see `reference.packed_top_logprobs`. Waits for it."""
        words = best.cpu()[: len(plan.rows)]  # graphs draw for padding, too
        half = 1 + words.shape[1] // 2
        tokens, logprobs = words[:, 2:half].tolist(), words[:, half:].view(torch.float32).tolist()
        told = [list(zip(logprobs[i], tokens[i], strict=True))[: plan.num_samples[i]] for i in range(len(plan.rows))]
        return StepResult(told, {i: NOT_FINITE for i, rank in enumerate(words[:, 1].tolist()) if not rank})

    def read_done(self) -> None:
        """Which rows are done, if the device has been left alone with them; this waits for what is queued."""
        if self.is_behind:
            self.rows.done = self._state.done[:-1].tolist()
            self.is_behind = False

    def sample(
        self, plan: StepPlan, made: Logits, wanted: list[SampleSpec | None], masks: GrammarBitmask | None
    ) -> HostSampledColumn:
        """Waits for the logits."""
        told: list[list[Any]] = [[] for _ in plan.rows]
        column = StepResult(told)
        alive = [line for line, draw in enumerate(wanted) if draw is not None]
        draws = [draw for draw in wanted if draw is not None]
        device = made.logits.device
        if len(alive) == len(wanted):
            n = len(wanted)
            made = Logits(made.logits[:n], made.rows[:n], made.sampling.first(n))
        else:
            made = made.lines(to_device(torch.tensor(alive, dtype=torch.int64), device))
        if not draws:
            return HostSampledColumn(column, made.rows, made.rows, made.rows)
        self._sample(made.logits, draws, masks, told, column, made.sampling)
        going = [line for line, draw in enumerate(draws) if draw.goes_on]
        tokens = [-1 if i in column.errors else told[i][-1] for i in (draws[k].slice_index for k in going)]
        on_device = to_device(torch.tensor([going, tokens], dtype=torch.int64), device)
        return HostSampledColumn(column, made.rows[on_device[0]], on_device[1], made.sampling.position[on_device[0]])

    def went_on(self, plan: StepPlan, columns: list[StepResult]) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, tokens' positions, tokens) of all that the last of these gave and rows go on with, [num] int64."""
        column = columns[-1]
        noted: list[tuple[int, int, int]] = []
        for i, tokens in enumerate(column.tokens):
            if tokens and i not in plan.num_samples and i not in column.errors:
                position = plan.starts[i] + plan.counts[i] - plan.num_sampled[i] + len(columns)
                noted.append((plan.rows[i], position, tokens[0]))
        # Transposed here: kernels take each of the three for contiguous.
        table = torch.tensor(noted, dtype=torch.int64).reshape(-1, 3).T.contiguous()
        rows, positions, told = to_device(table, self._state.done.device)
        return rows, positions, told

    @torch.inference_mode()
    def column(self, plan: StepPlan, number: int, masks: GrammarBitmask | None) -> StepResult:
        """Of a step that tells of prompts. The rows are read before and written after."""
        state, rows = self._state, self.rows
        rows.block_tables = state.block_tables[:-1].cpu()
        rows.last_token = state.last_token[:-1].tolist()
        rows.done, self.is_behind = state.done[:-1].tolist(), False
        landed: list[StepResult] = []
        if number:
            self._window_pass(plan, number, landed.append, lambda _: masks)
        else:
            self._first_pass(plan, landed.append, lambda _: masks)
        for more in landed[1:]:  # the logits of long prompts take several passes
            append(landed[0], more)
        state.last_token[:-1] = torch.tensor(rows.last_token, device=state.last_token.device)
        state.done[:-1] = torch.tensor(rows.done, device=state.done.device)
        return landed[0]
