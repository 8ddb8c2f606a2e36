"""Sampling on a GPU, in Triton: no sort, no probabilities written out, one or two passes over the logits.

A token is drawn by an exponential race (see `reference.sample`): each has its score, the winner is the largest. So a
vocabulary can be cut into pieces whose winners race again, and greedy decoding is the race without noise.

Filters keep what comes first in the order (likeliest first, equals by id). The winner of all tokens is the winner of
those kept, if it is kept: then a second pass, which tells what comes before it, is all there is to do. If it is not,
nothing behind it is kept either, so the race is run again among those before it. The likeliest token is always kept:
this ends. Rejecting a winner instead of finding the border is FlashInfer's idea (arXiv 2501.01005); with noise that
belongs to the token it gives the very token that sorting would.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from octavo.kernels.metadata import SamplingTensors
from octavo.kernels.reference.sampling import GOLDEN, MIX_1, MIX_2

TILE = 1024
RACE_TILE = 512
MIN_PIECE = 2048
NUM_PIECES = 2048
"""In which a step's logits are cut, all rows together, where there are fewer rows than that. Many small ones keep the
GPU's threads busy: 107 us for 256 rows of 152k logits, 129 with 512 pieces in tiles of 1,024."""
MAX_PIECES = 64
"""Of one row."""


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """See `reference.sample`; logits of any float dtype, rows contiguous. Differs from it where two tokens' scores are
    within float32's rounding of each other, or a filter's border runs as close by a token. Captures into a graph."""
    return _sample(logits, params, all_finite=False)


def sample_checked(logits: Tensor, params: SamplingTensors, masks: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """See `reference.sample_checked`."""
    return _sample(logits, params, all_finite=True, masks=masks)


def apply_token_bitmask(logits: Tensor, mask_index: Tensor, bitmask: Tensor) -> None:
    """See `reference.apply_token_bitmask`; logits' rows contiguous."""
    assert logits.stride(1) == 1 and bitmask.is_contiguous(), (logits.stride(), bitmask.stride())
    if len(mask_index):
        _apply_token_bitmask[(len(mask_index), triton.cdiv(logits.shape[1], TILE))](
            logits, mask_index, bitmask, logits.shape[1], logits.stride(0), bitmask.shape[1], TILE=TILE, num_warps=4
        )


def _sample(
    logits: Tensor, params: SamplingTensors, *, all_finite: bool, masks: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """all_finite: -1 for a row with a logit that is not; otherwise -inf is a token that is ruled out."""
    num_rows, vocab_size = logits.shape
    mask_index, bitmask = masks or (logits, logits)
    assert logits.stride(1) == 1 and bitmask.stride(1) == 1, (logits.stride(), bitmask.stride())
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    pieces = max(1, min(NUM_PIECES // num_rows, triton.cdiv(vocab_size, MIN_PIECE), MAX_PIECES))
    piece = triton.cdiv(triton.cdiv(vocab_size, pieces), RACE_TILE) * RACE_TILE
    pieces = triton.cdiv(vocab_size, piece)
    floats = torch.empty(2, num_rows, pieces, dtype=torch.float32, device=logits.device)
    best_scores, highest = floats[0], floats[1]
    best_ids = torch.empty(num_rows, pieces, dtype=torch.int32, device=logits.device)
    _race[(num_rows, pieces)](
        logits,
        params.temperature,
        params.seed,
        params.sample_index,
        params.position,
        best_scores,
        best_ids,
        highest,
        mask_index,
        bitmask,
        vocab_size,
        logits.stride(0),
        bitmask.stride(0),
        piece,
        ALL_FINITE=all_finite,
        MASKED=masks is not None,
        TILE=RACE_TILE,
        num_warps=4,
    )
    _finish[(num_rows,)](
        logits,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed,
        params.sample_index,
        params.position,
        best_scores,
        best_ids,
        highest,
        tokens,
        vocab_size,
        logits.stride(0),
        pieces,
        PIECES=MAX_PIECES,
        MASKED=masks is not None,
        TILE=4096,
        num_warps=8,
    )
    return tokens


def _word(value: int) -> tl.constexpr:
    return tl.constexpr(value & ((1 << 64) - 1))


GOLDEN_WORD, MIX_1_WORD, MIX_2_WORD = _word(GOLDEN), _word(MIX_1), _word(MIX_2)
LOWEST = tl.constexpr(-3.0e38)
NO_TOKEN = tl.constexpr(2**31 - 1)
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _mix_high(x):
    x = (x ^ (x >> 30)) * MIX_1_WORD
    return (x ^ (x >> 27)) * MIX_2_WORD


@triton.jit
def _mix(x):
    x = _mix_high(x)
    return x ^ (x >> 31)


@triton.jit
def _noise_key(seed, sample_index, position):
    """`reference.noise_keys`, in uint64: its shifts are logical."""
    key = _mix(seed.to(tl.uint64) + GOLDEN_WORD)
    key = _mix(key + sample_index.to(tl.uint64) + GOLDEN_WORD)
    return _mix(key + position.to(tl.uint64) + GOLDEN_WORD)


@triton.jit
def _log(x):
    if COMPILED:
        return libdevice.fast_logf(x)  # one instruction of the GPU's and a product; tl.log is twenty
    else:
        return tl.log(x)


@triton.jit
def _small_float(bits):
    """Up to 23 bits of an integer as float32: put behind those of 2^23. Conversions are slow, from 64 bits the most."""
    return (bits.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _exponential_noise(state):
    """`reference.exponential_noise`; state: a key and a token's id, see `_state`.

    Small noise is what wins, and there the logarithm of 1 - u must not be taken of a rounded 1 - u: up to 1/16 it is a
    sum of powers, exact to float32. Beyond, the GPU's fast logarithm is.
    """
    bits = _mix_high(state) >> 32
    number = _small_float(bits >> 16) * 65536.0 + _small_float(bits & 0xFFFF)
    u = (number + 0.5) * 2.3283064365386963e-10  # 2^-32
    u = tl.minimum(u, 1.0 - 5.9604644775390625e-08)  # 2^-24
    power = 1 / 5 + u * (1 / 6 + u * (1 / 7 + u * (1 / 8)))
    power = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * power))))
    return tl.where(u < 0.0625, power, -_log(1.0 - u))


@triton.jit
def _state(key, token_ids):
    return key + (token_ids + 1).to(tl.uint64) * GOLDEN_WORD


@triton.jit
def _scores(values, state, warm):
    """Who wins the race: values are logits / temperature."""
    if warm:
        values -= _log(_exponential_noise(state))
    return values


@triton.jit
def _winner(scores, token_ids):
    """The largest score's token, the lowest id of equals, and that score."""
    best = tl.max(scores, 0)
    return tl.min(tl.where(scores == best, token_ids, NO_TOKEN), 0), best


@triton.jit(do_not_specialize=["vocab_size", "piece", "bitmask_stride"])
def _race(
    logits,
    temperature,
    seed,
    sample_index,
    position,
    best_scores,
    best_ids,
    highest,
    mask_index,
    bitmask,
    vocab_size,
    row_stride,
    bitmask_stride,
    piece,
    ALL_FINITE: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One piece of one row: its winner, or with ALL_FINITE -1 where a logit is not, and its largest logit. With MASKED
    after a mask, which is written into the logits for who looks at them again."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    heat = tl.load(temperature + row)
    warm = heat > 0
    cold = 1.0 / tl.where(warm, heat, 1.0)
    key = _noise_key(tl.load(seed + row), tl.load(sample_index + row), tl.load(position + row))
    line = logits + row.to(tl.int64) * row_stride
    begin = part * piece
    end = tl.minimum(begin + piece, vocab_size)
    # Each of TILE lanes keeps its own best; the first of equals, because it comes first.
    lane = tl.arange(0, TILE)
    lane_state = _state(key, lane)
    best = tl.full([TILE], -float("inf"), tl.float32)
    best_id = tl.zeros([TILE], tl.int32)
    high = tl.full([TILE], -float("inf"), tl.float32)
    finite = tl.full([TILE], 1, tl.int32)
    if MASKED:
        mask = tl.load(mask_index + row)
        allowed = bitmask + mask.to(tl.int64) * bitmask_stride
    for start in range(begin, end, TILE):
        token_ids = start + lane
        here = token_ids < end
        raw = tl.load(line + token_ids, mask=here, other=0.0).to(tl.float32)
        if ALL_FINITE:
            finite &= (tl.abs(raw) < float("inf")).to(tl.int32)
        if MASKED:
            word = tl.load(allowed + token_ids // 32, mask=here & (mask >= 0), other=-1)
            out = ((word >> (token_ids % 32)) & 1) == 0
            tl.store(line + token_ids, -float("inf"), mask=here & out)
            raw = tl.where(out, -float("inf"), raw)
        raw = tl.where(here, raw, -float("inf"))
        scores = _scores(raw * cold, lane_state + tl.cast(start, tl.uint64) * GOLDEN_WORD, warm)
        best_id = tl.where(scores > best, token_ids, best_id)
        best = tl.maximum(best, scores)
        high = tl.maximum(high, raw)
    token, score = _winner(best, best_id)
    place = row * tl.num_programs(1) + part
    tl.store(best_scores + place, score)
    tl.store(best_ids + place, tl.where(tl.min(finite, 0) > 0, token, -1))
    tl.store(highest + place, tl.max(high, 0))


@triton.jit(do_not_specialize=["vocab_size", "num_mask_words"])
def _apply_token_bitmask(logits, mask_index, bitmask, vocab_size, row_stride, num_mask_words, TILE: tl.constexpr):
    """A tile of one row."""
    row = tl.program_id(0).to(tl.int64)
    mask = tl.load(mask_index + row).to(tl.int64)
    if mask >= 0:
        token = tl.program_id(1) * TILE + tl.arange(0, TILE)
        here = token < vocab_size
        word = tl.load(bitmask + mask * num_mask_words + token // 32, mask=here, other=-1)
        here &= ((word >> (token % 32)) & 1) == 0
        tl.store(logits + row * row_stride + token, -float("inf"), mask=here)


@triton.jit(do_not_specialize=["vocab_size", "pieces"])
def _finish(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    sample_index,
    position,
    best_scores,
    best_ids,
    highest,
    tokens,
    vocab_size,
    row_stride,
    pieces,
    PIECES: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row: the winner of its pieces' winners, and if the row has filters, the winner among those kept; with MASKED
    -2 where nothing is left."""
    row = tl.program_id(0)
    part = tl.arange(0, PIECES)
    place = row * pieces + part
    ids = tl.load(best_ids + place, mask=part < pieces, other=0)
    scores = tl.load(best_scores + place, mask=part < pieces, other=-float("inf"))
    token, score = _winner(scores, ids)
    if MASKED:
        token = tl.where(score == -float("inf"), -2, token)
    token = tl.where(tl.min(ids, 0) < 0, -1, token)
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)
    if (heat > 0) & (token >= 0) & ((k > 0) | (p < 1) | (least > 0)):
        line = logits + row.to(tl.int64) * row_stride
        cold = 1.0 / heat
        peak = tl.max(tl.load(highest + place, mask=part < pieces, other=-float("inf")), 0) * cold
        key = _noise_key(tl.load(seed + row), tl.load(sample_index + row), tl.load(position + row))
        # The mass that top_p is a share of: of what top_k leaves.
        mass = 1.0
        if p < 1:
            border = LOWEST
            if (k > 0) & (k < vocab_size):
                border = _kth_largest(line, cold, peak, k, vocab_size, TILE)
            mass = _mass_from(line, cold, peak, border, vocab_size, TILE)
        before, mass_before, value = _what_precedes(line, cold, peak, token, vocab_size, TILE)
        while not _is_kept(before, mass_before, value, peak, k, p, least, mass):
            token = _race_before(line, cold, peak, token, value, least, key, vocab_size, TILE)
            before, mass_before, value = _what_precedes(line, cold, peak, token, vocab_size, TILE)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _is_kept(before, mass_before, value, peak, k, p, least, mass):
    """`before` counts the larger values alone, since top_k keeps equals. The first of all is kept in any case."""
    kept = ((k <= 0) | (before < k)) & ((p >= 1) | (mass_before < p * mass)) & (tl.exp(value - peak) >= least)
    return kept | ((before == 0) & (mass_before <= 0))


@triton.jit
def _values(line, token_ids, cold, end):
    here = token_ids < end
    raw = tl.load(line + token_ids, mask=here, other=0.0).to(tl.float32)
    return tl.where(here, raw * cold, -float("inf"))


@triton.jit
def _what_precedes(line, cold, peak, token, vocab_size, TILE: tl.constexpr):
    """How many values are larger than the token's, what mass comes before it in the order, and its value."""
    value = tl.load(line + token).to(tl.float32) * cold
    count = tl.zeros([TILE], tl.int32)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab_size, TILE):
        token_ids = start + tl.arange(0, TILE)
        values = _values(line, token_ids, cold, vocab_size)
        larger = values > value
        count += larger.to(tl.int32)
        total += tl.where(larger | ((values == value) & (token_ids < token)), tl.exp(values - peak), 0.0)
    return tl.sum(count, 0), tl.sum(total, 0), value


@triton.jit
def _race_before(line, cold, peak, token, value, least, key, vocab_size, TILE: tl.constexpr):
    """The winner among the tokens before one that was rejected, and within min_p."""
    best = tl.full([TILE], -float("inf"), tl.float32)
    best_id = tl.full([TILE], NO_TOKEN, tl.int32)
    for start in range(0, vocab_size, TILE):
        token_ids = start + tl.arange(0, TILE)
        values = _values(line, token_ids, cold, vocab_size)
        allowed = (values > value) | ((values == value) & (token_ids < token))
        allowed &= tl.exp(values - peak) >= least
        if tl.max(allowed.to(tl.int32), 0) > 0:
            scores = tl.where(allowed, _scores(values, _state(key, token_ids), True), -float("inf"))
            best_id = tl.where(scores > best, token_ids, best_id)
            best = tl.maximum(best, scores)
    winner, _ = _winner(best, best_id)
    return winner


@triton.jit
def _mass_from(line, cold, peak, border, vocab_size, TILE: tl.constexpr):
    """The mass, in units of the peak's, of values that are at least the border's."""
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab_size, TILE):
        values = _values(line, start + tl.arange(0, TILE), cold, vocab_size)
        total += tl.where(values >= border, tl.exp(values - peak), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _ordered(values):
    """float32 as int32 of the same order."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _kth_largest(line, cold, peak, k, vocab_size, TILE: tl.constexpr):
    """The k-th largest value, or one that has exactly k values from it on: bisection over the bits of a float32."""
    low = _ordered(tl.full([], LOWEST, tl.float32)).to(tl.int64)  # count(values >= low) >= k
    high = _ordered(peak).to(tl.int64) + 1  # count(values >= high) < k
    found = k + 1
    while (high - low > 1) & (found != k):
        middle = (low + high) // 2
        count = tl.zeros([TILE], tl.int32)
        for start in range(0, vocab_size, TILE):
            values = _values(line, start + tl.arange(0, TILE), cold, vocab_size)
            count += (_ordered(values).to(tl.int64) >= middle).to(tl.int32)
        found = tl.sum(count, 0)
        low = tl.where(found >= k, middle, low)
        high = tl.where(found >= k, high, middle)
    bits = low.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
