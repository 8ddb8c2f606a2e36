"""From logits to tokens, for the rows of a step that sample: what each request asks of it, in the order agreed on.

    the model's logits -> log-probabilities are taken -> tokens are ruled out: by structured_outputs, allowed_token_ids,
    bad_words, min_tokens -> logit_bias -> penalties -> greedy, or temperature, top_k, top_p, min_p and noise

A request that asks for none of the first three steps pays for none of them.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence as Seq
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.plan import RowSetup, StepPlan, TokenLogprobs
from octavo.engine.executor import GrammarBitmask
from octavo.kernels.metadata import LogitsProcessorParams, SamplingTensors, TokenHistory

NOT_FINITE = "the model gave numbers that are not finite for this request"
NO_ALLOWED_TOKEN = (
    "no_allowed_token: structured_outputs, allowed_token_ids, bad_words and min_tokens together leave no token that "
    "could come next"
)


class SampleSpec(NamedTuple):
    """One token to sample: for which slice and row, as which of the request's samples, and at which position. The row
    goes on with it, unless it is one of several draws. With `num_candidates` nothing is sampled: the host decides, and
    wants that many of the likeliest tokens.
    """

    slice_index: int
    setup: RowSetup
    sample_index: int
    position: int
    goes_on: bool = True
    num_candidates: int = 0


Candidates = list[tuple[float, int]]
"""(log-probability, token), best first; fewer where the rules leave fewer."""


class SamplerOutput(NamedTuple):
    """One entry for each draw: its token, what was wrong with it ("" for nothing), and what the model thought."""

    tokens: list[int | Candidates]
    errors: list[str]
    logprobs: list[TokenLogprobs | None]


class RowLogitsProcessors:
    """What a row's request asks beyond noise, temperature and filters, as tensors that are made once.

    words   [num_words, longest] int64, see `LogitsProcessorParams`; None: no bad words
    stops   what min_tokens rules out; None: nothing
    """

    def __init__(self, setup: RowSetup, device: torch.device | str) -> None:
        params = setup.sampling_params
        self.num_prompt = setup.num_prompt
        self.min_length = setup.num_prompt + params.min_tokens
        self.num_logprobs = 0 if params.logprobs is None and params.selects_best_of else params.logprobs
        has_output = setup.token_ids is not None and len(setup.token_ids) > setup.num_prompt
        self.num_prompt_logprobs = None if has_output else params.prompt_logprobs  # told before the first token was
        self.needs_history = params.needs_history
        self.has_penalties = params.has_penalties
        self.penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.allowed_token_ids = params.allowed_token_ids
        self.allowed = None if params.allowed_token_ids is None else _ids(params.allowed_token_ids, device)
        self.stops = _ids(sorted(setup.stop_ids), device) if params.min_tokens and setup.stop_ids else None
        self.words = self.bias = self.bias_values = None
        if words := params.bad_words_token_ids:
            longest = max(map(len, words))
            self.words = torch.tensor([(*[-1] * (longest - len(w)), *w) for w in words], device=device)
        if bias := params.logit_bias:
            self.bias = _ids(list(bias), device)
            self.bias_values = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)

    @classmethod
    def of(cls, setup: RowSetup, device: torch.device | str) -> RowLogitsProcessors | None:
        """None for a request that asks for nothing of the kind."""
        p = setup.sampling_params
        asks = p.needs_history or p.logprobs is not None or p.selects_best_of or p.logit_bias or p.min_tokens
        return cls(setup, device) if asks or p.allowed_token_ids is not None else None

    @property
    def rules_out(self) -> bool:
        return self.stops is not None or self.allowed is not None or self.words is not None


class Sampler:
    """Samples for the rows of a runner, and keeps up the tokens of those rows whose sampling looks at them.

    history   [num_rows, max_len] int32, by position, where `RowLogitsProcessors.needs_history`; made on first use
    """

    def __init__(self, num_rows: int, max_len: int, ops: ModuleType, device: torch.device | str = "cpu") -> None:
        self.ops = ops
        self.device = device
        self.rules: list[RowLogitsProcessors | None] = [None] * num_rows
        self._history_shape = (num_rows, max_len)
        self._history: Tensor | None = None

    @property
    def history(self) -> Tensor:
        if self._history is None:
            # numpy's zeros take memory where they are first written.
            self._history = torch.from_numpy(np.zeros(self._history_shape, dtype=np.int32)).to(self.device)
        return self._history

    def apply(self, plan: StepPlan) -> None:
        """Rows change hands, and the host tells tokens."""
        for setup in plan.row_setups:
            self.rules[setup.row] = RowLogitsProcessors.of(setup, self.device)
            if setup.token_ids is not None:
                self._write(setup.row, 0, setup.token_ids)
        for i, token_ids in plan.host_tokens.items():
            rules = self.rules[plan.rows[i]]
            if rules is not None and rules.needs_history:
                self._write(plan.rows[i], plan.starts[i], token_ids)

    def _write(self, row: int, start: int, token_ids: array[int]) -> None:
        told = to_device(torch.tensor(token_ids, dtype=torch.int32), self.device)
        self.history[row, start : start + len(token_ids)] = told

    # -- drawing -------------------------------------------------------------------------------------------------------

    def sample(
        self,
        logits: Tensor,
        draws: Seq[SampleSpec],
        masks: GrammarBitmask | None = None,
        sampling: SamplingTensors | None = None,
    ) -> SamplerOutput:
        """One token for each row of logits [num_draws, vocab_size] float32, which are changed on the way; from the
        tokens that the mask of its slice allows, where there is one.

        sampling  the draws' parameters, where they are on the device already
        """
        finite = self.ops.finite_rows(logits)
        if logits.is_cuda:  # all is queued before the first look at the device
            logits.masked_fill_(~finite.unsqueeze(1), 0.0)
        elif not bool(finite.all()):
            logits = logits.nan_to_num(0.0, 0.0, 0.0)  # such a row's token is thrown away; the sampler must survive it
        ruled = [(i, rules) for i, draw in enumerate(draws) if (rules := self.rules[draw.setup.row]) is not None]
        wanted = [i for i, rules in ruled if rules.num_logprobs is not None]
        wanted_ids = self._ids(wanted)
        raw = logits[wanted_ids] if wanted else logits  # before anything is done to them
        deciding = [i for i, draw in enumerate(draws) if draw.num_candidates]
        deciding_ids = self._ids(deciding)
        if deciding:  # rules work on log-probabilities here, as in Transformers' beam search
            logits[deciding_ids] = logits[deciding_ids].log_softmax(-1)
        masked: list[int] = []
        if masks is not None:
            which = mask_indices(masks, [draw.slice_index for draw in draws])
            masked = np.flatnonzero(which >= 0).tolist()
            on_device = [to_device(torch.from_numpy(words), self.device) for words in (which, masks.bitmask)]
            self.ops.apply_token_bitmask(logits, *on_device)
        if ruled:
            self.ops.apply_logits_processors(logits, self._gathered(draws, ruled))
        chosen: Tensor = self.ops.sample(logits, sampling or self._tensors(draws))
        self._remember(draws, ruled, chosen)
        # Of draws that tokens are ruled out for, those that all are: then even the one that was sampled is.
        limited = [*masked, *(i for i, rules in ruled if rules.rules_out)]
        rows = self._ids(limited)
        stuck = logits[rows, chosen[rows]] == -torch.inf if limited else finite[:0]
        nums = [draws[i].num_candidates for i in deciding]
        best = logits[deciding_ids].topk(min(max(nums), logits.shape[1])) if deciding else ()
        asked = LogprobsQuery(wanted, [r.num_logprobs for _, r in ruled if r.num_logprobs is not None])
        logprobs = asked.of(raw, chosen[wanted_ids], self.ops)

        tokens, are_fine, are_stuck, *rest = to_lists([chosen, finite, stuck, *best, *logprobs])
        errors = ["" if fine else NOT_FINITE for fine in are_fine]
        for i in itertools.compress(limited, are_stuck):
            errors[i] = errors[i] or NO_ALLOWED_TOKEN
        for i, num, values, ids in zip(deciding, nums, *rest[: len(best)], strict=True) if deciding else ():
            pairs = zip(values[:num], ids[:num], strict=True)
            tokens[i] = [(logprob, token) for logprob, token in pairs if logprob > -torch.inf]
        entries = asked.entries(rest[len(best) :])
        return SamplerOutput(tokens, errors, [entries.get(i) for i in range(len(draws))])

    def _tensors(self, draws: Seq[SampleSpec]) -> SamplingTensors:
        params = [draw.setup.sampling_params for draw in draws]
        return SamplingTensors.from_lists(
            [0.0 if p.greedy else p.temperature for p in params],
            [p.top_k for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            [draw.setup.seed for draw in draws],
            [draw.sample_index for draw in draws],
            [draw.position for draw in draws],
            device=self.device,
        )

    def _remember(self, draws: Seq[SampleSpec], ruled: list[tuple[int, RowLogitsProcessors]], chosen: Tensor) -> None:
        kept = [i for i, rules in ruled if rules.needs_history and draws[i].goes_on]
        if kept:
            rows, positions = [draws[i].setup.row for i in kept], [draws[i].position for i in kept]
            self.history[self._ids(rows), self._ids(positions)] = chosen[self._ids(kept)].int()

    # -- rules ---------------------------------------------------------------------------------------------------------

    def _gathered(self, draws: Seq[SampleSpec], ruled: list[tuple[int, RowLogitsProcessors]]) -> LogitsProcessorParams:
        """The rules of all rows, as the kernels want them."""
        allowed = [(i, r.allowed) for i, r in ruled if r.allowed is not None]
        banned = [(i, r.stops) for i, r in ruled if r.stops is not None and draws[i].position < r.min_length]
        bias = [(i, r.bias) for i, r in ruled if r.bias is not None]
        values = [r.bias_values for _, r in ruled if r.bias_values is not None]
        rules = LogitsProcessorParams(
            allowed_rows=self._ids([i for i, _ in allowed]) if allowed else None,
            allowed_tokens=self._pairs(allowed),
            banned_tokens=self._pairs(banned),
            bias_tokens=self._pairs(bias),
            bias_values=torch.cat(values) if values else None,
        )
        back = [(i, r) for i, r in ruled if r.has_penalties or r.words is not None]
        if back:
            self._look_back(rules, draws, back)
        return rules

    def _look_back(
        self, rules: LogitsProcessorParams, draws: Seq[SampleSpec], back: list[tuple[int, RowLogitsProcessors]]
    ) -> None:
        """The part of the rules that reads the tokens so far."""
        num_tokens = [draws[i].position for i, _ in back]
        rules.history = TokenHistory(
            rows=self._ids([i for i, _ in back]),
            token_ids=self.history[self._ids([draws[i].setup.row for i, _ in back]), : max(num_tokens)],
            num_prompt=self._ids([r.num_prompt for _, r in back]),
            num_tokens=self._ids(num_tokens),
        )
        if any(r.has_penalties for _, r in back):
            penalties = torch.tensor([r.penalties for _, r in back], dtype=torch.float32)
            rules.repetition, rules.presence, rules.frequency = to_device(penalties, self.device).unbind(1)
        words = [(j, r.words) for j, (_, r) in enumerate(back) if r.words is not None]
        if words:
            longest = max(w.shape[1] for _, w in words)
            rules.bad_words = torch.cat([F.pad(w, (longest - w.shape[1], 0), value=-1) for _, w in words])
            rules.bad_word_rows = self._ids([j for j, w in words for _ in range(len(w))])

    def _pairs(self, lists: list[tuple[int, Tensor]]) -> tuple[Tensor, Tensor] | None:
        """(row, token) of every token of every row's list; None without any."""
        if not lists:
            return None
        rows, lengths = self._ids([i for i, _ in lists]), self._ids([len(ids) for _, ids in lists])
        return rows.repeat_interleave(lengths), torch.cat([ids for _, ids in lists])

    def _ids(self, values: Seq[int]) -> Tensor:
        return _ids(values, self.device)

    # -- log-probabilities ---------------------------------------------------------------------------------------------

    def num_prompt_logits(self, row: int, start: int, count: int) -> int:
        """Of how many of the positions from `start` on the logits are wanted, to say how likely the prompt's next token
        was. The prompt's last position has no such token."""
        rules = self.rules[row]
        if rules is None or rules.num_prompt_logprobs is None:
            return 0
        return max(0, min(start + count, rules.num_prompt - 1) - start)

    def prompt_logprobs(self, logits: Tensor, row: int, start: int) -> list[TokenLogprobs]:
        """What the model thought of the prompt's tokens from position start + 1 on; logits [num_positions, vocab_size]
        are those of the positions from `start` on."""
        rules = self.rules[row]
        assert rules is not None and rules.num_prompt_logprobs is not None
        num = len(logits)
        next_ids = self.history[row, start + 1 : start + 1 + num].long()
        asked = LogprobsQuery(range(num), [rules.num_prompt_logprobs] * num)
        return list(asked.entries(to_lists(asked.of(logits, next_ids, self.ops))).values())


class LogprobsQuery:
    """What the model thought, of some lines of logits: of each the token that came, and as many of the likeliest as are
    asked for; -1: all."""

    def __init__(self, names: Seq[int], num_top: Seq[int]) -> None:
        """names: what each line is called."""
        self._names = names
        self._lines = {num: [i for i, n in enumerate(num_top) if n == num] for num in dict.fromkeys(num_top)}

    def of(self, logits: Tensor, token_ids: Tensor, ops: ModuleType) -> list[Tensor]:
        """logits [num_lines, vocab_size], token_ids [num_lines] -> tensors to be fetched."""
        tensors: list[Tensor] = []
        for num, lines in self._lines.items():
            part, ids = logits, token_ids
            if len(self._lines) > 1:
                at = _ids(lines, logits.device)
                part, ids = logits[at], token_ids[at]
            tensors += ops.token_logprobs(part, ids, logits.shape[1] if num < 0 else num)
        return tensors

    def entries(self, to_lists: Seq[list[Any]]) -> dict[int, TokenLogprobs]:
        """By name."""
        found: dict[int, TokenLogprobs] = {}
        for group, lines in enumerate(self._lines.values()):
            for i, *entry in zip(lines, *to_lists[4 * group : 4 * group + 4], strict=True):
                found[self._names[i]] = TokenLogprobs(*entry)
        return dict(sorted(found.items()))


def to_lists(tensors: Seq[Tensor]) -> list[list[Any]]:
    """All of them as lists. A GPU is waited for once."""
    if not any(tensor.is_cuda for tensor in tensors):
        return [tensor.tolist() for tensor in tensors]
    words = torch.cat(
        [(t.double().view(torch.int64) if t.is_floating_point() else t.long()).flatten() for t in tensors]
    )
    parts = torch.split(words.cpu(), [t.numel() for t in tensors])
    return [
        (part.view(torch.float64) if t.is_floating_point() else part).view(t.shape).tolist()
        for t, part in zip(tensors, parts, strict=True)
    ]


def mask_indices(masks: GrammarBitmask, slices: Seq[int]) -> np.ndarray:
    """The mask of each draw, -1 without one: [num_draws] int32. The draws of a slice share one.

    slices   draw -> the slice that it is for
    """
    line_of = {slice_index: line for line, slice_index in enumerate(masks.slices)}
    return np.array([line_of.get(slice_index, -1) for slice_index in slices], dtype=np.int32)


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on a device; on a GPU without waiting for what is queued there."""
    if torch.device(device).type != "cuda":
        return tensor
    if not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _ids(values: Seq[int], device: torch.device | str) -> Tensor:
    return to_device(torch.tensor(values, dtype=torch.int64), device)
