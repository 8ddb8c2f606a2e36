"""Logits processors of rows, in Triton: penalties, logit bias, allowed tokens, min_tokens; and the penalties' counts.

See `row_state.LogitsProcessorState`. A row without processors costs one load of its flags.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.row_state import (
    ALLOWED_TOKENS,
    FIRST_STOP_ID,
    IN_PROMPT,
    LOGIT_BIAS,
    MAX_BIAS,
    MAX_STOP_IDS,
    MIN_TOKENS,
    NUM_COLUMNS,
    PENALTIES,
    DraftLines,
    LogitsProcessorState,
    RowState,
)

TILE = 1024


def init_token_counts(
    processors: LogitsProcessorState, rows: Tensor, starts: Tensor, begins: Tensor, token_ids: Tensor
) -> None:
    """`reference.init_token_counts`."""
    if len(rows):
        _init_token_counts[(len(rows),)](
            processors.counts,
            processors.num_counted,
            processors.num_prompt,
            rows,
            starts,
            begins,
            token_ids,
            processors.counts.stride(0),
            TILE=TILE,
            num_warps=4,
        )


def update_token_counts(processors: LogitsProcessorState, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """`reference.update_token_counts`."""
    assert rows.is_contiguous() and positions.is_contiguous() and tokens.is_contiguous()
    if len(rows):
        _update_token_counts[(len(rows),)](
            processors.enabled,
            processors.counts,
            processors.num_counted,
            processors.history,
            rows,
            positions,
            tokens,
            processors.counts.stride(0),
            processors.history.stride(0),
            num_warps=1,
        )


def apply_row_logits_processors(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: RowState,
    processors: LogitsProcessorState,
    drafts: DraftLines | None = None,
) -> None:
    """`reference.apply_row_logits_processors`; logits are contiguous."""
    num_rows, vocab_size = logits.shape
    assert logits.is_contiguous(), logits.stride()
    if not num_rows:
        return
    _apply_sparse[(num_rows,)](
        logits,
        rows,
        positions,
        state.sampling_params,
        processors.enabled,
        processors.min_length,
        processors.bias_ids,
        processors.bias_values,
        vocab_size,
        BIAS=triton.next_power_of_2(MAX_BIAS),
        num_warps=4,
    )
    _apply_dense[(num_rows, triton.cdiv(vocab_size, TILE))](
        logits,
        rows,
        processors.enabled,
        processors.penalties,
        processors.allowed_bitmask,
        processors.counts,
        *((rows, rows) if drafts is None else drafts),
        vocab_size,
        processors.allowed_bitmask.stride(0),
        HAS_DRAFTS=drafts is not None,
        TILE=TILE,
        num_warps=4,
    )


@triton.jit
def _init_token_counts(
    counts, num_counted, num_prompt, rows, starts, begins, token_ids, counts_stride, TILE: tl.constexpr
):
    """Count the tokens of one slice."""
    i = tl.program_id(0)
    row = tl.load(rows + i)
    start = tl.load(starts + i)
    begin = tl.load(begins + i)
    end = tl.load(begins + i + 1)
    counts_ptr = counts + row * counts_stride
    num_known = tl.load(num_counted + row)
    prompt = tl.load(num_prompt + row)
    for first in range(begin, end, TILE):
        index = first + tl.arange(0, TILE)
        position = start + index - begin
        mask = (index < end) & (position >= num_known)
        token = tl.load(token_ids + index, mask=mask, other=0)
        tl.atomic_or(counts_ptr + token, IN_PROMPT_BIT, mask=mask & (position < prompt))
        tl.atomic_add(counts_ptr + token, 1, mask=mask & (position >= prompt))
    tl.debug_barrier()  # all threads of this program have read num_known
    tl.store(num_counted + row, tl.maximum(num_known, (start + end - begin).to(tl.int32)))


@triton.jit
def _update_token_counts(enabled, counts, num_counted, history, rows, positions, tokens, counts_stride, history_stride):
    """Count the token of one sample."""
    i = tl.program_id(0)
    row = tl.load(rows + i)
    token = tl.load(tokens + i)
    flags = tl.load(enabled + row)
    if (flags != 0) & (token >= 0):
        position = tl.load(positions + i)
        tl.store(history + row * history_stride + position, token.to(tl.int32))
        if flags & PENALTIES_BIT:
            tl.atomic_add(counts + row * counts_stride + token, 1)  # several tokens of a row may be equal
            tl.atomic_max(num_counted + row, (position + 1).to(tl.int32))


@triton.jit(do_not_specialize=["vocab_size"])
def _apply_sparse(
    logits, rows, positions, sampling_params, enabled, min_length, bias_ids, bias_values, vocab_size, BIAS: tl.constexpr
):
    """One row: logit bias and min_tokens, which change a few logits."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    flags = tl.load(enabled + row)
    row_ptr = logits + i * vocab_size
    if flags & LOGIT_BIAS_BIT:
        k = tl.arange(0, BIAS)
        token = tl.load(bias_ids + row * BIAS_ENTRIES + k, mask=k < BIAS_ENTRIES, other=-1)
        mask = (token >= 0) & (token < vocab_size)
        added = tl.load(bias_values + row * BIAS_ENTRIES + k, mask=mask, other=0.0)
        tl.store(row_ptr + token, tl.load(row_ptr + token, mask=mask, other=0.0) + added, mask=mask)
    is_early = tl.load(positions + i) < tl.load(min_length + row)
    if ((flags & MIN_TOKENS_BIT) != 0) & is_early:
        tl.debug_barrier()  # a stop token may also have a bias
        k = tl.arange(0, 16)
        token = tl.load(sampling_params + row * COLUMNS + FIRST_STOP_COLUMN + k, mask=k < NUM_STOP_COLUMNS, other=-1)
        tl.store(row_ptr + token, -float("inf"), mask=(token >= 0) & (token < vocab_size))


@triton.jit(do_not_specialize=["vocab_size", "allowed_stride"])
def _apply_dense(
    logits,
    rows,
    enabled,
    penalties,
    allowed_bitmask,
    counts,
    depths,
    token_ids,
    vocab_size,
    allowed_stride,
    HAS_DRAFTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile of one row: penalties and allowed tokens, which may change every logit."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    flags = tl.load(enabled + row)
    if flags & (ALLOWED_TOKENS_BIT | PENALTIES_BIT):
        token = tl.program_id(1) * TILE + tl.arange(0, TILE)
        mask = token < vocab_size
        ptrs = logits + i * vocab_size + token
        value = tl.load(ptrs, mask=mask, other=0.0)
        if flags & PENALTIES_BIT:
            count = tl.load(counts + row * vocab_size + token, mask=mask, other=0)
            if HAS_DRAFTS:  # those up to this line
                for k in range(tl.load(depths + i)):
                    count += (token == tl.load(token_ids + i - k)).to(tl.int32)
            num_output = (count & (IN_PROMPT_BIT - 1)).to(tl.float32)
            repetition = tl.load(penalties + row * 3)
            value = tl.where(count != 0, tl.where(value > 0, value / repetition, value * repetition), value)
            value -= tl.load(penalties + row * 3 + 2) * num_output
            value -= tl.where(num_output > 0, tl.load(penalties + row * 3 + 1), 0.0)
        if flags & ALLOWED_TOKENS_BIT:
            word = tl.load(allowed_bitmask + row * allowed_stride + token // 32, mask=mask, other=0)
            value = tl.where(((word >> (token % 32)) & 1) != 0, value, -float("inf"))
        tl.store(ptrs, value, mask=mask)


PENALTIES_BIT = tl.constexpr(PENALTIES)
LOGIT_BIAS_BIT = tl.constexpr(LOGIT_BIAS)
ALLOWED_TOKENS_BIT = tl.constexpr(ALLOWED_TOKENS)
MIN_TOKENS_BIT = tl.constexpr(MIN_TOKENS)
IN_PROMPT_BIT = tl.constexpr(IN_PROMPT)
BIAS_ENTRIES = tl.constexpr(MAX_BIAS)
COLUMNS = tl.constexpr(NUM_COLUMNS)
FIRST_STOP_COLUMN = tl.constexpr(FIRST_STOP_ID)
NUM_STOP_COLUMNS = tl.constexpr(MAX_STOP_IDS)
