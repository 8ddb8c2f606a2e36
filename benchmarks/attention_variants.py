"""Variants of paged attention as a ladder: each rung keeps the result and changes one idea.

    contiguous   no blocks: every sequence padded to the longest, the baseline of the ladder
    concat       gather a sequence's blocks, join them, attend as if they had always been one tensor
    online       one pass over the blocks, keeping a running maximum, sum and output; query heads that share a K/V
                 head share the read
    safe         two passes: the maximum first, then the sum; simpler, but every K is read twice
    batched      the queries of many sequences at once, block by block, out of one pool
    ragged       prompts, chunks and decode tokens of several sequences in one call, flattened, causal by position
    parallel     the same without a loop over sequences: a flat list of (query tile, block) pairs and a softmax over
                 segments of it, which is how a GPU's split-KV kernel divides its work

Every rung but the baseline has the signature of `reference.paged_attention`, so that a model runs on any of them; none
is fast. Sums are float32 (float64 for float64) whatever the data's dtype, and a maximum over nothing is -inf, which is
never subtracted from itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference import accumulation_dtype, visible_keys

Rung = Callable[..., Tensor]


class _Query(NamedTuple):
    """One query token: its row of q, and its visible keys, [first_key, end) of block_ids' slots."""

    row: int
    block_ids: list[int]
    first_key: int
    end: int


def _queries(batch: RaggedBatch, window: int) -> Iterator[_Query]:
    tables = batch.block_tables.tolist()
    positions = batch.positions.tolist()
    for s, (begin, end) in enumerate(pairwise(batch.query_start.tolist())):
        for row in range(begin, end):
            position = positions[row]
            yield _Query(row, tables[s], max(0, position - window + 1) if window else 0, position + 1)


def _blocks(query: _Query, kv_layer: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """(K, V) of each block that the query sees, [num_kv_heads, tokens seen, head_dim]; other slots are not read."""
    block_size = kv_layer.shape[3]
    for first in range(query.first_key // block_size * block_size, query.end, block_size):
        seen = slice(max(query.first_key - first, 0), min(query.end - first, block_size))
        keys, values = kv_layer[query.block_ids[first // block_size], :, :, seen].to(dtype)
        yield keys, values


def concat(q: Tensor, kv_layer: Tensor, batch: RaggedBatch, *, scale: float, window: int = 0) -> Tensor:
    """Rung 1: blocks joined into one tensor, K and V repeated for every query head. O(context) memory a query."""
    out = torch.zeros_like(q)
    wide = accumulation_dtype(q.dtype)
    for query in _queries(batch, window):
        blocks = list(_blocks(query, kv_layer, wide))
        group_size = q.shape[1] // kv_layer.shape[2]
        keys = torch.cat([k for k, _ in blocks], dim=1).repeat_interleave(group_size, dim=0)  # [num_heads, keys, dim]
        values = torch.cat([v for _, v in blocks], dim=1).repeat_interleave(group_size, dim=0)
        scores = torch.einsum("hd,hkd->hk", q[query.row].to(wide), keys) * scale
        out[query.row] = torch.einsum("hk,hkd->hd", scores.softmax(-1), values).to(q.dtype)
    return out


def online(q: Tensor, kv_layer: Tensor, batch: RaggedBatch, *, scale: float, window: int = 0) -> Tensor:
    """Rung 2: one pass over the blocks with online softmax (Milakov and Gimelshein, arXiv 1805.02867), grouped queries.

    What was summed up under an older maximum is scaled down when a block raises it: O(block_size) memory a query.
    """
    out = torch.zeros_like(q)
    for query in _queries(batch, window):
        grouped = _grouped(q[query.row], kv_layer)  # [num_kv_heads, group, head_dim]
        state = _Online.empty(grouped)
        for keys, values in _blocks(query, kv_layer, grouped.dtype):
            scores = torch.einsum("hgd,hkd->hgk", grouped, keys) * scale
            state = state.add(scores, values)
        out[query.row] = state.result().flatten(0, 1).to(q.dtype)
    return out


def safe(q: Tensor, kv_layer: Tensor, batch: RaggedBatch, *, scale: float, window: int = 0) -> Tensor:
    """Rung 2, the other way: the maximum in a first pass over the blocks, sum and output in a second."""
    out = torch.zeros_like(q)
    for query in _queries(batch, window):
        grouped = _grouped(q[query.row], kv_layer)  # [num_kv_heads, group, head_dim]
        highest = grouped.new_full(grouped.shape[:2], -math.inf)
        for keys, _ in _blocks(query, kv_layer, grouped.dtype):
            scores = torch.einsum("hgd,hkd->hgk", grouped, keys) * scale
            highest = torch.maximum(highest, scores.amax(-1))
        total = torch.zeros_like(highest)
        weighted = torch.zeros_like(grouped)
        for keys, values in _blocks(query, kv_layer, grouped.dtype):
            weights = (torch.einsum("hgd,hkd->hgk", grouped, keys) * scale - highest.unsqueeze(-1)).exp()
            total += weights.sum(-1)
            weighted += torch.einsum("hgk,hkd->hgd", weights, values)
        out[query.row] = (weighted / total.unsqueeze(-1)).flatten(0, 1).to(q.dtype)
    return out


def batched(q: Tensor, kv_layer: Tensor, batch: RaggedBatch, *, scale: float, window: int = 0) -> Tensor:
    """Rung 3: every query is a row with its own block table, and all rows take their j-th block together.

    No loop over sequences, but short rows wait for the longest: past their end they read the null block and mask it.
    """
    block_size = kv_layer.shape[3]
    grouped = _grouped(q, kv_layer)  # [num_tokens, num_kv_heads, group, head_dim]
    positions, seqs = batch.positions, _seq_of_token(batch)
    state = _Online.empty(grouped)
    for j in range(cdiv(batch.max_seq_len, block_size)):
        blocks = kv_layer[batch.block_tables[seqs, j].long()].to(grouped.dtype)  # [num_tokens, 2, kv_heads, size, dim]
        seen = visible_keys(positions, torch.arange(j * block_size, (j + 1) * block_size, device=q.device), window)
        keys, values = _zero_unseen(blocks, seen).unbind(1)  # [num_tokens, num_kv_heads, block_size, head_dim]
        scores = torch.einsum("thgd,thkd->thgk", grouped, keys) * scale
        state = state.add(scores.masked_fill(~seen[:, None, None], -math.inf), values)
    return state.result().flatten(1, 2).to(q.dtype)


def ragged(q: Tensor, kv_layer: Tensor, batch: RaggedBatch, *, scale: float, window: int = 0) -> Tensor:
    """Rung 4: one call for sequences of any query length, each with all its queries at once, masked by position."""
    out = torch.zeros_like(q)
    block_size = kv_layer.shape[3]
    grouped = _grouped(q, kv_layer)  # [num_tokens, num_kv_heads, group, head_dim]
    seq_lens = batch.seq_lens.tolist()
    for s, (begin, end) in enumerate(pairwise(batch.query_start.tolist())):
        queries = grouped[begin:end].permute(1, 2, 0, 3)  # [num_kv_heads, group, query_len, head_dim]
        state = _Online.empty(queries)
        for first in range(0, seq_lens[s], block_size):
            last = min(first + block_size, seq_lens[s])
            block = kv_layer[batch.block_tables[s, first // block_size].long()]
            keys, values = block[:, :, : last - first].to(grouped.dtype)  # [num_kv_heads, last - first, head_dim]
            scores = torch.einsum("hgtd,hkd->hgtk", queries, keys) * scale
            seen = visible_keys(batch.positions[begin:end], torch.arange(first, last, device=q.device), window)
            state = state.add(scores.masked_fill(~seen, -math.inf), values.unsqueeze(1))
        out[begin:end] = state.result().permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out


def parallel(
    q: Tensor, kv_layer: Tensor, batch: RaggedBatch, *, scale: float, window: int = 0, query_tile: int = 16
) -> Tensor:
    """Rung 5: no loop. Work is a flat list of (query tile, block) pairs, each a small attention of its own; a softmax
    over each tile's segment of the list joins them.

        tile       0 0 0 0 | 1 | 2 2 | 3 3 3        tiles 0 and 1: a sequence's chunk; 2 and 3: single queries
        block      0 1 2 3 | 0 | 0 1 | 0 1 2
    """
    block_size = kv_layer.shape[3]
    grouped = _grouped(q, kv_layer)
    wide = grouped.dtype
    # Tiles: at most query_tile neighbouring queries of one sequence.
    query_lens = batch.query_start.diff().long()
    tiles_of_seq = -(-query_lens // query_tile)
    seq_of_tile = torch.repeat_interleave(tiles_of_seq)  # [num_tiles]
    place = _count_within(tiles_of_seq)  # [num_tiles], 0, 1, .. in each sequence
    lane = torch.arange(query_tile, device=q.device)
    within = place.unsqueeze(1) * query_tile + lane  # [num_tiles, query_tile], which of its sequence's queries
    is_query = within < query_lens[seq_of_tile].unsqueeze(1)
    rows = (batch.query_start[seq_of_tile].long().unsqueeze(1) + within).where(is_query, 0)
    positions = batch.positions[rows].where(is_query, -1)  # a lane without a query is before every key
    # Pairs: each tile with the blocks up to its last query's.
    blocks_of_tile = positions.amax(1) // block_size + 1
    tile = torch.repeat_interleave(blocks_of_tile)  # [num_pairs]
    column = _count_within(blocks_of_tile)
    blocks = kv_layer[batch.block_tables[seq_of_tile[tile], column].long()].to(wide)
    key_positions = column.unsqueeze(1) * block_size + torch.arange(block_size, device=q.device)
    seen = visible_keys(positions[tile], key_positions.unsqueeze(1), window)  # [num_pairs, query_tile, block_size]
    keys, values = _zero_unseen(blocks, seen.any(1)).unbind(1)  # [num_pairs, num_kv_heads, block_size, head_dim]
    scores = torch.einsum("pthgd,phkd->phgtk", grouped[rows][tile], keys) * scale
    scores = scores.masked_fill(~seen[:, None, None], -math.inf)
    # The segmented softmax: a maximum, a sum and an output for each tile, [num_tiles, num_kv_heads, group, query_tile]
    lanes = (len(rows), *scores.shape[1:4])
    best = scores.amax(-1)
    segment = tile.view(-1, 1, 1, 1).expand_as(best)
    highest = scores.new_full(lanes, -math.inf).scatter_reduce(0, segment, best, "amax")
    weights = (scores - _finite(highest)[tile].unsqueeze(-1)).exp()
    total = scores.new_zeros(lanes).index_add(0, tile, weights.sum(-1))
    weighted = torch.einsum("phgtk,phkd->phgtd", weights, values)
    result = scores.new_zeros(*lanes, q.shape[2]).index_add(0, tile, weighted) / total.unsqueeze(-1)
    out = torch.zeros_like(q)
    out[rows[is_query]] = result.permute(0, 3, 1, 2, 4)[is_query].flatten(1, 2).to(q.dtype)
    return out


def contiguous(q: Tensor, kv_layer: Tensor, batch: RaggedBatch, *, scale: float, is_token: Tensor) -> Tensor:
    """The baseline: every sequence owns one run of slots as long as the longest could get, and all are padded alike.

    A "block" is here a whole sequence's run. is_token [num_seqs, slots] bool marks tokens, not padding, in rows of
    queries (the last of `batch.max_seq_len` slots) as well as keys. Slots, not positions, are in causal order.
    """
    num_seqs, num_keys, num_queries = batch.num_seqs, batch.max_seq_len, batch.max_query_len
    kv = kv_layer[batch.block_tables[:, 0].long(), :, :, :num_keys].to(accumulation_dtype(q.dtype))
    keys, values = kv.unbind(1)  # [num_seqs, num_kv_heads, num_keys, head_dim]
    queries = _grouped(q, kv_layer).unflatten(0, (num_seqs, num_queries))  # type: ignore[no-untyped-call]
    scores = torch.einsum("sthgd,shkd->shgtk", queries, keys) * scale
    slots = torch.arange(num_keys, device=q.device)
    seen = visible_keys(slots[num_keys - num_queries :], slots, 0) & is_token[:, None, :num_keys]
    weights = scores.masked_fill(~seen[:, None, None], -math.inf).softmax(-1)
    return torch.einsum("shgtk,shkd->sthgd", weights, values).reshape(q.shape).to(q.dtype)


RUNGS: dict[str, Rung] = {
    "concat": concat,
    "online": online,
    "safe": safe,
    "batched": batched,
    "ragged": ragged,
    "parallel": parallel,
}


class _Online(NamedTuple):
    """Softmax in progress: of the scores so far, the maximum, sum(exp(score - maximum)), and the values so weighted.

    highest, total [...], weighted [..., head_dim]
    """

    highest: Tensor
    total: Tensor
    weighted: Tensor

    @classmethod
    def empty(cls, q: Tensor) -> _Online:
        return cls(q.new_full(q.shape[:-1], -math.inf), q.new_zeros(q.shape[:-1]), torch.zeros_like(q))

    def add(self, scores: Tensor, values: Tensor) -> _Online:
        """Take in more keys: scores [..., queries, keys], -inf where not seen; values [..., keys, head_dim]."""
        highest = torch.maximum(self.highest, scores.amax(-1))
        base = _finite(highest)
        shrink = (self.highest - base).exp()
        weights = (scores - base.unsqueeze(-1)).exp()
        return _Online(
            highest,
            self.total * shrink + weights.sum(-1),
            self.weighted * shrink.unsqueeze(-1) + weights @ values,
        )

    def result(self) -> Tensor:
        return self.weighted / self.total.unsqueeze(-1)


def _finite(highest: Tensor) -> Tensor:
    """The maximum to subtract; 0 before the first key, because -inf - -inf is NaN."""
    return highest.where(highest != -math.inf, 0.0)


def _grouped(q: Tensor, kv_layer: Tensor) -> Tensor:
    """[..., num_heads, head_dim] -> [..., num_kv_heads, group, head_dim] to accumulate with: no K or V is repeated."""
    num_kv_heads, head_dim = kv_layer.shape[2], kv_layer.shape[4]
    return q.to(accumulation_dtype(q.dtype)).reshape(*q.shape[:-2], num_kv_heads, -1, head_dim)


def _zero_unseen(blocks: Tensor, seen: Tensor) -> Tensor:
    """Blocks [n, 2, num_kv_heads, block_size, head_dim] with 0 in unseen slots (seen [n, block_size]):
    unused slots may contain NaN, which a weight of 0 does not remove."""
    return blocks.masked_fill(~seen[:, None, None, :, None], 0.0)


def _seq_of_token(batch: RaggedBatch) -> Tensor:
    return torch.repeat_interleave(batch.query_start.diff().long())


def _count_within(counts: Tensor) -> Tensor:
    """[2, 1, 3] -> [0, 1, 0, 0, 1, 2]."""
    starts = counts.cumsum(0) - counts
    return torch.arange(int(counts.sum()), device=counts.device) - torch.repeat_interleave(starts, counts)
