"""Checksums of swapped blocks: computed after a swap-out, compared at the swap-in.

A block may stay in host memory for minutes. That memory may lack error correction, and other libraries write to it. One
flipped bit would give a request wrong tokens without any other sign.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from octavo.runner.streams import DeviceEvent


class SwapInCheck:
    """The comparison of the blocks that one plan swaps in. The plan's results are valid only after `take`."""

    def __init__(self, corrupt: Future[list[int]] | None = None) -> None:
        self._corrupt = corrupt

    @property
    def done(self) -> bool:
        return self._corrupt is None or self._corrupt.done()

    def take(self) -> list[int]:
        """The corrupt host blocks; waits for the comparison. Later calls return an empty list."""
        corrupt, self._corrupt = self._corrupt, None
        return [] if corrupt is None else corrupt.result()


NO_SWAP_IN_CHECK = SwapInCheck()
"""For plans without swaps."""


class Checksums:
    """XXH3 of each block in the swap space, computed in a separate thread. Hashing releases the GIL.

    host_kv   [num_blocks, ...], contiguous
    """

    def __init__(self, host_kv: Tensor) -> None:
        self._host_kv = host_kv
        self._sums = array("Q", bytes(8 * len(host_kv)))
        self._thread = ThreadPoolExecutor(1, "octavo-checksums")  # starts with the first block
        self._comparisons: dict[int, Future[list[int]]] = {}  # host block -> the comparison that reads it

    def submit(self, outs: Seq[int], ins: Seq[int], moved: DeviceEvent) -> SwapInCheck:
        """Compute the checksums of host blocks `outs` and compare those of `ins`, after the event `moved`.

        Blocks are compared after their copies: corruption that a copy read is still there then.
        """
        corrupt = self._thread.submit(self._work, outs, ins, moved)
        self._comparisons = {block: future for block, future in self._comparisons.items() if not future.done()}
        self._comparisons.update(dict.fromkeys(ins, corrupt))
        return SwapInCheck(corrupt)

    def wait_for(self, blocks: Iterable[int]) -> None:
        """Wait until no comparison reads these host blocks. Call this before they are overwritten."""
        for block in blocks:
            if (corrupt := self._comparisons.get(block)) is not None:
                corrupt.exception()  # `SwapInCheck.take` raises it

    def _work(self, outs: Seq[int], ins: Seq[int], moved: DeviceEvent) -> list[int]:
        moved.synchronize()
        for block in outs:
            self._sums[block] = self._sum(block)
        return [block for block in ins if self._sum(block) != self._sums[block]]

    def _sum(self, block: int) -> int:
        return xxh3_64_intdigest(self._host_kv[block].view(-1).view(torch.uint8).numpy().data)
