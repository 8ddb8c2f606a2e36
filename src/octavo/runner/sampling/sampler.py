"""Samples tokens from logits: logits processors, then temperature, filters and noise.

    logits -> log-probabilities are computed -> tokens are masked: by structured_outputs, allowed_token_ids, bad_words,
    min_tokens -> logit_bias -> penalties -> greedy, or temperature, top_k, top_p, min_p and noise

Requests that use none of the first three steps do not pay for them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import RowSetup, TokenLogprobs
from octavo.engine.executor import GrammarBitmask
from octavo.kernels.metadata import SamplingTensors
from octavo.kernels.reference import check_tokens, mask_bad_words
from octavo.runner.sampling.logits_state import LogitsProcessors, RowLogitsProcessors
from octavo.runner.sampling.logprobs import LogprobsQuery

NOT_FINITE = "the model gave numbers that are not finite for this request"
NO_ALLOWED_TOKEN = (
    "no_allowed_token: structured_outputs, allowed_token_ids, bad_words and min_tokens together leave no token that "
    "could come next"
)
MAX_COMPARED = 1 << 24
"""Tokens of bad words that are compared at once: memory of one byte each."""
ERRORS = {-1: NOT_FINITE, -2: NO_ALLOWED_TOKEN}  # see `reference.sample_checked`


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


class Sampler:
    """Samples on the host, for requests that need more than the device keeps of a row."""

    def __init__(self, processors: LogitsProcessors) -> None:
        self.processors = processors
        self.platform = processors.platform

    # -- sampling ------------------------------------------------------------------------------------------------------

    def sample(
        self,
        logits: Tensor,
        samples: Seq[SampleSpec],
        rows: Tensor,
        sampling: SamplingTensors,
        bitmask: GrammarBitmask | None = None,
    ) -> SamplerOutput:
        """Sample one token for each row of logits [num_samples, vocab_size] float32, which are changed in place.

        rows, sampling  of each sample, on the device
        bitmask         allowed tokens of some slices
        """
        finite = self.processors.clear_non_finite(logits)
        active = [(i, p) for i, sample in enumerate(samples) if (p := self.processors.of_row[sample.setup.row])]
        with_logprobs = [i for i, p in active if p.num_logprobs is not None]
        logprob_ids = self._ids(with_logprobs)
        raw = logits[logprob_ids] if with_logprobs else logits  # before any logits processor
        beams = [i for i, sample in enumerate(samples) if sample.num_candidates]
        beam_ids = self._ids(beams)
        if beams:  # processors change log-probabilities here, as in Transformers' beam search
            logits[beam_ids] = logits[beam_ids].log_softmax(-1)
        self._process_on_host(logits, samples, active)
        self._mask_bad_words(logits, rows, sampling.position, active)
        masks = None
        if bitmask is not None:
            arrays = mask_indices(bitmask, [sample.slice_index for sample in samples]), bitmask.bitmask
            index, words = (self.platform.to_device(torch.from_numpy(array)) for array in arrays)
            masks = index, words
        self.processors.process(logits, rows, sampling.position, masks)
        chosen = self.processors.ops.sample(logits, sampling)
        checked = check_tokens(chosen, logits, finite)
        nums = [samples[i].num_candidates for i in beams]
        top = logits[beam_ids].topk(min(max(nums), logits.shape[1])) if beams else ()
        query = LogprobsQuery(with_logprobs, [p.num_logprobs for _, p in active if p.num_logprobs is not None])
        logprobs = query.compute(raw, chosen[logprob_ids], self.platform)

        tokens, codes, *rest = self.platform.to_lists([chosen, checked, *top, *logprobs])
        errors = [ERRORS.get(code, "") for code in codes]
        for i, num, values, ids in zip(beams, nums, *rest[: len(top)], strict=True) if beams else ():
            pairs = zip(values[:num], ids[:num], strict=True)
            tokens[i] = [(logprob, token) for logprob, token in pairs if logprob > -torch.inf]
        entries = query.entries(rest[len(top) :])
        return SamplerOutput(tokens, errors, [entries.get(i) for i in range(len(samples))])

    def _process_on_host(
        self, logits: Tensor, samples: Seq[SampleSpec], active: list[tuple[int, RowLogitsProcessors]]
    ) -> None:
        """Apply what `LogitsProcessorState` does not hold, before the rest: penalties come after biases."""
        for i, p in active:
            line, position = logits[i], samples[i].position
            if p.large_bias and p.bias_ids is not None and p.bias_values is not None:
                line[p.bias_ids] += p.bias_values
            if p.many_stop_ids and p.stop_ids is not None and position < p.min_length:
                line[p.stop_ids] = -torch.inf

    def _mask_bad_words(
        self, logits: Tensor, rows: Tensor, position: Tensor, active: list[tuple[int, RowLogitsProcessors]]
    ) -> None:
        """Samples with the same words, such as those of one request, are masked together."""
        lines_of: dict[Tensor, list[int]] = {}
        for i, p in active:
            if p.bad_words is not None:
                lines_of.setdefault(p.bad_words, []).append(i)
        for words, all_lines in lines_of.items():
            for lines in self._ids(all_lines).split(max(1, MAX_COMPARED // words.numel())):  # type: ignore[no-untyped-call]
                last = self.processors.last_tokens(rows[lines], position[lines], words.shape[1] - 1)
                mask_bad_words(logits, lines, words, last)

    def _ids(self, values: Seq[int]) -> Tensor:
        return self.platform.index_tensor(values)

    # -- prompt log-probabilities --------------------------------------------------------------------------------------

    def num_prompt_logits(self, row: int, start: int, count: int) -> int:
        """How many of `count` positions from `start` need logits for prompt log-probabilities. The last prompt position
        does not: no prompt token follows it."""
        processors = self.processors.of_row[row]
        if processors is None or processors.num_prompt_logprobs is None:
            return 0
        return max(0, min(start + count, processors.num_prompt - 1) - start)

    def prompt_logprobs(self, logits: Tensor, row: int, start: int) -> list[TokenLogprobs]:
        """Log-probabilities of the prompt's tokens from position start + 1 on.

        logits   [num_positions, vocab_size], of the positions from `start` on
        """
        processors = self.processors.of_row[row]
        assert processors is not None and processors.num_prompt_logprobs is not None
        num = len(logits)
        next_ids = self.processors.history[row, start + 1 : start + 1 + num].long()
        query = LogprobsQuery(range(num), [processors.num_prompt_logprobs] * num)
        return list(query.entries(self.platform.to_lists(query.compute(logits, next_ids, self.platform))).values())


def mask_indices(bitmask: GrammarBitmask, slices: Seq[int], depths: np.ndarray | None = None) -> np.ndarray:
    """Each sample's mask in the bitmask, -1 for none: [num_samples] int32. All samples of a slice share one mask.

    slices   the slice of each sample
    depths   [num_samples], drafts before each. Then the samples of a slice have a mask each
    """
    masks = bitmask.first_masks()
    index = np.array([masks.get(slice_index, -1) for slice_index in slices], dtype=np.int32)
    return index if depths is None else np.where(index < 0, -1, index + depths)
