"""Sampling: logits processors, filters, the exponential race, log-probabilities."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.metadata import SamplingTensors
from octavo.kernels.reference.norms import accumulation_dtype

MAX_SLICED_TOP_K = 64
"""Largest top_k for which slices of the vocabulary are filtered by their top tokens."""
REMOVED = -1e36
"""In place of a logit of a slice that filters remove: finite, also divided by the least temperature, 0.01."""


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Sample one token a row -> [num_rows] int64; logits [num_rows, vocab_size].

    Greedy rows take the argmax, the lowest id of equals. Other rows sample from softmax(filtered_logits) by the
    exponential race: Exp(1) waiting times are divided by the tokens' probabilities, and token t's is the shortest with
    probability p(t). The noise is a function of (seed, sample_index, position, token) only, so a sample does not
    depend on its row, on the batch, or on preemptions.
    """
    greedy = logits.to(accumulation_dtype(logits.dtype)).argmax(-1)
    if params.all_greedy:
        return greedy
    scores = filtered_logits(logits, params)
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    noise = exponential_noise(noise_keys(params.seed, params.sample_index, params.position).unsqueeze(-1), token_ids)
    sampled = (scores.log_softmax(-1) - noise.log()).argmax(-1)
    return torch.where(params.temperature > 0, sampled, greedy)


def race(logits: Tensor, params: SamplingTensors, first: int) -> Tensor:
    """The race of `sample` over a slice of the vocabulary, without filters -> [num_rows, 3] float32, for `decide`.

    logits  [num_rows, num_tokens], of the tokens from `first` on

    A row has the winner's score, the winner, and 1 if all its logits are finite, else 0. Scores of slices can be
    compared: nothing is normalised.
    """
    token_ids = torch.arange(logits.shape[1], device=logits.device) + first
    scores = race_scores(logits, params, token_ids)
    winners = scores.argmax(1, keepdim=True)
    return torch.cat([scores.gather(1, winners), winners + first, finite_rows(logits).unsqueeze(1)], 1).float()


def race_scores(logits: Tensor, params: SamplingTensors, token_ids: Tensor) -> Tensor:
    """Scores [num_rows, num_tokens] of tokens with these logits; a greedy row's are the logits. token_ids broadcast."""
    keys = noise_keys(params.seed, params.sample_index, params.position).unsqueeze(1)
    is_random = (params.temperature > 0).unsqueeze(1)
    return scaled_logits(logits, params) - torch.where(is_random, exponential_noise(keys, token_ids).log(), 0.0)


def decide(winners: Tensor) -> Tensor:
    """The tokens of `sample_checked`, of the slices' races -> [num_rows] int64; -1: some logits are not finite.

    winners  [num_rows, 3 * num_slices], of the slices in the order of their tokens. Of equal scores the first wins
    """
    scores, token_ids, finite = (winners[:, i::3] for i in range(3))
    tokens = token_ids.gather(1, scores.argmax(1, keepdim=True)).squeeze(1)
    return torch.where(finite.amin(1) > 0, tokens, -1).long()


def slice_tops(logits: Tensor, params: SamplingTensors) -> Tensor:
    """What the filters need of a slice of the vocabulary -> [num_rows, MAX_SLICED_TOP_K + 1] float32, for `keep_slice`.

    A row has the largest of its logits / temperature in descending order, and how many more equal the last of these.
    A smaller slice is padded with -inf. logits [num_rows, num_tokens]
    """
    scaled = scaled_logits(logits, params).float()
    tops = scaled.topk(min(MAX_SLICED_TOP_K, scaled.shape[1])).values
    last = tops[:, -1:]
    num_equal = (scaled == last).sum(1, keepdim=True) - (tops == last).sum(1, keepdim=True)
    return torch.cat([F.pad(tops, (0, MAX_SLICED_TOP_K - tops.shape[1]), value=-math.inf), num_equal], 1)


def keep_slice(logits: Tensor, params: SamplingTensors, tops: Tensor, rank: int) -> Tensor:
    """A slice's logits in float32, `REMOVED` for tokens that `filtered_logits` removes, for `race`.

    Rows with filters have a top_k of 1 to `MAX_SLICED_TOP_K`. Values that are not finite stay: `race` looks for them.

    logits      [num_rows, num_tokens]
    tops, rank  see `slice_borders`
    """
    border, num_equal = slice_borders(params, tops, rank)
    scaled = scaled_logits(logits, params).float()
    equal = scaled == border
    removed = (scaled < border) | (equal & (equal.cumsum(1, dtype=torch.int32) > num_equal))
    removed &= params.is_filtered().unsqueeze(1) & logits.isfinite()
    return logits.float().masked_fill(removed, REMOVED)


def slice_borders(params: SamplingTensors, tops: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The least logit / temperature that filters keep, and how many equals of it in a slice, both [num_rows, 1].

    tops  [num_rows, num_slices * (MAX_SLICED_TOP_K + 1)], `slice_tops` of the slices in the order of their tokens
    rank  index of the slice

    The sums of top_p are those of `filtered_logits`; where more than `MAX_SLICED_TOP_K` of a slice are equal, rounded.
    """
    num_rows, num_slices = len(tops), tops.shape[1] // (MAX_SLICED_TOP_K + 1)
    tops = tops.view(num_rows, num_slices, MAX_SLICED_TOP_K + 1)
    counts = F.pad(tops[..., -1:], (MAX_SLICED_TOP_K - 1, 0)) + 1
    ordered, order = tops[..., :-1].flatten(1).sort(dim=1, descending=True, stable=True)
    kept = kept_counts(ordered, params, counts=counts.flatten(1).gather(1, order))
    border = ordered.masked_fill(kept == 0, math.inf).amin(1, keepdim=True)
    at_border = torch.empty_like(kept).scatter_(1, order, kept.masked_fill(ordered != border, 0.0))
    return border, at_border.view(num_rows, num_slices, MAX_SLICED_TOP_K)[:, rank].sum(1, keepdim=True)


def filtered_logits(logits: Tensor, params: SamplingTensors) -> Tensor:
    """logits / temperature, with -inf for tokens that top_k, top_p and min_p, in that order, remove.

    top_k   keeps the k most probable tokens, and all with the same probability as the last of these
    top_p   keeps the smallest set of top tokens, of those left by top_k, with at least this mass; equals by id
    min_p   keeps the tokens, of those left by top_p, with at least min_p times the highest probability

    Each filter keeps the most probable token for any value. A greedy row (temperature 0) is divided by 1.
    """
    scaled = scaled_logits(logits, params)
    if not params.any_filter:
        return scaled
    ordered, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
    keep = keep_mask(ordered, params)
    return scaled.masked_fill(torch.empty_like(keep).scatter_(-1, token_ids, ~keep), -math.inf)


def scaled_logits(logits: Tensor, params: SamplingTensors) -> Tensor:
    """What filters compare: logits / temperature."""
    temperature = torch.where(params.temperature > 0, params.temperature, 1.0)
    return logits.to(accumulation_dtype(logits.dtype)) / temperature.unsqueeze(-1)


def keep_mask(ordered: Tensor, params: SamplingTensors, log_total: Tensor | None = None) -> Tensor:
    """Tokens that `filtered_logits` keeps, of logits in descending order -> [num_rows, num_logits] bool.

    log_total [num_rows, 1] is the log-sum-exp of all logits, needed if `ordered` has only the highest of them.
    """
    return kept_counts(ordered, params, log_total=log_total) > 0


def kept_counts(
    ordered: Tensor, params: SamplingTensors, *, counts: Tensor | None = None, log_total: Tensor | None = None
) -> Tensor:
    """How many tokens `filtered_logits` keeps -> [num_rows, num_logits] float, of whole numbers. See `keep_mask`.

    counts  tokens that a logit stands for, of the same shape; None: one. More than one only where top_k removes the
            logit, or it is the last that top_k keeps
    """
    num_logits, top_k, top_p = ordered.shape[-1], params.top_k, params.top_p
    k = torch.where(top_k > 0, top_k, num_logits).clamp(max=num_logits).long().unsqueeze(-1)
    keep = ordered >= ordered.gather(-1, k - 1)
    left = ordered.masked_fill(~keep, -math.inf)
    log_mass = (left if counts is None else left + counts.log()).logsumexp(-1, keepdim=True)
    if log_total is not None:
        log_mass = torch.where(top_k.unsqueeze(-1) > 0, log_mass, log_total)
    probs = (left - log_mass).exp()
    counts = torch.ones_like(probs) if counts is None else counts
    mass = probs * counts
    # A rounded sum may reach 1 before the last token: top_p = 1 keeps everything without arithmetic.
    room = torch.where((top_p >= 1).unsqueeze(-1), math.inf, top_p.unsqueeze(-1) - (mass.cumsum(-1) - mass))
    keep &= (room > 0) & (probs >= params.min_p.unsqueeze(-1) * probs[:, :1])
    kept = torch.where(keep, torch.minimum((room / probs).ceil(), counts), 0.0)
    kept[:, 0].clamp_(min=1.0)
    return kept


def finite_rows(logits: Tensor) -> Tensor:
    """Rows without NaN and infinity -> [num_rows] bool. Must precede masks, which write -inf."""
    low, high = logits.aminmax(dim=-1)  # both are NaN where any element is
    return (low > -math.inf) & (high < math.inf)


# The noise is counter-based: SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA
# 2014), whose n-th output is a mix of key + n * GOLDEN. Integers are int64 and wrap around.


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


GOLDEN = _signed(0x9E3779B97F4A7C15)
MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's shift is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = _mix_high(x)
    return x ^ _shift_right(x, 31)


def _mix_high(x: Tensor) -> Tensor:
    """`_mix` without its last step, which mainly mixes the low bits: it changes one of the upper 32."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    return (x ^ _shift_right(x, 27)) * MIX_2


def noise_keys(seed: Tensor, sample_index: Tensor, position: Tensor) -> Tensor:
    """The key of each row's noise; all [num_rows] int64."""
    key = _mix(seed + GOLDEN)
    key = _mix(key + sample_index + GOLDEN)
    return _mix(key + position + GOLDEN)


def exponential_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Exp(1) noise, float32, of keys and token ids: the inverse of the distribution function at 32 random bits."""
    bits = _shift_right(_mix_high(keys + (token_ids + 1) * GOLDEN), 32)
    # float32 rounds the highest of these to 1. The noise would be infinite, and the only token left impossible.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-uniform)


# -- logits processors and log-probabilities ---------------------------------------------------------------------------


def apply_token_bitmask(logits: Tensor, mask_index: Tensor, bitmask: Tensor) -> None:
    """Set logits of forbidden tokens to -inf, in place.

    Token t of row i is forbidden where bit t % 32 of bitmask[mask_index[i], t // 32] is 0. A mask_index of -1 forbids
    nothing.

    logits [num_rows, vocab_size], mask_index [num_rows] int32, bitmask [num_masks, ceil(vocab_size / 32)] int32
    """
    bits = (bitmask.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=bitmask.device)) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    rows = torch.nonzero(mask_index >= 0).squeeze(1)
    logits[rows] = logits[rows].masked_fill(forbidden[mask_index[rows].long()], -math.inf)


def packed_top_logprobs(logits: Tensor, num: int) -> Tensor:
    """Packed `token_logprobs` of each row's top token; logits [num_rows, vocab_size] -> [num_rows, 2 + 2 * num] int32.

    The words are: the bits of its log-probability as float32; its rank, 1, or 0 for non-finite logits; the top tokens;
    the bits of their log-probabilities. A vocabulary of fewer than num tokens is returned whole.
    """
    best, ids = logits.float().log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    best, ids = best[:, :num].contiguous().view(torch.int32), ids[:, :num].int()
    return torch.cat([best[:, :1], finite_rows(logits).int().unsqueeze(1), ids, best], 1)


def mask_bad_words(logits: Tensor, lines: Tensor, words: Tensor, last: Tensor) -> None:
    """Set the last token of each bad word to -inf where the word's other tokens end the sequence, in place.

    logits  [num_lines, vocab_size]
    lines   [num_sequences] int64, the line of each sequence
    words   [num_words, longest] int64, right-aligned, padded with -1 on the left
    last    [num_sequences, longest - 1] int, the last tokens of each sequence, padded with -2 on the left
    """
    before = words[:, :-1]
    hits = ((last.unsqueeze(1) == before) | (before < 0)).all(2)
    masked = torch.where(hits, -math.inf, 0.0).to(logits.dtype)
    logits.index_put_((lines.unsqueeze(1), words[:, -1]), masked, accumulate=True)  # waits for no device


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability and rank of one token a row, and the top tokens of each row.

    logits [num_rows, vocab_size], token_ids [num_rows] int64 -> (log-probabilities [num_rows], ranks [num_rows] int64
    from 1, top tokens [num_rows, num_top] int64 in descending order and equals by id, their log-probabilities
    [num_rows, num_top]). Equally probable tokens have the same rank.
    """
    logprobs = logits.to(accumulation_dtype(logits.dtype)).log_softmax(-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(1) + 1
    top, top_ids = logprobs.sort(dim=1, descending=True, stable=True)
    return chosen.squeeze(1), ranks, top_ids[:, :num_top], top[:, :num_top]
