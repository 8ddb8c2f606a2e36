"""Greedy tokens equal Transformers', token for token, however the engine gets there."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest

from octavo import LLM, SamplingParams
from octavo.core.policy import PreemptionMode
from tests.differential.cases import LEVELS, Case, Shaky, all_cases, pairs_of, pairwise_cases
from tests.differential.conftest import NUM_NEW, World

PAIRWISE = pairwise_cases()


def run(case: Case, world: World) -> None:
    prompts, answers = world.prompts, world.answers
    if case.batch == 1:
        which = random.Random(case.name).randrange(len(prompts))
        prompts, answers = prompts[which : which + 1], answers[which : which + 1]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, n=case.n)
    with LLM(
        str(world.path),
        skip_tokenizer_init=True,
        block_size=case.block_size,
        num_gpu_blocks_override=3 * 20 * 45 // case.block_size + 20,
        max_num_seqs=64,
        max_num_batched_tokens=max(case.chunk, case.n),
        decode_window=case.window,
        async_scheduling=case.overlap,
    ) as llm:
        scheduler = llm.engine.scheduler
        if case.warm:
            llm.generate(prompts, params, use_tqdm=False)
        if case.preemption:
            assert isinstance(scheduler, Shaky)
            scheduler.shake(PreemptionMode(case.preemption), seed=len(case.name), most=2 + case.batch)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.kv_stats()
        for output, answer in zip(outputs, answers, strict=True):
            assert [c.index for c in output.outputs] == list(range(case.n))
            for completion in output.outputs:
                assert completion.token_ids == answer, case.name
                assert completion.finish_reason == "length"
            if case.warm:  # whole blocks, and at least one token is left to compute
                whole = (len(output.prompt_token_ids) - 1) // case.block_size * case.block_size
                assert output.num_cached_tokens == whole
        assert stats.num_used == 0 and stats.num_host_used == 0
        assert bool(scheduler.num_preemptions) == bool(case.preemption)
        assert bool(stats.num_swapped_out) == bool(stats.num_swapped_in) == (case.preemption == "swap")
        # Only Mistral here has a window in every layer; behind it, blocks are given up while their sequences run on.
        assert not stats.num_dropped or case.kind == "mistral"
        assert stats.num_dropped or case.kind != "mistral" or case.batch == 1 or case.n > 1
        assert bool(stats.num_copied) == (case.n > 1 and case.block_size > 1) or case.batch == 1


@pytest.fixture(autouse=True)
def _shaky(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.build.Scheduler", Steady)


class Steady(Shaky):
    """Calm until it is told to shake."""

    _most = 0


def test_the_pairs_are_covered() -> None:
    wanted = {pair for case in product(*LEVELS.values()) for pair in pairs_of(case)}
    met = set().union(*(pairs_of(case) for case in PAIRWISE))
    assert met == wanted
    assert len(PAIRWISE) <= 24  # that is what makes it worth while


@pytest.mark.parametrize("case", PAIRWISE, ids=[case.name for case in PAIRWISE])
def test_same_tokens_as_transformers(case: Case, world: Callable[[str], World]) -> None:
    run(case, world(case.kind))


@pytest.mark.slow
@pytest.mark.parametrize("block_size", LEVELS["block_size"])
@pytest.mark.parametrize("preemption", LEVELS["preemption"])
@pytest.mark.parametrize("kind", LEVELS["kind"])
def test_same_tokens_as_transformers_in_every_case(
    kind: str, preemption: str | None, block_size: int, world: Callable[[str], World]
) -> None:
    for case in all_cases():
        if (case.kind, case.preemption, case.block_size) == (kind, preemption, block_size):
            run(case, world(kind))
