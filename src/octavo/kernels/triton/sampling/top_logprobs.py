"""The likeliest tokens of each row of logits, and what the model thought of one of them, in Triton: nothing is sorted.

A row is cut into pieces, and one look at all of them says how high each of them goes, and what their exponentials come
to. The likeliest token is in the piece that goes highest, which then goes as high as its next: so k more looks, each at
a single piece, find the k likeliest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.row_state import MAX_LOGPROBS, NUM_COLUMNS, NUM_LOGPROBS, RowState

PIECE = 2048
"""Tokens."""
MOST_FOUND = 256
"""Of the likeliest tokens; to find more, all are sorted."""
LOW_BITS = (1 << 31) - 1


def packed_top_logprobs(logits: Tensor, num: int) -> Tensor:
    """See `reference.packed_top_logprobs`; logits of any float dtype, rows contiguous. Captures into a graph."""
    if num > min(MOST_FOUND, logits.shape[1]):
        return reference.packed_top_logprobs(logits, num)
    best = logits.new_empty(len(logits), 2 + 2 * num, dtype=torch.int32)
    _find(logits, None, best, num)
    return best


def write_logprobs(
    state: RowState, rows: Tensor, logits: Tensor, tokens: Tensor, ring: Tensor, step_counter: Tensor
) -> None:
    """See `reference.write_logprobs`; logits of any float dtype, rows contiguous. A row that does not ask costs next to
    nothing. Captures into a graph."""
    _find(logits, (state.sampling_params, rows, tokens, step_counter), ring, MAX_LOGPROBS)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.token_logprobs`. The top are found, not sorted out, by keys that no two tokens share: a logit's
    bits in the order of floats, then how low the id is."""
    if num_top > MOST_FOUND or num_top > logits.shape[1]:
        return reference.token_logprobs(logits, token_ids, num_top)
    wide = logits.float() + 0.0  # which makes -0 a 0
    chosen = wide.gather(1, token_ids.unsqueeze(1))
    ranks = (wide > chosen).sum(1) + 1
    bits = wide.view(torch.int32).long()
    keys = (torch.where(bits < 0, bits ^ LOW_BITS, bits) << 32) + torch.arange(
        LOW_BITS, LOW_BITS - wide.shape[1], -1, device=wide.device
    )
    top_ids = LOW_BITS - (keys.topk(num_top).values & LOW_BITS)
    log_total = wide.logsumexp(1, keepdim=True)
    return (chosen - log_total).squeeze(1), ranks, top_ids, wide.gather(1, top_ids) - log_total


def _find(logits: Tensor, asked: tuple[Tensor, Tensor, Tensor, Tensor] | None, out: Tensor, num: int) -> None:
    """asked: (sampling_params, rows, tokens, step_counter), where each row has its own number of top tokens, at most
    `num`. None: `num` for all rows."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and out.stride(-1) == 1, (logits.stride(), out.stride())
    if not num_rows:
        return
    pieces = triton.cdiv(vocab_size, PIECE)
    found = logits.new_empty(num_rows, 3, pieces, dtype=torch.float32)
    sampling_params, rows, tokens, step_counter = asked or (logits,) * 4
    asking = {"ASKED": asked is not None, "PIECE": PIECE, "num_warps": 4}
    _look[(num_rows, pieces)](logits, sampling_params, rows, tokens, found, vocab_size, logits.stride(0), **asking)
    _tell[(num_rows,)](
        logits,
        sampling_params,
        rows,
        tokens,
        step_counter,
        found,
        out,
        vocab_size,
        logits.stride(0),
        out.stride(-2),
        out.stride(0),
        num,
        PIECES=pieces,
        PIECES_PADDED=triton.next_power_of_2(pieces),
        PLACES=triton.next_power_of_2(num),
        **asking,
    )


LOGPROBS_AT = tl.constexpr(NUM_LOGPROBS)
COLUMNS = tl.constexpr(NUM_COLUMNS)


@triton.jit
def _scores(line, token_ids, vocab_size):
    """Of these tokens; -inf where there is none, or no number."""
    scores = tl.load(line + token_ids, mask=token_ids < vocab_size, other=-float("inf")).to(tl.float32)
    return tl.where(tl.abs(scores) < float("inf"), scores, -float("inf"))


@triton.jit
def _asked_for(sampling_params, rows, tokens, row):
    """How many of the likeliest tokens, -1 for nothing at all; and the row's own token."""
    token = tl.load(tokens + row)
    num = tl.load(sampling_params + tl.load(rows + row) * COLUMNS + LOGPROBS_AT)
    return tl.where(token < 0, -1, num), token


@triton.jit(do_not_specialize=["vocab_size"])
def _look(
    logits, sampling_params, rows, tokens, found, vocab_size, row_stride, ASKED: tl.constexpr, PIECE: tl.constexpr
):
    """A piece of a row: how high it goes, the sum of exponentials, less that; and how many go higher than the row's
    token, or, if nobody has asked, are not finite."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = logits + row * row_stride
    num = 0
    border = float("inf")
    if ASKED:
        num, token = _asked_for(sampling_params, rows, tokens, row)
        border = tl.load(line + token, mask=num >= 0, other=0.0).to(tl.float32)
    if num >= 0:
        token_ids = piece * PIECE + tl.arange(0, PIECE)
        scores = _scores(line, token_ids, vocab_size)
        highest = tl.max(scores, 0)
        counted = scores > border
        if not ASKED:
            counted = (token_ids < vocab_size) & (scores == -float("inf"))
        out = found + row * 3 * tl.num_programs(1) + piece
        tl.store(out, highest)
        total = tl.sum(tl.where(scores > -float("inf"), tl.exp(scores - highest), 0.0), 0)
        tl.store(out + tl.num_programs(1), total)
        tl.store(out + 2 * tl.num_programs(1), tl.sum(counted.to(tl.float32), 0))


@triton.jit(do_not_specialize=["vocab_size", "line_stride", "column_stride", "num"])
def _tell(
    logits,
    sampling_params,
    rows,
    tokens,
    step_counter,
    found,
    out,
    vocab_size,
    row_stride,
    line_stride,
    column_stride,
    num,
    ASKED: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    PIECES_PADDED: tl.constexpr,
    PLACES: tl.constexpr,
):
    """A row: of the piece that goes highest the next token, num times."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * row_stride
    told = out + row * line_stride
    most = num
    if ASKED:
        own_num, own = _asked_for(sampling_params, rows, tokens, row)
        num = own_num.to(tl.int32)
        told += tl.load(step_counter) * column_stride
    if num >= 0:
        piece = tl.arange(0, PIECES_PADDED)
        here = piece < PIECES
        place = found + row * 3 * PIECES + piece
        highest = tl.load(place, mask=here, other=-float("inf"))
        total = tl.load(place + PIECES, mask=here, other=0.0)
        count = tl.sum(tl.load(place + 2 * PIECES, mask=here, other=0.0), 0)
        peak = tl.max(highest, 0)
        log_total = peak + tl.log(tl.sum(tl.where(total > 0, total * tl.exp(highest - peak), 0.0), 0))
        if ASKED:
            own_score = tl.load(line + own).to(tl.float32)
            rank = count + 1
        else:
            own_score = peak
            rank = tl.where(count == 0, 1.0, 0.0)
        tl.store(told, (own_score - log_total).to(tl.int32, bitcast=True))
        tl.store(told + 1, rank.to(tl.int32))
        lane = tl.arange(0, PLACES)
        best = tl.full([PLACES], 0.0, tl.float32)
        best_ids = tl.zeros([PLACES], tl.int32)
        last = tl.full([PIECES_PADDED], -1, tl.int32)  # of a piece, the last token that was as high as the next one is
        for k in range(num):
            # Pieces are in the order of their tokens: the first of equals has the lowest.
            at = tl.argmax(highest, 0)
            score = tl.max(highest, 0)
            token_ids = at * PIECE + tl.arange(0, PIECE)
            scores = _scores(line, token_ids, vocab_size)
            equal = (scores == score) & (token_ids < vocab_size)
            behind = token_ids > tl.sum(tl.where(piece == at, last, 0), 0)
            token = tl.min(tl.where(equal & behind, token_ids, vocab_size - 1), 0)
            following = tl.max(tl.where((scores < score) | (equal & (token_ids > token)), scores, -float("inf")), 0)
            best = tl.where(lane == k, score - log_total, best)
            best_ids = tl.where(lane == k, token, best_ids)
            last = tl.where(piece == at, tl.where(following == score, token, -1), last)
            highest = tl.where(piece == at, following, highest)
        tl.store(told + 2 + lane, best_ids, mask=lane < num)
        tl.store(told + 2 + most + lane, best.to(tl.int32, bitcast=True), mask=lane < num)
