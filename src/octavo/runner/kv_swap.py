"""Blocks between the device and the host, on a stream of their own: a block, being contiguous, is one move, and so are
neighbours."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from octavo.runner.checksums import Checksums, SwapInCheck
from octavo.runner.streams import DeviceEvent, SideStream, record_event

COPY_ENGINE_BYTES = 1 << 20
"""From so many bytes on, a move is the copy engine's, which leaves the device's multiprocessors to the step beside it.
Starting one costs it 3 to 6 us, in which 55 GB/s would move 160 to 350 KB: on an H200, blocks of 192 KiB reach 0.36 of
its rate and blocks of 1.8 MiB 0.92. Smaller moves are a kernel's, all in one launch."""


class KVSwapper:
    """The two tiers of K and V.

    kv, host_kv   [blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; host_kv is pinned where kv is on a GPU
    """

    def __init__(self, kv: Tensor, host_kv: Tensor, ops: ModuleType) -> None:
        self.kv = kv
        self.host_kv = host_kv
        self.checksums = Checksums(host_kv)
        self._ops = ops
        self._side = SideStream(kv.device)
        self._block_bytes = kv[0].nbytes

    def move(self, outs: Seq[tuple[int, int]], ins: Seq[tuple[int, int]]) -> SwapInCheck:
        """As `queue`, and the host keeps the checksums of `outs` and compares those of `ins`."""
        self.checksums.wait_for(dst for _, dst in outs)
        moved = self.queue(outs, ins)
        return self.checksums.follow([dst for _, dst in outs], [src for src, _ in ins], moved)

    def queue(self, outs: Seq[tuple[int, int]], ins: Seq[tuple[int, int]]) -> DeviceEvent:
        """All of `outs` (device block, host block), then all of `ins` (host block, device block), in stream order.
        Returns the point where they have moved.

        What is moved may have been written by the step before and may be overwritten by the one behind: so the moves
        wait for the device's stream, and the device's stream waits for the moves.
        """
        try:
            with self._side:
                if len(few := self._copy(outs, self.kv, self.host_kv)):
                    self._ops.swap_out(self.kv, self.host_kv, *self._ids(few))
                if len(few := self._copy(ins, self.host_kv, self.kv)):
                    self._ops.swap_in(self.host_kv, self.kv, *self._ids(few))
                return record_event(self.kv.device, blocking=True)
        finally:  # also of those that were queued before there was no memory for the ids of others
            self._side.join()

    def _copy(self, pairs: Seq[tuple[int, int]], source: Tensor, target: Tensor) -> np.ndarray:
        """Queue those that are enough for the copy engine, alone or beside each other; gives the others, [num, 2]."""
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        begins, counts = runs(table)
        is_copied = counts * self._block_bytes >= COPY_ENGINE_BYTES
        for (src, dst), count in zip(table[begins[is_copied]].tolist(), counts[is_copied].tolist(), strict=True):
            target[dst : dst + count].copy_(source[src : src + count], non_blocking=True)
        others: np.ndarray = table[~np.repeat(is_copied, counts)]
        return others

    def _ids(self, pairs: np.ndarray) -> Tensor:
        """[2, len(pairs)] int64 on the device: sources, targets. The pinned memory is torch's to reuse once they are
        there: nothing here waits."""
        staging = torch.empty(2, len(pairs), dtype=torch.int64, pin_memory=self.kv.is_cuda)
        staging.numpy()[:] = pairs.T
        return staging.to(self.kv.device, non_blocking=True)


def runs(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(begins, counts) [num_runs]: pairs [num_pairs, 2] whose two ids both count up by one are one move."""
    goes_on = (np.diff(pairs, axis=0) == 1).all(1)
    begins = np.flatnonzero(np.concatenate(([True], ~goes_on)))[: len(pairs)]
    return begins, np.diff(begins, append=len(pairs))
