"""Who stands beside whom where sequences begin alike, and what a step then finds that they have in common."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.kernels import reference
from octavo.kernels.row_state import DecodeInputs, RowState
from octavo.runner.shared_prefixes import FIRST_DEPTH, MIN_SAVED_BYTES, MIN_SAVED_SHARE, SharedPrefixes
from tests.engine.models import make_talking_checkpoint
from tests.runner.test_cuda_model_runner import OPTIONS, completions, use_cuda_runner

BLOCK_SIZE, MAX_BLOCKS = 16, 256


def beginnings_of(tables: list[list[int]], min_saved_tokens: int = 1000) -> SharedPrefixes:
    made = SharedPrefixes(len(tables), MAX_BLOCKS, BLOCK_SIZE, 4096)
    assert made.min_saved_tokens == MIN_SAVED_BYTES // 4096
    made.min_saved_tokens = min_saved_tokens
    for row, table in enumerate(tables):
        places = np.arange(len(table)) + row * MAX_BLOCKS
        made.update(places, np.array(table))
    return made


def table(beginning: int, num_common: int, row: int, num_blocks: int = 200) -> list[int]:
    return [1000 * beginning + i for i in range(num_common)] + [10**6 * (row + 1) + i for i in range(num_blocks)]


def order_of(made: SharedPrefixes, rows: list[int], position: int = 1200) -> list[int] | None:
    order = made.order(np.array(rows), np.full(len(rows), position))
    return None if order is None else order.tolist()


ROWS = list(range(8))


def test_rows_that_begin_alike_become_neighbours() -> None:
    made = beginnings_of([table(1 + row % 2, 70, row) for row in range(9)])
    assert order_of(made, ROWS) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert order_of(made, [1, 8, 2, 3, 4, 5, 6, 7]) == [1, 2, 4, 6, 0, 3, 5, 7]


def test_those_with_more_in_common_stand_closer() -> None:
    deep = [table(1, 20, 0)[:20] + table(2 + row % 2, 60, row) for row in ROWS]
    assert order_of(beginnings_of(deep), ROWS) == [0, 2, 4, 6, 1, 3, 5, 7]


def test_it_must_be_worth_the_while() -> None:
    tables = [table(1, 70, row) for row in ROWS]  # 1,120 tokens, of which the host sees 1,024
    saved, own = 7 * 1024, 8 * 1200 - 7 * 1024
    worth = int(saved - MIN_SAVED_SHARE * own)
    assert order_of(beginnings_of(tables, worth), ROWS) is not None
    assert order_of(beginnings_of(tables, worth + 1), ROWS) is None
    assert order_of(beginnings_of(tables, 0), ROWS, position=2500) is None, "what they read for themselves takes longer"
    assert order_of(beginnings_of(tables), ROWS[1:]) is None, "few rows"
    assert order_of(beginnings_of([table(row + 1, 70, row) for row in ROWS]), ROWS) is None
    once_alike = [table(row + 1, 16, row)[:16] + table(20, 70, row)[16:] for row in ROWS]  # from the second depth on
    assert order_of(beginnings_of(once_alike), ROWS) is None


def test_what_lies_behind_a_position_is_of_somebody_before() -> None:
    made = beginnings_of([table(1, 70, row) for row in ROWS], 256)
    assert order_of(made, ROWS, position=FIRST_DEPTH) is None
    assert order_of(made, ROWS, position=FIRST_DEPTH + 1) is not None


def test_sequences_may_be_too_short_for_any_of_it() -> None:
    made = SharedPrefixes(4, FIRST_DEPTH // BLOCK_SIZE, BLOCK_SIZE, 1 << 30)
    made.update(np.arange(8), np.arange(8))
    assert order_of(made, [0] * 8) is None


class Checked(SimpleNamespace):
    """The reference's operations; what a step says to be common is looked for in its tables."""

    def __init__(self) -> None:
        super().__init__(
            **{name: x for name, x in vars(reference).items() if name not in ("prepare_decode_inputs", "__name__")}
        )
        self.most, self.num_looked = 0, 0

    def prepare_decode_inputs(self, state: RowState, step: DecodeInputs, block_size: int) -> None:
        reference.prepare_decode_inputs(state, step, block_size)
        batch = step.batch
        if batch.common_prefix_lens is not None:
            self.num_looked += 1
            for i, num_tokens in enumerate(batch.common_prefix_lens.tolist()):
                tables, lens = batch.block_tables[max(i - 1, 0) : i + 1], batch.seq_lens[max(i - 1, 0) : i + 1]
                num_blocks = num_tokens // block_size
                assert num_tokens == 0 or (i > 0 and num_tokens < lens.min())
                assert torch.equal(tables[0, :num_blocks], tables[-1, :num_blocks])
                self.most = max(self.most, num_tokens)


@pytest.mark.parametrize("fake_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("options", [{}, {"decode_window": 5}, {"max_num_batched_tokens": 90}], ids=str)
def test_the_same_tokens_where_rows_change_places(
    tmp_path: Path, options: dict[str, Any], fake_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two beginnings, whose requests come by turns, end at different times, and some of which fork."""
    monkeypatch.setattr("octavo.runner.shared_prefixes.FIRST_DEPTH", 32)
    monkeypatch.setattr("octavo.runner.shared_prefixes.MIN_ROWS", 2)
    model = str(make_talking_checkpoint(tmp_path))
    begins = [[3 + (i * i + k) % 90 for i in range(80)] for k in (0, 41)]
    prompts = [begins[i % 2] + [5 + i, 9, 3 + i] for i in range(7)]
    params = [
        SamplingParams(temperature=0.9, seed=i, n=1 + 2 * (i == 3), max_tokens=6 + 2 * i, ignore_eos=True)
        for i in range(7)
    ]
    found = []
    for cuda_runner in (False, True):
        llm = LLM(model, **(OPTIONS | options))
        if cuda_runner:
            use_cuda_runner(llm, fake_graphs=fake_graphs)
            runner = llm.engine.executor.runner  # type: ignore[attr-defined]
            runner.shared_prefixes.min_saved_tokens = -1000
            ops = runner.ops = Checked()
        with llm:
            found.append(completions(llm.generate(prompts, params, use_tqdm=False)))
    assert found[0] == found[1]
    assert ops.num_looked > 10 and ops.most == 80
