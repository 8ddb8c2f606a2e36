"""The order of rows with shared prefixes, and the shared prefixes that a decode step then finds."""

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
from tests.runner.stub_platform import use_stub_platform
from tests.runner.test_stub_platform import OPTIONS, completions

BLOCK_SIZE, MAX_BLOCKS = 16, 256


def make_prefixes(tables: list[list[int]], min_saved_tokens: int = 1000) -> SharedPrefixes:
    prefixes = SharedPrefixes(len(tables), MAX_BLOCKS, BLOCK_SIZE, 4096)
    assert prefixes.min_saved_tokens == MIN_SAVED_BYTES // 4096
    prefixes.min_saved_tokens = min_saved_tokens
    for row, table in enumerate(tables):
        indices = np.arange(len(table)) + row * MAX_BLOCKS
        prefixes.update(indices, np.array(table))
    return prefixes


def table(prefix: int, num_common: int, row: int, num_blocks: int = 200) -> list[int]:
    return [1000 * prefix + i for i in range(num_common)] + [10**6 * (row + 1) + i for i in range(num_blocks)]


def order_of(prefixes: SharedPrefixes, rows: list[int], position: int = 1200) -> list[int] | None:
    order = prefixes.order(np.array(rows), np.full(len(rows), position))
    return None if order is None else order.tolist()


ROWS = list(range(8))


def test_rows_with_a_shared_prefix_become_neighbours() -> None:
    prefixes = make_prefixes([table(1 + row % 2, 70, row) for row in range(9)])
    assert order_of(prefixes, ROWS) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert order_of(prefixes, [1, 8, 2, 3, 4, 5, 6, 7]) == [1, 2, 4, 6, 0, 3, 5, 7]


def test_rows_with_longer_shared_prefixes_are_grouped_within_shorter_ones() -> None:
    deep = [table(1, 20, 0)[:20] + table(2 + row % 2, 60, row) for row in ROWS]
    assert order_of(make_prefixes(deep), ROWS) == [0, 2, 4, 6, 1, 3, 5, 7]


def test_rows_are_ordered_only_if_cascade_attention_pays_off() -> None:
    tables = [table(1, 70, row) for row in ROWS]  # 1,120 shared tokens, of which the host finds 1,024
    num_saved, num_read = 7 * 1024, 8 * 1200 - 7 * 1024
    limit = int(num_saved - MIN_SAVED_SHARE * num_read)
    assert order_of(make_prefixes(tables, limit), ROWS) is not None
    assert order_of(make_prefixes(tables, limit + 1), ROWS) is None
    assert order_of(make_prefixes(tables, 0), ROWS, position=2500) is None, "unshared tokens take longer"
    assert order_of(make_prefixes(tables), ROWS[1:]) is None, "few rows"
    assert order_of(make_prefixes([table(row + 1, 70, row) for row in ROWS]), ROWS) is None
    # Equal only from the second depth on.
    same_tail = [table(row + 1, 16, row)[:16] + table(20, 70, row)[16:] for row in ROWS]
    assert order_of(make_prefixes(same_tail), ROWS) is None


def test_blocks_after_a_position_do_not_count() -> None:
    prefixes = make_prefixes([table(1, 70, row) for row in ROWS], 256)
    assert order_of(prefixes, ROWS, position=FIRST_DEPTH) is None
    assert order_of(prefixes, ROWS, position=FIRST_DEPTH + 1) is not None


def test_short_sequences_have_no_shared_prefixes() -> None:
    prefixes = SharedPrefixes(4, FIRST_DEPTH // BLOCK_SIZE, BLOCK_SIZE, 1 << 30)
    prefixes.update(np.arange(8), np.arange(8))
    assert order_of(prefixes, [0] * 8) is None


class CheckedOps(SimpleNamespace):
    """The reference's operations. Shared prefix lengths of each step are checked against its block tables."""

    def __init__(self) -> None:
        super().__init__(
            **{name: x for name, x in vars(reference).items() if name not in ("prepare_decode_inputs", "__name__")}
        )
        self.max_common, self.num_steps = 0, 0

    def prepare_decode_inputs(self, state: RowState, step: DecodeInputs, block_size: int) -> None:
        reference.prepare_decode_inputs(state, step, block_size)
        batch = step.batch
        if batch.common_prefix_lens is not None:
            self.num_steps += 1
            for i, num_tokens in enumerate(batch.common_prefix_lens.tolist()):
                tables, lens = batch.block_tables[max(i - 1, 0) : i + 1], batch.seq_lens[max(i - 1, 0) : i + 1]
                num_blocks = num_tokens // block_size
                assert num_tokens == 0 or (i > 0 and num_tokens < lens.min())
                assert torch.equal(tables[0, :num_blocks], tables[-1, :num_blocks])
                self.max_common = max(self.max_common, num_tokens)


@pytest.mark.parametrize("fake_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("options", [{}, {"decode_window": 5}, {"max_num_batched_tokens": 90}], ids=str)
def test_reordered_rows_get_the_same_tokens(
    tmp_path: Path, options: dict[str, Any], fake_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with two prefixes by turns; they end at different times, and some fork."""
    monkeypatch.setattr("octavo.runner.shared_prefixes.FIRST_DEPTH", 32)
    monkeypatch.setattr("octavo.runner.shared_prefixes.MIN_ROWS", 2)
    model = str(make_talking_checkpoint(tmp_path))
    prefixes = [[3 + (i * i + k) % 90 for i in range(80)] for k in (0, 41)]
    prompts = [prefixes[i % 2] + [5 + i, 9, 3 + i] for i in range(7)]
    params = [
        SamplingParams(temperature=0.9, seed=i, n=1 + 2 * (i == 3), max_tokens=6 + 2 * i, ignore_eos=True)
        for i in range(7)
    ]
    found = []
    for stub_platform in (False, True):
        llm = LLM(model, **(OPTIONS | options))
        if stub_platform:
            use_stub_platform(llm, fake_graphs=fake_graphs)
            runner = llm.engine.executor.runner  # type: ignore[attr-defined]
            runner.state.shared_prefixes.min_saved_tokens = -1000
            ops = runner.platform.ops = CheckedOps()
        with llm:
            found.append(completions(llm.generate(prompts, params, use_tqdm=False)))
    assert found[0] == found[1]
    assert ops.num_steps > 10 and ops.max_common == 80
