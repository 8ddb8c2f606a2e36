"""Batch metadata of the kernels: `RaggedBatch` for attention, `SamplingTensors` for sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from octavo.integers import cdiv


def make_of_groups(num: int, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Zeros [num, *shape] for `num` window groups, each group's aligned to 16 bytes: kernels are compiled for each
    pointer alignment. None: there are no groups."""
    if not num:
        return None
    size = math.prod(shape)
    per_line = 16 // dtype.itemsize
    return torch.zeros(num, cdiv(size, per_line) * per_line, dtype=dtype, device=device)[:, :size].view(num, *shape)


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The tokens of one forward pass, flattened: whole prompts, prefill chunks and decode tokens of several sequences.

        sequence        0           1   2         3          query_len = 5, 1, 1, 4
        tokens     | a b c d e    | f | g | h i j k |
        query_start  0              5   6   7         11

    Query i of sequence s is at position `seq_lens[s] - query_len[s] + i` and sees the keys of positions 0 to its own. K
    and V are written to the KV cache before attention.

    positions      [num_tokens] int64, position of each token in its sequence
    slot_mapping   [num_tokens] int64, slot of each token in the KV cache: block_id * block_size + offset
    query_start    [num_seqs + 1] int32, exclusive prefix sum of the query lengths; the last entry is num_tokens
    seq_lens       [num_seqs] int32, context length, including the tokens of this pass
    block_tables   [num_seqs, max_blocks] int32, padded with 0, the null block
    max_query_len, max_seq_len
                   known to the host, to size launches without waiting for the device. For a captured batch, they bound
                   all replays
    derived        cache of values that kernels compute from the other fields, shared by all layers of a step, of all
                   groups: the key of a value that depends on block tables names them. The tensors of a batch must not
                   change after its first kernel: each step has its own batch
    fixed_split    attention of a sequence must give the same bits in every batch. Read by the GPU's kernels; slower
    window_tables  [num_windows, num_seqs, max_blocks] int32, the tables of window groups; see `group`. None: there are
                   none
    window_slots   [num_windows, num_tokens] int64, slot of each token in these groups
    state_tables   [num_seqs, state_blocks] int32, blocks that each sequence's recurrent state is written to, see
                   `reference.recurrent`. None: the model has none
    state_reads    likewise, blocks that it is read from. No other sequence writes them
    common_prefix_lens
                   [num_seqs] int32, tokens that a sequence shares with the one before it: whole leading blocks, equal
                   in both block tables, without the last token of either; 0 for the first sequence. The GPU's kernels
                   may read these blocks once for both. None: unknown
    lines_per_row  if several: each so many sequences, from the first on, are lines of one row of the engine. A line is
                   one query. The i-th has a context i longer than the first, or length 0; the output of a line of
                   length 0 before others is of any value. Block tables of a row agree as far as they are filled. The
                   GPU's kernels may read a row's keys once for several lines
    """

    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    fixed_split: bool = False
    common_prefix_lens: Tensor | None = None
    lines_per_row: int = 1
    window_tables: Tensor | None = None
    window_slots: Tensor | None = None
    state_tables: Tensor | None = None
    state_reads: Tensor | None = None

    def group(self, group: int) -> RaggedBatch:
        """The batch as the layers of a group see it: 0 is the full group, this batch; then come the window groups."""
        if not group or self.window_tables is None or self.window_slots is None:
            return self
        slots, tables = self.window_slots[group - 1], self.window_tables[group - 1]
        alone = replace(self, common_prefix_lens=None, window_tables=None, window_slots=None)
        return replace(alone, slot_mapping=slots, block_tables=tables)

    @property
    def num_groups(self) -> int:
        return 1 if self.window_tables is None else 1 + len(self.window_tables)

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @classmethod
    def from_lists(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        *,
        device: torch.device | str = "cpu",
    ) -> RaggedBatch:
        """A batch that computes the last `query_lens[s]` of the `seq_lens[s]` tokens of each sequence."""
        positions: list[int] = []
        slots: list[int] = []
        for query_len, seq_len, block_ids in zip(query_lens, seq_lens, block_tables, strict=True):
            assert 0 <= query_len <= seq_len <= len(block_ids) * block_size, (query_len, seq_len, block_ids)
            for p in range(seq_len - query_len, seq_len):
                positions.append(p)
                slots.append(block_ids[p // block_size] * block_size + p % block_size)
        width = max((len(block_ids) for block_ids in block_tables), default=0)
        padded = [[*block_ids, *[0] * (width - len(block_ids))] for block_ids in block_tables]
        return cls(
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            query_start=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device),
            seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
            block_tables=torch.tensor(padded, dtype=torch.int32, device=device).reshape(len(padded), width),
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
        )


@dataclass(slots=True)
class SamplingTensors:
    """Sampling parameters of each row of logits: the part of `SamplingParams` that the device needs.

    temperature    [num_rows] float32, 0: greedy
    top_k          [num_rows] int32, 0: all
    top_p          [num_rows] float32, 1: all
    min_p          [num_rows] float32, 0: all
    seed           [num_rows] int64
    sample_index   [num_rows] int64, index of the row among the samples of its request
    position       [num_rows] int64, position of the token to be sampled
    all_greedy     every temperature is 0                  } known to the host, to choose
    any_filter     some row has top_k, top_p or min_p      } kernels without a device read
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    sample_index: Tensor
    position: Tensor
    all_greedy: bool
    any_filter: bool

    def is_filtered(self) -> Tensor:
        """Rows with a temperature and a filter -> [num_rows] bool."""
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    def select(self, row_ids: Tensor) -> SamplingTensors:
        """The rows `row_ids`, int64. all_greedy and any_filter are kept: they are bounds."""
        return replace(self, **{name: getattr(self, name)[row_ids] for name in PER_ROW_FIELDS})

    def first(self, num_rows: int) -> SamplingTensors:
        """The first rows, as views."""
        return replace(self, **{name: getattr(self, name)[:num_rows] for name in PER_ROW_FIELDS})

    @classmethod
    def from_lists(
        cls,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        seed: Sequence[int],
        sample_index: Sequence[int],
        position: Sequence[int],
        *,
        device: torch.device | str = "cpu",
    ) -> SamplingTensors:
        lists = temperature, top_k, top_p, min_p, seed, sample_index, position
        tensors = {
            name: torch.tensor(values, dtype=dtype, device=device)
            for (name, dtype), values in zip(PER_ROW_FIELDS.items(), lists, strict=True)
        }
        params = cls(**tensors, all_greedy=not any(t > 0 for t in temperature), any_filter=True)
        params.any_filter = bool(params.is_filtered().any())
        return params


PER_ROW_FIELDS = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
    "sample_index": torch.int64,
    "position": torch.int64,
}
"""Fields of `SamplingTensors` with a value for each row, in their order, and their dtypes."""
