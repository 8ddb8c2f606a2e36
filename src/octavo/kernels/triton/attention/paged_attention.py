"""Paged attention on a GPU: a decode kernel, a portable prefill kernel, and a prefill kernel for Hopper.

Decode (`decode_attention`, one query) is bound by memory, prefill (`prefill_attention`, `hopper_prefill_attention`) by
arithmetic. All kernels take ragged batches; a batch that mixes decode and prefill takes two launches. Memory after a
sequence's last token and before its window has no effect: it may hold NaN.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.decode import decode_attention
from octavo.kernels.triton.attention.prefill import prefill_attention
from octavo.kernels.triton.attention.prefill_tuning import prefers_hopper_prefill, supports_hopper_prefill
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
    """`reference.paged_attention` in float16, bfloat16 or float32; the pool in the same dtype, or in float8 with
    `kv_scales`.

    q may be a view whose last dimension is contiguous; the output is contiguous. head_dim is at most 256; multiples of
    8 are faster. Batches with the same shapes and host ints make the same launches, so they can be captured.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[2]
    assert (q.dtype == kv_layer.dtype) == (kv_scales is None) and q.stride(2) == 1, (
        q.dtype,
        kv_layer.dtype,
        q.stride(),
    )
    assert kv_layer.shape[4] == head_dim and kv_layer.stride()[3:] == (head_dim, 1), (q.shape, kv_layer.shape)
    assert num_heads % num_kv_heads == 0 and num_heads // num_kv_heads <= MAX_GROUP, (num_heads, num_kv_heads)
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:2] if return_lse else (0,), dtype=torch.float32)
    if num_tokens == 0:
        return (out, lse) if return_lse else out
    options: dict[str, Any] = {"scale": scale, "window": window, "kv_scales": kv_scales, "sinks": sinks}
    if batch.max_query_len <= 1:
        decode_attention(q, kv_layer, batch, out, lse, decode_only=True, **options)
    else:
        # If all queries are as long as the longest, none has length 1. The lengths themselves are on the device.
        mixed = num_tokens < batch.num_seqs * batch.max_query_len
        if window >= batch.max_seq_len:
            options["window"] = window = 0  # no sequence has that many keys
        on_hopper = kv_scales is None and not window and not batch.fixed_split and supports_hopper_prefill(q, kv_layer)
        if on_hopper and prefers_hopper_prefill(q, kv_layer, batch):
            # Only where the GPU has its instructions
            from octavo.kernels.triton.attention.prefill_hopper import hopper_prefill_attention

            hopper_prefill_attention(q, kv_layer, batch, out, lse, scale=scale, skip_single=mixed, sinks=sinks)
        else:
            prefill_attention(q, kv_layer, batch, out, lse, skip_single=mixed, **options)
        if mixed:
            decode_attention(q, kv_layer, batch, out, lse, decode_only=False, **options)
    return (out, lse) if return_lse else out
