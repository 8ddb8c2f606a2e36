"""Logits processors of the rows, kept on the device: sampling needs no host between two tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.integers import cdiv
from octavo.kernels.metadata import SamplingTensors
from octavo.kernels.row_state import (
    ALLOWED_TOKENS,
    LOGIT_BIAS,
    MAX_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    MIN_TOKENS,
    PENALTIES,
    LogitsProcessorState,
    RowState,
)
from octavo.runner.platform import Platform
from octavo.runner.sampling.sampler import RowLogitsProcessors, Sampler

BitmaskTensors = tuple[Tensor, Tensor]
"""(mask_index, bitmask): see `reference.apply_token_bitmask`."""
ALL_MASKED = -2
"""The token of a sample whose tokens are all masked; see `reference.commit_sampled_tokens`."""


class DeviceLogitsProcessors:
    """Keeps a `LogitsProcessorState` up to date for the rows that use it.

    Rows that need more, such as bad words, are sampled on the host: see `host_sampling.HostSampler`. Their steps
    may also hold rows of this class, whose tokens are then sampled there and counted here.

    rows          rows with logits processors
    num_logprobs  row -> number of top log-probabilities; absent for rows without log-probabilities
    """

    def __init__(self, state: RowState, sampler: Sampler, vocab_size: int, platform: Platform) -> None:
        self.rows: set[int] = set()
        self.num_logprobs: dict[int, int] = {}
        self._row_state = state
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._platform, self._ops = platform, platform.ops
        self._allocated: LogitsProcessorState | None = None

    def applies_to(self, plan: StepPlan) -> bool:
        return bool(self.rows) and not self.rows.isdisjoint(plan.rows)

    def slice_logprobs(self, plan: StepPlan) -> dict[int, int]:
        """Slice -> number of top log-probabilities, for slices with log-probabilities."""
        if not self.num_logprobs:
            return {}
        return {i: self.num_logprobs[row] for i, row in enumerate(plan.rows) if row in self.num_logprobs}

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's row setups, and count its host tokens. Call `Sampler.apply` first."""
        setups = {setup.row: setup for setup in plan.row_setups}
        found = {row: self._sampler.processors[row] for row in setups}
        supported = {r: p for r, p in found.items() if p and fits_on_device(p) and not setups[r].returns_candidates}
        added = {row: p for row, p in supported.items() if enabled_bits(p)}
        for row in setups:
            self.num_logprobs.pop(row, None)
        for row, p in supported.items():
            if p.num_logprobs is not None:
                self.num_logprobs[row] = min(p.num_logprobs, self._vocab_size)
        replaced = self.rows & setups.keys()
        self.rows = (self.rows - setups.keys()) | added.keys()
        if added or replaced:
            self._write({row: added.get(row) for row in added.keys() | replaced})
        known = {row: (0, setups[row].token_ids) for row, p in added.items() if p.has_penalties}
        for i, token_ids in plan.host_tokens.items():
            row, start = plan.rows[i], plan.starts[i]
            present = self._sampler.processors[row] if row in self.rows and row not in known else None
            if present is not None and present.has_penalties and start + len(token_ids) > present.num_prompt:
                known[row] = start, token_ids
        if known:
            lists: list[Seq[int]] = [ids or () for _, ids in known.values()]
            self._init_token_counts(list(known), [start for start, _ in known.values()], lists)

    def sample(
        self, logits: Tensor, rows: Tensor, sampling: SamplingTensors, bitmask: BitmaskTensors | None, keep_logits: bool
    ) -> Tensor:
        """`reference.sample_checked` with each row's logits processors. Captures into a graph.

        Changes float32 logits in place unless `keep_logits`.
        """
        ops = self._ops
        logits = logits.to(torch.float32, copy=keep_logits)
        finite = ops.finite_rows(logits)
        logits.masked_fill_(~finite.unsqueeze(1), 0.0)
        if bitmask is not None:
            ops.apply_token_bitmask(logits, *bitmask)
        ops.apply_row_logits_processors(logits, rows, sampling.position, self._row_state, self._state())
        tokens = ops.sample(logits, sampling)
        is_allowed = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) > -torch.inf
        return torch.where(finite, torch.where(is_allowed, tokens, ALL_MASKED), -1)

    def update_token_counts(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Count sampled tokens; -1 for tokens to skip. Captures into a graph."""
        if self._allocated is not None:
            self._ops.update_token_counts(self._allocated, rows, positions, tokens)

    def _state(self) -> LogitsProcessorState:
        if self._allocated is None:
            num_rows, history = self._row_state.null_row, self._sampler.history
            self._allocated = LogitsProcessorState.empty(num_rows, self._vocab_size, history, self._platform.zeros)
        return self._allocated

    def _write(self, processors: dict[int, RowLogitsProcessors | None]) -> None:
        """Replace the logits processors of these rows; None: none."""
        state, to_device = self._state(), self._platform.to_device
        rows = self._platform.index_tensor(list(processors))
        bits = [0 if p is None else enabled_bits(p) for p in processors.values()]
        ints = torch.tensor([bits, *zip(*(_lengths(p) for p in processors.values()), strict=True)], dtype=torch.int32)
        targets = state.enabled, state.num_prompt, state.min_length, state.num_counted
        for target, values in zip(targets, to_device(ints), strict=True):
            target.index_copy_(0, rows, values)
        penalties = torch.tensor([(1.0, 0.0, 0.0) if p is None else p.penalties for p in processors.values()])
        state.penalties.index_copy_(0, rows, to_device(penalties))
        state.counts.index_fill_(0, rows, 0)
        for row, p in processors.items():
            if p is not None and p.bias_ids is not None and p.bias_values is not None:
                num = len(p.bias_ids)
                state.bias_ids[row, :num], state.bias_ids[row, num:] = p.bias_ids.int(), -1
                state.bias_values[row, :num] = p.bias_values
            if p is not None and p.allowed_token_ids is not None:
                bitmask = pack_bitmask(p.allowed_token_ids, self._vocab_size)
                state.allowed_bitmask[row] = to_device(torch.from_numpy(bitmask))

    def _init_token_counts(self, rows: list[int], starts: list[int], token_ids: list[Seq[int]]) -> None:
        begins = [0, *accumulate(map(len, token_ids))]
        tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in token_ids])
        ints = torch.tensor([*rows, *starts, *begins], dtype=torch.int64)
        packed = self._platform.to_device(torch.cat([ints, torch.from_numpy(tokens)]))
        parts = torch.split(packed, [len(rows), len(rows), len(begins), len(tokens)])
        self._ops.init_token_counts(self._state(), *parts)


def fits_on_device(processors: RowLogitsProcessors) -> bool:
    """True if `LogitsProcessorState` and `RowState` hold all that the row's request uses."""
    return (
        (processors.num_logprobs is None or 0 <= processors.num_logprobs <= MAX_LOGPROBS)
        and processors.bad_words is None
        and (processors.bias_ids is None or len(processors.bias_ids) <= MAX_BIAS)
        and (processors.stop_ids is None or len(processors.stop_ids) <= MAX_STOP_IDS)
    )


def enabled_bits(processors: RowLogitsProcessors) -> int:
    """`LogitsProcessorState.enabled` of a row."""
    return (
        PENALTIES * processors.has_penalties
        + LOGIT_BIAS * (processors.bias_ids is not None)
        + ALLOWED_TOKENS * (processors.allowed_token_ids is not None)
        + MIN_TOKENS * (processors.stop_ids is not None)
    )


def _lengths(processors: RowLogitsProcessors | None) -> tuple[int, int, int]:
    """num_prompt, min_length, and num_counted, which is 0 at first."""
    return (0, 0, 0) if processors is None else (processors.num_prompt, processors.min_length, 0)


def pack_bitmask(token_ids: Seq[int], vocab_size: int) -> np.ndarray:
    """[ceil(vocab_size / 32)] int32: bit t % 32 of word t // 32 is set for each token t."""
    flags = np.zeros(cdiv(vocab_size, 32) * 32, dtype=np.bool_)
    flags[list(token_ids)] = True
    words: np.ndarray = np.packbits(flags, bitorder="little").view(np.int32)
    return words
