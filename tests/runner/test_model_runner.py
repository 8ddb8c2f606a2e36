"""The model runner over a model that only tells what it was asked: passes, windows, stops, and moves of blocks."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.core.plan import BlockCopy, RowSetup, StepPlan, StepResult, SwapIn, SwapOut, TableWrite
from octavo.kernels import reference
from octavo.kernels.metadata import RaggedBatch
from octavo.params.sampling_params import SamplingParams
from octavo.runner.model_runner import ModelRunner

VOCAB = 11
SIZE = 2


class Counting:
    """Says that after token t comes t + 1; writes each token where its K and V go, and remembers each pass."""

    def __init__(self) -> None:
        self.passes: list[tuple[list[int], list[int], list[int]]] = []  # tokens, positions, slots
        self.poison: set[int] = set()

    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: Tensor, logits_rows: Tensor) -> Tensor:
        assert torch.is_inference_mode_enabled()
        self.passes.append((token_ids.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist()))
        for token, slot in zip(token_ids.tolist(), batch.slot_mapping.tolist(), strict=True):
            kv[slot // SIZE, 0, :, 0, slot % SIZE] = token
        logits = torch.zeros(len(logits_rows), VOCAB)
        for i, row in enumerate(logits_rows.tolist()):
            token = int(token_ids[row])
            logits[i, (token + 1) % VOCAB] = 5.0
            if token in self.poison:
                logits[i, 0] = torch.nan
        return logits


@pytest.fixture
def model() -> Counting:
    return Counting()


@pytest.fixture
def runner(model: Counting) -> ModelRunner:
    kv = torch.zeros(9, 1, 2, 1, SIZE, 1)  # 8 usable blocks
    return ModelRunner(model, kv, torch.zeros_like(kv), num_rows=4, max_model_len=8, ops=reference)


class Plan(StepPlan):
    """A plan that is written by hand."""

    def give(
        self,
        row: int,
        block_ids: tuple[int, ...],
        *,
        stops: tuple[int, ...] = (),
        known: list[int] | None = None,
        num_output: int = 0,
        **params: Any,
    ) -> Plan:
        """`known`: what a request that looks back brings along, the last `num_output` of them sampled before."""
        asked = SamplingParams(**({"temperature": 0} | params))
        history = None if known is None else array("i", known)
        num_prompt = len(known or ()) - num_output
        self.row_setups.append(RowSetup(row, asked, 5, 0, frozenset(stops), num_prompt, history))
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


def run(runner: ModelRunner, plan: StepPlan) -> list[StepResult]:
    landed: list[StepResult] = []
    runner.run(plan, landed.append)
    return landed


def test_prompts_chunks_and_decodes_share_one_pass(runner: ModelRunner, model: Counting) -> None:
    (column,) = run(runner, Plan().give(0, (5,)).slice(0, 0, 2, 1, [3, 4]))
    assert column.tokens == [[5]] and not column.errors
    plan = Plan().give(1, (2, 7)).give(2, (1, 3))
    plan.slice(1, 0, 3, 0, [8, 8, 8]).slice(0, 2, 1, 1).slice(2, 0, 4, 1, [1, 2, 3, 1])
    plan.table_writes.append(TableWrite(0, 1, (8,)))
    (column,) = run(runner, plan)
    assert column.tokens == [[], [6], [2]]  # nothing of a chunk, then the row's own 5, then a prompt's last 1
    tokens, positions, slots = model.passes[1]
    assert tokens == [8, 8, 8, 5, 1, 2, 3, 1]
    assert positions == [0, 1, 2, 2, 0, 1, 2, 3]
    assert slots == [4, 5, 14, 16, 2, 3, 6, 7]
    assert len(model.passes) == 2


def test_a_window_feeds_itself_and_lands_column_by_column(runner: ModelRunner, model: Counting) -> None:
    plan = Plan().give(0, (5, 6, 7)).give(1, (1, 2)).give(2, (3,))
    plan.slice(0, 0, 5, 4, [2, 3]).slice(1, 0, 3, 2, [7, 7]).slice(2, 0, 1, 0, [9])
    columns = run(runner, plan)
    assert [c.tokens for c in columns] == [[[4], [8], []], [[5], [9], []], [[6], [], []], [[7], [], []]]
    assert [p[0] for p in model.passes] == [[2, 3, 7, 7, 9], [4, 8], [5], [6]]
    assert [p[1] for p in model.passes] == [[0, 1, 0, 1, 0], [2, 2], [3], [4]]
    (column,) = run(runner, Plan().slice(0, 5, 1, 1))  # and the row goes on from its last token
    assert column.tokens == [[8]] and model.passes[-1][:2] == ([7], [5])


def test_a_stop_token_ends_a_window_early_and_the_row_sleeps(runner: ModelRunner, model: Counting) -> None:
    plan = Plan().give(0, (5, 6, 7), stops=(4,)).give(1, (1, 2))
    plan.slice(0, 0, 4, 4, [2]).slice(1, 0, 4, 4, [2])
    assert [c.tokens for c in run(runner, plan)] == [[[3], [3]], [[4], [4]], [[], [5]], [[], [6]]]
    columns = run(runner, Plan().slice(0, 4, 2, 2).slice(1, 4, 1, 1))  # planned before the host knew
    assert [c.tokens for c in columns] == [[[], [7]], [[], []]]
    assert model.passes[-1][0] == [6]
    (column,) = run(runner, Plan().give(0, (8,)).slice(0, 0, 1, 1, [4]))  # host tokens wake it: a new owner
    assert column.tokens == [[5]]


def test_all_rows_asleep(runner: ModelRunner, model: Counting) -> None:
    run(runner, Plan().give(0, (5,), stops=(3,)).slice(0, 0, 1, 1, [2]))
    assert [c.tokens for c in run(runner, Plan().slice(0, 1, 3, 3))] == [[[]]] * 3
    assert len(model.passes) == 1


def test_draws_come_from_one_row_of_logits(runner: ModelRunner, model: Counting) -> None:
    plan = Plan().give(0, (5, 6), n=3, temperature=1.5).give(1, (1,), temperature=1.5)
    plan.slice(0, 0, 2, 1, [2, 3], num_samples=3).slice(1, 0, 2, 1, [2, 3])
    (column,) = run(runner, plan)
    assert len(column.tokens[0]) == 3 and len(column.tokens[1]) == 1
    assert column.tokens[0][0] == column.tokens[1][0]  # the same seed, sample 0, the same position
    other = Plan().give(2, (3,), temperature=1.5)
    other.row_setups[0] = other.row_setups[0]._replace(sample_index=2)
    (again,) = run(runner, other.slice(2, 0, 2, 1, [2, 3]))
    assert again.tokens[0][0] == column.tokens[0][2]


def test_a_row_that_is_not_finite_is_told_and_stops(runner: ModelRunner, model: Counting) -> None:
    model.poison = {4}
    plan = Plan().give(0, (5, 6)).give(1, (1, 2))
    plan.slice(0, 0, 3, 3, [3]).slice(1, 0, 3, 3, [6])
    columns = run(runner, plan)
    assert [list(c.errors) for c in columns] == [[], [0], []]
    assert [c.tokens[1] for c in columns] == [[7], [8], [9]]
    assert "not finite" in columns[1].errors[0]
    assert model.passes[-1][0] == [8]  # nothing more is computed for the first


def test_moves_happen_in_stream_order(runner: ModelRunner) -> None:
    """Out, in, copies, slices; and all reads of a list of moves before its writes."""
    for block in range(1, 9):
        runner.kv[block] = block
        runner.host_kv[block] = 10 * block
    plan = Plan()
    plan.swap_outs = [SwapOut(1, 3), SwapOut(2, 4)]
    plan.swap_ins = [SwapIn(3, 2), SwapIn(5, 1)]  # 3 has just been swapped out
    plan.copies = [BlockCopy(2, 6), BlockCopy(1, 7)]  # 2 and 1 have just come in
    plan.give(0, (7,)).slice(0, 0, 1, 0, [9])
    run(runner, plan)
    values = [int(runner.kv[b, 0, 1, 0, 1, 0]) for b in range(1, 9)]
    assert values == [50, 1, 3, 4, 5, 1, 50, 8]
    assert runner.kv[7, 0, 0, 0, 0, 0] == 9  # the slice wrote after the copy
    assert [int(runner.host_kv[b, 0, 0, 0, 0, 0]) for b in (3, 4, 5)] == [1, 2, 50]


def test_a_plan_of_swaps_alone(runner: ModelRunner, model: Counting) -> None:
    plan = Plan()
    plan.swap_outs = [SwapOut(1, 3)]
    assert run(runner, plan) == [] and not model.passes


# -- what looks at the tokens before ----------------------------------------------------------------------------------


def test_a_rows_tokens_are_kept_up_by_setups_host_tokens_and_samples(runner: ModelRunner) -> None:
    """Repetition makes the model's next token, 5 of logit 5, less likely than 6 of 4 once it came before."""
    history = runner.sampler
    plan = Plan().give(0, (5, 6, 7, 8), known=[1, 2, 3], repetition_penalty=2.0).slice(0, 0, 6, 4, [1, 2, 3])
    plan.give(1, (1, 2)).slice(1, 0, 1, 1, [9])
    run(runner, plan)
    assert history.history[0, :7].tolist() == [1, 2, 3, 4, 5, 6, 7]  # what it sampled itself
    assert not history.history[1:].any()  # nothing for a row that never looks back
    run(runner, Plan().slice(0, 6, 1, 1, [10]))  # the host knows better
    assert history.history[0, :8].tolist() == [1, 2, 3, 4, 5, 6, 10, 0]
    again = Plan().give(0, (8,), known=[7], repetition_penalty=2.0).slice(0, 0, 1, 1, [7])
    run(runner, again)  # a new owner: what lies behind its tokens is another's, and counts for nothing
    assert history.history[0, :3].tolist() == [7, 8, 3]


def test_draws_of_a_request_about_to_fork_are_not_its_rows_tokens(runner: ModelRunner) -> None:
    plan = Plan().give(0, (5, 6), known=[2, 3], presence_penalty=1.0, n=3, temperature=1.0)
    run(runner, plan.slice(0, 0, 2, 1, [2, 3], num_samples=3))
    assert runner.sampler.history[0, :3].tolist() == [2, 3, 0]


def test_prompt_logprobs_of_chunks(runner: ModelRunner, model: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the prompt's tokens but the first once, across chunks and across passes; none of the output's."""
    monkeypatch.setattr("octavo.runner.model_runner.MAX_PROMPT_LOGITS", 2)
    prompt = [1, 2, 3, 9, 10, 0]
    plan = Plan().give(0, (5, 6, 7), known=prompt, prompt_logprobs=1).slice(0, 0, 5, 0, prompt[:5])
    plan.give(1, (8,)).slice(1, 0, 1, 1, [4])
    columns = run(runner, plan)
    assert [c.tokens for c in columns] == [[[], [5]], [[], []], [[], []]]  # the neighbour does not wait
    assert [c.prompt_logprobs[0][0] for c in columns] == [1, 3, 5]
    entries = [entry for c in columns for entry in c.prompt_logprobs[0][1]]
    assert [e.rank for e in entries] == [1, 1, 2, 1, 1]  # after 3 the model says 4, and 9 came
    assert [e.top_ids for e in entries] == [[2], [3], [4], [10], [0]]
    assert len(model.passes) == 3 and [p[0] for p in model.passes] == [[1, 2, 4], [3, 9], [10]]
    (last,) = run(runner, Plan().slice(0, 5, 1, 1, [0]))
    assert last.tokens == [[1]] and not last.prompt_logprobs
    once_more = Plan().give(0, (5, 6, 7, 8), known=[*prompt, 1], num_output=1, prompt_logprobs=1)
    (column,) = run(runner, once_more.slice(0, 0, 7, 1, [*prompt, 1]))  # with a token told, so was all of the prompt
    assert column.tokens == [[2]] and not column.prompt_logprobs
