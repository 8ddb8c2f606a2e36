"""Paged attention on a GPU: one kernel for queries of length 1, one for longer ones, and one for long ones on Hopper.

Decoding (`decode_attention`) is bound by memory, longer queries (`chunk_attention`, `prefill_attention`) by arithmetic.
All are ragged; a batch that mixes them takes two launches. Memory behind a sequence's last token, and before its
window, never counts: it may hold NaN.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.decode import decode_attention
from octavo.kernels.triton.attention.prefill import chunk_attention
from octavo.kernels.triton.attention.prefill_hopper import can_prefill, is_worth_it, prefill_attention
from octavo.kernels.triton.attention.softmax import MAX_GROUP


@overload
def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int = 0,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def paged_attention(
    q: Tensor, kv_layer: Tensor, batch: RaggedBatch, *, scale: float, window: int = 0, return_lse: Literal[True]
) -> tuple[Tensor, Tensor]: ...
@overload
def paged_attention(
    q: Tensor, kv_layer: Tensor, batch: RaggedBatch, *, scale: float, window: int = 0, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]: ...
def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `reference.paged_attention`; float16, bfloat16 or float32, q and the pool alike.

    q may be a view whose last dimension is contiguous; the output is contiguous. head_dim is any up to 256, a multiple
    of 8 for speed. All launches are the same for batches of the same shapes and host ints: they can be captured.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[2]
    assert q.dtype == kv_layer.dtype and q.stride(2) == 1, (q.dtype, kv_layer.dtype, q.stride())
    assert kv_layer.shape[4] == head_dim and kv_layer.stride()[3:] == (head_dim, 1), (q.shape, kv_layer.shape)
    assert num_heads % num_kv_heads == 0 and num_heads // num_kv_heads <= MAX_GROUP, (num_heads, num_kv_heads)
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:2] if return_lse else (0,), dtype=torch.float32)
    if num_tokens == 0:
        return (out, lse) if return_lse else out
    if batch.max_query_len <= 1:
        decode_attention(q, kv_layer, batch, out, lse, scale=scale, window=window, alone=True)
    else:
        # Where all queries are as long as the longest, none has length 1. Only the device could say more.
        mixed = num_tokens < batch.num_seqs * batch.max_query_len
        if window >= batch.max_seq_len:
            window = 0  # nobody has that many keys
        on_hopper = not window and not batch.fixed_split and can_prefill(q, kv_layer)
        if on_hopper and is_worth_it(q, kv_layer, batch):
            prefill_attention(q, kv_layer, batch, out, lse, scale=scale, skip_single=mixed)
        else:
            chunk_attention(q, kv_layer, batch, out, lse, scale=scale, window=window, skip_single=mixed)
        if mixed:
            decode_attention(q, kv_layer, batch, out, lse, scale=scale, window=window, alone=False)
    return (out, lse) if return_lse else out
