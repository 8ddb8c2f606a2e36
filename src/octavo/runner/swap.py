"""Blocks between the device and the host, on a stream of their own: a block, being contiguous, is one move."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from torch import Tensor

from octavo.runner.streams import SideStream


class Swapper:
    """The two tiers of K and V.

    kv, host_kv   [blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; host_kv is pinned where kv is on a GPU
    """

    def __init__(self, kv: Tensor, host_kv: Tensor) -> None:
        self.kv = kv
        self.host_kv = host_kv
        self._side = SideStream(kv.device)

    def move(self, outs: Seq[tuple[int, int]], ins: Seq[tuple[int, int]]) -> None:
        """All of `outs` (device block, host block), then all of `ins` (host block, device block), in stream order.

        What is moved may have been written by the step before and may be overwritten by the one behind: so the copies
        wait for the device's stream, and the device's stream waits for the copies.
        """
        with self._side:
            for pairs, source, target in ((outs, self.kv, self.host_kv), (ins, self.host_kv, self.kv)):
                for src, dst, count in runs(pairs):
                    target[dst : dst + count].copy_(source[src : src + count], non_blocking=True)
        self._side.join()


def runs(pairs: Seq[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(source, target, count): pairs whose two ids both count up by one are one move."""
    begin = 0
    for i in range(1, len(pairs) + 1):
        if i == len(pairs) or pairs[i] != (pairs[i - 1][0] + 1, pairs[i - 1][1] + 1):
            yield (*pairs[begin], i - begin)
            begin = i
