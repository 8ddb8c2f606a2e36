"""Sampling, in Triton: one or two passes over the logits, without a sort and without writing probabilities.

Sampling is an exponential race (see `reference.sample`): every token has a score, and the largest score wins. So the
vocabulary can be cut into splits whose winners race again, and greedy sampling is the race without noise.

top_k, top_p and min_p keep a prefix of the tokens in descending order of probability, equals by id. If the winner of
the race over all tokens is kept, it is also the winner over the kept tokens. A second pass computes the count and the
mass of the tokens before it, which decides that. If the winner is not kept, no token after it is kept either, so the
race is run again among the tokens before it. The top token is always kept, so this ends. Rejecting a winner instead of
finding the cutoff is FlashInfer's idea (arXiv 2501.01005). Because the noise belongs to the token, the result is the
same token as with a sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from octavo.kernels.metadata import SamplingTensors
from octavo.kernels.reference.sampling import GOLDEN, MIX_1, MIX_2

TILE = 1024
RACE_TILE = 512
MIN_SPLIT_SIZE = 2048
NUM_SPLITS = 2048
"""Splits of a step's logits, over all rows, if there are fewer rows. Many small splits keep the GPU busy: 107 us for
256 rows of 152k logits, 129 us with 512 splits in tiles of 1,024."""
MAX_SPLITS = 64
"""Limit of splits of one row."""


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """`reference.sample`; logits of any float dtype with contiguous rows. Can be captured into a graph.

    The tokens differ where two scores, or a token and a filter's cutoff, are within float32's rounding of each other.
    """
    return _sample(logits, params, all_finite=False)


def sample_checked(logits: Tensor, params: SamplingTensors, masks: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """`reference.sample_checked`."""
    return _sample(logits, params, all_finite=True, masks=masks)


def race(logits: Tensor, params: SamplingTensors, first: int) -> Tensor:
    """`reference.race`; logits as for `sample`."""
    num_rows = len(logits)
    winners = torch.empty(num_rows, 3, dtype=torch.float32, device=logits.device)
    if num_rows:
        best_scores, best_ids, _ = _race_in_splits(logits, params, first, all_finite=True, masks=None)
        _write_winner[(num_rows,)](
            best_scores, best_ids, winners, first, best_ids.shape[1], SPLITS=MAX_SPLITS, num_warps=1
        )
    return winners


def decide(winners: Tensor) -> Tensor:
    """`reference.decide`; winners contiguous."""
    num_rows, num_slices = len(winners), winners.shape[1] // 3
    tokens = torch.empty(num_rows, dtype=torch.int64, device=winners.device)
    if num_rows:
        _decide[(num_rows,)](winners, tokens, num_slices, SLICES=triton.next_power_of_2(num_slices), num_warps=1)
    return tokens


def apply_token_bitmask(logits: Tensor, mask_index: Tensor, bitmask: Tensor) -> None:
    """`reference.apply_token_bitmask`; logits have contiguous rows."""
    assert logits.stride(1) == 1 and bitmask.is_contiguous(), (logits.stride(), bitmask.stride())
    if len(mask_index):
        _apply_token_bitmask[(len(mask_index), triton.cdiv(logits.shape[1], TILE))](
            logits, mask_index, bitmask, logits.shape[1], logits.stride(0), bitmask.shape[1], TILE=TILE, num_warps=4
        )


def _sample(
    logits: Tensor, params: SamplingTensors, *, all_finite: bool, masks: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """all_finite: the result is -1 for rows with a non-finite logit; otherwise -inf is a masked token."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    best_scores, best_ids, max_logits = _race_in_splits(logits, params, 0, all_finite=all_finite, masks=masks)
    _apply_filters[(num_rows,)](
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
        max_logits,
        tokens,
        vocab_size,
        logits.stride(0),
        best_ids.shape[1],
        SPLITS=MAX_SPLITS,
        MASKED=masks is not None,
        TILE=4096,
        num_warps=8,
    )
    return tokens


def _race_in_splits(
    logits: Tensor,
    params: SamplingTensors,
    first: int,
    *,
    all_finite: bool,
    masks: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores and tokens of the winners of splits, and their largest logits, all [num_rows, num_splits].

    first   token of the first column; the tokens count from it
    """
    num_rows, vocab_size = logits.shape
    mask_index, bitmask = masks or (logits, logits)
    assert logits.stride(1) == 1 and bitmask.stride(1) == 1, (logits.stride(), bitmask.stride())
    num_splits = max(1, min(NUM_SPLITS // num_rows, triton.cdiv(vocab_size, MIN_SPLIT_SIZE), MAX_SPLITS))
    split_size = triton.cdiv(triton.cdiv(vocab_size, num_splits), RACE_TILE) * RACE_TILE
    num_splits = triton.cdiv(vocab_size, split_size)
    floats = torch.empty(2, num_rows, num_splits, dtype=torch.float32, device=logits.device)
    best_scores, max_logits = floats[0], floats[1]
    best_ids = torch.empty(num_rows, num_splits, dtype=torch.int32, device=logits.device)
    _race[(num_rows, num_splits)](
        logits,
        params.temperature,
        params.seed,
        params.sample_index,
        params.position,
        best_scores,
        best_ids,
        max_logits,
        mask_index,
        bitmask,
        vocab_size,
        logits.stride(0),
        bitmask.stride(0),
        split_size,
        first,
        ALL_FINITE=all_finite,
        MASKED=masks is not None,
        TILE=RACE_TILE,
        num_warps=4,
    )
    return best_scores, best_ids, max_logits


def _uint64(value: int) -> tl.constexpr:
    return tl.constexpr(value & ((1 << 64) - 1))


GOLDEN_U64, MIX_1_U64, MIX_2_U64 = _uint64(GOLDEN), _uint64(MIX_1), _uint64(MIX_2)
MIN_LOGIT = tl.constexpr(-3.0e38)
NO_TOKEN = tl.constexpr(2**31 - 1)
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _mix_high(x):
    x = (x ^ (x >> 30)) * MIX_1_U64
    return (x ^ (x >> 27)) * MIX_2_U64


@triton.jit
def _mix(x):
    x = _mix_high(x)
    return x ^ (x >> 31)


@triton.jit
def _noise_key(seed, sample_index, position):
    """`reference.noise_keys` in uint64, whose shifts are logical."""
    key = _mix(seed.to(tl.uint64) + GOLDEN_U64)
    key = _mix(key + sample_index.to(tl.uint64) + GOLDEN_U64)
    return _mix(key + position.to(tl.uint64) + GOLDEN_U64)


@triton.jit
def _log(x):
    if COMPILED:
        return libdevice.fast_logf(x)  # one GPU instruction and a product; tl.log is twenty instructions
    else:
        return tl.log(x)


@triton.jit
def _small_float(bits):
    """An integer of up to 23 bits as float32, by placing its bits in the mantissa of 2^23. Conversion instructions are
    slow, most of all from 64 bits."""
    return (bits.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _exponential_noise(state):
    """`reference.exponential_noise`; state: a key and a token's id, see `_noise_state`.

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
def _noise_state(key, token_ids):
    return key + (token_ids + 1).to(tl.uint64) * GOLDEN_U64


@triton.jit
def _race_scores(values, state, is_random):
    """Scores of the race; values are logits / temperature."""
    if is_random:
        values -= _log(_exponential_noise(state))
    return values


@triton.jit
def _winner(scores, token_ids):
    """(token with the largest score, that score); of equal scores, the lowest token id."""
    best_score = tl.max(scores, 0)
    return tl.min(tl.where(scores == best_score, token_ids, NO_TOKEN), 0), best_score


@triton.jit(do_not_specialize=["vocab_size", "split_size", "bitmask_stride", "first"])
def _race(
    logits,
    temperature,
    seed,
    sample_index,
    position,
    best_scores,
    best_ids,
    max_logits,
    mask_index,
    bitmask,
    vocab_size,
    row_stride,
    bitmask_stride,
    split_size,
    first,
    ALL_FINITE: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One split of one row: the winner of the race, and the largest logit.

    ALL_FINITE  the winner is -1 if a logit is not finite
    MASKED      apply the bitmask first, and write it into the logits for later passes
    """
    row = tl.program_id(0)
    split = tl.program_id(1)
    temp = tl.load(temperature + row)
    is_random = temp > 0
    inv_temp = 1.0 / tl.where(is_random, temp, 1.0)
    key = _noise_key(tl.load(seed + row), tl.load(sample_index + row), tl.load(position + row))
    row_ptr = logits + row.to(tl.int64) * row_stride
    begin = split * split_size
    end = tl.minimum(begin + split_size, vocab_size)
    # Each of TILE lanes keeps its best token, the first of equals.
    lane = tl.arange(0, TILE)
    lane_state = _noise_state(key, lane + first)
    lane_best = tl.full([TILE], -float("inf"), tl.float32)
    lane_best_id = tl.zeros([TILE], tl.int32)
    lane_max = tl.full([TILE], -float("inf"), tl.float32)
    finite = tl.full([TILE], 1, tl.int32)
    if MASKED:
        mask_row = tl.load(mask_index + row)
        allowed = bitmask + mask_row.to(tl.int64) * bitmask_stride
    for start in range(begin, end, TILE):
        token_ids = start + lane
        mask = token_ids < end
        raw = tl.load(row_ptr + token_ids, mask=mask, other=0.0).to(tl.float32)
        if ALL_FINITE:
            finite &= (tl.abs(raw) < float("inf")).to(tl.int32)
        if MASKED:
            word = tl.load(allowed + token_ids // 32, mask=mask & (mask_row >= 0), other=-1)
            is_masked = ((word >> (token_ids % 32)) & 1) == 0
            tl.store(row_ptr + token_ids, -float("inf"), mask=mask & is_masked)
            raw = tl.where(is_masked, -float("inf"), raw)
        raw = tl.where(mask, raw, -float("inf"))
        scores = _race_scores(raw * inv_temp, lane_state + tl.cast(start, tl.uint64) * GOLDEN_U64, is_random)
        lane_best_id = tl.where(scores > lane_best, token_ids, lane_best_id)
        lane_best = tl.maximum(lane_best, scores)
        lane_max = tl.maximum(lane_max, raw)
    token, score = _winner(lane_best, lane_best_id)
    index = row * tl.num_programs(1) + split
    tl.store(best_scores + index, score)
    tl.store(best_ids + index, tl.where(tl.min(finite, 0) > 0, token, -1))
    tl.store(max_logits + index, tl.max(lane_max, 0))


@triton.jit(do_not_specialize=["first", "num_splits"])
def _write_winner(best_scores, best_ids, winners, first, num_splits, SPLITS: tl.constexpr):
    """One row of `race`: the winner of its splits' winners."""
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    index = row * num_splits + split
    ids = tl.load(best_ids + index, mask=split < num_splits, other=0)
    scores = tl.load(best_scores + index, mask=split < num_splits, other=-float("inf"))
    token, score = _winner(scores, ids)
    tl.store(winners + row * 3, score)
    tl.store(winners + row * 3 + 1, (token + first).to(tl.float32))
    tl.store(winners + row * 3 + 2, (tl.min(ids, 0) >= 0).to(tl.float32))


@triton.jit
def _decide(winners, tokens, num_slices, SLICES: tl.constexpr):
    row = tl.program_id(0)
    of_slice = tl.arange(0, SLICES)
    mask = of_slice < num_slices
    triple = winners + (row * num_slices + of_slice) * 3
    scores = tl.load(triple, mask=mask, other=-float("inf"))
    token, _ = _winner(scores, tl.load(triple + 1, mask=mask, other=0.0).to(tl.int32))
    finite = tl.load(triple + 2, mask=mask, other=1.0)
    tl.store(tokens + row, tl.where(tl.min(finite, 0) > 0, token, -1).to(tl.int64))


@triton.jit(do_not_specialize=["vocab_size", "num_mask_words"])
def _apply_token_bitmask(logits, mask_index, bitmask, vocab_size, row_stride, num_mask_words, TILE: tl.constexpr):
    """Apply a bitmask to a tile of one row."""
    row = tl.program_id(0).to(tl.int64)
    mask_row = tl.load(mask_index + row).to(tl.int64)
    if mask_row >= 0:
        token = tl.program_id(1) * TILE + tl.arange(0, TILE)
        is_masked = token < vocab_size
        word = tl.load(bitmask + mask_row * num_mask_words + token // 32, mask=is_masked, other=-1)
        is_masked &= ((word >> (token % 32)) & 1) == 0
        tl.store(logits + row * row_stride + token, -float("inf"), mask=is_masked)


@triton.jit(do_not_specialize=["vocab_size", "num_splits"])
def _apply_filters(
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
    max_logits,
    tokens,
    vocab_size,
    row_stride,
    num_splits,
    SPLITS: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row: the winner of its splits' winners; if the row has filters, the winner among the kept tokens.

    The result is -1 if a split has a non-finite logit and, with MASKED, -2 if every token is masked.
    """
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    index = row * num_splits + split
    ids = tl.load(best_ids + index, mask=split < num_splits, other=0)
    scores = tl.load(best_scores + index, mask=split < num_splits, other=-float("inf"))
    token, score = _winner(scores, ids)
    if MASKED:
        token = tl.where(score == -float("inf"), -2, token)
    token = tl.where(tl.min(ids, 0) < 0, -1, token)
    temp = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    min_ratio = tl.load(min_p + row)
    if (temp > 0) & (token >= 0) & ((k > 0) | (p < 1) | (min_ratio > 0)):
        row_ptr = logits + row.to(tl.int64) * row_stride
        inv_temp = 1.0 / temp
        peak = tl.max(tl.load(max_logits + index, mask=split < num_splits, other=-float("inf")), 0) * inv_temp
        key = _noise_key(tl.load(seed + row), tl.load(sample_index + row), tl.load(position + row))
        # top_p is a share of the mass that top_k leaves.
        mass = 1.0
        if p < 1:
            cutoff = MIN_LOGIT
            if (k > 0) & (k < vocab_size):
                cutoff = _kth_largest(row_ptr, inv_temp, peak, k, vocab_size, TILE)
            mass = _mass_at_least(row_ptr, inv_temp, peak, cutoff, vocab_size, TILE)
        num_larger, mass_before, logit = _count_before(row_ptr, inv_temp, peak, token, vocab_size, TILE)
        while not _is_kept(num_larger, mass_before, logit, peak, k, p, min_ratio, mass):
            token = _race_among_earlier(row_ptr, inv_temp, peak, token, logit, min_ratio, key, vocab_size, TILE)
            num_larger, mass_before, logit = _count_before(row_ptr, inv_temp, peak, token, vocab_size, TILE)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _is_kept(num_larger, mass_before, logit, peak, k, p, min_ratio, mass):
    """True if the filters keep a token. num_larger counts strictly larger logits, because top_k keeps equals. The first
    token is always kept."""
    kept = ((k <= 0) | (num_larger < k)) & ((p >= 1) | (mass_before < p * mass)) & (tl.exp(logit - peak) >= min_ratio)
    return kept | ((num_larger == 0) & (mass_before <= 0))


@triton.jit
def _load_scaled(row_ptr, token_ids, inv_temp, end):
    mask = token_ids < end
    raw = tl.load(row_ptr + token_ids, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, raw * inv_temp, -float("inf"))


@triton.jit
def _count_before(row_ptr, inv_temp, peak, token, vocab_size, TILE: tl.constexpr):
    """(number of larger values, mass of the tokens before this one in the order, its value)."""
    logit = tl.load(row_ptr + token).to(tl.float32) * inv_temp
    count = tl.zeros([TILE], tl.int32)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab_size, TILE):
        token_ids = start + tl.arange(0, TILE)
        values = _load_scaled(row_ptr, token_ids, inv_temp, vocab_size)
        larger = values > logit
        count += larger.to(tl.int32)
        total += tl.where(larger | ((values == logit) & (token_ids < token)), tl.exp(values - peak), 0.0)
    return tl.sum(count, 0), tl.sum(total, 0), logit


@triton.jit
def _race_among_earlier(row_ptr, inv_temp, peak, token, logit, min_ratio, key, vocab_size, TILE: tl.constexpr):
    """The winner among the tokens before a rejected one that pass min_p."""
    lane_best = tl.full([TILE], -float("inf"), tl.float32)
    lane_best_id = tl.full([TILE], NO_TOKEN, tl.int32)
    for start in range(0, vocab_size, TILE):
        token_ids = start + tl.arange(0, TILE)
        values = _load_scaled(row_ptr, token_ids, inv_temp, vocab_size)
        allowed = (values > logit) | ((values == logit) & (token_ids < token))
        allowed &= tl.exp(values - peak) >= min_ratio
        if tl.max(allowed.to(tl.int32), 0) > 0:
            scores = tl.where(allowed, _race_scores(values, _noise_state(key, token_ids), True), -float("inf"))
            lane_best_id = tl.where(scores > lane_best, token_ids, lane_best_id)
            lane_best = tl.maximum(lane_best, scores)
    winner, _ = _winner(lane_best, lane_best_id)
    return winner


@triton.jit
def _mass_at_least(row_ptr, inv_temp, peak, cutoff, vocab_size, TILE: tl.constexpr):
    """The mass of values of at least the cutoff, in units of the peak's mass."""
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab_size, TILE):
        values = _load_scaled(row_ptr, start + tl.arange(0, TILE), inv_temp, vocab_size)
        total += tl.where(values >= cutoff, tl.exp(values - peak), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _sortable_bits(values):
    """float32 as int32 with the same order."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _kth_largest(row_ptr, inv_temp, peak, k, vocab_size, TILE: tl.constexpr):
    """The k-th largest value, or a cutoff that exactly k values reach: bisection over the bits of a float32."""
    low = _sortable_bits(tl.full([], MIN_LOGIT, tl.float32)).to(tl.int64)  # count(values >= low) >= k
    high = _sortable_bits(peak).to(tl.int64) + 1  # count(values >= high) < k
    num_found = k + 1
    while (high - low > 1) & (num_found != k):
        middle = (low + high) // 2
        count = tl.zeros([TILE], tl.int32)
        for start in range(0, vocab_size, TILE):
            values = _load_scaled(row_ptr, start + tl.arange(0, TILE), inv_temp, vocab_size)
            count += (_sortable_bits(values).to(tl.int64) >= middle).to(tl.int32)
        num_found = tl.sum(count, 0)
        low = tl.where(num_found >= k, middle, low)
        high = tl.where(num_found >= k, high, middle)
    bits = low.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
