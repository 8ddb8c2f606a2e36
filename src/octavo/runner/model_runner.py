"""Runs plans on this process's CPU: block moves, then the model, then the sampler, then further decode passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.core.plan import RowSetup, StepPlan, StepResult
from octavo.engine.executor import GrammarBitmask
from octavo.integers import cdiv
from octavo.kernels.metadata import SamplingTensors
from octavo.kernels.ops import Ops
from octavo.runner.checksums import NO_SWAP_IN_CHECK, Checksums, SwapInCheck
from octavo.runner.input_batch import InputBatch, make_batch
from octavo.runner.memory.budget import time_swaps
from octavo.runner.recorded_graphs import Model, RecordedModel
from octavo.runner.sampling.sampler import Sampler, SampleSpec
from octavo.runner.streams import CompletedEvent

AddColumn = Callable[[StepResult], None]
"""Receives one column of sampled tokens: at most one more for each slice."""
GetBitmask = Callable[[int], GrammarBitmask | None]
"""Returns the grammar bitmask of a column, or waits for it. Called after the logits are computed."""


def no_bitmask(column: int) -> None:
    """For plans without bitmask slices."""


MAX_PROMPT_LOGITS = 128
"""Prompt positions with logits in one pass: each is as wide as the vocabulary, so their number is limited."""


class SlicePart(NamedTuple):
    """Part of a slice that one pass computes: positions from `start` on, one for each token.

    num_prompt_logits  leading positions whose logits give the log-probability of the prompt's next token
    complete           the slice needs no further pass before it samples
    """

    slice_index: int
    row: int
    start: int
    token_ids: list[int]
    num_prompt_logits: int = 0
    complete: bool = True


class ModelRunner:
    """A model, its KV pool, and the rows.

    kv             [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim]
    host_kv        the swap space, likewise
    record_graphs  record and replay small decode steps; see `RecordedModel`
    """

    def __init__(
        self,
        model: Model,
        kv: Tensor,
        host_kv: Tensor,
        *,
        num_rows: int,
        max_model_len: int,
        ops: Ops,
        record_graphs: bool = False,
    ) -> None:
        self.model: Model = RecordedModel(model) if record_graphs else model
        self.kv = kv
        self.host_kv = host_kv
        self._checksums = Checksums(host_kv)
        self.block_size = kv.shape[4]
        self.ops = ops
        self.input_batch = InputBatch(num_rows, cdiv(max_model_len, self.block_size))
        self.sampler = Sampler(num_rows, max_model_len + 1, ops)  # the last sampled token is never computed

    @torch.inference_mode()
    def run(self, plan: StepPlan, add_column: AddColumn, get_bitmask: GetBitmask = no_bitmask) -> None:
        """Execute a plan in stream order. Passes each column of sampled tokens to `add_column` when it is ready."""
        self.input_batch.apply(plan)
        self.sampler.apply(plan)
        check = self._move_blocks(plan)
        if plan.rows:
            self._first_pass(plan, check.attach_to(add_column), get_bitmask)
            for column in range(1, max(plan.num_sampled)):
                self._decode_pass(plan, column, add_column, get_bitmask)
        elif corrupt := check.take():
            add_column(StepResult([], corrupt=corrupt))

    def measure_swap(self) -> float:
        """Seconds that a block takes to swap; see `memory.budget.time_swaps`. Overwrites blocks: call it at start."""

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
            check = self._checksums.submit(outs, ins, CompletedEvent())
        if plan.copies:
            ops.block_copy(self.kv, *_ids(plan.copies))
        return check

    def _first_pass(self, plan: StepPlan, add_column: AddColumn, get_bitmask: GetBitmask) -> None:
        """Compute all slices up to their first sampled token. Takes several passes for many prompt logits."""
        parts: list[SlicePart] = []
        for i, row in enumerate(plan.rows):
            host_tokens, start = plan.host_tokens.get(i), plan.starts[i]
            if host_tokens is not None:
                self.input_batch.done[row] = False
            elif self.input_batch.done[row]:
                continue
            count = plan.counts[i] - max(0, plan.num_sampled[i] - 1)  # without the positions of later decode passes
            token_ids = [self.input_batch.last_token[row]] if host_tokens is None else host_tokens[:count].tolist()
            num_logits = 0 if host_tokens is None else self.sampler.num_prompt_logits(row, start, count)
            parts.append(SlicePart(i, row, start, token_ids, num_logits))
        now, later = _split(parts)
        self._pass(plan, now, 0, add_column, get_bitmask)
        while later:
            now, later = _split(later)
            self._pass(plan, now, 0, add_column, get_bitmask)

    def _decode_pass(self, plan: StepPlan, column: int, add_column: AddColumn, get_bitmask: GetBitmask) -> None:
        """Compute one more position of the slices that sample more tokens, from their last sampled tokens."""
        parts: list[SlicePart] = []
        for i, row in enumerate(plan.rows):
            if plan.num_sampled[i] > column and not self.input_batch.done[row]:
                position = plan.starts[i] + plan.counts[i] - plan.num_sampled[i] + column
                parts.append(SlicePart(i, row, position, [self.input_batch.last_token[row]]))
        self._pass(plan, parts, column, add_column, get_bitmask)

    def _part_samples(self, plan: StepPlan, part: SlicePart) -> list[SampleSpec]:
        """The samples after the last token of a part."""
        if not plan.num_sampled[part.slice_index] or not part.complete:
            return []
        return self._slice_samples(plan, part.slice_index, part.start + len(part.token_ids))

    def _slice_samples(self, plan: StepPlan, slice_index: int, position: int) -> list[SampleSpec]:
        setup, num_samples = self._setup_of(plan.rows[slice_index]), plan.num_samples.get(slice_index)
        if num_samples is None:
            return [SampleSpec(slice_index, setup, setup.sample_index, position)]
        if setup.returns_candidates:
            return [SampleSpec(slice_index, setup, 0, position, continues_row=False, num_candidates=num_samples)]
        return [SampleSpec(slice_index, setup, j, position, continues_row=False) for j in range(num_samples)]

    def _setup_of(self, row: int) -> RowSetup:
        setup = self.input_batch.setup[row]
        assert setup is not None
        return setup

    def _pass(
        self, plan: StepPlan, parts: list[SlicePart], column: int, add_column: AddColumn, get_bitmask: GetBitmask
    ) -> None:
        """Compute these parts, and sample the slices that they complete."""
        tokens: list[list[Any]] = [[] for _ in plan.rows]
        result = StepResult(tokens)
        if parts:
            samples = [sample for part in parts for sample in self._part_samples(plan, part)]
            ends = dict(zip((p.slice_index for p in parts), accumulate(len(p.token_ids) for p in parts), strict=True))
            sampled = list(dict.fromkeys(s.slice_index for s in samples))  # several samples may share a row of logits
            logits_rows = [ends[i] - 1 for i in sampled]
            for part in parts:
                first = ends[part.slice_index] - len(part.token_ids)
                logits_rows += range(first, first + part.num_prompt_logits)
            batch = make_batch(
                [p.row for p in parts],
                [p.start for p in parts],
                [len(p.token_ids) for p in parts],
                self.input_batch.block_tables,
                self.block_size,
            )
            token_ids = torch.tensor([token for p in parts for token in p.token_ids])
            logits = self.model.forward(token_ids, batch, self.kv, torch.tensor(logits_rows, dtype=torch.int64))
            self._read_prompt_logprobs(parts, logits[len(sampled) :], result)
            if samples:
                logits = logits[: len(sampled)]
                if len(samples) > len(sampled):
                    line_of = {i: line for line, i in enumerate(sampled)}
                    logits = logits[[line_of[s.slice_index] for s in samples]]
                bitmask = get_bitmask(column) if not set(plan.bitmask_slices).isdisjoint(sampled) else None
                self._sample(logits, samples, bitmask, tokens, result)
        add_column(result)

    def _read_prompt_logprobs(self, parts: list[SlicePart], logits: Tensor, result: StepResult) -> None:
        """logits [num_logits, vocab_size]: those of prompt positions, in the order of the parts."""
        for part in parts:
            part_logits, logits = logits[: part.num_prompt_logits], logits[part.num_prompt_logits :]
            if len(part_logits):
                entries = self.sampler.prompt_logprobs(part_logits, part.row, part.start)
                result.prompt_logprobs[part.slice_index] = (part.start + 1, entries)

    def _sample(
        self,
        logits: Tensor,
        samples: list[SampleSpec],
        bitmask: GrammarBitmask | None,
        tokens: list[list[Any]],
        result: StepResult,
        sampling: SamplingTensors | None = None,
    ) -> None:
        output = self.sampler.sample(logits, samples, bitmask, sampling)
        for sample, token, error, logprobs in zip(samples, *output, strict=True):
            if isinstance(token, list):
                tokens[sample.slice_index] = token
            else:
                tokens[sample.slice_index].append(token)
            if logprobs is not None:
                result.logprobs.setdefault(sample.slice_index, []).append(logprobs)
            row = sample.setup.row
            if sample.continues_row and isinstance(token, int):
                self.input_batch.last_token[row] = token
                self.input_batch.done[row] = token in sample.setup.stop_ids
            if error:
                result.errors[sample.slice_index] = error
                self.input_batch.done[row] = True


def _split(parts: list[SlicePart]) -> tuple[list[SlicePart], list[SlicePart]]:
    """(parts for the next pass, parts for later passes), with at most MAX_PROMPT_LOGITS prompt logits in a pass."""
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
