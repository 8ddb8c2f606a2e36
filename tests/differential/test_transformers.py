"""Greedy tokens equal Transformers', in every engine configuration."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest

from octavo import LLM, SamplingParams
from octavo.core.policy import PreemptionMode
from tests.differential.cases import LEVELS, Case, PreemptingScheduler, all_cases, pairs_of, pairwise_cases
from tests.differential.conftest import NUM_NEW, TinyModel

PAIRWISE = pairwise_cases()
GROUPED = {"gemma3": 2, "gemma4": 2, "gpt_oss": 2}
"""Window groups of the kinds whose layers differ."""


def run(case: Case, tiny_model: TinyModel) -> None:
    prompts, expected = tiny_model.prompts, tiny_model.greedy
    if case.batch == 1:
        index = random.Random(case.name).randrange(len(prompts))
        prompts, expected = prompts[index : index + 1], expected[index : index + 1]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, n=case.n)
    with LLM(
        str(tiny_model.path),
        skip_tokenizer_init=True,
        block_size=case.block_size,
        num_gpu_blocks_override=(3 * 20 * 45 // case.block_size + 20) * (1 + GROUPED.get(case.kind, 0)),
        max_num_seqs=64,
        max_num_batched_tokens=max(case.chunk, case.n),
        decode_window=case.window,
        async_scheduling=case.overlap,
    ) as llm:
        scheduler = llm.engine.scheduler
        if case.warm:
            llm.generate(prompts, params, use_tqdm=False)
        if case.preemption:
            assert isinstance(scheduler, PreemptingScheduler)
            scheduler.preempt_randomly(
                PreemptionMode(case.preemption), seed=len(case.name), max_preemptions=2 + case.batch
            )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.kv_stats()
        for output, tokens in zip(outputs, expected, strict=True):
            assert [c.index for c in output.outputs] == list(range(case.n))
            for completion in output.outputs:
                assert completion.token_ids == tokens, case.name
                assert completion.finish_reason == "length"
            if case.warm:  # whole blocks; at least one token must be computed
                num_cached = (len(output.prompt_token_ids) - 1) // case.block_size * case.block_size
                assert output.num_cached_tokens == num_cached
        assert stats.num_used == 0 and stats.num_host_used == 0
        assert bool(scheduler.num_preemptions) == bool(case.preemption)
        assert bool(stats.num_swapped_out) == bool(stats.num_swapped_in) == (case.preemption == "swap")
        # These have a sliding window in every layer here, or in some; blocks before it are freed while sequences run.
        assert len(scheduler.cache.windows) == GROUPED.get(case.kind, 0)
        has_windows = case.kind in ("mistral", "starcoder2", *GROUPED)
        assert has_windows or not stats.num_dropped
        assert stats.num_dropped or not has_windows or case.batch == 1 or case.n > 1
        assert bool(stats.num_copied) == (case.n > 1 and case.block_size > 1) or case.batch == 1


@pytest.fixture(autouse=True)
def _use_manual_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.core.kv_cache_spec.MIN_CHUNK", 5)  # else sequences are too short for groups
    monkeypatch.setattr("octavo.frontend.build.Scheduler", ManualScheduler)


class ManualScheduler(PreemptingScheduler):
    """Preempts nothing until `preempt_randomly` is called."""

    _preemptions_left = 0


def test_pairwise_cases_cover_all_pairs() -> None:
    expected = {pair for case in product(*LEVELS.values()) for pair in pairs_of(case)}
    covered = set().union(*(pairs_of(case) for case in PAIRWISE))
    assert covered == expected
    assert len(PAIRWISE) <= 3 * len(LEVELS["kind"]) + 6  # of all combinations; each kind has three chunks


@pytest.mark.parametrize("case", PAIRWISE, ids=[case.name for case in PAIRWISE])
def test_same_tokens_as_transformers(case: Case, tiny_model: Callable[[str], TinyModel]) -> None:
    run(case, tiny_model(case.kind))


@pytest.mark.slow
@pytest.mark.parametrize("block_size", LEVELS["block_size"])
@pytest.mark.parametrize("preemption", LEVELS["preemption"])
@pytest.mark.parametrize("kind", LEVELS["kind"])
def test_same_tokens_as_transformers_in_every_case(
    kind: str, preemption: str | None, block_size: int, tiny_model: Callable[[str], TinyModel]
) -> None:
    for case in all_cases():
        if (case.kind, case.preemption, case.block_size) == (kind, preemption, block_size):
            run(case, tiny_model(kind))
