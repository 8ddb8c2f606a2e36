"""The model runner on a device that keeps its state, with and without graphs, compared with the CPU."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.core.plan import BlockCopy, RowSetup, StepPlan, SwapIn, SwapOut, TableWrite
from octavo.errors import StepError
from octavo.kernels import reference
from octavo.kernels.row_state import IN_PROMPT, MAX_STOP_IDS
from octavo.runner import prefill_batch
from octavo.runner.cuda_graphs import cascade_sizes, decode_sizes
from octavo.runner.executor import Executor
from octavo.runner.input_buffers import table_writes
from octavo.runner.kv_swap import runs
from octavo.runner.model_runner import ModelRunner
from octavo.runner.prefill_batch import PrefillSize, PrefillSizes
from octavo.runner.sampling.host_sampling import HostSampler
from octavo.runner.sampling.sampler import NO_ALLOWED_TOKEN, NOT_FINITE
from tests.engine.models import make_talking_checkpoint
from tests.runner.handwritten_plans import SIZE, VOCAB, NextTokenModel, Plan
from tests.runner.stub_platform import FakeGraphs, StubPlatform, use_stub_platform

OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks_override": 120,
    "max_num_seqs": 8,
    "device": "cpu",
    "max_logprobs": 30,
}


# -- the same tokens as the CPU's runner ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_talking_checkpoint(tmp_path_factory.mktemp("talking")))


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


@pytest.mark.parametrize("fake_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("case", list(CASES))
def test_tokens_equal_the_cpu_runners(model: str, case: str, fake_graphs: bool) -> None:
    params, options = mixed_params(), CASES[case]
    _, expected = generate(model, params, stub_platform=False, **options)
    llm, outputs = generate(model, params, stub_platform=True, fake_graphs=fake_graphs, **options)
    assert completions(outputs) == completions(expected)
    if "num_gpu_blocks_override" in options:
        assert llm.stats().num_preemptions > 0


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


@pytest.mark.parametrize("fake_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("case", ["plain", "windows", "chunks", "recompute", "swap", "no overlap"])
def test_grammars_need_no_host_sampling(
    model: str, case: str, fake_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together with other requests."""
    params, options = [*mixed_params(), *grammar_params(), *processor_params()], CASES[case]
    _, expected = generate(model, params, stub_platform=False, **options)
    monkeypatch.delattr(HostSampler, "sample")
    llm, outputs = generate(model, params, stub_platform=True, fake_graphs=fake_graphs, **options)
    assert completions(outputs) == completions(expected)
    assert re.fullmatch("[a-f]{5,9}", outputs[len(mixed_params())].outputs[0].text)
    if "num_gpu_blocks_override" in options:
        assert llm.stats().num_preemptions > 0


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
    actual, wanted = logprobs_and_ranks(outputs), logprobs_and_ranks(expected)
    assert len(actual) >= min_num and [rank for _, rank in actual] == [rank for _, rank in wanted]
    return [logprob for logprob, _ in actual] == pytest.approx([logprob for logprob, _ in wanted], abs=within)


@pytest.mark.parametrize("fake_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("window", [1, 4])
def test_host_sampling_gives_the_same_tokens_and_logprobs(model: str, window: int, fake_graphs: bool) -> None:
    """Together with other requests, in the same rows after one another."""
    params = mixed_params()
    params[1:1] = host_params()
    _, expected = generate(model, params, stub_platform=False, decode_window=window)
    _, outputs = generate(model, params, stub_platform=True, fake_graphs=fake_graphs, decode_window=window)
    assert completions(outputs) == completions(expected) and same_logprobs(outputs, expected, 150)
    assert completions(outputs)[3][0] == [40] * 4


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


@pytest.mark.parametrize("fake_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("case", [*CASES])
def test_logprobs_need_no_host_sampling(
    model: str, case: str, fake_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows go from requests with log-probabilities to requests without, and back. Only steps that return prompt
    log-probabilities run on the host."""
    params, options = [*mixed_params(), *logprobs_params(), *logprobs_params()], CASES[case]
    _, expected = generate(model, params, stub_platform=False, **options)
    columns: list[int] = []
    sample = HostSampler.sample

    def counted(self: HostSampler, plan: StepPlan, *rest: Any) -> Any:
        assert self.has_prompt_logprobs(plan)
        columns.append(plan.step)
        return sample(self, plan, *rest)

    monkeypatch.setattr(HostSampler, "sample", counted)
    llm, outputs = generate(model, params, stub_platform=True, fake_graphs=fake_graphs, **options)
    assert completions(outputs) == completions(expected) and same_logprobs(outputs, expected, 700)
    assert 0 < len(set(columns)) < 0.6 * llm.stats().num_steps
    if "num_gpu_blocks_override" in options:
        assert llm.stats().num_preemptions > 0


def test_grammars_with_logprobs_are_sampled_on_the_host(model: str) -> None:
    """The bitmask changes the logits, so the host computes the log-probabilities before it."""
    params = [*grammar_params(), *logprobs_params()[:5]]
    params[1] = replace(params[1], logprobs=3)
    _, expected = generate(model, params, stub_platform=False, decode_window=3)
    _, outputs = generate(model, params, stub_platform=True, decode_window=3)
    assert completions(outputs) == completions(expected) and same_logprobs(outputs, expected, 400)


@pytest.mark.parametrize("fake_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("case", ["plain", "windows", "chunks", "recompute", "swap", "few rows"])
def test_logits_processors_need_no_host_sampling(
    model: str, case: str, fake_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows go from requests with logits processors to requests without, and back."""
    params, options = [*processor_params(), *mixed_params(), *processor_params()], CASES[case]
    _, expected = generate(model, params, stub_platform=False, **options)
    monkeypatch.delattr(HostSampler, "sample")
    llm, outputs = generate(model, params, stub_platform=True, fake_graphs=fake_graphs, **options)
    assert completions(outputs) == completions(expected)
    assert all(reason in ("length", "stop") for _, reason, *_ in completions(outputs))
    if "num_gpu_blocks_override" in options:
        assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize("case", ["windows", "chunks", "recompute"])
def test_logits_processors_stay_correct_across_host_sampled_steps(model: str, case: str) -> None:
    """A step with one request for the host is sampled there whole, and its tokens are counted on the device."""
    params, options = (
        [*processor_params(), *grammar_params(), *host_params(), *processor_params()],
        CASES[case],
    )
    _, expected = generate(model, params, stub_platform=False, **options)
    _, outputs = generate(model, params, stub_platform=True, **options)
    assert completions(outputs) == completions(expected)


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
    decodes = [name for name in replayed if name[0] in ("masked", "masked pass") and isinstance(name[1], int)]
    assert sum(name[0] == "masked pass" for name in decodes) >= len(decodes) // 2 > 3


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


# -- plans written by hand --------------------------------------------------------------------------------------------


@pytest.fixture
def fake_model() -> NextTokenModel:
    return NextTokenModel()


@pytest.fixture
def executor(fake_model: NextTokenModel) -> Iterator[Executor]:
    kv = torch.zeros(9, 1, 2, 1, SIZE, 1)  # 8 usable blocks
    executor = Executor(
        ModelRunner(
            fake_model,
            kv,
            torch.zeros_like(kv),
            StubPlatform(),
            num_rows=4,
            max_model_len=8,
            max_num_tokens=16,
            max_decode_steps=4,
            vocab_size=VOCAB,
            graphs=False,
        )
    )
    yield executor
    executor.close()


def tokens_of(executor: Executor, plan: Plan) -> list[list[int]]:
    return [list(tokens) for tokens in executor.submit(plan).result().tokens]


def test_only_steps_of_plain_beams_return_candidates_from_a_graph(executor: Executor) -> None:
    """All rows must be beams, without logits processors and bitmasks."""
    host_sampling = executor.runner.host_sampler
    plain = [RowSetup(row, SamplingParams(), 0, 0, frozenset(), 1, None, True) for row in range(3)]
    other = [RowSetup(3, SamplingParams(logit_bias={1: 2.0}), 0, 0, frozenset(), 1, None, True)]
    plan = StepPlan()
    plan.row_setups = [*plain, *other]
    executor.runner.logits_processors.apply(plan)
    host_sampling.apply(plan)

    def num_candidates(rows: list[int], num_samples: dict[int, int], bitmask_slices: tuple[int, ...] = ()) -> int:
        plan.rows, plan.num_samples, plan.bitmask_slices = rows, num_samples, list(bitmask_slices)
        return host_sampling.num_beam_candidates(plan)

    assert num_candidates([0, 2], {0: 4, 1: 6}) == 6
    assert num_candidates([0, 2], {0: 4}) == 0
    assert num_candidates([0, 3], {0: 4, 1: 4}) == 0
    assert num_candidates([0], {0: 4}, bitmask_slices=(0,)) == 0


def test_only_the_last_prefill_chunk_samples(executor: Executor, fake_model: NextTokenModel) -> None:
    assert tokens_of(executor, Plan().give(0, (3, 1)).slice(0, 0, 2, 0, [4, 5])) == [[]]
    assert tokens_of(executor, Plan().slice(0, 2, 1, 1, [6])) == [[7]]
    assert tokens_of(executor, Plan().slice(0, 3, 1, 1)) == [[8]]
    assert fake_model.passes == [([4, 5], [0, 1], [6, 7]), ([6], [2], [2]), ([7], [3], [3])]


def test_a_decode_window_ends_at_a_stop_token_or_at_its_length(executor: Executor, fake_model: NextTokenModel) -> None:
    plan = Plan().give(0, (1, 2, 3), stops=(6,)).give(1, (4, 5)).slice(0, 0, 5, 4, [2, 4]).slice(1, 0, 3, 3, [8])
    assert tokens_of(executor, plan) == [[5, 6], [9, 10, 0]]
    assert fake_model.passes == [
        ([2, 4, 8], [0, 1, 0], [2, 3, 8]),
        ([5, 9], [2, 1], [4, 9]),
        ([6, 10], [0, 2], [0, 10]),  # row 0 has stopped: the null block replaces it
        ([6, 0], [0, 0], [0, 0]),
    ]
    assert tokens_of(executor, Plan().slice(0, 4, 1, 1).slice(1, 3, 1, 1)) == [
        [],
        [1],
    ]  # planned before the stop
    assert tokens_of(executor, Plan().slice(0, 3, 1, 1, [6]).slice(1, 4, 1, 1)) == [
        [7],
        [2],
    ]  # host tokens end done


def test_a_done_row_computes_nothing_in_a_prefill_pass(executor: Executor, fake_model: NextTokenModel) -> None:
    assert tokens_of(executor, Plan().give(0, (1,), stops=(5,)).slice(0, 0, 1, 1, [4])) == [[5]]
    fake_model.passes.clear()
    plan = Plan().give(1, (2, 3)).slice(0, 1, 1, 1).slice(1, 0, 3, 1, [1, 2, 3])
    assert tokens_of(executor, plan) == [[], [4]]
    assert fake_model.passes == [([5, 1, 2, 3], [0, 0, 1, 2], [0, 4, 5, 6])]


def test_several_samples_before_a_fork_do_not_end_the_row(executor: Executor) -> None:
    plan = Plan().give(2, (6,), stops=(4,)).slice(2, 0, 1, 1, [3], num_samples=3)
    assert tokens_of(executor, plan) == [[4, 4, 4]]


def test_samples_differ_by_their_sample_index(executor: Executor) -> None:
    plan = Plan().give(2, (6,), temperature=2.0, seed=1).slice(2, 0, 1, 1, [3], num_samples=8)
    assert len(set(tokens_of(executor, plan)[0])) > 1


def test_the_later_write_to_a_block_table_entry_counts(executor: Executor, fake_model: NextTokenModel) -> None:
    plan = Plan().give(0, (1, 2)).give(0, (7, 8), stops=(9,)).slice(0, 0, 3, 1, [6, 7, 8])
    assert tokens_of(executor, plan) == [[9]]
    assert fake_model.passes == [([6, 7, 8], [0, 1, 2], [14, 15, 16])]
    assert tokens_of(executor, Plan().slice(0, 3, 1, 1)) == [[]]  # likewise of two row setups


def test_no_block_table_entry_is_written_twice() -> None:
    """A GPU writes entries in any order."""
    writes = [TableWrite(2, 0, (5, 6, 7)), TableWrite(1, 4, (8,)), TableWrite(2, 1, (9,)), TableWrite(2, 3, (4, 3))]
    indices, ids = table_writes(writes, 10)
    assert dict(zip(indices.tolist(), ids.tolist(), strict=True)) == {20: 5, 21: 9, 22: 7, 23: 4, 24: 3, 14: 8}
    assert len(indices) == 6


def test_plans_use_the_halves_of_the_output_buffers_by_turns(executor: Executor) -> None:
    buffers = executor.runner.output_buffers
    outputs, columns = [], []
    for _ in range(4):
        outputs.append(buffers.new_output(1))
        columns.append(buffers.first_column)
    assert columns == [4, 0, 4, 0] and buffers.tokens.shape[0] == 8


def test_host_sampling_of_a_decode_window_together_with_a_prompt(executor: Executor) -> None:
    """The passes after the first have fewer slices."""
    assert tokens_of(executor, Plan().give(1, (3, 4), logprobs=21).slice(1, 0, 1, 1, [5])) == [[6]]
    plan = Plan().give(0, (1, 2), logprobs=21).slice(0, 0, 2, 1, [2, 3]).slice(1, 1, 3, 3)
    assert tokens_of(executor, plan) == [[4], [7, 8, 9]]


def test_unread_outputs_survive_the_reuse_of_their_buffers(executor: Executor) -> None:
    running = [executor.submit(Plan().give(0, (1, 2)).slice(0, 0, 1, 1, [3]))]
    running += [executor.submit(Plan().slice(0, 1 + i, 1, 1)) for i in range(4)]
    assert [run.result().tokens for run in running] == [[[4 + i]] for i in range(5)]


def test_logprobs_come_with_their_tokens(executor: Executor) -> None:
    """One entry a token, with at most the whole vocabulary as top log-probabilities; none for the row's next owner.
    Unread entries survive the reuse of their buffers."""
    plan = Plan().give(0, (1, 2, 3), stops=(6,), logprobs=1).give(1, (4, 5)).give(2, (6, 7), logprobs=20)
    running = [
        executor.submit(plan.slice(0, 0, 4, 3, [3, 4]).slice(1, 0, 3, 3, [8]).slice(2, 0, 1, 1, [5], num_samples=2))
    ]
    running += [executor.submit(Plan().slice(2, 1 + i, 1, 1)) for i in range(2)]
    running += [executor.submit(Plan().give(2, (6, 7)).slice(2, 1 + i, 1, 1, [i])) for i in range(2)]
    first, *rest = [run.result() for run in running]
    assert first.tokens == [[5, 6], [9, 10, 0], [6, 6]] and set(first.logprobs) == {0, 2}
    expected = torch.tensor([5.0, *[0.0] * 10]).log_softmax(0)
    for i, lengths in {0: [1, 1], 2: [VOCAB, VOCAB]}.items():
        entries = first.logprobs[i]
        assert [len(entry.top_ids) for entry in entries] == [len(entry.top) for entry in entries] == lengths
        for entry, token in zip(entries, first.tokens[i], strict=True):
            assert entry.rank == 1 and entry.top_ids == [token, *(t for t in range(VOCAB) if t != token)][: lengths[0]]
            assert [entry.logprob, *entry.top[1:]] == pytest.approx(expected[: lengths[0]].tolist(), abs=1e-6)
    assert [set(result.logprobs) for result in rest] == [{0}, {0}, set(), set()]
    assert [result.logprobs[0][0].top_ids[0] for result in rest[:2]] == [result.tokens[0][0] for result in rest[:2]]
    assert not executor.runner.logits_processors.rows


def test_host_sampling_commits_stop_tokens_to_the_device(executor: Executor) -> None:
    plan = Plan().give(0, (1, 2), stops=(4,), logprobs=21).slice(0, 0, 1, 1, [3])
    assert tokens_of(executor, plan) == [[4]]
    assert executor.runner.state.done.tolist() == [True, False, False, False, True]
    assert int(executor.runner.state.last_token[0]) == 4


def test_more_stop_ids_than_the_device_keeps_do_not_fail(executor: Executor) -> None:
    """The device may miss some; the host checks all of them."""
    assert MAX_STOP_IDS < 12
    plan = Plan().give(0, (1, 2), stops=tuple(range(1000, 1012))).slice(0, 0, 2, 2, [3])
    assert tokens_of(executor, plan) == [[4, 5]]


def test_non_finite_logits_fail_one_slice(executor: Executor, fake_model: NextTokenModel) -> None:
    fake_model.poison = {5}
    result = executor.submit(
        Plan().give(0, (1, 2)).give(1, (3, 4)).slice(0, 0, 3, 3, [4]).slice(1, 0, 3, 3, [7])
    ).result()
    assert result.tokens == [[5], [8, 9, 10]] and result.errors == {0: NOT_FINITE}
    assert tokens_of(executor, Plan().slice(0, 3, 1, 1).slice(1, 3, 1, 1)) == [[], [0]]


def test_swaps_and_copies_run_in_order(executor: Executor) -> None:
    kv, host = executor.runner.kv, executor.runner.swapper.host_kv
    for i in range(9):
        kv[i], host[i] = i, -i
    plan = Plan()
    plan.swap_outs = [SwapOut(1, 5), SwapOut(2, 6), SwapOut(4, 1)]
    plan.swap_ins = [SwapIn(6, 1), SwapIn(3, 2)]
    plan.copies = [BlockCopy(1, 3), BlockCopy(3, 7)]
    assert executor.submit(plan).result().tokens == []
    assert [float(x.mean()) for x in kv] == [0, 2, -3, 2, 4, 5, 6, 3, 8]
    assert [float(x.mean()) for x in host] == [0, 4, -2, -3, -4, 1, 2, -7, -8]


def test_neighbouring_blocks_are_one_run() -> None:
    begins, counts = runs(np.array([(1, 5), (2, 6), (3, 8), (4, 9), (5, 10), (1, 1)]))
    assert (begins.tolist(), counts.tolist()) == ([0, 2, 5], [2, 3, 1])
    begins, counts = runs(np.empty((0, 2), dtype=np.int64))
    assert not len(begins) and not len(counts)


def test_plans_queued_after_a_failed_step_fail(executor: Executor, fake_model: NextTokenModel) -> None:
    before = executor.submit(Plan().give(0, (1, 2)).slice(0, 0, 1, 1, [3]))
    fake_model.fails = True
    failed = executor.submit(Plan().slice(0, 1, 1, 1))
    fake_model.fails = False
    later = executor.submit(Plan().slice(0, 2, 1, 1))
    assert before.result().tokens == [[4]]
    assert failed.done and failed.poll() is None
    with pytest.raises(StepError, match=r"^RuntimeError: out of luck and advice$"):
        failed.result()
    with pytest.raises(StepError, match="a step before it failed"):
        later.result()
    assert tokens_of(executor, Plan().slice(0, 0, 1, 1, [3])) == [[4]]


def test_poll_returns_ready_columns_and_result_the_rest(executor: Executor) -> None:
    running = executor.submit(Plan().give(0, (1, 2)).slice(0, 0, 4, 4, [3]))
    assert running.done and running.poll() is None  # a CPU is done when the call returns
    output = running.output
    assert output is not None
    completed = output.events[0]
    output.events[2:] = [Never(), Never()]
    part = running.poll()
    assert part is not None and part.tokens == [[4, 5]]
    assert running.poll(0.001) is None and not running.done
    output.events[2:] = [completed, completed]
    assert running.result().tokens == [[6, 7]]


class Never:
    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError

    def wait(self) -> None:
        pass


def test_a_plan_larger_than_the_input_buffers(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    input_buffers = executor.runner.input_buffers
    input_buffers.buffer = input_buffers.buffer[: input_buffers.head_size + 3]
    assert tokens_of(executor, Plan().give(0, (3, 1)).slice(0, 0, 3, 1, [4, 5, 6])) == [[7]]
    assert tokens_of(executor, Plan().slice(0, 3, 1, 1)) == [[8]]


def test_a_prefill_pass_uses_the_smallest_graph_that_holds_it() -> None:
    sizes = PrefillSizes(20, 300, 1000)

    def found(num_tokens: int, num_slices: int, num_samples: int) -> tuple[int, int] | None:
        size = sizes.bucket_for(PrefillSize(num_tokens, num_slices, num_samples, num_tokens, num_tokens))
        return None if size is None else (size.num_tokens, size.num_slices)

    assert found(16, 7, 7) == (16, 8)
    assert found(17, 1, 1) == (32, 8)
    assert found(17, 8, 1) == found(17, 1, 9) == (64, 22)  # one slice is for padding
    assert found(257, 1, 1) == (300, 22) and found(301, 1, 1) is None and found(16, 22, 1) is None
    assert PrefillSizes(20, 300, 3).bucket_for(PrefillSize(8, 7, 1, 2, 2)) is None  # 8 tokens of padding in one slice
    large = PrefillSizes(20, 4096, 1000)
    assert large.bucket_for(PrefillSize(3584, 9, 9, 600, 900)) == large.sizes[-1]
    assert large.bucket_for(PrefillSize(3583, 9, 9, 600, 900)) is None


@pytest.mark.parametrize("num_rows", [1, 2, 4, 6, 7, 30])
def test_every_prefill_graph_is_used_by_some_pass(num_rows: int) -> None:
    sizes = PrefillSizes(num_rows, 3000, 4000)
    passes = [(tokens, slices) for tokens in range(1, 3001) for slices in {1, min(tokens, num_rows, 8), num_rows + 1}]
    found = {sizes.bucket_for(PrefillSize(tokens, slices, slices, tokens, tokens)) for tokens, slices in passes}
    assert found - {None} == set(sizes.sizes) and len(set(sizes.sizes)) == len(sizes.sizes)


def test_decode_sizes_are_ascending_and_end_at_the_number_of_rows() -> None:
    for max_size in (1, 3, 4, 100, 256, 300, 1000):
        sizes = decode_sizes(max_size)
        assert sizes == sorted(set(sizes)) and sizes[-1] == max_size and sizes[0] == 1
        cascade = cascade_sizes(max_size)
        assert cascade == sorted(set(cascade)) and set(cascade) <= set(sizes)
        assert cascade[-1:] == [max_size] * (max_size >= 8)


def test_host_sampling_reads_done_flags_that_the_device_changed(executor: Executor) -> None:
    """A row ends in a host-sampled step, goes to another request, and decodes in another host-sampled step."""
    plan = Plan().give(0, (1, 2), stops=(4,), logprobs=21).slice(0, 0, 1, 1, [3])
    assert tokens_of(executor, plan) == [[4]]
    assert tokens_of(executor, Plan().give(0, (3, 4)).slice(0, 0, 2, 1, [6, 7])) == [[8]]
    plan = Plan().give(1, (5,), logprobs=21).slice(0, 2, 1, 1).slice(1, 0, 1, 1, [1])
    assert tokens_of(executor, plan) == [[9], [2]]
    assert tokens_of(executor, Plan().slice(0, 3, 1, 1).slice(1, 1, 1, 1)) == [[10], [3]]


def test_token_counts_of_a_row_with_penalties(executor: Executor) -> None:
    """Counted are the prompt, sampled tokens and host tokens, but not several samples before a fork, or a done row."""

    def counted() -> dict[int, int]:
        counts = executor.runner.logits_processors._state().counts[0]
        return {token: int(counts[token]) for token in counts.nonzero().flatten().tolist()}

    plan = Plan().give(0, (1, 2), stops=(9,), presence_penalty=0.1).slice(0, 0, 2, 1, [5, 6], num_samples=3)
    plan.row_setups[0] = plan.row_setups[0]._replace(num_prompt=2, token_ids=array("i", [5, 6]))
    prompt = {5: IN_PROMPT, 6: IN_PROMPT}
    assert tokens_of(executor, plan) == [[7, 7, 7]] and counted() == prompt
    assert tokens_of(executor, Plan().slice(0, 2, 1, 1, [7])) == [[8]] and counted() == prompt | {7: 1, 8: 1}
    assert tokens_of(executor, Plan().slice(0, 2, 1, 1, [7])) == [[8]]  # the same host token again, sampled again
    assert tokens_of(executor, Plan().slice(0, 3, 1, 1)) == [[9]]
    ended = counted()
    plan = Plan().give(1, (4,)).slice(0, 4, 1, 1).slice(1, 0, 2, 1, [1, 2])
    assert tokens_of(executor, plan) == [[], [3]] and counted() == ended


def test_masked_vocabulary_and_non_finite_logits_fail_only_their_slices(
    executor: Executor, fake_model: NextTokenModel
) -> None:
    plan = Plan().give(0, (1,), stops=(4,), allowed_token_ids=[4], min_tokens=3).slice(0, 0, 2, 2, [3])
    plan.give(1, (2,), presence_penalty=0.5).slice(1, 0, 2, 2, [6]).give(2, (3,), frequency_penalty=0.5)
    plan.slice(2, 0, 2, 2, [9])
    fake_model.poison = {9}
    result = executor.submit(plan).result()
    assert [list(tokens) for tokens in result.tokens] == [[], [7, 8], []]
    assert result.errors == {0: NO_ALLOWED_TOKEN, 2: NOT_FINITE}
