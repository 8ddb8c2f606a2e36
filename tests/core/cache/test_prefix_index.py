"""Rules of docs/memory.md for sealing, lookup and recomputed siblings: an example of each, without a scheduler."""

from __future__ import annotations

import pytest

from octavo.core.block_pool import group_key
from octavo.core.cache.prefix_index import Prefix
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan
from octavo.core.request import Sequence, Status
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


def test_is_in_flight_names_the_first_missing_block() -> None:
    cache = KVCacheManager(8, 2)
    seq = settle(cache, [1, 2, 3])
    late = sequence([1, 2, 3, 4, 5])
    found = cache.prefixes.lookup(late)
    key = (seq.seal_ids[0], late.token_ids[2:4].tobytes())
    assert cache.prefixes.is_in_flight({key: late}, late, found)
    assert not cache.prefixes.is_in_flight({(9, key[1]): late}, late, found)
    ends = sequence([1, 2, 3, 4])
    assert not cache.prefixes.is_in_flight({key: late}, ends, found)  # its last token is computed anyway


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


# -- Memory 17 to 26: window groups ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "first"), [(1, 3), (2, 2), (3, 2), (4, 1), (5, 1), (6, 0), (7, 0), (99, 0)])
def test_a_hit_needs_what_the_next_query_attends_to(window: int, first: int) -> None:
    """At six positions, blocks of 2: `window` - 1 keys before the query. One key more than whole blocks adds none."""
    cache = KVCacheManager(30, 2, windows=(window,))
    seq = settle(cache, list(range(7)), 6)
    late, theirs = sequence([*range(6), 9]), seq.windows[0].block_ids
    found = cache.prefixes.lookup(late)
    assert found.block_ids == seq.block_ids and found.num_positions == 6
    assert [(t.block_ids, t.num_dropped) for t in found.windows] == [([0] * first + theirs[first:], first)]
    for block in theirs[:first]:
        cache.pool.unseal(block)
    assert cache.prefixes.lookup(late).num_positions == 6
    if first < 3:
        cache.pool.unseal(theirs[first])
        assert cache.prefixes.lookup(late).num_positions < 6


@pytest.mark.parametrize(
    ("missing", "num"),
    [([], 5), ([4], 4), ([3], 3), ([2], 5), ([0, 1, 2], 5), ([1, 3], 1), ([0, 3], 3), ([0, 1, 3], 0)],
)
def test_the_longest_prefix_with_its_window_is_found(missing: list[int], num: int) -> None:
    """Five full blocks of 2; a window of 5 needs the two blocks before the prefix' end, if there are two."""
    cache = KVCacheManager(30, 2, windows=(5,))
    seq = settle(cache, list(range(11)))
    for i in missing:
        cache.pool.unseal(seq.windows[0].block_ids[i])
    found = cache.prefixes.lookup(sequence([*range(10), 9]))
    assert found.block_ids == seq.block_ids[:num] and found.seal_ids == seq.seal_ids[:num]
    (table,) = found.windows
    kept = max(0, num - 2)
    assert table.block_ids == [0] * kept + seq.windows[0].block_ids[kept:num] and table.num_dropped == kept


@pytest.mark.parametrize(
    ("missing", "num"),
    [([], 5), ([(0, 4)], 4), ([(0, 3)], 5), ([(1, 3)], 3), ([(0, 4), (1, 2)], 2), ([(0, 2), (1, 3)], 2)],
)
def test_all_window_groups_have_what_they_need_of_a_hit(missing: list[tuple[int, int]], num: int) -> None:
    """Windows of 3 and 5 in blocks of 2: one block and two."""
    cache = KVCacheManager(40, 2, windows=(3, 5))
    seq = settle(cache, list(range(11)))
    for group, i in missing:
        cache.pool.unseal(seq.windows[group].block_ids[i])
    found = cache.prefixes.lookup(sequence([*range(10), 9]))
    assert len(found.block_ids) == num
    for own, table, dropped in zip(seq.windows, found.windows, (max(0, num - 1), max(0, num - 2)), strict=True):
        assert table.block_ids == [0] * dropped + own.block_ids[dropped:num] and table.num_dropped == dropped
    assert list(found.held) == [*found.block_ids, *(b for table in found.windows for b in table.block_ids if b)]


def test_a_window_block_is_sealed_under_the_full_block_over_the_same_positions() -> None:
    cache = KVCacheManager(20, 2, windows=(3, 9))
    seq = settle(cache, [1, 2, 3, 4, 5])
    for group, table in enumerate(seq.windows):
        assert [cache.pool.key_of(b) for b in table.block_ids] == [group_key(seal, group) for seal in seq.seal_ids]
        assert [cache.pool.find(group_key(seal, group)) for seal in seq.seal_ids] == table.block_ids


def computed_again() -> tuple[KVCacheManager, Sequence, Sequence]:
    """Two sequences with equal tokens: the first has the canonical full blocks, and the second those of the windows."""
    cache = KVCacheManager(20, 2, windows=(3, 4))
    first = settle(cache, [1, 2, 3, 4, 5])
    for block in [b for table in first.windows for b in table.block_ids]:
        cache.pool.unseal(block)
    return cache, first, settle(cache, [1, 2, 3, 4, 5])


def test_a_window_block_computed_again_is_sealed_under_the_canonical_full_block() -> None:
    cache, first, second = computed_again()
    assert second.seal_ids == first.seal_ids and not set(second.block_ids) & set(first.block_ids)
    found = cache.prefixes.lookup(sequence([1, 2, 3, 4, 5]))
    narrow, wide = second.windows
    assert found.block_ids == first.block_ids
    assert [t.block_ids for t in found.windows] == [[0, narrow.block_ids[1]], wide.block_ids]


def test_a_block_that_left_its_window_before_it_was_sealed_is_not_found() -> None:
    cache = KVCacheManager(20, 2, windows=(1,))
    seq = settle(cache, [1, 2, 3], 3)
    cache.grow(seq, 3, StepPlan())
    seq.num_computed = 6  # a decode window in flight
    cache.drop_out_of_window(seq, StepPlan())
    seq.token_ids.extend([4, 5, 6])
    cache.prefixes.seal(seq)
    assert len(seq.seal_ids) == 3 and cache.pool.num_indexed == 3 + 1  # the first was sealed before


@pytest.mark.parametrize("state", ["held", "dropped", "preempted"])
def test_discard_unseals_window_blocks_under_full_blocks_of_others(state: str) -> None:
    cache, first, second = computed_again()
    sealed = [b for table in second.windows for b in table.block_ids if cache.pool.seal_id[b]]
    assert len(sealed) == 4
    if state == "dropped":
        cache.drop_out_of_window(second, StepPlan())
    elif state == "preempted":
        cache.free(second)
        second.request.status = Status.WAITING
    cache.prefixes.discard(second)
    assert not any(cache.pool.seal_id[b] for b in sealed) and all(cache.pool.seal_id[b] for b in first.block_ids)


def test_discard_keeps_window_blocks_of_others() -> None:
    cache = KVCacheManager(20, 2, windows=(3,))
    bad = settle(cache, [1, 2, 3, 4, 5])
    reader = settle(cache, [1, 2, 3, 4, 6])
    shared = reader.windows[0].block_ids[1]
    assert reader.windows[0].block_ids[0] == 0 and shared == bad.windows[0].block_ids[1]
    cache.prefixes.discard(bad)
    assert cache.pool.seal_id[shared] and not cache.pool.seal_id[bad.windows[0].block_ids[0]]


def test_a_sibling_gets_the_window_of_its_next_query() -> None:
    cache = KVCacheManager(40, 2, windows=(3, 1), enable_prefix_caching=False)
    first = settle(cache, [1, 2, 3, 4, 5, 6], 5, width=2)
    second = Sequence(first.request, 1, first.token_ids[:], 99)
    first.request.sequences.append(second)
    found = cache.prefixes.sibling_prefix(second)
    assert found.block_ids == first.block_ids[:2] and found.num_positions == 4
    tables = [(table.block_ids, table.num_dropped) for table in found.windows]
    assert tables == [([0, first.windows[0].block_ids[1]], 1), ([0, 0], 2)]
    second.token_ids[0] = 9
    found = cache.prefixes.sibling_prefix(second)
    assert [(table.block_ids, table.num_dropped) for table in found.windows] == [([], 0), ([], 0)]


@pytest.mark.parametrize(("windows", "num", "num_group"), [((), 8, 8), ((3,), 8, 4)])
def test_a_rebuilt_group_with_windows_begins_with_whole_blocks_of_its_prompt(
    windows: tuple[int, ...], num: int, num_group: int
) -> None:
    """A sibling that differs after the prompt begins there, and needs the window before that."""
    cache = KVCacheManager(40, 2, windows=windows)
    settle(cache, list(range(9)))
    seq = sequence(list(range(5)), width=2)
    seq.token_ids.extend([5, 6, 7, 8])
    assert cache.prefixes.lookup(seq).num_positions == num
    seq.request.sequences.append(Sequence(seq.request, 1, seq.token_ids[:], 99))
    assert cache.prefixes.lookup(seq).num_positions == num_group
