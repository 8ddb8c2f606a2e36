"""Rules of docs/memory.md that `KVCacheManager` keeps without a scheduler, in its order: an example of each."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import BlockCopy, StepPlan, SwapOut, TableWrite
from octavo.core.prefix_index import Prefix
from octavo.core.request import Sequence, Status
from tests.core.lab import fork, sequence, state_of
from tests.proof import oracle as o


def settle(cache: KVCacheManager, tokens: list[int], count: int | None = None, **options: Any) -> Sequence:
    """A sequence that looked its prompt up and computed `count` positions (all but the last token)."""
    seq = sequence(tokens, **options)
    cache.attach(seq, cache.prefixes.lookup(seq))
    count = len(tokens) - 1 if count is None else count
    cache.grow(seq, count - seq.num_computed, StepPlan())
    seq.num_computed = count
    cache.prefixes.seal(seq)
    seq.request.status = Status.RUNNING
    return seq


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
    assert cache.prefixes.lookup(sequence([1, 2, 3, 4, 5])) == ([], [], 0)
    cache.free(seq)
    assert cache.pool.num_cached == 0 and cache.reset_prefix_cache() == 0


def test_a_removed_seal_is_removed_from_its_sequences() -> None:
    """Otherwise a child would be indexed under a parent that is not in the index."""
    cache = KVCacheManager(8, 2)
    seq = settle(cache, [1, 2, 3, 4, 5])
    first, second = seq.seal_ids
    assert cache.unseal_after(second) == [] and cache.unseal_after(first) == [seq]
    assert seq.seal_ids == [first] and seq.seal_at == 4
    assert [cache.pool.seal_id[b] for b in seq.block_ids] == [first, 0]


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


# -- Memory 4: release and eviction ------------------------------------------------------------------------------------


def test_eviction_takes_the_oldest_block_and_a_tail_before_its_head() -> None:
    cache = KVCacheManager(6, 2)
    a, b = settle(cache, [1, 2, 3, 4, 5, 6, 0], 6), settle(cache, [7, 8, 9, 9, 9, 9, 0], 6)
    cache.free(b)
    cache.free(a)
    assert list(cache.pool.cached()) == [6, 5, 4, 3, 2, 1]
    assert [cache.pool.allocate() for _ in range(4)] == [6, 5, 4, 3]
    assert cache.pool.num_evicted == 4
    assert cache.prefixes.lookup(sequence([1, 2, 3, 4, 5, 6, 0])).block_ids == [1, 2]
    assert cache.prefixes.lookup(sequence([7, 8, 9, 9, 9, 9, 0])).block_ids == []


def test_free_blocks_are_allocated_before_cached_ones() -> None:
    cache = KVCacheManager(4, 2)
    seq = settle(cache, [1, 2, 3])
    cache.free(seq)
    assert [cache.pool.allocate() for _ in range(3)] == [2, 3, 4]
    assert cache.pool.num_cached == 1 and cache.pool.allocate() == 1
    assert cache.pool.num_indexed == 0 and cache.pool.num_cached == 0


# -- Memory 5: admission -----------------------------------------------------------------------------------------------


def test_admission_counts_hits_without_users() -> None:
    cache = KVCacheManager(6, 2)
    seq = settle(cache, [1, 2, 3, 4, 5])
    late = sequence([1, 2, 3, 4, 6])
    assert cache.blocks_to_admit(late, cache.prefixes.lookup(late)) == 1  # shared with a running sequence
    cache.free(seq)
    assert cache.blocks_to_admit(late, cache.prefixes.lookup(late)) == 3  # two leave the LRU queue
    assert cache.blocks_to_admit(late, Prefix([], [], 0)) == 3


def test_queries_change_no_state() -> None:
    cache = KVCacheManager(8, 2, 8, num_rows=2)
    used, gone = settle(cache, [1, 2, 3, 4, 5]), settle(cache, [6, 7, 8])
    child = fork(cache, used)
    cache.free(gone)
    late = sequence([6, 7, 8, 9])
    cache.prefixes.lookup(late)
    before = state_of(cache, used, child, gone, late)
    found = cache.prefixes.lookup(late)
    cache.blocks_to_admit(late, found)
    cache.blocks_needed([(used, 3), (child, 1)])
    cache.prefixes.is_next_block_in({(1, b"")}, late, found)
    cache.prefixes.sibling_prefix(child)
    cache.swapping.find_swap_in_blocks(used.request)
    cache.stats(), cache.counters(), list(cache.pool.cached()), cache.pool.sealed_after(0)
    assert state_of(cache, used, child, gone, late) == before


def test_a_refused_swap_changes_no_state() -> None:
    cache = KVCacheManager(8, 2, 1)
    seq = settle(cache, [1, 2, 3, 4, 5])
    plan = StepPlan()
    before = state_of(cache, seq)
    assert not cache.swapping.swap_out(seq.request, plan)
    assert state_of(cache, seq) == before
    assert not plan and cache.swapping.num_swapped_out == 0


# -- Memory 6: no block too many ---------------------------------------------------------------------------------------


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


# -- Memory 7: forks and copies ----------------------------------------------------------------------------------------


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


def test_unfilled_slots_of_a_shared_tail_count_once() -> None:
    cache = KVCacheManager(8, 4)
    parent = settle(cache, list(range(6)), 6)
    fork(cache, parent)
    assert cache.stats().num_unfilled_slots == 2 and cache.stats().num_saved_by_sharing == 2


# -- Memory 8: freeing -------------------------------------------------------------------------------------------------


def test_free_is_idempotent_and_clears_the_table() -> None:
    cache = KVCacheManager(8, 2)
    seq, other = settle(cache, [1, 2, 3, 4, 5]), settle(cache, [6, 7, 8, 9, 9])
    for _ in range(2):
        cache.free(seq)
        assert (seq.block_ids, seq.room, seq.num_computed, seq.seal_ids, seq.seal_at) == ([], 0, 0, [], 2)
        assert o.holders(cache) == [other] and cache.pool.num_used == 2


def test_discard_unseals_only_blocks_without_other_users() -> None:
    """Blocks that others computed or share stay sealed."""
    cache = KVCacheManager(8, 2)
    good, bad = settle(cache, [1, 2, 9]), settle(cache, [1, 2, 3, 4, 5])
    cache.prefixes.discard(bad)
    assert cache.prefixes.lookup(sequence([1, 2, 3, 4, 5])).block_ids == good.block_ids[:1]
    cache.free(bad)
    assert cache.pool.num_cached == 0 and cache.pool.num_used == 1


# -- Memory 9: swapping ------------------------------------------------------------------------------------------------


def test_a_group_is_swapped_whole_each_block_once() -> None:
    cache = KVCacheManager(8, 2, 8)
    parent = settle(cache, [1, 2, 3, 4], 3)
    child = fork(cache, parent)
    cache.grow(child, 2, StepPlan())
    child.num_computed = 5
    assert cache.swapping.swap_out(parent.request, out := StepPlan())
    parent.request.status = Status.SWAPPED
    assert out.swap_outs == [SwapOut(1, 1), SwapOut(2, 2), SwapOut(3, 3), SwapOut(4, 4)]
    assert (parent.block_ids, child.block_ids) == ([1, 2], [1, 3, 4])
    assert list(cache.swap_space.refs) == [0, 2, 1, 1, 1, 0, 0, 0, 0]
    assert cache.pool.num_used == 0 and cache.pool.num_cached == 1 and not o.holders(cache)

    cache.reset_prefix_cache()
    found = cache.swapping.find_swap_in_blocks(parent.request)
    assert found is not None and found.host_ids == [1, 2, 3, 4] and found.num_needed == 4
    assert cache.blocks_needed([(parent, 1), (child, 1)], swapped=True) == 0
    cache.swapping.swap_in(parent.request, found, back := StepPlan())
    to = dict(back.swap_ins)
    assert (parent.block_ids, child.block_ids) == ([to[1], to[2]], [to[1], to[3], to[4]])
    assert cache.pool.refs[to[1]] == 2 and cache.pool.num_refs == 5
    assert cache.swap_space.num_used == 0 and o.holders(cache) == [parent, child]
    assert parent.seal_ids == [] and parent.seal_at == 2  # sealed anew
    assert cache.swapping.num_swapped_in == cache.swapping.num_swapped_out == 4


def test_blocks_that_a_swap_leaves_cached_are_evicted_tail_first() -> None:
    cache = KVCacheManager(8, 2, 8)
    seq = settle(cache, [1, 2, 3, 4, 5, 6, 7])
    assert cache.swapping.swap_out(seq.request, StepPlan())
    assert list(cache.pool.cached()) == [3, 2, 1]


def test_blocks_needed_of_a_swapped_group_uses_host_references() -> None:
    cache = KVCacheManager(8, 2, 8)
    parent = settle(cache, [1, 2, 3, 4], 3)
    child = fork(cache, parent)
    cache.swapping.swap_out(parent.request, StepPlan())
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
    cache.swapping.swap_out(seq.request, StepPlan())
    seq.request.status = Status.SWAPPED
    assert seq.block_ids == [-1, -2, 1]
    found = cache.swapping.find_swap_in_blocks(seq.request)
    assert found is not None and (found.shared_on_device, found.num_needed) == ([1, 2], 1)
    cache.swapping.swap_in(seq.request, found, StepPlan())
    assert seq.block_ids[:2] == [1, 2] and len(seq.seal_ids) == 2 and seq.seal_at == 6


def swapped_with_shared_block(num_blocks: int = 8) -> tuple[KVCacheManager, Sequence, Sequence]:
    """Two sequences over one sealed block; the second is swapped out and shares that block on the device."""
    cache = KVCacheManager(num_blocks, 2, num_blocks)
    first, second = settle(cache, [1, 2, 9], 3), settle(cache, [1, 2, 3], 3)
    assert first.block_ids[0] == second.block_ids[0] == 1
    assert cache.swapping.swap_out(second.request, plan := StepPlan())
    second.request.status = Status.SWAPPED
    assert len(plan.swap_outs) == 1 and second.block_ids == [-1, 1] and cache.pool.refs[1] == 1
    assert second.request.shared_on_device == {1: cache.pool.seal_id[1]}
    return cache, first, second


def test_blocks_shared_on_device_without_users_are_counted() -> None:
    cache, first, second = swapped_with_shared_block()
    found = cache.swapping.find_swap_in_blocks(second.request)
    assert found is not None and found.num_needed == 1  # the first still owns it
    cache.free(first)
    found = cache.swapping.find_swap_in_blocks(second.request)
    assert found is not None and found.num_needed == 2
    assert found.shared_on_device == [1] and found.host_ids == [1]


def test_blocks_shared_on_device_are_referenced_before_allocation() -> None:
    """Their last owner finished, so the block is the oldest cached one. Allocating first would evict it for the same
    request."""
    cache, first, second = swapped_with_shared_block(3)
    pool = cache.pool
    cache.free(first)
    assert pool.num_available == 3
    found = cache.swapping.find_swap_in_blocks(second.request)
    assert found is not None and found.num_needed == 2
    younger = pool.allocate()
    pool.seal(younger, (99, b"younger"))
    pool.release(younger)
    while pool.num_free:
        pool.allocate()
    assert list(pool.cached()) == [1, younger]
    plan = StepPlan()
    cache.swapping.swap_in(second.request, found, plan)
    assert second.block_ids == [1, younger] and pool.seal_id[1] and len(plan.swap_ins) == 1
    assert len(second.seal_ids) == 1 and not second.request.shared_on_device


def test_blocks_shared_on_device_are_verified_by_seal_id() -> None:
    """The block was evicted and holds the same tokens under another seal id, or other tokens: it is lost."""
    cache, first, second = swapped_with_shared_block()
    pool = cache.pool
    key = pool.key_of(1)
    assert key is not None
    cache.free(first)
    cache.reset_prefix_cache()
    assert cache.swapping.find_swap_in_blocks(second.request) is None
    block = pool.allocate()
    assert block == 1
    pool.seal(block, (key[0], b"others"))
    assert cache.swapping.find_swap_in_blocks(second.request) is None


# -- Memory 11: blocks before the sliding window -----------------------------------------------------------------------


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
    assert (
        cache.prefixes.lookup(sequence([*range(num_computed), 0])).block_ids == blocks[: num_computed // 2]
    )  # found as before
    cache.drop_out_of_window(seq, again := StepPlan())
    assert not again.table_writes and cache.num_dropped == cache.stats().num_dropped == dropped
    cache.free(seq)
    assert seq.num_dropped == 0 and cache.pool.num_used == 0


def test_a_block_is_dropped_only_after_it_is_sealed() -> None:
    """With tokens in flight, the block is out of the window while its content is not yet known to the host."""
    for caching, dropped in ((True, [1, 3]), (False, [3, 3])):
        cache = KVCacheManager(8, 2, attention_window=1, enable_prefix_caching=caching)
        seq = settle(cache, [1, 2, 3], 3)
        cache.grow(seq, 3, StepPlan())
        seq.num_computed = 6
        cache.drop_out_of_window(seq, StepPlan())
        assert seq.num_dropped == dropped[0]
        seq.token_ids.extend([4, 5, 6])
        cache.prefixes.seal(seq)
        cache.drop_out_of_window(seq, StepPlan())
        assert seq.num_dropped == dropped[1] and cache.pool.num_cached == 3 * caching


def test_a_forked_child_inherits_dropped_blocks() -> None:
    """Otherwise the null block would count as one of its own and be swapped."""
    cache = KVCacheManager(8, 2, 4, attention_window=2)
    parent = settle(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    cache.drop_out_of_window(parent, StepPlan())
    child = fork(cache, parent)
    assert child.num_dropped == parent.num_dropped == 3 and child.block_ids == parent.block_ids
    assert cache.swapping.count_private_blocks(parent.request) == (1, 1)
    assert cache.swapping.swap_out(parent.request, out := StepPlan())
    assert [m.src for m in out.swap_outs] == [4]


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


# -- Scheduling 3: admission control -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_max_output_tokens_is_the_inverse_of_blocks_at_max_length(size: int) -> None:
    for num_blocks in range(1, 9):
        cache = KVCacheManager(num_blocks, size)
        for prompt in range(1, 14):
            for width in range(1, 5):
                most = cache.max_output_tokens(prompt, width)
                fits = [m for m in range(1, 60) if cache.blocks_at_max_length(prompt, m, width) <= num_blocks]
                assert max(most, 0) == max(fits, default=0), (num_blocks, prompt, width)
