"""State of the device's rows: sampling parameters, last tokens and logits processors, from one decode step to the next.

A plan changes rows by a few scattered writes. A decode step gathers all its inputs from here on the device and commits
its sampled tokens here: the host builds no tensor between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.metadata import PER_ROW_FIELDS, RaggedBatch, SamplingTensors, make_of_groups

MAX_STOP_IDS = 10
"""Stop ids that a row keeps on the device. The host checks all of them: a request with more only ends a step later."""
COLUMN = {name: i for i, name in enumerate(PER_ROW_FIELDS) if name != "position"}
"""Columns of `RowState.sampling_params` with the fields of `SamplingTensors`."""
FLOATS = [i for name, i in COLUMN.items() if PER_ROW_FIELDS[name] is torch.float32]
NUM_LOGPROBS = len(COLUMN)
FIRST_STOP_ID = NUM_LOGPROBS + 1
NUM_COLUMNS = FIRST_STOP_ID + MAX_STOP_IDS
NOTHING_SAMPLED, NOT_FINITE, NO_TOKEN_LEFT, REJECTED = -1, -2, -3, -4
"""In the ring, in place of a token: row inactive; non-finite logits; every token masked; a wrong draft before it."""
MAX_DRAFTS = 15
"""Drafts that a row keeps: with its last token, they are the 16 lines that cost a CPU least."""
MAX_MATCH = 16
"""Last tokens of a sequence that drafts look for in what is before them."""
PENALTIES, LOGIT_BIAS, ALLOWED_TOKENS, MIN_TOKENS, HISTORY = 1, 2, 4, 8, 16
"""Bits of `LogitsProcessorState.enabled`. HISTORY: the row only keeps its history, for bad words."""
MAX_LOGPROBS = 20
"""Top log-probabilities that a row returns on the device: OpenAI's limit. The host samples requests with more."""
MAX_BIAS = 300
"""Logit biases that a row keeps on the device. The host samples requests with more."""
IN_PROMPT = 1 << 30
"""Bit of `LogitsProcessorState.counts`: the token is in the prompt."""


@dataclass(frozen=True, slots=True)
class RowState:
    """One line a row, and one more for the null row, the target of padding, which is always done.

    block_tables     [num_rows + 1, num_lines * max_blocks] int32, a table for each group of layers. If there are
                     recurrent states, then one of the blocks that the row's passes write, and one of those that its
                     next pass reads. A pass sets the latter to the former, for the rows that it computes
    last_token       [num_rows + 1] int64, the input of the next decode step
    num_computed     [num_rows + 1] int64, the position of that token: all before it are computed
    drafts           [num_rows + 1, MAX_DRAFTS] int64, guesses of the tokens after it, padded with -1
    history          [num_rows + 1, max_len] int32, tokens by position, for drafts; max_len is 0 without speculation
    done             [num_rows + 1] bool, the row sampled a stop token or had non-finite logits. Decode steps skip it
                     until the host sends it tokens
    sampling_params  [num_rows + 1, NUM_COLUMNS] int64: the columns of `COLUMN`, `FLOATS` of them as the bits of a
                     float64; the number of top log-probabilities to return, -1 for no log-probabilities at
                     all; stop ids, padded with -1
    """

    block_tables: Tensor
    last_token: Tensor
    num_computed: Tensor
    drafts: Tensor
    history: Tensor
    done: Tensor
    sampling_params: Tensor
    num_groups: int = 1
    state_blocks: int = 0

    @classmethod
    def empty(
        cls,
        num_rows: int,
        max_blocks: int,
        device: torch.device | str,
        *,
        max_len: int = 0,
        num_groups: int = 1,
        state_blocks: int = 0,
    ) -> RowState:
        """state_blocks: of a sequence's recurrent state; 0: there is none"""

        def make(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_rows + 1, *shape, dtype=dtype, device=device)

        state = cls(
            block_tables=make((num_groups + 2 * (state_blocks > 0)) * max(max_blocks, state_blocks), dtype=torch.int32),
            last_token=make(),
            num_computed=make(),
            drafts=make(MAX_DRAFTS) - 1,
            history=make(max_len, dtype=torch.int32),
            done=make(dtype=torch.bool),
            sampling_params=make(NUM_COLUMNS),
            num_groups=num_groups,
            state_blocks=state_blocks,
        )
        state.done[num_rows] = True
        state.sampling_params[:, NUM_LOGPROBS:] = -1
        return state

    @property
    def null_row(self) -> int:
        return self.done.shape[0] - 1

    @property
    def num_lines(self) -> int:
        """Tables of a row: of its groups, and two of its recurrent state."""
        return self.num_groups + 2 * (self.state_blocks > 0)

    @property
    def max_blocks(self) -> int:
        """Width of a table."""
        return self.block_tables.shape[1] // self.num_lines

    def tables_of(self, group: int) -> Tensor:
        """The block tables of a group, [num_rows + 1, max_blocks]."""
        return self.block_tables[:, group * self.max_blocks : (group + 1) * self.max_blocks]

    @property
    def state_tables(self) -> Tensor:
        """The blocks that recurrent states are written to, [num_rows + 1, state_blocks]."""
        return self.tables_of(self.num_groups)[:, : self.state_blocks]

    @property
    def state_reads(self) -> Tensor:
        """The blocks that the next pass reads them from, [num_rows + 1, state_blocks]."""
        return self.tables_of(self.num_groups + 1)[:, : self.state_blocks]

    def sampling(self, rows: Tensor, sample_indices: Tensor, positions: Tensor) -> SamplingTensors:
        """Sampling parameters of the next tokens of rows [num_samples] int64. A sample index of -1 is the row's own."""
        params = self.sampling_params[rows]  # [num_samples, NUM_COLUMNS]
        floats = params.view(torch.float64)
        columns = {
            name: (floats if i in FLOATS else params)[:, i].to(PER_ROW_FIELDS[name]).contiguous()
            for name, i in COLUMN.items()
        }
        columns["sample_index"] = torch.where(sample_indices < 0, columns["sample_index"], sample_indices)
        return SamplingTensors(**columns, position=positions, all_greedy=False, any_filter=True)


@dataclass(frozen=True, slots=True)
class LogitsProcessorState:
    """Logits processors of the rows, and counts of their tokens: one line a row, and one for the null row.

    Allocated when the first row uses a logits processor: most of it is as wide as the vocabulary.

    enabled      [num_rows + 1] int32, bits PENALTIES, LOGIT_BIAS, ALLOWED_TOKENS, MIN_TOKENS, HISTORY; 0 for most rows
    num_prompt   [num_rows + 1] int32
    min_length   [num_rows + 1] int32, the first position at which a stop token may be sampled
    penalties    [num_rows + 1, 3] float32: repetition, presence, frequency
    bias_ids     [num_rows + 1, MAX_BIAS] int32, padded with -1
    bias_values  [num_rows + 1, MAX_BIAS] float32
    allowed_bitmask
                 [num_rows + 1, ceil(vocab_size / 32)] int32, as for `reference.apply_token_bitmask`
    num_counted  [num_rows + 1] int32, positions whose tokens are in `counts`
    counts       [num_rows + 1, vocab_size] int32, for rows with penalties: occurrences of each token in the output, and
                 the bit IN_PROMPT where it occurs in the prompt
    history      [num_rows + 1, max_len] int32, tokens by position, for sampling on the host
    """

    enabled: Tensor
    num_prompt: Tensor
    min_length: Tensor
    penalties: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    allowed_bitmask: Tensor
    num_counted: Tensor
    counts: Tensor
    history: Tensor

    @classmethod
    def empty(
        cls, num_rows: int, vocab_size: int, history: Tensor, make_zeros: Callable[..., Tensor] | None = None
    ) -> LogitsProcessorState:
        """make_zeros: makes zeros of a shape and a dtype on history's device; default: torch.zeros"""

        def make(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            size = (num_rows + 1, *shape)
            return (
                torch.zeros(size, dtype=dtype, device=history.device) if make_zeros is None else make_zeros(size, dtype)
            )

        return cls(
            enabled=make(),
            num_prompt=make(),
            min_length=make(),
            penalties=make(3, dtype=torch.float32),
            bias_ids=make(MAX_BIAS),
            bias_values=make(MAX_BIAS, dtype=torch.float32),
            allowed_bitmask=make(cdiv(vocab_size, 32)),
            num_counted=make(),
            counts=make(vocab_size),
            history=history,
        )


class DraftLines(NamedTuple):
    """Which lines of a decode pass compute drafts: `DecodeInputs.depths` and `token_ids`, both [num_lines] int64."""

    depths: Tensor
    token_ids: Tensor


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a decode pass: up to `len(rows)` lines, each of them one position of a row.

    A row has a line for its last token, and one for each of its drafts. They are neighbours, in this order. All write
    their K and V before any of them reads, so each sees the drafts before it, as if these were the row's tokens.

    The host writes the first four fields. `prepare_decode_inputs` fills the others from these and from the row state,
    once a pass. All tensors keep their addresses, as CUDA graphs need.

    step_counter  [1] int64, the ring's column that this pass fills. `commit_sampled_tokens` increments it, so a
                  captured graph fills another column at each replay
    rows          [num_lines] int64, the null row for padding
    depths        [num_lines] int64: 0 for the row's last token, d for its d-th draft
    ends          [num_lines] int64: a line at this position of its row, or a later one, is inactive

    live_rows     [num_lines] int64, the null row for inactive lines
    token_ids     [num_lines] int64
    batch         the ragged batch. An inactive line has length 0 and points to the null block
    sampling      sampling parameters of the next tokens
    """

    step_counter: Tensor
    rows: Tensor
    depths: Tensor
    ends: Tensor
    live_rows: Tensor
    token_ids: Tensor
    batch: RaggedBatch
    sampling: SamplingTensors

    @classmethod
    def allocate(
        cls,
        step_counter: Tensor,
        rows: Tensor,
        depths: Tensor,
        ends: Tensor,
        *,
        max_blocks: int,
        block_size: int,
        num_windows: int = 0,
        state_blocks: int = 0,
    ) -> DecodeInputs:
        """Inputs with new buffers for the fields that the device fills."""

        def make(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=rows.device)

        n = len(rows)
        batch = RaggedBatch(
            positions=make(n),
            slot_mapping=make(n),
            query_start=torch.arange(n + 1, dtype=torch.int32, device=rows.device),
            seq_lens=make(n, dtype=torch.int32),
            block_tables=make(n, max_blocks, dtype=torch.int32),
            max_query_len=1,
            max_seq_len=max_blocks * block_size,
            common_prefix_lens=make(n, dtype=torch.int32),
            window_tables=make_of_groups(num_windows, n, max_blocks, dtype=torch.int32, device=rows.device),
            window_slots=make_of_groups(num_windows, n, dtype=torch.int64, device=rows.device),
            state_tables=make(n, state_blocks, dtype=torch.int32) if state_blocks else None,
            state_reads=make(n, state_blocks, dtype=torch.int32) if state_blocks else None,
        )
        sampling = SamplingTensors.from_lists(*([[0] * n] * len(PER_ROW_FIELDS)), device=rows.device)
        sampling = replace(sampling, all_greedy=False, any_filter=True)
        return cls(step_counter, rows, depths, ends, make(n), make(n), batch, sampling)

    def first(self, num_lines: int, *, cascade: bool = False, lines_per_row: int = 1) -> DecodeInputs:
        """The first `num_lines` lines, as views, with an empty `RaggedBatch.derived`.

        cascade: compute `RaggedBatch.common_prefix_lens`, for cascade attention; lines_per_row: of that batch
        """
        n, batch = num_lines, self.batch
        part = RaggedBatch(
            batch.positions[:n],
            batch.slot_mapping[:n],
            batch.query_start[: n + 1],
            batch.seq_lens[:n],
            batch.block_tables[:n],
            batch.max_query_len,
            batch.max_seq_len,
            common_prefix_lens=batch.common_prefix_lens[:n]
            if cascade and batch.common_prefix_lens is not None
            else None,
            window_tables=None if batch.window_tables is None else batch.window_tables[:, :n],
            window_slots=None if batch.window_slots is None else batch.window_slots[:, :n],
            state_tables=None if batch.state_tables is None else batch.state_tables[:n],
            state_reads=None if batch.state_reads is None else batch.state_reads[:n],
            lines_per_row=lines_per_row,
        )
        sampling = self.sampling.first(n)
        rows, depths, ends = self.rows[:n], self.depths[:n], self.ends[:n]
        return DecodeInputs(
            self.step_counter, rows, depths, ends, self.live_rows[:n], self.token_ids[:n], part, sampling
        )
