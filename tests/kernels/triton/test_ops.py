"""The list of the GPU's operations."""

from __future__ import annotations

from octavo.kernels.triton import ops as cuda


def test_the_gpu_has_every_operation_of_the_cpu() -> None:
    from octavo.kernels.cpu import ops as cpu

    assert set(cpu.__all__) <= set(cuda.__all__) and all(hasattr(cuda, name) for name in cuda.__all__)
