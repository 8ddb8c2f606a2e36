"""From a plan to flat tensors: the state of the rows, and the ragged batch of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from octavo.core.plan import RowSetup, StepPlan
from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch


class InputBatch:
    """State of all rows between steps. Only plans and sampled tokens change it.

    block_tables   [num_rows, max_blocks] int32
    last_token     the row's last token: the input of a slice without host tokens
    done           the row sampled a stop token: slices without host tokens are skipped
    setup          the sequence that owns the row, and its sampling parameters
    """

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.block_tables = torch.zeros(num_rows, max_blocks, dtype=torch.int32)
        self.last_token = [0] * num_rows
        self.done = [False] * num_rows
        self.setup: list[RowSetup | None] = [None] * num_rows

    def apply(self, plan: StepPlan) -> None:
        for setup in plan.row_setups:
            self.setup[setup.row] = setup
        for row, start, block_ids in plan.table_writes:
            self.block_tables[row, start : start + len(block_ids)] = torch.tensor(block_ids, dtype=torch.int32)


def make_batch(
    rows: Seq[int], starts: Seq[int], counts: Seq[int], block_tables: Tensor, block_size: int
) -> RaggedBatch:
    """The batch in which the sequence of `rows[i]` computes positions [starts[i], starts[i] + counts[i]).

    Slots come from the block tables: position p of a row lies in block `table[p // block_size]`.
    """
    start, count = torch.tensor(starts), torch.tensor(counts)  # [num_seqs] int64
    query_end = count.cumsum(0)
    seq_lens = start + count
    sequence = torch.repeat_interleave(torch.arange(len(rows)), count)  # [num_tokens], the sequence of each token
    positions = torch.arange(int(query_end[-1])) + (start - query_end + count)[sequence]  # [num_tokens]
    max_seq_len = int(seq_lens.max())
    tables = block_tables[torch.tensor(rows), : cdiv(max_seq_len, block_size)]  # [num_seqs, max_blocks]
    blocks = tables[sequence, positions // block_size].long()  # [num_tokens]
    return RaggedBatch(
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        query_start=torch.cat((torch.zeros(1, dtype=torch.int64), query_end)).int(),
        seq_lens=seq_lens.int(),
        block_tables=tables,
        max_query_len=int(count.max()),
        max_seq_len=max_seq_len,
    )
