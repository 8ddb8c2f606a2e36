"""Baseline KV caches of the paper's evaluation (section 6.1): one contiguous chunk per sequence, reserved on admission.

The engine's own scheduler drives them. A chunk is a power of two of blocks from a buddy allocator. It is reserved for
an estimate of the request's length:

    Oracle   the true output length, unknown in practice        Pow2   the next power of two of it
    Max      the model's maximum length

Nothing grows, so no request is preempted. Nothing is shared, so each sample has its own chunk.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

from octavo.core.block_pool import BlockPool
from octavo.core.cache.prefix_index import Prefix
from octavo.core.events import EventStream
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.request import Request, Sequence
from octavo.core.types import BlockId


class MemorySplit(NamedTuple):
    """Use of a pool's slots, in tokens; the fields add up to the pool. The terms are the paper's (figure 2).

    tokens     K and V of tokens, and recurrent states; what is shared counts once
    reserved   for tokens that running requests will still generate
    internal   for tokens that will never come; of blocks, the unfilled slots of the last block
    external   lost to rounding chunks up
    cached     of no running request, reused on a prefix cache hit
    free       unused
    """

    tokens: int
    reserved: int
    internal: int
    external: int
    cached: int
    free: int


def split_of(cache: KVCacheManager, running: Iterable[Request]) -> MemorySplit:
    if isinstance(cache, ContiguousCache):
        return cache.split(running)
    stats, size = cache.stats(), cache.block_size
    return MemorySplit(
        stats.num_used * size - stats.num_unfilled_slots,
        0,
        stats.num_unfilled_slots,
        0,
        stats.num_cached * size,
        stats.num_free * size,
    )


# -- how much to reserve -----------------------------------------------------------------------------------------------

Estimate = Callable[[int, int, int], int]
"""Arguments: prompt length, true output length, maximum model length. Returns the tokens to reserve."""


def oracle(num_prompt: int, num_output: int, max_len: int) -> int:
    return min(num_prompt + num_output, max_len)


def pow2(num_prompt: int, num_output: int, max_len: int) -> int:
    return min(num_prompt + next_power_of_two(num_output), max_len)


def maximum(num_prompt: int, num_output: int, max_len: int) -> int:
    return max_len


def next_power_of_two(number: int) -> int:
    """The smallest power of two >= `number`."""
    return 1 << (number - 1).bit_length()


# -- buddy allocator ---------------------------------------------------------------------------------------------------


class BuddyPool:
    """A buddy allocator: chunks of 2**k blocks, aligned to their size.

    It has the counters of a `BlockPool`. Block ids start at 1 as there; offsets of chunks start at 0.
    """

    num_cached = num_evicted = num_sealed = last_seal_id = 0

    def __init__(self, num_blocks: int) -> None:
        self.events = EventStream()
        self.num_blocks = self.num_free = num_blocks
        self.refs = array("i", [1]) * (num_blocks + 1)  # chunks are never shared
        self.seal_id = array("q", bytes(8 * (num_blocks + 1)))
        self.num_refs = 0
        self._free_chunks: list[set[int]] = [set() for _ in range(num_blocks.bit_length())]  # by k: offsets
        start = 0
        for k in reversed(range(num_blocks.bit_length())):
            if num_blocks >> k & 1:
                self._free_chunks[k].add(start)
                start += 1 << k

    @property
    def num_available(self) -> int:
        return self.num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def fits(self, size: int, count: int = 1) -> bool:
        """True if `count` chunks of `size` blocks, a power of two, are free."""
        k = size.bit_length() - 1
        return sum(len(self._free_chunks[j]) << (j - k) for j in range(k, len(self._free_chunks))) >= count

    def allocate(self, size: int) -> list[BlockId]:
        """A chunk of `size` blocks, split from the smallest sufficient free chunk with the lowest offset."""
        k = size.bit_length() - 1
        j = next(j for j in range(k, len(self._free_chunks)) if self._free_chunks[j])
        start = min(self._free_chunks[j])
        self._free_chunks[j].remove(start)
        while j > k:
            j -= 1
            self._free_chunks[j].add(start + (1 << j))
        self.num_free -= size
        self.num_refs += size
        return list(range(start + 1, start + size + 1))

    def release(self, blocks: list[BlockId]) -> None:
        """Free a chunk; it merges with its buddy while that is free."""
        size, start = len(blocks), blocks[0] - 1
        self.num_free += size
        self.num_refs -= size
        k = size.bit_length() - 1
        while k + 1 < len(self._free_chunks) and (buddy := start ^ (1 << k)) in self._free_chunks[k]:
            self._free_chunks[k].remove(buddy)
            start = min(start, buddy)
            k += 1
        self._free_chunks[k].add(start)


class ContiguousCache(KVCacheManager):
    """A KV cache with one chunk per sequence, allocated on admission."""

    def __init__(self, num_blocks: int, block_size: int, *, num_rows: int, estimate: Estimate, max_len: int) -> None:
        super().__init__(num_blocks, block_size, num_rows=num_rows, enable_prefix_caching=False)
        self.buddies = BuddyPool(num_blocks)
        self.pool = cast("BlockPool", self.buddies)  # for its counters; no operation of it is called
        self.estimate = estimate
        self.max_len = max_len
        self._spare_chunks: dict[Request, list[list[BlockId]]] = {}  # chunks of samples not forked yet
        self._waiting_beams: dict[Request, list[Sequence]] = {}  # beams that will take over the chunks of dropped beams

    def chunk_blocks(self, request: Request) -> int:
        """Blocks per chunk of the request."""
        prompt, output = len(request.prompt_token_ids), request.max_tokens
        assert output is not None
        return next_power_of_two(self.blocks_for(self.estimate(prompt, output, self.max_len)))

    def blocks_to_admit(self, sequence: Sequence, prefix: Prefix) -> int:
        """Blocks that the request needs; more than are free if no such chunk is free."""
        request = sequence.request
        size = self.chunk_blocks(request)
        needs = size * request.width
        return needs if self.buddies.fits(size, request.width) else max(needs, self.buddies.num_free + 1)

    def attach(self, sequence: Sequence, prefix: Prefix) -> None:
        request = sequence.request
        size = self.chunk_blocks(request)
        chunks = [self.buddies.allocate(size) for _ in range(request.width)]
        self._assign(sequence, chunks.pop())
        if chunks:
            self._spare_chunks[request] = chunks
        sequence.num_computed = 0

    def _assign(self, sequence: Sequence, chunk: list[BlockId]) -> None:
        sequence.block_ids, sequence.room = chunk, len(chunk) * self.block_size
        self.holders[sequence] = None
        self.prefixes.set_seals(sequence, [])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Copies, since nothing is shared. New beams are forked before dropped ones are freed, and wait for their
        chunks."""
        child.num_computed = parent.num_computed
        if chunks := self._spare_chunks.get(parent.request):
            self._assign(child, chunks.pop())
        else:
            self._waiting_beams.setdefault(parent.request, []).append(child)

    def free(self, sequence: Sequence) -> None:
        """A dropped beam hands its chunk to a waiting beam; the last sequence of a request releases all chunks."""
        request, chunk = sequence.request, sequence.block_ids
        if not chunk:
            return
        sequence.block_ids, sequence.room, sequence.num_computed = [], 0, 0
        self.holders.pop(sequence, None)
        if waiting := self._waiting_beams.get(request):
            self._assign(waiting.pop(), chunk)
        elif request.select_beams is not None and any(s.block_ids for s in request.sequences):
            self._spare_chunks.setdefault(request, []).append(chunk)
        else:
            self._waiting_beams.pop(request, None)
            for each in (chunk, *self._spare_chunks.pop(request, [])):
                self.buddies.release(each)

    def split(self, running: Iterable[Request]) -> MemorySplit:
        size = self.block_size
        tokens = reserved = internal = external = 0
        for request in running:
            prompt, output = len(request.prompt_token_ids), request.max_tokens
            assert output is not None
            total, estimated = prompt + output, self.estimate(prompt, output, self.max_len)
            chunk = self.chunk_blocks(request) * size
            for sequence in request.sequences:
                tokens += sequence.num_computed
                reserved += total - sequence.num_computed
                internal += estimated - total
                external += chunk - estimated
            num_spare = request.width - len(request.sequences) - len(request.finished_sequences)
            reserved += num_spare * chunk
        return MemorySplit(tokens, reserved, internal, external, 0, self.buddies.num_free * size)


class BatchCache(ContiguousCache):
    """Request-level batching as in FasterTransformer: up to `batch_size` of the earliest requests are admitted
    together, and no other before all are done. Each reserves the maximum length.

    Requires an engine that does not overlap steps: the first token closes a batch, and must be known then.
    """

    def __init__(self, num_blocks: int, block_size: int, *, num_rows: int, max_len: int, batch_size: int) -> None:
        super().__init__(num_blocks, block_size, num_rows=num_rows, estimate=maximum, max_len=max_len)
        self.batch_size = batch_size
        self.batches: list[list[str]] = []  # request ids of each batch

    def blocks_to_admit(self, sequence: Sequence, prefix: Prefix) -> int:
        started = any(len(s.token_ids) > len(s.request.prompt_token_ids) for s in self.holders)
        if started or (self.holders and len(self.batches[-1]) >= self.batch_size):
            return self.buddies.num_free + 1
        return super().blocks_to_admit(sequence, prefix)

    def attach(self, sequence: Sequence, prefix: Prefix) -> None:
        if not self.holders:
            self.batches.append([])
        self.batches[-1].append(sequence.request.request_id)
        super().attach(sequence, prefix)
