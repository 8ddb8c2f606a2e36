"""Rules of docs/memory.md for swapping: an example of each, without a scheduler."""

from __future__ import annotations

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan, SwapOut
from octavo.core.request import Sequence, Status
from tests.core.lab import fork, settle, state_of
from tests.proof import oracle as o

# -- Memory 5: admission -----------------------------------------------------------------------------------------------


def test_a_refused_swap_changes_no_state() -> None:
    cache = KVCacheManager(8, 2, 1)
    seq = settle(cache, [1, 2, 3, 4, 5])
    plan = StepPlan()
    before = state_of(cache, seq)
    assert not cache.swapping.swap_out(seq.request, plan)
    assert state_of(cache, seq) == before
    assert not plan and cache.swapping.num_swapped_out == 0


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


# -- Memory 17 to 26: window groups ------------------------------------------------------------------------------------


def test_a_swap_moves_the_blocks_of_all_groups_but_not_what_left_a_window() -> None:
    cache = KVCacheManager(16, 2, 16, num_rows=1, windows=(3,))
    seq = settle(cache, list(range(7)), 6)
    cache.drop_out_of_window(seq, StepPlan())
    (window,) = seq.windows
    assert (seq.block_ids, window.block_ids) == ([1, 2, 3], [0, 0, 6])
    assert cache.swapping.count_private_blocks(seq.request) == (4, 8)
    assert cache.swapping.swap_out(seq.request, out := StepPlan())
    seq.request.status = Status.SWAPPED
    assert out.swap_outs == [SwapOut(1, 1), SwapOut(2, 2), SwapOut(3, 3), SwapOut(6, 4)]
    assert (seq.block_ids, window.block_ids, window.num_dropped) == ([1, 2, 3], [0, 0, 4], 2)
    assert list(cache.swap_space.refs[:6]) == [0, 1, 1, 1, 1, 0] and cache.pool.num_used == 0

    cache.reset_prefix_cache()
    found = cache.swapping.find_swap_in_blocks(seq.request)
    assert found is not None and (found.host_ids, found.num_needed) == ([1, 2, 3, 4], 4)
    cache.swapping.swap_in(seq.request, found, back := StepPlan())
    seq.request.status = Status.RUNNING
    to = dict(back.swap_ins)
    assert (seq.block_ids, window.block_ids) == ([to[1], to[2], to[3]], [0, 0, to[4]])
    assert cache.swap_space.num_used == 0 and cache.pool.num_used == 4 and seq.seal_ids == []


def test_window_blocks_of_others_stay_on_the_device_during_a_swap() -> None:
    cache = KVCacheManager(30, 2, 30, windows=(3,))
    other = settle(cache, list(range(7)))
    seq = settle(cache, [*range(6), 9], 7)
    shared = [*other.block_ids, other.windows[0].block_ids[2]]
    assert cache.swapping.swap_out(seq.request, out := StepPlan())
    seq.request.status = Status.SWAPPED
    assert len(out.swap_outs) == 2 and set(seq.request.shared_on_device) == set(shared)
    assert seq.windows[0].block_ids == [0, 0, -shared[3], 2] and seq.block_ids == [*(-b for b in shared[:3]), 1]
    cache.free(other)
    found = cache.swapping.find_swap_in_blocks(seq.request)
    assert found is not None and found.num_needed == 2 + 4
    cache.swapping.swap_in(seq.request, found, StepPlan())
    assert [seq.windows[0].block_ids[2], *seq.block_ids[:3]] == [shared[3], *shared[:3]] and len(seq.seal_ids) == 3
    assert all(cache.pool.refs[b] == 1 for b in shared)


def test_a_lost_window_block_is_noticed_before_a_swap_in() -> None:
    cache = KVCacheManager(30, 2, 30, windows=(3,))
    other = settle(cache, list(range(7)))
    seq = settle(cache, [*range(6), 9], 7)
    assert cache.swapping.swap_out(seq.request, StepPlan())
    seq.request.status = Status.SWAPPED
    cache.free(other)
    cache.pool.unseal(-seq.windows[0].block_ids[2])
    assert cache.swapping.find_swap_in_blocks(seq.request) is None
    cache.free(seq)
    assert cache.swap_space.num_used == 0 == cache.pool.num_used


def test_a_fork_and_a_trim_on_the_host_are_of_all_groups() -> None:
    cache = KVCacheManager(30, 2, 30, windows=(3,))
    parent = settle(cache, list(range(7)), 6)
    cache.grow(parent, 4, StepPlan())
    parent.num_computed, parent.num_unverified = 10, 4
    cache.drop_out_of_window(parent, StepPlan())
    parent.num_unverified = 0
    assert cache.swapping.swap_out(parent.request, StepPlan())
    parent.request.status = Status.SWAPPED
    used = cache.swap_space.num_used
    cache.shrink(parent, 1)
    assert cache.swap_space.num_used == used and len(parent.windows[0].block_ids) == 5
    cache.shrink(parent, 1)
    assert cache.swap_space.num_used == used - 2 and len(parent.windows[0].block_ids) == 4
    child = fork(cache, parent)
    assert [*child.tables] == [*parent.tables] and cache.swap_space.refs[parent.windows[0].block_ids[-1]] == 2
    cache.free(parent)
    assert cache.swap_space.num_used == used - 2
    cache.free(child)
    assert cache.swap_space.num_used == 0
