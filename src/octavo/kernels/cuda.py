"""The GPU's fast path: `reference`'s functions and signatures, in Triton where that is written, else in torch.

Only a GPU needs this module, and only it needs triton.
"""

from __future__ import annotations

from octavo.kernels.activation import silu_mul
from octavo.kernels.block_copy import block_copy
from octavo.kernels.kv_write import kv_write, rope_kv_write
from octavo.kernels.norms import add_rms_norm, rms_norm
from octavo.kernels.paged_attention import paged_attention
from octavo.kernels.reference import finite_rows, merge_attention, rope_table, sample, swap_in, swap_out
from octavo.kernels.rope import apply_rope

__all__ = [
    "add_rms_norm",
    "apply_rope",
    "block_copy",
    "finite_rows",
    "kv_write",
    "merge_attention",
    "paged_attention",
    "rms_norm",
    "rope_kv_write",
    "rope_table",
    "sample",
    "silu_mul",
    "swap_in",
    "swap_out",
]
