"""Assigns the queries of a ragged batch to tiles of a prefill kernel, on the device, once a step.

    sequence          0                1       2
    queries      | a b c d e f g |   | h |   | i j k l |        tiles of 4: abcd efg, h, ijkl

Tiles are ordered by the number of keys that they see, most first. The last tiles to start are then short, and no
program ends late. Keys are counted in tiles as well, so neighbouring tiles of a sequence compare equal and stay
adjacent: they run at the same time and find each other's keys in the cache. The order needs no sort. The number of a
sequence's tiles that see more than n keys is plain arithmetic, so a tile's index is a sum over the sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Tiles of queries. The count is known on the device only; the host uses an upper bound.

    tiles  [bound, 4] int32: sequence, first token, number of queries, position of the first query. In tiles past the
           count only the sequence is written: -1
    count  [1] int32
    """

    tiles: Tensor
    count: Tensor


def query_tiles(batch: RaggedBatch, queries: int, keys: int, num_tokens: int, *, skip_single: bool) -> QueryTiles:
    """Tiles of up to `queries` queries, for a kernel that reads `keys` keys at a time; cached for the other layers.

    skip_single  make no tile for sequences with a single query
    """
    key = ("query_tiles", queries, keys, num_tokens, skip_single)
    made: QueryTiles | None = batch.derived.get(key)
    if made is None:
        bound = cdiv(num_tokens, queries) + batch.num_seqs
        tiles = torch.empty(bound, 4, dtype=torch.int32, device=batch.seq_lens.device)
        made = batch.derived[key] = QueryTiles(tiles, torch.empty(1, dtype=torch.int32, device=tiles.device))
        _fill_tiles[(batch.num_seqs + 1,)](
            batch.query_start,
            batch.seq_lens,
            made.tiles,
            made.count,
            bound,
            batch.num_seqs,
            QUERIES=queries,
            KEYS=keys,
            MIN_QUERIES=2 if skip_single else 1,
            CHUNK=32,
        )
    return made


@triton.jit
def _load_lens(query_start, seq_lens, seq, num_seqs, QUERIES: tl.constexpr, MIN_QUERIES: tl.constexpr):
    """(first token, query length, context length, number of tiles) of sequences; zeros past the last."""
    mask = seq < num_seqs
    begin = tl.load(query_start + seq, mask=mask, other=0)
    query_len = tl.load(query_start + seq + 1, mask=mask, other=0) - begin
    seq_len = tl.load(seq_lens + seq, mask=mask, other=0)
    return begin, query_len, seq_len, tl.where(query_len >= MIN_QUERIES, tl.cdiv(query_len, QUERIES), 0)


# Numbers that vary between batches are not specialised on: every variant of a kernel is a compilation.
@triton.jit(do_not_specialize=["bound", "num_seqs"])
def _fill_tiles(
    query_start,
    seq_lens,
    tiles,
    count,
    bound,
    num_seqs,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_QUERIES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program for each sequence, and one for the count and the tiles past it."""
    seq = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    if seq < num_seqs:
        begin, query_len, seq_len, num_tiles = _load_lens(query_start, seq_lens, seq, num_seqs, QUERIES, MIN_QUERIES)
        context_len = seq_len - query_len
        for start in range(0, num_tiles, CHUNK):
            tile = start + lane
            num_keys = context_len + tl.minimum((tile + 1) * QUERIES, query_len)
            index = num_tiles - 1 - tile  # after the later tiles of its own sequence
            for other_start in range(0, num_seqs, CHUNK):
                other = other_start + lane
                _, other_query_len, other_seq_len, other_tiles = _load_lens(
                    query_start, seq_lens, other, num_seqs, QUERIES, MIN_QUERIES
                )
                # Tiles with more tiles of keys come first; among equals, those of the earlier sequence. Tile i of a
                # sequence sees more than n keys from i = (n - context_len) // QUERIES on; the last tile ends with it.
                shorter = (tl.cdiv(num_keys, KEYS)[:, None] - (other < seq).to(tl.int32)[None, :]) * KEYS
                first = tl.maximum(shorter - (other_seq_len - other_query_len)[None, :], 0) // QUERIES
                num_before = tl.where(shorter < other_seq_len[None, :], tl.maximum(other_tiles[None, :] - first, 0), 0)
                index += tl.sum(tl.where((other == seq)[None, :], 0, num_before), 1)
            mask = tile < num_tiles
            tile_ptr = tiles + index * 4
            tl.store(tile_ptr, tl.zeros([CHUNK], tl.int32) + seq, mask=mask)
            tl.store(tile_ptr + 1, begin + tile * QUERIES, mask=mask)
            tl.store(tile_ptr + 2, tl.minimum(query_len - tile * QUERIES, QUERIES), mask=mask)
            tl.store(tile_ptr + 3, context_len + tile * QUERIES, mask=mask)
    else:
        total = 0
        for start in range(0, num_seqs, CHUNK):
            _, _, _, tile_counts = _load_lens(query_start, seq_lens, start + lane, num_seqs, QUERIES, MIN_QUERIES)
            total += tl.sum(tile_counts, 0)
        tl.store(count, total)
        for start in range(total, bound, CHUNK):
            tile = start + lane
            tl.store(tiles + tile * 4, tl.full([CHUNK], -1, tl.int32), mask=tile < bound)
