"""The sampler: non-finite logits, grammar bitmasks, and rows of every kind in one batch."""

from __future__ import annotations

import math
from array import array
from types import ModuleType

import numpy as np
import pytest
import torch

from octavo.core.plan import RowSetup, StepPlan
from octavo.engine.executor import GrammarBitmask
from octavo.integers import cdiv
from octavo.kernels import reference
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.metadata import SamplingTensors
from octavo.kernels.row_state import FIRST_STOP_ID, MAX_BIAS, MAX_STOP_IDS, RowState
from octavo.params.sampling_params import SamplingParams
from octavo.runner.platform import CpuPlatform, Platform
from octavo.runner.sampling.logits_state import LogitsProcessors
from octavo.runner.sampling.sampler import NO_ALLOWED_TOKEN, NOT_FINITE, Sampler, SamplerOutput, SampleSpec

KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.2, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.1),
]


def platform_of(ops: ModuleType) -> Platform:
    platform = CpuPlatform()
    platform.ops = ops  # type: ignore[assignment]
    return platform


def sample_on_host(
    logits: torch.Tensor, samples: list[SampleSpec], platform: Platform, bitmask: GrammarBitmask | None = None
) -> SamplerOutput:
    """What a `Sampler` samples for rows that no plan has set up."""
    params = [sample.setup.sampling_params for sample in samples]
    sampling = SamplingTensors.from_lists(
        [p.temperature for p in params],
        [p.top_k for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        [sample.setup.seed for sample in samples],
        [sample.sample_index for sample in samples],
        [sample.position for sample in samples],
    )
    sampler = Sampler(LogitsProcessors(RowState.empty(10, 1, "cpu"), 8, logits.shape[1], platform))
    rows = torch.tensor([sample.setup.row for sample in samples])
    return sampler.sample(logits.clone(), samples, rows, sampling, bitmask)


def sample(logits: torch.Tensor, rows: list[int], ops: ModuleType) -> tuple[list[int], list[str]]:
    setups = [RowSetup(i, KINDS[i % len(KINDS)], 100 + i, 0, frozenset()) for i in rows]
    samples = [SampleSpec(i, setup, 0, 7) for i, setup in enumerate(setups)]
    output = sample_on_host(logits[rows], samples, platform_of(ops))
    return output.tokens, output.errors


@pytest.mark.parametrize("ops", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("whole", [False, True])
def test_non_finite_logits_fail_only_their_row(ops: ModuleType, bad: float, whole: bool) -> None:
    logits = 3 * torch.randn(10, 50, generator=torch.Generator().manual_seed(0))
    rows = list(range(10))
    expected, errors = sample(logits, rows, ops)
    assert errors == [""] * 10
    for victim in rows:
        damaged = logits.clone()
        damaged[victim, slice(None) if whole else 7] = bad
        tokens, errors = sample(damaged, rows, ops)
        assert errors == [NOT_FINITE if i == victim else "" for i in rows]
        assert [t for i, t in enumerate(tokens) if i != victim] == [t for i, t in enumerate(expected) if i != victim]
        assert 0 <= tokens[victim] < 50


def make_bitmask(allowed: dict[int, list[int]], vocab_size: int) -> GrammarBitmask:
    bits = np.zeros((len(allowed), cdiv(vocab_size, 32) * 32), dtype=np.bool_)
    for line, ids in zip(bits, allowed.values(), strict=True):
        line[ids] = True
    return GrammarBitmask(list(allowed), np.packbits(bits, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize("ops", [cpu, reference], ids=["cpu", "reference"])
def test_a_bitmask_masks_tokens_and_changes_no_other_row(ops: ModuleType) -> None:
    """Rows with and without a bitmask in one batch. Bits past the vocabulary are ignored."""
    logits = 3 * torch.randn(10, 50, generator=torch.Generator().manual_seed(0))
    setups = [RowSetup(i, KINDS[i % len(KINDS)], 100 + i, 0, frozenset()) for i in range(10)]
    samples = [SampleSpec(10 + i, setup, 0, 7) for i, setup in enumerate(setups)]
    free = sample_on_host(logits, samples, platform_of(ops)).tokens
    allowed = {10 + i: [7, 31, 32, 49] for i in (0, 3, 4, 8)}
    allowed[15], allowed[12] = [], list(range(50))
    bitmask = make_bitmask({i: [*ids, 50, 60, 63] for i, ids in allowed.items()}, 50)
    output = sample_on_host(logits, samples, platform_of(ops), bitmask)
    for i, (token, error) in enumerate(zip(output.tokens, output.errors, strict=True)):
        ids = allowed.get(10 + i)
        assert error == (NO_ALLOWED_TOKEN if ids == [] else "")
        if ids is None or len(ids) == 50:
            assert token == free[i]
        elif ids:
            assert token in ids
    assert sum(a != b for a, b in zip(output.tokens, free, strict=True)) >= 3
    assert output.tokens[0] == max([7, 31, 32, 49], key=lambda t: logits[0, t])


def test_samples_of_a_slice_share_its_bitmask_and_beam_candidates_obey_it() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(2)).expand(6, 40)
    setup = RowSetup(0, SamplingParams(temperature=1.5, n=5), 3, 0, frozenset())
    samples = [SampleSpec(4, setup, j, 7, continues_row=False) for j in range(5)]
    beam = SampleSpec(
        2, RowSetup(1, SamplingParams(temperature=0), 3, 0, frozenset(), returns_candidates=True), 0, 7, False, 8
    )
    bitmask = make_bitmask({4: [3, 5, 8], 2: [1, 39, 20]}, 40)
    output = sample_on_host(logits, [*samples, beam], CpuPlatform(), bitmask)
    assert set(output.tokens[:5]) <= {3, 5, 8} and len(set(output.tokens[:5])) > 1
    expected = logits[0].log_softmax(0)
    candidates = output.tokens[5]
    assert isinstance(candidates, list) and [t for _, t in candidates] == sorted(
        [1, 39, 20], key=lambda t: -expected[t]
    )
    assert [p for p, _ in candidates] == pytest.approx([float(expected[t]) for _, t in candidates], abs=1e-6)


def test_huge_finite_logits_are_no_error() -> None:
    logits = torch.full((1, 50), 3e38)
    logits[0, 9] = 3.2e38
    tokens, errors = sample(logits, [0], cpu)
    assert (tokens, errors) == ([9], [""])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = 3 * torch.randn(10, 50, generator=torch.Generator().manual_seed(1))
    together, _ = sample(logits, list(range(10)), cpu)
    assert together == [sample(logits, [i], cpu)[0][0] for i in range(10)]
    assert sample(logits, list(range(9, -1, -1)), cpu)[0] == together[::-1]


@pytest.mark.parametrize("num_biases", [MAX_BIAS, MAX_BIAS + 1])
@pytest.mark.parametrize("num_stops", [MAX_STOP_IDS, MAX_STOP_IDS + 1])
def test_processors_that_the_state_does_not_hold_are_applied_with_the_others(num_biases: int, num_stops: int) -> None:
    """Biases come before penalties; stop tokens and the ends of bad words are masked."""
    vocab_size, history = 400, [4, 5, 6]
    stops, bias = set(range(20, 20 + num_stops)), dict.fromkeys(range(num_biases), 1.0)
    params = SamplingParams(
        temperature=0,
        presence_penalty=0.25,
        repetition_penalty=2.0,
        logit_bias=bias,
        min_tokens=9,
        bad_words_token_ids=[[6, 30], [5, 31], [32], [7, 6, 33], [4, 5, 6, 34], [9, 9, 9, 9, 35]],
        logprobs=0,
    )
    setup = RowSetup(1, params, 3, 0, frozenset(stops), 2, array("i", history), returns_candidates=True)
    plan, state = StepPlan(), RowState.empty(10, 1, "cpu")
    plan.row_setups = [setup]
    state.sampling_params[1, FIRST_STOP_ID:] = torch.tensor(sorted(stops)[:MAX_STOP_IDS])
    processors = LogitsProcessors(state, 8, vocab_size, CpuPlatform())
    processors.apply(plan)
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(5))
    expected = logits.log_softmax(-1)
    expected[0, list(bias)] += 1.0
    seen = expected[0, history]
    expected[0, history] = torch.where(seen > 0, seen / 2, seen * 2)
    expected[0, 6] -= 0.25
    expected[0, [*stops, 30, 32, 34]] = -math.inf
    beam = SampleSpec(0, setup, 0, 3, continues_row=False, num_candidates=vocab_size)
    sampling = SamplingTensors.from_lists([0.0], [0], [1.0], [0.0], [3], [0], [3])
    (candidates,) = Sampler(processors).sample(logits, [beam], torch.tensor([1]), sampling).tokens
    assert isinstance(candidates, list) and len(candidates) == int(expected.isfinite().sum())
    for logit, token in candidates:
        assert logit == pytest.approx(float(expected[0, token]), abs=1e-6)
