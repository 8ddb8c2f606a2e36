"""`PrefixIndex`: which replica caches which blocks, by their exact content.

A key is a block hash: the digest of a block's tokens, of all tokens before them, and of the salt
(`core.types.block_hashes`). Replicas are numbered from 0; a set of them is an int with a bit for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence


def members(mask: int) -> Iterator[int]:
    """The numbers of a set's replicas, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class PrefixIndex:
    """The cached blocks of all replicas, and the blocks that they are computing.

    It has an entry for each block that some replica caches: the replicas' pools bound it.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # block hash -> replicas that cache it
        self._cached: dict[int, set[int]] = {}  # replica -> hashes of its blocks
        self._num_coming: Counter[tuple[int, int]] = Counter()  # (replica, block hash) -> requests that compute it
        self._coming: dict[int, int] = {}  # block hash -> replicas that compute it

    def __len__(self) -> int:
        return len(self._holders)

    def num_cached(self, replica: int) -> int:
        """Number of blocks of different content that a replica caches."""
        return len(self._cached.get(replica, ()))

    # -- what engines report -------------------------------------------------------------------------------------------

    def store(self, replica: int, hashes: Iterable[int]) -> None:
        cached = self._cached.setdefault(replica, set())
        for block_hash in hashes:
            cached.add(block_hash)
            self._holders[block_hash] = self._holders.get(block_hash, 0) | 1 << replica

    def remove(self, replica: int, hashes: Iterable[int]) -> None:
        cached = self._cached.get(replica, set())
        for block_hash in hashes:
            if block_hash in cached:
                cached.remove(block_hash)
                _clear_bit(self._holders, block_hash, replica)

    def clear(self, replica: int) -> None:
        """Forget what a replica caches: it emptied its cache, or died."""
        for block_hash in self._cached.pop(replica, ()):
            _clear_bit(self._holders, block_hash, replica)

    # -- what requests will compute ------------------------------------------------------------------------------------

    def expect(self, replica: int, hashes: Iterable[int]) -> None:
        """A request on this replica computes these blocks. Call `settle` with the same ones later."""
        for block_hash in hashes:
            self._num_coming[replica, block_hash] += 1
            self._coming[block_hash] = self._coming.get(block_hash, 0) | 1 << replica

    def settle(self, replica: int, hashes: Iterable[int]) -> None:
        """The request has computed its blocks, which `store` has reported, or never will."""
        for block_hash in hashes:
            key = replica, block_hash
            self._num_coming[key] -= 1
            if not self._num_coming[key]:
                del self._num_coming[key]
                _clear_bit(self._coming, block_hash, replica)

    # -- lookup --------------------------------------------------------------------------------------------------------

    def hits(self, hashes: Sequence[int], among: int) -> dict[int, int]:
        """Replica -> number of leading blocks that it caches or computes, for each replica of `among`."""
        depths, left = {}, among
        for depth, block_hash in enumerate(hashes):
            holders = left & (self._holders.get(block_hash, 0) | self._coming.get(block_hash, 0))
            for replica in members(left ^ holders):
                depths[replica] = depth
            if not (left := holders):
                break
        for replica in members(left):
            depths[replica] = len(hashes)
        return depths


def _clear_bit(masks: dict[int, int], block_hash: int, replica: int) -> None:
    masks[block_hash] &= ~(1 << replica)
    if not masks[block_hash]:
        del masks[block_hash]
