"""Sampling: filters against a plain loop, samples against the exact distribution, noise against its definition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import reference
from octavo.kernels.cpu import native
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.cpu import sampling as cpu_sampling
from octavo.kernels.cpu.sampling import NUM_CANDIDATES
from octavo.kernels.metadata import SamplingTensors
from octavo.kernels.reference import sampling
from tests.kernels.pool import BOTH, settings_of
from tests.kernels.slices import BOUNDS, decide, sliced_logits, sliced_params, slices_of


def kept_tokens(
    logits: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> dict[int, float]:
    """Token -> probability after the filters, by a plain loop: the definition."""
    scaled = [x / temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda t: (-scaled[t], t))
    if top_k:
        order = [t for t in order if scaled[t] >= scaled[order[min(top_k, len(order)) - 1]]]
    weight = {t: math.exp(scaled[t] - scaled[order[0]]) for t in order}
    total, mass, kept = sum(weight.values()), 0.0, []
    for t in order:
        kept.append(t)
        mass += weight[t] / total
        if mass >= top_p and top_p < 1:
            break
    kept = [t for t in kept if t == order[0] or weight[t] >= min_p]
    total = sum(weight[t] for t in kept)
    return {t: weight[t] / total for t in kept}


def chi_square_p(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """P(a chi-square variable exceeds the statistic); cells with an expectation below 5 are merged."""
    expected = probs.double() * counts.sum()
    rare = expected < 5
    cells = torch.cat((expected[~rare], expected[rare].sum().view(1)))
    found = torch.cat((counts[~rare].double(), counts[rare].sum().double().view(1)))
    found, cells = found[cells > 0], cells[cells > 0]
    statistic = ((found - cells).square() / cells).sum()
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2.0, dtype=torch.float64), statistic / 2))


@pytest.mark.parametrize(("ops", "vocab_size"), [(reference, 50), (cpu, 1000)], ids=["reference", "cpu"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (1.7, 0, 1.0, 0.0),
        (1.0, 8, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.3, 20, 0.9, 0.05),
    ],
)
def test_samples_follow_the_filtered_softmax(
    ops: ModuleType, temperature: float, top_k: int, top_p: float, min_p: float, vocab_size: int
) -> None:
    num_rows = 6000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    params = settings_of(num_rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens = ops.sample(logits.expand(num_rows, -1), params)
    kept = kept_tokens(logits.tolist(), temperature, top_k, top_p, min_p)
    probs = torch.zeros(vocab_size, dtype=torch.float64)
    probs[list(kept)] = torch.tensor(list(kept.values()), dtype=torch.float64)
    assert set(tokens.tolist()) <= set(kept)
    assert chi_square_p(tokens.bincount(minlength=vocab_size), probs) > 1e-4


@pytest.mark.parametrize("axis", ["seed", "sample_index", "position"])
def test_samples_are_independent_along_each_axis(axis: str) -> None:
    """Chi-square test of pairs of successive samples, which would show correlations."""
    num_rows = 8001
    axes: dict[str, list[int]] = {"seed": [5] * num_rows, "sample_index": [0] * num_rows, "position": [9] * num_rows}
    axes[axis] = list(range(num_rows))
    tokens = cpu.sample(torch.zeros(num_rows, 5), settings_of(num_rows, **axes))  # type: ignore[arg-type]
    pairs = tokens[:-1:2] * 5 + tokens[1::2]
    assert chi_square_p(pairs.bincount(minlength=25), torch.full((25,), 1 / 25)) > 1e-4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.integers(-8, 8), min_size=1, max_size=40),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.33, 0.71, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.3, 1.0]),
)
def test_filters_equal_the_definition(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Logits are integers, with many equals."""
    params = settings_of(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    filtered = reference.filtered_logits(torch.tensor([logits], dtype=torch.float64), params)[0]
    kept = kept_tokens(logits, temperature, top_k, top_p, min_p)
    assert set(filtered.isfinite().nonzero().flatten().tolist()) == set(kept)
    probs = filtered.softmax(0)
    assert all(float(probs[t]) == pytest.approx(p, rel=1e-9) for t, p in kept.items())


def test_filters_of_known_probabilities() -> None:
    """Probabilities 0.5, 0.25, 0.125, ...: top_p is the smallest set with at least that mass, min_p is relative."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]).log()

    def kept(**filters: float) -> list[int]:
        params = settings_of(1, **filters)  # type: ignore[arg-type]
        return reference.filtered_logits(logits, params).isfinite()[0].nonzero().flatten().tolist()

    assert kept(top_p=0.74) == [0, 1]
    assert kept(top_p=0.76) == [0, 1, 2]
    assert kept(top_p=0.01) == [0]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_k=4) == [0, 1, 2, 3, 4]  # the fifth is as probable as the fourth
    assert kept(top_k=3, top_p=0.8) == [0, 1]  # 0.75 of 0.875 is more than 0.8
    assert kept(min_p=0.3) == [0, 1]
    assert kept(min_p=1.0) == [0]
    assert kept(top_k=99) == [0, 1, 2, 3, 4]


def test_top_p_stops_at_its_exact_mass() -> None:
    """Of four equals, the two lowest ids have half of the mass."""
    filtered = reference.filtered_logits(torch.zeros(1, 4, dtype=torch.float64), settings_of(1, top_p=0.5))
    assert filtered.isfinite().tolist() == [[True, True, False, False]]


def test_top_p_of_one_keeps_what_float32_rounds_away() -> None:
    """In float32 the sum reaches 1 long before the last token; the filter of another row must not cut this row."""
    logits = torch.linspace(0, -40, 5000).expand(2, -1)
    params = SamplingTensors.from_lists([1.0] * 2, [0] * 2, [0.9, 1.0], [0.0] * 2, [1] * 2, [0] * 2, [0] * 2)
    assert reference.filtered_logits(logits, params).isfinite().sum(1).tolist()[1] == 5000


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_cpu_samples_equal_the_references(data: st.DataObject) -> None:
    """Rows with all kinds of parameters in one batch, with a vocabulary larger than NUM_CANDIDATES."""
    num_rows, vocab_size = 24, 2 * NUM_CANDIDATES
    rows = [
        data.draw(
            st.tuples(
                st.sampled_from([0.0, 0.5, 1.0, 1.5]),
                st.sampled_from([0, 0, 1, 7, NUM_CANDIDATES - 1, NUM_CANDIDATES, vocab_size + 5]),
                st.sampled_from([1.0, 0.1, 0.9, 0.9999]),
                st.sampled_from([0.0, 0.0, 0.02, 1.0]),
            )
        )
        for _ in range(num_rows)
    ]
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    order = list(range(num_rows))
    params = SamplingTensors.from_lists(temperature, top_k, top_p, min_p, order, [0] * num_rows, order)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * data.draw(st.sampled_from([0.1, 1.0, 5.0]))
    if data.draw(st.booleans()):
        logits = logits.round()  # many equals, also around the last candidate
    assert cpu.sample(logits, params).tolist() == reference.sample(logits, params).tolist()


@BOTH
@pytest.mark.parametrize("filters", [{}, {"top_k": 40, "top_p": 0.95}], ids=["all", "filtered"])
def test_a_sample_does_not_depend_on_its_batch(ops: ModuleType, filters: dict[str, float]) -> None:
    num_rows = 16
    logits = torch.randn(num_rows, 700)
    params = settings_of(num_rows, seed=list(range(100, 100 + num_rows)), position=[3] * num_rows, **filters)  # type: ignore[arg-type]
    together = ops.sample(logits, params)
    for row in range(num_rows):
        assert ops.sample(logits[row : row + 1], params.select(torch.tensor([row]))) == together[row]
    order = torch.randperm(num_rows)
    assert torch.equal(ops.sample(logits[order], params.select(order)), together[order])


@BOTH
def test_a_sample_does_not_depend_on_other_rows_parameters(ops: ModuleType) -> None:
    logits = torch.randn(3, 700)
    alone = ops.sample(logits[1:2], settings_of(1, position=[4]))
    mixed = SamplingTensors.from_lists([0.0, 1.0, 1.0], [0, 0, 5], [1, 1, 0.5], [0, 0, 0], [1, 11, 2], [0] * 3, [4] * 3)
    assert ops.sample(logits, mixed)[1] == alone[0]


def test_noise_depends_on_seed_sample_index_position_and_token() -> None:
    tokens = torch.arange(1000)

    def noise(seed: int, sample_index: int, position: int) -> torch.Tensor:
        key = reference.noise_keys(*(torch.tensor([x]) for x in (seed, sample_index, position)))
        return reference.exponential_noise(key, tokens)

    base = noise(7, 0, 100)
    assert torch.equal(base, noise(7, 0, 100))
    for other in (noise(8, 0, 100), noise(7, 1, 100), noise(7, 0, 101), noise(0, 7, 100), noise(100, 0, 7)):
        assert int((base == other).sum()) <= 1
    assert len(base.unique()) > 990
    extreme = noise(-(1 << 63), (1 << 31), (1 << 62))
    assert bool((extreme > 0).all() & extreme.isfinite().all())


def test_noise_is_exponential() -> None:
    """Mean, variance and tail of a million values, and 16 cells of equal probability."""
    keys = reference.noise_keys(torch.arange(100), torch.zeros(100, dtype=torch.int64), torch.full((100,), 5))
    noise = reference.exponential_noise(keys.unsqueeze(1), torch.arange(10_000)).flatten().double()
    assert float(noise.mean()) == pytest.approx(1.0, abs=0.005)
    assert float(noise.var()) == pytest.approx(1.0, abs=0.015)
    cells = ((1 - (-noise).exp()) * 16).long().clamp(max=15)
    assert chi_square_p(cells.bincount(minlength=16), torch.full((16,), 1 / 16)) > 1e-4
    assert float(noise.max()) > 11
    assert float(noise.min()) > 0


def test_noise_has_known_values() -> None:
    """Samples of a seed must not change with the version, the device or the kernel. Checked with plain integers."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix(42 + golden & mask)
    key = mix(key + 3 + golden & mask)
    key = mix(key + 17 + golden & mask)
    tensors = reference.noise_keys(torch.tensor([42]), torch.tensor([3]), torch.tensor([17]))
    assert int(tensors) & mask == key
    tokens = [0, 1, 49151]
    uniform = [((mix(key + (t + 1) * golden & mask) >> 32) + 0.5) / (1 << 32) for t in tokens]
    noise = reference.exponential_noise(tensors, torch.tensor(tokens)).tolist()
    assert noise == pytest.approx([-math.log1p(-u) for u in uniform], rel=1e-5)


@BOTH
def test_the_highest_noise_keeps_the_only_token(ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest 32 bits round to 1 in float32. Infinite noise would drop the only token that filters keep."""
    for module in (sampling, cpu_sampling):
        monkeypatch.setattr(module, "noise_keys", lambda seed, *_: torch.zeros_like(seed))
    monkeypatch.setattr(sampling, "_mix_high", lambda x: torch.full_like(x, -1))
    assert bool(reference.exponential_noise(torch.zeros(1, dtype=torch.int64), torch.arange(3)).isfinite().all())
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]])
    assert ops.sample(logits, settings_of(1, top_k=1)).tolist() == [2]


@BOTH
def test_greedy_takes_the_first_of_equals(ops: ModuleType) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [-3.0, -2.0, -2.5, -2.0], [0.0, 0.0, 0.0, 0.0]])
    greedy = settings_of(3, temperature=0.0, top_k=2)
    assert greedy.all_greedy
    assert not greedy.any_filter
    assert ops.sample(logits, greedy).tolist() == [1, 1, 0]
    assert ops.sample(logits, greedy).dtype == torch.int64
    mixed = SamplingTensors.from_lists([0.0, 1.0, 0.0], [0] * 3, [1.0] * 3, [0.0] * 3, [1] * 3, [0] * 3, [0] * 3)
    assert ops.sample(logits, mixed)[[0, 2]].tolist() == [1, 0]


@BOTH
def test_masked_tokens_are_never_sampled(ops: ModuleType) -> None:
    """Also where fewer are left than top_k and than NUM_CANDIDATES."""
    logits = torch.full((400, 5 * NUM_CANDIDATES), -torch.inf)
    logits[:, [3, 700]] = torch.tensor([0.0, 0.5])
    for filters in ({}, {"top_p": 0.99}, {"min_p": 0.5}, {"top_k": 50, "top_p": 0.99}):
        params = settings_of(400, **filters)  # type: ignore[arg-type]
        tokens = ops.sample(logits, params)
        assert set(tokens.tolist()) == {3, 700}
        assert torch.equal(tokens, reference.sample(logits, params))


@BOTH
def test_finite_rows(ops: ModuleType) -> None:
    logits = torch.randn(6, 50)
    logits[1, 7] = torch.nan
    logits[3, 0] = torch.inf
    logits[4, 49] = -torch.inf
    logits[5] = 3e38  # finite, but their sum is not
    assert ops.finite_rows(logits).tolist() == [True, False, True, False, False, True]
    assert ops.finite_rows(torch.randn(3, 5)).tolist() == [True] * 3


# -- slices of the vocabulary ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
@BOTH
def test_races_over_slices_decide_as_one(ops: ModuleType, seed: int, dtype: torch.dtype) -> None:
    """Whole numbers are often equal in several slices. The others have equals in bfloat16."""
    params = sliced_params()
    logits = sliced_logits(params, seed).to(dtype)
    tokens = decide(ops, logits, params)
    assert tokens.tolist() == ops.sample_checked(logits, params).tolist()
    assert (tokens == -1).nonzero().flatten().tolist() == [3, 4, 5, 11]
    greedy = settings_of(len(logits), temperature=0.0)
    assert decide(ops, logits, greedy).tolist() == ops.sample_checked(logits, greedy).tolist()


@pytest.mark.parametrize("bounds", [BOUNDS, (0, 40, 80, 83), (0, 500, 502, 503)], ids=str)
@pytest.mark.parametrize("peak", [math.inf, 1.0, -1.0])
@pytest.mark.parametrize("seed", range(4))
@BOTH
def test_filters_of_slices_are_those_of_all(ops: ModuleType, seed: int, peak: float, bounds: tuple[int, ...]) -> None:
    """Also where a slice has fewer tokens than top_k, or more than are exchanged equal the last that top_k keeps."""
    params = sliced_params(filters=True)
    logits = sliced_logits(params, seed)
    logits = torch.where(logits.isfinite(), logits.clamp(max=peak), logits)[:, : bounds[-1]]
    assert decide(ops, logits, params, bounds).tolist() == ops.sample_checked(logits, params).tolist()
    rows = params.is_filtered() & logits.isfinite().all(1)
    assert rows.sum() >= 3
    kept = torch.cat(slices_of(ops, logits, params, bounds), 1) > sampling.REMOVED
    assert torch.equal(kept[rows], reference.filtered_logits(logits, params)[rows] > -math.inf)


@BOTH
def test_top_p_ends_within_the_equals_of_a_slice(ops: ModuleType) -> None:
    """Of 83 equals top_p keeps the first 58 or 59: more than top_k."""
    params = settings_of(1, top_k=3, top_p=0.7)
    kept = torch.cat(slices_of(ops, torch.zeros(1, 83), params, (0, 40, 80, 83)), 1)[0] == 0
    assert kept.sum() == 59 and kept[:59].all()


@BOTH
def test_a_race_has_its_winners_score(ops: ModuleType) -> None:
    """That of a greedy row is the logit; others add noise. Tokens count from the first of all slices."""
    params = settings_of(2, temperature=2.0)
    params.temperature[0] = 0.0
    logits = torch.tensor([[1.0, 5.0, 5.0, -2.0], [0.0, -1e9, -1e9, -1e9]])
    keys = reference.noise_keys(params.seed, params.sample_index, params.position)
    noise = reference.exponential_noise(keys, torch.tensor(100))
    expected = torch.tensor([[5.0, 101, 1], [-float(noise[1].log()), 100, 1]])
    torch.testing.assert_close(ops.race(logits, params, 100), expected)


@BOTH
def test_a_winners_score_does_not_depend_on_the_batch(ops: ModuleType) -> None:
    params = sliced_params()
    logits = sliced_logits(params, 2).nan_to_num()
    alone = [ops.race(logits[i : i + 1], params.select(torch.tensor([i])), 7) for i in range(len(logits))]
    assert torch.equal(torch.cat(alone), ops.race(logits, params, 7))


@BOTH
def test_equal_scores_of_slices_give_the_lowest_token(ops: ModuleType) -> None:
    winners = torch.tensor([[1.0, 5, 1, 2.0, 40, 1, 2.0, 70, 1], [3.0, 5, 1, 2.0, 40, 1, math.nan, 70, 0]])
    assert ops.decide(winners).tolist() == [40, -1]
    assert ops.decide(winners[:0]).tolist() == []


def test_slices_of_torch_are_those_of_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    params = sliced_params()
    logits = sliced_logits(params, 5)
    expected = decide(cpu, logits, params)
    monkeypatch.setattr(native, "library_for", lambda *tensors: None)
    assert torch.equal(decide(cpu, logits, params), expected)
