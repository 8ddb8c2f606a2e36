"""The memory rules in the design's numbering: guarantees of `BlockPool`, `SwapSpace` and `KVCacheManager`."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.core import events as ev
from octavo.core.block_pool import BlockPool, SwapSpace
from octavo.core.in_flight import InFlightStep
from octavo.core.kv_cache_manager import KVCacheManager, Prefix
from octavo.core.plan import BlockCopy, StepPlan, SwapIn, SwapOut, TableWrite
from octavo.core.request import Sequence, Status
from octavo.core.scheduler import _Draft
from octavo.core.types import NULL_BLOCK
from tests.core.lab import RECOMPUTE, Lab, arrange, sequence


def snapshot(cache: KVCacheManager, *sequences: Sequence) -> Any:
    """Return the whole state for comparison."""
    pool, host = cache.pool, cache.swap_space
    return (
        [bytes(a) for a in (pool.refs, pool.seal_id, pool._prev, pool._next, host.refs)],
        list(pool._packed_of),
        pool.num_indexed,
        (pool._untouched, list(pool._freed), pool.num_free, pool.num_cached, pool.num_refs, pool.last_seal_id),
        (pool.num_sealed, pool.num_evicted, host.num_free, host._untouched, list(host._freed)),
        list(cache.rows._free),
        cache.counters(),
        (cache.num_hit_tokens, cache.num_queried_tokens),
        list(cache._holders),
        [[list(v) if isinstance(v := getattr(s, k), list) else v for k in s.__slots__] for s in sequences],
        [dict(s.request.shared_on_device) for s in sequences],
    )


def settle(cache: KVCacheManager, tokens: list[int], count: int | None = None, **options: Any) -> Sequence:
    """A sequence that looked its prompt up and computed `count` positions (all but the last token)."""
    seq = sequence(tokens, **options)
    cache.attach(seq, cache.lookup(seq))
    count = len(tokens) - 1 if count is None else count
    cache.grow(seq, count - seq.num_computed, StepPlan())
    seq.num_computed = count
    cache.seal(seq)
    seq.request.status = Status.RUNNING
    return seq


# -- 4.1: three states -------------------------------------------------------------------------------------------------


def test_three_states_partition_the_pool() -> None:
    pool = BlockPool(4)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 0, 4)
    a, b = pool.allocate(), pool.allocate()
    assert (pool.num_used, pool.num_cached, pool.num_free) == (2, 0, 2)
    pool.seal(a, (-1, b"a"))
    pool.release(a)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 1, 2)
    pool.release(b)
    assert (pool.num_used, pool.num_cached, pool.num_free, pool.num_available) == (0, 1, 3, 4)
    pool.share(a)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 0, 3)


def test_the_null_block_is_never_allocated() -> None:
    pool = BlockPool(3)
    assert [pool.allocate() for _ in range(3)] == [1, 2, 3]
    for misuse in (NULL_BLOCK, -1, 4):
        with pytest.raises(AssertionError):
            pool.share(misuse)


def test_a_new_pool_fills_no_list() -> None:
    """Ids from the high-water mark on were never written to any list."""
    pool = BlockPool(1_000_000)
    assert pool._freed == [] and pool._untouched == 1
    assert pool.allocate() == 1
    assert pool._untouched == 2


def test_freed_blocks_are_allocated_last_in_first_out() -> None:
    pool = BlockPool(4)
    arrange(pool, 2, 4, 1)
    assert [pool.allocate() for _ in range(4)] == [2, 4, 1, 3]


def test_allocating_from_an_empty_pool_fails_an_assertion() -> None:
    pool, host = BlockPool(1), SwapSpace(1)
    pool.allocate(), host.allocate()
    with pytest.raises(AssertionError, match="pool is empty"):
        pool.allocate()
    with pytest.raises(AssertionError, match="swap space is full"):
        host.allocate()


# -- 4.2: sealing and the index ----------------------------------------------------------------------------------------


def test_only_full_blocks_of_known_and_computed_tokens_are_sealed() -> None:
    cache = KVCacheManager(8, 4)
    seq = settle(cache, list(range(10)), 7)
    assert len(seq.seal_ids) == 1
    seq.num_computed = 8
    cache.seal(seq)
    assert len(seq.seal_ids) == 2
    assert [bool(cache.pool.seal_id[b]) for b in seq.block_ids] == [True, True]
    ahead = settle(cache, [50, 51, 52], 3)
    cache.grow(ahead, 6, StepPlan())
    ahead.num_computed = 9  # a decode window in flight: its tokens are unknown
    cache.seal(ahead)
    assert ahead.seal_ids == []


def test_a_stop_token_does_not_count_as_computed() -> None:
    cache = KVCacheManager(8, 2)
    seq = settle(cache, [1, 2, 3, 4, 5], 3)
    seq.num_computed, seq.stop_token = 4, 4
    del seq.token_ids[4:]
    cache.seal(seq)
    assert len(seq.seal_ids) == 1


def test_seal_ids_are_never_used_twice() -> None:
    pool = BlockPool(1)
    seen = []
    for _ in range(3):
        block = pool.allocate()
        seen.append(pool.seal(block, (-1, b"same")))
        pool.release(block)
        pool.evict_all_cached()
    assert seen == [1, 2, 3] and pool.last_seal_id == 3 == pool.num_sealed


def test_the_parent_of_a_first_block_is_its_salt() -> None:
    """The key also encodes the salt's length, so salt and tokens cannot be confused."""
    pool = BlockPool(8)
    keys = [(b"", b"abc"), (b"a", b"bc"), (b"ab", b"c"), (1, b"abc"), (b"\1\0\0\0\0\0\0\0", b"abc")]
    blocks = [pool.allocate() for _ in keys]
    for block, key in zip(blocks, keys, strict=True):
        pool.seal(block, key)
    assert [pool.find(key) for key in keys] == blocks
    assert [pool.key_of(block) for block in blocks] == keys


def test_the_older_of_equal_blocks_stays_canonical() -> None:
    """The newer block is not indexed and becomes free on release. Its sequence chains on under the older seal id."""
    cache = KVCacheManager(8, 2)
    pool = cache.pool
    older = settle(cache, [1, 2, 9])
    twin = sequence([1, 2, 3, 4, 9])
    cache.attach(twin, Prefix([], [], 0))
    cache.grow(twin, 4, StepPlan())
    twin.num_computed = 4
    cache.seal(twin)
    assert twin.seal_ids[0] == older.seal_ids[0] == pool.seal_id[older.block_ids[0]]
    assert pool.seal_id[twin.block_ids[0]] == 0 and pool.seal_id[twin.block_ids[1]]
    third = sequence([1, 2, 3, 4, 5])
    assert cache.lookup(third).block_ids == [older.block_ids[0], twin.block_ids[1]]
    free = pool.num_free
    cache.free(twin)
    assert pool.num_free == free + 1 and pool.num_cached == 1


def test_a_sealed_block_keeps_its_seal() -> None:
    """Its parent was evicted and sealed again elsewhere: a second key would index it twice."""
    pool = BlockPool(4)
    block = pool.allocate()
    seal = pool.seal(block, (7, b"x"))
    assert pool.seal(block, (8, b"x")) == seal
    assert pool.num_indexed == pool.num_sealed == 1
    assert pool.find((7, b"x")) == block and pool.find((8, b"x")) == NULL_BLOCK


def test_blocks_filled_by_decoding_are_sealed_too() -> None:
    lab = Lab(16)
    first = lab.add("turn 1", [1, 2, 3], 6)
    lab.run()
    output = first.finished_sequences[0].token_ids.tolist()
    again = lab.add("turn 2", [*output, 0, 0], 1)
    lab.run()
    assert again.num_cached_tokens == 8 // 2 * 2 == (len(output) - 1) // 2 * 2


def test_an_in_place_write_never_goes_to_a_sealed_block() -> None:
    """Only full blocks are sealed, so an indexed block is never written again."""
    cache = KVCacheManager(8, 4)
    seq = settle(cache, [1, 2, 3, 4, 5, 6, 7])
    assert not cache.pool.seal_id[seq.block_ids[1]]
    assert cache.lookup(sequence([1, 2, 3, 4, 5, 6, 7, 0, 0])).block_ids == seq.block_ids[:1]


def test_without_prefix_caching_nothing_is_sealed_or_found() -> None:
    cache = KVCacheManager(8, 2, enable_prefix_caching=False)
    seq = settle(cache, [1, 2, 3, 4, 5])
    assert seq.seal_ids == [] and cache.pool.num_sealed == 0 and seq.seal_at > 1 << 60
    assert cache.lookup(sequence([1, 2, 3, 4, 5])) == ([], [], 0)
    cache.free(seq)
    assert cache.pool.num_cached == 0 and cache.reset_prefix_cache() == 0


def test_the_index_is_split_over_several_dicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single dict of millions of entries would pause everything while it grows. The key alone determines its dict."""
    monkeypatch.setattr("octavo.core.block_pool.BLOCKS_PER_SHARD", 4)
    pool = BlockPool(40)
    keys = [(-1 - i % 3, bytes([i])) for i in range(40)]
    blocks = [pool.allocate() for _ in keys]
    for block, key in zip(blocks, keys, strict=True):
        pool.seal(block, key)
    assert [pool.find(key) for key in keys] == blocks
    sizes = [len(shard) for shard in pool._shards]
    assert len(sizes) == 16 and sum(sizes) == 40 == pool.num_indexed and max(sizes) < 20
    for block in blocks[::2]:
        pool.unseal(block)
    assert [pool.find(key) for key in keys] == [0 if i % 2 == 0 else b for i, b in enumerate(blocks)]
    assert len(BlockPool(4095)._shards) == 16 * 64 and len(BlockPool(3)._shards) == 1


# -- 4.3: looking up ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_lookup_leaves_a_token_to_compute(size: int) -> None:
    """A fully cached prompt still needs logits."""
    cache = KVCacheManager(16, size)
    settle(cache, list(range(9)), 8)
    for length in range(1, 9):
        found = cache.lookup(sequence(list(range(length))))
        assert len(found.block_ids) == (length - 1) // size == len(found.seal_ids)


def test_a_lookup_stops_at_the_first_miss() -> None:
    """Cached blocks after a missing one are not part of the prefix."""
    cache = KVCacheManager(8, 2)
    seq = settle(cache, [1, 2, 3, 4, 5, 6, 7])
    cache.free(seq)
    assert list(cache.pool.cached()) == [3, 2, 1]
    assert cache.lookup(sequence([1, 2, 9, 9, 3, 4, 0])).block_ids == [1]  # 3, 4 does follow 1, 2: but not here
    cache.pool.unseal(2)
    found = cache.lookup(sequence([1, 2, 3, 4, 5, 6, 7]))
    assert found.block_ids == [1]


def test_is_next_block_in_names_the_first_missing_block() -> None:
    cache = KVCacheManager(8, 2)
    seq = settle(cache, [1, 2, 3])
    late = sequence([1, 2, 3, 4, 5])
    found = cache.lookup(late)
    key = (seq.seal_ids[0], late.token_ids[2:4].tobytes())
    assert cache.is_next_block_in({key}, late, found)
    assert not cache.is_next_block_in({(9, key[1])}, late, found)
    assert not cache.is_next_block_in({key}, sequence([1, 2, 3, 4]), found)  # its last token is computed anyway


# -- 4.4: releasing and evicting ---------------------------------------------------------------------------------------


def test_eviction_takes_the_oldest_block_and_a_tail_before_its_head() -> None:
    cache = KVCacheManager(6, 2)
    a, b = settle(cache, [1, 2, 3, 4, 5, 6, 0], 6), settle(cache, [7, 8, 9, 9, 9, 9, 0], 6)
    cache.free(b)
    cache.free(a)
    assert list(cache.pool.cached()) == [6, 5, 4, 3, 2, 1]
    assert [cache.pool.allocate() for _ in range(4)] == [6, 5, 4, 3]
    assert cache.pool.num_evicted == 4
    assert cache.lookup(sequence([1, 2, 3, 4, 5, 6, 0])).block_ids == [1, 2]
    assert cache.lookup(sequence([7, 8, 9, 9, 9, 9, 0])).block_ids == []


def test_free_blocks_are_allocated_before_cached_ones() -> None:
    cache = KVCacheManager(4, 2)
    seq = settle(cache, [1, 2, 3])
    cache.free(seq)
    assert [cache.pool.allocate() for _ in range(3)] == [2, 3, 4]
    assert cache.pool.num_cached == 1 and cache.pool.allocate() == 1
    assert cache.pool.num_indexed == 0 and cache.pool.num_cached == 0


def test_a_hit_removes_a_block_from_the_lru_queue() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for i, b in enumerate(blocks):
        pool.seal(b, (-1, bytes([i])))
        pool.release(b)
    pool.share(2)
    assert list(pool.cached()) == [1, 3]
    pool.release(2)
    assert list(pool.cached()) == [1, 3, 2]


def test_eviction_drops_the_entry_of_exactly_that_block() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(), pool.allocate()
    pool.seal(a, (-1, b"a")), pool.seal(b, (-1, b"b"))
    pool.release(a), pool.release(b)
    assert pool.allocate() == a
    assert (pool.find((-1, b"a")), pool.find((-1, b"b"))) == (NULL_BLOCK, b)
    assert pool.seal_id[a] == 0
    with pytest.raises(AssertionError, match="not sealed"):
        pool._evict(a, "room")


def test_unsealing_a_cached_block_frees_it_and_a_used_one_stays_used() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(), pool.allocate()
    pool.seal(a, (-1, b"a")), pool.seal(b, (-1, b"b"))
    pool.release(a)
    pool.unseal(a)
    pool.unseal(b)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (1, 0, 1)
    assert pool.num_indexed == 0 and pool.allocate() == a


def test_reset_evicts_cached_blocks_and_keeps_used_ones() -> None:
    cache = KVCacheManager(8, 2)
    gone, used = settle(cache, [1, 2, 3, 4, 5]), settle(cache, [6, 7, 8])
    cache.free(gone)
    assert cache.reset_prefix_cache() == 2
    assert cache.pool.num_cached == 0
    assert cache.lookup(sequence([1, 2, 3])).block_ids == []
    assert cache.lookup(sequence([6, 7, 8])).block_ids == used.block_ids[:1]
    assert cache.reset_prefix_cache() == 0


# -- 4.5: counting at admission ----------------------------------------------------------------------------------------


def test_admission_counts_hits_without_users() -> None:
    cache = KVCacheManager(6, 2)
    seq = settle(cache, [1, 2, 3, 4, 5])
    late = sequence([1, 2, 3, 4, 6])
    assert cache.blocks_to_admit(late, cache.lookup(late)) == 1  # shared with a running sequence
    cache.free(seq)
    assert cache.blocks_to_admit(late, cache.lookup(late)) == 3  # two leave the LRU queue
    assert cache.blocks_to_admit(late, Prefix([], [], 0)) == 3


def test_queries_change_no_state() -> None:
    cache = KVCacheManager(8, 2, 8, num_rows=2)
    used, gone = settle(cache, [1, 2, 3, 4, 5]), settle(cache, [6, 7, 8])
    child = Sequence(used.request, 1, used.token_ids[:], 99)
    cache.fork(used, child)
    cache.free(gone)
    late = sequence([6, 7, 8, 9])
    cache.lookup(late)
    before = snapshot(cache, used, child, gone, late)
    found = cache.lookup(late)
    cache.blocks_to_admit(late, found)
    cache.blocks_needed([(used, 3), (child, 1)])
    cache.is_next_block_in({(1, b"")}, late, found)
    cache.sibling_prefix(child)
    cache.find_swap_in_blocks(used.request)
    cache.stats(), cache.counters(), list(cache.pool.cached()), cache.pool.sealed_after(0)
    assert snapshot(cache, used, child, gone, late) == before


def test_a_refused_swap_changes_no_state() -> None:
    cache = KVCacheManager(8, 2, 1)
    seq = settle(cache, [1, 2, 3, 4, 5])
    plan = StepPlan()
    before = snapshot(cache, seq)
    assert not cache.swap_out(seq.request, plan)
    assert snapshot(cache, seq) == before
    assert not plan and cache.num_swapped_out == 0


def test_a_waiting_request_changes_no_state() -> None:
    lab = Lab(5)
    lab.add("A", [1, 2, 3, 4, 5, 6, 7], 2)
    lab.step()
    late = lab.add("B", [1, 2, 9, 9, 9, 9], 3)
    before = snapshot(lab.cache, *late.sequences)
    assert not lab.scheduler._admit(late, _Draft(InFlightStep(StepPlan()), 99))
    assert lab.reasons("B") == ["blocks"]
    assert snapshot(lab.cache, *late.sequences) == before
    lab.run()


def test_a_requests_lookup_is_counted_once() -> None:
    """Only the first admission counts, not the one after a preemption."""
    lab = Lab(6, policy=RECOMPUTE)
    lab.add("A", [1, 2, 3, 4], 6)
    lab.add("B", [5, 6, 7, 8], 6)
    lab.run()
    stats = lab.cache.stats()
    assert lab.scheduler.num_preemptions == 1
    assert (stats.num_hits, stats.num_misses, stats.num_queried_tokens) == (0, 4, 8)


# -- 4.6: how much a sequence holds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_a_sequence_holds_exactly_the_blocks_of_its_computed_positions(size: int) -> None:
    cache = KVCacheManager(40, size)
    seq = sequence(list(range(100)))
    cache.attach(seq, Prefix([], [], 0))
    for count in (1, 1, 2, 5, 1, 7):
        needed = cache.blocks_needed([(seq, count)])
        held = len(seq.block_ids)
        cache.grow(seq, count, StepPlan())
        seq.num_computed += count
        assert len(seq.block_ids) - held == needed
        assert len(seq.block_ids) == -(-seq.num_computed // size)
        assert seq.room == len(seq.block_ids) * size


def test_growing_writes_only_changed_table_entries() -> None:
    cache = KVCacheManager(9, 2, num_rows=1)
    seq = sequence([1, 2, 3])
    cache.attach(seq, Prefix([], [], 0))
    plan = StepPlan()
    cache.grow(seq, 3, plan)
    assert plan.table_writes == []  # no row yet
    seq.num_computed = 3
    cache.rows.assign(seq, plan)
    assert plan.table_writes == [TableWrite(0, 0, (1, 2))]
    cache.grow(seq, 1, plan)
    seq.num_computed = 4
    assert len(plan.table_writes) == 1
    cache.grow(seq, 3, plan)
    assert plan.table_writes[1:] == [TableWrite(0, 2, (3, 4))]


def test_an_empty_prompt_fails_an_assertion() -> None:
    with pytest.raises(AssertionError, match="empty prompt"):
        sequence([])


# -- 4.7: forks and copies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_forks", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_fork_costs_at_most_one_copy_and_never_of_a_sealed_block(num_forks: int) -> None:
    """Random families: forks of forks, growth by up to two blocks, and ends in any order."""
    rng = random.Random(7)
    cache = KVCacheManager(600, 4, num_rows=8)
    family = [settle(cache, list(range(6)), 6)]
    for made in range(1, num_forks + 1):
        parent = rng.choice(family)
        child = Sequence(parent.request, made, parent.token_ids[:], 99)
        used = cache.pool.num_used
        cache.fork(parent, child)
        assert cache.pool.num_used == used  # only references change
        family.append(child)
        for seq in rng.sample(family, min(len(family), rng.randint(0, 3))):
            count, plan, before = rng.randint(1, 8), StepPlan(), cache.num_copied
            needs, available = cache.blocks_needed([(seq, count)]), cache.pool.num_available
            cache.grow(seq, count, plan)
            assert available - cache.pool.num_available == needs
            assert cache.num_copied - before == len(plan.copies) <= 1
            assert not any(cache.pool.seal_id[copy.src] for copy in plan.copies)
            seq.num_computed += count
            seq.token_ids.extend(rng.randrange(3) for _ in range(seq.num_computed - len(seq.token_ids)))
            cache.seal(seq)
        for last in [s for s in family if s.num_computed > 120] + rng.sample(family, max(0, len(family) - 12)):
            if last in family:
                family.remove(last)
                cache.free(last)
        family = family or [settle(cache, list(range(6)), 6)]
        assert cache.num_copied <= made
    assert cache.num_copied > num_forks // 10
    for seq in family:
        cache.free(seq)
    assert cache.pool.num_used == 0


@pytest.mark.parametrize("num_sharers", [2, 3, 4])
def test_k_sharers_make_k_minus_one_copies(num_sharers: int) -> None:
    cache = KVCacheManager(20, 4, num_rows=8)
    parent = settle(cache, list(range(6)), 6)
    group = [parent] + [Sequence(parent.request, i, parent.token_ids[:], 99) for i in range(1, num_sharers)]
    for child in group[1:]:
        cache.fork(parent, child)
        assert (child.num_computed, child.room, child.seal_ids) == (6, 8, parent.seal_ids)
        assert child.seal_ids is not parent.seal_ids and child.block_ids is not parent.block_ids
    head, tail = parent.block_ids
    assert cache.pool.refs[tail] == num_sharers
    plan = StepPlan()
    cache.rows.assign(group[0], plan)
    assert cache.blocks_needed((s, 1) for s in group) == num_sharers - 1
    assert cache.blocks_needed((s, 3) for s in group) == num_sharers - 1 + num_sharers
    before = cache.pool.num_used
    for seq in group:
        cache.grow(seq, 1, plan)
        seq.num_computed += 1
    assert plan.copies == [BlockCopy(tail, s.block_ids[1]) for s in group[:-1]]
    assert plan.table_writes[1:] == [TableWrite(0, 1, (group[0].block_ids[1],))]
    assert group[-1].block_ids == [head, tail] and cache.pool.num_used == before + num_sharers - 1
    assert cache.pool.refs[head] == num_sharers and cache.num_copied == num_sharers - 1
    for seq in group:
        cache.free(seq)
    assert cache.pool.num_used == 0


def test_a_full_tail_is_never_copied() -> None:
    cache = KVCacheManager(20, 4)
    parent = settle(cache, list(range(9)), 8)
    child = Sequence(parent.request, 1, parent.token_ids[:], 99)
    cache.fork(parent, child)
    assert cache.blocks_needed([(parent, 1), (child, 1)]) == 2
    plan = StepPlan()
    cache.grow(child, 1, plan)
    assert plan.copies == [] and child.block_ids[:2] == parent.block_ids


def test_a_fork_of_a_sequence_without_blocks_holds_none() -> None:
    cache = KVCacheManager(4, 2)
    parent = sequence([1, 2])
    child = Sequence(parent.request, 1, parent.token_ids[:], 99)
    cache.fork(parent, child)
    assert child.block_ids == [] and not cache._holders


# -- 4.8: freeing ------------------------------------------------------------------------------------------------------


def test_free_is_idempotent_and_clears_the_table() -> None:
    cache = KVCacheManager(8, 2)
    seq, other = settle(cache, [1, 2, 3, 4, 5]), settle(cache, [6, 7, 8, 9, 9])
    cache.free(seq)
    assert (seq.block_ids, seq.room, seq.num_computed, seq.seal_ids) == ([], 0, 0, [])
    assert seq.seal_at == 2 and list(cache._holders) == [other]
    before = snapshot(cache, seq, other)
    cache.free(seq)
    assert snapshot(cache, seq, other) == before


def test_a_double_release_fails_an_assertion() -> None:
    pool, host = BlockPool(2), SwapSpace(2)
    for tier in (pool, host):
        block = tier.allocate()
        tier.release(block)
        with pytest.raises(AssertionError, match="more often"):
            tier.release(block)
    with pytest.raises(AssertionError):
        host.share(1)
    assert (pool.num_used, host.num_used) == (0, 0)


def test_rows_are_released_once() -> None:
    cache = KVCacheManager(4, 2, num_rows=2)
    seq = settle(cache, [1, 2, 3])
    cache.rows.assign(seq, StepPlan())
    assert seq.row == 0 and cache.rows.num_free == 1
    seq.row_has_last = True
    cache.rows.release(seq)
    cache.rows.release(seq)
    assert seq.row == -1 and not seq.row_has_last and cache.rows.num_free == 2


def test_discard_unseals_only_blocks_without_other_users() -> None:
    """Blocks that others computed or share stay sealed."""
    cache = KVCacheManager(8, 2)
    good = settle(cache, [1, 2, 9])
    bad = settle(cache, [1, 2, 3, 4, 5])
    cache.discard(bad)
    assert cache.lookup(sequence([1, 2, 3, 4, 5])).block_ids == good.block_ids[:1]
    cache.free(bad)
    assert cache.pool.num_cached == 0
    assert cache.pool.num_used == 1


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
    assert cache.sibling_prefix(first).block_ids == []
    assert cache.sibling_prefix(second).block_ids == first.block_ids[:1]
    assert cache.sibling_prefix(third).block_ids == second.block_ids[:2]
    assert cache.sibling_prefix(short).block_ids == first.block_ids[:1]
    assert cache.sibling_prefix(stranger).block_ids == []


def test_sibling_prefix_has_only_computed_blocks() -> None:
    cache = KVCacheManager(20, 2, enable_prefix_caching=False)
    first = settle(cache, [1, 2, 3, 4, 5, 6], 3)
    assert len(first.block_ids) == 2
    second = Sequence(first.request, 1, first.token_ids[:], 99)
    first.request.sequences.append(second)
    assert cache.sibling_prefix(second).block_ids == first.block_ids[:1]


# -- 4.9: the swap space -----------------------------------------------------------------------------------------------


def test_host_blocks_are_reference_counted() -> None:
    host = SwapSpace(3)
    a, b = host.allocate(), host.allocate()
    assert (a, b, host.num_used, host.num_free) == (1, 2, 2, 1)
    host.share(a)
    host.release(a)
    assert host.num_used == 2
    host.release(a)
    assert host.num_used == 1 and host.allocate() == a
    assert host.allocate() == 3


def test_a_group_is_swapped_whole_each_block_once() -> None:
    cache = KVCacheManager(8, 2, 8)
    parent = settle(cache, [1, 2, 3, 4], 3)
    child = Sequence(parent.request, 1, parent.token_ids[:], 99)
    parent.request.sequences.append(child)
    cache.fork(parent, child)
    cache.grow(child, 2, plan := StepPlan())
    child.num_computed = 5
    out = StepPlan()
    assert cache.swap_out(parent.request, out)
    parent.request.status = Status.SWAPPED
    assert len(plan.copies) == 1
    assert out.swap_outs == [SwapOut(1, 1), SwapOut(2, 2), SwapOut(3, 3), SwapOut(4, 4)]
    assert (parent.block_ids, child.block_ids) == ([1, 2], [1, 3, 4])
    assert list(cache.swap_space.refs) == [0, 2, 1, 1, 1, 0, 0, 0, 0]
    assert cache.pool.num_used == 0 and cache.pool.num_cached == 1 and not cache._holders
    assert cache.num_swapped_out == 4

    cache.reset_prefix_cache()
    found = cache.find_swap_in_blocks(parent.request)
    assert found is not None and found.host_ids == [1, 2, 3, 4] and found.num_needed == 4
    assert cache.blocks_needed([(parent, 1), (child, 1)], swapped=True) == 0
    back = StepPlan()
    cache.swap_in(parent.request, found, back)
    assert [s.src for s in back.swap_ins] == [1, 2, 3, 4]
    assert all(isinstance(s, SwapIn) for s in back.swap_ins)
    to = dict(back.swap_ins)
    assert (parent.block_ids, child.block_ids) == ([to[1], to[2]], [to[1], to[3], to[4]])
    assert cache.pool.refs[to[1]] == 2 and cache.pool.num_refs == 5
    assert cache.swap_space.num_used == 0 and list(cache._holders) == [parent, child]
    assert parent.seal_ids == [] and parent.seal_at == 2  # sealed anew
    assert cache.num_swapped_in == 4


def test_blocks_that_a_swap_leaves_cached_are_evicted_tail_first() -> None:
    cache = KVCacheManager(8, 2, 8)
    seq = settle(cache, [1, 2, 3, 4, 5, 6, 7])
    assert cache.swap_out(seq.request, StepPlan())
    assert list(cache.pool.cached()) == [3, 2, 1]


def test_blocks_needed_of_a_swapped_group_uses_host_references() -> None:
    cache = KVCacheManager(8, 2, 8)
    parent = settle(cache, [1, 2, 3, 4], 3)
    child = Sequence(parent.request, 1, parent.token_ids[:], 99)
    parent.request.sequences.append(child)
    cache.fork(parent, child)
    cache.swap_out(parent.request, StepPlan())
    parent.request.status = Status.SWAPPED
    assert cache.blocks_needed([(parent, 1), (child, 1)], swapped=True) == 1  # the shared tail, for one of them
    cache.free(parent)
    cache.free(child)
    assert cache.swap_space.num_used == 0 and cache.pool.num_used == 0


def test_only_the_prefix_shared_on_the_device_keeps_its_seals() -> None:
    """Blocks 1 and 2 stay on the device and keep their seals; blocks swapped in after them are sealed again."""
    cache = KVCacheManager(12, 2, 12)
    other = settle(cache, [1, 2, 3, 4, 5])
    seq = settle(cache, [1, 2, 3, 4, 5, 6, 7])
    assert seq.block_ids[:2] == other.block_ids[:2]
    assert len(seq.seal_ids) == 3
    cache.swap_out(seq.request, StepPlan())
    seq.request.status = Status.SWAPPED
    assert seq.block_ids == [-1, -2, 1]
    found = cache.find_swap_in_blocks(seq.request)
    assert found is not None and (found.shared_on_device, found.num_needed) == ([1, 2], 1)
    cache.swap_in(seq.request, found, StepPlan())
    assert seq.block_ids[:2] == [1, 2] and len(seq.seal_ids) == 2 and seq.seal_at == 6


def test_aborting_a_swapped_request_frees_the_host() -> None:
    cache = KVCacheManager(8, 2, 8)
    other, seq = settle(cache, [1, 2, 3]), settle(cache, [1, 2, 5, 6, 7])
    cache.swap_out(seq.request, StepPlan())
    seq.request.status = Status.SWAPPED
    refs = cache.pool.refs[:]
    cache.free(seq)
    assert cache.swap_space.num_used == 0 and cache.pool.refs == refs
    assert list(cache._holders) == [other]


# -- 4.10: waste -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 16])
def test_unfilled_slots_are_fewer_than_a_block_per_sequence(size: int) -> None:
    lab = Lab(80, block_size=size)
    for i in range(4):
        lab.add(f"r{i}", [i] * (3 + i), 12)
    most = 0
    while lab.scheduler.has_work:
        lab.step()
        stats = lab.cache.stats()
        most = max(most, stats.num_unfilled_slots)
        held = [s for r in lab.scheduler.running for s in r.sequences]
        assert stats.num_unfilled_slots == sum(s.room - s.num_computed for s in held) <= len(held) * (size - 1)
    assert (most > 0) == (size > 1)
    lab.at_rest()


def test_unfilled_slots_of_a_shared_tail_count_once() -> None:
    cache = KVCacheManager(8, 4)
    parent = settle(cache, list(range(6)), 6)
    child = Sequence(parent.request, 1, parent.token_ids[:], 99)
    cache.fork(parent, child)
    assert cache.stats().num_unfilled_slots == 2 and cache.stats().num_saved_by_sharing == 2


# -- 4.11: out of the attention window ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "num_computed", "dropped"),
    [(1, 4, 2), (1, 5, 2), (2, 4, 1), (2, 5, 2), (3, 4, 1), (5, 4, 0), (5, 6, 1), (99, 8, 0)],
)
def test_blocks_out_of_the_attention_window_are_dropped(window: int, num_computed: int, dropped: int) -> None:
    """The next query, at `num_computed`, attends to `window` keys, its own included."""
    cache = KVCacheManager(8, 2, num_rows=1, attention_window=window)
    seq = settle(cache, list(range(num_computed)), num_computed)
    cache.rows.assign(seq, StepPlan())
    blocks, plan = list(seq.block_ids), StepPlan()
    cache.drop_out_of_window(seq, plan)
    assert seq.block_ids == [0] * dropped + blocks[dropped:] and seq.num_dropped == dropped
    assert plan.table_writes == ([TableWrite(0, 0, (0,) * dropped)] if dropped else [])
    assert list(cache.pool.cached()) == list(reversed(blocks[:dropped]))  # the tail is evicted before the head
    cache.drop_out_of_window(seq, again := StepPlan())
    assert not again.table_writes and cache.num_dropped == cache.stats().num_dropped == dropped
    cache.free(seq)
    assert seq.num_dropped == 0 and cache.pool.num_used == 0


def test_a_block_is_dropped_only_after_it_is_sealed() -> None:
    """With tokens in flight, the block is out of the window while its content is not yet known to the host."""
    cache = KVCacheManager(8, 2, attention_window=1)
    seq = settle(cache, [1, 2, 3], 3)
    cache.grow(seq, 3, StepPlan())
    seq.num_computed = 6
    cache.drop_out_of_window(seq, StepPlan())
    assert seq.num_dropped == 1
    seq.token_ids.extend([4, 5, 6])
    cache.seal(seq)
    cache.drop_out_of_window(seq, StepPlan())
    assert seq.num_dropped == 3 and cache.pool.num_cached == 3
    uncached = KVCacheManager(8, 2, attention_window=1, enable_prefix_caching=False)
    seq = settle(uncached, [1, 2, 3], 3)
    uncached.grow(seq, 3, StepPlan())
    seq.num_computed = 6
    uncached.drop_out_of_window(seq, StepPlan())
    assert seq.num_dropped == 3 and uncached.pool.num_free == 8


def test_dropped_blocks_are_still_found() -> None:
    cache = KVCacheManager(8, 2, attention_window=2)
    seq = settle(cache, [1, 2, 3, 4, 5, 6, 7])
    blocks = list(seq.block_ids)
    cache.drop_out_of_window(seq, StepPlan())
    assert seq.num_dropped == 2
    other = sequence([1, 2, 3, 4, 5, 6, 7])
    assert cache.lookup(other).block_ids == blocks


def test_a_swap_does_not_move_dropped_blocks() -> None:
    cache = KVCacheManager(8, 2, 1, attention_window=2)  # host room for the one block that is left
    seq = settle(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    kept, seals = seq.block_ids[2:], list(seq.seal_ids)
    cache.drop_out_of_window(seq, StepPlan())
    num_dropped, out = seq.num_dropped, StepPlan()
    assert num_dropped == 3
    assert cache.swap_out(seq.request, out)
    seq.request.status = Status.SWAPPED
    assert [m.src for m in out.swap_outs] == kept[num_dropped - 2 :]
    assert seq.block_ids[:num_dropped] == [0] * num_dropped
    found = cache.find_swap_in_blocks(seq.request)
    assert found is not None and found.num_needed == len(out.swap_outs)
    cache.swap_in(seq.request, found, StepPlan())
    seq.request.status = Status.RUNNING
    assert seq.block_ids[:num_dropped] == [0] * num_dropped and all(seq.block_ids[num_dropped:])
    assert seq.seal_ids == seals[:num_dropped]  # swapped-in blocks are sealed again, on the chain of dropped ones
    cache.free(seq)
    assert cache.pool.num_used == 0


def test_a_forked_child_inherits_dropped_blocks() -> None:
    """Otherwise the null block would count as one of its own and be swapped."""
    cache = KVCacheManager(8, 2, 4, attention_window=2)
    parent = settle(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    cache.drop_out_of_window(parent, StepPlan())
    child = Sequence(parent.request, 1, parent.token_ids[:], parent.max_length)
    cache.fork(parent, child)
    parent.request.sequences.append(child)
    assert child.num_dropped == parent.num_dropped == 3 and child.block_ids == parent.block_ids
    tail = parent.block_ids[3]
    assert cache.count_private_blocks(parent.request) == (1, 1)
    assert cache.swap_out(parent.request, out := StepPlan())
    assert [m.src for m in out.swap_outs] == [tail]


def test_a_long_output_keeps_a_window_of_blocks() -> None:
    lab = Lab(40, 2, attention_window=5, window=1)
    lab.add("a", [1, 2, 3], 60)
    most = 0
    while lab.scheduler.has_work:
        lab.step()
        most = max(most, lab.pool.num_used)
    assert most <= 5 // 2 + 2 and lab.cache.num_dropped > 20
    lab.at_rest()


def test_a_long_prompt_keeps_a_window_of_blocks_between_its_chunks() -> None:
    lab = Lab(40, 2, attention_window=4, budget=8)
    lab.add("a", list(range(5)) * 8, 4)
    used = []
    while lab.scheduler.has_work:
        lab.step()
        used.append(lab.pool.num_used)
    assert max(used[1:]) <= (8 + 4) // 2 + 1
    lab.at_rest()


def test_dropped_blocks_are_written_to_the_device_table() -> None:
    """An empty plan is thrown away, so it must not contain a table write."""
    lab = Lab(40, 2, attention_window=2)
    request = lab.add("a", [1, 2, 3], 12)
    while lab.scheduler.has_work:
        while lab.plan():
            pass
        (seq,) = request.sequences
        assert lab.oracle.tables[seq.row] == seq.block_ids
        lab.land()
    assert lab.cache.num_dropped


def test_a_group_drops_no_blocks() -> None:
    """When a group is recomputed, a sequence needs the head of a sibling that has moved beyond it."""
    lab = Lab(80, 2, attention_window=2)
    lab.add("a", [1, 2, 3, 4, 5], 20, width=3)
    lab.add("b", [1, 2, 3, 4, 6], 20, beam=2)
    lab.run()
    assert lab.cache.num_dropped == 0


@pytest.mark.parametrize("caching", [False, True])
def test_dropped_blocks_avoid_a_preemption(caching: bool) -> None:
    """A long output allocates its next block from blocks that it dropped itself."""
    lab = Lab(8, 2, attention_window=3, caching=caching)
    lab.add("a", [1, 2, 3], 12)
    lab.add("b", [2, 2, 3], 12)
    lab.run()
    assert lab.scheduler.num_preemptions == 0


# -- capacity: one formula ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_max_output_tokens_is_the_inverse_of_blocks_at_max_length(size: int) -> None:
    for num_blocks in range(1, 9):
        cache = KVCacheManager(num_blocks, size)
        for prompt in range(1, 14):
            for width in range(1, 5):
                most = cache.max_output_tokens(prompt, width)
                fits = [m for m in range(1, 60) if cache.blocks_at_max_length(prompt, m, width) <= num_blocks]
                assert max(most, 0) == max(fits, default=0), (num_blocks, prompt, width)


def test_blocks_at_max_length_is_the_sum_over_sequences() -> None:
    """P // B blocks are shared. Each sequence holds the rest of its own positions except the last."""
    cache = KVCacheManager(100, 4)
    assert cache.blocks_at_max_length(10, 7) == 4  # 16 positions
    assert cache.blocks_at_max_length(10, 8) == 5
    assert cache.blocks_at_max_length(10, 8, width=3) == 2 + 3 * 3
    assert cache.blocks_at_max_length(8, 1, width=3) == 2


def test_block_events_agree_with_the_pool() -> None:
    """Replaying the events gives the reference counts and the states."""
    lab = Lab(6, host=6, policy=None)
    lab.add("A", [1, 2, 3, 4], 6)
    lab.add("B", [5, 6, 7], 3, width=2)
    lab.run()
    refs: dict[int, int] = {}
    for e in lab.events:
        if isinstance(e, ev.Allocated):
            assert refs.get(e.block_id, 0) == 0
            refs[e.block_id] = 1
        elif isinstance(e, ev.Shared):
            refs[e.block_id] = refs.get(e.block_id, 0) + 1
            assert refs[e.block_id] == e.refs
        elif isinstance(e, ev.Released):
            refs[e.block_id] -= 1
            assert refs[e.block_id] == e.refs
            assert not e.cached or e.refs == 0
    assert not any(refs.values())
    sealed, evicted = lab.emitted(ev.Sealed), lab.emitted(ev.Evicted)
    assert len(sealed) == lab.pool.num_sealed and len(evicted) == lab.pool.num_evicted
    assert {e.seal_id for e in evicted} <= {e.seal_id for e in sealed}
    assert len(lab.emitted(ev.Copied)) == lab.cache.num_copied > 0


def test_a_removed_seal_is_removed_from_its_sequences() -> None:
    """Otherwise a child would be indexed under a parent that is not in the index."""
    lab = Lab(8)
    seq = lab.add("A", [1, 2, 3, 4, 5], 4).sequences[0]
    lab.step()
    first, second = seq.seal_ids
    assert lab.cache.unseal_after(second) == []
    assert lab.cache.unseal_after(first) == [seq]
    assert seq.seal_ids == [first] and seq.seal_at == 4
    assert [lab.pool.seal_id[b] for b in seq.block_ids[:2]] == [first, 0]


def test_an_eviction_event_has_its_reason() -> None:
    lab = Lab(4)
    lab.add("A", [1, 2, 3, 4, 5], 2)
    lab.run()
    assert lab.pool.num_cached == 3
    lab.add("B", [6, 7], 1)
    lab.run()
    assert lab.emitted(ev.Evicted) == []
    lab.add("C", [8, 9, 10, 11], 1)
    lab.run()
    assert [(e.why, e.num_cached) for e in lab.emitted(ev.Evicted)] == [("room", 3), ("room", 2)]
    lab.events.clear()
    num = lab.pool.num_cached
    lab.pool.unseal(next(lab.pool.cached()))
    lab.cache.reset_prefix_cache()
    evicted = [(e.why, e.num_cached) for e in lab.emitted(ev.Evicted)]
    assert evicted == [("void", num - 1), *(("reset", left) for left in reversed(range(num - 1)))] and num > 1
