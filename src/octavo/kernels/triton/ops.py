"""The operations of `reference` on a GPU, with the same signatures: in Triton, or in torch where no kernel exists.

Only this package imports triton, and only a GPU needs it. `capability` chooses the kernels of each GPU.
"""

from __future__ import annotations

from octavo.kernels.reference import (
    finite_rows,
    gelu,
    keep_slice,
    layer_norm,
    linear,
    rope_table,
    slice_tops,
)
from octavo.kernels.triton.activation import gelu_mul, silu_mul
from octavo.kernels.triton.attention.paged_attention import paged_attention
from octavo.kernels.triton.embedding import gather_own_rows
from octavo.kernels.triton.experts.expert_products import experts_in, experts_out
from octavo.kernels.triton.experts.grouped_experts import pack_experts
from octavo.kernels.triton.experts.route import route
from octavo.kernels.triton.kv.block_copy import block_copy
from octavo.kernels.triton.kv.swap import swap_in, swap_out
from octavo.kernels.triton.kv.write import kv_write, rope_kv_write
from octavo.kernels.triton.linear.grouped import keeps_groups, pack_groups
from octavo.kernels.triton.linear.skinny import (
    add_linear,
    few_rows_linear,
    make_normed_residual,
    norm_linear,
    project_qkv,
)
from octavo.kernels.triton.linear.tuning import max_small_batch_tokens
from octavo.kernels.triton.norms import add_rms_norm, rms_norm
from octavo.kernels.triton.recurrent.causal_conv import causal_conv
from octavo.kernels.triton.recurrent.delta_rule import gated_delta_rule
from octavo.kernels.triton.recurrent.gates import delta_gates, gated_rms_norm, sigmoid_mul
from octavo.kernels.triton.sampling.drafts import propose_drafts, reject_drafts
from octavo.kernels.triton.sampling.logits_processors import (
    apply_row_logits_processors,
    init_token_counts,
    update_token_counts,
)
from octavo.kernels.triton.sampling.sample import apply_token_bitmask, decide, race, sample, sample_checked
from octavo.kernels.triton.sampling.step_inputs import (
    commit_sampled_tokens,
    prepare_decode_inputs,
    prepare_prefill_inputs,
)
from octavo.kernels.triton.sampling.top_logprobs import packed_top_logprobs, token_logprobs, write_logprobs

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
