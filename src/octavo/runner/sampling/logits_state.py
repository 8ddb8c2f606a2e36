"""What the requests of rows ask of their logits, on the device: it needs no host between two of their tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from types import ModuleType

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
from octavo.runner.sampling.sampler import RowLogitsProcessors, Sampler, to_device

Masked = tuple[Tensor, Tensor]
"""`which` mask each draw has, and their `words`: see `reference.apply_token_bitmask`."""
NO_TOKEN = -2
"""Of a draw for which all tokens were ruled out; see `reference.commit_sampled_tokens`."""


class DeviceLogitsProcessors:
    """`LogitsProcessorState`, kept up by plans for the rows that ask for anything it has.

    Rows that need more, such as bad words, are sampled on the host: see `host_sampling.HostSamplingRunner`. Their steps
    may hold rows of this class, whose tokens are then sampled there and counted here.

    rows     that ask for what changes their logits
    telling  row -> of how many of the likeliest tokens it tells beside the one that is drawn; absent: of nothing
    """

    def __init__(self, state: RowState, sampler: Sampler, vocab_size: int, ops: ModuleType) -> None:
        self.rows: set[int] = set()
        self.telling: dict[int, int] = {}
        self._row_state = state
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._ops = ops
        self._state: LogitsProcessorState | None = None

    def concern(self, plan: StepPlan) -> bool:
        return bool(self.rows) and not self.rows.isdisjoint(plan.rows)

    def asked_logprobs(self, plan: StepPlan) -> dict[int, int]:
        """Slice -> of how many tokens, as `telling` says."""
        if not self.telling:
            return {}
        return {i: self.telling[row] for i, row in enumerate(plan.rows) if row in self.telling}

    def apply(self, plan: StepPlan) -> None:
        """Rows change hands, and the host says tokens; `sampler` knows of it already."""
        setups = {setup.row: setup for setup in plan.row_setups}
        rules = {row: self._sampler.rules[row] for row in setups}
        device = {row: r for row, r in rules.items() if r is not None and is_for_device(r)}
        device = {row: r for row, r in device.items() if not setups[row].returns_candidates}
        ours = {row: r for row, r in device.items() if asks_of(r)}
        for row in setups:
            self.telling.pop(row, None)
        for row, r in device.items():
            if r.num_logprobs is not None:
                self.telling[row] = min(r.num_logprobs, self._vocab_size)
        left = self.rows & setups.keys()
        self.rows = (self.rows - setups.keys()) | ours.keys()
        if ours or left:
            self._write({row: ours.get(row) for row in ours.keys() | left})
        told = {row: (0, setups[row].token_ids) for row, r in ours.items() if r.has_penalties}
        for i, token_ids in plan.host_tokens.items():
            row, start = plan.rows[i], plan.starts[i]
            own = self._sampler.rules[row] if row in self.rows and row not in told else None
            if own is not None and own.has_penalties and start + len(token_ids) > own.num_prompt:
                told[row] = start, token_ids
        if told:
            self._tell(list(told), [start for start, _ in told.values()], [ids or () for _, ids in told.values()])

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        sampling: SamplingTensors,
        masked: Masked | None = None,
        *,
        keep: bool = False,
    ) -> Tensor:
        """`reference.sample_checked` with each row's logits processors. Changes the logits, if they are float32 and not
        to be kept. Can be captured."""
        ops = self._ops
        logits = logits.to(torch.float32, copy=keep)
        finite = ops.finite_rows(logits)
        logits.masked_fill_(~finite.unsqueeze(1), 0.0)
        if masked is not None:
            ops.apply_token_bitmask(logits, *masked)
        ops.apply_row_logits_processors(logits, rows, sampling.position, self._row_state, self._made())
        tokens = ops.sample(logits, sampling)
        is_left = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) > -torch.inf
        return torch.where(finite, torch.where(is_left, tokens, NO_TOKEN), -1)

    def note(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """What was sampled; -1 for what does not count. Can be captured."""
        if self._state is not None:
            self._ops.update_token_counts(self._state, rows, positions, tokens)

    def _made(self) -> LogitsProcessorState:
        if self._state is None:
            self._state = LogitsProcessorState.empty(self._row_state.null_row, self._vocab_size, self._sampler.history)
        return self._state

    def _write(self, rules: dict[int, RowLogitsProcessors | None]) -> None:
        """What these rows ask from now on; None: nothing."""
        state, device = self._made(), self._row_state.done.device
        rows = to_device(torch.tensor(list(rules), dtype=torch.int64), device)
        asks = [0 if r is None else asks_of(r) for r in rules.values()]
        ints = torch.tensor([asks, *zip(*(_lengths(r) for r in rules.values()), strict=True)], dtype=torch.int32)
        targets = state.enabled, state.num_prompt, state.min_length, state.num_counted
        for target, values in zip(targets, to_device(ints, device), strict=True):
            target.index_copy_(0, rows, values)
        penalties = torch.tensor([(1.0, 0.0, 0.0) if r is None else r.penalties for r in rules.values()])
        state.penalties.index_copy_(0, rows, to_device(penalties, device))
        state.counts.index_fill_(0, rows, 0)
        for row, r in rules.items():
            if r is not None and r.bias is not None and r.bias_values is not None:
                num = len(r.bias)
                state.bias_ids[row, :num], state.bias_ids[row, num:] = r.bias.int(), -1
                state.bias_values[row, :num] = r.bias_values
            if r is not None and r.allowed_token_ids is not None:
                state.allowed_bitmask[row] = to_device(
                    torch.from_numpy(bits_of(r.allowed_token_ids, self._vocab_size)), device
                )

    def _tell(self, rows: list[int], starts: list[int], token_ids: list[Seq[int]]) -> None:
        begins = [0, *accumulate(map(len, token_ids))]
        tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in token_ids])
        numbers = torch.tensor([*rows, *starts, *begins], dtype=torch.int64)
        words = to_device(torch.cat([numbers, torch.from_numpy(tokens)]), self._row_state.done.device)
        parts = torch.split(words, [len(rows), len(rows), len(begins), len(tokens)])
        self._ops.init_token_counts(self._made(), *parts)


def is_for_device(rules: RowLogitsProcessors) -> bool:
    return (
        (rules.num_logprobs is None or 0 <= rules.num_logprobs <= MAX_LOGPROBS)
        and rules.words is None
        and (rules.bias is None or len(rules.bias) <= MAX_BIAS)
        and (rules.stops is None or len(rules.stops) <= MAX_STOP_IDS)
    )


def asks_of(rules: RowLogitsProcessors) -> int:
    return (
        PENALTIES * rules.has_penalties
        + LOGIT_BIAS * (rules.bias is not None)
        + ALLOWED_TOKENS * (rules.allowed_token_ids is not None)
        + MIN_TOKENS * (rules.stops is not None)
    )


def _lengths(rules: RowLogitsProcessors | None) -> tuple[int, int, int]:
    """num_prompt, min_length, and counted, which is nothing yet."""
    return (0, 0, 0) if rules is None else (rules.num_prompt, rules.min_length, 0)


def bits_of(token_ids: Seq[int], vocab_size: int) -> np.ndarray:
    """[ceil(vocab_size / 32)] int32: bit t % 32 of word t // 32 is token t's."""
    octets = np.zeros(cdiv(vocab_size, 32) * 32, dtype=np.bool_)
    octets[list(token_ids)] = True
    words: np.ndarray = np.packbits(octets, bitorder="little").view(np.int32)
    return words
