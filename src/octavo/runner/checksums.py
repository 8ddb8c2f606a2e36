"""Checksums of swapped blocks: taken when a block has arrived on the host, compared when it goes back.

A block may lie on the host for minutes, in memory that may have no error correction, beside what other libraries write.
One flipped bit would give its request wrong tokens, and nothing else would show it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from octavo.core.plan import StepResult
from octavo.runner.streams import DeviceEvent


class SwapInCheck:
    """The comparison of the blocks that one plan brings back. Its results count for nothing before `take`."""

    def __init__(self, found: Future[list[int]] | None = None) -> None:
        self._found = found

    @property
    def done(self) -> bool:
        return self._found is None or self._found.done()

    def take(self) -> list[int]:
        """The corrupt host blocks; waits for them. They are reported once: a second call gives none."""
        found, self._found = self._found, None
        return [] if found is None else found.result()

    def before(self, land: Callable[[StepResult], None]) -> Callable[[StepResult], None]:
        """`land`, which reports the corrupt blocks with the first result."""

        def land_checked(result: StepResult) -> None:
            result.corrupt = self.take()
            land(result)

        return land_checked


NO_SWAP_IN_CHECK = SwapInCheck()
"""Of a plan that moves no block."""


class Checksums:
    """XXH3 of each block of the host tier, computed on a thread of its own beside the steps. Hashing gives up the GIL.

    host_kv   [num_blocks, ...], contiguous
    """

    def __init__(self, host_kv: Tensor) -> None:
        self._host_kv = host_kv
        self._sums = array("Q", bytes(8 * len(host_kv)))
        self._thread = ThreadPoolExecutor(1, "octavo-checksums")  # starts with the first block
        self._compared: dict[int, Future[list[int]]] = {}  # host block -> the comparison that reads it

    def follow(self, outs: Seq[int], ins: Seq[int], moved: DeviceEvent) -> SwapInCheck:
        """Take the checksums of `outs` and compare those of `ins`, once all have moved. What is compared then is no
        better than what was copied."""
        found = self._thread.submit(self._work, outs, ins, moved)
        self._compared = {block: future for block, future in self._compared.items() if not future.done()}
        self._compared.update(dict.fromkeys(ins, found))
        return SwapInCheck(found)

    def wait_for(self, blocks: Iterable[int]) -> None:
        """Before they are overwritten: a comparison may still read them."""
        for block in blocks:
            if (found := self._compared.get(block)) is not None:
                found.exception()  # whose it is asks for it

    def _work(self, outs: Seq[int], ins: Seq[int], moved: DeviceEvent) -> list[int]:
        moved.synchronize()
        for block in outs:
            self._sums[block] = self._sum(block)
        return [block for block in ins if self._sum(block) != self._sums[block]]

    def _sum(self, block: int) -> int:
        return xxh3_64_intdigest(self._host_kv[block].view(-1).view(torch.uint8).numpy().data)
