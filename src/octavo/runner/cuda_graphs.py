"""Passes as CUDA graphs: hundreds of launches become one."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from octavo.runner.streams import SideStream


def decode_sizes(most: int) -> list[int]:
    """Numbers of slices that decode graphs are captured for, ascending: a step runs in the smallest that holds it."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, most + 32, 32)]
    return [*(size for size in sizes if size < most), most]


def cascade_sizes(most: int) -> list[int]:
    """The same of steps whose rows begin alike: fewer, since they are captured besides, and none for few rows."""
    return [size for size in decode_sizes(most) if size in (8, 16) or size % 32 == 0 or size == most >= 8]


class CudaGraphs:
    """Work that was captured, by name. All graphs share one pool of memory, because only one of them runs at a time:
    capture the largest first, and the others live in what it took.

    step_counter   see `octavo.kernels.row_state.DecodeInputs`: what the work moves on, and capturing must not
    """

    def __init__(self, step_counter: Tensor) -> None:
        self._step_counter = step_counter
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._side = SideStream(step_counter.device)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._graphs

    def replay(self, name: Hashable) -> None:
        self._graphs[name].replay()

    def capture(self, name: Hashable, work: Callable[[], None]) -> None:
        """Capture what `work` launches. It is done twice, the first time for the compiler: there must be nothing in it
        that does harm, and nothing that looks at a tensor's values."""
        step_counter = self._step_counter.clone()
        work()
        self._step_counter.copy_(step_counter)
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: that collects garbage each time, which takes longer than the capture.
        with self._side:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        self._side.join()
        self._graphs[name] = graph
