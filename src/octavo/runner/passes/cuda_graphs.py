"""CUDA graphs: one launch for the hundreds of kernels of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from octavo.runner.passes.pass_shape import PassShape
from octavo.runner.streams import CudaStream


def decode_sizes(max_size: int) -> list[int]:
    """Numbers of slices that decode graphs are captured for, ascending. A step uses the smallest graph that fits it."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, max_size + 32, 32)]
    return [*(size for size in sizes if size < max_size), max_size]


def cascade_sizes(max_size: int) -> list[int]:
    """Sizes of decode graphs with cascade attention: fewer, since they are additional, and none below 8 rows."""
    return [size for size in decode_sizes(max_size) if size in (8, 16) or size % 32 == 0 or size == max_size >= 8]


class CudaGraphs:
    """Captured CUDA graphs, by name. All share one memory pool, since only one of them runs at a time.

    Capture the largest first: the others then fit into its memory.

    step_counter   see `octavo.kernels.row_state.DecodeInputs`: a replay increments it, a capture must not
    """

    whole_passes = True

    def __init__(self, step_counter: Tensor, max_slices: int) -> None:
        self.max_slices = max_slices
        self._step_counter = step_counter
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor | None]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._side = CudaStream(step_counter.device)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._graphs

    def takes(self, shape: PassShape) -> bool:
        return shape.part != "model"

    def replay(self, name: Hashable) -> Tensor | None:
        graph, result = self._graphs[name]
        graph.replay()
        return result

    def release(self) -> None:
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def capture(self, name: Hashable, work: Callable[[], Tensor | None]) -> None:
        """Capture the kernels that `work` launches.

        `work` runs twice, the first time to compile its kernels. It must be harmless and must not read tensor values.
        """
        before = self._step_counter.clone()
        work()
        self._step_counter.copy_(before)
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: that collects garbage each time, which takes longer than the capture.
        with self._side:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        self._side.join()
        self._graphs[name] = graph, result
