"""A model with recurrent layers gives Transformers' tokens, in every engine configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.policy import PreemptionMode
from tests.differential import test_beam_search as beams
from tests.differential.cases import Case, PreemptingScheduler, pairwise_cases
from tests.differential.conftest import NUM_NEW, TinyModel
from tests.differential.test_transformers import ManualScheduler
from tests.differential.uncached import UncachedModel

KIND = "qwen3_5"
KINDS = (KIND, "qwen3_next", "qwen3_5_moe")
CASES = list(dict.fromkeys(case._replace(kind=KINDS[i % 3]) for i, case in enumerate(pairwise_cases())))
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 64,
    "mamba_block_size": 16,
}


@pytest.fixture(autouse=True)
def _use_manual_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.build.Scheduler", ManualScheduler)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_model(KIND)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_greedy_tokens_as_transformers(case: Case, tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model(case.kind)
    prompts, expected = model.prompts, model.greedy
    if case.batch == 1:
        index = len(case.name) % len(prompts)
        prompts, expected = prompts[index : index + 1], expected[index : index + 1]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, n=case.n)
    with LLM(
        str(model.path),
        **OPTIONS,
        block_size=case.block_size,
        num_gpu_blocks_override=6000 // case.block_size,
        max_num_batched_tokens=max(case.chunk, case.n),
        decode_window=case.window,
        async_scheduling=case.overlap,
    ) as llm:
        assert llm.config.kv.state_blocks > 1
        scheduler = llm.engine.scheduler
        if case.warm:
            llm.generate(prompts, params, use_tqdm=False)
        if case.preemption:
            assert isinstance(scheduler, PreemptingScheduler)
            scheduler.preempt_randomly(
                PreemptionMode(case.preemption), seed=len(case.name), max_preemptions=2 + case.batch
            )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for output, tokens in zip(outputs, expected, strict=True):
            assert [completion.token_ids for completion in output.outputs] == [tokens] * case.n
        if case.warm and len(prompts) == 1:  # its own checkpoint, at its last whole block
            num_cached = (len(prompts[0]) - 1) // case.block_size * case.block_size
            assert outputs[0].num_cached_tokens == num_cached
        stats = llm.kv_stats()
        assert stats.num_used == 0 == stats.num_host_used
        assert bool(scheduler.num_preemptions) == bool(case.preemption)
        assert bool(stats.num_swapped_out) == bool(stats.num_swapped_in) == (case.preemption == "swap")


@pytest.mark.parametrize("options", [{}, {"decode_window": 4, "max_num_batched_tokens": 7}], ids=["plain", "windows"])
def test_three_samples_with_penalties_and_prompt_logprobs(model: TinyModel, options: dict[str, Any]) -> None:
    """Prompt log-probabilities split a slice into several passes."""
    params = SamplingParams(
        n=3, seed=11, temperature=0.9, top_k=20, repetition_penalty=1.2, max_tokens=NUM_NEW, ignore_eos=True,
        prompt_logprobs=2,
    )  # fmt: skip
    uncached = UncachedModel(model.path)
    with LLM(str(model.path), **OPTIONS, **options, block_size=8) as llm:
        for _ in range(2):
            for prompt, output in zip(
                model.prompts[:8], llm.generate(model.prompts[:8], params, use_tqdm=False), strict=True
            ):
                wanted = [uncached.generate(prompt, params, sample_index=i).token_ids for i in range(3)]
                assert [completion.token_ids for completion in output.outputs] == wanted
                assert output.prompt_logprobs is not None
                found = [entry[t].logprob for t, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
                known = [logprob for logprob, _, _ in uncached.prompt_logprobs(prompt, 0)]
                assert found == pytest.approx(known, abs=1e-3)


@pytest.mark.parametrize("mode", [None, "recompute", "swap"])
@pytest.mark.parametrize(("block_size", "chunk"), [(1, 8), (8, 8), (16, 512)])
def test_same_beams_as_transformers(model: TinyModel, mode: str | None, block_size: int, chunk: int) -> None:
    options = OPTIONS | {"max_num_batched_tokens": chunk, "num_gpu_blocks_override": 9000 // block_size}
    with LLM(str(model.path), **options, block_size=block_size, swap_space=0.1) as llm:
        scheduler = llm.engine.scheduler
        assert isinstance(scheduler, PreemptingScheduler)
        if mode is not None:
            scheduler.preempt_randomly(PreemptionMode(mode), seed=block_size, max_preemptions=8)
        beams.search_and_compare(model, llm, 4, 1.0, False)
        beams.search_and_compare(model, llm, 4, 1.0, False)  # warm
        assert bool(scheduler.num_preemptions) == bool(mode)


@pytest.mark.parametrize("caching", [True, False])
def test_a_pinned_prefix_is_not_computed_again(model: TinyModel, caching: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    prefix, uncached = model.prompts[0][:1] * 3 + model.prompts[5], UncachedModel(model.path)
    assert len(prefix) % 8
    with LLM(str(model.path), **OPTIONS, block_size=8, enable_prefix_caching=caching) as llm:
        llm.pin_prefix({"prompt_token_ids": prefix}, "system")
        for prompt in ([*prefix, 5, 6, 7], [*prefix, 9], prefix, prefix[:-2]):
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert output.outputs[0].token_ids == uncached.generate(prompt, params).token_ids
            if len(prompt) > len(prefix):  # the state is the one at its end, and no other
                assert output.num_cached_tokens == len(prefix)
        llm.unpin_prefix("system")
