"""How programs of a product share its tiles, in Gluon: stream-K (arXiv 2301.03598).

Programs take whole tiles in rounds. The tiles of the last, partial round are cut into as many ranges of steps as there
are programs. The program that has a tile's first step adds the sums of the others, in order. It computes its part last
and they compute theirs first, so it seldom waits:

    steps      tile 6  | 0 1 2 3 4 5 | 0 1 2 3 4 5 |  tile 7
    program        0   | 0 0 0 1 1 1   2 2 2 3 3 3 |              4 programs, 8 tiles of 6 steps: 4 in a first round

A program has MIN_STEPS steps of the last round or more, because adding another's sums takes some time, too. Two groups
of four warps compute a tile, and exchange the sums of their own parts.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.kernels.triton.capability import num_multiprocessors


@functools.cache
def flags_of(device: torch.device) -> Tensor:
    """One for each group of warps: its sums are stored, and not yet read."""
    return torch.zeros(2 * num_multiprocessors(device), dtype=torch.int32, device=device)


def num_programs(device: torch.device, num_tiles: int, num_steps: int, min_steps: int) -> int:
    """Programs of a launch, of which each can have a multiprocessor to itself."""
    return min(num_multiprocessors(device), max(num_tiles, num_tiles * num_steps // min_steps))


@gluon.jit
def boundary(program, num_steps, last_steps, num_parts, MIN_STEPS: gl.constexpr):
    """First step of a program in the last round. No part of a tile has few steps."""
    step = gl.minimum(program, num_parts) * last_steps // num_parts
    within = step % num_steps
    after = gl.where(num_steps - within < MIN_STEPS // 2, step + num_steps - within, step)
    return gl.where(within < MIN_STEPS // 2, step - within, after)


@gluon.jit
def share(num_tiles, num_steps, MIN_STEPS: gl.constexpr):
    """(whole rounds, steps of the last round, programs with a part of it, this one's first step and end)."""
    num = gl.num_programs(0)
    program = gl.program_id(0)
    rounds = num_tiles // num
    last_tiles = num_tiles - rounds * num
    last_steps = last_tiles * num_steps
    num_parts = gl.maximum(gl.minimum(num, gl.maximum(last_tiles, last_steps // MIN_STEPS)), 1)
    begin = boundary(program, num_steps, last_steps, num_parts, MIN_STEPS)
    return rounds, last_steps, num_parts, begin, boundary(program + 1, num_steps, last_steps, num_parts, MIN_STEPS)


@gluon.jit
def num_items(rounds, begin, end, num_steps):
    """Number of a program's items, each a range of steps of a tile."""
    return rounds + gl.where(begin < end, (end - 1) // num_steps - begin // num_steps + 1, 0)


@gluon.jit
def load_item(item, rounds, begin, end, num_steps):
    """(tile, first step, end) of an item."""
    first_tile = begin // num_steps
    last = item - rounds + first_tile  # tile of the last round
    tile = gl.where(item < rounds, item * gl.num_programs(0) + gl.program_id(0), rounds * gl.num_programs(0) + last)
    first = gl.where((item == rounds), begin - first_tile * num_steps, 0)
    stop = gl.where(item < rounds, num_steps, gl.minimum(end - last * num_steps, num_steps))
    return tile, first, stop


@gluon.constexpr_function
def rows_layout(rows):
    """Of numbers [rows / 16, 16]: as a vector, a thread has those of the rows of its sums."""
    own = [[0, 8]] if rows == 64 else [[0, 8], [4, 0]]
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(own, lanes, [[1, 0], [2, 0]], [], [rows // 16, 16])


@gluon.jit
def _own(sums):
    """Sums [rows, columns] as a vector, in which each thread's are pieces of 16 bytes."""
    ROWS: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1]
    wide = sums.reshape([ROWS // 64, 4, 2, 8, COLUMNS // 8, 4, 2]).permute((0, 4, 1, 3, 5, 2, 6))
    return wide.reshape([ROWS * COLUMNS])


@gluon.jit
def store_sums(partial_sums, sums):
    """Stores a group's sums, to be added by `add_sums`."""
    flat = _own(sums)
    gl.store(partial_sums + gl.arange(0, flat.shape[0], flat.type.layout), flat)


@gluon.jit
def add_sums(partial_sums, sums):
    """sums + what another program has stored."""
    ROWS: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1]
    flat = _own(sums)
    flat += gl.load(partial_sums + gl.arange(0, flat.shape[0], flat.type.layout), cache_modifier=".cg")
    wide = flat.reshape([ROWS // 64, COLUMNS // 8, 4, 8, 4, 2, 2]).permute((0, 2, 5, 3, 1, 4, 6))
    return gl.convert_layout(wide.reshape([ROWS, COLUMNS]), sums.type.layout, assert_trivial=True)


@gluon.jit
def signal(flag):
    """The group's sums are stored."""
    gl.thread_barrier()
    gl.atomic_xchg(flag, 1, sem="release")


@gluon.jit
def wait(flag):
    """Waits for another program's sums, and makes room for the next."""
    while gl.atomic_cas(flag, 1, 0, sem="acquire") == 0:
        pass
