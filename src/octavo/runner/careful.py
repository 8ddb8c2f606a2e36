"""The way round for requests that ask more of sampling than a row on the device keeps: penalties, biases, tokens ruled
out, log-probabilities. A step that holds one of them is run as on a CPU, pass by pass, each waiting for its tokens.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from octavo.core.plan import StepPlan, StepResult
from octavo.engine.executor import Masks
from octavo.kernels.batch import RaggedBatch
from octavo.kernels.rows import RowState
from octavo.runner.replay import Model
from octavo.runner.runner import ModelRunner
from octavo.runner.sampler import Sampler


class _OnDevice:
    """A model whose inputs come from the host."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model = model
        self.device = device

    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor:
        there = RaggedBatch(
            batch.positions.to(self.device),
            batch.slot_mapping.to(self.device),
            batch.query_start.to(self.device),
            batch.seq_lens.to(self.device),
            batch.block_tables.to(self.device),
            batch.max_query_len,
            batch.max_seq_len,
        )
        rows = None if logits_rows is None else logits_rows.to(self.device)
        logits = self.model.forward(token_ids.to(self.device), there, kv, rows)
        return logits.float()


class CarefulRunner(ModelRunner):
    """A `ModelRunner` over the rows of a device. Blocks have been moved, and tables written, by who owns these rows."""

    def __init__(self, model: Model, state: RowState, kv: Tensor, *, max_model_len: int, ops: ModuleType) -> None:
        num_rows = state.null_row
        super().__init__(
            _OnDevice(model, kv.device), kv, kv[:0], num_rows=num_rows, max_model_len=max_model_len, ops=ops
        )
        self.sampler = Sampler(num_rows, max_model_len + 1, ops, kv.device)
        self._state = state
        self._asking: set[int] = set()  # rows whose requests ask for it

    def apply(self, plan: StepPlan) -> None:
        """Of every plan, what has to be known when one wants this way."""
        for setup in plan.row_setups:
            self.rows.setup[setup.row] = setup
        self.sampler.apply(plan)
        for setup in plan.row_setups:
            if self.sampler.rules[setup.row] is None and not setup.decides:
                self._asking.discard(setup.row)
            else:
                self._asking.add(setup.row)

    def wants(self, plan: StepPlan) -> bool:
        return bool(plan.masked) or (bool(self._asking) and not self._asking.isdisjoint(plan.rows))

    def columns(self, plan: StepPlan, masks: Masks) -> list[StepResult]:
        """Run the plan's slices; what they gave, column by column. The rows are read before and written afterwards."""
        state, rows = self._state, self.rows
        rows.block_tables = state.block_tables[:-1].cpu()
        rows.last_token = state.last_token[:-1].tolist()
        rows.done = state.done[:-1].tolist()
        landed: list[StepResult] = []
        self._first_pass(plan, landed.append, lambda: masks)
        for column in range(1, max(plan.samples)):
            self._window_pass(plan, column, landed.append)
        state.last_token[:-1] = torch.tensor(rows.last_token, device=state.last_token.device)
        state.done[:-1] = torch.tensor(rows.done, device=state.done.device)
        return landed
