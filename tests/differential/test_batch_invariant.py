"""With `batch_invariant`, tokens and log-probabilities have the same bits whatever runs beside a request, and however
it is cut into chunks, cached, preempted or drafted."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams
from octavo.checkpoint.resolve import open_checkpoint
from octavo.config import EngineArgs
from octavo.core.policy import PreemptionMode
from octavo.errors import ParameterError
from octavo.kernels.cpu import invariant_ops, native, packed_linear
from octavo.kernels.cpu.packed_linear import CpuFeatures
from octavo.models.config import read_spec
from octavo.models.linear_methods import PackedMethod, find_linear_method
from octavo.runner.platform import CudaPlatform
from tests.differential.test_transformers import ManualScheduler
from tests.models.tiny import VOCAB_SIZE, make_tiny_checkpoint, write_tiny_gguf

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C++ compiler")

RNG = random.Random(0)
PROMPTS = [
    [RNG.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (90, *(1 + 7 * i % 61 for i in range(20)))
]
BIAS = {40: 8.0, 41: 7.5, 42: 7.0}  # for text that repeats, and drafts that are right
WANTED: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "logit_bias": BIAS, "logprobs": 5}
GREEDY = SamplingParams(temperature=0, prompt_logprobs=2, **WANTED)
NOISE = SamplingParams(temperature=0.8, seed=3, top_p=0.95, **WANTED)
THREE = SamplingParams(temperature=0.9, seed=4, n=3, **WANTED)
PLAIN: dict[str, Any] = {
    "device": "cpu",
    "batch_invariant": True,
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 900,
    "block_size": 4,
    "enable_prefix_caching": False,
    "max_model_len": 120,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {}),
    "gemma4": ("gemma4", {}),
    "gpt2": ("gpt2", {}),
    "olmo2": ("olmo2", {}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "8-bit weights": ("llama", {"quantization": "int8"}),
    "8-bit K and V": ("gemma3", {"kv_cache_dtype": "int8"}),
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


def bits(output: RequestOutput) -> list[Any]:
    """The tokens and log-probabilities of an output, those of its prompt included."""
    prompt = [sorted((i, p.logprob) for i, p in (entry or {}).items()) for entry in output.prompt_logprobs or ()]
    found: list[Any] = [prompt]
    for sample in output.outputs:
        assert len(sample.token_ids) == 16 and sample.logprobs
        found += [sample.token_ids, [sorted((i, p.logprob) for i, p in entry.items()) for entry in sample.logprobs]]
    return found


def first(llm: LLM, num_others: int = 0, others: SamplingParams = THREE) -> list[Any]:
    """Greedy and sampled results of the first prompt, as the last of several."""
    found = []
    for params in (GREEDY, NOISE):
        prompts = [*PROMPTS[1 : 1 + num_others], PROMPTS[0]]
        outputs = llm.generate(prompts, [*[others] * num_others, params], use_tqdm=False)
        found.append(bits(outputs[-1]))
    return found


def variants(path: str, **options: Any) -> dict[str, list[Any]]:
    """Results of the first prompt in every situation, by its name."""
    options = PLAIN | options
    found = {}
    with LLM(path, **options) as llm:
        scheduler = llm.engine.scheduler
        assert isinstance(scheduler, ManualScheduler)
        found["alone"] = first(llm)
        for num in (1, 5, 20):
            found[f"beside {num}"] = first(llm, num)
        found["beside its like"] = first(llm, 20, GREEDY)
        for mode in PreemptionMode:
            for num in (0, 5):
                before = scheduler.num_preemptions
                scheduler.preempt_randomly(mode, seed=1, max_preemptions=8)
                found[f"{mode.value} beside {num}"] = first(llm, num)
                assert scheduler.num_preemptions > before
        assert llm.kv_stats().num_swapped_in
    for chunk in (7, 64):
        with LLM(path, **options, max_num_batched_tokens=64, long_prefill_token_threshold=chunk) as llm:
            found[f"chunks of {chunk}"] = first(llm)
            found[f"chunks of {chunk} beside 20"] = first(llm, 20)
    with LLM(path, **(options | {"enable_prefix_caching": True})) as llm:
        llm.generate([PROMPTS[0][:50]], NOISE, use_tqdm=False)
        found["a cached prefix"] = first(llm)
        found["cached, beside 5"] = first(llm, 5)
        assert llm.kv_stats().num_hits
    if "qwen3_" in path:  # recurrent layers do not speculate
        return found
    with LLM(path, **options, spec_method="ngram") as llm:
        found["drafts"] = first(llm)
        found["drafts beside 20"] = first(llm, 20)
        assert llm.stats().num_accepted_tokens > 5
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_request_has_the_same_bits_in_every_situation(name: str, model: Any) -> None:
    kind, options = CASES[name]
    alone, *others = variants(model(kind), **options).items()
    assert [situation for situation, found in others if found != alone[1]] == []


def test_without_it_they_differ(model: Any) -> None:
    """Where oneDNN has products of many rows: elsewhere all of them are native."""
    found = variants(model("llama"), batch_invariant=False, dtype="bfloat16")
    different = {situation for situation, each in found.items() if each != found["alone"]}
    assert ("recompute beside 0" in different) == packed_linear.detect_features().onednn


def test_processors_with_a_matrix_unit_use_the_native_product_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    if not packed_linear.detect_features().onednn:
        pytest.skip("oneDNN packs bfloat16 on processors with AVX-512 only")
    monkeypatch.setattr(packed_linear, "detect_features", lambda: CpuFeatures(native=True, onednn=True, amx=True))
    weight, x = torch.randn(64, 128).bfloat16(), torch.randn(40, 128).bfloat16()
    backends = []
    for batch_invariant in (False, True):
        method = find_linear_method(None, "cpu", batch_invariant=batch_invariant)(
            64, 128, ops=invariant_ops, dtype=torch.bfloat16, device="cpu"
        )
        assert isinstance(method, PackedMethod)
        method.allocate([(64, None)])
        method.rows(0, 64).copy_(weight)  # type: ignore[union-attr]
        method.finish()
        assert isinstance(method.packed, packed_linear.TiledWeight)
        backends.append(method.packed.backend)
    assert backends == ["native and oneDNN", "native"]
    assert torch.equal(method.apply(x, None)[:3], method.apply(x[:3], None))


def test_what_is_not_supported_is_refused(model: Any) -> None:
    for options, message in (
        ({"dtype": "float32"}, "dtype float32; use bfloat16"),
        ({"dtype": "float16"}, "dtype float16; use bfloat16"),
    ):
        with pytest.raises(ParameterError, match=message):
            LLM(model("llama"), **(PLAIN | options))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("llama", {"tensor_parallel_size": 2}, "tensor_parallel_size 2 on a GPU; use one GPU"),
        ("llama", {"quantization": "int8"}, "quantised weights on a GPU; use a checkpoint in 16 bits"),
        ("Q8_0", {}, "quantised weights on a GPU"),
        ("qwen3_5", {}, "recurrent layers on a GPU; set device to cpu"),
        ("projected", {}, "with projected embeddings; remove it"),
    ],
)
def test_what_a_gpu_does_not_support_is_refused(
    kind: str, options: dict[str, Any], message: str, model: Any, tmp_path: Path
) -> None:
    platform = object.__new__(CudaPlatform)
    path = model({"projected": "opt", "Q8_0": "llama"}.get(kind, kind))
    if kind == "Q8_0":
        path = str(write_tiny_gguf(Path(path), tmp_path / "m.gguf", quantisation=kind))
    spec = read_spec(open_checkpoint(path))
    if kind == "projected":
        spec = replace(spec, embedding_size=24)
    with pytest.raises(ParameterError, match=message):
        platform.make_batch_invariant(spec, "bfloat16", EngineArgs(path, **options))


def test_a_gpu_gets_its_invariant_operations(model: Any) -> None:
    pytest.importorskip("triton")
    platform, path = object.__new__(CudaPlatform), model("gpt_oss")
    platform.make_batch_invariant(read_spec(open_checkpoint(path)), "bfloat16", EngineArgs(path))
    assert platform.ops.__name__ == "octavo.kernels.triton.invariant_ops" and not platform.has_cascade  # type: ignore[attr-defined]
