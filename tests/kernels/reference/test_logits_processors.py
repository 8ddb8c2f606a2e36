"""Logits processors and log-probabilities of the reference and the CPU, against Transformers' processors."""

from __future__ import annotations

import math
import random
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.cpu.sampling import NUM_CANDIDATES
from octavo.kernels.row_state import (
    FIRST_STOP_ID,
    LOGIT_BIAS,
    MIN_TOKENS,
    PENALTIES,
    LogitsProcessorState,
    RowState,
)
from octavo.runner.sampling.logits_state import pack_bitmask
from tests.kernels.pool import BOTH, settings_of

VOCAB = 300


class Rows:
    """Rows with their tokens, as the model runner keeps them: line i of the logits belongs to row i."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        history = torch.zeros(num_rows + 1, 100, dtype=torch.int32)
        self.state = RowState.empty(num_rows, 1, "cpu")
        self.processors = LogitsProcessorState.empty(num_rows, vocab_size, history)
        self.processors.bias_ids.fill_(-1)
        self.positions = torch.zeros(num_rows, dtype=torch.int64)
        self.tokens: dict[int, list[int]] = {}

    def penalize(self, row: int, tokens: list[int], num_prompt: int, penalties: tuple[float, float, float]) -> None:
        """penalties: repetition, presence, frequency."""
        self.processors.enabled[row] = PENALTIES
        self.processors.num_prompt[row] = num_prompt
        self.processors.penalties[row] = torch.tensor(penalties)
        self.positions[row] = len(tokens)
        self.tokens[row] = tokens

    def apply(self, ops: ModuleType, logits: Tensor) -> None:
        for row, tokens in self.tokens.items():
            begins = torch.tensor([0, len(tokens)])
            ops.init_token_counts(self.processors, torch.tensor([row]), torch.tensor([0]), begins, torch.tensor(tokens))
        rows = torch.arange(len(logits))
        ops.apply_row_logits_processors(logits, rows, self.positions, self.state, self.processors)


def random_sequences(rng: random.Random, num: int) -> list[list[int]]:
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 40))] * rng.randint(1, 2) for _ in range(num)]


def processed(processor: Any, sequences: list[list[int]], logits: Tensor) -> Tensor:
    """Logits after a processor of Transformers, one sequence at a time."""
    rows = [processor(torch.tensor([t]), logits[i : i + 1].clone()) for i, t in enumerate(sequences)]
    return torch.cat(rows)


@BOTH
@pytest.mark.parametrize("penalty", [0.5, 1.3, 7.0])
def test_repetition_penalty_equals_transformers(ops: ModuleType, penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = random.Random(1)
    sequences = random_sequences(rng, 6)
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(2)) * 4
    logits[0, sequences[0][0]] = -math.inf
    wanted = processed(RepetitionPenaltyLogitsProcessor(penalty), sequences, logits)
    rows = Rows(6, VOCAB)
    for row, tokens in enumerate(sequences):
        rows.penalize(row, tokens, rng.randint(1, len(tokens)), (penalty, 0.0, 0.0))
    rows.apply(ops, logits)
    assert torch.equal(logits, wanted)


@BOTH
def test_presence_and_frequency_penalties_count_output_tokens(ops: ModuleType) -> None:
    logits = torch.zeros(3, VOCAB)
    rows = Rows(3, VOCAB)
    rows.penalize(2, [5, 6, 7, 5, 5, 8], 2, (1.0, 0.5, 0.25))
    rows.penalize(0, [9, 9], 2, (1.0, 0.5, -1.0))
    rows.apply(ops, logits)
    assert {t: float(logits[2, t]) for t in (5, 6, 7, 8, 9, 13)} == {5: -1.0, 6: 0.0, 7: -0.75, 8: -0.75, 9: 0, 13: 0}
    assert not logits[:2].any()  # the second row has no output yet, and the row between has no processors


@BOTH
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_penalties_equal_a_loop_over_tokens(ops: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    num = rng.randint(1, 5)
    sequences = [[rng.randrange(9) for _ in range(rng.randint(1, 12))] for _ in range(num)]
    prompts = [rng.randint(1, len(s)) for s in sequences]
    rows = rng.sample(range(7), num)
    repetition, presence, frequency = ([rng.choice([0.25, 1.0, 2.0]) for _ in range(num)] for _ in range(3))
    logits = torch.randn(7, 9, generator=torch.Generator().manual_seed(seed)) * 4
    wanted = logits.tolist()
    for i, tokens in enumerate(sequences):
        row, output = wanted[rows[i]], tokens[prompts[i] :]
        for t in set(tokens):
            row[t] = row[t] / repetition[i] if row[t] > 0 else row[t] * repetition[i]
        for t in set(output):
            row[t] -= frequency[i] * output.count(t) + presence[i]
    state = Rows(7, 9)
    for i, tokens in enumerate(sequences):
        state.penalize(rows[i], tokens, prompts[i], (repetition[i], presence[i], frequency[i]))
    state.apply(ops, logits)
    torch.testing.assert_close(logits, torch.tensor(wanted), rtol=1e-6, atol=1e-6)


def test_bad_words_equal_transformers() -> None:
    """Words of one or several tokens, across prompt and output, some longer than the sequence."""
    from transformers import NoBadWordsLogitsProcessor

    rng = random.Random(5)
    sequences = [[rng.randrange(6) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    words = [
        [[rng.randrange(6) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 9))] for _ in sequences
    ]
    words[0] = [[1, 2, 3, 4, 5] * 9]
    words[1] = [[*sequences[1], 4]]
    logits = torch.randn(12, 6)
    wanted = torch.cat(
        [
            processed(NoBadWordsLogitsProcessor([*map(list, {tuple(w) for w in bad})]), [tokens], logits[i : i + 1])
            for i, (tokens, bad) in enumerate(zip(sequences, words, strict=True))
        ]
    )
    for line, (tokens, bad) in enumerate(zip(sequences, words, strict=True)):
        longest = max(map(len, bad))
        padded = torch.tensor([[-1] * (longest - len(w)) + w for w in bad])
        last = torch.tensor([([-2] * longest + tokens)[len(tokens) + 1 :]], dtype=torch.int32)
        reference.mask_bad_words(logits, torch.tensor([line]), padded, last)
    assert torch.equal(logits, wanted)
    assert wanted[1, 4] == -math.inf and (wanted == -math.inf).sum() > 12


def test_bad_words_of_several_sequences_at_once() -> None:
    logits = torch.zeros(4, 6)
    words = torch.tensor([[-1, 1, 2], [3, 1, 4], [-1, -1, 5]])
    last = torch.tensor([[3, 1], [-2, 1], [2, 2]], dtype=torch.int32)
    reference.mask_bad_words(logits, torch.tensor([3, 0, 1]), words, last)
    masked = [[t for t in range(6) if line[t] == -math.inf] for line in logits]
    assert masked == [[2, 5], [5], [], [2, 4, 5]]


@BOTH
def test_allowed_banned_and_biased_tokens(ops: ModuleType) -> None:
    """allowed_token_ids equals SuppressTokens of all others, logit_bias equals SequenceBias of single tokens."""
    from transformers import SequenceBiasLogitsProcessor, SuppressTokensLogitsProcessor

    logits = torch.randn(4, VOCAB)
    before = logits.clone()
    allowed, bias = [3, 299, 17], {17: 2.5, 4: -100.0, 0: 100.0}
    suppressed = [t for t in range(VOCAB) if t not in allowed]
    rows = Rows(4, VOCAB)
    state, processors = rows.state, rows.processors
    processors.enabled.copy_(torch.tensor([MIN_TOKENS, LOGIT_BIAS, 14, MIN_TOKENS, 0]))
    processors.min_length.copy_(torch.tensor([9, 0, 9, 7, 0]))
    rows.positions.fill_(7)
    state.sampling_params[0, FIRST_STOP_ID] = 299
    state.sampling_params[2, FIRST_STOP_ID + 2] = 3
    state.sampling_params[3, FIRST_STOP_ID] = 5  # whose row has enough tokens
    processors.allowed_bitmask[2] = torch.from_numpy(pack_bitmask(allowed, VOCAB))
    for row in (1, 2):
        processors.bias_ids[row, : len(bias)] = torch.tensor(list(bias))
        processors.bias_values[row, : len(bias)] = torch.tensor(list(bias.values()))
    rows.apply(ops, logits)
    biased = SequenceBiasLogitsProcessor({(t,): b for t, b in bias.items()})
    only = processed(SuppressTokensLogitsProcessor(suppressed), [[1]], before[2:3])
    only[0, 3] = -math.inf
    assert torch.equal(logits[2:3], processed(biased, [[1]], only))
    assert torch.equal(logits[1:2], processed(biased, [[1]], before[1:2]))
    assert logits[2].isfinite().nonzero().flatten().tolist() == [17, 299]
    assert logits[0, 299] == -math.inf and torch.equal(logits[0, :299], before[0, :299])
    assert torch.equal(logits[3], before[3])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.7, 0, 1.0, 0.0), (1.0, 9, 1.0, 0.0), (1.0, 0, 0.83, 0.0), (1.0, 0, 1.0, 0.07), (1.6, 40, 0.9, 0.05)],
)
def test_filters_equal_transformers_warpers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(50, VOCAB, dtype=torch.float64) * 3
    wanted = TemperatureLogitsWarper(temperature)(None, logits)
    for number, warper in ((top_k, TopKLogitsWarper), (top_p % 1, TopPLogitsWarper), (min_p, MinPLogitsWarper)):
        wanted = warper(number)(None, wanted) if number else wanted
    params = settings_of(len(logits), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    filtered = reference.filtered_logits(logits, params)
    # The device's temperature is a float32; the kept tokens are the same.
    assert torch.equal(filtered.isfinite(), wanted.isfinite())
    torch.testing.assert_close(filtered, wanted, rtol=1e-6, atol=1e-6)


# -- log-probabilities ------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("num_top", [0, 1, 7, VOCAB])
@pytest.mark.parametrize("ties", [False, True])
def test_token_logprobs_and_ranks(ops: ModuleType, num_top: int, ties: bool) -> None:
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(num_top)) * 3
    if ties:
        logits = logits.round()
        logits[4] = 1.0
    token_ids = torch.tensor([int(logits[0].argmax()), int(logits[1].argmin()), *range(5, 12)])
    logprob, rank, top_ids, top = ops.token_logprobs(logits, token_ids, num_top)
    wanted = logits.double().log_softmax(-1)
    for i, token in enumerate(token_ids.tolist()):
        row = logits[i].tolist()
        order = sorted(range(VOCAB), key=lambda t: (-row[t], t))
        assert float(logprob[i]) == pytest.approx(float(wanted[i, token]), abs=1e-5)
        assert int(rank[i]) == 1 + sum(x > row[token] for x in row)
        assert top_ids[i].tolist() == order[:num_top]
        assert top[i].tolist() == pytest.approx(wanted[i, order[:num_top]].tolist(), abs=1e-5)
    assert int(rank[0]) == 1


def test_cpu_logprobs_of_a_large_vocabulary() -> None:
    """Logits rounded to bfloat16, with many equals, also around the last top token."""
    logits = (torch.randn(8, 50_000, generator=torch.Generator().manual_seed(0)) * 2).bfloat16().float()
    token_ids = torch.arange(8) * 1000
    for num_top in (1, 5, 20, NUM_CANDIDATES + 1):
        fast, slow = (ops.token_logprobs(logits, token_ids, num_top) for ops in (cpu, reference))
        assert torch.equal(fast[1], slow[1]) and torch.equal(fast[2], slow[2])
        torch.testing.assert_close(fast[0], slow[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(fast[3], slow[3], rtol=0, atol=1e-5)
