"""The interpreter's matrix products, summed in one order whatever the shape and the BLAS.

Triton's interpreter multiplies with numpy, and numpy with its BLAS, whose sums depend on the processor: the kernels for
Haswell and Zen round a row differently at another place in a tile. Tests that compare bits need one order.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def matmul(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
    """a [..., M, K] @ b [..., K, N], each number the sum over k = 0, 1, ... in that order."""
    a, b = (x.astype(dtype or np.result_type(a, b), copy=False) for x in (a, b))
    total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), dtype=a.dtype)
    for k in range(a.shape[-1]):
        total += a[..., :, k, None] * b[..., None, k, :]
    return total


class FixedOrder:
    """numpy with its `matmul` replaced."""

    matmul = staticmethod(matmul)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def install() -> None:
    """In this process, for all kernels that Triton interprets."""
    from triton.runtime import interpreter

    interpreter.np = FixedOrder()
