"""Top tokens and log-probabilities of rows of logits, in Triton, without a sort.

A row is cut into splits. One pass over all splits computes the largest logit and the sum of exponentials of each. The
top token is in the split with the largest logit, which then continues with its next largest. So k further steps, each
over one split, find the top k tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.row_state import MAX_LOGPROBS, NUM_COLUMNS, NUM_LOGPROBS, RowState

SPLIT_SIZE = 2048
"""Tokens of a split."""
MAX_TOP = 256
"""Limit of top tokens for the kernel; for more, `reference` sorts the row."""
LOW_BITS = (1 << 31) - 1


def packed_top_logprobs(logits: Tensor, num: int) -> Tensor:
    """`reference.packed_top_logprobs`; logits of any float dtype with contiguous rows. Can be captured into a graph."""
    if num > min(MAX_TOP, logits.shape[1]):
        return reference.packed_top_logprobs(logits, num)
    packed = logits.new_empty(len(logits), 2 + 2 * num, dtype=torch.int32)
    _launch(logits, None, packed, num)
    return packed


def write_logprobs(
    state: RowState, rows: Tensor, logits: Tensor, tokens: Tensor, ring: Tensor, step_counter: Tensor
) -> None:
    """`reference.write_logprobs`; logits of any float dtype with contiguous rows. Can be captured into a graph.

    A row that returns no log-probabilities costs next to nothing.
    """
    _launch(logits, (state.sampling_params, rows, tokens, step_counter), ring, MAX_LOGPROBS)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.token_logprobs`, by top-k instead of a sort.

    The keys are unique: the logit's bits in the order of floats, then the token id, lowest first.
    """
    if num_top > MAX_TOP or num_top > logits.shape[1]:
        return reference.token_logprobs(logits, token_ids, num_top)
    wide = logits.float() + 0.0  # turns -0 into 0
    chosen = wide.gather(1, token_ids.unsqueeze(1))
    ranks = (wide > chosen).sum(1) + 1
    bits = wide.view(torch.int32).long()
    keys = (torch.where(bits < 0, bits ^ LOW_BITS, bits) << 32) + torch.arange(
        LOW_BITS, LOW_BITS - wide.shape[1], -1, device=wide.device
    )
    top_ids = LOW_BITS - (keys.topk(num_top).values & LOW_BITS)
    log_total = wide.logsumexp(1, keepdim=True)
    return (chosen - log_total).squeeze(1), ranks, top_ids, wide.gather(1, top_ids) - log_total


def token_logprobs_as_written(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.token_logprobs`, in the bits of `write_logprobs`, for any number of rows: torch's sums depend on it.

    For more than `MAX_TOP` tokens `reference` sorts the row, by its own sum.
    """
    if num_top > MAX_TOP:
        return reference.token_logprobs(logits, token_ids, num_top)
    num_rows, num = len(logits), max(1, min(num_top, logits.shape[1]))
    params = token_ids.new_full((num_rows, NUM_COLUMNS), num)
    lines = logits.new_empty(1, num_rows, 2 + 2 * num, dtype=torch.int32)
    rows = torch.arange(num_rows, device=logits.device)
    _launch(logits, (params, rows, token_ids, rows.new_zeros(1)), lines, num)
    chosen, ranks, top_ids, top = lines[0].split([1, 1, num, num], dim=1)
    chosen, top = (part.contiguous().view(torch.float32) for part in (chosen, top))
    return chosen.squeeze(1), ranks.squeeze(1).long(), top_ids[:, :num_top].long(), top[:, :num_top]


def _launch(logits: Tensor, per_row: tuple[Tensor, Tensor, Tensor, Tensor] | None, out: Tensor, num: int) -> None:
    """Launch both kernels.

    per_row  (sampling_params, rows, tokens, step_counter) if each row has its own number of top tokens, at most `num`;
             None for `num` top tokens of every row
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and out.stride(-1) == 1, (logits.stride(), out.stride())
    if not num_rows:
        return
    num_splits = triton.cdiv(vocab_size, SPLIT_SIZE)
    stats = logits.new_empty(num_rows, 3, num_splits, dtype=torch.float32)
    sampling_params, rows, tokens, step_counter = per_row or (logits,) * 4
    options = {"PER_ROW": per_row is not None, "SPLIT_SIZE": SPLIT_SIZE, "num_warps": 4}
    _scan[(num_rows, num_splits)](logits, sampling_params, rows, tokens, stats, vocab_size, logits.stride(0), **options)
    _select_top[(num_rows,)](
        logits,
        sampling_params,
        rows,
        tokens,
        step_counter,
        stats,
        out,
        vocab_size,
        logits.stride(0),
        out.stride(-2),
        out.stride(0),
        num,
        SPLITS=num_splits,
        SPLITS_PADDED=triton.next_power_of_2(num_splits),
        TOP_PADDED=triton.next_power_of_2(num),
        **options,
    )


NUM_LOGPROBS_COLUMN = tl.constexpr(NUM_LOGPROBS)
COLUMNS = tl.constexpr(NUM_COLUMNS)


@triton.jit
def _load_logits(row_ptr, token_ids, vocab_size):
    """Load logits of tokens; -inf past the vocabulary and for non-finite logits."""
    scores = tl.load(row_ptr + token_ids, mask=token_ids < vocab_size, other=-float("inf")).to(tl.float32)
    return tl.where(tl.abs(scores) < float("inf"), scores, -float("inf"))


@triton.jit
def _load_request(row_params, rows, tokens, row):
    """(number of top tokens, sampled token) of a row; the number is -1 if it returns no log-probabilities."""
    token = tl.load(tokens + row)
    num = tl.load(row_params + tl.load(rows + row) * COLUMNS + NUM_LOGPROBS_COLUMN)
    return tl.where(token < 0, -1, num), token


@triton.jit(do_not_specialize=["vocab_size"])
def _scan(
    logits, row_params, rows, tokens, stats, vocab_size, row_stride, PER_ROW: tl.constexpr, SPLIT_SIZE: tl.constexpr
):
    """One split of a row: its largest logit, the sum of exponentials relative to that, and a count.

    The count is of logits above the sampled token's with PER_ROW, else of non-finite logits.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_ptr = logits + row * row_stride
    num = 0
    threshold = float("inf")
    if PER_ROW:
        num, token = _load_request(row_params, rows, tokens, row)
        threshold = tl.load(row_ptr + token, mask=num >= 0, other=0.0).to(tl.float32)
    if num >= 0:
        token_ids = split * SPLIT_SIZE + tl.arange(0, SPLIT_SIZE)
        scores = _load_logits(row_ptr, token_ids, vocab_size)
        max_logit = tl.max(scores, 0)
        counted = scores > threshold
        if not PER_ROW:
            counted = (token_ids < vocab_size) & (scores == -float("inf"))
        stats_ptr = stats + row * 3 * tl.num_programs(1) + split
        tl.store(stats_ptr, max_logit)
        sum_exp = tl.sum(tl.where(scores > -float("inf"), tl.exp(scores - max_logit), 0.0), 0)
        tl.store(stats_ptr + tl.num_programs(1), sum_exp)
        tl.store(stats_ptr + 2 * tl.num_programs(1), tl.sum(counted.to(tl.float32), 0))


@triton.jit(do_not_specialize=["vocab_size", "out_row_stride", "ring_column_stride", "num"])
def _select_top(
    logits,
    row_params,
    rows,
    tokens,
    step_counter,
    stats,
    out,
    vocab_size,
    row_stride,
    out_row_stride,
    ring_column_stride,
    num,
    PER_ROW: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    TOP_PADDED: tl.constexpr,
):
    """One row: num times, take the next token of the split with the largest remaining logit."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits + row * row_stride
    out_ptr = out + row * out_row_stride
    max_num = num
    if PER_ROW:
        row_num, row_token = _load_request(row_params, rows, tokens, row)
        num = row_num.to(tl.int32)
        out_ptr += tl.load(step_counter) * ring_column_stride
    if num >= 0:
        split = tl.arange(0, SPLITS_PADDED)
        mask = split < SPLITS
        stats_ptrs = stats + row * 3 * SPLITS + split
        split_max = tl.load(stats_ptrs, mask=mask, other=-float("inf"))
        split_sum = tl.load(stats_ptrs + SPLITS, mask=mask, other=0.0)
        count = tl.sum(tl.load(stats_ptrs + 2 * SPLITS, mask=mask, other=0.0), 0)
        row_max = tl.max(split_max, 0)
        log_total = row_max + tl.log(tl.sum(tl.where(split_sum > 0, split_sum * tl.exp(split_max - row_max), 0.0), 0))
        if PER_ROW:
            token_logit = tl.load(row_ptr + row_token).to(tl.float32)
            rank = count + 1
        else:
            token_logit = row_max
            rank = tl.where(count == 0, 1.0, 0.0)
        tl.store(out_ptr, (token_logit - log_total).to(tl.int32, bitcast=True))
        tl.store(out_ptr + 1, rank.to(tl.int32))
        lane = tl.arange(0, TOP_PADDED)
        top_logprobs = tl.full([TOP_PADDED], 0.0, tl.float32)
        top_ids = tl.zeros([TOP_PADDED], tl.int32)
        # For each split, the last taken token if its logit equals the next one's, else -1.
        last_token = tl.full([SPLITS_PADDED], -1, tl.int32)
        for k in range(num):
            # Splits are in the order of their tokens, so the first of equal splits has the lowest token.
            best_split = tl.argmax(split_max, 0)
            max_logit = tl.max(split_max, 0)
            token_ids = best_split * SPLIT_SIZE + tl.arange(0, SPLIT_SIZE)
            scores = _load_logits(row_ptr, token_ids, vocab_size)
            equal = (scores == max_logit) & (token_ids < vocab_size)
            is_later = token_ids > tl.sum(tl.where(split == best_split, last_token, 0), 0)
            token = tl.min(tl.where(equal & is_later, token_ids, vocab_size - 1), 0)
            next_max = tl.max(tl.where((scores < max_logit) | (equal & (token_ids > token)), scores, -float("inf")), 0)
            top_logprobs = tl.where(lane == k, max_logit - log_total, top_logprobs)
            top_ids = tl.where(lane == k, token, top_ids)
            last_token = tl.where(split == best_split, tl.where(next_max == max_logit, token, -1), last_token)
            split_max = tl.where(split == best_split, next_max, split_max)
        tl.store(out_ptr + 2 + lane, top_ids, mask=lane < num)
        tl.store(out_ptr + 2 + max_num + lane, top_logprobs.to(tl.int32, bitcast=True), mask=lane < num)
