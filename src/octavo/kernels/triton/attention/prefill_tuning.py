"""Launch parameters of the prefill kernels, and which of them computes a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.capability import kernels_for, num_multiprocessors

HOPPER_ROWS = 128
"""(query, head) rows of a Hopper tile: two groups of 64, the rows of a matrix instruction."""
HOPPER_REGISTERS = 232
"""Registers of a thread in a consumer warp."""
MAX_HOPPER_HEAD_DIM = 256
"""Its registers hold no sums of larger heads."""


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Launch parameters of the portable prefill kernel.

    rows  rows of a tile: its queries times the query heads of a K/V head
    tile  keys read at a time
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def prefill_tuning(q: Tensor, max_query_len: int, group_size: int) -> PrefillTuning:
    """The fastest tuning on an H200 (benchmarks/kernels/gpu_check.py)."""
    head_dim = triton.next_power_of_2(q.shape[2])
    if q.dtype == torch.float32:  # for tests: products of float32 do not use the tensor cores
        return PrefillTuning(rows=32, tile=16 if head_dim > 128 else 32, num_warps=4, num_stages=2)
    if head_dim > 256:  # not measured: they fit into any GPU's 99 KiB
        return PrefillTuning(rows=16 if max_query_len * group_size <= 16 else 32, tile=16, num_warps=4, num_stages=2)
    tile = 32 if head_dim > 128 else 64
    if max_query_len * group_size <= 16:
        return PrefillTuning(rows=16, tile=tile, num_warps=4, num_stages=3)
    stages = 3 if head_dim <= 128 or kernels_for(q.device).shared_bytes > 128 << 10 else 2
    return PrefillTuning(rows=64, tile=tile, num_warps=4, num_stages=stages)


@dataclass(frozen=True, slots=True)
class HopperPrefillTuning:
    """Launch parameters of the Hopper prefill kernel.

    keys                keys of a tile
    k_stages, v_stages  tiles of K and of V in shared memory
    """

    keys: int
    k_stages: int
    v_stages: int


def hopper_prefill_tuning(head_dim: int) -> HopperPrefillTuning:
    """The fastest tuning on an H200 that fits into 227 KiB with the queries (benchmarks/kernels/gpu_vs_fa3.py)."""
    if head_dim <= 64:
        return HopperPrefillTuning(keys=128, k_stages=4, v_stages=4)
    if head_dim <= 128:
        return HopperPrefillTuning(keys=128, k_stages=3, v_stages=2)
    return HopperPrefillTuning(keys=64, k_stages=2, v_stages=2)


def supports_hopper_prefill(q: Tensor, kv_layer: Tensor) -> bool:
    """True if this kernel supports the tensors: Hopper, 16-bit dtypes, and strides of multiples of 16 bytes for TMA.

    Strides of the pool must also be multiples of one (block, head), as in the KV pool.
    """
    block_size, head_dim = kv_layer.shape[3:]
    box = block_size * head_dim
    return (
        kernels_for(q.device).hopper
        and q.dtype in (torch.bfloat16, torch.float16)
        and head_dim <= MAX_HOPPER_HEAD_DIM
        and head_dim % 8 == 0
        and block_size >= 8
        and q.stride(0) % 8 == 0
        and q.stride(1) % 8 == 0
        and q.data_ptr() % 16 == 0
        and kv_layer.data_ptr() % 16 == 0
        and all(stride % box == 0 for stride in kv_layer.stride()[:3])
    )


def prefers_hopper_prefill(q: Tensor, kv_layer: Tensor, batch: RaggedBatch) -> bool:
    """True if this kernel is faster than `prefill_attention`: a sequence fills a tile, or keys must be split."""
    packed = heads_per_tile(q, kv_layer)
    return batch.max_query_len * packed >= HOPPER_ROWS or may_split_keys(q, batch, packed)


def heads_per_tile(q: Tensor, kv_layer: Tensor) -> int:
    """Query heads of a tile (packed GQA): the largest power of two that divides the group.

    More heads leave fewer queries for a tile, so fewer rows are wasted where a sequence's queries end.
    """
    group = q.shape[1] // kv_layer.shape[2]
    return group & -group


def may_split_keys(q: Tensor, batch: RaggedBatch, packed: int) -> bool:
    """True if there are so few tiles that several programs could split one's keys.

    Only for small batches, because the merge is a second launch.
    """
    queries = HOPPER_ROWS // packed
    max_tiles = (q.shape[0] + batch.num_seqs * (queries - 1)) // queries
    return 2 * max_tiles * (q.shape[1] // packed) <= num_multiprocessors(q.device)
