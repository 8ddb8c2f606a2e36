"""Which tile of which slice a program computes, and where the numbers of a state lie in the pool."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch


def has_whole_rows(states: Tensor, first: int, size: int) -> bool:
    """True if no row of `size` numbers, of those from `first` on, lies in two blocks."""
    return first % size == 0 and states.shape[1] % size == 0


def max_tiles(batch: RaggedBatch, size: int, skip: int = 0) -> int:
    """Programs for all tiles of `find_tile`: a bound that holds for other slices of a captured batch, too."""
    num_tokens = len(batch.positions)
    return batch.num_seqs if size == 1 else min(num_tokens // size + batch.num_seqs, num_tokens // (skip + 1))


@triton.jit
def count_tiles(count, SIZE: tl.constexpr, SKIP: tl.constexpr):
    """Tiles of SIZE tokens in slices of `count` tokens. A last tile with at most SKIP does not count."""
    return (count + (SIZE - 1 - SKIP)) // SIZE


@triton.jit
def find_tile(query_start, num_seqs, tile, SIZE: tl.constexpr, SKIP: tl.constexpr):
    """-> (sequence, tile in its slice) of a number of a tile. The sequence of a number past the last is num_seqs.

    Tiles of one token are for slices of at most one: there, the number is the sequence.
    """
    if SIZE == 1:
        return tile, 0
    else:
        SEQUENCES: tl.constexpr = 256
        sequence, own, end = 0, tile, 0
        for first in range(0, num_seqs, SEQUENCES):
            i = first + tl.arange(0, SEQUENCES)
            begin = tl.load(query_start + i, mask=i < num_seqs, other=0)
            count = tl.load(query_start + i + 1, mask=i < num_seqs, other=0) - begin
            num = tl.where(i < num_seqs, count_tiles(count, SIZE, SKIP), 0)
            is_before = (end + tl.cumsum(num, 0) <= tile) & (i < num_seqs)
            sequence += tl.sum(is_before.to(tl.int32), 0)
            own -= tl.sum(tl.where(is_before, num, 0), 0)
            end += tl.sum(num, 0)
        return sequence, own


@triton.jit
def first_tile(query_start, sequence, SIZE: tl.constexpr, SKIP: tl.constexpr):
    """The number of the first tile of a sequence."""
    SEQUENCES: tl.constexpr = 256
    tiles = tl.zeros([SEQUENCES], tl.int32)
    for first in range(0, sequence, SEQUENCES):
        i = first + tl.arange(0, SEQUENCES)
        begin = tl.load(query_start + i, mask=i < sequence, other=0)
        count = tl.load(query_start + i + 1, mask=i < sequence, other=0) - begin
        tiles += count_tiles(count, SIZE, SKIP)
    return tl.sum(tiles, 0)


@triton.jit
def places(table, number, column, mask, WIDTH: tl.constexpr, WHOLE_ROWS: tl.constexpr):
    """Offsets in the pool of some columns of rows of a state, [rows, columns].

    table       of the sequence
    number      [rows], of each row's first number
    mask        [rows, columns]: the others' offsets are of any value
    WIDTH       numbers of a block
    WHOLE_ROWS  see `has_whole_rows`
    """
    if WHOLE_ROWS:
        is_row = tl.max(mask.to(tl.int32), 1) > 0
        block = tl.load(table + number // WIDTH, mask=is_row, other=0).to(tl.int64)
        return (block * WIDTH + number % WIDTH)[:, None] + column[None, :]
    else:
        each = number[:, None] + column[None, :]
        block = tl.load(table + each // WIDTH, mask=mask, other=0).to(tl.int64)
        return block * WIDTH + each % WIDTH
