"""Beam search gives Transformers' sequences and scores, in every engine configuration."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.core.policy import PreemptionMode
from octavo.engine.engine_request import EngineRequest
from tests.differential.cases import PreemptingScheduler
from tests.differential.conftest import TinyModel
from tests.differential.test_transformers import ManualScheduler
from tests.engine.client import StepClient

STOPS = [3, 41]
NUM_NEW = 9


class Beam(NamedTuple):
    token_ids: list[int]
    score: float


@cache
def _model(path: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@cache
def expected(path: Path, prompt: tuple[int, ...], width: int, penalty: float, early: bool | str) -> list[Beam]:
    generated = _model(path).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=NUM_NEW,
        length_penalty=penalty,
        early_stopping=early,
        eos_token_id=STOPS,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = []
    for sequence, score in zip(generated.sequences.tolist(), generated.sequences_scores.tolist(), strict=True):
        output = sequence[len(prompt) :]
        end = next((i + 1 for i, token in enumerate(output) if token in STOPS), len(output))
        beams.append(Beam(output[:end], score))
    return beams


def search_and_compare(tiny_model: TinyModel, llm: LLM, width: int, penalty: float, early: Any, num: int = 6) -> None:
    prompts = tiny_model.prompts[:num]
    params = BeamSearchParams(
        beam_width=width,
        max_tokens=NUM_NEW,
        length_penalty=penalty,
        early_stopping=early,
        ignore_eos=True,
        stop_token_ids=STOPS,
    )
    for prompt, output in zip(prompts, llm.beam_search(prompts, params, use_tqdm=False), strict=True):
        beams = expected(tiny_model.path, tuple(prompt), width, penalty, early)
        assert [c.token_ids for c in output.outputs] == [b.token_ids for b in beams]
        assert [c.score for c in output.outputs] == pytest.approx([b.score for b in beams], abs=1e-4)
        assert [c.index for c in output.outputs] == list(range(width)) and output.finished
    stats = llm.kv_stats()
    assert stats.num_used == 0 == stats.num_host_used


@pytest.fixture(autouse=True)
def _use_manual_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.build.Scheduler", ManualScheduler)


def open_llm(tiny_model: TinyModel, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 900, "max_num_seqs": 48}
    return LLM(str(tiny_model.path), **(defaults | options))


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 4, 6])
def test_same_sequences_and_scores_as_transformers(
    width: int, penalty: float, early: bool | str, tiny_model: Callable[[str], TinyModel]
) -> None:
    model = tiny_model("llama")
    with open_llm(model, block_size=8) as llm:
        search_and_compare(model, llm, width, penalty, early, num=3)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "gemma4", "gpt2"])
def test_other_model_families(kind: str, tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model(kind)
    with open_llm(model) as llm:
        search_and_compare(model, llm, 4, 1.0, False)


@pytest.mark.parametrize("mode", [None, "recompute", "swap"])
@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("chunk", [8, 512])
def test_same_beams_with_preemption_chunks_and_block_sizes(
    mode: str | None, block_size: int, chunk: int, tiny_model: Callable[[str], TinyModel]
) -> None:
    model = tiny_model("llama")
    with open_llm(model, block_size=block_size, max_num_batched_tokens=chunk, swap_space=0.01) as llm:
        scheduler = llm.engine.scheduler
        assert isinstance(scheduler, PreemptingScheduler)
        if mode is not None:
            scheduler.preempt_randomly(PreemptionMode(mode), seed=block_size, max_preemptions=8)
        search_and_compare(model, llm, 4, 1.0, False)
        search_and_compare(model, llm, 4, 1.0, False)  # warm
        assert bool(scheduler.num_preemptions) == bool(mode)


def test_beam_search_in_a_mixed_batch(tiny_model: Callable[[str], TinyModel]) -> None:
    """Greedy, four samples, a beam search and an aborted request in one batch give the tokens of single requests."""
    model = tiny_model("llama")
    rng = random.Random(5)
    prompts = [model.prompts[rng.randrange(len(model.prompts))] for _ in range(4)]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    four = SamplingParams(n=4, seed=9, max_tokens=NUM_NEW, ignore_eos=True)
    beams = BeamSearchParams(beam_width=4, max_tokens=NUM_NEW, ignore_eos=True, stop_token_ids=STOPS)
    with open_llm(model) as llm:
        engine = StepClient(llm.engine)
        for name, prompt, params in zip("gnb", prompts, (greedy, four, beams), strict=False):
            engine.add_request(EngineRequest(name, prompt, params))
        engine.add_request(EngineRequest("x", prompts[3], greedy))
        found = {}
        for step in range(200):
            found.update({o.request_id: o for o in engine.step()})
            if step == 4:
                engine.abort("x")
            if not llm.engine.has_work:
                break
        alone = [llm.generate(p, q, use_tqdm=False)[0] for p, q in ((prompts[0], greedy), (prompts[1], four))]
        alone += llm.beam_search(prompts[2], beams, use_tqdm=False)
    for name, solo in zip("gnb", alone, strict=True):
        assert [c.token_ids for c in found[name].outputs] == [c.token_ids for c in solo.outputs]


def test_an_aborted_beam_search_returns_its_beams(tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("llama")
    with open_llm(model, async_scheduling=False) as llm:
        client = StepClient(llm.engine)
        client.add_request(
            EngineRequest("b", model.prompts[0], BeamSearchParams(beam_width=3, max_tokens=30, ignore_eos=True))
        )
        for _ in range(5):
            client.step()
        output = client.abort("b")
        assert output is not None and [c.finish_reason for c in output.outputs] == ["abort"] * 3
        assert all(2 <= len(c.token_ids) < 30 for c in output.outputs)
        assert llm.kv_stats().num_used == 0


def test_logprobs_of_beams(tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("llama")
    prompt = model.prompts[2]
    with open_llm(model) as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True, logprobs=9)
        (output,) = llm.beam_search(prompt, params, use_tqdm=False)
    for completion in output.outputs:
        with torch.inference_mode():
            logits = _model(model.path)(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        assert completion.logprobs is not None and len(completion.logprobs) == 6
        for token, entry, row in zip(completion.token_ids, completion.logprobs, logprobs, strict=True):
            assert entry is not None and entry[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert set(row.topk(9).indices.tolist()) <= set(entry)
        total = sum(float(row[t]) for t, row in zip(completion.token_ids, logprobs, strict=True))
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_best_of_returns_the_most_probable_samples(tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("llama")
    with open_llm(model) as llm:
        common = {"seed": 4, "max_tokens": 7, "ignore_eos": True}
        (ranked,) = llm.generate(model.prompts[4], SamplingParams(n=2, best_of=6, **common), use_tqdm=False)
        (every,) = llm.generate(model.prompts[4], SamplingParams(n=6, logprobs=0, **common), use_tqdm=False)
    best = sorted(every.outputs, key=lambda c: -(c.cumulative_logprob or 0))[:2]
    assert [c.token_ids for c in ranked.outputs] == [c.token_ids for c in best]
    assert [c.index for c in ranked.outputs] == [0, 1]
    assert [c.cumulative_logprob for c in ranked.outputs] == pytest.approx([c.cumulative_logprob for c in best])
