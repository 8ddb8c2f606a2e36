"""The CPU's step operations give the reference's numbers."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import step
from octavo.kernels.metadata import PER_ROW_FIELDS, RaggedBatch
from octavo.kernels.row_state import (
    COLUMN,
    FIRST_STOP_ID,
    FLOATS,
    IN_PROMPT,
    MAX_LOGPROBS,
    NUM_LOGPROBS,
    DecodeInputs,
    DraftLines,
    LogitsProcessorState,
    RowState,
)

NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE, VOCAB, MAX_LEN = 9, 6, 4, 300, 40


def random_state(seed: int, *, num_groups: int = 1, state_blocks: int = 0) -> RowState:
    generator = torch.Generator().manual_seed(seed)

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    state = RowState.empty(
        NUM_ROWS, MAX_BLOCKS, "cpu", max_len=MAX_LEN, num_groups=num_groups, state_blocks=state_blocks
    )
    state.block_tables[:NUM_ROWS] = 1 + ints(90, NUM_ROWS, state.num_lines * MAX_BLOCKS).int()
    state.last_token[:NUM_ROWS] = ints(VOCAB, NUM_ROWS)
    state.done[:NUM_ROWS] = ints(4, NUM_ROWS) == 0
    state.num_computed[:NUM_ROWS] = ints(10, NUM_ROWS)
    state.drafts[:NUM_ROWS, 0] = ints(VOCAB, NUM_ROWS) * ints(2, NUM_ROWS) - 1
    state.history[:NUM_ROWS] = ints(4, NUM_ROWS, MAX_LEN).int()
    params = state.sampling_params[:NUM_ROWS]
    params[:, list(COLUMN.values())] = ints(20, NUM_ROWS, len(COLUMN))
    params[:, NUM_LOGPROBS] = ints(4, NUM_ROWS) - 1
    params[:, FIRST_STOP_ID : FIRST_STOP_ID + 3] = ints(VOCAB, NUM_ROWS, 3)
    floats = torch.rand(NUM_ROWS, len(FLOATS), generator=generator)
    params.view(torch.float64)[:, FLOATS] = floats.double()
    return state


def same_state(a: RowState, b: RowState) -> bool:
    tensors = [field.name for field in fields(RowState) if isinstance(getattr(a, field.name), Tensor)]
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in tensors)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("num_groups", "state_blocks"), [(1, 0), (3, 0), (1, 2), (2, 1)])
def test_decode_inputs(seed: int, num_groups: int, state_blocks: int) -> None:
    found = []
    for ops in (reference, step):
        state, rows = (
            random_state(seed, num_groups=num_groups, state_blocks=state_blocks),
            torch.tensor([4, 0, 7, 2, NUM_ROWS]),
        )
        rows, depths = rows.repeat_interleave(2), torch.tensor([0, 1] * 5)
        ends = torch.tensor([9, 11, 30, 24, 0]).repeat_interleave(2)
        state.num_computed[[4, 0, 7, 2]] = torch.tensor([3, 10, 0, 22]) + seed % 3
        inputs = DecodeInputs.allocate(
            torch.tensor([0]),
            rows,
            depths,
            ends,
            max_blocks=MAX_BLOCKS,
            block_size=BLOCK_SIZE,
            num_windows=num_groups - 1,
            state_blocks=state_blocks,
        ).first(10)
        ops.prepare_decode_inputs(state, inputs, BLOCK_SIZE)
        batch = inputs.batch
        of_groups = [batch.group(group) for group in range(num_groups)]
        tables = [
            [table[: -(-int(n) // BLOCK_SIZE)].tolist() for table, n in zip(each.block_tables, batch.seq_lens)]  # noqa: B905
            for each in of_groups
        ]
        states = [x.tolist() for x in (batch.state_tables, batch.state_reads) if x is not None]
        states.append(state.block_tables.tolist())  # what is written, the next pass reads
        sampling = [getattr(inputs.sampling, name).tolist() for name in PER_ROW_FIELDS]
        slots = [each.slot_mapping for each in of_groups]
        tensors = inputs.live_rows, inputs.token_ids, batch.positions, batch.seq_lens, *slots
        found.append(([tensor.tolist() for tensor in tensors], tables, states, sampling))
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(10))
def test_prefill_inputs(seed: int) -> None:
    found = []
    for ops in (reference, step):
        state, rows, starts = random_state(seed), torch.tensor([1, 3, 5, 8]), torch.tensor([2, 7, 0, 11])
        query_start = torch.tensor([0, 3, 4, 9, 10], dtype=torch.int32)
        known = torch.tensor([5, 6, 7, -1, 1, 2, 3, 4, 5, -1])
        batch = RaggedBatch(
            positions=torch.zeros(10, dtype=torch.int64),
            slot_mapping=torch.zeros(10, dtype=torch.int64),
            query_start=query_start,
            seq_lens=torch.zeros(4, dtype=torch.int32),
            block_tables=torch.zeros(4, 3, dtype=torch.int32),
            max_query_len=5,
            max_seq_len=12,
        )
        token_ids = torch.zeros(10, dtype=torch.int64)
        ops.prepare_prefill_inputs(state, rows, starts, known, batch, token_ids, BLOCK_SIZE)
        tensors = token_ids, batch.positions, batch.slot_mapping, batch.seq_lens, batch.block_tables, state.done
        found.append([tensor.tolist() for tensor in tensors])
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(10))
def test_commit_of_tokens_stops_and_errors(seed: int) -> None:
    rows = torch.tensor([0, 2, 3, 5, 8])
    states = random_state(seed), random_state(seed)
    tokens = torch.tensor([7, -1, -2, int(states[0].sampling_params[5, FIRST_STOP_ID + 1]), 9])
    rings, counters = torch.zeros(2, 2, 6, dtype=torch.int32), torch.tensor([[1], [1]])
    for ops, state, ring, counter in zip((reference, step), states, rings, counters, strict=True):
        ops.commit_sampled_tokens(state, rows, tokens, rows + 3, ring, counter)
    assert same_state(*states) and torch.equal(*rings) and torch.equal(*counters) and counters[0, 0] == 2


@pytest.mark.parametrize("seed", range(20))
def test_drafts_are_rejected(seed: int) -> None:
    """Histories of four tokens repeat themselves, and some tokens are stop tokens."""
    rows, ends = torch.tensor([0, 2, 3, 5, NUM_ROWS]), torch.tensor([30, 9, 12, 40, 0])
    states, rejected = (random_state(seed), random_state(seed)), []
    for ops, state in zip((reference, step), states, strict=True):
        state.sampling_params[:, FIRST_STOP_ID] = seed % 5
        reference.propose_drafts(state, rows, ends, 6)
        lines, depths = rows.repeat_interleave(4), torch.arange(4).repeat(5)
        token_ids = torch.where(depths == 0, 7, state.drafts[lines, (depths - 1).clamp(min=0)])
        tokens = token_ids.roll(-1) + (torch.arange(20) * 7 % 5 == seed % 5)  # most drafts are right
        rejected.append(ops.reject_drafts(state, lines, tokens, DraftLines(depths, token_ids)))
    assert same_state(*states) and torch.equal(*rejected)


def test_drafts_continue_the_longest_and_latest_match() -> None:
    state = RowState.empty(2, MAX_BLOCKS, "cpu", max_len=MAX_LEN)
    for row, tokens in enumerate(([1, 2, 3, 9, 5, 2, 3, 8, 7, 2, 3, 6, 1, 2, 3], [4, 4, 4])):
        state.history[row, : len(tokens)] = torch.tensor(tokens)
        state.num_computed[row] = len(tokens) - 1
    reference.propose_drafts(state, torch.tensor([0, 1]), torch.tensor([18, 100]), 5)
    assert state.drafts[0, :4].tolist() == [9, 5, 2, -1]  # three tokens matched; the end is at position 18
    assert state.drafts[1, :6].tolist() == [4, 4, 4, 4, 4, -1]  # goes on from its own beginning


def test_tokens_after_a_wrong_draft_or_a_stop_token_are_rejected() -> None:
    state = random_state(0)
    state.sampling_params[2, FIRST_STOP_ID] = 50
    rows, depths = torch.tensor([1, 1, 1, 2, 2, 3]), torch.tensor([0, 1, 2, 0, 1, 0])
    token_ids, tokens = torch.tensor([5, 10, 11, 5, 50, 5]), torch.tensor([10, 12, 13, 50, 7, 9])
    for ops in (reference, step):
        kept = ops.reject_drafts(state, rows, tokens, DraftLines(depths, token_ids))
        assert kept.tolist() == [10, 12, -3, 50, -3, 9]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_checked_samples(seed: int, masked: bool) -> None:
    logits = 3 * torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[1, 5], logits[4, 7] = math.nan, math.inf
    rows = torch.tensor([0, 2, 3, 5, 8])
    sampling = random_state(seed).sampling(rows, torch.full_like(rows, -1), rows + 3)
    bitmask = torch.randint(-(1 << 31), 1 << 31, (2, 10), dtype=torch.int64).int()
    bitmask[1] = 0
    masks = (torch.tensor([0, -1, 1, -1, 0], dtype=torch.int32), bitmask) if masked else None
    found = [ops.sample_checked(logits.clone(), sampling, masks) for ops in (reference, step)]
    assert torch.equal(*found)
    assert found[0][[1, 4]].tolist() == [-1, -1] and (not masked or found[0][2] == -2)


@pytest.mark.parametrize("seed", range(5))
def test_logprobs_of_rows_that_return_them(seed: int) -> None:
    state, rows = random_state(seed), torch.tensor([0, 2, 3, 5, 8])
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(seed))
    tokens, rings = torch.tensor([7, 8, -1, 299, 0]), torch.zeros(2, 2, 6, 2 + 2 * MAX_LOGPROBS, dtype=torch.int32)
    for ops, ring in zip((reference, step), rings, strict=True):
        ops.write_logprobs(state, rows, logits, tokens, ring, torch.tensor([1, 0]))
    ints = [ring[1, :, 1 : 2 + MAX_LOGPROBS] for ring in rings]
    floats = [ring[1][:, [0, *range(2 + MAX_LOGPROBS, 2 + 2 * MAX_LOGPROBS)]].view(torch.float32) for ring in rings]
    assert torch.equal(*ints)
    torch.testing.assert_close(*floats)
    packed = [ops.packed_top_logprobs(logits, 6) for ops in (reference, step)]
    assert torch.equal(packed[0][:, 1:8], packed[1][:, 1:8])
    torch.testing.assert_close(packed[0][:, 8:].view(torch.float32), packed[1][:, 8:].view(torch.float32))


@pytest.mark.parametrize("seed", range(10))
def test_token_counts_from_the_host(seed: int) -> None:
    """Prompts and outputs with repeated tokens; some positions are counted already, some slices are empty."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([0, 12, 7, 30])
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    token_ids = torch.randint(20, (int(begins[-1]),), generator=generator)
    rows, starts = torch.tensor([3, 0, 5, 1]), torch.tensor([0, 0, seed, 2])
    found = []
    for ops in (reference, step):
        processors = processor_state(seed)
        ops.init_token_counts(processors, rows, starts, begins, token_ids)
        found.append(processors)
    assert torch.equal(found[0].counts, found[1].counts) and torch.equal(found[0].num_counted, found[1].num_counted)
    assert (found[1].counts & IN_PROMPT).any() and (found[1].counts & (IN_PROMPT - 1)).max() > 1


@pytest.mark.parametrize("seed", range(10))
def test_logits_processors_of_rows(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(NUM_ROWS + 1, VOCAB, generator=generator) * 3
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -math.inf
    rows, positions = torch.randperm(NUM_ROWS + 1, generator=generator), torch.arange(NUM_ROWS + 1)
    state, processors = random_state(seed), processor_state(seed)
    expected, actual = logits.clone(), logits.clone()
    reference.apply_row_logits_processors(expected, rows, positions, state, processors)
    step.apply_row_logits_processors(actual, rows, positions, state, processors)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(actual, logits)


def processor_state(seed: int) -> LogitsProcessorState:
    """All 16 combinations of logits processors occur in two seeds."""
    generator = torch.Generator().manual_seed(seed)
    history = torch.zeros(NUM_ROWS + 1, 40, dtype=torch.int32)
    state = LogitsProcessorState.empty(NUM_ROWS, VOCAB, history)
    state.enabled[:NUM_ROWS] = (torch.arange(NUM_ROWS) + 8 * seed).int() % 16
    state.num_prompt[:] = torch.randint(12, (NUM_ROWS + 1,), generator=generator).int()
    state.num_counted[:] = torch.randint(6, (NUM_ROWS + 1,), generator=generator).int()
    state.min_length[:] = 6
    state.penalties[:] = 0.5 + torch.rand(NUM_ROWS + 1, 3, generator=generator)
    state.bias_ids[:] = -1
    state.bias_ids[:, :3] = torch.tensor([5, 9, 200], dtype=torch.int32)
    state.bias_values[:, :3] = torch.tensor([1.5, -2.0, 100.0])
    state.allowed_bitmask[:] = torch.randint(-(2**31), 2**31, state.allowed_bitmask.shape, generator=generator).int()
    state.counts[:, :9] = torch.randint(4, (NUM_ROWS + 1, 9), generator=generator).int()
    state.counts[:, 3:6] |= IN_PROMPT
    return state
