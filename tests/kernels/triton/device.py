"""The device of the kernel tests, Triton's interpreter or a GPU, and the tolerances of their results."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from tests.kernels.pool import relative_error
from tests.kernels.triton import fixed_order

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if INTERPRETED:
    fixed_order.install()
# The interpreter stores bfloat16 as integers, and multiplies these.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Limits of the largest error; and of the norm of all errors, as in docs/gpu-kernels.md:"""
NORM_TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def on_device(batch: RaggedBatch) -> RaggedBatch:
    return RaggedBatch(
        batch.positions.to(DEVICE),
        batch.slot_mapping.to(DEVICE),
        batch.query_start.to(DEVICE),
        batch.seq_lens.to(DEVICE),
        batch.block_tables.to(DEVICE),
        batch.max_query_len,
        batch.max_seq_len,
        fixed_split=batch.fixed_split,
        lines_per_row=batch.lines_per_row,
    )


def synchronize() -> None:
    """Wait for the device's writes into pinned memory."""
    if not INTERPRETED:
        torch.cuda.synchronize()


def close(actual: Tensor, expected: Tensor, tolerance: float = 3e-6) -> bool:
    return relative_error(actual.cpu(), expected.cpu().double()) < tolerance
