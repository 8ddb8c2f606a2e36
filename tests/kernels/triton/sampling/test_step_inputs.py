"""Step inputs from the row state, and the commit of sampled tokens, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels import reference
from octavo.kernels.metadata import PER_ROW_FIELDS, RaggedBatch
from octavo.kernels.row_state import FIRST_STOP_ID, DecodeInputs, RowState
from octavo.kernels.triton import ops as cuda
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.sampling.rows import BLOCK_SIZE, MAX_BLOCKS, NUM_ROWS, make_state, tensors_of, to_device


def assert_equal(actual: RowState, expected: RowState) -> None:
    found = tensors_of(actual)
    for name, tensor in tensors_of(expected).items():
        assert torch.equal(found[name].cpu(), tensor), name


def assert_equal_batches(actual: RaggedBatch, expected: RaggedBatch) -> None:
    for name in ("positions", "seq_lens"):
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name
    assert actual.num_groups == expected.num_groups
    for name in ("state_tables", "state_reads"):
        found, wanted = getattr(actual, name), getattr(expected, name)
        assert found is wanted is None or torch.equal(found.cpu(), wanted), name
    for group in range(expected.num_groups):
        found, wanted = actual.group(group), expected.group(group)
        assert torch.equal(found.slot_mapping.cpu(), wanted.slot_mapping), group
        for i, length in enumerate(expected.seq_lens.tolist()):
            used = cdiv(length, BLOCK_SIZE)
            assert torch.equal(found.block_tables[i, :used].cpu(), wanted.block_tables[i, :used]), group


@pytest.mark.parametrize(("num_groups", "state_blocks"), [(1, 0), (3, 0), (1, 280)])
def test_prepare_decode_inputs_matches_the_reference(num_groups: int, state_blocks: int) -> None:
    rows, depths = torch.tensor([4, 4, 4, 2, 0, NUM_ROWS, 1]), torch.tensor([0, 1, 2, 0, 0, 0, 0])
    ends, step_counter = torch.tensor([1104] * 3 + [9, 8, 0, 3]), torch.tensor([0])
    state, steps, states = make_state(num_groups, state_blocks), list[DecodeInputs](), list[RowState]()
    state.num_computed[[4, 2, 0, 1]] = torch.tensor([1101, 6, 8, 1])  # row 0 has computed its only position
    state.drafts[4, 0] = -1 if state_blocks else 77  # and no second draft; none beside states
    for ops, device in ((reference, "cpu"), (cuda, DEVICE)):
        tensors = [x.to(device) for x in (step_counter, rows, depths, ends)]
        sizes = {"max_blocks": MAX_BLOCKS, "block_size": BLOCK_SIZE, "num_windows": num_groups - 1}
        step = DecodeInputs.allocate(*tensors, **sizes, state_blocks=state_blocks).first(7)
        for tables in (step.batch.state_tables, step.batch.state_reads):
            if tables is not None:
                tables.fill_(-1)
        states.append(to_device(state, device))
        ops.prepare_decode_inputs(states[-1], step, BLOCK_SIZE)
        steps.append(step)
    expected, actual = steps
    assert_equal(states[1], states[0])
    if state_blocks:  # the rows that are computed read next what they write
        before, after = state.state_reads, states[0].state_reads
        is_next = [torch.equal(after[row], states[0].state_tables[row]) for row in range(NUM_ROWS)]
        assert is_next == [row in (4, 1) for row in range(NUM_ROWS)] and torch.equal(
            after[[0, 2, 3, 5]], before[[0, 2, 3, 5]]
        )
        assert expected.batch.state_reads is not None and torch.equal(expected.batch.state_reads[0], before[4])
        assert expected.live_rows.tolist() == [4, *[NUM_ROWS] * 5, 1]
    else:
        assert expected.live_rows.tolist() == [4, 4, *[NUM_ROWS] * 4, 1]
        assert expected.token_ids.tolist()[:2] == [int(state.last_token[4]), 77]
        assert expected.batch.seq_lens.tolist() == [1102, 1103, 0, 0, 0, 0, 2]
    for group in range(num_groups):
        first = 1 + (4 * state.num_lines + group) * MAX_BLOCKS
        assert expected.batch.group(group).slot_mapping.tolist()[0] == (first + 275) * BLOCK_SIZE + 1
    for name in ("live_rows", "token_ids"):
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name
    assert_equal_batches(actual.batch, expected.batch)
    for name in PER_ROW_FIELDS:
        assert torch.equal(getattr(actual.sampling, name).cpu(), getattr(expected.sampling, name)), name


@pytest.mark.parametrize(("num_groups", "state_blocks"), [(1, 0), (3, 0), (1, 280)])
def test_prepare_prefill_inputs_matches_the_reference(num_groups: int, state_blocks: int) -> None:
    """A chunk, a decode, a row that is done, and a done row that gets a chunk longer than a program's tile."""
    state = make_state(num_groups, state_blocks)
    state.done[3], state.num_computed[1] = True, 40
    counts = [3, 1, 1, 700]
    rows, starts = (
        torch.tensor([0, 1, 2, 3]),
        torch.tensor([9, 41, 6, 400]),
    )  # the second is one too far: a draft was wrong
    known = torch.cat((torch.tensor([7, 8, 9, -1, -1]), torch.randint(0, 50, (700,))))
    results: list[tuple[RowState, RaggedBatch, Tensor]] = []
    for ops, device in ((reference, "cpu"), (cuda, DEVICE)):
        device_state = to_device(state, device)
        batch = RaggedBatch.from_lists(counts, counts, [[0] * 275] * 4, BLOCK_SIZE, device=device)
        if num_groups > 1:
            shape = num_groups - 1, *batch.block_tables.shape
            tables = torch.zeros(shape, dtype=torch.int32, device=device)
            slots = batch.slot_mapping.new_zeros(num_groups - 1, len(known))
            batch = replace(batch, window_tables=tables, window_slots=slots)
        if state_blocks:
            tables = torch.full((4, state_blocks), -1, dtype=torch.int32, device=device)
            batch = replace(batch, state_tables=tables, state_reads=tables.clone())
        token_ids = torch.empty(len(known), dtype=torch.int64, device=device)
        ops.prepare_prefill_inputs(
            device_state, rows.to(device), starts.to(device), known.to(device), batch, token_ids, BLOCK_SIZE
        )
        results.append((device_state, batch, token_ids))
    (expected_state, expected, expected_tokens), (state, actual, tokens) = results
    assert_equal(state, expected_state)
    assert expected_state.done.tolist() == [False, False, True, False, False, False, True]
    assert expected.seq_lens.tolist() == [12, 41, 1, 1100]
    assert torch.equal(tokens.cpu(), expected_tokens)
    assert int(tokens[3]) == int(state.last_token[1])
    assert_equal_batches(actual, expected)
    assert all(expected.group(g).slot_mapping[4] == 0 for g in range(num_groups))  # the row that is done


def test_commit_sampled_tokens_matches_the_reference() -> None:
    """A token, a stop token, a null row, non-finite logits, a done row, and two samples of one row."""
    state = make_state()
    rows, tokens = torch.tensor([0, 1, NUM_ROWS, 3, 2, 4, 4]), torch.tensor([60, -5, 61, -1, 62, -5, -5])
    tokens[1], tokens[5], tokens[6] = (
        state.sampling_params[1, FIRST_STOP_ID],
        state.sampling_params[4, -1],
        state.sampling_params[4, -1],
    )
    results = []
    for ops, device in ((reference, "cpu"), (cuda, DEVICE)):
        device_state = to_device(state, device)
        ring = torch.full((3, 9), -7, dtype=torch.int32, device=device)
        step_counter = torch.tensor([1], device=device)
        ops.commit_sampled_tokens(
            device_state, rows.to(device), tokens.to(device), rows.to(device) + 5, ring, step_counter
        )
        results.append((device_state, ring.cpu(), step_counter.cpu()))
    (expected_state, expected_ring, expected_counter), (state, ring, step_counter) = results
    assert_equal(state, expected_state)
    assert torch.equal(ring, expected_ring) and torch.equal(step_counter, expected_counter)
    assert step_counter.tolist() == [2]
    assert ring[1].tolist() == [60, int(tokens[1]), -1, -2, -1, int(tokens[5]), int(tokens[5]), -7, -7]
    assert state.done.cpu().tolist() == [False, True, True, True, True, False, True]


def test_common_prefixes_of_neighbours_are_found() -> None:
    num_rows, block_size, max_blocks = 7, 4, 600
    state = RowState.empty(num_rows, max_blocks, "cpu")
    state.block_tables[:-1] = torch.arange(1, num_rows * max_blocks + 1, dtype=torch.int32).view(num_rows, max_blocks)
    for row, blocks in ((1, 300), (2, 300), (3, 2), (4, 600), (5, 600)):
        state.block_tables[row, :blocks] = state.block_tables[row - 1, :blocks]
    state.done[4] = True
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 1, num_rows])
    positions = torch.tensor([1002, 1299, 1200, 1501, 1501, 1501, 1299, 0])
    state.num_computed[rows] = positions
    ends, step_counter, depths = positions + 5, torch.tensor([0]), torch.zeros_like(rows)
    ends[5], ends[6:] = 1501, 0  # these have no position left
    found = []
    for ops, device in ((reference, "cpu"), (cuda, DEVICE)):
        tensors = [x.to(device) for x in (step_counter, rows, depths, ends)]
        step = DecodeInputs.allocate(*tensors, max_blocks=max_blocks, block_size=block_size).first(8, cascade=True)
        device_state = to_device(state, device)
        ops.prepare_decode_inputs(device_state, step, block_size)
        assert step.batch.common_prefix_lens is not None
        found.append(step.batch.common_prefix_lens.tolist())
    # The last token of a sequence is never shared, even in a full block. Row 3 shares two blocks with row 2; rows 4
    # and 5 are inactive.
    assert found[0] == found[1] == [0, 1000, 1200, 8, 0, 0, 0, 0]
