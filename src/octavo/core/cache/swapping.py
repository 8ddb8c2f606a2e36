"""Swapping: requests move between the device and the swap space of the host, each block once."""

from __future__ import annotations

from typing import NamedTuple

from octavo.core.block_pool import BlockPool, SwapSpace
from octavo.core.cache.prefix_index import PrefixIndex
from octavo.core.plan import StepPlan, SwapIn, SwapOut
from octavo.core.request import Request, Sequence
from octavo.core.snapshot import Fields
from octavo.core.types import BlockId, HostBlockId, SealId


class SwapInBlocks(NamedTuple):
    """The blocks that swapping a request in takes."""

    shared_on_device: list[BlockId]  # stayed on the device; shared again
    host_ids: list[HostBlockId]  # copied back
    num_needed: int  # device blocks: the copied ones, and the shared ones that have no user now


class Swapping:
    """Moves requests between `pool` and `space`, and sets who is among `holders`, which have blocks in the pool."""

    SAVED = Fields("num_swapped_out num_swapped_in")

    def __init__(self, pool: BlockPool, space: SwapSpace, prefixes: PrefixIndex, holders: dict[Sequence, None]) -> None:
        self.pool, self.space = pool, space
        self.prefixes = prefixes
        self.holders = holders
        self.num_swapped_out = self.num_swapped_in = 0

    def count_private_blocks(self, request: Request) -> tuple[int, int]:
        """Return the blocks that preempting a running request would free, and the positions in them."""
        private, _ = self._split_blocks(request)
        return len(private), sum(private.values())

    def _split_blocks(self, request: Request) -> tuple[dict[BlockId, int], dict[BlockId, SealId]]:
        """Split a request's distinct blocks in two.

        Returns its private blocks with the positions in each, and the sealed blocks that other requests use too with
        their seal ids. States count as private: who shares one writes a new one anyway.
        """
        pool, size = self.pool, self.prefixes.block_size
        refs_within: dict[BlockId, int] = {}
        filled: dict[BlockId, int] = {}
        for sequence in request.sequences:
            for block_ids, num_dropped in sequence.tables:
                for i in range(num_dropped, len(block_ids)):
                    block = block_ids[i]
                    refs_within[block] = refs_within.get(block, 0) + 1
                    filled[block] = min(size, sequence.num_computed - i * size)  # the same for every sharer
            filled |= dict.fromkeys(sequence.state, 0)
        shared = {b: pool.seal_id[b] for b, n in refs_within.items() if pool.seal_id[b] and pool.refs[b] > n}
        return {b: n for b, n in filled.items() if b not in shared}, shared

    def swap_out(self, request: Request, plan: StepPlan) -> bool:
        """Move a running request to the host. Returns False, without any change, if the swap space has no room for it.

        Each distinct block moves once, and its references are counted again on the host. A sealed block that other
        requests use too stays on the device at no cost. The request holds no reference to it, only its seal id, which
        shows at swap-in whether the block is still the same.
        """
        pool = self.pool
        private, shared = self._split_blocks(request)
        if len(private) > self.space.num_free:
            return False
        moved: dict[BlockId, HostBlockId] = {}
        for sequence in request.sequences:
            for block_ids, num_dropped in sequence.holdings:
                old = block_ids[num_dropped:]
                block_ids[num_dropped:] = [-b if b in shared else self._to_host(b, moved) for b in old]
                for block in reversed(old):
                    pool.release(block)
            self.holders.pop(sequence, None)
        plan.swap_outs += [SwapOut(src, dst) for src, dst in moved.items()]
        self.num_swapped_out += len(moved)
        request.shared_on_device = shared
        return True

    def _to_host(self, block: BlockId, moved: dict[BlockId, HostBlockId]) -> HostBlockId:
        if block in moved:
            self.space.share(moved[block])
        else:
            moved[block] = self.space.allocate()
        return moved[block]

    def find_swap_in_blocks(self, request: Request) -> SwapInBlocks | None:
        """Return the blocks that swapping in takes, None if a block shared on the device was evicted.

        The test is exact: seal ids are never used twice.
        """
        pool = self.pool
        host_ids: dict[HostBlockId, None] = {}
        for sequence in request.sequences:
            for block_ids, _ in sequence.holdings:
                host_ids |= dict.fromkeys(block for block in block_ids if block > 0)
        shared = request.shared_on_device
        if any(pool.seal_id[b] != seal for b, seal in shared.items()):
            return None
        revived = sum(not pool.refs[b] for b in shared)
        return SwapInBlocks(list(shared), list(host_ids), len(host_ids) + revived)

    def swap_in(self, request: Request, found: SwapInBlocks, plan: StepPlan) -> None:
        """Move a swapped request back. Blocks shared on the device come first: allocation might evict them."""
        pool, host = self.pool, self.space
        for sequence in request.sequences:
            for block_ids, _ in sequence.holdings:
                for block in block_ids:
                    if block < 0:
                        pool.share(-block)
        to = {h: pool.allocate() for h in found.host_ids}
        fresh = set(found.host_ids)
        plan.swap_ins += [SwapIn(src, dst) for src, dst in to.items()]
        self.num_swapped_in += len(to)
        for sequence in request.sequences:
            num_kept = next((i for i, block in enumerate(sequence.block_ids) if block > 0), len(sequence.block_ids))
            for block_ids, _ in sequence.holdings:
                for i, block in enumerate(block_ids):
                    if block <= 0:  # shared on the device, or null
                        block_ids[i] = -block
                        continue
                    if block in fresh:
                        fresh.remove(block)  # `allocate` counted the first reference
                    else:
                        pool.share(to[block])
                    host.release(block)
                    block_ids[i] = to[block]
            self.holders[sequence] = None
            self.prefixes.set_seals(sequence, sequence.seal_ids[:num_kept])  # swapped-in blocks are sealed again
        request.shared_on_device = {}
