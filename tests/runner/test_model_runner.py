"""The model runner on the CPU with plans written by hand: passes, decode windows, stop tokens, swaps and copies."""

from __future__ import annotations

import pytest
import torch

from octavo.core.plan import BlockCopy, StepPlan, StepResult, SwapIn, SwapOut, TableWrite
from octavo.runner.model_runner import ModelRunner
from octavo.runner.platform import CpuPlatform
from tests.runner.handwritten_plans import SIZE, VOCAB, NextTokenModel, Plan


@pytest.fixture
def model() -> NextTokenModel:
    return NextTokenModel()


@pytest.fixture
def runner(model: NextTokenModel) -> ModelRunner:
    kv = torch.zeros(9, 1, 2, 1, SIZE, 1)  # 8 usable blocks
    sizes = {"num_rows": 4, "max_model_len": 8, "max_num_tokens": 16, "max_decode_steps": 4, "vocab_size": VOCAB}
    return ModelRunner(model, kv, torch.zeros_like(kv), CpuPlatform(), graphs=False, **sizes)


def run(runner: ModelRunner, plan: StepPlan) -> list[StepResult]:
    output, advance = runner.execute(plan)
    advance(None)
    return [output.read(i, i + 1) for i in range(len(output.events))]


def test_prompts_prefill_chunks_and_decodes_share_one_pass(runner: ModelRunner, model: NextTokenModel) -> None:
    (column,) = run(runner, Plan().give(0, (5,)).slice(0, 0, 2, 1, [3, 4]))
    assert column.tokens == [[5]] and not column.errors
    plan = Plan().give(1, (2, 7)).give(2, (1, 3))
    plan.slice(1, 0, 3, 0, [8, 8, 8]).slice(0, 2, 1, 1).slice(2, 0, 4, 1, [1, 2, 3, 1])
    plan.table_writes.append(TableWrite(0, 1, (8,)))
    (column,) = run(runner, plan)
    assert column.tokens == [
        [],
        [6],
        [2],
    ]  # none of the chunk; after the row's last token, 5; after 1
    tokens, positions, slots = model.passes[1]
    assert tokens == [8, 8, 8, 5, 1, 2, 3, 1]
    assert positions == [0, 1, 2, 2, 0, 1, 2, 3]
    assert slots == [4, 5, 14, 16, 2, 3, 6, 7]
    assert len(model.passes) == 2


def test_a_decode_window_uses_its_own_tokens_and_returns_columns(runner: ModelRunner, model: NextTokenModel) -> None:
    plan = Plan().give(0, (5, 6, 7)).give(1, (1, 2)).give(2, (3,))
    plan.slice(0, 0, 5, 4, [2, 3]).slice(1, 0, 3, 2, [7, 7]).slice(2, 0, 1, 0, [9])
    columns = run(runner, plan)
    assert [c.tokens for c in columns] == [[[4], [8], []], [[5], [9], []], [[6], [], []], [[7], [], []]]
    assert [p[0] for p in model.passes] == [[2, 3, 7, 7, 9], [4, 8], [5], [6]]
    assert [p[1] for p in model.passes] == [[0, 1, 0, 1, 0], [2, 2], [3], [4]]
    (column,) = run(runner, Plan().slice(0, 5, 1, 1))  # the row continues from its last token
    assert column.tokens == [[8]] and model.passes[-1][:2] == ([7], [5])


def test_a_stop_token_ends_a_decode_window_and_its_row(runner: ModelRunner, model: NextTokenModel) -> None:
    plan = Plan().give(0, (5, 6, 7), stops=(4,)).give(1, (1, 2))
    plan.slice(0, 0, 4, 4, [2]).slice(1, 0, 4, 4, [2])
    assert [c.tokens for c in run(runner, plan)] == [[[3], [3]], [[4], [4]], [[], [5]], [[], [6]]]
    columns = run(runner, Plan().slice(0, 4, 2, 2).slice(1, 4, 1, 1))  # planned before the host knew
    assert [c.tokens for c in columns] == [[[], [7]], [[], []]]
    assert model.passes[-1][0] == [6]
    (column,) = run(runner, Plan().give(0, (8,)).slice(0, 0, 1, 1, [4]))  # a new owner's host tokens end done
    assert column.tokens == [[5]]


def test_a_step_of_done_rows_computes_nothing(runner: ModelRunner, model: NextTokenModel) -> None:
    run(runner, Plan().give(0, (5,), stops=(3,)).slice(0, 0, 1, 1, [2]))
    assert [c.tokens for c in run(runner, Plan().slice(0, 1, 3, 3))] == [[[]]] * 3
    assert len(model.passes) == 1


def test_several_samples_use_one_row_of_logits(runner: ModelRunner, model: NextTokenModel) -> None:
    plan = Plan().give(0, (5, 6), n=3, temperature=1.5).give(1, (1,), temperature=1.5)
    plan.slice(0, 0, 2, 1, [2, 3], num_samples=3).slice(1, 0, 2, 1, [2, 3])
    (column,) = run(runner, plan)
    assert len(column.tokens[0]) == 3 and len(column.tokens[1]) == 1
    assert column.tokens[0][0] == column.tokens[1][0]  # the same seed, sample 0, the same position
    other = Plan().give(2, (3,), temperature=1.5)
    other.row_setups[0] = other.row_setups[0]._replace(sample_index=2)
    (again,) = run(runner, other.slice(2, 0, 2, 1, [2, 3]))
    assert again.tokens[0][0] == column.tokens[0][2]


def test_non_finite_logits_are_reported_and_end_the_row(runner: ModelRunner, model: NextTokenModel) -> None:
    model.poison = {4}
    plan = Plan().give(0, (5, 6)).give(1, (1, 2))
    plan.slice(0, 0, 3, 3, [3]).slice(1, 0, 3, 3, [6])
    columns = run(runner, plan)
    assert [list(c.errors) for c in columns] == [[], [0], []]
    assert [c.tokens[1] for c in columns] == [[7], [8], [9]]
    assert "not finite" in columns[1].errors[0]
    assert model.passes[-1][0] == [8]  # nothing more is computed for the first


def test_block_moves_run_in_stream_order(runner: ModelRunner) -> None:
    """Swaps out, swaps in, copies, slices. All reads of a list of moves come before its writes."""
    for block in range(1, 9):
        runner.kv[block] = block
        runner.swapper.host_kv[block] = 10 * block
    plan = Plan()
    plan.swap_outs = [SwapOut(1, 3), SwapOut(2, 4)]
    plan.swap_ins = [SwapIn(3, 2), SwapIn(5, 1)]  # 3 has just been swapped out
    plan.copies = [BlockCopy(2, 6), BlockCopy(1, 7)]  # 2 and 1 have just come in
    plan.give(0, (7,)).slice(0, 0, 1, 0, [9])
    run(runner, plan)
    values = [int(runner.kv[b, 0, 1, 0, 1, 0]) for b in range(1, 9)]
    assert values == [50, 1, 3, 4, 5, 1, 50, 8]
    assert runner.kv[7, 0, 0, 0, 0, 0] == 9  # the slice wrote after the copy
    assert [int(runner.swapper.host_kv[b, 0, 0, 0, 0, 0]) for b in (3, 4, 5)] == [1, 2, 50]


def test_a_plan_of_swaps_only_runs_no_pass(runner: ModelRunner, model: NextTokenModel) -> None:
    plan = Plan()
    plan.swap_outs = [SwapOut(1, 3)]
    assert [column.tokens for column in run(runner, plan)] == [[]] and not model.passes


# -- token history ----------------------------------------------------------------------------------------------------


def test_row_setups_host_tokens_and_samples_update_the_token_history(runner: ModelRunner) -> None:
    processors = runner.logits_processors
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


def test_several_samples_before_a_fork_are_not_in_the_history(runner: ModelRunner) -> None:
    plan = Plan().give(0, (5, 6), known=[2, 3], presence_penalty=1.0, n=3, temperature=1.0)
    run(runner, plan.slice(0, 0, 2, 1, [2, 3], num_samples=3))
    assert runner.logits_processors.history[0, :3].tolist() == [2, 3, 0]


def test_prompt_logprobs_of_prefill_chunks(
    runner: ModelRunner, model: NextTokenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One entry for each prompt token but the first, over chunks and passes; none for output tokens."""
    monkeypatch.setattr("octavo.runner.prefill_batch.MAX_PROMPT_LOGITS", 2)
    prompt = [1, 2, 3, 9, 10, 0]
    plan = Plan().give(0, (5, 6, 7), known=prompt, prompt_logprobs=1).slice(0, 0, 5, 0, prompt[:5])
    plan.give(1, (8,)).slice(1, 0, 1, 1, [4])
    columns = run(runner, plan)
    assert [c.tokens for c in columns] == [[[], [5]], [[], []], [[], []]]  # the other row does not wait
    assert [c.prompt_logprobs[0][0] for c in columns] == [1, 3, 5]
    entries = [entry for c in columns for entry in c.prompt_logprobs[0][1]]
    assert [e.rank for e in entries] == [1, 1, 2, 1, 1]  # the model predicts 4 after 3, the prompt has 9
    assert [e.top_ids for e in entries] == [[2], [3], [4], [10], [0]]
    assert len(model.passes) == 3 and [p[0] for p in model.passes] == [[1, 2, 4], [3, 9], [10]]
    (last,) = run(runner, Plan().slice(0, 5, 1, 1, [0]))
    assert last.tokens == [[1]] and not last.prompt_logprobs
    once_more = Plan().give(0, (5, 6, 7, 8), known=[*prompt, 1], num_output=1, prompt_logprobs=1)
    (column,) = run(runner, once_more.slice(0, 0, 7, 1, [*prompt, 1]))  # they came before the output token
    assert column.tokens == [[2]] and not column.prompt_logprobs
