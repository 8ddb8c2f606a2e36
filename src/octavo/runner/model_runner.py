"""Runs plans on this process's device: memory first, then the model, then the sampler, and again for a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.core.plan import RowSetup, StepPlan, StepResult
from octavo.engine.executor import GrammarBitmask
from octavo.integers import cdiv
from octavo.kernels.metadata import SamplingTensors
from octavo.runner.checksums import NO_SWAP_IN_CHECK, Checksums, SwapInCheck
from octavo.runner.input_batch import InputBatch, make_batch
from octavo.runner.memory.budget import time_swaps
from octavo.runner.recorded_graphs import Model, RecordedModel
from octavo.runner.sampling.sampler import Sampler, SampleSpec
from octavo.runner.streams import CompletedEvent

Land = Callable[[StepResult], None]
"""Takes one column of tokens: at most one more for each slice."""
WaitForMasks = Callable[[int], GrammarBitmask | None]
"""Gives what a plan's masked slices wait for in a column; asked only once there are logits to mask."""


def no_masks(column: int) -> None:
    """Of a plan without masked slices."""


MAX_PROMPT_LOGITS = 128
"""Positions of prompts whose logits one pass computes: a vocabulary of numbers each, so they are counted."""


class SlicePart(NamedTuple):
    """What one pass computes of a slice: positions from `start` on, one for each token.

    num_prompt_logits  its first positions whose logits tell how likely the prompt's next token was
    complete           the slice needs no further pass before it samples
    """

    slice_index: int
    row: int
    start: int
    token_ids: list[int]
    num_prompt_logits: int = 0
    complete: bool = True


class ModelRunner:
    """A model, its pool of K and V, and the rows.

    kv        [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim]
    host_kv   the swap space, likewise
    replay    record small decode steps, where they can be; the model is then called more often than there are steps
    """

    def __init__(
        self,
        model: Model,
        kv: Tensor,
        host_kv: Tensor,
        *,
        num_rows: int,
        max_model_len: int,
        ops: ModuleType,
        replay: bool = False,
    ) -> None:
        self.model: Model = RecordedModel(model) if replay else model
        self.kv = kv
        self.host_kv = host_kv
        self._checksums = Checksums(host_kv)
        self.block_size = kv.shape[4]
        self.ops = ops
        self.rows = InputBatch(num_rows, cdiv(max_model_len, self.block_size))
        self.sampler = Sampler(num_rows, max_model_len + 1, ops)  # a last token is sampled and never computed

    @torch.inference_mode()
    def run(self, plan: StepPlan, land: Land, wait_for_masks: WaitForMasks = no_masks) -> None:
        """Do what the plan says, in stream order; hand every column of tokens to `land` as soon as it is there."""
        self.rows.apply(plan)
        self.sampler.apply(plan)
        check = self._move_blocks(plan)
        if plan.rows:
            self._first_pass(plan, check.before(land), wait_for_masks)
            for column in range(1, max(plan.num_sampled)):
                self._window_pass(plan, column, land, wait_for_masks)
        elif corrupt := check.take():
            land(StepResult([], corrupt=corrupt))

    def measure_swap(self) -> float:
        """See `memory.time_swaps`; before anything is computed."""

        def move(pairs: list[tuple[int, int]]) -> None:
            self.ops.swap_out(self.kv, self.host_kv, *_ids(pairs))

        return time_swaps(move, len(self.host_kv) - 1)

    def _move_blocks(self, plan: StepPlan) -> SwapInCheck:
        ops, check = self.ops, NO_SWAP_IN_CHECK
        if plan.swap_outs:
            ops.swap_out(self.kv, self.host_kv, *_ids(plan.swap_outs))
        if plan.swap_ins:
            ops.swap_in(self.host_kv, self.kv, *_ids(plan.swap_ins))
        if plan.swap_outs or plan.swap_ins:
            outs, ins = [dst for _, dst in plan.swap_outs], [src for src, _ in plan.swap_ins]
            check = self._checksums.follow(outs, ins, CompletedEvent())
        if plan.copies:
            ops.block_copy(self.kv, *_ids(plan.copies))
        return check

    def _first_pass(self, plan: StepPlan, land: Land, wait_for_masks: WaitForMasks) -> None:
        """All slices, up to the first position that samples. Several passes where many logits of prompts are wanted."""
        parts: list[SlicePart] = []
        for i, row in enumerate(plan.rows):
            known, start = plan.host_tokens.get(i), plan.starts[i]
            if known is not None:
                self.rows.done[row] = False
            elif self.rows.done[row]:
                continue
            count = plan.counts[i] - max(0, plan.num_sampled[i] - 1)  # without what the device feeds itself
            token_ids = [self.rows.last_token[row]] if known is None else known[:count].tolist()
            wanted = 0 if known is None else self.sampler.num_prompt_logits(row, start, count)
            parts.append(SlicePart(i, row, start, token_ids, wanted))
        now, later = _split(parts)
        self._pass(plan, now, 0, land, wait_for_masks)
        while later:
            now, later = _split(later)
            self._pass(plan, now, 0, land, wait_for_masks)

    def _window_pass(self, plan: StepPlan, column: int, land: Land, wait_for_masks: WaitForMasks) -> None:
        """One more position of the slices whose window goes on, fed with what they have just sampled."""
        parts: list[SlicePart] = []
        for i, row in enumerate(plan.rows):
            if plan.num_sampled[i] > column and not self.rows.done[row]:
                position = plan.starts[i] + plan.counts[i] - plan.num_sampled[i] + column
                parts.append(SlicePart(i, row, position, [self.rows.last_token[row]]))
        self._pass(plan, parts, column, land, wait_for_masks)

    def _draws(self, plan: StepPlan, part: SlicePart) -> list[SampleSpec]:
        """What is sampled after the last token of a part."""
        if not plan.num_sampled[part.slice_index] or not part.complete:
            return []
        return self._draws_of(plan, part.slice_index, part.start + len(part.token_ids))

    def _draws_of(self, plan: StepPlan, slice_index: int, position: int) -> list[SampleSpec]:
        setup, num_draws = self._setup_of(plan.rows[slice_index]), plan.num_samples.get(slice_index)
        if num_draws is None:
            return [SampleSpec(slice_index, setup, setup.sample_index, position)]
        if setup.returns_candidates:
            return [SampleSpec(slice_index, setup, 0, position, goes_on=False, num_candidates=num_draws)]
        return [SampleSpec(slice_index, setup, j, position, goes_on=False) for j in range(num_draws)]

    def _setup_of(self, row: int) -> RowSetup:
        setup = self.rows.setup[row]
        assert setup is not None
        return setup

    def _pass(
        self, plan: StepPlan, parts: list[SlicePart], column: int, land: Land, wait_for_masks: WaitForMasks
    ) -> None:
        """Compute these parts, and sample for the slices that are complete with them."""
        tokens: list[list[Any]] = [[] for _ in plan.rows]
        result = StepResult(tokens)
        if parts:
            draws = [draw for part in parts for draw in self._draws(plan, part)]
            ends = dict(zip((p.slice_index for p in parts), accumulate(len(p.token_ids) for p in parts), strict=True))
            sampled = list(dict.fromkeys(d.slice_index for d in draws))  # several draws share a row of logits
            wanted = [ends[i] - 1 for i in sampled]
            for part in parts:
                first = ends[part.slice_index] - len(part.token_ids)
                wanted += range(first, first + part.num_prompt_logits)
            batch = make_batch(
                [p.row for p in parts],
                [p.start for p in parts],
                [len(p.token_ids) for p in parts],
                self.rows.block_tables,
                self.block_size,
            )
            token_ids = torch.tensor([token for p in parts for token in p.token_ids])
            logits = self.model.forward(token_ids, batch, self.kv, torch.tensor(wanted, dtype=torch.int64))
            self._read_prompts(parts, logits[len(sampled) :], result)
            if draws:
                logits = logits[: len(sampled)]
                if len(draws) > len(sampled):
                    place = {i: at for at, i in enumerate(sampled)}
                    logits = logits[[place[d.slice_index] for d in draws]]
                masks = wait_for_masks(column) if not set(plan.bitmask_slices).isdisjoint(sampled) else None
                self._sample(logits, draws, masks, tokens, result)
        land(result)

    def _read_prompts(self, parts: list[SlicePart], logits: Tensor, result: StepResult) -> None:
        """logits [num_wanted, vocab_size], those of the prompts' positions in the order of the parts."""
        for part in parts:
            mine, logits = logits[: part.num_prompt_logits], logits[part.num_prompt_logits :]
            if len(mine):
                entries = self.sampler.prompt_logprobs(mine, part.row, part.start)
                result.prompt_logprobs[part.slice_index] = (part.start + 1, entries)

    def _sample(
        self,
        logits: Tensor,
        draws: list[SampleSpec],
        masks: GrammarBitmask | None,
        tokens: list[list[Any]],
        result: StepResult,
        sampling: SamplingTensors | None = None,
    ) -> None:
        drawn = self.sampler.sample(logits, draws, masks, sampling)
        for draw, token, error, logprobs in zip(draws, *drawn, strict=True):
            if isinstance(token, list):
                tokens[draw.slice_index] = token
            else:
                tokens[draw.slice_index].append(token)
            if logprobs is not None:
                result.logprobs.setdefault(draw.slice_index, []).append(logprobs)
            row = draw.setup.row
            if draw.goes_on and isinstance(token, int):
                self.rows.last_token[row] = token
                self.rows.done[row] = token in draw.setup.stop_ids
            if error:
                result.errors[draw.slice_index] = error
                self.rows.done[row] = True


def _split(parts: list[SlicePart]) -> tuple[list[SlicePart], list[SlicePart]]:
    """(what the next pass computes, what is left for later): as many logits of prompts as one pass may compute."""
    now: list[SlicePart] = []
    later: list[SlicePart] = []
    room = MAX_PROMPT_LOGITS
    for part in parts:
        if part.num_prompt_logits <= room:
            room -= part.num_prompt_logits
            now.append(part)
            continue
        head, tail = part.token_ids[:room], part.token_ids[room:]
        if head:
            now.append(part._replace(token_ids=head, num_prompt_logits=room, complete=False))
        later.append(
            part._replace(start=part.start + room, token_ids=tail, num_prompt_logits=part.num_prompt_logits - room)
        )
        room = 0
    return now, later


def _ids(moves: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    pairs = torch.tensor(moves, dtype=torch.int64)  # [num_moves, 2]: source, destination
    return pairs[:, 0], pairs[:, 1]
