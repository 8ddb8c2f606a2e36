"""Which queries each tile of a prefill kernel takes: laid out on the device, by one small kernel, once a step.

    sequence          0                1       2
    queries      | a b c d e f g |   | h |   | i j k l |        tiles of 4: abcd efg, h, ijkl

Tiles come in order of the keys they see, most first: what is begun last is short, and no program is left with a long
one. Keys are counted in tiles too, so that neighbours of one sequence are equal and stay together: they run at the same
time, and find each other's keys in the cache. That order needs no sort: how many tiles of a sequence see more than n
keys is plain arithmetic, so a tile's place in line is a sum over the sequences.
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
    """tiles  [bound, 4] int32: sequence, first token, number of queries, position of the first

    How many there are is the device's secret; the host knows a bound. Of tiles past the count only the sequence is
    written: -1.

    count  [1] int32
    """

    tiles: Tensor
    count: Tensor


def query_tiles(batch: RaggedBatch, queries: int, keys: int, num_tokens: int, *, skip_single: bool) -> QueryTiles:
    """Tiles of that many queries, for a kernel that reads that many keys at a time; kept for the step's other layers.

    skip_single: none for one query alone.
    """
    key = ("query_tiles", queries, keys, num_tokens, skip_single)
    found: QueryTiles | None = batch.derived.get(key)
    if found is None:
        bound = cdiv(num_tokens, queries) + batch.num_seqs
        tiles = torch.empty(bound, 4, dtype=torch.int32, device=batch.seq_lens.device)
        found = batch.derived[key] = QueryTiles(tiles, torch.empty(1, dtype=torch.int32, device=tiles.device))
        _lay_out[(batch.num_seqs + 1,)](
            batch.query_start,
            batch.seq_lens,
            found.tiles,
            found.count,
            bound,
            batch.num_seqs,
            QUERIES=queries,
            KEYS=keys,
            LEAST=2 if skip_single else 1,
            CHUNK=32,
        )
    return found


@triton.jit
def _lens(query_start, seq_lens, seq, num_seqs, QUERIES: tl.constexpr, LEAST: tl.constexpr):
    """(first token, query length, context length, number of tiles) of sequences; nothing behind the last."""
    alive = seq < num_seqs
    begin = tl.load(query_start + seq, mask=alive, other=0)
    query_len = tl.load(query_start + seq + 1, mask=alive, other=0) - begin
    seq_len = tl.load(seq_lens + seq, mask=alive, other=0)
    return begin, query_len, seq_len, tl.where(query_len >= LEAST, tl.cdiv(query_len, QUERIES), 0)


# Numbers that differ from batch to batch are not specialised on: every variant of a kernel is a compilation.
@triton.jit(do_not_specialize=["bound", "num_seqs"])
def _lay_out(
    query_start,
    seq_lens,
    tiles,
    count,
    bound,
    num_seqs,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A program a sequence, and one for the count and the tiles past it."""
    seq = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    if seq < num_seqs:
        begin, query_len, seq_len, num_tiles = _lens(query_start, seq_lens, seq, num_seqs, QUERIES, LEAST)
        before = seq_len - query_len
        for start in range(0, num_tiles, CHUNK):
            tile = start + lane
            num_keys = before + tl.minimum((tile + 1) * QUERIES, query_len)
            place = num_tiles - 1 - tile  # behind the later ones of its own sequence
            for other_start in range(0, num_seqs, CHUNK):
                other = other_start + lane
                _, other_query_len, other_seq_len, other_tiles = _lens(
                    query_start, seq_lens, other, num_seqs, QUERIES, LEAST
                )
                # Those with more tiles of keys go first; among equals, the earlier sequence's. Tile i of a sequence
                # sees more than n keys from i = (n - its keys before) // QUERIES on; the last ends with the sequence.
                fewer = (tl.cdiv(num_keys, KEYS)[:, None] - (other < seq).to(tl.int32)[None, :]) * KEYS
                first = tl.maximum(fewer - (other_seq_len - other_query_len)[None, :], 0) // QUERIES
                ahead = tl.where(fewer < other_seq_len[None, :], tl.maximum(other_tiles[None, :] - first, 0), 0)
                place += tl.sum(tl.where((other == seq)[None, :], 0, ahead), 1)
            mine = tile < num_tiles
            target = tiles + place * 4
            tl.store(target, tl.zeros([CHUNK], tl.int32) + seq, mask=mine)
            tl.store(target + 1, begin + tile * QUERIES, mask=mine)
            tl.store(target + 2, tl.minimum(query_len - tile * QUERIES, QUERIES), mask=mine)
            tl.store(target + 3, before + tile * QUERIES, mask=mine)
    else:
        total = 0
        for start in range(0, num_seqs, CHUNK):
            _, _, _, some = _lens(query_start, seq_lens, start + lane, num_seqs, QUERIES, LEAST)
            total += tl.sum(some, 0)
        tl.store(count, total)
        for start in range(total, bound, CHUNK):
            tile = start + lane
            tl.store(tiles + tile * 4, tl.full([CHUNK], -1, tl.int32), mask=tile < bound)
