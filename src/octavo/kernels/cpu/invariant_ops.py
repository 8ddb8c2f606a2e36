"""The CPU's operations for `EngineArgs.batch_invariant`: the bits of a row depend on its own sequence alone.

Most of `cpu.ops` are so already. Two are not. Attention of a chunk adds in another order than attention of a single
query, and its order depends on where the chunk begins: here each query is computed by itself. torch's GELU has other
last bits in its vector code than in the scalar code for the end of a tensor: here it is read from a table.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.cpu import attention, native
from octavo.kernels.cpu.ops import *  # noqa: F403
from octavo.kernels.metadata import RaggedBatch

QUERIES = 64
"""Queries of one call: each has scratch memory for every 512 of its keys."""


def paged_attention(  # type: ignore[no-redef]
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int = 0,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `reference.paged_attention`. The heads are those that `native.supports_sizes`."""
    library = native.library()
    if batch.max_query_len == 1 or library is None:
        return attention.paged_attention(
            q, kv_layer, batch, scale=scale, window=window, kv_scales=kv_scales, sinks=sinks
        )
    key = "cpu.invariant_attention", batch.block_tables.data_ptr()
    if key not in batch.derived:
        batch.derived[key] = _single_queries(batch)
    out = torch.zeros_like(q := q.contiguous())
    for queries in batch.derived[key]:
        library.attention(q, kv_layer, queries, out, None, scale=scale, window=window, sinks=sinks)
    return out


def _single_queries(batch: RaggedBatch) -> list[native.Queries]:
    seqs = torch.repeat_interleave(batch.query_start.diff())  # [num_tokens], the sequence of each
    rows = torch.arange(len(seqs))
    seen = (batch.seq_lens[seqs] - batch.query_start[1:][seqs] + rows + 1).int()
    parts = zip(*(torch.split(tensor, QUERIES) for tensor in (rows, seen, seqs)), strict=True)
    return [native.Queries(rows, seen, batch.block_tables[seqs]) for rows, seen, seqs in parts]


def gelu_mul(gate_up: Tensor) -> Tensor:  # type: ignore[no-redef]
    """See `reference.gelu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, "tanh").mul_(up)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:  # type: ignore[no-redef]
    """See `reference.gelu`; x bfloat16."""
    return _gelu_table(approximate).take(x.view(torch.int16).long().bitwise_and_(0xFFFF))


@functools.cache
def _gelu_table(approximate: str) -> Tensor:
    """GELU of all bfloat16 numbers, in the order of their bits."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    return F.gelu(bits.view(torch.bfloat16), approximate=approximate)
