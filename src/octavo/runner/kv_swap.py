"""Swaps of KV blocks between the device and the host, on a separate stream.

A block is contiguous, so one copy moves a block or a run of neighbouring blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from octavo.runner.checksums import Checksums, SwapInCheck
from octavo.runner.platform import Platform
from octavo.runner.streams import DeviceEvent

COPY_ENGINE_BYTES = 1 << 20
"""Runs of at least so many bytes use the copy engine, which leaves the multiprocessors to the running step. Starting a
copy costs it 3 to 6 us, in which 55 GB/s would move 160 to 350 KB: on an H200, blocks of 192 KiB reach 0.36 of its rate
and blocks of 1.8 MiB 0.92. A kernel moves all smaller runs in one launch."""


class KVSwapper:
    """Moves blocks between the KV pool and the swap space.

    kv, host_kv   [blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; host_kv is pinned if kv is on a GPU
    draft_pools   the same of a draft model, which moves along. It has no checksums: wrong K and V there cost time only
    """

    def __init__(
        self, kv: Tensor, host_kv: Tensor, platform: Platform, draft_pools: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.kv = kv
        self.host_kv = host_kv
        self.checksums = Checksums(host_kv)
        self._pools = [(kv, host_kv), *([draft_pools] if draft_pools else [])]
        self._platform, self._ops = platform, platform.ops
        self._side = platform.side_stream()

    def move(self, outs: Seq[tuple[int, int]], ins: Seq[tuple[int, int]]) -> SwapInCheck:
        """Queue the swaps as `queue` does, and compute or compare the checksums of their host blocks."""
        self.checksums.wait_for(dst for _, dst in outs)
        moved = self.queue(outs, ins)
        return self.checksums.submit([dst for _, dst in outs], [src for src, _ in ins], moved)

    def queue(self, outs: Seq[tuple[int, int]], ins: Seq[tuple[int, int]]) -> DeviceEvent:
        """Queue all of `outs` (device block, host block), then all of `ins` (host block, device block).

        Returns the event after the last copy. The step before may write the moved blocks, and the step after may
        overwrite them. So the copies wait for the current stream, and the current stream waits for the copies.
        """
        try:
            with self._side:
                for kv, host_kv in self._pools:
                    if len(small := self._queue_large_runs(outs, kv, host_kv)):
                        self._ops.swap_out(kv, host_kv, *self._ids(small))
                    if len(small := self._queue_large_runs(ins, host_kv, kv)):
                        self._ops.swap_in(host_kv, kv, *self._ids(small))
                return self._platform.record_event(blocking=True)
        finally:  # copies may be queued although memory ran out for the ids of others
            self._side.join()

    def _queue_large_runs(self, pairs: Seq[tuple[int, int]], source: Tensor, target: Tensor) -> np.ndarray:
        """Queue the runs that are large enough for the copy engine. Returns the other pairs, [num, 2]."""
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        begins, counts = runs(table)
        is_large = counts * source[0].nbytes >= COPY_ENGINE_BYTES
        for (src, dst), count in zip(table[begins[is_large]].tolist(), counts[is_large].tolist(), strict=True):
            target[dst : dst + count].copy_(source[src : src + count], non_blocking=True)
        others: np.ndarray = table[~np.repeat(is_large, counts)]
        return others

    def _ids(self, pairs: np.ndarray) -> Tensor:
        """[2, len(pairs)] int64 on the device: sources, targets. Does not wait: torch reuses the pinned memory only
        after the copy."""
        staging = self._platform.empty_host((2, len(pairs)), torch.int64)
        staging.numpy()[:] = pairs.T
        return staging.to(self.kv.device, non_blocking=True)


def runs(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(begins, counts) [num_runs] of the runs in pairs [num_pairs, 2]: both ids increase by one within a run."""
    continues = (np.diff(pairs, axis=0) == 1).all(1)
    begins = np.flatnonzero(np.concatenate(([True], ~continues)))[: len(pairs)]
    return begins, np.diff(begins, append=len(pairs))
