"""The GPU's runner on a CPU: without streams and graphs, but with all its logic, against the CPU's own runner."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.core.plan import BlockCopy, RowSetup, StepPlan, SwapIn, SwapOut, TableWrite
from octavo.errors import StepError
from octavo.kernels import reference
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.row_state import IN_PROMPT, MAX_STOP_IDS
from octavo.runner import model_runner as runner
from octavo.runner.cuda_executor import CudaExecutor
from octavo.runner.cuda_graphs import cascade_sizes, decode_sizes
from octavo.runner.cuda_model_runner import CudaModelRunner, table_writes
from octavo.runner.kv_swap import runs
from octavo.runner.prefill_batch import PrefillSize, PrefillSizes
from octavo.runner.sampling.host_sampling import HostSamplingRunner
from octavo.runner.sampling.sampler import NO_ALLOWED_TOKEN, NOT_FINITE
from tests.engine.models import make_talking_checkpoint

VOCAB = 11
SIZE = 2
OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks_override": 120,
    "max_num_seqs": 8,
    "device": "cpu",
    "max_logprobs": 30,
}


# -- the same tokens as the CPU's runner, whatever the engine does ----------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_talking_checkpoint(tmp_path_factory.mktemp("talking")))


class Recorded:
    """What graphs do, without a GPU: work that is done once for nothing, and then again whenever it is replayed."""

    def __init__(self, step_counter: Tensor) -> None:
        self.step_counter = step_counter
        self.work: dict[Any, Callable[[], None]] = {}
        self.num_replays = 0

    def __contains__(self, name: Any) -> bool:
        return name in self.work

    def capture(self, name: Any, work: Callable[[], None]) -> None:
        step_counter = self.step_counter.clone()
        work()
        self.step_counter.copy_(step_counter)
        self.work[name] = work

    def replay(self, name: Any) -> None:
        self.num_replays += 1
        self.work[name]()


def on_rows(llm: LLM, *, recorded: bool = False) -> LLM:
    """The engine, with the GPU's runner in the place of its own."""
    old = llm.engine.executor.runner  # type: ignore[attr-defined]
    runner = CudaModelRunner(
        old.model,
        old.kv,
        old.host_kv,
        num_rows=len(old.input_batch.done),
        max_model_len=llm.config.max_model_len,
        max_num_tokens=llm.config.args.max_num_batched_tokens or 0,
        max_decode_steps=llm.config.args.decode_window or 1,
        vocab_size=llm.engine.vocab_size,
        ops=reference,
        graphs=False,
    )
    if recorded:
        runner.graphs = Recorded(runner.input_buffers.step_counter)  # type: ignore[assignment]
    llm.engine.executor.close()
    llm.engine.executor = CudaExecutor(runner)
    return llm


def generate(
    model: str, params: list[SamplingParams], *, rows: bool, recorded: bool = False, **options: Any
) -> tuple[LLM, list[RequestOutput]]:
    prompts = [[3 + (7 * i + j * j) % 90 for j in range(3 + 5 * i % 23)] for i in range(len(params))]
    llm = LLM(model, **(OPTIONS | options))
    with on_rows(llm, recorded=recorded) if rows else llm:
        return llm, llm.generate(prompts, params, use_tqdm=False)


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (c.token_ids, c.finish_reason, c.stop_reason, [list(entry) for entry in c.logprobs or ()])
        for output in outputs
        for c in output.outputs
    ]


def mixture() -> list[SamplingParams]:
    """Greedy, warm, filtered, with stop tokens, of several samples and of all lengths."""
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


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("case", list(CASES))
def test_the_same_tokens_as_the_cpus_runner(model: str, case: str, recorded: bool) -> None:
    params, options = mixture(), CASES[case]
    _, expected = generate(model, params, rows=False, **options)
    llm, outputs = generate(model, params, rows=True, recorded=recorded, **options)
    assert told(outputs) == told(expected)
    if "num_gpu_blocks_override" in options:
        assert llm.stats().num_preemptions > 0


def ruled() -> list[SamplingParams]:
    """They ask for what a row does keep, beyond noise and filters."""
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


def constrained() -> list[SamplingParams]:
    def of(pattern: str, **words: Any) -> SamplingParams:
        return SamplingParams(max_tokens=12, structured_outputs={"regex": pattern}, **words)  # type: ignore[arg-type]

    return [
        of("[a-f]{5,9}", seed=1),
        of("b+", seed=2, temperature=0),
        of("x(yz)*", seed=3, n=3),
        of("[a-z]{12}", seed=4, repetition_penalty=1.5, presence_penalty=0.7, n=2),
        of("[a-c]+", seed=5, logit_bias={68: 3.0}, min_tokens=8),
    ]


def demanding() -> list[SamplingParams]:
    """They ask for more than a row keeps."""
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


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("case", ["plain", "windows", "chunks", "recompute", "swap", "no overlap"])
def test_constrained_requests(model: str, case: str, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the others. Their steps wait for what may come next, and the host for no token."""
    params, options = [*mixture(), *constrained(), *ruled()], CASES[case]
    _, expected = generate(model, params, rows=False, **options)
    monkeypatch.delattr(HostSamplingRunner, "sample")
    llm, outputs = generate(model, params, rows=True, recorded=recorded, **options)
    assert told(outputs) == told(expected)
    assert re.fullmatch("[a-f]{5,9}", outputs[len(mixture())].outputs[0].text)
    if "num_gpu_blocks_override" in options:
        assert llm.stats().num_preemptions > 0


def numbers(outputs: list[RequestOutput]) -> list[tuple[float, int]]:
    """All log-probabilities and ranks that are told."""
    return [
        (entry.logprob, entry.rank)
        for output in outputs
        for place in [*(output.prompt_logprobs or ()), *(p for c in output.outputs for p in c.logprobs or ())]
        for entry in (place or {}).values()
    ]


def same_numbers(outputs: list[RequestOutput], expected: list[RequestOutput], least: int, within: float = 1e-5) -> bool:
    found, wanted = numbers(outputs), numbers(expected)
    assert len(found) >= least and [rank for _, rank in found] == [rank for _, rank in wanted]
    return [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in wanted], abs=within)


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("window", [1, 4])
def test_requests_that_ask_for_more_than_a_row_keeps(model: str, window: int, recorded: bool) -> None:
    """Beside others, with whom they take turns in the same rows."""
    params = mixture()
    params[1:1] = demanding()
    _, expected = generate(model, params, rows=False, decode_window=window)
    _, outputs = generate(model, params, rows=True, recorded=recorded, decode_window=window)
    assert told(outputs) == told(expected) and same_numbers(outputs, expected, 150)
    assert told(outputs)[3][0] == [40] * 4


def telling() -> list[SamplingParams]:
    """They ask what the model thought."""
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


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("case", [*CASES])
def test_log_probabilities_need_no_host(model: str, case: str, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others, who neither wait nor tell; rows go from some that tell to some that do not, and back. What is told
    of a prompt is the host's, while the prompt is computed."""
    params, options = [*mixture(), *telling(), *telling()], CASES[case]
    _, expected = generate(model, params, rows=False, **options)
    monkeypatch.delattr(HostSamplingRunner, "sample")
    columns: list[int] = []
    column = HostSamplingRunner.run_column

    def counted(self: HostSamplingRunner, plan: StepPlan, *rest: Any) -> Any:
        assert self.has_prompt_logprobs(plan)
        columns.append(plan.step)
        return column(self, plan, *rest)

    monkeypatch.setattr(HostSamplingRunner, "run_column", counted)
    llm, outputs = generate(model, params, rows=True, recorded=recorded, **options)
    assert told(outputs) == told(expected) and same_numbers(outputs, expected, 700)
    assert 0 < len(set(columns)) < 0.6 * llm.stats().num_steps
    if "num_gpu_blocks_override" in options:
        assert llm.stats().num_preemptions > 0


def test_constrained_requests_that_ask_what_the_model_thought(model: str) -> None:
    """The masks change what it thought: the host looks first. Beside others who ask, and go on by themselves after."""
    params = [*constrained(), *telling()[:5]]
    params[1] = replace(params[1], logprobs=3)
    _, expected = generate(model, params, rows=False, decode_window=3)
    _, outputs = generate(model, params, rows=True, decode_window=3)
    assert told(outputs) == told(expected) and same_numbers(outputs, expected, 400)


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("case", ["plain", "windows", "chunks", "recompute", "swap", "few rows"])
def test_rules_that_need_no_host(model: str, case: str, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others; rows that kept rules go to some that have none, and back."""
    params, options = [*ruled(), *mixture(), *ruled()], CASES[case]
    _, expected = generate(model, params, rows=False, **options)
    monkeypatch.delattr(HostSamplingRunner, "sample")
    llm, outputs = generate(model, params, rows=True, recorded=recorded, **options)
    assert told(outputs) == told(expected)
    assert all(reason in ("length", "stop") for _, reason, *_ in told(outputs))
    if "num_gpu_blocks_override" in options:
        assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize("case", ["windows", "chunks", "recompute"])
def test_rules_of_rows_that_the_host_samples_now_and_then(model: str, case: str) -> None:
    """While somebody in the same step asks for more, tokens are sampled and counted the other way."""
    params, options = [*ruled(), *constrained(), *demanding(), *ruled()], CASES[case]
    _, expected = generate(model, params, rows=False, **options)
    _, outputs = generate(model, params, rows=True, **options)
    assert told(outputs) == told(expected)


@pytest.mark.parametrize("window", [1, 4])
def test_rules_beside_prompts_that_take_several_passes(
    model: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that one step's passes over prompts give is its first column."""
    monkeypatch.setattr(runner, "MAX_PROMPT_LOGITS", 3)
    asking = [SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=3, ignore_eos=True)] * 3
    params = [*ruled()[:2], *constrained()[3:], *asking]
    options: dict[str, Any] = {"decode_window": window, "max_num_seqs": 16, "max_num_batched_tokens": 16}
    _, expected = generate(model, params, rows=False, **options)
    _, outputs = generate(model, params, rows=True, **options)
    assert told(outputs) == told(expected)


def test_a_draw_behind_masks_and_the_pass_after_it_are_one_graph(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a window, but for its first draw behind prompts, and its last."""
    replayed: list[Any] = []
    replay = Recorded.replay
    monkeypatch.setattr(Recorded, "replay", lambda self, name: [replayed.append(name), replay(self, name)])
    params = [
        SamplingParams(temperature=1, seed=i, max_tokens=12, structured_outputs={"regex": "[a-d]+"}) for i in (1, 2)
    ]
    _, expected = generate(model, params, rows=False, decode_window=4)
    _, outputs = generate(model, params, rows=True, recorded=True, decode_window=4)
    assert told(outputs) == told(expected)
    decodes = [name for name in replayed if name[0] in ("masked", "masked pass") and isinstance(name[1], int)]
    assert sum(name[0] == "masked pass" for name in decodes) >= len(decodes) // 2 > 3


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("form", [False, True], ids=["free", "constrained"])
def test_beams(model: str, form: bool, recorded: bool) -> None:
    """Whose tokens the host chooses, from one line of logits each."""
    options: dict[str, Any] = {"structured_outputs": {"regex": "[a-d]+"}} if form else {}
    params = BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True, length_penalty=0.5, **options)
    prompts = [{"prompt_token_ids": [3 + (5 * i + j) % 90 for j in range(6 + i)]} for i in range(2)]
    found = []
    for rows in (False, True):
        llm = LLM(model, **OPTIONS)
        with on_rows(llm, recorded=recorded) if rows else llm:
            found.append(llm.beam_search(prompts, params, use_tqdm=False))
    expected, outputs = ([beam for output in those for beam in output.outputs] for those in found)
    assert [beam.token_ids for beam in outputs] == [beam.token_ids for beam in expected] and len(outputs) == 6
    assert [beam.score for beam in outputs] == pytest.approx([beam.score for beam in expected], abs=1e-4)


def test_candidates_of_lines_that_are_broken_or_short() -> None:
    """Of each as many as its request wants; a line with a NaN is an error, its neighbour none; a vocabulary may have
    fewer tokens than are asked for."""
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    logits[1, 4] = math.nan
    plan = StepPlan()
    plan.rows, plan.num_samples = [4, 9], {0: 2, 1: 8}
    found = HostSamplingRunner.read_candidates(None, plan, reference.packed_top_logprobs(logits.bfloat16(), 8))  # type: ignore[arg-type]
    expected = logits[0].bfloat16().float().log_softmax(0).topk(2)
    assert found.tokens[0] == list(zip(expected.values.tolist(), expected.indices.tolist(), strict=True))
    assert found.errors == {1: NOT_FINITE} and len(found.tokens) == 2 and len(found.tokens[1]) == 6


def test_a_stream_grows_while_a_window_runs(model: str) -> None:
    with on_rows(LLM(model, decode_window=6, **OPTIONS)) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        lengths = [len(o.outputs[0].token_ids) for o in llm.stream([[5, 6, 7]], params)]
    assert lengths[-1] == 20 and lengths == sorted(set(lengths))


# -- plans written by hand --------------------------------------------------------------------------------------------


class Counting:
    """Says that after token t comes t + 1; writes each token where its K and V go, and remembers each pass."""

    def __init__(self) -> None:
        self.passes: list[tuple[list[int], list[int], list[int]]] = []  # tokens, positions, slots
        self.poison: set[int] = set()
        self.fails = False

    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor | None) -> Tensor:
        if self.fails:
            raise RuntimeError("out of luck\nand advice")
        self.passes.append((token_ids.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist()))
        for token, slot in zip(token_ids.tolist(), batch.slot_mapping.tolist(), strict=True):
            kv[slot // SIZE, 0, :, 0, slot % SIZE] = token
        wanted = range(len(token_ids)) if logits_rows is None else logits_rows.tolist()
        logits = torch.zeros(len(wanted), VOCAB)
        for i, row in enumerate(wanted):
            token = int(token_ids[row])
            logits[i, (token + 1) % VOCAB] = 5.0
            if token in self.poison:
                logits[i, 0] = torch.nan
        return logits


class Plan(StepPlan):
    """A plan that is written by hand."""

    def give(self, row: int, block_ids: tuple[int, ...], *, stops: tuple[int, ...] = (), **params: Any) -> Plan:
        params = {"temperature": 0} | params
        self.row_setups.append(RowSetup(row, SamplingParams(**params), 5, 0, frozenset(stops)))
        self.table_writes.append(TableWrite(row, 0, block_ids))
        return self

    def slice(
        self, row: int, start: int, count: int, num_sampled: int, tokens: list[int] | None = None, num_samples: int = 0
    ) -> Plan:
        index = len(self.rows)
        self.rows.append(row)
        self.starts.append(start)
        self.counts.append(count)
        self.num_sampled.append(num_sampled)
        if tokens is not None:
            self.host_tokens[index] = array("i", tokens)
        if num_samples:
            self.num_samples[index] = num_samples
        return self


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def executor(counting: Counting) -> Iterator[CudaExecutor]:
    kv = torch.zeros(9, 1, 2, 1, SIZE, 1)  # 8 usable blocks
    executor = CudaExecutor(
        CudaModelRunner(
            counting,
            kv,
            torch.zeros_like(kv),
            num_rows=4,
            max_model_len=8,
            max_num_tokens=16,
            max_decode_steps=4,
            vocab_size=VOCAB,
            ops=reference,
            graphs=False,
        )
    )
    yield executor
    executor.close()


def tokens_of(executor: CudaExecutor, plan: Plan) -> list[list[int]]:
    return [list(tokens) for tokens in executor.submit(plan).result().tokens]


def test_candidates_are_all_that_a_step_is_for(executor: CudaExecutor) -> None:
    """Of decode steps whose rows all leave the choice to the host, and have no rules that it would have to apply."""
    host_sampling = executor.runner.host_sampling
    plain = [RowSetup(row, SamplingParams(), 0, 0, frozenset(), 1, None, True) for row in range(3)]
    other = [RowSetup(3, SamplingParams(logit_bias={1: 2.0}), 0, 0, frozenset(), 1, None, True)]
    plan = StepPlan()
    plan.row_setups = [*plain, *other]
    host_sampling.apply(plan)

    def wanted(rows: list[int], draws: dict[int, int], masked: tuple[int, ...] = ()) -> int:
        plan.rows, plan.num_samples, plan.bitmask_slices = rows, draws, list(masked)
        return host_sampling.num_beam_candidates(plan)

    assert wanted([0, 2], {0: 4, 1: 6}) == 6
    assert wanted([0, 2], {0: 4}) == wanted([0, 3], {0: 4, 1: 4}) == wanted([0], {0: 4}, masked=(0,)) == 0


def test_a_chunk_gives_nothing_and_the_next_one_a_token(executor: CudaExecutor, counting: Counting) -> None:
    assert tokens_of(executor, Plan().give(0, (3, 1)).slice(0, 0, 2, 0, [4, 5])) == [[]]
    assert tokens_of(executor, Plan().slice(0, 2, 1, 1, [6])) == [[7]]
    assert tokens_of(executor, Plan().slice(0, 3, 1, 1)) == [[8]]
    assert counting.passes == [([4, 5], [0, 1], [6, 7]), ([6], [2], [2]), ([7], [3], [3])]


def test_a_window_ends_at_a_stop_token_and_at_its_own_end(executor: CudaExecutor, counting: Counting) -> None:
    plan = Plan().give(0, (1, 2, 3), stops=(6,)).give(1, (4, 5)).slice(0, 0, 5, 4, [2, 4]).slice(1, 0, 3, 3, [8])
    assert tokens_of(executor, plan) == [[5, 6], [9, 10, 0]]
    assert counting.passes == [
        ([2, 4, 8], [0, 1, 0], [2, 3, 8]),
        ([5, 9], [2, 1], [4, 9]),
        ([6, 10], [0, 2], [0, 10]),  # row 0 has ended: the null block in its place
        ([6, 0], [0, 0], [0, 0]),
    ]
    assert tokens_of(executor, Plan().slice(0, 4, 1, 1).slice(1, 3, 1, 1)) == [[], [1]]  # over-run
    assert tokens_of(executor, Plan().slice(0, 3, 1, 1, [6]).slice(1, 4, 1, 1)) == [[7], [2]]  # the host goes on


def test_a_done_row_is_harmless_in_a_step_with_chunks(executor: CudaExecutor, counting: Counting) -> None:
    assert tokens_of(executor, Plan().give(0, (1,), stops=(5,)).slice(0, 0, 1, 1, [4])) == [[5]]
    counting.passes.clear()
    plan = Plan().give(1, (2, 3)).slice(0, 1, 1, 1).slice(1, 0, 3, 1, [1, 2, 3])
    assert tokens_of(executor, plan) == [[], [4]]
    assert counting.passes == [([5, 1, 2, 3], [0, 0, 1, 2], [0, 4, 5, 6])]


def test_draws_of_a_request_about_to_fork_do_not_end_its_row(executor: CudaExecutor) -> None:
    plan = Plan().give(2, (6,), stops=(4,)).slice(2, 0, 1, 1, [3], num_samples=3)
    assert tokens_of(executor, plan) == [[4, 4, 4]]


def test_draws_differ_by_their_sample_index(executor: CudaExecutor) -> None:
    plan = Plan().give(2, (6,), temperature=2.0, seed=1).slice(2, 0, 1, 1, [3], num_samples=8)
    assert len(set(tokens_of(executor, plan)[0])) > 1


def test_of_two_writes_to_one_place_the_later_one_counts(executor: CudaExecutor, counting: Counting) -> None:
    plan = Plan().give(0, (1, 2)).give(0, (7, 8), stops=(9,)).slice(0, 0, 3, 1, [6, 7, 8])
    assert tokens_of(executor, plan) == [[9]]
    assert counting.passes == [([6, 7, 8], [0, 1, 2], [14, 15, 16])]
    assert tokens_of(executor, Plan().slice(0, 3, 1, 1)) == [[]]  # of two setups, too


def test_no_place_in_the_tables_is_written_twice() -> None:
    """A GPU writes them in any order."""
    writes = [TableWrite(2, 0, (5, 6, 7)), TableWrite(1, 4, (8,)), TableWrite(2, 1, (9,)), TableWrite(2, 3, (4, 3))]
    places, ids = table_writes(writes, 10)
    assert dict(zip(places.tolist(), ids.tolist(), strict=True)) == {20: 5, 21: 9, 22: 7, 23: 4, 24: 3, 14: 8}
    assert len(places) == 6


def test_two_plans_have_halves_of_the_ring_of_their_own(executor: CudaExecutor) -> None:
    ring = executor.runner.output_buffers
    assert [ring.next_half() for _ in range(4)] == [4, 0, 4, 0] and ring.tokens.shape[0] == 8


def test_a_window_on_the_way_round_beside_a_prompt(executor: CudaExecutor) -> None:
    """The passes after the first are of fewer slices."""
    assert tokens_of(executor, Plan().give(1, (3, 4), logprobs=21).slice(1, 0, 1, 1, [5])) == [[6]]
    plan = Plan().give(0, (1, 2), logprobs=21).slice(0, 0, 2, 1, [2, 3]).slice(1, 1, 3, 3)
    assert tokens_of(executor, plan) == [[4], [7, 8, 9]]


def test_what_nobody_has_read_yet_outlives_its_half_of_the_ring(executor: CudaExecutor) -> None:
    running = [executor.submit(Plan().give(0, (1, 2)).slice(0, 0, 1, 1, [3]))]
    running += [executor.submit(Plan().slice(0, 1 + i, 1, 1)) for i in range(4)]
    assert [run.result().tokens for run in running] == [[[4 + i]] for i in range(5)]


def test_what_the_model_thought_comes_with_its_tokens(executor: CudaExecutor) -> None:
    """An entry a token, of rows that ask, as many of the likeliest as there are; of who has the row next, nothing. It
    outlives its half of the ring, too, and changes no logits."""
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
        told = first.logprobs[i]
        assert [len(entry.top_ids) for entry in told] == [len(entry.top) for entry in told] == lengths
        for entry, token in zip(told, first.tokens[i], strict=True):
            assert entry.rank == 1 and entry.top_ids == [token, *(t for t in range(VOCAB) if t != token)][: lengths[0]]
            assert [entry.logprob, *entry.top[1:]] == pytest.approx(expected[: lengths[0]].tolist(), abs=1e-6)
    assert [set(result.logprobs) for result in rest] == [{0}, {0}, set(), set()]
    assert [result.logprobs[0][0].top_ids[0] for result in rest[:2]] == [result.tokens[0][0] for result in rest[:2]]
    assert not executor.runner.logits_processors.rows


def test_a_row_that_ended_on_the_way_round_is_done_on_the_device_too(executor: CudaExecutor) -> None:
    plan = Plan().give(0, (1, 2), stops=(4,), logprobs=21).slice(0, 0, 1, 1, [3])
    assert tokens_of(executor, plan) == [[4]]
    assert executor.runner.state.done.tolist() == [True, False, False, False, True]
    assert int(executor.runner.state.last_token[0]) == 4


def test_more_stop_ids_than_a_row_keeps(executor: CudaExecutor) -> None:
    """The device may miss some. The host does not."""
    assert MAX_STOP_IDS < 12
    plan = Plan().give(0, (1, 2), stops=tuple(range(1000, 1012))).slice(0, 0, 2, 2, [3])
    assert tokens_of(executor, plan) == [[4, 5]]


def test_numbers_that_are_not_finite_fail_one_slice(executor: CudaExecutor, counting: Counting) -> None:
    counting.poison = {5}
    result = executor.submit(
        Plan().give(0, (1, 2)).give(1, (3, 4)).slice(0, 0, 3, 3, [4]).slice(1, 0, 3, 3, [7])
    ).result()
    assert result.tokens == [[5], [8, 9, 10]] and result.errors == {0: NOT_FINITE}
    assert tokens_of(executor, Plan().slice(0, 3, 1, 1).slice(1, 3, 1, 1)) == [[], [0]]


def test_blocks_move_before_slices_and_in_order(executor: CudaExecutor) -> None:
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


def test_ids_that_count_up_together_are_one_move() -> None:
    begins, counts = runs(np.array([(1, 5), (2, 6), (3, 8), (4, 9), (5, 10), (1, 1)]))
    assert (begins.tolist(), counts.tolist()) == ([0, 2, 5], [2, 3, 1])
    begins, counts = runs(np.empty((0, 2), dtype=np.int64))
    assert not len(begins) and not len(counts)


def test_a_step_that_failed_takes_along_what_is_behind_it(executor: CudaExecutor, counting: Counting) -> None:
    before = executor.submit(Plan().give(0, (1, 2)).slice(0, 0, 1, 1, [3]))
    counting.fails = True
    failed = executor.submit(Plan().slice(0, 1, 1, 1))
    counting.fails = False
    behind = executor.submit(Plan().slice(0, 2, 1, 1))
    assert before.result().tokens == [[4]]
    assert failed.done and failed.poll() is None
    with pytest.raises(StepError, match=r"^RuntimeError: out of luck and advice$"):
        failed.result()
    with pytest.raises(StepError, match="a step before it failed"):
        behind.result()
    assert tokens_of(executor, Plan().slice(0, 0, 1, 1, [3])) == [[4]]


def test_columns_come_one_by_one(executor: CudaExecutor) -> None:
    """All but the last by `poll`, whichever of them have landed, and the rest by `result`."""
    running = executor.submit(Plan().give(0, (1, 2)).slice(0, 0, 4, 4, [3]))
    assert running.done and running.poll() is None  # a CPU is done when it returns
    output = running._output
    assert output is not None
    reached = output.events[0]
    output.events[2:] = [Never(), Never()]
    part = running.poll()
    assert part is not None and part.tokens == [[4, 5]]
    assert running.poll(0.001) is None and not running.done
    output.events[2:] = [reached, reached]
    assert running.result().tokens == [[6, 7]]


class Never:
    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError

    def wait(self) -> None:
        pass


def test_a_plan_larger_than_the_inbox(executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    input_buffers = executor.runner.input_buffers
    input_buffers.buffer = input_buffers.buffer[: input_buffers.head_size + 3]
    assert tokens_of(executor, Plan().give(0, (3, 1)).slice(0, 0, 3, 1, [4, 5, 6])) == [[7]]
    assert tokens_of(executor, Plan().slice(0, 3, 1, 1)) == [[8]]


def test_of_graphs_for_chunks_the_smallest_that_holds_a_pass() -> None:
    sizes = PrefillSizes(20, 300, 1000)

    def found(num_tokens: int, num_slices: int, num_draws: int) -> tuple[int, int] | None:
        size = sizes.bucket_for(PrefillSize(num_tokens, num_slices, num_draws, num_tokens, num_tokens))
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
def test_no_graph_for_chunks_is_made_for_nothing(num_rows: int) -> None:
    sizes = PrefillSizes(num_rows, 3000, 4000)
    passes = [(tokens, slices) for tokens in range(1, 3001) for slices in {1, min(tokens, num_rows, 8), num_rows + 1}]
    found = {sizes.bucket_for(PrefillSize(tokens, slices, slices, tokens, tokens)) for tokens, slices in passes}
    assert found - {None} == set(sizes.sizes) and len(set(sizes.sizes)) == len(sizes.sizes)


def test_buckets_hold_every_number_of_slices() -> None:
    for most in (1, 3, 4, 100, 256, 300, 1000):
        sizes = decode_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most and sizes[0] == 1
        alike = cascade_sizes(most)
        assert alike == sorted(set(alike)) and alike[-1:] == [most] * (most >= 8) and set(alike) <= set(sizes)


def test_a_row_that_goes_on_elsewhere_is_looked_at_again(executor: CudaExecutor) -> None:
    """It ended under the host's eyes, was given to another request, and decodes beside one that asks for the host."""
    plan = Plan().give(0, (1, 2), stops=(4,), logprobs=21).slice(0, 0, 1, 1, [3])
    assert tokens_of(executor, plan) == [[4]]
    assert tokens_of(executor, Plan().give(0, (3, 4)).slice(0, 0, 2, 1, [6, 7])) == [[8]]
    plan = Plan().give(1, (5,), logprobs=21).slice(0, 2, 1, 1).slice(1, 0, 1, 1, [1])
    assert tokens_of(executor, plan) == [[9], [2]]
    assert tokens_of(executor, Plan().slice(0, 3, 1, 1).slice(1, 1, 1, 1)) == [[10], [3]]


def test_what_a_penalized_row_has_had(executor: CudaExecutor) -> None:
    """Its prompt, what it samples, what the host says; not draws of which the host chooses, nor those of a done row."""

    def had() -> dict[int, int]:
        counts = executor.runner.logits_processors._state().counts[0]
        return {token: int(counts[token]) for token in counts.nonzero().flatten().tolist()}

    plan = Plan().give(0, (1, 2), stops=(9,), presence_penalty=0.1).slice(0, 0, 2, 1, [5, 6], num_samples=3)
    plan.row_setups[0] = plan.row_setups[0]._replace(num_prompt=2, token_ids=array("i", [5, 6]))
    prompt = {5: IN_PROMPT, 6: IN_PROMPT}
    assert tokens_of(executor, plan) == [[7, 7, 7]] and had() == prompt
    assert tokens_of(executor, Plan().slice(0, 2, 1, 1, [7])) == [[8]] and had() == prompt | {7: 1, 8: 1}
    assert tokens_of(executor, Plan().slice(0, 2, 1, 1, [7])) == [[8]]  # it is said once more, and sampled again
    assert tokens_of(executor, Plan().slice(0, 3, 1, 1)) == [[9]]
    ended = had()
    plan = Plan().give(1, (4,)).slice(0, 4, 1, 1).slice(1, 0, 2, 1, [1, 2])
    assert tokens_of(executor, plan) == [[], [3]] and had() == ended


def test_rules_that_leave_no_token_and_numbers_that_are_none(executor: CudaExecutor, counting: Counting) -> None:
    """Each ends its own request, with its own reason; the row between them goes on."""
    plan = Plan().give(0, (1,), stops=(4,), allowed_token_ids=[4], min_tokens=3).slice(0, 0, 2, 2, [3])
    plan.give(1, (2,), presence_penalty=0.5).slice(1, 0, 2, 2, [6]).give(2, (3,), frequency_penalty=0.5)
    plan.slice(2, 0, 2, 2, [9])
    counting.poison = {9}
    result = executor.submit(plan).result()
    assert [list(tokens) for tokens in result.tokens] == [[], [7, 8], []]
    assert result.errors == {0: NO_ALLOWED_TOKEN, 2: NOT_FINITE}
