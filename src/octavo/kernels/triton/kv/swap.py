"""Copies KV blocks between a GPU and the host, in Triton: all blocks of a step in one launch.

Pinned memory has an address on the device, so a kernel can read and write it over the bus. The copy engine takes a few
microseconds to start a copy and then runs at the bus's full rate. It is faster for blocks of megabytes, and reaches a
third of that rate for blocks of a tenth of the size (benchmarks/kernels/bench_swap.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import reference

WORD_BYTES = 8
"""A thread copies two words at a time: 16 bytes, the widest access."""


class SwapTuning(NamedTuple):
    """How a copy is distributed over programs.

    num_programs * chunk_bytes are in flight at a time. Reading host memory takes about 2 us, so 55 GB/s need 110 KB in
    flight, and several times that where latencies vary.

    num_programs  each occupies one multiprocessor until the copy ends; the others are left to the forward pass
    chunk_bytes   bytes of a block that a program copies at a time
    num_warps     of a program; each thread has chunk_bytes / num_warps / 32 bytes in flight, at most 128, in registers
    """

    num_programs: int = 32
    chunk_bytes: int = 32 * 1024
    num_warps: int = 8


TUNING = SwapTuning()


def swap_out(kv: Tensor, host_kv: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """`reference.swap_out`; kv and the ids are on a GPU, host_kv in pinned memory. Does not synchronize."""
    if not copy_blocks(kv, host_kv, src_ids, dst_ids, TUNING):
        reference.swap_out(kv, host_kv, src_ids, dst_ids)


def swap_in(host_kv: Tensor, kv: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """`reference.swap_in`; kv and the ids are on a GPU, host_kv in pinned memory. Does not synchronize."""
    if not copy_blocks(host_kv, kv, src_ids, dst_ids, TUNING):
        reference.swap_in(host_kv, kv, src_ids, dst_ids)


def copy_blocks(source: Tensor, target: Tensor, src_ids: Tensor, dst_ids: Tensor, tuning: SwapTuning) -> bool:
    """Copy blocks `src_ids` of source to blocks `dst_ids` of target; both ids are [num_blocks] int64.

    Returns False, and copies nothing, where the kernel does not support the layout. Program p copies every
    num_programs-th chunk, from chunk p on:

        block 3              block 9              block 4
        | 0  | 1  | 2  | 0  || 1  | 2  | 0  | 1  || 2  | 0  | ...      3 programs
    """
    block_bytes = source[0].nbytes
    if block_bytes % (2 * WORD_BYTES) or not (source.is_contiguous() and target.is_contiguous()):
        return False
    if num_blocks := src_ids.shape[0]:
        chunk = tuning.chunk_bytes // WORD_BYTES
        num_chunks = num_blocks * triton.cdiv(block_bytes, tuning.chunk_bytes)
        _copy_blocks[(min(tuning.num_programs, num_chunks),)](
            source.view(source.shape[0], -1).view(torch.int64),
            target.view(target.shape[0], -1).view(torch.int64),
            src_ids,
            dst_ids,
            num_chunks,
            BLOCK_WORDS=block_bytes // WORD_BYTES,
            CHUNK=chunk,
            num_warps=tuning.num_warps,
        )
    return True


# The ids are two rows of one tensor of any length, so their alignment varies.
@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=["src_ids", "dst_ids"])
def _copy_blocks(source, target, src_ids, dst_ids, num_chunks, BLOCK_WORDS: tl.constexpr, CHUNK: tl.constexpr):
    CHUNKS_PER_BLOCK: tl.constexpr = (BLOCK_WORDS + CHUNK - 1) // CHUNK
    for index in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        block, chunk = index // CHUNKS_PER_BLOCK, index % CHUNKS_PER_BLOCK
        word = chunk * CHUNK + tl.arange(0, CHUNK)
        mask = word < BLOCK_WORDS
        src = tl.load(src_ids + block) * BLOCK_WORDS  # int64: a pool has more than 2^31 words
        dst = tl.load(dst_ids + block) * BLOCK_WORDS
        # Each word is read once and written once: evict it first, to keep the rest of the caches.
        words = tl.load(source + src + word, mask=mask, eviction_policy="evict_first")
        tl.store(target + dst + word, words, mask=mask, eviction_policy="evict_first")
