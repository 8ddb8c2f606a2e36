"""The model runner on the CPU and on a device that keeps its state, with plans written by hand."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from octavo.core.plan import BlockCopy, RowSetup, StepPlan, StepResult, SwapIn, SwapOut, TableWrite
from octavo.errors import StepError
from octavo.kernels.row_state import IN_PROMPT, MAX_STOP_IDS
from octavo.params.sampling_params import SamplingParams
from octavo.runner.executor import Executor
from octavo.runner.input_buffers import table_writes
from octavo.runner.kv_swap import runs
from octavo.runner.model_runner import ModelRunner
from octavo.runner.passes.cuda_graphs import cascade_sizes, decode_sizes
from octavo.runner.passes.prefill_batch import PrefillSize, PrefillSizes
from octavo.runner.platform import CpuPlatform
from octavo.runner.sampling.sampler import NO_ALLOWED_TOKEN, NOT_FINITE
from tests.runner.handwritten_plans import VOCAB, NextTokenModel, Plan, make_runner
from tests.runner.stub_platform import StubPlatform

on_the_cpu = pytest.mark.parametrize("executor", [CpuPlatform], indirect=True)
on_the_stub = pytest.mark.parametrize("executor", [StubPlatform], indirect=True)


@pytest.fixture
def fake_model() -> NextTokenModel:
    return NextTokenModel()


@pytest.fixture(params=[CpuPlatform, StubPlatform])
def executor(request: pytest.FixtureRequest, fake_model: NextTokenModel) -> Iterator[Executor]:
    executor = Executor(make_runner(fake_model, request.param()))
    yield executor
    executor.close()


@pytest.fixture
def runner(executor: Executor) -> ModelRunner:
    return executor.runner


def run(runner: ModelRunner, plan: StepPlan) -> list[StepResult]:
    """The result of each column."""
    step = runner.execute(plan)
    step.advance(None)
    output = step.output
    return [output.read(i, i + 1) for i in range(len(output.events))]


def tokens_of(executor: Executor, plan: Plan) -> list[list[int]]:
    return [list(tokens) for tokens in executor.submit(plan).result().tokens]


@on_the_stub
def test_only_steps_of_plain_beams_return_candidates_from_a_graph(executor: Executor) -> None:
    """All rows must be beams, without logits processors and bitmasks."""
    host_sampling = executor.runner.host_sampler
    plain = [RowSetup(row, SamplingParams(), 0, 0, frozenset(), 1, None, True) for row in range(3)]
    other = [RowSetup(3, SamplingParams(logit_bias={1: 2.0}), 0, 0, frozenset(), 1, None, True)]
    plan = StepPlan()
    plan.row_setups = [*plain, *other]
    executor.runner.state.processors.apply(plan)
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


@on_the_stub
def test_a_decode_window_ends_at_a_stop_token_or_at_its_length(executor: Executor, fake_model: NextTokenModel) -> None:
    plan = Plan().give(0, (1, 2, 3), stops=(6,)).give(1, (4, 5)).slice(0, 0, 5, 4, [2, 4]).slice(1, 0, 3, 3, [8])
    assert tokens_of(executor, plan) == [[5, 6], [9, 10, 0]]
    assert fake_model.passes == [
        ([2, 4, 8], [0, 1, 0], [2, 3, 8]),
        ([5, 9], [2, 1], [4, 9]),
        ([6, 10], [0, 2], [0, 10]),  # row 0 has stopped: the null block replaces it
        ([6, 0], [0, 0], [0, 0]),
    ]
    assert tokens_of(executor, Plan().slice(0, 4, 1, 1).slice(1, 3, 1, 1)) == [[], [1]]  # planned before the stop
    assert tokens_of(executor, Plan().slice(0, 3, 1, 1, [6]).slice(1, 4, 1, 1)) == [[7], [2]]  # host tokens end done


@on_the_stub
def test_a_done_row_computes_nothing_in_a_prefill_pass(executor: Executor, fake_model: NextTokenModel) -> None:
    assert tokens_of(executor, Plan().give(0, (1,), stops=(5,)).slice(0, 0, 1, 1, [4])) == [[5]]
    fake_model.passes.clear()
    plan = Plan().give(1, (2, 3)).slice(0, 1, 1, 1).slice(1, 0, 3, 1, [1, 2, 3])
    assert tokens_of(executor, plan) == [[], [4]]
    assert fake_model.passes == [([5, 1, 2, 3], [0, 0, 1, 2], [0, 4, 5, 6])]


def test_several_samples_before_a_fork_do_not_end_the_row(executor: Executor) -> None:
    plan = Plan().give(2, (6,), stops=(4,)).slice(2, 0, 1, 1, [3], num_samples=3)
    assert tokens_of(executor, plan) == [[4, 4, 4]]


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


@on_the_stub
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
    assert not executor.runner.state.processors.rows


@on_the_stub
def test_host_sampling_commits_stop_tokens_to_the_device(executor: Executor) -> None:
    plan = Plan().give(0, (1, 2), stops=(4,), logprobs=21).slice(0, 0, 1, 1, [3])
    assert tokens_of(executor, plan) == [[4]]
    assert executor.runner.state.rows.done.tolist() == [True, False, False, False, True]
    assert int(executor.runner.state.rows.last_token[0]) == 4


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
    kv, host = executor.runner.state.kv, executor.runner.state.swapper.host_kv
    for i in range(9):
        kv[i], host[i] = i, -i
    plan = Plan()
    plan.swap_outs = [SwapOut(1, 5), SwapOut(2, 6), SwapOut(4, 1)]
    plan.swap_ins = [SwapIn(6, 1), SwapIn(3, 2)]
    plan.copies = [BlockCopy(1, 3), BlockCopy(3, 7)]
    plan.give(0, (7,)).slice(0, 0, 1, 0, [9])
    assert executor.submit(plan).result().tokens == [[]]
    assert [float(x.mean()) for x in kv] == [0, 2, -3, 2, 4, 5, 6, (9 + 3) / 2, 8]  # the slice writes last
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


@on_the_stub
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


@on_the_stub
def test_a_plan_larger_than_the_input_buffers(executor: Executor) -> None:
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


@on_the_stub
def test_token_counts_of_a_row_with_penalties(executor: Executor) -> None:
    """Counted are the prompt, sampled tokens and host tokens, but not several samples before a fork, or a done row."""

    def counted() -> dict[int, int]:
        counts = executor.runner.state.processors._state().counts[0]
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


def test_prompts_prefill_chunks_and_decodes_share_one_pass(runner: ModelRunner, fake_model: NextTokenModel) -> None:
    (column,) = run(runner, Plan().give(0, (5,)).slice(0, 0, 2, 1, [3, 4]))
    assert column.tokens == [[5]] and not column.errors
    plan = Plan().give(1, (2, 7)).give(2, (1, 3))
    plan.slice(1, 0, 3, 0, [8, 8, 8]).slice(0, 2, 1, 1).slice(2, 0, 4, 1, [1, 2, 3, 1])
    plan.table_writes.append(TableWrite(0, 1, (8,)))
    (column,) = run(runner, plan)
    assert column.tokens == [[], [6], [2]]  # none of the chunk; after the row's last token, 5; after 1
    tokens, positions, slots = fake_model.passes[1]
    assert tokens == [8, 8, 8, 5, 1, 2, 3, 1]
    assert positions == [0, 1, 2, 2, 0, 1, 2, 3]
    assert slots == [4, 5, 14, 16, 2, 3, 6, 7]
    assert len(fake_model.passes) == 2


@on_the_cpu
def test_a_step_of_done_rows_computes_nothing(runner: ModelRunner, fake_model: NextTokenModel) -> None:
    run(runner, Plan().give(0, (5,), stops=(3,)).slice(0, 0, 1, 1, [2]))
    assert [c.tokens for c in run(runner, Plan().slice(0, 1, 3, 3))] == [[[]]] * 3
    assert len(fake_model.passes) == 1


def test_several_samples_use_one_row_of_logits(runner: ModelRunner, fake_model: NextTokenModel) -> None:
    plan = Plan().give(0, (5, 6), n=3, temperature=1.5).give(1, (1,), temperature=1.5)
    plan.slice(0, 0, 2, 1, [2, 3], num_samples=3).slice(1, 0, 2, 1, [2, 3])
    (column,) = run(runner, plan)
    assert len(column.tokens[0]) == 3 and len(set(column.tokens[0])) > 1 and len(column.tokens[1]) == 1
    assert column.tokens[0][0] == column.tokens[1][0]  # the same seed, sample 0, the same position
    other = Plan().give(2, (3,), temperature=1.5)
    other.row_setups[0] = other.row_setups[0]._replace(sample_index=2)
    (again,) = run(runner, other.slice(2, 0, 2, 1, [2, 3]))
    assert again.tokens[0][0] == column.tokens[0][2]


def test_a_plan_of_swaps_only_runs_no_pass(runner: ModelRunner, fake_model: NextTokenModel) -> None:
    plan = Plan()
    plan.swap_outs = [SwapOut(1, 3)]
    assert [column.tokens for column in run(runner, plan)] == [[]] and not fake_model.passes


@on_the_cpu
def test_row_setups_host_tokens_and_samples_update_the_token_history(runner: ModelRunner) -> None:
    processors = runner.state.processors
    plan = Plan().give(0, (5, 6, 7, 8), known=[1, 2, 3], repetition_penalty=2.0).slice(0, 0, 6, 4, [1, 2, 3])
    plan.give(1, (1, 2)).slice(1, 0, 1, 1, [9])
    run(runner, plan)
    assert processors.history[0, :7].tolist() == [1, 2, 3, 4, 5, 6, 7]  # with its sampled tokens
    assert not processors.history[1:].any()  # rows that need no history have none
    run(runner, Plan().slice(0, 6, 1, 1, [10]))  # a host token replaces a sampled one
    assert processors.history[0, :8].tolist() == [1, 2, 3, 4, 5, 6, 10, 0]
    again = Plan().give(0, (8,), known=[7], repetition_penalty=2.0).slice(0, 0, 1, 1, [7])
    run(runner, again)  # a new owner: later tokens of the last one stay, unused
    assert processors.history[0, :3].tolist() == [7, 8, 3]


@on_the_cpu
def test_several_samples_before_a_fork_are_not_in_the_history(runner: ModelRunner) -> None:
    plan = Plan().give(0, (5, 6), known=[2, 3], presence_penalty=1.0, n=3, temperature=1.0)
    run(runner, plan.slice(0, 0, 2, 1, [2, 3], num_samples=3))
    assert runner.state.processors.history[0, :3].tolist() == [2, 3, 0]


def test_prompt_logprobs_of_prefill_chunks(
    runner: ModelRunner, fake_model: NextTokenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One entry for each prompt token but the first, over chunks and passes; none for output tokens."""
    monkeypatch.setattr("octavo.runner.passes.prefill_batch.MAX_PROMPT_LOGITS", 2)
    prompt = [1, 2, 3, 9, 10, 0]
    plan = Plan().give(0, (5, 6, 7), known=prompt, prompt_logprobs=1).slice(0, 0, 5, 0, prompt[:5])
    plan.give(1, (8,)).slice(1, 0, 1, 1, [4])
    columns = run(runner, plan)
    assert [c.tokens for c in columns] == [[[], [5]], [[], []], [[], []]]  # the other row does not wait
    assert [c.prompt_logprobs[0][0] for c in columns] == [1, 3, 5]
    entries = [entry for c in columns for entry in c.prompt_logprobs[0][1]]
    assert [e.rank for e in entries] == [1, 1, 2, 1, 1]  # the model predicts 4 after 3, the prompt has 9
    assert [e.top_ids for e in entries] == [[2], [3], [4], [10], [0]]
    assert len(fake_model.passes) == 3 and [p[0] for p in fake_model.passes] == [[1, 2, 4], [3, 9], [10]]
    (last,) = run(runner, Plan().slice(0, 5, 1, 1, [0]))
    assert last.tokens == [[1]] and not last.prompt_logprobs
    once_more = Plan().give(0, (5, 6, 7, 8), known=[*prompt, 1], num_output=1, prompt_logprobs=1)
    (column,) = run(runner, once_more.slice(0, 0, 7, 1, [*prompt, 1]))  # they came before the output token
    assert column.tokens == [[2]] and not column.prompt_logprobs
