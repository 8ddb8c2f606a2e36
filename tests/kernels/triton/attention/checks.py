"""Runs paged attention on the kernels' device and compares it with the definition."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.triton import ops as cuda
from tests.kernels.pool import Case, naive_attention, norm_error, relative_error
from tests.kernels.triton.device import DEVICE, NORM_TOLERANCE, TOLERANCE, on_device

DECODE = ([1, 1, 1, 1], [70, 1, 300, 64])
MIXED = ([5, 1, 1, 7, 33], [5, 1, 90, 130, 40])


def attend(case: Case, window: int = 0) -> tuple[Tensor, Tensor]:
    out, lse = cuda.paged_attention(
        case.q.to(DEVICE),
        case.kv.to(DEVICE)[:, 1],
        on_device(case.batch),
        scale=case.scale,
        window=window,
        return_lse=True,
        sinks=None if case.sinks is None else case.sinks.to(DEVICE),
    )
    return out.cpu(), lse.cpu()


def check(case: Case, window: int = 0) -> None:
    """Compare with `naive_attention`. Everything in the case's pool except the tokens' slots is NaN."""
    out, lse = attend(case, window)
    expected, expected_lse = naive_attention(case, window)
    assert relative_error(out, expected) < TOLERANCE[case.q.dtype]
    assert norm_error(out, expected) < NORM_TOLERANCE[case.q.dtype]
    assert relative_error(lse, expected_lse) < 3e-6


def quantised(case: Case, dtype: torch.dtype) -> tuple[Case, Tensor]:
    """The case with its pool in float8, keys and values as the pool holds them, and the scales."""
    scales = torch.rand(2, case.kv.shape[3]) * 0.02 + 0.005

    def held(x: Tensor, scale: Tensor) -> Tensor:
        return reference.to_float8(x, scale.unsqueeze(-1).expand(x.shape[:-1]), dtype).float() * scale[:, None, None]

    pool = reference.to_float8(case.kv, scales[:, :, None].expand(case.kv.shape[2:5]), dtype)
    keys, values = ([held(x, s) for x in part] for part, s in zip((case.keys, case.values), scales, strict=True))
    return replace(case, kv=pool, keys=keys, values=values), scales
