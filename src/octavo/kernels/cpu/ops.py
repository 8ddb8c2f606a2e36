"""The CPU's operations: `reference`'s functions and signatures, the same numbers to float32's rounding.

Each operation has an implementation in plain torch. Those of a decode step have another in `native.cpp`, used where
there is a compiler: torch needs ten calls for one loop, and has no kernel that reads K and V through a block table.
Where plain torch is as fast (moving blocks, the rope table), the operation is the reference's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import native
from octavo.kernels.cpu.attention import paged_attention
from octavo.kernels.cpu.experts import experts_in, experts_out, pack_experts, route
from octavo.kernels.cpu.grouped_linear import keeps_groups
from octavo.kernels.cpu.packed_linear import embed, pack_groups
from octavo.kernels.cpu.recurrent import causal_conv, delta_gates, gated_delta_rule, gated_rms_norm, sigmoid_mul
from octavo.kernels.cpu.sampling import (
    apply_token_bitmask,
    finite_rows,
    keep_slice,
    race,
    sample,
    token_logprobs,
)
from octavo.kernels.cpu.step import (
    apply_row_logits_processors,
    commit_sampled_tokens,
    init_token_counts,
    packed_top_logprobs,
    prepare_decode_inputs,
    prepare_prefill_inputs,
    reject_drafts,
    sample_checked,
    write_logprobs,
)
from octavo.kernels.reference import (
    add_linear,
    block_copy,
    decide,
    few_rows_linear,
    gelu,
    kv_write,
    layer_norm,
    linear,
    make_normed_residual,
    max_small_batch_tokens,
    norm_linear,
    project_qkv,
    propose_drafts,
    rope_table,
    slice_tops,
    swap_in,
    swap_out,
    update_token_counts,
)

__all__ = [
    "add_linear",
    "add_rms_norm",
    "apply_row_logits_processors",
    "apply_token_bitmask",
    "block_copy",
    "causal_conv",
    "commit_sampled_tokens",
    "decide",
    "delta_gates",
    "experts_in",
    "experts_out",
    "few_rows_linear",
    "finite_rows",
    "gated_delta_rule",
    "gated_rms_norm",
    "gather_own_rows",
    "gelu",
    "gelu_mul",
    "init_token_counts",
    "keep_slice",
    "keeps_groups",
    "kv_write",
    "layer_norm",
    "linear",
    "make_normed_residual",
    "max_small_batch_tokens",
    "norm_linear",
    "pack_experts",
    "pack_groups",
    "packed_top_logprobs",
    "paged_attention",
    "prepare_decode_inputs",
    "prepare_prefill_inputs",
    "project_qkv",
    "propose_drafts",
    "race",
    "reject_drafts",
    "rms_norm",
    "rope_kv_write",
    "rope_table",
    "route",
    "sample",
    "sample_checked",
    "sigmoid_mul",
    "silu_mul",
    "slice_tops",
    "swap_in",
    "swap_out",
    "token_logprobs",
    "update_token_counts",
    "write_logprobs",
]


def gather_own_rows(table: Tensor, token_ids: Tensor, first: int) -> Tensor:
    """See `reference.gather_own_rows`."""
    rows = token_ids - first
    own = rows.clamp(0, len(table) - 1)
    return embed(table, own).masked_fill_((rows != own).unsqueeze(1), 0.0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`. float32 needs two passes over x instead of four."""
    x = x.contiguous()  # one row of several always is, and must not get other bits than many
    if native.supports_norm_weight(weight, x) and (library := native.library_for(x)) is not None:
        return library.add_rms_norm(x, None, weight, eps)[0]
    if x.dtype != torch.float32:
        return reference.rms_norm(x, weight, eps)
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale: Tensor = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`."""
    if native.supports_norm_weight(weight, x) and (library := native.library_for(x, residual)) is not None:
        return library.add_rms_norm(x, residual, weight, eps)
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`."""
    if (library := native.library_for(gate_up)) is not None:
        return library.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.gelu_mul`."""
    if (library := native.library_for(gate_up)) is not None:
        return library.gelu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.apply_rope`. Writes the halves in place instead of concatenating them."""
    if q.dtype != cos_sin.dtype:
        return reference.apply_rope(q, k, positions, cos_sin)
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, head_dim / 2] each
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


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
    """See `reference.rope_kv_write`."""
    if cos_sin.dtype == torch.float32 and native.supports_heads(q, kv_layer) and native.supports_norm_weight(q_norm, q):
        library = native.library()
        if library is not None:
            return library.rope_kv_write(q, k, v, positions, cos_sin, kv_layer, slot_mapping, q_norm, k_norm, eps)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = apply_rope(q, k, positions, cos_sin)
    kv_write(k, v, kv_layer, slot_mapping, kv_scales=kv_scales)
    return q
