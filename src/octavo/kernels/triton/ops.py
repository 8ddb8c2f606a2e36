"""The GPU's fast path: `reference`'s functions and signatures, in Triton where that is written, else in torch.

Only a GPU needs this module, and only it needs triton.
"""

from __future__ import annotations

from octavo.kernels.reference import (
    apply_rules,
    finite_rows,
    layer_norm,
    rope_table,
)
from octavo.kernels.triton.activation import gelu_mul, silu_mul
from octavo.kernels.triton.attention.paged_attention import paged_attention
from octavo.kernels.triton.kv.block_copy import block_copy
from octavo.kernels.triton.kv.swap import swap_in, swap_out
from octavo.kernels.triton.kv.write import kv_write, rope_kv_write
from octavo.kernels.triton.linear.skinny import add_linear, begin_stream, max_thin_tokens, norm_linear, project_heads
from octavo.kernels.triton.norms import add_rms_norm, rms_norm
from octavo.kernels.triton.sampling.logits_processors import apply_row_rules, note_tokens, tell_tokens
from octavo.kernels.triton.sampling.sample import draw, mask_tokens, sample
from octavo.kernels.triton.sampling.step_inputs import (
    commit_sampled_tokens,
    prepare_decode_inputs,
    prepare_prefill_inputs,
)
from octavo.kernels.triton.sampling.top_logprobs import best_tokens, token_logprobs, write_logprobs

__all__ = [
    "add_linear",
    "add_rms_norm",
    "apply_row_rules",
    "apply_rules",
    "begin_stream",
    "best_tokens",
    "block_copy",
    "commit_sampled_tokens",
    "draw",
    "finite_rows",
    "gelu_mul",
    "kv_write",
    "layer_norm",
    "mask_tokens",
    "max_thin_tokens",
    "norm_linear",
    "note_tokens",
    "paged_attention",
    "prepare_decode_inputs",
    "prepare_prefill_inputs",
    "project_heads",
    "rms_norm",
    "rope_kv_write",
    "rope_table",
    "sample",
    "silu_mul",
    "swap_in",
    "swap_out",
    "tell_tokens",
    "token_logprobs",
    "write_logprobs",
]
