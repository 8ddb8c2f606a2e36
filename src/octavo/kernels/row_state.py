"""State of the device's rows: sampling parameters, last tokens and logits processors, from one decode step to the next.

A plan changes rows by a few scattered writes. A decode step gathers all its inputs from here on the device and commits
its sampled tokens here: the host builds no tensor between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.metadata import PER_ROW_FIELDS, RaggedBatch, SamplingTensors

MAX_STOP_IDS = 10
"""Stop ids that a row keeps on the device. The host checks all of them: a request with more only ends a step later."""
COLUMN = {name: i for i, name in enumerate(PER_ROW_FIELDS) if name != "position"}
"""Columns of `RowState.sampling_params` with the fields of `SamplingTensors`."""
FLOATS = [i for name, i in COLUMN.items() if PER_ROW_FIELDS[name] is torch.float32]
NUM_LOGPROBS = len(COLUMN)
FIRST_STOP_ID = NUM_LOGPROBS + 1
NUM_COLUMNS = FIRST_STOP_ID + MAX_STOP_IDS
NOTHING_SAMPLED, NOT_FINITE, NO_TOKEN_LEFT = -1, -2, -3
"""In the ring, in place of a token: row inactive; non-finite logits; every token masked."""
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

    block_tables     [num_rows + 1, max_blocks] int32
    last_token       [num_rows + 1] int64, the input of the next decode step
    done             [num_rows + 1] bool, the row sampled a stop token or had non-finite logits. Decode steps skip it
                     until the host sends it tokens
    sampling_params  [num_rows + 1, NUM_COLUMNS] int64: the columns of `COLUMN`, `FLOATS` of them as the bits of a
                     float64; the number of top log-probabilities to return, -1 for no log-probabilities at
                     all; stop ids, padded with -1
    """

    block_tables: Tensor
    last_token: Tensor
    done: Tensor
    sampling_params: Tensor

    @classmethod
    def empty(cls, num_rows: int, max_blocks: int, device: torch.device | str) -> RowState:
        state = cls(
            torch.zeros(num_rows + 1, max_blocks, dtype=torch.int32, device=device),
            torch.zeros(num_rows + 1, dtype=torch.int64, device=device),
            torch.zeros(num_rows + 1, dtype=torch.bool, device=device),
            torch.zeros(num_rows + 1, NUM_COLUMNS, dtype=torch.int64, device=device),
        )
        state.done[num_rows] = True
        state.sampling_params[:, NUM_LOGPROBS:] = -1
        return state

    @property
    def null_row(self) -> int:
        return self.done.shape[0] - 1

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


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a decode pass: one position of up to `len(rows)` rows.

    The host writes the first four fields once a plan. `prepare_decode_inputs` fills the others from these and from the
    row state, once a pass. All tensors keep their addresses, as CUDA graphs need.

    step_counter  [2] int64: the ring's column that this pass fills, and the passes of its plan before this one.
                  `commit_sampled_tokens` increments both, so a captured graph computes another step at each replay
    rows          [num_slices] int64, the null row for padding
    starts, ends  [num_slices] int64: pass p computes position starts + p if that is below ends

    live_rows     [num_slices] int64, the null row for inactive slices
    token_ids     [num_slices] int64
    batch         the ragged batch. An inactive slice has length 0 and points to the null block
    sampling      sampling parameters of the next tokens
    """

    step_counter: Tensor
    rows: Tensor
    starts: Tensor
    ends: Tensor
    live_rows: Tensor
    token_ids: Tensor
    batch: RaggedBatch
    sampling: SamplingTensors

    @classmethod
    def allocate(
        cls, step_counter: Tensor, rows: Tensor, starts: Tensor, ends: Tensor, *, max_blocks: int, block_size: int
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
        )
        sampling = SamplingTensors.from_lists(*([[0] * n] * len(PER_ROW_FIELDS)), device=rows.device)
        sampling = replace(sampling, all_greedy=False, any_filter=True)
        return cls(step_counter, rows, starts, ends, make(n), make(n), batch, sampling)

    def first(self, num_slices: int, *, cascade: bool = False) -> DecodeInputs:
        """The first `num_slices` slices, as views, with an empty `RaggedBatch.derived`.

        cascade: compute `RaggedBatch.common_prefix_lens`, for cascade attention
        """
        n, batch = num_slices, self.batch
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
        )
        sampling = self.sampling.first(n)
        rows, starts, ends = self.rows[:n], self.starts[:n], self.ends[:n]
        return DecodeInputs(
            self.step_counter, rows, starts, ends, self.live_rows[:n], self.token_ids[:n], part, sampling
        )
