"""Blocks between a GPU and the host, in Triton: all of a step in one launch.

Pinned memory has an address on the device, so a kernel can read and write it over the bus. The copy engine takes some
microseconds to start a move and then runs at the bus's full rate: that is the better way for blocks of megabytes, and a
third of the rate for blocks of a tenth of that (see benchmarks/kernels/bench_swap.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import reference

WORD_BYTES = 8
"""Threads copy two of them at a time: 16 bytes, as wide as an access is."""


class Grid(NamedTuple):
    """How a move is spread. In flight are num_programs * piece_bytes at a time: reading host memory takes some 2 us, so
    that 55 GB/s need 110 KB of it, and several times that where reads come back unevenly.

    num_programs  few, each of which stays on one of the device's multiprocessors for as long as there is anything to
                  move: all others are left to the step beside it
    piece_bytes   of a block, that a program copies at a time
    num_warps     of a program; each thread has piece_bytes / num_warps / 32 bytes in flight, 128 at most, in registers
    """

    num_programs: int = 32
    piece_bytes: int = 32 * 1024
    num_warps: int = 8


GRID = Grid()


def swap_out(kv: Tensor, host_kv: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """See `reference.swap_out`; kv and the ids are on a GPU, host_kv in pinned memory. Nothing here waits."""
    if not move(kv, host_kv, src_ids, dst_ids, GRID):
        reference.swap_out(kv, host_kv, src_ids, dst_ids)


def swap_in(host_kv: Tensor, kv: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """See `reference.swap_in`; likewise."""
    if not move(host_kv, kv, src_ids, dst_ids, GRID):
        reference.swap_in(host_kv, kv, src_ids, dst_ids)


def move(source: Tensor, target: Tensor, src_ids: Tensor, dst_ids: Tensor, grid: Grid) -> bool:
    """Blocks `src_ids` of one to blocks `dst_ids` of the other, [num_blocks] int64 each; False if it cannot be done so.

    A program takes every `num_programs`-th piece:

        block 3              block 9              block 4
        | 0  | 1  | 2  | 0  || 1  | 2  | 0  | 1  || 2  | 0  | ...      of 3 programs
    """
    block_bytes = source[0].nbytes
    if block_bytes % (2 * WORD_BYTES) or not (source.is_contiguous() and target.is_contiguous()):
        return False
    if num_blocks := src_ids.shape[0]:
        piece = grid.piece_bytes // WORD_BYTES
        num_pieces = num_blocks * triton.cdiv(block_bytes, grid.piece_bytes)
        _move_blocks[(min(grid.num_programs, num_pieces),)](
            source.view(source.shape[0], -1).view(torch.int64),
            target.view(target.shape[0], -1).view(torch.int64),
            src_ids,
            dst_ids,
            num_pieces,
            BLOCK_WORDS=block_bytes // WORD_BYTES,
            PIECE=piece,
            num_warps=grid.num_warps,
        )
    return True


# Of where the ids lie nothing is known: they are two rows of one tensor, and its length varies.
@triton.jit(do_not_specialize=["num_pieces"], do_not_specialize_on_alignment=["src_ids", "dst_ids"])
def _move_blocks(source, target, src_ids, dst_ids, num_pieces, BLOCK_WORDS: tl.constexpr, PIECE: tl.constexpr):
    PIECES: tl.constexpr = (BLOCK_WORDS + PIECE - 1) // PIECE  # of a block
    for number in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        block, piece = number // PIECES, number % PIECES
        word = piece * PIECE + tl.arange(0, PIECE)
        here = word < BLOCK_WORDS
        src = tl.load(src_ids + block) * BLOCK_WORDS  # int64: a pool has more than 2^31 words
        dst = tl.load(dst_ids + block) * BLOCK_WORDS
        # Read once, written once: let it push nothing else out of the caches.
        words = tl.load(source + src + word, mask=here, eviction_policy="evict_first")
        tl.store(target + dst + word, words, mask=here, eviction_policy="evict_first")
