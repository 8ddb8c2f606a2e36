"""Sampling on the CPU: bitmasks, filters, the exponential race, log-probabilities.

numpy replaces torch where it is faster on a CPU: bit masks, sorting, argmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import native
from octavo.kernels.metadata import SamplingTensors
from octavo.kernels.reference.sampling import GOLDEN, MIX_1, MIX_2, REMOVED, noise_keys

NUM_CANDIDATES = 256
"""Top tokens that filters look at first. They nearly always suffice; sorting a vocabulary costs 20 times as much."""


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """See `reference.sample`. The algorithm depends on the row only: argmax for greedy, the top tokens for filtered
    rows, a sorted vocabulary only for rows whose filters keep more than these.
    """
    if params.all_greedy or not params.temperature.numpy().any():
        return argmax(logits)
    warm, filtered = params.temperature > 0, params.is_filtered()
    samplers = (_sample_greedy, ~warm), (_sample_all, warm & ~filtered), (_sample_filtered, filtered)
    return _sample_rows(logits, params, *samplers)


def race(logits: Tensor, params: SamplingTensors, first: int) -> Tensor:
    """See `reference.race`. Only winners get exact scores."""
    warm = params.temperature > 0
    if (library := native.library_for(logits)) is not None:
        tokens = library.sample(logits, params, first, is_checked=True)
        finite = tokens >= 0
    else:
        finite = finite_rows(logits)
        if not bool(finite.all()):
            logits = torch.where(finite.unsqueeze(1), logits, 0.0)  # sampling must not fail
        tokens = _sample_rows(logits, params, (_sample_greedy, ~warm), (partial(_sample_all, first=first), warm))
    winners = tokens.clamp_(min=0).unsqueeze(1)
    scores = logits.gather(1, winners).float()
    if warm.numpy().any():
        scores = reference.race_scores(scores, params, winners + first)
    return torch.cat([scores, winners + first, finite.unsqueeze(1)], 1)


def keep_slice(logits: Tensor, params: SamplingTensors, tops: Tensor, rank: int) -> Tensor:
    """See `reference.keep_slice`. numpy finds the few tokens that are kept."""
    border, num_equal = (x.numpy() for x in reference.slice_borders(params, tops, rank))
    scaled, kept = reference.scaled_logits(logits, params).float().numpy(), logits.float().clone()
    for row in (params.is_filtered() & finite_rows(logits)).nonzero().squeeze(1).tolist():
        ids = np.flatnonzero(scaled[row] >= border[row])
        equal = scaled[row, ids] == border[row]
        ids = ids[~equal | (equal.cumsum() <= num_equal[row])]
        values = kept[row, ids]
        kept[row] = REMOVED
        kept[row, ids] = values
    return kept


Sampler = Callable[[Tensor, SamplingTensors], Tensor]


def _sample_rows(logits: Tensor, params: SamplingTensors, *samplers: tuple[Sampler, Tensor]) -> Tensor:
    """The tokens of all rows, of pairs of a sampler and its rows, a mask."""
    tokens = torch.empty(len(logits), dtype=torch.int64)
    for sampler, selected in samplers:
        rows = selected.nonzero().squeeze(1)
        if len(rows) == len(logits):
            return sampler(logits, params)
        if len(rows):
            tokens[rows] = sampler(logits[rows], params.select(rows))
    return tokens


def _sample_greedy(logits: Tensor, params: SamplingTensors) -> Tensor:
    return argmax(logits)


def _sample_all(logits: Tensor, params: SamplingTensors, first: int = 0) -> Tensor:
    """Rows with a temperature and no filter. torch computes one at a time: its integers stay in the caches.

    first   token of the first column; the result counts from it
    """
    if (library := native.library_for(logits)) is not None:
        return library.sample(logits, params, first, is_checked=False)
    keys = noise_keys(params.seed, params.sample_index, params.position) + torch.tensor(first) * GOLDEN
    wide = reference.accumulation_dtype(logits.dtype)
    counters = torch.arange(1, logits.shape[1] + 1).mul_(GOLDEN)
    bits, scratch = torch.empty_like(counters), torch.empty_like(counters)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    for row, key in enumerate(keys):
        noise = _exponential_noise(key, counters, bits, scratch)
        scores = logits[row].to(wide) / params.temperature[row]
        tokens[row] = argmax(scores.sub_(noise.log_()))
    return tokens


def _exponential_noise(key: Tensor, counters: Tensor, bits: Tensor, scratch: Tensor) -> Tensor:
    """`reference.exponential_noise` of one key, computed in place; counters are (token_id + 1) * GOLDEN."""
    torch.add(counters, key, out=bits)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        torch.bitwise_right_shift(bits, shift, out=scratch)
        bits.bitwise_xor_(scratch.bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    upper = bits.bitwise_right_shift_(32).bitwise_and_((1 << 32) - 1)
    uniform = upper.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _sample_filtered(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Rows with a temperature and a filter."""
    if logits.shape[1] <= NUM_CANDIDATES:
        return reference.sample(logits, params)
    scaled = reference.scaled_logits(logits, params)
    token_ids = scaled.topk(NUM_CANDIDATES, sorted=False).indices.sort().values  # equals in the order of ids
    top_logits, order = scaled.gather(1, token_ids).sort(descending=True, stable=True)
    token_ids = token_ids.gather(1, order)
    keep = reference.keep_mask(top_logits, params, log_total=_log_totals(scaled))
    keys = noise_keys(params.seed, params.sample_index, params.position)
    noise = reference.exponential_noise(keys.unsqueeze(1), token_ids)
    scores = (top_logits - noise.log_()).masked_fill_(~keep, -math.inf)
    tokens = token_ids.gather(1, scores.argmax(1, keepdim=True)).squeeze(1)
    # No other token has a higher logit than the last candidate. A row is complete if the last candidate is removed by a
    # filter, with a logit below all kept ones, and if top_k keeps only candidates.
    last = top_logits[:, -1]
    last_of_top_k = top_logits.gather(1, params.top_k.long().clamp(1, NUM_CANDIDATES).sub_(1).unsqueeze(1)).squeeze(1)
    complete = (last < top_logits.masked_fill(~keep, math.inf).amin(1)) & ((params.top_k <= 0) | (last < last_of_top_k))
    complete |= last == -math.inf  # masks left fewer tokens than candidates
    if not bool(complete.all()):
        rows = (~complete).nonzero().squeeze(1)
        tokens[rows] = reference.sample(logits[rows], params.select(rows))
    return tokens


def _log_totals(logits: Tensor) -> Tensor:
    """logsumexp of each row, [num_rows, 1]. One by one: the bits of torch's depend on the number of rows."""
    return torch.stack([row.logsumexp(0, keepdim=True) for row in logits])


def argmax(logits: Tensor) -> Tensor:
    """argmax over the last dimension, the first of equals -> int64. numpy's has memory speed, torch's a tenth."""
    wide = logits.to(reference.accumulation_dtype(logits.dtype))
    return torch.as_tensor(wide.numpy(force=True).argmax(-1))


def finite_rows(logits: Tensor) -> Tensor:
    """See `reference.finite_rows`. Checks sums of rows first, and each number only where a sum is not finite: a sum of
    finite numbers may overflow."""
    finite = logits.sum(-1).isfinite()
    if not bool(finite.all()):
        rows = (~finite).nonzero().squeeze(1)
        finite[rows] = reference.finite_rows(logits[rows])
    return finite


# -- bitmasks and log-probabilities ------------------------------------------------------------------------------------


def apply_token_bitmask(logits: Tensor, mask_index: Tensor, bitmask: Tensor) -> None:
    """See `reference.apply_token_bitmask`. numpy unpacks bits."""
    octets, forbidden = bitmask.numpy().view(np.uint8), dict[int, Tensor]()
    for row, mask in zip(logits, mask_index.tolist(), strict=True):
        if mask >= 0:
            if mask not in forbidden:  # a batch may have room for more masks than it has
                bits = np.unpackbits(~octets[mask], count=logits.shape[1], bitorder="little")
                forbidden[mask] = torch.from_numpy(bits.view(np.bool_))
            row.masked_fill_(forbidden[mask], -torch.inf)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.token_logprobs`. Sorts only tokens with at least the logit of the last top token."""
    if num_top > NUM_CANDIDATES or num_top > logits.shape[1]:
        return reference.token_logprobs(logits, token_ids, num_top)
    wide = logits.to(reference.accumulation_dtype(logits.dtype))
    chosen = wide.gather(1, token_ids.unsqueeze(1))
    last = wide.topk(num_top, sorted=False).values.amin(1) if num_top else chosen
    ranks, top_ids = [], []
    for row, own_logit, bound in zip(wide.numpy(), chosen.numpy(), last.numpy(), strict=True):  # numpy counts faster
        ranks.append(np.count_nonzero(row > own_logit) + 1)
        if num_top:
            ids = np.flatnonzero(row >= bound)
            top_ids.append(ids[np.argsort(-row[ids], kind="stable")[:num_top]])
    best = torch.from_numpy(np.array(top_ids, dtype=np.int64).reshape(len(wide), num_top))
    log_total = _log_totals(wide)
    return (chosen - log_total).squeeze(1), torch.tensor(ranks), best, wide.gather(1, best) - log_total
