"""Paged attention over ragged batches."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal, overload

import torch
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference.kv import dequantize_rows
from octavo.kernels.reference.norms import accumulation_dtype


@overload
def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int = 0,
    return_lse: Literal[False] = False,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor: ...
@overload
def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int = 0,
    return_lse: Literal[True],
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int = 0,
    return_lse: bool,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int = 0,
    return_lse: bool = False,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of a ragged batch over the paged KV cache (vLLM paper, equation 4).

    q           [num_tokens, num_heads, head_dim]; num_heads is a multiple of num_kv_heads, and neighbouring query
                heads share a K/V head
    window      sliding window: a query sees the last `window` keys, its own included. 0: all keys up to its own
    return_lse  also return log(sum(exp(scores))), [num_tokens, num_heads] float32 (float64 for float64 inputs), the
                input of `merge_attention`; a head's sink is one of its scores
    kv_scales   of a float8 pool, as for `kv_write`
    sinks       [num_heads] float32, one more score of each head's softmax, without a value (gpt-oss, arXiv 2508.10925).
                Of parts to be merged, one has them

    -> [num_tokens, num_heads, head_dim]. A row without keys (padding) is 0, its lse -inf.
    """
    head_dim, num_kv_heads = q.shape[2], kv_layer.shape[2]
    wide = accumulation_dtype(q.dtype)
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=wide)
    for s, (begin, end) in enumerate(pairwise(batch.query_start.tolist())):
        seq_len = int(batch.seq_lens[s])
        if begin == end or seq_len == 0:
            continue
        positions = torch.arange(seq_len - (end - begin), seq_len, device=q.device)
        first_key = max(0, int(positions[0]) - window + 1) if window else 0
        keys, values = gather_kv(kv_layer, batch.block_tables[s], first_key, seq_len, kv_scales)
        # Neighbouring query heads share a K/V head: [num_kv_heads, group, query_len, head_dim]
        grouped = q[begin:end].to(wide).view(end - begin, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = (
            grouped @ keys.to(wide).transpose(-1, -2).unsqueeze(1) * scale
        )  # [num_kv_heads, group, query_len, keys]
        hidden = visible_keys(positions, torch.arange(first_key, seq_len, device=q.device), window).logical_not()
        scores = scores.masked_fill(hidden, -math.inf)
        row_lse = scores.logsumexp(-1)  # [num_kv_heads, group, query_len]
        if sinks is not None:
            row_lse = row_lse.logaddexp(sinks.view(num_kv_heads, -1, 1))
        weights = (scores - row_lse.unsqueeze(-1)).exp()
        result = weights @ values.to(wide).unsqueeze(1)  # [num_kv_heads, group, query_len, head_dim]
        out[begin:end] = result.flatten(0, 1).transpose(0, 1).to(q.dtype)
        lse[begin:end] = row_lse.flatten(0, 1).T
    return (out, lse) if return_lse else out


def gather_kv(
    kv_layer: Tensor, block_ids: Tensor, start: int, end: int, kv_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """K and V of positions [start, end) of a sequence, each [num_kv_heads, end - start, head_dim].

    block_ids is the sequence's row of the block tables. Slots outside the range are not read: they may contain NaN.
    Rows of 8 bits are dequantised, to float32.
    """
    block_size = kv_layer.shape[3]
    first, last = start // block_size, cdiv(end, block_size)
    blocks = kv_layer[block_ids[first:last].long()]  # [blocks, 2, num_kv_heads, block_size, head_dim]
    rows = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [2, num_kv_heads, blocks * block_size, head_dim]
    rows = rows[:, :, start - first * block_size : end - first * block_size]
    if rows.dtype == torch.int8:
        rows = dequantize_rows(rows, torch.float32)
    elif kv_scales is not None:
        rows = rows.float() * kv_scales[:, :, None, None]
    keys, values = rows
    return keys, values


def visible_keys(query_positions: Tensor, key_positions: Tensor, window: int) -> Tensor:
    """Causal mask [queries, keys] bool: True where the query sees the key."""
    distance = query_positions.unsqueeze(-1) - key_positions
    return (distance >= 0) & (distance < window) if window else distance >= 0


def merge_attention(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys into attention over all of them.

    outs [parts, ..., head_dim], lses [parts, ...] -> (out [..., head_dim], lse [...]). A part without keys has lse -inf
    and is ignored; without any keys, the result is 0 and its lse -inf.
    """
    lse = lses.logsumexp(0)
    weights = torch.where(lses == -math.inf, 0.0, (lses - lse).exp())  # exp(-inf - -inf) would be NaN
    out = (weights.unsqueeze(-1) * outs.to(weights.dtype)).sum(0)
    return out.to(outs.dtype), lse
