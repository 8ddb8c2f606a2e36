"""Rules of docs/memory.md for sealing, lookup and recomputed siblings: an example of each, without a scheduler."""

from __future__ import annotations

import pytest

from octavo.core.cache.prefix_index import Prefix
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan
from octavo.core.request import Sequence
from tests.core.lab import sequence, settle

# -- Memory 2: sealing and the index -----------------------------------------------------------------------------------


def test_only_full_blocks_of_known_and_computed_tokens_are_sealed() -> None:
    cache = KVCacheManager(8, 4)
    seq = settle(cache, list(range(10)), 7)
    assert len(seq.seal_ids) == 1
    seq.num_computed = 8
    cache.prefixes.seal(seq)
    assert len(seq.seal_ids) == 2
    assert [bool(cache.pool.seal_id[b]) for b in seq.block_ids] == [True, True]
    ahead = settle(cache, [50, 51, 52], 3)
    cache.grow(ahead, 6, StepPlan())
    ahead.num_computed = 9  # a decode window in flight: its tokens are unknown
    cache.prefixes.seal(ahead)
    assert ahead.seal_ids == []


def test_a_stop_token_does_not_count_as_computed() -> None:
    cache = KVCacheManager(8, 2)
    seq = settle(cache, [1, 2, 3, 4, 5], 3)
    seq.num_computed, seq.stop_token = 4, 4
    del seq.token_ids[4:]
    cache.prefixes.seal(seq)
    assert len(seq.seal_ids) == 1


def test_the_older_of_equal_blocks_stays_canonical() -> None:
    """The newer block is not indexed and becomes free on release. Its sequence chains on under the older seal id."""
    cache = KVCacheManager(8, 2)
    pool = cache.pool
    older = settle(cache, [1, 2, 9])
    twin = sequence([1, 2, 3, 4, 9])
    cache.attach(twin, Prefix([], [], 0))
    cache.grow(twin, 4, StepPlan())
    twin.num_computed = 4
    cache.prefixes.seal(twin)
    assert twin.seal_ids[0] == older.seal_ids[0] == pool.seal_id[older.block_ids[0]]
    assert pool.seal_id[twin.block_ids[0]] == 0 and pool.seal_id[twin.block_ids[1]]
    third = sequence([1, 2, 3, 4, 5])
    assert cache.prefixes.lookup(third).block_ids == [older.block_ids[0], twin.block_ids[1]]
    free = pool.num_free
    cache.free(twin)
    assert pool.num_free == free + 1 and pool.num_cached == 1


def test_without_prefix_caching_nothing_is_sealed_or_found() -> None:
    cache = KVCacheManager(8, 2, enable_prefix_caching=False)
    seq = settle(cache, [1, 2, 3, 4, 5])
    assert seq.seal_ids == [] and cache.pool.num_sealed == 0 and seq.seal_at > 1 << 60
    assert cache.prefixes.lookup(sequence([1, 2, 3, 4, 5])) == Prefix([], [], 0)
    cache.free(seq)
    assert cache.pool.num_cached == 0 and cache.reset_prefix_cache() == 0


# -- Memory 3: lookup --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_lookup_leaves_a_token_to_compute(size: int) -> None:
    """A fully cached prompt still needs logits."""
    cache = KVCacheManager(16, size)
    settle(cache, list(range(9)), 8)
    for length in range(1, 9):
        found = cache.prefixes.lookup(sequence(list(range(length))))
        assert len(found.block_ids) == (length - 1) // size == len(found.seal_ids)


def test_a_lookup_stops_at_the_first_miss() -> None:
    """Cached blocks after a missing one are not part of the prefix."""
    cache = KVCacheManager(8, 2)
    seq = settle(cache, [1, 2, 3, 4, 5, 6, 7])
    cache.free(seq)
    assert list(cache.pool.cached()) == [3, 2, 1]
    found = cache.prefixes.lookup(sequence([1, 2, 9, 9, 3, 4, 0]))
    assert found.block_ids == [1]  # 3, 4 does follow 1, 2: but not here
    cache.pool.unseal(2)
    found = cache.prefixes.lookup(sequence([1, 2, 3, 4, 5, 6, 7]))
    assert found.block_ids == [1]


def test_is_next_block_in_names_the_first_missing_block() -> None:
    cache = KVCacheManager(8, 2)
    seq = settle(cache, [1, 2, 3])
    late = sequence([1, 2, 3, 4, 5])
    found = cache.prefixes.lookup(late)
    key = (seq.seal_ids[0], late.token_ids[2:4].tobytes())
    assert cache.prefixes.is_next_block_in({key}, late, found)
    assert not cache.prefixes.is_next_block_in({(9, key[1])}, late, found)
    ends = sequence([1, 2, 3, 4])
    assert not cache.prefixes.is_next_block_in({key}, ends, found)  # its last token is computed anyway


# -- Memory 8: freeing -------------------------------------------------------------------------------------------------


def test_discard_unseals_only_blocks_without_other_users() -> None:
    """Blocks that others computed or share stay sealed."""
    cache = KVCacheManager(8, 2)
    good, bad = settle(cache, [1, 2, 9]), settle(cache, [1, 2, 3, 4, 5])
    cache.prefixes.discard(bad)
    assert cache.prefixes.lookup(sequence([1, 2, 3, 4, 5])).block_ids == good.block_ids[:1]
    cache.free(bad)
    assert cache.pool.num_cached == 0 and cache.pool.num_used == 1


# -- Scheduling 2: preemption ------------------------------------------------------------------------------------------


def test_sibling_prefix_is_the_longest_common_run() -> None:
    """Only full, computed blocks count, as far as tokens are equal and without the last token."""
    cache = KVCacheManager(20, 2, enable_prefix_caching=False)
    first = settle(cache, [1, 2, 3, 4, 5, 6])
    request = first.request
    for tokens, count in (([1, 2, 7, 8, 9, 9], 5), ([1, 2, 7, 8, 9, 9], 0), ([1, 2, 7, 8], 0), ([5, 5, 7, 8], 0)):
        seq = Sequence(request, len(request.sequences), first.token_ids[:0], 99)
        seq.token_ids.extend(tokens)
        request.sequences.append(seq)
        cache.grow(seq, count, StepPlan())
        seq.num_computed = count
    second, third, short, stranger = request.sequences[1:]
    assert cache.prefixes.sibling_prefix(first).block_ids == []
    assert cache.prefixes.sibling_prefix(second).block_ids == first.block_ids[:1]
    assert cache.prefixes.sibling_prefix(third).block_ids == second.block_ids[:2]
    assert cache.prefixes.sibling_prefix(short).block_ids == first.block_ids[:1]
    assert cache.prefixes.sibling_prefix(stranger).block_ids == []


def test_sibling_prefix_has_only_computed_blocks() -> None:
    cache = KVCacheManager(20, 2, enable_prefix_caching=False)
    first = settle(cache, [1, 2, 3, 4, 5, 6], 3)
    assert len(first.block_ids) == 2
    second = Sequence(first.request, 1, first.token_ids[:], 99)
    for _ in range(2):  # before it is one of its request's, and after
        assert cache.prefixes.sibling_prefix(second).block_ids == first.block_ids[:1]
        first.request.sequences.append(second)
