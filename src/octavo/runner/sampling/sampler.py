"""Samples tokens from logits: logits processors, then temperature, filters and noise.

    logits -> log-probabilities are computed -> tokens are masked: by structured_outputs, allowed_token_ids, bad_words,
    min_tokens -> logit_bias -> penalties -> greedy, or temperature, top_k, top_p, min_p and noise

Requests that use none of the first three steps do not pay for them.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.plan import RowSetup, StepPlan, TokenLogprobs
from octavo.engine.executor import GrammarBitmask
from octavo.kernels.metadata import LogitsProcessorParams, SamplingTensors, TokenHistory
from octavo.runner.platform import Platform
from octavo.runner.sampling.logprobs import LogprobsQuery

NOT_FINITE = "the model gave numbers that are not finite for this request"
NO_ALLOWED_TOKEN = (
    "no_allowed_token: structured_outputs, allowed_token_ids, bad_words and min_tokens together leave no token that "
    "could come next"
)


class SampleSpec(NamedTuple):
    """One token to sample.

    sample_index    index among the samples of its request
    position        position of the sampled token
    continues_row   the token becomes the row's last token; False for one of several samples
    num_candidates  beam search: return this many top tokens instead of sampling
    """

    slice_index: int
    setup: RowSetup
    sample_index: int
    position: int
    continues_row: bool = True
    num_candidates: int = 0


BeamCandidates = list[tuple[float, int]]
"""(log-probability, token), best first; fewer if the logits processors leave fewer."""


class SamplerOutput(NamedTuple):
    """Per sample: the token or beam candidates, an error message or "", and log-probabilities."""

    tokens: list[int | BeamCandidates]
    errors: list[str]
    logprobs: list[TokenLogprobs | None]


class RowLogitsProcessors:
    """Logits processors and log-probabilities of one row's request, as tensors that are made once.

    bad_words  [num_words, max_word_len] int64, see `LogitsProcessorParams`; None: no bad words
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
        self.allowed = None if params.allowed_token_ids is None else platform.index_tensor(params.allowed_token_ids)
        has_stops = params.min_tokens and setup.stop_ids
        self.stop_ids = platform.index_tensor(sorted(setup.stop_ids)) if has_stops else None
        self.bad_words = self.bias_ids = self.bias_values = None
        if words := params.bad_words_token_ids:
            longest = max(map(len, words))
            padded = [(*[-1] * (longest - len(w)), *w) for w in words]
            self.bad_words = torch.tensor(padded, device=platform.device)
        if bias := params.logit_bias:
            self.bias_ids = platform.index_tensor(list(bias))
            self.bias_values = torch.tensor(list(bias.values()), dtype=torch.float32, device=platform.device)

    @classmethod
    def of(cls, setup: RowSetup, platform: Platform) -> RowLogitsProcessors | None:
        """None for a request that uses none of them."""
        p = setup.sampling_params
        is_used = p.needs_history or p.logprobs is not None or p.selects_best_of or p.logit_bias or p.min_tokens
        return cls(setup, platform) if is_used or p.allowed_token_ids is not None else None

    @property
    def masks_tokens(self) -> bool:
        return self.stop_ids is not None or self.allowed is not None or self.bad_words is not None


ActiveProcessors = list[tuple[int, RowLogitsProcessors]]
"""(index of the sample, its row's processors), for samples that use any."""


class Sampler:
    """Samples for the rows of a runner, and keeps the token history of rows whose sampling needs it.

    history   [num_rows, max_len] int32, by position, where `RowLogitsProcessors.needs_history`; allocated on first use
    """

    def __init__(self, num_rows: int, max_len: int, platform: Platform) -> None:
        self.platform = platform
        self.ops = platform.ops
        self.processors: list[RowLogitsProcessors | None] = [None] * num_rows
        self._history_shape = (num_rows, max_len)
        self._history: Tensor | None = None

    @property
    def history(self) -> Tensor:
        if self._history is None:
            self._history = self.platform.zeros(self._history_shape, torch.int32)
        return self._history

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's row setups, and add its host tokens to the history."""
        for setup in plan.row_setups:
            self.processors[setup.row] = RowLogitsProcessors.of(setup, self.platform)
            if setup.token_ids is not None:
                self._write_history(setup.row, 0, setup.token_ids)
        for i, token_ids in plan.host_tokens.items():
            processors = self.processors[plan.rows[i]]
            if processors is not None and processors.needs_history:
                self._write_history(plan.rows[i], plan.starts[i], token_ids)

    def _write_history(self, row: int, start: int, token_ids: array[int]) -> None:
        tokens = self.platform.to_device(torch.tensor(token_ids, dtype=torch.int32))
        self.history[row, start : start + len(token_ids)] = tokens

    # -- sampling ------------------------------------------------------------------------------------------------------

    def sample(
        self,
        logits: Tensor,
        samples: Seq[SampleSpec],
        bitmask: GrammarBitmask | None = None,
        sampling: SamplingTensors | None = None,
    ) -> SamplerOutput:
        """Sample one token for each row of logits [num_samples, vocab_size] float32, which are changed in place.

        bitmask   allowed tokens of some slices
        sampling  sampling parameters that are already on the device
        """
        finite = self.ops.finite_rows(logits)
        if not self.platform.is_host:  # queue all work before the first wait for the device
            logits.masked_fill_(~finite.unsqueeze(1), 0.0)
        elif not bool(finite.all()):
            logits = logits.nan_to_num(0.0, 0.0, 0.0)  # the token of such a row is dropped, but sampling must not fail
        active = [(i, p) for i, sample in enumerate(samples) if (p := self.processors[sample.setup.row]) is not None]
        with_logprobs = [i for i, p in active if p.num_logprobs is not None]
        logprob_ids = self._ids(with_logprobs)
        raw = logits[logprob_ids] if with_logprobs else logits  # before any logits processor
        beams = [i for i, sample in enumerate(samples) if sample.num_candidates]
        beam_ids = self._ids(beams)
        if beams:  # processors change log-probabilities here, as in Transformers' beam search
            logits[beam_ids] = logits[beam_ids].log_softmax(-1)
        in_grammar: list[int] = []
        if bitmask is not None:
            mask_index = mask_indices(bitmask, [sample.slice_index for sample in samples])
            in_grammar = np.flatnonzero(mask_index >= 0).tolist()
            arrays = [self.platform.to_device(torch.from_numpy(array)) for array in (mask_index, bitmask.bitmask)]
            self.ops.apply_token_bitmask(logits, *arrays)
        if active:
            self.ops.apply_logits_processors(logits, self._processor_params(samples, active))
        chosen: Tensor = self.ops.sample(logits, sampling or self._sampling_tensors(samples))
        self._append_history(samples, active, chosen)
        # If every token of a row is masked, the sampled one is masked, too.
        masked = [*in_grammar, *(i for i, p in active if p.masks_tokens)]
        rows = self._ids(masked)
        all_masked = logits[rows, chosen[rows]] == -torch.inf if masked else finite[:0]
        nums = [samples[i].num_candidates for i in beams]
        top = logits[beam_ids].topk(min(max(nums), logits.shape[1])) if beams else ()
        query = LogprobsQuery(with_logprobs, [p.num_logprobs for _, p in active if p.num_logprobs is not None])
        logprobs = query.compute(raw, chosen[logprob_ids], self.platform)

        tokens, are_finite, are_masked, *rest = self.platform.to_lists([chosen, finite, all_masked, *top, *logprobs])
        errors = ["" if is_finite else NOT_FINITE for is_finite in are_finite]
        for i in itertools.compress(masked, are_masked):
            errors[i] = errors[i] or NO_ALLOWED_TOKEN
        for i, num, values, ids in zip(beams, nums, *rest[: len(top)], strict=True) if beams else ():
            pairs = zip(values[:num], ids[:num], strict=True)
            tokens[i] = [(logprob, token) for logprob, token in pairs if logprob > -torch.inf]
        entries = query.entries(rest[len(top) :])
        return SamplerOutput(tokens, errors, [entries.get(i) for i in range(len(samples))])

    def _sampling_tensors(self, samples: Seq[SampleSpec]) -> SamplingTensors:
        params = [sample.setup.sampling_params for sample in samples]
        return SamplingTensors.from_lists(
            [0.0 if p.greedy else p.temperature for p in params],
            [p.top_k for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            [sample.setup.seed for sample in samples],
            [sample.sample_index for sample in samples],
            [sample.position for sample in samples],
            device=self.platform.device,
        )

    def _append_history(self, samples: Seq[SampleSpec], active: ActiveProcessors, chosen: Tensor) -> None:
        indices = [i for i, p in active if p.needs_history and samples[i].continues_row]
        if indices:
            rows, positions = [samples[i].setup.row for i in indices], [samples[i].position for i in indices]
            self.history[self._ids(rows), self._ids(positions)] = chosen[self._ids(indices)].int()

    # -- logits processors ---------------------------------------------------------------------------------------------

    def _processor_params(self, samples: Seq[SampleSpec], active: ActiveProcessors) -> LogitsProcessorParams:
        """The logits processors of all rows, as the kernels take them."""
        allowed = [(i, p.allowed) for i, p in active if p.allowed is not None]
        banned = [(i, p.stop_ids) for i, p in active if p.stop_ids is not None and samples[i].position < p.min_length]
        bias = [(i, p.bias_ids) for i, p in active if p.bias_ids is not None]
        values = [p.bias_values for _, p in active if p.bias_values is not None]
        params = LogitsProcessorParams(
            allowed_rows=self._ids([i for i, _ in allowed]) if allowed else None,
            allowed_tokens=self._pairs(allowed),
            banned_tokens=self._pairs(banned),
            bias_tokens=self._pairs(bias),
            bias_values=torch.cat(values) if values else None,
        )
        with_history = [(i, p) for i, p in active if p.has_penalties or p.bad_words is not None]
        if with_history:
            self._add_history(params, samples, with_history)
        return params

    def _add_history(self, params: LogitsProcessorParams, samples: Seq[SampleSpec], active: ActiveProcessors) -> None:
        """Add the token history, and the processors that read it: penalties and bad words."""
        num_tokens = [samples[i].position for i, _ in active]
        params.history = TokenHistory(
            rows=self._ids([i for i, _ in active]),
            token_ids=self.history[self._ids([samples[i].setup.row for i, _ in active]), : max(num_tokens)],
            num_prompt=self._ids([p.num_prompt for _, p in active]),
            num_tokens=self._ids(num_tokens),
        )
        if any(p.has_penalties for _, p in active):
            penalties = torch.tensor([p.penalties for _, p in active], dtype=torch.float32)
            params.repetition, params.presence, params.frequency = self.platform.to_device(penalties).unbind(1)
        words = [(j, p.bad_words) for j, (_, p) in enumerate(active) if p.bad_words is not None]
        if words:
            longest = max(w.shape[1] for _, w in words)
            params.bad_words = torch.cat([F.pad(w, (longest - w.shape[1], 0), value=-1) for _, w in words])
            params.bad_word_rows = self._ids([j for j, w in words for _ in range(len(w))])

    def _pairs(self, lists: list[tuple[int, Tensor]]) -> tuple[Tensor, Tensor] | None:
        """(row, token) of every token in every row's list; None if there are no lists."""
        if not lists:
            return None
        rows, lengths = self._ids([i for i, _ in lists]), self._ids([len(ids) for _, ids in lists])
        return rows.repeat_interleave(lengths), torch.cat([ids for _, ids in lists])

    def _ids(self, values: Seq[int]) -> Tensor:
        return self.platform.index_tensor(values)

    # -- prompt log-probabilities --------------------------------------------------------------------------------------

    def num_prompt_logits(self, row: int, start: int, count: int) -> int:
        """How many of `count` positions from `start` need logits for prompt log-probabilities. The last prompt position
        does not: no prompt token follows it."""
        processors = self.processors[row]
        if processors is None or processors.num_prompt_logprobs is None:
            return 0
        return max(0, min(start + count, processors.num_prompt - 1) - start)

    def prompt_logprobs(self, logits: Tensor, row: int, start: int) -> list[TokenLogprobs]:
        """Log-probabilities of the prompt's tokens from position start + 1 on.

        logits   [num_positions, vocab_size], of the positions from `start` on
        """
        processors = self.processors[row]
        assert processors is not None and processors.num_prompt_logprobs is not None
        num = len(logits)
        next_ids = self.history[row, start + 1 : start + 1 + num].long()
        query = LogprobsQuery(range(num), [processors.num_prompt_logprobs] * num)
        return list(query.entries(self.platform.to_lists(query.compute(logits, next_ids, self.platform))).values())


def mask_indices(bitmask: GrammarBitmask, slices: Seq[int]) -> np.ndarray:
    """Each sample's line in the bitmask, -1 for none: [num_samples] int32. All samples of a slice share one line.

    slices   the slice of each sample
    """
    line_of = {slice_index: line for line, slice_index in enumerate(bitmask.slices)}
    return np.array([line_of.get(slice_index, -1) for slice_index in slices], dtype=np.int32)
