"""The prefix index of sequences: which computed blocks one may begin with, and the seals of those that it fills.

Full blocks are found by their content in the pool's index, as a run from the start. A pin is found by its prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Container
from typing import NamedTuple

from octavo.core.block_pool import BlockPool, Key
from octavo.core.request import Sequence, Status
from octavo.core.snapshot import Fields
from octavo.core.types import BlockId, SealId
from octavo.integers import cdiv

NEVER = 1 << 62
"""`Sequence.seal_at` where nothing is sealed."""


class Prefix(NamedTuple):
    """A computed prefix of a sequence: its blocks, the seal ids of the sealed ones, and its length.

    The last block is full, except where the prefix comes from a pin.
    """

    block_ids: list[BlockId]
    seal_ids: list[SealId]
    num_positions: int


def common_prefix_length(a: array[int], b: array[int]) -> int:
    """Return the number of equal tokens at the start of `a` and `b`."""
    num = min(len(a), len(b))
    if a[:num] == b[:num]:
        return num
    return next(i for i in range(num) if a[i] != b[i])


class PrefixIndex:
    """Finds and seals the prefixes of sequences, whose blocks of `block_size` tokens are in `pool`.

    enabled  prefixes are looked up and sealed; pins are found in any case
    pins     pinned prompts by name: computed, blocks kept
    """

    SAVED = Fields("num_hits num_misses num_hit_tokens num_queried_tokens")

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self.pins: dict[str, Sequence] = {}
        self.num_hits = self.num_misses = 0
        self.num_hit_tokens = self.num_queried_tokens = 0

    # -- finding -------------------------------------------------------------------------------------------------------

    def lookup(self, sequence: Sequence) -> Prefix:
        """Return the longest cached prefix: a run of sealed blocks from the start, or a pin's if that is longer.

        It excludes the last token, which must be computed for its logits.
        """
        if not self._uses_prefix_cache(sequence):
            return self._extend_by_pin(sequence, Prefix([], [], 0))
        num_blocks = (len(sequence.token_ids) - 1) // self.block_size
        return self._extend_by_pin(sequence, self._find_sealed_prefix(sequence, num_blocks))

    def _find_sealed_prefix(self, sequence: Sequence, num_blocks: int) -> Prefix:
        """Return the longest run of sealed blocks from the start, at most `num_blocks`."""
        block_ids: list[BlockId] = []
        seal_ids: list[SealId] = []
        find, seal_id = self.pool.find, self.pool.seal_id
        parent: SealId | bytes = sequence.request.salt
        for i in range(num_blocks):
            block = find((parent, self._tokens_of(sequence, i)))
            if not block:
                break
            parent = seal_id[block]
            block_ids.append(block)
            seal_ids.append(seal_id[block])
        return Prefix(block_ids, seal_ids, len(block_ids) * self.block_size)

    def _extend_by_pin(self, sequence: Sequence, found: Prefix) -> Prefix:
        """Return the prefix that a pin has of the sequence, partial tail included, or `found` if no pin has more.

        pin       | full | full | tail . . |      Where they differ within the tail, the sequence gets a copy of the
        sequence  | same | same | same x y | ...  tail to continue from. A full block is not copied but recomputed.
        """
        size, request, best = self.block_size, sequence.request, found
        if request.sampling_params.skip_reading_prefix_cache:
            return found
        for pin in self.pins.values():
            if pin.request.salt == request.salt:
                num = common_prefix_length(pin.request.prompt_token_ids, sequence.token_ids)
                num = min(num, len(sequence.token_ids) - 1)
                if num < pin.num_computed // size * size:
                    num = num // size * size
                if num > best.num_positions:
                    best = Prefix(pin.block_ids[: cdiv(num, self.block_size)], pin.seal_ids[: num // size], num)
        return best

    def _uses_prefix_cache(self, sequence: Sequence) -> bool:
        """True if the sequence may begin with blocks found in the index."""
        return self.enabled and not sequence.request.sampling_params.skip_reading_prefix_cache

    def next_key(self, sequence: Sequence, seal_ids: list[SealId]) -> Key:
        """Return the key of the block after those of `seal_ids`. The known tokens must fill it."""
        parent = seal_ids[-1] if seal_ids else sequence.request.salt
        return parent, self._tokens_of(sequence, len(seal_ids))

    def is_next_block_in(self, keys: Container[Key], sequence: Sequence, prefix: Prefix) -> bool:
        """True if the first block that `lookup` did not find is in `keys`."""
        found = len(prefix.seal_ids)
        return (
            self._uses_prefix_cache(sequence)
            and found < (len(sequence.token_ids) - 1) // self.block_size
            and (self.next_key(sequence, prefix.seal_ids) in keys)
        )

    def sibling_prefix(self, sequence: Sequence) -> Prefix:
        """Return the longest run of full blocks that an earlier sequence of the same request has in common with this.

        A preempted group is recomputed one sequence at a time and takes these blocks from the sibling itself. The index
        has none of them when prefix caching is off, or where an equal block elsewhere is the canonical one.
        """
        size, tokens = self.block_size, sequence.token_ids
        best = Prefix([], [], 0)
        for sibling in sequence.request.sequences:
            if sibling is sequence:
                break
            max_blocks = min(sibling.num_computed, len(tokens) - 1) // size
            n = 0
            while n < max_blocks and sibling.token_ids[n * size : (n + 1) * size] == tokens[n * size : (n + 1) * size]:
                n += 1
            if n > len(best.block_ids):
                best = Prefix(sibling.block_ids[:n], sibling.seal_ids[:n], n * size)
        return best

    def count_lookup(self, sequence: Sequence, prefix: Prefix) -> None:
        self.num_hits += len(prefix.block_ids)
        self.num_misses += cdiv(len(sequence.token_ids), self.block_size) - len(prefix.block_ids)
        self.num_hit_tokens += prefix.num_positions
        self.num_queried_tokens += len(sequence.token_ids)

    # -- sealing -------------------------------------------------------------------------------------------------------

    def seal(self, sequence: Sequence) -> None:
        """Seal the leading blocks whose tokens are all known to the host and computed or planned on the device.

        A stop token does not count: the device may have stopped before it wrote that position.
        """
        if not self.enabled:
            return
        known = len(sequence.token_ids) - (sequence.stop_token is not None)
        num_full = min(known, sequence.num_computed) // self.block_size
        seal_ids = sequence.seal_ids
        for i in range(len(seal_ids), num_full):
            seal_ids.append(self.pool.seal(sequence.block_ids[i], self.next_key(sequence, seal_ids)))
        self.set_seals(sequence, seal_ids)

    def set_seals(self, sequence: Sequence, seal_ids: list[SealId]) -> None:
        sequence.seal_ids = seal_ids
        sequence.seal_at = (len(seal_ids) + 1) * self.block_size if self.enabled else NEVER

    def discard(self, sequence: Sequence) -> None:
        """Unseal the blocks of a sequence with invalid values, both those it uses alone and those it left in the cache.

        Cached ones are all of its blocks after a preemption, and those it dropped from the attention window while it
        runs. Unlike `lookup`, the search ignores `skip_reading_prefix_cache` and includes the last full block.
        """
        held = dict.fromkeys(sequence.block_ids if sequence.request.status is Status.RUNNING else ())
        cached = self._find_sealed_prefix(sequence, len(sequence.token_ids) // self.block_size).block_ids
        for block in held | dict.fromkeys(cached):
            if self.pool.refs[block] == (block in held) and self.pool.seal_id[block]:
                self.pool.unseal(block)

    def _tokens_of(self, sequence: Sequence, index: int) -> bytes:
        size = self.block_size
        return sequence.token_ids[index * size : (index + 1) * size].tobytes()
