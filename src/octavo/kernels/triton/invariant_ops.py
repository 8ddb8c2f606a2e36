"""The GPU's operations for `EngineArgs.batch_invariant`: the bits of a row depend on its own sequence alone.

Norms, activations, experts, rotary embedding and sampling of `triton.ops` are so already. Here products have one order
of addition (`linear.invariant`). There is no small-batch path, whose products are split. Every query attends by itself,
in the kernel of decode steps with fixed splits, whose order of addition depends on its position alone. Shared prefixes
are not read once for several sequences. Log-probabilities are those of one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels import reference
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.decode import decode_attention
from octavo.kernels.triton.attention.decode_schedule import SPLIT_KEYS
from octavo.kernels.triton.linear import invariant
from octavo.kernels.triton.ops import *  # noqa: F403
from octavo.kernels.triton.sampling.top_logprobs import token_logprobs_as_written

linear = invariant.linear
max_small_batch_tokens = reference.max_small_batch_tokens
token_logprobs = token_logprobs_as_written

MAX_QUERIES = 256
"""Queries of a launch: one program makes their schedule."""
MAX_SPLITS = 8192
"""Splits of a launch, over all its queries: each has scratch memory for the output of every head in float32."""
ALIGNED = 4
"""Queries of a launch are a multiple: int32 tensors keep their alignment, and each other one is a compilation."""


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
    """See `triton.ops.paged_attention`. Passes of the same shapes and host ints make the same launches."""
    out, lse = q.new_empty(q.shape), q.new_empty(0, dtype=torch.float32)
    for queries in _single_queries(batch, window):
        decode_attention(
            q, kv_layer, queries, out, lse, scale=scale, window=window, decode_only=True, kv_scales=kv_scales,
            sinks=sinks,
        )  # fmt: skip
    return out


def _single_queries(batch: RaggedBatch, window: int) -> Iterator[RaggedBatch]:
    """Batches, one for each launch, in which each query of the batch is a sequence of its own."""
    seqs = None
    starts, seen = batch.query_start, batch.seq_lens
    if batch.max_query_len > 1:
        key = "triton.invariant_queries"
        if key not in batch.derived:
            batch.derived[key] = _split_queries(batch)
        seqs, starts, seen = batch.derived[key]
    lines = 1 if seqs is not None else batch.lines_per_row
    num_keys = min(batch.max_seq_len, window or batch.max_seq_len)
    num_splits = cdiv(num_keys, SPLIT_KEYS) + 1  # a window may begin inside a tile
    step = ALIGNED * lines
    step *= max(1, min(MAX_QUERIES, MAX_SPLITS // num_splits) // step)
    for first in range(0, len(seen), step):
        part = slice(first, first + step)
        yield replace(
            batch,
            query_start=starts[first : first + step + 1],
            seq_lens=seen[part],
            block_tables=batch.block_tables[part if seqs is None else seqs[part]],
            max_query_len=1,
            # A schedule has the scratch memory of its launch: of several launches, only one at a time has it.
            derived=batch.derived if seqs is None and len(seen) <= step else {},
            fixed_split=True,
            common_prefix_lens=None,
            lines_per_row=lines,
        )


def _split_queries(batch: RaggedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """(sequence of each token, first token of each query, keys that each query sees), without the host waiting."""
    starts = torch.arange(len(batch.positions) + 1, dtype=torch.int32, device=batch.positions.device)
    tokens, ends = starts[:-1], batch.query_start[1:].contiguous()
    seqs = torch.searchsorted(ends, tokens, right=True)
    return seqs, starts, batch.seq_lens[seqs] - ends[seqs] + tokens + 1
