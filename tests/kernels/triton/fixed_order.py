"""Matrix products of Triton's interpreter with a fixed order of summation, for every shape and BLAS.

Triton's interpreter multiplies with numpy, which calls its BLAS. There, the order depends on the processor: on Haswell
and Zen, a row is rounded differently at another position of a tile. Tests that compare bits need one order.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def matmul(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
    """a [..., M, K] @ b [..., K, N]; each element is summed over k = 0, 1, ... in that order."""
    a, b = (x.astype(dtype or np.result_type(a, b), copy=False) for x in (a, b))
    total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), dtype=a.dtype)
    for k in range(a.shape[-1]):
        total += a[..., :, k, None] * b[..., None, k, :]
    return total


class FixedOrder:
    """numpy with another `matmul`."""

    matmul = staticmethod(matmul)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def install() -> None:
    """Use it for all kernels that Triton interprets in this process."""
    from triton.runtime import interpreter

    interpreter.np = FixedOrder()
