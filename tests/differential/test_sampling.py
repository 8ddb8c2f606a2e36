"""Sampled tokens depend only on (seed, sample index, position), and have the requested distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.policy import PreemptionMode
from tests.differential.cases import PreemptingScheduler
from tests.differential.conftest import TinyModel
from tests.differential.test_transformers import ManualScheduler
from tests.differential.uncached import processed_logits
from tests.models.tiny import VOCAB_SIZE, make_tiny_checkpoint, transformers_logits

NUM_NEW = 10
TOP_P = {"temperature": 0.8, "top_p": 0.9}


def seeded(i: int, **kwargs: Any) -> SamplingParams:
    """Different filters and a different seed for each request i."""
    mix: list[dict[str, Any]] = [{}, {"top_k": 7}, TOP_P, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.95, "min_p": 0.01}]
    params = {"temperature": 0.9, "max_tokens": NUM_NEW, "ignore_eos": True, "seed": 1000 + i} | mix[i % len(mix)]
    return SamplingParams(**(params | kwargs))


def make(tiny_model: TinyModel, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"block_size": 4, "num_gpu_blocks_override": 800, "max_num_seqs": 64}
    return LLM(str(tiny_model.path), skip_tokenizer_init=True, **(defaults | options))


def samples(llm: LLM, prompts: Any, params: Any) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[c.token_ids for c in o.outputs] for o in outputs]


@pytest.fixture
def manual_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.build.Scheduler", ManualScheduler)


@pytest.fixture(scope="module")
def wanted(tiny_model: Callable[[str], TinyModel]) -> list[list[list[int]]]:
    """Tokens of each request run alone."""
    with make(tiny_model("qwen2"), enable_prefix_caching=False, async_scheduling=False) as llm:
        prompts = tiny_model("qwen2").prompts
        return [samples(llm, [p], params)[0] for p, params in zip(prompts, all_params(len(prompts)), strict=True)]


def all_params(num: int) -> list[SamplingParams]:
    return [seeded(i, n=1 + 2 * (i % 3 == 0)) for i in range(num)]


@pytest.mark.parametrize(("window", "caching", "overlap"), list(product([1, 8], [False, True], [False, True])))
def test_seeds_reproduce_in_any_batch(
    tiny_model: Callable[[str], TinyModel], wanted: Any, window: int, caching: bool, overlap: bool
) -> None:
    prompts = tiny_model("qwen2").prompts
    params = all_params(len(prompts))
    with make(
        tiny_model("qwen2"), decode_window=window, enable_prefix_caching=caching, async_scheduling=overlap
    ) as llm:
        assert samples(llm, prompts, params) == wanted
        assert samples(llm, prompts[::-1], params[::-1]) == wanted[::-1]  # in other rows, with a warm prefix cache
        assert samples(llm, prompts[5:8], params[5:8]) == wanted[5:8]
        assert (llm.kv_stats().num_hits > 0) == caching


@pytest.mark.usefixtures("manual_scheduler")
@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
@pytest.mark.parametrize("window", [1, 8])
def test_seeds_reproduce_under_preemption(
    tiny_model: Callable[[str], TinyModel], wanted: Any, mode: PreemptionMode, window: int
) -> None:
    prompts = tiny_model("qwen2").prompts
    with make(tiny_model("qwen2"), decode_window=window, max_num_batched_tokens=60) as llm:
        scheduler = llm.engine.scheduler
        assert isinstance(scheduler, PreemptingScheduler)
        scheduler.preempt_randomly(mode, seed=1, max_preemptions=30)
        assert samples(llm, prompts, all_params(len(prompts))) == wanted
        assert scheduler.num_preemptions >= 2
        assert (llm.kv_stats().num_swapped_in > 0) == (mode is PreemptionMode.SWAP)


def test_samples_of_a_request_differ_and_do_not_depend_on_n(tiny_model: Callable[[str], TinyModel]) -> None:
    prompt = tiny_model("llama").prompts[:1]
    with make(tiny_model("llama")) as llm:
        ((alone,),) = samples(llm, prompt, seeded(0))
        (eight,) = samples(llm, prompt, seeded(0, n=8))
        (three,) = samples(llm, prompt, seeded(0, n=3))
        assert eight[0] == alone and eight[:3] == three
        assert len({tuple(t) for t in eight}) == 8
        ((other,),) = samples(llm, prompt, seeded(1, **TOP_P))
        assert other != alone


def test_unseeded_requests_differ_and_depend_on_the_engines_seed(tiny_model: Callable[[str], TinyModel]) -> None:
    prompts = tiny_model("llama").prompts[:1] * 4
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    runs = []
    for seed in (0, 0, 1):
        with make(tiny_model("llama"), seed=seed) as llm:
            runs.append(samples(llm, prompts, params))
    assert len({tuple(t) for (t,) in runs[0]}) == 4
    assert runs[0] == runs[1] != runs[2]


# -- distributions ----------------------------------------------------------------------------------------------------

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.8},
    {"temperature": 1.3, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.95, "min_p": 0.1},
    {
        "repetition_penalty": 1.5,
        "logit_bias": {5: 1.5, 8: -2.0},
        "allowed_token_ids": [2, 5, 8, 11, 30, 40, 60],
        "top_p": 0.95,
    },
]
NUM_SAMPLES = 4096


def exact(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """Exact distribution in float64 and plain Python: temperature, top_k, top_p, min_p."""
    scaled = [x / params.temperature for x in logits.double().tolist()]
    total = math.fsum(math.exp(x) for x in scaled)
    left = sorted(((math.exp(x) / total, -t) for t, x in enumerate(scaled)), reverse=True)
    if params.top_k:
        left = left[: params.top_k]
    total = math.fsum(p for p, _ in left)
    kept, mass = [], 0.0
    for p, t in left:
        if mass >= params.top_p * total:
            break
        mass += p
        kept.append((p, t))
    kept = [(p, t) for p, t in kept if p >= params.min_p * kept[0][0]]
    total = math.fsum(p for p, _ in kept)
    probs = [0.0] * len(scaled)
    for p, t in kept:
        probs[-t] = p / total
    return probs


def chi_square(counts: Counter[int], probs: list[float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; tokens with an expectation below 5 form one class."""
    num = sum(counts.values())
    classes = [(counts[t], p * num) for t, p in enumerate(probs) if p * num >= 5]
    rest = (num - sum(c for c, _ in classes), num - math.fsum(e for _, e in classes))
    if rest[1] > 1:
        classes.append(rest)
    return math.fsum((c - e) ** 2 / e for c, e in classes), len(classes) - 1


SOURCES = [(filters, "n") for filters in FILTERS] + [(filters, "seeds") for filters in FILTERS[-2:]]


@pytest.mark.parametrize(
    ("filters", "source"), SOURCES, ids=[f"{s} {' '.join(f'{k}={v}' for k, v in f.items())}" for f, s in SOURCES]
)
def test_first_tokens_have_the_requested_distribution(
    tmp_path_factory: pytest.TempPathFactory, filters: dict[str, Any], source: str
) -> None:
    path = make_tiny_checkpoint("llama", tmp_path_factory.mktemp("soft"), seed=5)
    prompt = [7, 3, 11]
    (logits,) = transformers_logits(path, [prompt])
    params = SamplingParams(**({"temperature": 1.0, "max_tokens": 1, "n": 128 if source == "n" else 1} | filters))
    probs = exact(torch.tensor(processed_logits(logits[-1].tolist(), prompt, [], params, set())), params)
    counts: Counter[int] = Counter()
    with LLM(str(path), skip_tokenizer_init=True, num_gpu_blocks_override=2048, max_num_seqs=1024, seed=3) as llm:
        outputs = llm.generate([prompt] * (NUM_SAMPLES // params.n), params, use_tqdm=False)
    for output in outputs:
        counts.update(c.token_ids[0] for c in output.outputs)
    assert sum(counts.values()) == NUM_SAMPLES
    assert all(probs[t] > 0 for t in counts)  # no token that the filters remove
    statistic, freedom = chi_square(counts, probs)
    assert freedom >= 2 and len(probs) == VOCAB_SIZE
    # Wilson and Hilferty: the cube root of chi-square / freedom is nearly normal. 4 standard deviations: 3 in 100,000.
    spread = 2 / (9 * freedom)
    assert ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 4
