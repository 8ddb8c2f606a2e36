"""Every pair of sampling parameters gives the tokens and log-probabilities of `uncached`, all pairs in one batch, in
every engine configuration."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.policy import PreemptionMode
from octavo.params.sampling_params import RequestOutputKind
from tests.differential.cases import PreemptingScheduler
from tests.differential.conftest import TinyModel
from tests.differential.test_transformers import ManualScheduler
from tests.differential.uncached import TopLogprobs, UncachedModel, expected_logprobs
from tests.engine.models import WrappedModel

EOS = 2
TOLERANCE = 1e-5
"""Tolerance of log-probabilities, absolute and relative."""

BAD_WORDS = [[7], [1, 2, 3], *([a, b] for a in range(60) for b in range(30, 50))]

# A value of each parameter that changes at least one of the tiny model's greedy outputs.
CHANGES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_p": {"top_p": 0.6},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.2},
    "seed": {"seed": 77},
    "n": {"n": 2},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -1.5},
    "logit_bias": {"logit_bias": {5: 4.0, 11: -100.0, EOS: 3.0}},
    "allowed_token_ids": {"allowed_token_ids": [EOS, *range(5, 60)]},
    "bad_words_token_ids": {
        "bad_words_token_ids": [[7], [20, 21], *([a, b] for a in range(60) for b in range(30, 50))]
    },
    "min_tokens": {"min_tokens": 3, "ignore_eos": False, "logit_bias": {EOS: 6.0}},
    "max_tokens": {"max_tokens": 3},
    "stop_token_ids": {"stop_token_ids": list(range(10, 97, 4))},
    "ignore_eos": {"ignore_eos": False},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "echo": {"echo": True},
    "output_kind": {"output_kind": RequestOutputKind.DELTA},
    "skip_reading_prefix_cache": {"skip_reading_prefix_cache": True},
    "all_logprobs": {"logprobs": -1},
}
NEED_NOISE = {"top_p", "top_k", "min_p", "seed"}
BASE: dict[str, Any] = {"temperature": 0, "max_tokens": 7, "seed": 5, "ignore_eos": True}


def both(first: str, second: str) -> SamplingParams:
    params = BASE | CHANGES[first] | CHANGES[second]
    if NEED_NOISE & {first, second} and not params["temperature"]:
        params["temperature"] = 1.0
    if "logit_bias" in CHANGES[first] and "logit_bias" in CHANGES[second]:
        params["logit_bias"] = CHANGES[first]["logit_bias"] | CHANGES[second]["logit_bias"]
    return SamplingParams(**params)


PAIRS = list(combinations(CHANGES, 2))
PARAMS = [both(*pair) for pair in PAIRS]


class Expected:
    """Samples and log-probabilities of every pair, by `uncached`."""

    def __init__(self, tiny_model: TinyModel) -> None:
        model = UncachedModel(tiny_model.path)
        self.prompts = [tiny_model.prompts[i % len(tiny_model.prompts)] for i in range(len(PARAMS))]
        self.samples = [
            [model.generate(prompt, params, eos=[EOS], sample_index=j) for j in range(params.n)]
            for prompt, params in zip(self.prompts, PARAMS, strict=True)
        ]
        self.prompt_logprobs = [
            None if params.prompt_logprobs is None else model.prompt_logprobs(prompt, params.prompt_logprobs)
            for prompt, params in zip(self.prompts, PARAMS, strict=True)
        ]


@pytest.fixture(scope="module")
def expected(tiny_model: Callable[[str], TinyModel]) -> Expected:
    return Expected(tiny_model("llama"))


def make(tiny_model: TinyModel, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "block_size": 4, "num_gpu_blocks_override": 4000, "max_num_seqs": 300, "max_logprobs": -1
    }  # fmt: skip
    return LLM(str(tiny_model.path), skip_tokenizer_init=True, **(defaults | options))


def assert_logprobs(entries: Any, wanted: list[tuple[float, int, TopLogprobs]], token_ids: list[int]) -> None:
    """Assert that entries have the expected log-probabilities of these tokens and of the top tokens."""
    assert len(entries) == len(wanted) == len(token_ids)
    for entry, (logprob, rank, top), token in zip(entries, wanted, token_ids, strict=True):
        assert next(iter(entry)) == token
        assert (
            entry[token].logprob == pytest.approx(logprob, rel=TOLERANCE, abs=TOLERANCE) and entry[token].rank == rank
        )
        assert set(entry) == {token, *(t for t, _ in top)}
        for i, (t, p) in enumerate(top, 1):
            assert entry[t].logprob == pytest.approx(p, rel=TOLERANCE, abs=TOLERANCE)
            assert entry[t].rank == (i if t != token else rank)
            assert entry[t].decoded_token is None


def check(outputs: list[RequestOutput], expected: Expected) -> None:
    for i, (output, params) in enumerate(zip(outputs, PARAMS, strict=True)):
        prompt, samples = expected.prompts[i], expected.samples[i]
        assert output.finished and [c.index for c in output.outputs] == list(range(params.n)), PAIRS[i]
        prompt_logprobs = expected.prompt_logprobs[i]
        if prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
            assert_logprobs(output.prompt_logprobs[1:], prompt_logprobs, prompt[1:])
            assert output.num_cached_tokens == 0
        for completion, sample in zip(output.outputs, samples, strict=True):
            before = prompt if params.echo else []
            assert completion.token_ids == before + sample.token_ids, PAIRS[i]
            assert (completion.finish_reason, completion.stop_reason) == (sample.finish_reason, sample.stop_reason)
            if params.logprobs is None:
                assert completion.logprobs is None and completion.cumulative_logprob is None
                continue
            assert completion.logprobs is not None
            assert_logprobs(completion.logprobs[len(before) :], sample.logprobs, sample.token_ids)
            total = sum(logprob for logprob, _, _ in sample.logprobs)
            assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
            if params.echo:
                assert completion.logprobs[: len(before)] == output.prompt_logprobs


@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("chunk", [512, 16])
def test_every_pair_equals_uncached_generation(
    tiny_model: Callable[[str], TinyModel], expected: Expected, window: int, overlap: bool, chunk: int
) -> None:
    rows = 300 if chunk == 512 else 12
    with make(
        tiny_model("llama"),
        decode_window=window,
        async_scheduling=overlap,
        max_num_batched_tokens=chunk,
        max_num_seqs=rows,
    ) as llm:
        check(llm.generate(expected.prompts, PARAMS, use_tqdm=False), expected)


def test_prefix_cache_hits_change_no_tokens(tiny_model: Callable[[str], TinyModel], expected: Expected) -> None:
    with make(tiny_model("llama")) as llm:
        check(llm.generate(expected.prompts, PARAMS, use_tqdm=False), expected)
        outputs = llm.generate(expected.prompts, PARAMS, use_tqdm=False)
        check(outputs, expected)
        for output, params in zip(outputs, PARAMS, strict=True):
            skips = params.skip_reading_prefix_cache or len(output.prompt_token_ids) <= 4
            assert bool(output.num_cached_tokens) != skips


@pytest.mark.parametrize("mode", list(PreemptionMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("window", [1, 5])
def test_preemption_changes_no_tokens(
    tiny_model: Callable[[str], TinyModel],
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
    mode: PreemptionMode,
    window: int,
) -> None:
    """Also in the middle of prompts, whose log-probabilities are then computed twice."""
    monkeypatch.setattr("octavo.frontend.build.Scheduler", ManualScheduler)
    with make(tiny_model("llama"), decode_window=window, max_num_batched_tokens=10, max_num_seqs=9) as llm:
        scheduler = llm.engine.scheduler
        assert isinstance(scheduler, PreemptingScheduler)
        scheduler.preempt_randomly(mode, seed=3, max_preemptions=60)
        outputs = llm.generate(expected.prompts, PARAMS, use_tqdm=False)
        check(outputs, expected)
        assert scheduler.num_preemptions == 60
        assert bool(llm.stats().num_swap_preemptions) == (mode is PreemptionMode.SWAP)


@pytest.mark.parametrize("room", [1, 5])
def test_prompt_logits_are_computed_in_parts(
    tiny_model: Callable[[str], TinyModel], expected: Expected, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr("octavo.runner.passes.prefill_batch.MAX_PROMPT_LOGITS", room)
    with make(tiny_model("llama"), decode_window=3) as llm:
        max_rows = 0
        runner = llm.engine.executor.runner  # type: ignore[attr-defined]
        inner = runner.passes.model

        class Counting:
            def forward(self, token_ids: Any, batch: Any, kv: Any, logits_rows: Any, sliced: bool) -> Any:
                nonlocal max_rows
                if logits_rows is not None:  # a prefill pass
                    max_rows = max(max_rows, len(set(logits_rows.tolist())) - batch.num_seqs)
                return inner.forward(token_ids, batch, kv, logits_rows, sliced)

        runner.passes.replace_model(Counting())
        check(llm.generate(expected.prompts, PARAMS, use_tqdm=False), expected)
        assert max_rows in (room - 1, room)  # a sequence in the middle of its prompt samples nothing


def test_failed_steps_change_no_tokens(tiny_model: Callable[[str], TinyModel], expected: Expected) -> None:
    with make(tiny_model("llama"), decode_window=3, max_num_batched_tokens=40, max_num_seqs=30) as llm:

        def fail(number: int, tokens: list[int]) -> None:
            if number % 9 == 5 and number < 80:  # not for a single request, which would fail twice in a row
                raise RuntimeError("planted")

        WrappedModel(llm, before=fail)
        outputs = llm.generate(expected.prompts, PARAMS, use_tqdm=False)
        assert llm.stats().num_failed_steps > 5
        check(outputs, expected)


GENERATE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 1.8}, {"repetition_penalty": 1.8}),
    "bad words": ({"bad_words_token_ids": BAD_WORDS}, {"bad_words_ids": BAD_WORDS}),
    "min tokens": (
        {"min_tokens": 5, "ignore_eos": False, "logit_bias": {EOS: 8.0}},
        {"min_new_tokens": 5, "eos_token_id": EOS, "sequence_bias": {(EOS,): 8.0}},
    ),
    "allowed": (
        {"allowed_token_ids": list(range(30, 70))},
        {"suppress_tokens": [t for t in range(97) if not 30 <= t < 70]},
    ),
    "bias": ({"logit_bias": {7: 5.0, 8: -5.0}}, {"sequence_bias": {(7,): 5.0, (8,): -5.0}}),
}
GENERATE["all"] = (
    {k: v for ours, _ in GENERATE.values() for k, v in ours.items()} | {"logit_bias": {EOS: 8.0}},
    {k: v for _, theirs in GENERATE.values() for k, v in theirs.items()} | {"sequence_bias": {(EOS,): 8.0}},
)


@pytest.mark.parametrize("name", GENERATE)
def test_same_tokens_as_transformers_generate(tiny_model: Callable[[str], TinyModel], name: str) -> None:
    ours, theirs = GENERATE[name]
    prompts = tiny_model("llama").prompts[:6]
    with make(tiny_model("llama"), decode_window=4) as llm:
        params = SamplingParams(**({"temperature": 0, "max_tokens": 12, "ignore_eos": True} | ours))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        plain = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    model = UncachedModel(tiny_model("llama").path).model
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            pad_token_id=0,
            **({"eos_token_id": None} | theirs),
        )
        assert output.outputs[0].token_ids == generated[0, len(prompt) :].tolist()
    assert [o.outputs[0].token_ids for o in outputs] != [
        o.outputs[0].token_ids for o in plain
    ]  # the parameters have an effect


def test_logprobs_equal_those_of_one_forward_pass(tiny_model: Callable[[str], TinyModel]) -> None:
    """All positions of prompt and output, against log_softmax of a single pass of Transformers."""
    prompts = tiny_model("qwen2").prompts
    params = SamplingParams(
        temperature=1.2, seed=9, top_p=0.95, repetition_penalty=1.2, max_tokens=20, ignore_eos=True, logprobs=4,
        prompt_logprobs=4, n=2,
    )  # fmt: skip
    with make(tiny_model("qwen2"), decode_window=4, max_num_batched_tokens=37) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    model = UncachedModel(tiny_model("qwen2").path)
    for output in outputs:
        prompt = output.prompt_token_ids
        assert output.outputs[0].token_ids != output.outputs[1].token_ids
        for completion in output.outputs:
            tokens = prompt + completion.token_ids
            wanted = [expected_logprobs(row, t, 4) for row, t in zip(model.logits(tokens), tokens[1:], strict=False)]
            assert output.prompt_logprobs is not None and completion.logprobs is not None
            assert_logprobs([*output.prompt_logprobs[1:], *completion.logprobs], wanted, tokens[1:])
