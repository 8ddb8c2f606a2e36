"""Row state and ragged batches from plans, compared with plain loops."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.core.plan import RowSetup, StepPlan, TableWrite
from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch
from octavo.params.sampling_params import SamplingParams
from octavo.runner.input_batch import InputBatch, make_batch


def setup(row: int, seed: int) -> RowSetup:
    return RowSetup(row, SamplingParams(), seed, 0, frozenset())


def test_table_writes_append_and_a_new_owner_replaces_the_table() -> None:
    input_batch = InputBatch(num_rows=3, max_blocks=6)
    plan = StepPlan()
    plan.row_setups = [setup(1, 7)]
    plan.table_writes = [TableWrite(1, 0, (5, 3)), TableWrite(1, 2, (9,)), TableWrite(0, 0, (4,))]
    input_batch.apply(plan)
    assert input_batch.block_tables.tolist() == [[4, 0, 0, 0, 0, 0], [5, 3, 9, 0, 0, 0], [0] * 6]
    owner = input_batch.setup[1]
    assert owner is not None and owner.seed == 7 and input_batch.setup[0] is None
    again = StepPlan()
    again.row_setups = [setup(1, 8)]
    again.table_writes = [TableWrite(1, 0, (2,)), TableWrite(1, 1, (6,)), TableWrite(1, 1, (1,))]  # applied in order
    input_batch.apply(again)
    assert input_batch.block_tables[1, :2].tolist() == [2, 1]
    owner = input_batch.setup[1]
    assert owner is not None and owner.seed == 8


@pytest.mark.parametrize("seed", range(40))
def test_positions_and_slots_of_a_batch(seed: int) -> None:
    rng = random.Random(seed)
    size, num_rows = rng.choice([1, 2, 8, 16]), rng.randint(1, 9)
    max_blocks = rng.randint(1, 12)
    ids = rng.sample(range(1, 500), num_rows * max_blocks)
    input_batch = InputBatch(num_rows, max_blocks)
    tables = [[ids.pop() for _ in range(max_blocks)] for _ in range(num_rows)]
    plan = StepPlan()
    plan.table_writes = [TableWrite(r, 0, tuple(t)) for r, t in enumerate(tables)]
    input_batch.apply(plan)
    chosen = rng.sample(range(num_rows), rng.randint(1, num_rows))
    starts, counts = [], []
    for _ in chosen:
        end = rng.randint(1, size * max_blocks)
        counts.append(1 if rng.random() < 0.5 else rng.randint(1, end))
        starts.append(end - counts[-1])
    batch = make_batch(chosen, starts, counts, input_batch.block_tables, size)

    positions = [p for a, n in zip(starts, counts, strict=True) for p in range(a, a + n)]
    slots = [
        tables[row][p // size] * size + p % size
        for row, a, n in zip(chosen, starts, counts, strict=True)
        for p in range(a, a + n)
    ]
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    ends = [a + n for a, n in zip(starts, counts, strict=True)]
    expected = RaggedBatch.from_lists(
        counts, ends, [tables[row][: cdiv(end, size)] for row, end in zip(chosen, ends, strict=True)], size
    )
    assert batch.query_start.tolist() == expected.query_start.tolist()
    assert batch.seq_lens.tolist() == ends
    assert (batch.max_query_len, batch.max_seq_len) == (max(counts), max(ends))
    for name in ("positions", "slot_mapping", "query_start", "seq_lens", "block_tables"):
        assert getattr(batch, name).dtype == getattr(expected, name).dtype, name
    assert batch.block_tables.shape == expected.block_tables.shape
    for s, end in enumerate(ends):  # after a sequence's blocks a table may hold anything
        num = cdiv(end, size)
        assert batch.block_tables[s, :num].tolist() == tables[chosen[s]][:num]


def test_a_batch_is_unchanged_by_the_next_plan() -> None:
    """Its block tables are a copy: a running step does not see new owners of its rows."""
    input_batch = InputBatch(2, 4)
    plan = StepPlan()
    plan.table_writes = [TableWrite(0, 0, (3, 4))]
    input_batch.apply(plan)
    batch = make_batch([0], [0], [3], input_batch.block_tables, 2)
    plan.table_writes = [TableWrite(0, 0, (7, 8))]
    input_batch.apply(plan)
    assert batch.block_tables.tolist() == [[3, 4]]
    assert torch.equal(batch.slot_mapping, torch.tensor([6, 7, 8]))
