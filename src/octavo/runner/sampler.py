"""From logits to tokens, for the rows of a step that sample: what each request asks of it, in the order agreed on.

    the model's logits -> log-probabilities are taken -> tokens are ruled out: by structured_outputs, allowed_token_ids,
    bad_words, min_tokens -> logit_bias -> penalties -> greedy, or temperature, top_k, top_p, min_p and noise

A request that asks for none of the first three steps pays for none of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.plan import RowSetup, StepPlan, TokenLogprobs
from octavo.engine.executor import Masks
from octavo.kernels.batch import LogitRules, SamplingTensors, TokenHistory

NOT_FINITE = "the model gave numbers that are not finite for this request"
NO_ALLOWED_TOKEN = (
    "no_allowed_token: structured_outputs, allowed_token_ids, bad_words and min_tokens together leave no token that "
    "could come next"
)


class Draw(NamedTuple):
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


class Drawn(NamedTuple):
    """One entry for each draw: its token, what was wrong with it ("" for nothing), and what the model thought."""

    tokens: list[int | Candidates]
    errors: list[str]
    logprobs: list[TokenLogprobs | None]


class RowRules:
    """What a row's request asks beyond noise, temperature and filters, as tensors that are made once.

    words   [num_words, longest] int64, see `LogitRules`; None: no bad words
    stops   what min_tokens rules out; None: nothing
    """

    def __init__(self, setup: RowSetup, device: torch.device | str) -> None:
        params = setup.sampling_params
        self.num_prompt = setup.num_prompt
        self.min_length = setup.num_prompt + params.min_tokens
        self.num_logprobs = 0 if params.logprobs is None and params.ranks else params.logprobs
        has_output = setup.token_ids is not None and len(setup.token_ids) > setup.num_prompt
        self.num_prompt_logprobs = None if has_output else params.prompt_logprobs  # told before the first token was
        self.needs_history = params.needs_history
        self.penalizes = params.penalizes
        self.penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
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
    def of(cls, setup: RowSetup, device: torch.device | str) -> RowRules | None:
        """None for a request that asks for nothing of the kind."""
        p = setup.sampling_params
        asks = p.needs_history or p.logprobs is not None or p.ranks or p.logit_bias or p.min_tokens
        return cls(setup, device) if asks or p.allowed_token_ids is not None else None

    @property
    def rules_out(self) -> bool:
        return self.stops is not None or self.allowed is not None or self.words is not None


class Sampler:
    """Samples for the rows of a runner, and keeps up the tokens of those rows whose sampling looks at them.

    history   [num_rows, max_len] int32, by position, where `RowRules.needs_history`; made when it is first needed
    """

    def __init__(self, num_rows: int, max_len: int, ops: ModuleType, device: torch.device | str = "cpu") -> None:
        self.ops = ops
        self.device = device
        self.rules: list[RowRules | None] = [None] * num_rows
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
            self.rules[setup.row] = RowRules.of(setup, self.device)
            if setup.token_ids is not None:
                self._write(setup.row, 0, setup.token_ids)
        for i, token_ids in plan.host_tokens.items():
            rules = self.rules[plan.rows[i]]
            if rules is not None and rules.needs_history:
                self._write(plan.rows[i], plan.starts[i], token_ids)

    def _write(self, row: int, start: int, token_ids: array[int]) -> None:
        self.history[row, start : start + len(token_ids)] = torch.tensor(token_ids, dtype=torch.int32)

    # -- drawing -------------------------------------------------------------------------------------------------------

    def draw(self, logits: Tensor, draws: Seq[Draw], masks: Masks | None = None) -> Drawn:
        """One token for each row of logits [num_draws, vocab_size] float32, which are changed on the way; from the
        tokens that the mask of its slice allows, where there is one."""
        errors = [""] * len(draws)
        finite = self.ops.finite_rows(logits)
        if not bool(finite.all()):
            logits = logits.nan_to_num(0.0, 0.0, 0.0)  # such a row's token is thrown away; the sampler must survive it
            for i in (~finite).nonzero().flatten().tolist():
                errors[i] = NOT_FINITE
        ruled = [(i, rules) for i, draw in enumerate(draws) if (rules := self.rules[draw.setup.row]) is not None]
        wanted = [i for i, rules in ruled if rules.num_logprobs is not None]
        raw = logits[wanted] if wanted else logits  # before anything is done to them
        deciding = [i for i, draw in enumerate(draws) if draw.num_candidates]
        if deciding:  # rules work on log-probabilities here, as in Transformers' beam search
            logits[deciding] = logits[deciding].log_softmax(-1)
        if masked := _by_draw(masks, draws):
            logits.masked_fill_(self._forbidden(masked, logits.shape), -torch.inf)
        if ruled:
            self.ops.apply_rules(logits, self._gathered(draws, ruled))
        chosen: Tensor = self.ops.sample(logits, self._tensors(draws))
        for i in self._without_token(logits, [*masked, *(i for i, rules in ruled if rules.rules_out)], chosen):
            errors[i] = errors[i] or NO_ALLOWED_TOKEN
        self._remember(draws, ruled, chosen)
        logprobs: list[TokenLogprobs | None] = [None] * len(draws)
        if wanted:
            nums = [rules.num_logprobs for _, rules in ruled if rules.num_logprobs is not None]
            for i, entry in zip(wanted, self._logprobs(raw, chosen[wanted], nums), strict=True):
                logprobs[i] = entry
        tokens: list[int | Candidates] = chosen.tolist()
        for i in deciding:
            tokens[i] = _candidates(logits[i], draws[i].num_candidates)
        return Drawn(tokens, errors, logprobs)

    def _tensors(self, draws: Seq[Draw]) -> SamplingTensors:
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

    def _forbidden(self, masked: dict[int, bytes | bytearray], shape: torch.Size) -> Tensor:
        """[num_draws, vocab_size] bool, from the masks of some of the draws."""
        words = np.frombuffer(b"".join(masked.values()), dtype=np.uint8).reshape(len(masked), -1)
        forbidden = np.unpackbits(~words, axis=1, count=shape[1], bitorder="little").view(np.bool_)
        if len(masked) < shape[0]:
            some, forbidden = forbidden, np.zeros(shape, dtype=np.bool_)
            forbidden[list(masked)] = some
        return torch.from_numpy(forbidden).to(self.device)

    def _without_token(self, logits: Tensor, limited: list[int], chosen: Tensor) -> list[int]:
        """Of the draws that tokens are ruled out for, those that all are: then even the one that was sampled is."""
        rows = self._ids(limited)
        stuck: list[int] = rows[logits[rows, chosen[rows]] == -torch.inf].tolist() if limited else []
        return stuck

    def _remember(self, draws: Seq[Draw], ruled: list[tuple[int, RowRules]], chosen: Tensor) -> None:
        kept = [i for i, rules in ruled if rules.needs_history and draws[i].goes_on]
        if kept:
            rows, positions = [draws[i].setup.row for i in kept], [draws[i].position for i in kept]
            self.history[self._ids(rows), self._ids(positions)] = chosen[self._ids(kept)].int()

    # -- rules ---------------------------------------------------------------------------------------------------------

    def _gathered(self, draws: Seq[Draw], ruled: list[tuple[int, RowRules]]) -> LogitRules:
        """The rules of all rows, as the kernels want them."""
        allowed = [(i, r.allowed) for i, r in ruled if r.allowed is not None]
        banned = [(i, r.stops) for i, r in ruled if r.stops is not None and draws[i].position < r.min_length]
        bias = [(i, r.bias) for i, r in ruled if r.bias is not None]
        values = [r.bias_values for _, r in ruled if r.bias_values is not None]
        rules = LogitRules(
            limited=self._ids([i for i, _ in allowed]) if allowed else None,
            allowed=self._pairs(allowed),
            banned=self._pairs(banned),
            bias=self._pairs(bias),
            bias_values=torch.cat(values) if values else None,
        )
        back = [(i, r) for i, r in ruled if r.penalizes or r.words is not None]
        if back:
            self._look_back(rules, draws, back)
        return rules

    def _look_back(self, rules: LogitRules, draws: Seq[Draw], back: list[tuple[int, RowRules]]) -> None:
        """The part of the rules that reads the tokens so far."""
        num_tokens = [draws[i].position for i, _ in back]
        rules.history = TokenHistory(
            rows=self._ids([i for i, _ in back]),
            token_ids=self.history[self._ids([draws[i].setup.row for i, _ in back]), : max(num_tokens)],
            num_prompt=self._ids([r.num_prompt for _, r in back]),
            num_tokens=self._ids(num_tokens),
        )
        if any(r.penalizes for _, r in back):
            rules.repetition, rules.presence, rules.frequency = torch.tensor(
                [r.penalties for _, r in back], dtype=torch.float32, device=self.device
            ).unbind(1)
        words = [(j, r.words) for j, (_, r) in enumerate(back) if r.words is not None]
        if words:
            longest = max(w.shape[1] for _, w in words)
            rules.words = torch.cat([F.pad(w, (longest - w.shape[1], 0), value=-1) for _, w in words])
            rules.word_rows = self._ids([j for j, w in words for _ in range(len(w))])

    def _pairs(self, lists: list[tuple[int, Tensor]]) -> tuple[Tensor, Tensor] | None:
        """(row, token) of every token of every row's list; None without any."""
        if not lists:
            return None
        rows, lengths = self._ids([i for i, _ in lists]), self._ids([len(ids) for _, ids in lists])
        return rows.repeat_interleave(lengths), torch.cat([ids for _, ids in lists])

    def _ids(self, values: Seq[int]) -> Tensor:
        return _ids(values, self.device)

    # -- log-probabilities ---------------------------------------------------------------------------------------------

    def prompt_logits_wanted(self, row: int, start: int, count: int) -> int:
        """Of how many of the positions from `start` on the logits are wanted, to say how likely the prompt's next token
        was. The prompt's last position has no such token."""
        rules = self.rules[row]
        if rules is None or rules.num_prompt_logprobs is None:
            return 0
        return max(0, min(start + count, rules.num_prompt - 1) - start)

    def read_prompt(self, logits: Tensor, row: int, start: int) -> list[TokenLogprobs]:
        """What the model thought of the prompt's tokens from position start + 1 on; logits [num_positions, vocab_size]
        are those of the positions from `start` on."""
        rules = self.rules[row]
        assert rules is not None and rules.num_prompt_logprobs is not None
        num = len(logits)
        next_ids = self.history[row, start + 1 : start + 1 + num].long()
        return list(self._logprobs(logits, next_ids, [rules.num_prompt_logprobs] * num))

    def _logprobs(self, logits: Tensor, token_ids: Tensor, num_top: Seq[int]) -> Iterable[TokenLogprobs]:
        """One entry for each row of logits, with as many of the likeliest tokens as the row asks for; -1: all."""
        entries: list[TokenLogprobs | None] = [None] * len(num_top)
        for num in dict.fromkeys(num_top):
            mine = [i for i, n in enumerate(num_top) if n == num]
            alike = len(mine) == len(num_top)
            part, ids = (logits, token_ids) if alike else (logits[mine], token_ids[mine])
            found = self.ops.token_logprobs(part, ids, logits.shape[1] if num < 0 else num)
            for i, *entry in zip(mine, *(x.tolist() for x in found), strict=True):
                entries[i] = TokenLogprobs(*entry)
        return (entry for entry in entries if entry is not None)


def _by_draw(masks: Masks | None, draws: Seq[Draw]) -> dict[int, bytes | bytearray]:
    """The draws of a slice share its mask."""
    return {i: masks[draw.slice_index] for i, draw in enumerate(draws) if draw.slice_index in masks} if masks else {}


def _candidates(logprobs: Tensor, num: int) -> Candidates:
    best = logprobs.topk(min(num, len(logprobs)))
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [(logprob, token) for logprob, token in pairs if logprob > -torch.inf]


def _ids(values: Seq[int], device: torch.device | str) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
