"""Writes, copies and swaps of K and V in the paged pool."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference.norms import NormedResidual, norm_linear, rms_norm
from octavo.kernels.reference.rope import apply_rope

SCALE_BYTES = 2
"""Bytes at the end of an int8 row: its scale in float16."""


def quantize_rows(x: Tensor) -> Tensor:
    """x [..., head_dim] -> [..., head_dim + SCALE_BYTES] int8. x is int8 * scale, to half a scale.

    The scale is rounded to float16 first, so that the values are rounded by what they will be multiplied with. A row
    that is not finite gets such a scale.
    """
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).half()
    values = (wide / scale.float()).nan_to_num(0.0).clamp(-127, 127).round().to(torch.int8)
    return torch.cat((values, scale.view(torch.int8)), dim=-1)


def dequantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse: [..., head_dim + SCALE_BYTES] int8 -> [..., head_dim], computed in float32."""
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float16).float()
    return rows[..., :-SCALE_BYTES].float().mul_(scale).to(dtype)


def head_dim_of(kv_layer: Tensor) -> int:
    """The size of a K/V head, whatever the pool's dtype."""
    return kv_layer.shape[-1] - (SCALE_BYTES if kv_layer.dtype == torch.int8 else 0)


def to_float8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., num_kv_heads, head_dim] / scale [num_kv_heads], cut off at the dtype's limit. NaN if it is not finite."""
    wide, limit = x.float() / scale.unsqueeze(-1), torch.finfo(dtype).max
    return wide.clamp(-limit, limit).masked_fill_(~wide.isfinite(), torch.nan).to(dtype)


def kv_write(k: Tensor, v: Tensor, kv_layer: Tensor, slot_mapping: Tensor, *, kv_scales: Tensor | None = None) -> None:
    """Write K and V of each token to its slot; k, v [num_tokens, num_kv_heads, head_dim], slot_mapping [num_tokens].

    kv_scales  [2, num_kv_heads] float32, for a pool in float8: K is what it holds times the first, V times the second

    Padding tokens have slots of the null block. Runs before attention: a token attends to itself.
    """
    block_size = kv_layer.shape[3]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    if kv_layer.dtype == torch.int8:
        k, v = quantize_rows(k), quantize_rows(v)
    if kv_scales is not None:
        k, v = (_indexable(to_float8(x, s, kv_layer.dtype)) for x, s in zip((k, v), kv_scales, strict=True))
    kv_layer = _indexable(kv_layer)
    kv_layer[block_ids, 0, :, offsets] = k.to(kv_layer.dtype)
    kv_layer[block_ids, 1, :, offsets] = v.to(kv_layer.dtype)


def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    kv_layer: Tensor,
    slot_mapping: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Fused operations between the QKV projection and attention -> q, rotated.

    `rms_norm` of q's and k's heads if q_norm and k_norm [head_dim] are given, then `apply_rope` and `kv_write`. Shapes
    as there.
    """
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = apply_rope(q, k, positions, cos_sin)
    kv_write(k, v, kv_layer, slot_mapping, kv_scales=kv_scales)
    return q


def split_heads(projected: Tensor, kv_layer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] into q, k and v for `rope_kv_write`."""
    num_kv_heads = kv_layer.shape[2]
    heads = projected.view(len(projected), -1, head_dim_of(kv_layer))
    q, k, v = torch.split(heads, [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v


def project_qkv(
    residual: NormedResidual,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    kv_layer: Tensor,
    batch: RaggedBatch,
    cos_sin: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """All operations before attention: `norm_linear` with the QKV weight, then `rope_kv_write` -> q, rotated.

    weight [(num_heads + 2 * num_kv_heads) * head_dim, size], bias [(num_heads + 2 * num_kv_heads) * head_dim]
    """
    q, k, v = split_heads(norm_linear(residual, eps, weight, bias), kv_layer)
    return rope_kv_write(
        q, k, v, batch.positions, cos_sin, kv_layer, batch.slot_mapping, q_norm=q_norm, k_norm=k_norm, eps=norm_eps,
        kv_scales=kv_scales,
    )  # fmt: skip


def _indexable(kv: Tensor) -> Tensor:
    """The pool, in float8 as bytes: torch does not index float8."""
    return kv.view(torch.uint8) if kv.is_floating_point() and kv.element_size() == 1 else kv


def block_copy(kv: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """Copy whole blocks of all layers, for copy-on-write. All sources are read before any target is written."""
    kv = _indexable(kv)
    kv.index_copy_(0, dst_ids, kv.index_select(0, src_ids))


def swap_out(kv: Tensor, host_kv: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """Copy device blocks `src_ids` to host blocks `dst_ids`. The pools differ in their number of blocks only."""
    kv, host_kv = _indexable(kv), _indexable(host_kv)
    host_kv.index_copy_(0, dst_ids.to(host_kv.device), kv.index_select(0, src_ids).to(host_kv.device))


def swap_in(host_kv: Tensor, kv: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """Copy host blocks `src_ids` to device blocks `dst_ids`."""
    kv, host_kv = _indexable(kv), _indexable(host_kv)
    kv.index_copy_(0, dst_ids, host_kv.index_select(0, src_ids.to(host_kv.device)).to(kv.device))
