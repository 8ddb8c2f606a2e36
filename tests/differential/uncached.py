"""Generation without a KV cache: Transformers computes the whole sequence for each token, and each logits processor is
a loop over tokens. Tests compare the engine with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo import SamplingParams
from octavo.kernels import reference
from octavo.kernels.metadata import SamplingTensors

MARGIN = 1e-5
"""Minimum distance of the top two logits: smaller distances could be rounding errors."""

TopLogprobs = list[tuple[int, float]]
"""Top tokens and their log-probabilities, best first."""


@dataclass
class GeneratedSample:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, int, TopLogprobs]] = field(default_factory=list)  # log-probability, rank, top tokens
    finish_reason: str = "length"
    stop_reason: int | None = None


class UncachedModel:
    """Transformers' model without a KV cache. Logits of a sequence are computed once and kept."""

    def __init__(self, path: Path, **kwargs: Any) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **kwargs)
        self._known: dict[tuple[int, ...], Tensor] = {}

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits of all positions, [num_tokens, vocab_size]."""
        key = tuple(token_ids)
        if key not in self._known:
            self._known[key] = self.model(torch.tensor([key])).logits[0]
        return self._known[key]

    def prompt_logprobs(self, prompt: list[int], num_top: int) -> list[tuple[float, int, TopLogprobs]]:
        logits = self.logits(prompt)
        return [expected_logprobs(logits[i - 1], prompt[i], num_top) for i in range(1, len(prompt))]

    def generate(
        self, prompt: list[int], params: SamplingParams, *, eos: Sequence[int] = (), sample_index: int = 0
    ) -> GeneratedSample:
        """One sample, without stop strings. Raises `AssertionError` on a near-tie of greedy tokens."""
        sample = GeneratedSample()
        stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(eos))
        for _ in range(params.max_tokens or 0):
            tokens = prompt + sample.token_ids
            raw = self.logits(tokens)[-1]
            logits = torch.tensor(processed_logits(raw.tolist(), prompt, sample.token_ids, params, stops))
            token = sample_token(logits, params, sample_index, len(tokens))
            sample.token_ids.append(token)
            if params.logprobs is not None:
                sample.logprobs.append(expected_logprobs(raw, token, params.logprobs))
            if token in stops:
                sample.finish_reason = "stop"
                sample.stop_reason = token if token in (params.stop_token_ids or ()) else None
                break
        return sample


def expected_logprobs(logits: Tensor, token: int, num_top: int) -> tuple[float, int, TopLogprobs]:
    """(log-probability, rank, top tokens) of a token; num_top -1: all tokens."""
    logprobs = logits.double().log_softmax(-1).tolist()
    order = sorted(range(len(logprobs)), key=lambda t: (-logprobs[t], t))
    rank = 1 + sum(p > logprobs[token] for p in logprobs)
    return logprobs[token], rank, [(t, logprobs[t]) for t in (order if num_top < 0 else order[:num_top])]


def processed_logits(
    logits: list[float], prompt: list[int], output: list[int], params: SamplingParams, stops: set[int]
) -> list[float]:
    """Logits after the logits processors, in their documented order."""
    tokens = prompt + output
    if params.allowed_token_ids is not None:
        logits = [x if t in params.allowed_token_ids else -math.inf for t, x in enumerate(logits)]
    for word in params.bad_words_token_ids or ():
        before = list(word[:-1])
        if not before or tokens[-len(before) :] == before:
            logits[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for t in stops:
            logits[t] = -math.inf
    for t, bias in (params.logit_bias or {}).items():
        logits[t] += bias
    for t in set(tokens):
        logits[t] = logits[t] / params.repetition_penalty if logits[t] > 0 else logits[t] * params.repetition_penalty
    for t in set(output):
        logits[t] -= params.frequency_penalty * output.count(t)
        logits[t] -= params.presence_penalty
    return logits


def sample_token(logits: Tensor, params: SamplingParams, sample_index: int, position: int) -> int:
    if params.greedy:
        best = logits.topk(2)
        assert best.values[0] - best.values[1] > MARGIN, "near-tie"
        return int(best.indices[0])
    assert params.seed is not None
    tensors = SamplingTensors.from_lists(
        [params.temperature],
        [params.top_k],
        [params.top_p],
        [params.min_p],
        [params.seed],
        [sample_index],
        [position],
    )
    return int(reference.sample(logits.unsqueeze(0), tensors))
