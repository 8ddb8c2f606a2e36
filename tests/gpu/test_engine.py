"""The engine on a GPU gives the tokens of the CPU's engine in float32, in all configurations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.core.plan import StepPlan
from octavo.runner.sampling.host_sampling import HostSampler
from tests.engine.models import make_talking_checkpoint
from tests.models.tiny import KINDS, make_tiny_checkpoint
from tests.proof.ways import OPTIONS, WAYS, runs
from tests.runner.test_stub_platform import (
    completions,
    grammar_params,
    host_params,
    logprobs_params,
    mixed_params,
    processor_params,
    same_logprobs,
)


def params() -> list[SamplingParams]:
    names = ("temperature", "seed", "top_k", "top_p", "min_p", "n", "max_tokens", "ignore_eos", "stop_token_ids")
    return [SamplingParams(**{name: getattr(p, name) for name in names}, detokenize=False) for p in mixed_params()]


@pytest.mark.parametrize(("kind", "min_chunk"), [*((kind, 512) for kind in KINDS), ("gemma3", 5)])
def test_tokens_equal_the_cpu_engines(
    kind: str, min_chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small chunks, Gemma 3's layers are in groups."""
    monkeypatch.setattr("octavo.core.kv_cache_spec.MIN_CHUNK", min_chunk)
    directory = str(make_tiny_checkpoint(kind, tmp_path / kind))
    prompts = [[3 + (7 * i + j * j) % 90 for j in range(3 + 5 * i % 23)] for i in range(len(params()))]
    with LLM(directory, device="cpu", **OPTIONS) as llm:
        assert bool(llm.config.kv.windows) == (min_chunk < 512)
        expected = completions(llm.generate(prompts, params(), use_tqdm=False))
    for way, options in WAYS.items():
        options = OPTIONS | options
        if min_chunk < 512 and options["num_gpu_blocks_override"] < 20:
            options["num_gpu_blocks_override"] = 20  # the longest sequence has 14
        with LLM(directory, device="cuda", **options) as llm:
            for outputs in runs(llm, way, prompts, params()):
                assert completions(outputs) == expected, way


def bad_words_params() -> list[SamplingParams]:
    """Most tokens are bad words, or end one."""
    words = [*([i] for i in range(3, 80, 2)), *([i, i + 2] for i in range(4, 70, 2))]
    common: dict[str, Any] = {"bad_words_token_ids": words, "ignore_eos": True, "max_tokens": 20}
    return [SamplingParams(temperature=0.9, seed=6, n=2, **common), SamplingParams(temperature=0, **common)]


@pytest.mark.parametrize("way", ["eager", "graphs", "windows", "chunks", "swap", "drafts"])
def test_all_sampling_features_together(way: str, tmp_path: Path) -> None:
    """Grammars, logits processors, log-probabilities and beams, together with plain requests."""
    directory = str(make_talking_checkpoint(tmp_path))
    params = [
        *grammar_params(),
        *mixed_params()[:4],
        *host_params(),
        *mixed_params()[4:],
        *processor_params(),
        *logprobs_params(),
        *bad_words_params(),
    ]
    prompts = [[3 + (7 * i + j * j) % 90 for j in range(3 + 5 * i % 23)] for i in range(len(params))]
    beams = BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True)
    options = OPTIONS | {"skip_tokenizer_init": False, "num_gpu_blocks_override": 40, "preemption_mode": "swap"}
    options["max_logprobs"] = 30
    found = []
    for device, more in (("cpu", {}), ("cuda", WAYS[way])):
        with LLM(directory, device=device, **(options | more)) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            best = llm.beam_search([{"prompt_token_ids": prompts[5]}], beams, use_tqdm=False)
            found.append((completions(outputs), [b.token_ids for b in best[0].outputs]))
    assert found[1] == found[0]
    assert all(reason != "error" for _, reason, *_ in found[1][0])


def generate_on_both(
    params: list[SamplingParams], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[list[RequestOutput]]:
    """Outputs of the CPU's engine, and of the GPU's without host sampling, except for prompt log-probabilities."""
    sample = HostSampler.sample

    def only_prompt_logprobs(self: HostSampler, plan: StepPlan, *rest: Any) -> Any:
        assert self.has_prompt_logprobs(plan)
        return sample(self, plan, *rest)

    directory = make_tiny_checkpoint("llama", tmp_path / "llama")
    params = [replace(p, detokenize=False) for p in params]
    prompts = [[3 + (7 * i + j * j) % 90 for j in range(3 + 5 * i % 23)] for i in range(len(params))]
    found = []
    for device, more in (("cpu", {}), ("cuda", WAYS[way])):
        if device == "cuda":
            monkeypatch.setattr(HostSampler, "sample", only_prompt_logprobs)
        with LLM(str(directory), device=device, **(OPTIONS | more)) as llm:
            found.append(llm.generate(prompts, params, use_tqdm=False))
    return found


@pytest.mark.parametrize("way", ["eager", "windows", "chunks", "recompute", "swap"])
def test_logits_processors_need_no_host_sampling(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, outputs = generate_on_both(
        [*processor_params(), *mixed_params(), *processor_params()], way, tmp_path, monkeypatch
    )
    assert completions(outputs) == completions(expected)


@pytest.mark.parametrize("way", ["graphs", "eager", "windows", "chunks", "recompute", "swap"])
def test_logprobs_need_no_host_sampling(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [*mixed_params(), *logprobs_params(), *processor_params(), *logprobs_params()]
    expected, outputs = generate_on_both(params, way, tmp_path, monkeypatch)
    assert completions(outputs) == completions(expected) and same_logprobs(outputs, expected, 700, within=1e-4)


@pytest.mark.parametrize("way", ["eager", "windows", "chunks", "swap"])
def test_grammars_need_no_host_sampling(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several times: during the first run, graphs are captured while bitmasks are copied to the device."""
    directory = str(make_talking_checkpoint(tmp_path))
    params = [*grammar_params(), *mixed_params()[:4], *grammar_params(), *processor_params(), *grammar_params()]
    prompts = [[3 + (7 * i + j * j) % 90 for j in range(3 + 5 * i % 23)] for i in range(len(params))]
    options = OPTIONS | {"skip_tokenizer_init": False, "num_gpu_blocks_override": 40, "preemption_mode": "swap"}
    with LLM(directory, device="cpu", **(options | WAYS[way])) as llm:
        expected = completions(llm.generate(prompts, params, use_tqdm=False))
    monkeypatch.delattr(HostSampler, "sample")
    with LLM(directory, device="cuda", **(options | WAYS[way] | {"enable_prefix_caching": False})) as llm:
        for _ in range(4):
            assert completions(llm.generate(prompts, params, use_tqdm=False)) == expected


def test_a_closed_engine_frees_its_memory(tmp_path: Path) -> None:
    def allocated() -> int:
        torch._C._cuda_clearCublasWorkspaces()  # torch keeps 32 MiB for every stream with a matrix product
        return torch.cuda.memory_allocated()

    directory = make_tiny_checkpoint("llama", tmp_path / "llama")
    before = allocated()
    for _ in range(2):
        with LLM(str(directory), device="cuda", **OPTIONS) as llm:
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, detokenize=False), use_tqdm=False)
        del llm
    assert allocated() - before < 4 << 20
