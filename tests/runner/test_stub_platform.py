"""The model runner on a device that keeps its state, with and without graphs, compared with the CPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.core.plan import StepPlan
from octavo.kernels import reference
from octavo.models.linear import VocabEmbedding, VocabSlice
from octavo.runner.passes import prefill_batch
from octavo.runner.passes.pass_shape import PassShape
from octavo.runner.sampling.host_sampling import HostSampler
from octavo.runner.sampling.sampler import NOT_FINITE
from tests.runner.stub_platform import FakeGraphs, use_stub_platform

OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks_override": 120,
    "max_num_seqs": 8,
    "device": "cpu",
    "max_logprobs": 30,
}


# -- the same tokens as the CPU's runner ------------------------------------------------------------------------------


def generate(
    model: str, params: list[SamplingParams], *, stub_platform: bool, fake_graphs: bool = False, **options: Any
) -> tuple[LLM, list[RequestOutput]]:
    prompts = [[3 + (7 * i + j * j) % 90 for j in range(3 + 5 * i % 23)] for i in range(len(params))]
    llm = LLM(model, **(OPTIONS | options))
    with use_stub_platform(llm, fake_graphs=fake_graphs) if stub_platform else llm:
        return llm, llm.generate(prompts, params, use_tqdm=False)


def completions(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (c.token_ids, c.finish_reason, c.stop_reason, [list(entry) for entry in c.logprobs or ()])
        for output in outputs
        for c in output.outputs
    ]


def mixed_params() -> list[SamplingParams]:
    """Greedy and random sampling, filters, stop tokens, several samples, and various lengths."""
    common: dict[str, Any] = {"ignore_eos": True}
    return [
        SamplingParams(temperature=0, max_tokens=19, **common),
        SamplingParams(temperature=0.9, seed=1, max_tokens=23, **common),
        SamplingParams(temperature=1.2, seed=2, top_k=7, max_tokens=17, **common),
        SamplingParams(temperature=1.0, seed=-3, top_p=0.7, max_tokens=1, **common),
        SamplingParams(temperature=1.5, seed=4, stop_token_ids=list(range(3, 40, 3)), max_tokens=30, **common),
        SamplingParams(temperature=1.1, seed=5, n=3, max_tokens=12, **common),
        SamplingParams(temperature=0.8, seed=6, min_p=0.1, max_tokens=2, **common),
        SamplingParams(temperature=2.0, seed=7, stop_token_ids=list(range(3, 97)), max_tokens=9, **common),
    ]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"decode_window": 5},
    "chunks": {"max_num_batched_tokens": 6, "decode_window": 3},
    "recompute": {"num_gpu_blocks_override": 14, "preemption_mode": "recompute", "decode_window": 2},
    "swap": {"num_gpu_blocks_override": 14, "preemption_mode": "swap"},
    "few rows": {"max_num_seqs": 3, "decode_window": 4},
    "no overlap": {"async_scheduling": False, "decode_window": 4},
    "blocks of one": {"block_size": 1, "decode_window": 3},
}


def processor_params() -> list[SamplingParams]:
    """Logits processors that run on the device."""
    common: dict[str, Any] = {"ignore_eos": True}
    return [
        SamplingParams(temperature=0.7, seed=8, repetition_penalty=1.4, max_tokens=21, **common),
        SamplingParams(temperature=1, seed=9, n=3, presence_penalty=1.5, frequency_penalty=0.5, max_tokens=9, **common),
        SamplingParams(temperature=0, frequency_penalty=2.0, logit_bias={40: 30.0, 41: 28.0}, max_tokens=14, **common),
        SamplingParams(temperature=1.2, seed=3, min_tokens=6, stop_token_ids=list(range(3, 12)), max_tokens=25),
        SamplingParams(temperature=1.3, seed=4, allowed_token_ids=[5, 17, 60, 61], max_tokens=17, **common),
        SamplingParams(
            temperature=1.1,
            seed=5,
            repetition_penalty=0.8,
            allowed_token_ids=list(range(3, 90, 2)),
            logit_bias={5: -3.0, 7: 4.0},
            min_tokens=11,
            stop_token_ids=[7, 9],
            max_tokens=20,
        ),
    ]


def grammar_params() -> list[SamplingParams]:
    def of(pattern: str, **params: Any) -> SamplingParams:
        return SamplingParams(max_tokens=12, structured_outputs={"regex": pattern}, **params)  # type: ignore[arg-type]

    return [
        of("[a-f]{5,9}", seed=1),
        of("b+", seed=2, temperature=0),
        of("x(yz)*", seed=3, n=3),
        of("[a-z]{12}", seed=4, repetition_penalty=1.5, presence_penalty=0.7, n=2),
        of("[a-c]+", seed=5, logit_bias={68: 3.0}, min_tokens=8),
    ]


def host_params() -> list[SamplingParams]:
    """Requests that need host sampling, and others of the same kinds that do not."""
    common: dict[str, Any] = {"ignore_eos": True}
    return [
        SamplingParams(temperature=0.7, seed=8, repetition_penalty=1.4, max_tokens=11, **common),
        SamplingParams(temperature=0, logprobs=30, max_tokens=5, **common),
        SamplingParams(temperature=1, seed=9, logit_bias={40: 30.0}, max_tokens=4, **common),
        SamplingParams(temperature=1, seed=9, min_tokens=6, stop_token_ids=list(range(3, 97)), max_tokens=9),
        SamplingParams(temperature=1, seed=9, presence_penalty=1.5, frequency_penalty=0.5, n=2, max_tokens=9, **common),
        SamplingParams(temperature=1.3, seed=4, allowed_token_ids=[5, 17, 60], max_tokens=7, **common),
        SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=3, **common),
    ]


def logprobs_and_ranks(outputs: list[RequestOutput]) -> list[tuple[float, int]]:
    """All returned log-probabilities and ranks."""
    return [
        (entry.logprob, entry.rank)
        for output in outputs
        for place in [*(output.prompt_logprobs or ()), *(p for c in output.outputs for p in c.logprobs or ())]
        for entry in (place or {}).values()
    ]


def same_logprobs(
    outputs: list[RequestOutput], expected: list[RequestOutput], min_num: int, within: float = 1e-5
) -> bool:
    """`within` is ten roundings of float32 at a log-probability of -9: kernels add in different orders."""
    actual, wanted = logprobs_and_ranks(outputs), logprobs_and_ranks(expected)
    assert len(actual) >= min_num and [rank for _, rank in actual] == [rank for _, rank in wanted]
    return [logprob for logprob, _ in actual] == pytest.approx([logprob for logprob, _ in wanted], abs=within)


def logprobs_params() -> list[SamplingParams]:
    """Log-probabilities of outputs and prompts."""
    common: dict[str, Any] = {"ignore_eos": True}
    return [
        SamplingParams(temperature=0, logprobs=2, max_tokens=15, **common),
        SamplingParams(temperature=1.3, seed=1, logprobs=20, n=3, max_tokens=7, **common),
        SamplingParams(temperature=1.1, seed=2, logprobs=0, stop_token_ids=list(range(3, 40, 3)), max_tokens=30),
        SamplingParams(temperature=0.9, seed=3, logprobs=5, repetition_penalty=1.6, max_tokens=13, **common),
        SamplingParams(temperature=1.0, seed=4, logprobs=3, logit_bias={40: 30.0}, max_tokens=3, **common),
        SamplingParams(temperature=1.2, seed=5, prompt_logprobs=4, max_tokens=14, **common),
        SamplingParams(temperature=0, logprobs=1, prompt_logprobs=0, allowed_token_ids=[9, 8], max_tokens=6, **common),
        SamplingParams(temperature=1.5, seed=6, logprobs=1, top_k=3, max_tokens=1, **common),
    ]


def params_of(kind: str) -> list[SamplingParams]:
    mixed, processors, grammars, logprobs = mixed_params(), processor_params(), grammar_params(), logprobs_params()
    return {
        "plain": mixed,
        "grammars": [*mixed, *grammars, *processors],
        "logprobs": [*mixed, *logprobs, *logprobs],
        "processors": [*processors, *mixed, *processors],
        "host": [mixed[0], *host_params(), *mixed[1:]],
        "processors and host": [*processors, *grammars, *host_params(), *processors],
        "grammars with logprobs": [grammars[0], replace(grammars[1], logprobs=3), *grammars[2:], *logprobs[:5]],
    }[kind]


TOGETHER: dict[str, list[str]] = {
    "plain": list(CASES),
    "grammars": ["plain", "windows", "chunks", "recompute", "swap", "no overlap"],
    "logprobs": list(CASES),
    "processors": ["windows", "chunks", "recompute", "few rows"],
    "host": ["plain", "windows"],
    "processors and host": ["windows", "chunks", "recompute"],
    "grammars with logprobs": ["windows"],
}
"""Rows go from requests of one kind to requests of another. Of the first four, only steps that return prompt
log-probabilities run on the host. A step with one request for the host runs there whole."""


@pytest.fixture(scope="module")
def on_cpu(model: str) -> Callable[[str, str], list[RequestOutput]]:
    @functools.cache
    def outputs(kind: str, case: str) -> list[RequestOutput]:
        return generate(model, params_of(kind), stub_platform=False, **CASES[case])[1]

    return outputs


@pytest.mark.parametrize("fake_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, cases in TOGETHER.items() for case in cases])
def test_outputs_equal_the_cpu_runners(
    model: str, on_cpu: Any, kind: str, case: str, fake_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, sample = on_cpu(kind, case), HostSampler.sample
    on_host: set[int] = set()

    def counted(self: HostSampler, plan: StepPlan, *rest: Any) -> Any:
        assert self.has_prompt_logprobs(plan) or "host" in kind or kind == "grammars with logprobs"
        on_host.add(plan.step)
        return sample(self, plan, *rest)

    monkeypatch.setattr(HostSampler, "sample", counted)
    llm, outputs = generate(model, params_of(kind), stub_platform=True, fake_graphs=fake_graphs, **CASES[case])
    assert completions(outputs) == completions(expected)
    assert all(reason in ("length", "stop") for _, reason, *_ in completions(outputs))
    assert same_logprobs(outputs, expected, {"logprobs": 700, "host": 150, "grammars with logprobs": 400}.get(kind, 0))
    if kind == "logprobs":
        assert 0 < len(on_host) < 0.6 * llm.stats().num_steps
    if "num_gpu_blocks_override" in CASES[case]:
        assert llm.stats().num_preemptions > 0


def use_slice(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """From now on, an engine is the only rank of a group, and its slice the whole vocabulary -> what it gathers."""
    found: list[torch.Tensor] = []

    def all_gather(x: torch.Tensor) -> torch.Tensor:
        found.append(x)
        return x

    monkeypatch.setattr(VocabEmbedding, "slice", VocabSlice(0, 0, all_gather))
    return found


@pytest.mark.parametrize("runner", ["cpu", "eager", "graphs"])
@pytest.mark.parametrize(("kind", "case"), [("plain", "windows"), ("plain", "swap"), *((k, "plain") for k in TOGETHER)])
def test_samples_from_a_slice(model: str, kind: str, case: str, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with processors, grammars, log-probabilities or filters without a top_k need all logits, and take their
    steps with them. The last steps have a row with a top_k, or none."""
    plain = SamplingParams(temperature=1.0, seed=9, max_tokens=90, ignore_eos=True)
    of_most = replace(plain, temperature=3.0, top_p=0.8, max_tokens=30)
    params = [*params_of(kind), plain, replace(plain, top_k=20, top_p=0.9, max_tokens=75), of_most]
    options: dict[str, Any] = {"stub_platform": runner != "cpu", "fake_graphs": runner == "graphs"}
    _, expected = generate(model, params, stub_platform=False, **CASES[case])
    gathered = use_slice(monkeypatch)
    _, outputs = generate(model, params, **options, **CASES[case])
    assert completions(outputs) == completions(expected)
    columns = [x.shape[1] for x in gathered]
    assert set(columns) == {3, 65} and columns.count(3) > columns.count(65)


def test_graphs_of_slices_are_captured_at_start(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with filters and those of whole logits on first use. All have been compiled."""
    use_slice(monkeypatch)
    plain = [SamplingParams(temperature=1, seed=i, max_tokens=5) for i in range(8)]
    with use_stub_platform(LLM(model, **OPTIONS), fake_graphs=True) as llm:
        runner = llm.engine.executor.runner  # type: ignore[attr-defined]
        passes, compiled = runner.passes, list[PassShape]()
        runner.capture()
        captured = passes.graphs.captured.work
        assert len(captured) > 10 and all(shape.sliced and shape.part == "pass" for shape in captured)
        with torch.inference_mode(), monkeypatch.context() as patch:
            patch.setattr(passes, "_compute", lambda shape, packed: compiled.append(shape))
            passes.run_all_variants()
        assert captured.keys() & compiled and {PassShape(8), PassShape(8, sliced=True)} < set(compiled)
        before = set(captured)
        llm.generate([[5, 6]] * 8, plain, use_tqdm=False)
        assert captured.keys() == before
        for top_k, sliced in (64, True), (65, False):
            llm.generate([[5, 6]] * 8, [replace(p, top_k=top_k) for p in plain], use_tqdm=False)
            assert {(shape.filters, shape.sliced) for shape in captured.keys() - before} == {(True, sliced)}
            before = set(captured)


@pytest.mark.parametrize("window", [1, 4])
def test_logits_processors_with_prompts_that_take_several_passes(
    model: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompt passes of a step together give its first column."""
    monkeypatch.setattr(prefill_batch, "MAX_PROMPT_LOGITS", 3)
    with_prompt_logprobs = [SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=3, ignore_eos=True)] * 3
    params = [*processor_params()[:2], *grammar_params()[3:], *with_prompt_logprobs]
    options: dict[str, Any] = {"decode_window": window, "max_num_seqs": 16, "max_num_batched_tokens": 16}
    _, expected = generate(model, params, stub_platform=False, **options)
    _, outputs = generate(model, params, stub_platform=True, **options)
    assert completions(outputs) == completions(expected)


def test_masked_sampling_and_the_next_pass_are_one_graph(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a decode window, except after a prefill pass and at the end."""
    replayed: list[Any] = []
    replay = FakeGraphs.replay
    monkeypatch.setattr(FakeGraphs, "replay", lambda self, name: [replayed.append(name), replay(self, name)])
    params = [
        SamplingParams(temperature=1, seed=i, max_tokens=12, structured_outputs={"regex": "[a-d]+"}) for i in (1, 2)
    ]
    _, expected = generate(model, params, stub_platform=False, decode_window=4)
    _, outputs = generate(model, params, stub_platform=True, fake_graphs=True, decode_window=4)
    assert completions(outputs) == completions(expected)
    decodes = [shape for shape in replayed if shape.part.startswith("sample") and isinstance(shape.size, int)]
    assert sum(shape.part == "sample and logits" for shape in decodes) >= len(decodes) // 2 > 3


@pytest.mark.parametrize("fake_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("has_grammar", [False, True], ids=["free", "grammar"])
def test_beam_search_gives_the_same_beams(model: str, has_grammar: bool, fake_graphs: bool) -> None:
    options: dict[str, Any] = {"structured_outputs": {"regex": "[a-d]+"}} if has_grammar else {}
    params = BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True, length_penalty=0.5, **options)
    prompts = [{"prompt_token_ids": [3 + (5 * i + j) % 90 for j in range(6 + i)]} for i in range(2)]
    found = []
    for stub_platform in (False, True):
        llm = LLM(model, **OPTIONS)
        with use_stub_platform(llm, fake_graphs=fake_graphs) if stub_platform else llm:
            found.append(llm.beam_search(prompts, params, use_tqdm=False))
    expected, outputs = ([beam for output in outputs for beam in output.outputs] for outputs in found)
    assert [beam.token_ids for beam in outputs] == [beam.token_ids for beam in expected] and len(outputs) == 6
    assert [beam.score for beam in outputs] == pytest.approx([beam.score for beam in expected], abs=1e-4)


def test_beam_candidates_of_nan_logits_and_small_vocabularies() -> None:
    """Each slice gets its number of candidates, or the whole vocabulary. A NaN is an error of its slice only."""
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    logits[1, 4] = math.nan
    plan = StepPlan()
    plan.rows, plan.num_samples = [4, 9], {0: 2, 1: 8}
    found = HostSampler.read_candidates(None, plan, reference.packed_top_logprobs(logits.bfloat16(), 8))  # type: ignore[arg-type]
    expected = logits[0].bfloat16().float().log_softmax(0).topk(2)
    assert found.tokens[0] == list(zip(expected.values.tolist(), expected.indices.tolist(), strict=True))
    assert found.errors == {1: NOT_FINITE} and len(found.tokens) == 2 and len(found.tokens[1]) == 6


def test_streamed_output_grows_during_a_decode_window(model: str) -> None:
    with use_stub_platform(LLM(model, decode_window=6, **OPTIONS)) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        lengths = [len(o.outputs[0].token_ids) for o in llm.stream([[5, 6, 7]], params)]
    assert lengths[-1] == 20 and lengths == sorted(set(lengths))
