"""How others keep keys and values: in one contiguous piece a sequence, reserved when it is let in.

These are the baselines of the paper's evaluation (section 6.1), as caches that the engine's own scheduler drives. A
piece is a power of two of blocks, found by buddies. It is reserved for as many tokens as a request is thought to need:

    Oracle   its output's true length, which nobody knows        Pow2   the next power of two above that
    Max      all that the model can have

Nothing grows, so nobody is ever preempted; and nothing is shared, so each sample has a piece of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

from octavo.core.block_pool import BlockPool
from octavo.core.events import EventStream
from octavo.core.kv_cache_manager import KVCacheManager, Prefix
from octavo.core.request import Request, Sequence
from octavo.core.types import BlockId


class MemorySplit(NamedTuple):
    """What the slots of a pool hold, in tokens; together they are all of it. Words are the paper's (figure 2).

    tokens     states of tokens, shared ones once
    reserved   to be used by the tokens that running requests are yet to have
    internal   reserved for tokens that will never come; of blocks, the slots of tails that are unfilled yet
    external   lost to rounding pieces up
    cached     states of no running request, found again if they come up
    free       used by nobody
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
"""From the prompt's tokens, the output's true number and the model's most: tokens to reserve."""


def oracle(num_prompt: int, num_output: int, most: int) -> int:
    return min(num_prompt + num_output, most)


def pow2(num_prompt: int, num_output: int, most: int) -> int:
    return min(num_prompt + power_above(num_output), most)


def maximum(num_prompt: int, num_output: int, most: int) -> int:
    return most


def power_above(number: int) -> int:
    """The smallest power of two that is not below it."""
    return 1 << (number - 1).bit_length()


# -- buddies -----------------------------------------------------------------------------------------------------------


class BuddyPool:
    """`num_blocks` blocks, given out in pieces of 2**k that begin at a multiple of their size.

    It has the numbers of a `BlockPool`, for whoever reads them. Ids are from 1, as there; a piece's place is from 0.
    """

    num_cached = num_evicted = num_sealed = last_seal_id = 0

    def __init__(self, num_blocks: int) -> None:
        self.events = EventStream()
        self.num_blocks = self.num_free = num_blocks
        self.refs = array("i", [1]) * (num_blocks + 1)  # everybody who has a piece has it alone
        self.seal_id = array("q", bytes(8 * (num_blocks + 1)))
        self.num_refs = 0
        self._pieces: list[set[int]] = [set() for _ in range(num_blocks.bit_length())]  # free ones of 2**k
        start = 0
        for k in reversed(range(num_blocks.bit_length())):
            if num_blocks >> k & 1:
                self._pieces[k].add(start)
                start += 1 << k

    @property
    def num_available(self) -> int:
        return self.num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def fits(self, size: int, count: int = 1) -> bool:
        """Whether there are `count` pieces of `size`, a power of two."""
        k = size.bit_length() - 1
        return sum(len(self._pieces[j]) << (j - k) for j in range(k, len(self._pieces))) >= count

    def take_piece(self, size: int) -> list[BlockId]:
        """A piece of `size` blocks from the smallest free one that is large enough, the lowest of those."""
        k = size.bit_length() - 1
        j = next(j for j in range(k, len(self._pieces)) if self._pieces[j])
        start = min(self._pieces[j])
        self._pieces[j].remove(start)
        while j > k:
            j -= 1
            self._pieces[j].add(start + (1 << j))
        self.num_free -= size
        self.num_refs += size
        return list(range(start + 1, start + size + 1))

    def release_piece(self, blocks: list[BlockId]) -> None:
        """It merges with its buddy where that is free, and so on upwards."""
        size, start = len(blocks), blocks[0] - 1
        self.num_free += size
        self.num_refs -= size
        k = size.bit_length() - 1
        while k + 1 < len(self._pieces) and (buddy := start ^ (1 << k)) in self._pieces[k]:
            self._pieces[k].remove(buddy)
            start = min(start, buddy)
            k += 1
        self._pieces[k].add(start)


class ContiguousCache(KVCacheManager):
    """A piece for each sequence of a request, from the moment it is let in."""

    def __init__(self, num_blocks: int, block_size: int, *, num_rows: int, estimate: Estimate, max_len: int) -> None:
        super().__init__(num_blocks, block_size, num_rows=num_rows, enable_prefix_caching=False)
        self.buddies = BuddyPool(num_blocks)
        self.pool = cast("BlockPool", self.buddies)  # the numbers that a scheduler reads, and no operation
        self.estimate = estimate
        self.max_len = max_len
        self._spare: dict[Request, list[list[BlockId]]] = {}  # pieces of samples that are yet to part
        self._heirs: dict[Request, list[Sequence]] = {}  # beams that are to get the pieces of others

    def piece_for(self, request: Request) -> int:
        """Blocks of each of its pieces."""
        prompt, output = len(request.prompt_token_ids), request.max_tokens
        assert output is not None
        return power_above(self.blocks_for(self.estimate(prompt, output, self.max_len)))

    def blocks_to_admit(self, sequence: Sequence, prefix: Prefix) -> int:
        """What it takes; where no such piece is free, more than there is."""
        request = sequence.request
        size = self.piece_for(request)
        needs = size * request.width
        return needs if self.buddies.fits(size, request.width) else max(needs, self.buddies.num_free + 1)

    def attach(self, sequence: Sequence, prefix: Prefix) -> None:
        request = sequence.request
        size = self.piece_for(request)
        pieces = [self.buddies.take_piece(size) for _ in range(request.width)]
        self._give(sequence, pieces.pop())
        if pieces:
            self._spare[request] = pieces
        sequence.num_computed = 0

    def _give(self, sequence: Sequence, piece: list[BlockId]) -> None:
        sequence.block_ids, sequence.room = piece, len(piece) * self.block_size
        self._holders[sequence] = None
        self._set_seals(sequence, [])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """A copy, since nothing is shared. Of beams, heirs come to be before those not chosen go, and wait for them."""
        child.num_computed = parent.num_computed
        if pieces := self._spare.get(parent.request):
            self._give(child, pieces.pop())
        else:
            self._heirs.setdefault(parent.request, []).append(child)

    def free(self, sequence: Sequence) -> None:
        """A beam's piece goes to the beam that takes its place; the last one of a request gives all back."""
        request, piece = sequence.request, sequence.block_ids
        if not piece:
            return
        sequence.block_ids, sequence.room, sequence.num_computed = [], 0, 0
        self._holders.pop(sequence, None)
        if heirs := self._heirs.get(request):
            self._give(heirs.pop(), piece)
        elif request.select_beams is not None and any(s.block_ids for s in request.sequences):
            self._spare.setdefault(request, []).append(piece)
        else:
            self._heirs.pop(request, None)
            for each in (piece, *self._spare.pop(request, [])):
                self.buddies.release_piece(each)

    def split(self, running: Iterable[Request]) -> MemorySplit:
        size = self.block_size
        tokens = reserved = internal = external = 0
        for request in running:
            prompt, output = len(request.prompt_token_ids), request.max_tokens
            assert output is not None
            whole, thought = prompt + output, self.estimate(prompt, output, self.max_len)
            piece = self.piece_for(request) * size
            for sequence in request.sequences:
                tokens += sequence.num_computed
                reserved += whole - sequence.num_computed
                internal += thought - whole
                external += piece - thought
            pieces_apart = request.width - len(request.sequences) - len(request.finished_sequences)
            reserved += pieces_apart * piece
        return MemorySplit(tokens, reserved, internal, external, 0, self.buddies.num_free * size)


class BatchCache(ContiguousCache):
    """Request-level batching, as in FasterTransformer: the earliest requests, up to `batch_size`, go in together, and
    nobody comes in before the last of them is done. Each has all the room that there can be.

    For engines that do not overlap steps: a batch is closed by its first token, which must be known then.
    """

    def __init__(self, num_blocks: int, block_size: int, *, num_rows: int, max_len: int, batch_size: int) -> None:
        super().__init__(num_blocks, block_size, num_rows=num_rows, estimate=maximum, max_len=max_len)
        self.batch_size = batch_size
        self.batches: list[list[str]] = []  # who went together

    def blocks_to_admit(self, sequence: Sequence, prefix: Prefix) -> int:
        begun = any(len(s.token_ids) > len(s.request.prompt_token_ids) for s in self._holders)
        if begun or (self._holders and len(self.batches[-1]) >= self.batch_size):
            return self.buddies.num_free + 1
        return super().blocks_to_admit(sequence, prefix)

    def attach(self, sequence: Sequence, prefix: Prefix) -> None:
        if not self._holders:
            self.batches.append([])
        self.batches[-1].append(sequence.request.request_id)
        super().attach(sequence, prefix)
