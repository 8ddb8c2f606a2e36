"""Logits processors of the rows, kept on the device: sampling needs no host between two tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import RowSetup, StepPlan
from octavo.integers import cdiv
from octavo.kernels.metadata import SamplingTensors
from octavo.kernels.reference import MAX_SLICED_TOP_K, check_tokens
from octavo.kernels.row_state import (
    ALLOWED_TOKENS,
    HISTORY,
    LOGIT_BIAS,
    MAX_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    MIN_TOKENS,
    PENALTIES,
    DraftLines,
    LogitsProcessorState,
    RowState,
)
from octavo.runner.platform import Platform

BitmaskTensors = tuple[Tensor, Tensor]
"""(mask_index, bitmask): see `reference.apply_token_bitmask`."""


@lru_cache(maxsize=8)
def _padded(words: Seq[Seq[int]], device: torch.device) -> Tensor:
    """Bad words as a tensor [num_words, longest] int64, which the samples of a request share."""
    longest = max(map(len, words))
    return torch.tensor([(*[-1] * (longest - len(w)), *w) for w in words], device=device)


class RowLogitsProcessors:
    """Logits processors and log-probabilities of one row's request, as tensors that are made once.

    enabled    `LogitsProcessorState.enabled` of the row: processors that the device applies
    bad_words  [num_words, max_word_len] int64, see `reference.mask_bad_words`; None: no bad words
    stop_ids   tokens that min_tokens masks; None: none
    """

    def __init__(self, setup: RowSetup, platform: Platform) -> None:
        params = setup.sampling_params
        self.num_prompt = setup.num_prompt
        self.min_length = setup.num_prompt + params.min_tokens
        self.num_logprobs = 0 if params.logprobs is None and params.selects_best_of else params.logprobs
        has_output = setup.token_ids is not None and len(setup.token_ids) > setup.num_prompt
        self.num_prompt_logprobs = None if has_output else params.prompt_logprobs  # sent before the first output token
        self.needs_history = params.needs_history
        self.has_penalties = params.has_penalties
        self.penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.allowed_token_ids = params.allowed_token_ids
        has_stops = params.min_tokens and setup.stop_ids
        self.stop_ids = platform.index_tensor(sorted(setup.stop_ids)) if has_stops else None
        self.bad_words = self.bias_ids = self.bias_values = None
        if params.bad_words_token_ids:
            self.bad_words = _padded(params.bad_words_token_ids, platform.device)
        if bias := params.logit_bias:
            self.bias_ids = platform.index_tensor(list(bias))
            self.bias_values = torch.tensor(list(bias.values()), dtype=torch.float32, device=platform.device)
        self.enabled = (
            PENALTIES * self.has_penalties
            + LOGIT_BIAS * (self.bias_ids is not None and len(self.bias_ids) <= MAX_BIAS)
            + ALLOWED_TOKENS * (self.allowed_token_ids is not None)
            + MIN_TOKENS * (self.stop_ids is not None and len(self.stop_ids) <= MAX_STOP_IDS)
            + HISTORY * (self.bad_words is not None)
        )

    @classmethod
    def of(cls, setup: RowSetup, platform: Platform) -> RowLogitsProcessors | None:
        """None for a request that uses none of them."""
        p = setup.sampling_params
        is_used = p.needs_history or p.logprobs is not None or p.selects_best_of or p.logit_bias or p.min_tokens
        return cls(setup, platform) if is_used or p.allowed_token_ids is not None else None

    @property
    def large_bias(self) -> bool:
        """True for more biases than a row keeps on the device."""
        return self.bias_ids is not None and not self.enabled & LOGIT_BIAS

    @property
    def many_stop_ids(self) -> bool:
        """True for min_tokens with more stop ids than a row keeps on the device."""
        return self.stop_ids is not None and not self.enabled & MIN_TOKENS

    @property
    def fits_on_device(self) -> bool:
        """True if `LogitsProcessorState` and `RowState` hold all that the row's request uses."""
        few_logprobs = self.num_logprobs is None or 0 <= self.num_logprobs <= MAX_LOGPROBS
        return few_logprobs and self.bad_words is None and not self.large_bias and not self.many_stop_ids


class LogitsProcessors:
    """Logits processors of all rows, those of the host's samples too: keeps a `LogitsProcessorState` up to date.

    What that does not hold, such as bad words, is applied by `sampler.Sampler`, which samples such rows on the host.

    of_row           the row's processors, None for most rows
    rows             rows in the state
    filtered         rows whose tokens top_k, top_p or min_p choose from
    filtered_by_all  those of them whose filters need all logits: without a top_k, or with a large one
    num_logprobs     row -> number of top log-probabilities that the device returns; absent for other rows
    """

    def __init__(self, state: RowState, max_len: int, vocab_size: int, platform: Platform) -> None:
        self.of_row: list[RowLogitsProcessors | None] = [None] * (state.null_row + 1)
        self.rows: set[int] = set()
        self.filtered: set[int] = set()
        self.filtered_by_all: set[int] = set()
        self.num_logprobs: dict[int, int] = {}
        self.platform, self.ops = platform, platform.ops
        self._row_state = state
        self._max_len, self._vocab_size = max_len, vocab_size
        self._history: Tensor | None = None
        self._allocated: LogitsProcessorState | None = None

    @property
    def history(self) -> Tensor:
        """[num_rows + 1, max_len] int32 by position, of rows that need it: the drafts', or allocated on first use."""
        if self._row_state.history.shape[1]:
            return self._row_state.history
        if self._history is None:
            self._history = self.platform.zeros((len(self.of_row), self._max_len), torch.int32)
        return self._history

    def last_tokens(self, rows: Tensor, position: Tensor, num: int) -> Tensor:
        """The `num` tokens before a position of each row [num_rows, num] int32, -2 for those before the first.

        rows, position  [num_rows] int, on the device
        """
        column = position.unsqueeze(1) - torch.arange(num, 0, -1, device=position.device)
        tokens = self.history[rows.unsqueeze(1), column.clamp(min=0)]
        return tokens.masked_fill(column < 0, -2)

    def applies_to(self, plan: StepPlan) -> bool:
        return bool(self.rows) and not self.rows.isdisjoint(plan.rows)

    def filters(self, plan: StepPlan) -> bool:
        """True if a row of the plan has top_k, top_p or min_p."""
        return bool(self.filtered) and not self.filtered.isdisjoint(plan.rows)

    def filters_all(self, plan: StepPlan) -> bool:
        """True if the filters of a row of the plan need all logits."""
        return bool(self.filtered_by_all) and not self.filtered_by_all.isdisjoint(plan.rows)

    def slice_logprobs(self, plan: StepPlan) -> dict[int, int]:
        """Slice -> number of top log-probabilities, for slices with log-probabilities."""
        if not self.num_logprobs:
            return {}
        return {i: self.num_logprobs[row] for i, row in enumerate(plan.rows) if row in self.num_logprobs}

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's row setups, and add its host tokens to history and counts."""
        setups = {setup.row: setup for setup in plan.row_setups}
        added: dict[int, RowLogitsProcessors] = {}
        known: dict[int, tuple[int, Seq[int]]] = {}  # row -> (start, tokens to count)
        for row, setup in setups.items():
            p = self.of_row[row] = RowLogitsProcessors.of(setup, self.platform)
            self.num_logprobs.pop(row, None)
            params = setup.sampling_params
            by_all = params.has_filters and not 0 < params.top_k <= MAX_SLICED_TOP_K
            for rows, is_one in (self.filtered, params.has_filters), (self.filtered_by_all, by_all):
                (rows.add if is_one else rows.discard)(row)
            if p is None:
                continue
            if setup.token_ids is not None:
                self._write_history(row, 0, setup.token_ids)
            if p.num_logprobs is not None and p.fits_on_device and not setup.returns_candidates:
                self.num_logprobs[row] = min(p.num_logprobs, self._vocab_size)
            if p.enabled:
                added[row] = p
            if p.has_penalties:
                known[row] = 0, setup.token_ids or ()
        replaced = self.rows & setups.keys()
        self.rows = (self.rows - setups.keys()) | added.keys()
        if added or replaced:
            self._write({row: added.get(row) for row in added.keys() | replaced})
        for i, token_ids in plan.host_tokens.items():
            row, start = plan.rows[i], plan.starts[i]
            p = self.of_row[row]
            if p is None or not p.needs_history:
                continue
            self._write_history(row, start, token_ids)
            if p.has_penalties and row not in known and start + len(token_ids) > p.num_prompt:
                known[row] = start, token_ids
        if known:
            self._init_token_counts(list(known), [start for start, _ in known.values()], [t for _, t in known.values()])

    def _write_history(self, row: int, start: int, token_ids: array[int]) -> None:
        tokens = self.platform.to_device(torch.tensor(token_ids, dtype=torch.int32))
        self.history[row, start : start + len(token_ids)] = tokens

    # -- logits and tokens, for samples on the device and on the host --------------------------------------------------

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        sampling: SamplingTensors,
        bitmask: BitmaskTensors | None,
        *,
        keep_logits: bool,
        drafts: DraftLines | None = None,
    ) -> Tensor:
        """`reference.sample_checked` with each row's logits processors. Captures into a graph.

        Changes float32 logits in place unless `keep_logits`.
        """
        self._state()
        logits = logits.to(torch.float32, copy=keep_logits)
        finite = self.clear_non_finite(logits)
        self.process(logits, rows, sampling.position, bitmask, drafts)
        return check_tokens(self.ops.sample(logits, sampling), logits, finite)

    def clear_non_finite(self, logits: Tensor) -> Tensor:
        """Set logits of rows with NaN or infinity to 0, so that sampling does not fail -> finite rows [num] bool."""
        finite = self.ops.finite_rows(logits)
        if not self.platform.is_host or not bool(finite.all()):  # the host does not wait for another device
            logits.masked_fill_(~finite.unsqueeze(1), 0.0)
        return finite

    def process(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        bitmask: BitmaskTensors | None,
        drafts: DraftLines | None = None,
    ) -> None:
        """Apply bitmasks and the rows' processors to float32 logits [num_samples, vocab_size], in place."""
        if bitmask is not None:
            self.ops.apply_token_bitmask(logits, *bitmask)
        if self._allocated is not None:
            self.ops.apply_row_logits_processors(logits, rows, positions, self._row_state, self._allocated, drafts)

    def update_token_counts(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Count sampled tokens; -1 for tokens to skip. Captures into a graph."""
        if self._allocated is not None:
            self.ops.update_token_counts(self._allocated, rows, positions, tokens)

    def _state(self) -> LogitsProcessorState:
        if self._allocated is None:
            num_rows, zeros = self._row_state.null_row, self.platform.zeros
            self._allocated = LogitsProcessorState.empty(num_rows, self._vocab_size, self.history, zeros)
        return self._allocated

    def _write(self, processors: dict[int, RowLogitsProcessors | None]) -> None:
        """Replace the logits processors of these rows; None: none."""
        state, to_device = self._state(), self.platform.to_device
        rows = self.platform.index_tensor(list(processors))
        bits = [0 if p is None else p.enabled for p in processors.values()]
        ints = torch.tensor([bits, *zip(*(_lengths(p) for p in processors.values()), strict=True)], dtype=torch.int32)
        targets = state.enabled, state.num_prompt, state.min_length, state.num_counted
        for target, values in zip(targets, to_device(ints), strict=True):
            target.index_copy_(0, rows, values)
        penalties = torch.tensor([(1.0, 0.0, 0.0) if p is None else p.penalties for p in processors.values()])
        state.penalties.index_copy_(0, rows, to_device(penalties))
        state.counts.index_fill_(0, rows, 0)
        for row, p in processors.items():
            if p is not None and p.enabled & LOGIT_BIAS and p.bias_ids is not None and p.bias_values is not None:
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
        packed = self.platform.to_device(torch.cat([ints, torch.from_numpy(tokens)]))
        parts = torch.split(packed, [len(rows), len(rows), len(begins), len(tokens)])
        self.ops.init_token_counts(self._state(), *parts)


def _lengths(processors: RowLogitsProcessors | None) -> tuple[int, int, int]:
    """num_prompt, min_length, and num_counted, which is 0 at first."""
    return (0, 0, 0) if processors is None else (processors.num_prompt, processors.min_length, 0)


def pack_bitmask(token_ids: Seq[int], vocab_size: int) -> np.ndarray:
    """[ceil(vocab_size / 32)] int32: bit t % 32 of word t // 32 is set for each token t."""
    flags = np.zeros(cdiv(vocab_size, 32) * 32, dtype=np.bool_)
    flags[list(token_ids)] = True
    words: np.ndarray = np.packbits(flags, bitorder="little").view(np.int32)
    return words
