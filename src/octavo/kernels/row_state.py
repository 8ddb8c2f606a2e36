"""What a device knows of its rows, so that it can decode by itself: `RowState`, and `DecodeStep`, a step's view of it.

A plan changes rows by a few scattered writes. Everything that a decode step needs is gathered from here on the device,
and what it samples goes back here: no tensor is built on the host between two steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch, SamplingTensors

MAX_STOP_IDS = 10
"""Stop ids that a row keeps on the device. The host has the last word, so more of them only end later there."""
TEMPERATURE, TOP_P, MIN_P, TOP_K, SEED, SAMPLE_INDEX, NUM_LOGPROBS, FIRST_STOP_ID = range(8)
NUM_COLUMNS = FIRST_STOP_ID + MAX_STOP_IDS
NOTHING_SAMPLED, NOT_FINITE, NO_TOKEN_LEFT = -1, -2, -3
"""In the ring, in a token's place: the row was done, or had nothing to do; its logits were no numbers; all tokens were
ruled out."""
PENALIZED, BIASED, LIMITED, PATIENT = 1, 2, 4, 8
"""What a row asks of its logits, see `RuleState`."""
MAX_LOGPROBS = 20
"""Of the likeliest tokens that a row tells of beside its own: as many as OpenAI's API has. A request that wants more is
the host's."""
MAX_BIAS = 300
"""Tokens with a bias that a row keeps on the device. A request with more of them is the host's."""
IN_PROMPT = 1 << 30


@dataclass(frozen=True, slots=True)
class RowState:
    """One line a row, and one more, the null row, which is done for ever: the target of padding.

    block_tables  [num_rows + 1, max_blocks] int32
    last_token    [num_rows + 1] int64, what a decode step goes on from
    done          [num_rows + 1] bool, the row met a stop token or numbers that are not finite: nothing more is computed
                  on it until the host gives it tokens
    setup         [num_rows + 1, NUM_COLUMNS] int64, how tokens are sampled there: temperature, top_p and min_p as the
                  bits of a float64, top_k, seed, sample_index; of how many of the likeliest tokens the host is told
                  beside the one that is drawn, -1: of no log-probabilities; then stop ids, -1 where there are fewer
    """

    block_tables: Tensor
    last_token: Tensor
    done: Tensor
    setup: Tensor

    @classmethod
    def empty(cls, num_rows: int, max_blocks: int, device: torch.device | str) -> RowState:
        state = cls(
            torch.zeros(num_rows + 1, max_blocks, dtype=torch.int32, device=device),
            torch.zeros(num_rows + 1, dtype=torch.int64, device=device),
            torch.zeros(num_rows + 1, dtype=torch.bool, device=device),
            torch.zeros(num_rows + 1, NUM_COLUMNS, dtype=torch.int64, device=device),
        )
        state.done[num_rows] = True
        state.setup[:, NUM_LOGPROBS:] = -1
        return state

    @property
    def null_row(self) -> int:
        return self.done.shape[0] - 1

    def sampling(self, rows: Tensor, sample_indices: Tensor, positions: Tensor) -> SamplingTensors:
        """How the next tokens of rows [num_draws] int64 are sampled; a sample index of -1 is the row's own."""
        setup = self.setup[rows]  # [num_draws, NUM_COLUMNS]
        floats = setup.view(torch.float64)
        return SamplingTensors(
            temperature=floats[:, TEMPERATURE].float(),
            top_k=setup[:, TOP_K].int(),
            top_p=floats[:, TOP_P].float(),
            min_p=floats[:, MIN_P].float(),
            seed=setup[:, SEED].contiguous(),
            sample_index=torch.where(sample_indices < 0, setup[:, SAMPLE_INDEX], sample_indices),
            position=positions,
            all_greedy=False,
            any_filter=True,
        )


@dataclass(frozen=True, slots=True)
class RuleState:
    """What rows ask of their logits, and which tokens they have had. A line a row, and one for the null row, which asks
    for nothing. Made when the first row asks for something: most of it is as wide as the vocabulary.

    asks        [num_rows + 1] int32: PENALIZED, BIASED, LIMITED (allowed_token_ids), PATIENT (min_tokens); 0 for most
    num_prompt  [num_rows + 1] int32
    min_length  [num_rows + 1] int32, the first position of a token that may end the output
    penalties   [num_rows + 1, 3] float32: repetition, presence, frequency
    bias_ids    [num_rows + 1, MAX_BIAS] int32, -1 where there are fewer
    bias        [num_rows + 1, MAX_BIAS] float32
    allowed     [num_rows + 1, ceil(vocab_size / 32)] int32, bits as in `reference.mask_tokens`
    counted     [num_rows + 1] int32, positions whose tokens are in `counts`
    counts      [num_rows + 1, vocab_size] int32, of penalized rows: how often a token came in the output, and the bit
                IN_PROMPT if it came in the prompt
    history     [num_rows + 1, max_len] int32, tokens by position, for whoever samples on the host
    """

    asks: Tensor
    num_prompt: Tensor
    min_length: Tensor
    penalties: Tensor
    bias_ids: Tensor
    bias: Tensor
    allowed: Tensor
    counted: Tensor
    counts: Tensor
    history: Tensor

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, history: Tensor) -> RuleState:
        def make(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(num_rows + 1, *shape, dtype=dtype, device=history.device)

        return cls(
            asks=make(),
            num_prompt=make(),
            min_length=make(),
            penalties=make(3, dtype=torch.float32),
            bias_ids=make(MAX_BIAS),
            bias=make(MAX_BIAS, dtype=torch.float32),
            allowed=make(cdiv(vocab_size, 32)),
            counted=make(),
            counts=make(vocab_size),
            history=history,
        )


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One position of up to `len(rows)` rows. The host writes the first part once a plan; `prepare_decode_inputs` makes
    the second from it and from the rows, once a pass. All tensors stay where they are: graphs know their addresses.

    step_counter  [2] int64: the ring's column that this pass fills, and how many passes of its plan were before it.
                  `commit_sampled_tokens` advances both, so that one captured graph is another step at each replay
    rows          [num_slices] int64, the null row for padding
    starts, ends  [num_slices] int64: pass p computes position starts + p, unless that is ends or beyond

    live_rows     [num_slices] int64, the null row where there is nothing to do
    token_ids     [num_slices] int64
    batch         the ragged batch; a slice with nothing to do has length 0 and aims at the null block
    sampling      of the token after it
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
    def over(
        cls, step_counter: Tensor, rows: Tensor, starts: Tensor, ends: Tensor, *, max_blocks: int, block_size: int
    ) -> DecodeStep:
        """A step with buffers of its own for what the device makes."""

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
            common_lens=make(n, dtype=torch.int32),
        )
        sampling = SamplingTensors.from_lists(*([[0] * n] * 7), device=rows.device)
        sampling = replace(sampling, all_greedy=False, any_filter=True)
        return cls(step_counter, rows, starts, ends, make(n), make(n), batch, sampling)

    def first(self, num_slices: int, *, cascade: bool = False) -> DecodeStep:
        """The same step, cut to fewer slices: a view, but for what kernels derive from a batch.

        cascade: find out what neighbours have in common, for attention to read that once
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
            common_lens=batch.common_lens[:n] if cascade and batch.common_lens is not None else None,
        )
        sampling = self.sampling.first(n)
        rows, starts, ends = self.rows[:n], self.starts[:n], self.ends[:n]
        return DecodeStep(self.step_counter, rows, starts, ends, self.live_rows[:n], self.token_ids[:n], part, sampling)
