"""`kv_cache_dtype="int8"` works together with every other option: each gives the tokens of an engine without it, and
none turns the 8 bits off."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.core.policy import PreemptionMode
from tests.differential.cases import PreemptingScheduler
from tests.differential.conftest import make_prompts
from tests.differential.test_transformers import ManualScheduler
from tests.models.tiny import make_tiny_checkpoint

PROMPTS = [[*prompt, *([20, 21, 22] * 4)] for prompt in make_prompts(seed=3, num=10)]  # with something to look up
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logit_bias={40: 8.0, 41: 7.5, 42: 7.0})
NOISE = SamplingParams(temperature=0.9, seed=5, n=3, top_p=0.9, max_tokens=8, ignore_eos=True)
PLAIN: dict[str, Any] = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 600,
    "block_size": 4,
    "max_num_seqs": 16,
    "enable_prefix_caching": False,
    "mamba_block_size": 16,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": {"max_model_len": 100},
    "gemma4": {"max_model_len": 100},
    "qwen3_5": {"num_gpu_blocks_override": 1200},
    "gpt2": {},
}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "prefix caching": ({"enable_prefix_caching": True}, ""),
    "recompute": ({}, "recompute"),
    "swap": ({}, "swap"),
    "swap and caching": ({"enable_prefix_caching": True, "decode_window": 4}, "swap"),
    "chunks": ({"max_num_batched_tokens": 7}, ""),
    "windows": ({"decode_window": 4, "async_scheduling": False}, ""),
    "speculation": ({"spec_method": "ngram"}, ""),
    "eager": ({"enforce_eager": True}, ""),
    "one group": ({"disable_hybrid_kv_cache_manager": True}, ""),
    "blocks of 1": ({"block_size": 1, "num_gpu_blocks_override": 4000}, ""),
}


@pytest.fixture(autouse=True)
def _use_manual_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.build.Scheduler", ManualScheduler)
    monkeypatch.setattr("octavo.core.kv_cache_spec.MIN_CHUNK", 8)  # else sequences are too short for groups


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    @functools.cache
    def of(kind: str) -> str:
        return str(make_tiny_checkpoint(kind, tmp_path_factory.mktemp("tiny") / kind))

    return of


@contextmanager
def engine(model: str, dtype: str = "float32", **options: Any) -> Iterator[LLM]:
    """An engine whose K and V are in 8 bits, on the device and the host."""
    with LLM(model, kv_cache_dtype="int8", dtype=dtype, **(PLAIN | options)) as llm:
        state, kv = llm.engine.executor.runner.state, llm.config.kv
        pools = [state.kv, state.swapper.host_kv, *((state.draft.kv, state.draft.host_kv) if state.draft else ())]
        assert all(pool.dtype == torch.int8 for pool in pools)
        num_bytes = kv.num_layers * 2 * kv.num_kv_heads * kv.block_size * (kv.head_dim + 2)
        if kv.full is not None:
            num_full, num_heads, head_dim = kv.full
            others = num_full * 2 * num_heads * kv.block_size * (head_dim + 2)
            num_bytes = max(num_bytes, others) if kv.windows else num_bytes + others
        assert state.kv[0].nbytes == num_bytes
        yield llm


def tokens(llm: LLM) -> list[list[int]]:
    outputs = [llm.generate(PROMPTS, params, use_tqdm=False) for params in (GREEDY, NOISE)]
    beams = llm.beam_search(PROMPTS[:3], BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True), use_tqdm=False)
    return [list(sample.token_ids) for each in (*outputs, beams) for output in each for sample in output.outputs]


@pytest.fixture(scope="module")
def expected(model: Callable[[str], str]) -> Callable[[str], list[list[int]]]:
    @functools.cache
    def of(kind: str) -> list[list[int]]:
        with engine(model(kind), **KINDS[kind]) as llm:
            return tokens(llm)

    return of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_each_option_gives_the_same_tokens(kind: str, name: str, model: Any, expected: Any) -> None:
    options, preempts = CASES[name]
    if (kind, name) == ("qwen3_5", "speculation"):
        pytest.skip("recurrent layers do not speculate")
    wanted = expected(kind)
    with engine(model(kind), **(KINDS[kind] | options)) as llm:
        scheduler, is_cached = llm.engine.scheduler, options.get("enable_prefix_caching", False)
        if is_cached:
            tokens(llm)
        if preempts:
            assert isinstance(scheduler, PreemptingScheduler)
            scheduler.preempt_randomly(PreemptionMode(preempts), seed=1, max_preemptions=12)
        assert tokens(llm) == wanted
        stats = llm.kv_stats()
        assert bool(scheduler.num_preemptions) == bool(preempts)
        assert bool(stats.num_swapped_in) == (preempts == "swap")
        assert bool(stats.num_hits) == is_cached
        assert bool(llm.config.kv.windows) == (kind in ("gemma3", "gemma4") and name != "one group")
        assert bool(llm.config.kv.state_bytes) == (kind == "qwen3_5")
        if name == "speculation":
            assert llm.stats().num_accepted_tokens > 5


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}])
def test_16_bit_and_quantised_weights(kind: str, options: dict[str, Any], model: Any) -> None:
    """Swaps move bytes, so they change no token; a prefix cache may, by rounding."""
    with engine(model(kind), **KINDS[kind], **options) as llm:
        wanted = tokens(llm)
        llm.engine.scheduler.preempt_randomly(PreemptionMode.SWAP, seed=2, max_preemptions=9)
        assert tokens(llm) == wanted
        assert llm.kv_stats().num_swapped_in and llm.config.dtype == "bfloat16"


def test_a_draft_models_keys_are_in_8_bits_too(model: Any, expected: Any) -> None:
    with engine(model("llama"), spec_model=model("llama"), spec_tokens=3) as llm:
        assert tokens(llm) == expected("llama")
        assert llm.stats().num_accepted_tokens > 20


def test_a_pinned_prefix_is_used(model: Any) -> None:
    prefix, prompt = list(range(20, 50)), [*range(20, 50), 7, 8]
    with engine(model("llama")) as llm:
        (before,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        llm.pin_prefix({"prompt_token_ids": prefix})
        (after,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert (before.num_cached_tokens, after.num_cached_tokens) == (0, 30)
        assert before.outputs[0].token_ids == after.outputs[0].token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_little_is_lost_and_something_is(kind: str, model: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for dtype in ("auto", "int8"):
        with LLM(model(kind), dtype="float32", kv_cache_dtype=dtype, **PLAIN) as llm:
            output = llm.generate([PROMPTS[7]], params, use_tqdm=False)[0]
            assert output.prompt_logprobs is not None
            found += [[each.logprob for entry in output.prompt_logprobs[1:] for each in entry.values()]]
    differences = [abs(a - b) for a, b in zip(*found, strict=True)]
    most = 0.1 if kind == "gemma4" else 0.03  # its scores have no factor, and are several times as large
    assert 1e-6 < sum(differences) / len(differences) < most
