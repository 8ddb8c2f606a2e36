"""Runs plans on this process's device: memory first, then the model, then the sampler, and again for a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.core.plan import StepPlan, StepResult
from octavo.kernels.batch import RaggedBatch
from octavo.runner.inputs import Rows, make_batch
from octavo.runner.sampler import NOT_FINITE, sample

Land = Callable[[StepResult], None]
"""Takes one column of tokens: at most one more for each slice."""


class Model(Protocol):
    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor) -> Tensor: ...


class Draw(NamedTuple):
    """One token to sample: for which slice, from which of the pass's tokens, as which of the request's samples."""

    slice_index: int
    token_index: int
    sample_index: int
    position: int


class ModelRunner:
    """A model, its pool of K and V, and the rows.

    kv        [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim]
    host_kv   the swap space, likewise
    """

    def __init__(
        self, model: Model, kv: Tensor, host_kv: Tensor, *, num_rows: int, max_model_len: int, ops: ModuleType
    ) -> None:
        self.model = model
        self.kv = kv
        self.host_kv = host_kv
        self.block_size = kv.shape[4]
        self.ops = ops
        self.rows = Rows(num_rows, -(-max_model_len // self.block_size))

    @torch.inference_mode()
    def run(self, plan: StepPlan, land: Land) -> None:
        """Do what the plan says, in stream order; hand every column of tokens to `land` as soon as it is there."""
        self.rows.apply(plan)
        self._move_blocks(plan)
        if plan.rows:
            self._first_pass(plan, land)
            for column in range(1, max(plan.samples)):
                self._window_pass(plan, column, land)

    def _move_blocks(self, plan: StepPlan) -> None:
        ops = self.ops
        if plan.swap_outs:
            ops.swap_out(self.kv, self.host_kv, *_ids(plan.swap_outs))
        if plan.swap_ins:
            ops.swap_in(self.host_kv, self.kv, *_ids(plan.swap_ins))
        if plan.copies:
            ops.block_copy(self.kv, *_ids(plan.copies))

    def _first_pass(self, plan: StepPlan, land: Land) -> None:
        """All slices, up to the first position that samples."""
        rows: list[int] = []
        starts: list[int] = []
        counts: list[int] = []
        token_ids: list[int] = []
        draws: list[Draw] = []
        for i, row in enumerate(plan.rows):
            known, start = plan.host_tokens.get(i), plan.starts[i]
            if known is not None:
                self.rows.done[row] = False
            elif self.rows.done[row]:
                continue
            count = plan.counts[i] - max(0, plan.samples[i] - 1)  # without what the device feeds itself
            rows.append(row)
            starts.append(start)
            counts.append(count)
            token_ids += [self.rows.last_token[row]] if known is None else known[:count].tolist()
            if plan.samples[i]:
                own = self.rows.setup[row]
                assert own is not None
                num_draws = plan.draws.get(i, 1)
                for j in range(num_draws):
                    index = own.sample_index if num_draws == 1 else j
                    draws.append(Draw(i, len(token_ids) - 1, index, start + count))
        self._pass(plan, rows, starts, counts, token_ids, draws, land)

    def _window_pass(self, plan: StepPlan, column: int, land: Land) -> None:
        """One more position of the slices whose window goes on, fed with what they have just sampled."""
        rows: list[int] = []
        starts: list[int] = []
        token_ids: list[int] = []
        draws: list[Draw] = []
        for i, row in enumerate(plan.rows):
            if plan.samples[i] > column and not self.rows.done[row]:
                position = plan.starts[i] + plan.counts[i] - plan.samples[i] + column
                setup = self.rows.setup[row]
                assert setup is not None
                draws.append(Draw(i, len(rows), setup.sample_index, position + 1))
                rows.append(row)
                starts.append(position)
                token_ids.append(self.rows.last_token[row])
        self._pass(plan, rows, starts, [1] * len(rows), token_ids, draws, land)

    def _pass(
        self,
        plan: StepPlan,
        rows: list[int],
        starts: list[int],
        counts: list[int],
        token_ids: list[int],
        draws: list[Draw],
        land: Land,
    ) -> None:
        column: list[list[int]] = [[] for _ in plan.rows]
        errors: dict[int, str] = {}
        if rows:
            batch = make_batch(rows, starts, counts, self.rows.block_tables, self.block_size)
            logits_rows = torch.tensor([d.token_index for d in draws], dtype=torch.int64)
            logits = self.model.forward(torch.tensor(token_ids), batch, self.kv, logits_rows)
            if draws:
                self._sample(plan, logits, draws, column, errors)
        land(StepResult(column, errors))

    def _sample(
        self, plan: StepPlan, logits: Tensor, draws: list[Draw], column: list[list[int]], errors: dict[int, str]
    ) -> None:
        setups = [setup for d in draws if (setup := self.rows.setup[plan.rows[d.slice_index]]) is not None]
        tokens, finite = sample(logits, setups, [d.sample_index for d in draws], [d.position for d in draws], self.ops)
        for draw, setup, token, good in zip(draws, setups, tokens, finite, strict=True):
            column[draw.slice_index].append(token)
            if draw.slice_index not in plan.draws:
                self.rows.last_token[setup.row] = token
                self.rows.done[setup.row] = token in setup.stop_ids
            if not good:
                errors[draw.slice_index] = NOT_FINITE
                self.rows.done[setup.row] = True


def _ids(moves: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    pairs = torch.tensor(moves, dtype=torch.int64)  # [num_moves, 2]: source, destination
    return pairs[:, 0], pairs[:, 1]
