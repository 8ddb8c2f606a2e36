"""Rules of docs/memory.md that `KVCacheManager` keeps without a scheduler, in its order: an example of each."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.cache.prefix_index import Prefix
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import BlockCopy, StepPlan, TableWrite
from octavo.core.request import Sequence, Status
from tests.core.lab import Worlds, fork, make, sequence, settle, state_of
from tests.proof import oracle as o

# -- Memory 2: sealing and the index -----------------------------------------------------------------------------------


def test_a_removed_seal_is_removed_from_its_sequences() -> None:
    """Otherwise a child would be indexed under a parent that is not in the index."""
    cache = KVCacheManager(8, 2)
    seq = settle(cache, [1, 2, 3, 4, 5])
    first, second = seq.seal_ids
    assert cache.unseal_after(second) == [] and cache.unseal_after(first) == [seq]
    assert seq.seal_ids == [first] and seq.seal_at == 4
    assert [cache.pool.seal_id[b] for b in seq.block_ids] == [first, 0]


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
    cache.prefixes.is_in_flight({(1, b""): late}, late, found)
    cache.prefixes.sibling_prefix(child)
    cache.swapping.find_swap_in_blocks(used.request)
    cache.stats(), cache.counters(), list(cache.pool.cached()), cache.pool.sealed_after(0)
    assert state_of(cache, used, child, gone, late) == before


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
    cache.rows.assign(group[0], plan, [])
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


# -- Memory 9: swapping ------------------------------------------------------------------------------------------------


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


# -- Memory 11: blocks before the sliding window -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "num_computed", "dropped"),
    [(1, 4, 2), (1, 5, 2), (2, 4, 1), (2, 5, 2), (3, 4, 1), (5, 4, 0), (5, 6, 1), (99, 8, 0)],
)
def test_blocks_out_of_the_attention_window_are_dropped(window: int, num_computed: int, dropped: int) -> None:
    """The next query, at `num_computed`, attends to `window` keys, its own included."""
    cache = KVCacheManager(8, 2, num_rows=1, attention_window=window)
    seq = settle(cache, list(range(num_computed)), num_computed)
    cache.rows.assign(seq, StepPlan(), [])
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


# -- Memory 17 to 26: window groups ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "num_computed", "dropped"),
    [(1, 4, 2), (1, 5, 2), (2, 4, 1), (2, 5, 2), (3, 4, 1), (5, 4, 0), (5, 6, 1), (99, 8, 0)],
)
@pytest.mark.parametrize("group", [1, 2])
def test_blocks_out_of_a_groups_window_are_dropped(window: int, num_computed: int, dropped: int, group: int) -> None:
    """The other groups keep theirs. Line 4 of the device's tables is the second group of row 1."""
    windows = (window, 99) if group == 1 else (99, window)
    cache = KVCacheManager(30, 2, num_rows=2, windows=windows)
    cache.rows.assign(sequence([1]), StepPlan(), [])
    seq = settle(cache, list(range(num_computed)), num_computed)
    cache.rows.assign(seq, StepPlan(), [])
    before, plan = [list(ids) for ids, _ in seq.tables], StepPlan()
    cache.drop_out_of_window(seq, plan)
    after = [[0] * dropped * (g == group) + ids[dropped * (g == group) :] for g, ids in enumerate(before)]
    assert [(ids, num) for ids, num in seq.tables] == [(ids, ids.count(0)) for ids in after]
    assert plan.table_writes == ([TableWrite(3 + group, 0, (0,) * dropped)] if dropped else [])
    assert list(cache.pool.cached()) == before[group][:dropped]
    cache.drop_out_of_window(seq, again := StepPlan())
    assert not again.table_writes and cache.num_dropped == dropped
    cache.free(seq)
    assert not seq.num_dropped and not any(table.num_dropped for table in seq.windows) and not cache.pool.num_used


def test_a_window_group_drops_blocks_that_are_not_sealed_too() -> None:
    cache = KVCacheManager(20, 2, windows=(1,))
    seq = settle(cache, [1, 2, 3], 3)
    cache.grow(seq, 3, StepPlan())
    seq.num_computed = 6
    cache.drop_out_of_window(seq, StepPlan())
    assert seq.windows[0].num_dropped == 3 and (seq.num_dropped, len(seq.seal_ids)) == (0, 1)


def test_a_window_group_drops_by_the_lower_bound() -> None:
    cache = KVCacheManager(20, 2, windows=(1,))
    seq = settle(cache, list(range(9)), 8)
    seq.num_unverified = 3
    cache.drop_out_of_window(seq, StepPlan())
    assert seq.windows[0].num_dropped == 2
    cache.shrink(seq, 3)
    assert [len(ids) for ids, _ in seq.tables] == [3, 3] and (seq.num_computed, seq.room) == (5, 6)
    assert seq.windows[0].block_ids[:2] == [0, 0] and cache.pool.num_used == 3 + 1


def test_rejected_positions_that_a_window_has_left_are_not_released_twice() -> None:
    """A stop token ends a slice before positions that were certain."""
    cache = KVCacheManager(20, 2, windows=(1,))
    seq = settle(cache, list(range(9)), 8)
    cache.drop_out_of_window(seq, StepPlan())
    cache.prefixes.set_seals(seq, [])
    for block in seq.block_ids:
        cache.pool.unseal(block)
    cache.shrink(seq, 5)
    assert [ids for ids, _ in seq.tables] == [[1, 2], [0, 0]] and cache.pool.num_used == 2


@pytest.mark.parametrize("options", [{"width": 2}, {"beam": 1}, {"pin": True}], ids=str)
def test_requests_of_several_sequences_and_pins_keep_all_blocks(options: dict[str, Any]) -> None:
    cache = KVCacheManager(20, 2, windows=(1,), attention_window=1)
    request = make("r", list(range(7)), 9, **options)
    request.begin(0, (0, 0), 9)
    (seq,) = request.sequences
    cache.attach(seq, cache.prefixes.lookup(seq))
    cache.grow(seq, 6, StepPlan())
    seq.num_computed = 6
    cache.drop_out_of_window(seq, StepPlan())
    assert all(all(ids) for ids, _ in seq.tables) and not request.drops


def test_what_left_a_window_is_evicted_before_all_else() -> None:
    """But for what others computed, which is likely to be looked for again."""
    cache = KVCacheManager(40, 2, windows=(3,))
    cache.free(settle(cache, list(range(9))))
    seq = settle(cache, [*range(6), *range(20, 27)])
    found, *own = seq.windows[0].block_ids[2:5]
    assert seq.windows[0].num_found == 3
    before = list(cache.pool.cached())
    cache.drop_out_of_window(seq, StepPlan())
    assert list(cache.pool.cached()) == [*own, *before, found]
    cache.free(seq)
    assert cache.stats().num_unfilled_slots == 0


def test_unfilled_slots_of_all_groups_count() -> None:
    cache = KVCacheManager(40, 2, windows=(3, 3))
    settle(cache, [1, 2, 3, 4])
    assert cache.stats().num_unfilled_slots == 3


def test_running_prompts_still_take_blocks(world: Worlds) -> None:
    """6 blocks of the full group, and 3 of the window group in a chunk's step. A decoding request takes none."""
    lab = world(60, windows=(2,), max_chunk=4)
    request = lab.add("A", list(range(12)), 5)
    lab.step()
    assert lab.cache.blocks_due([request]) == (6 - 2) + (3 - 2)
    for _ in range(3):
        lab.step()
    assert request.sequences and lab.cache.blocks_due([request]) == 0


def test_a_hit_is_shared_in_all_groups() -> None:
    cache = KVCacheManager(30, 2, windows=(3, 1))
    first = settle(cache, list(range(7)))
    late = settle(cache, [*range(6), 9, 9, 9])
    assert late.block_ids[:3] == first.block_ids
    assert late.windows[0].block_ids[:3] == [0, 0, first.windows[0].block_ids[2]] and late.windows[0].num_dropped == 2
    assert late.windows[1].block_ids[:3] == [0, 0, 0] and late.windows[1].num_dropped == 3
    refs = cache.pool.refs
    assert [refs[b] for b in first.block_ids] == [2, 2, 2]
    assert [[refs[b] for b in table.block_ids] for table in first.windows] == [[1, 1, 2], [1, 1, 1]]
    found = cache.prefixes.lookup(sequence([*range(6), 7]))
    seq = sequence([*range(6), 7])
    cache.attach(seq, found)
    seq.windows[0].block_ids.append(99)
    assert len(found.windows[0].block_ids) == 3  # the sequence has its own table


def with_unsealed_windows() -> tuple[KVCacheManager, Sequence]:
    """A cache, and a sequence whose window blocks have lost their seals."""
    cache = KVCacheManager(30, 2, windows=(3,))
    sequence = settle(cache, [1, 2, 3, 4, 5])
    for block in sequence.windows[0].block_ids:
        cache.pool.unseal(block)
    return cache, sequence


def test_a_sequence_knows_the_newest_seal_of_its_window_blocks() -> None:
    """They may be sealed later than the full ones over them."""
    cache, _ = with_unsealed_windows()
    mark = cache.pool.last_seal_id
    settle(cache, [1, 2, 3, 4, 5])
    reader = settle(cache, [1, 2, 3, 4, 6])
    newest = cache.pool.seal_id[reader.windows[0].block_ids[1]]
    assert reader.request.newest_prefix_seal == newest > mark >= max(reader.seal_ids)
    assert settle(cache, [7, 8]).request.newest_prefix_seal == 0


def test_seals_taken_back_name_the_sequences_with_newer_window_blocks() -> None:
    cache, first = with_unsealed_windows()
    mark = cache.pool.last_seal_id
    second = settle(cache, [1, 2, 3, 4, 5])
    reader = settle(cache, [1, 2, 3, 4, 6])
    assert reader.seal_ids == second.seal_ids == first.seal_ids
    assert cache.unseal_after(mark) == [second, reader]
    assert cache.pool.num_indexed == 2 and first.seal_ids == reader.seal_ids != []


def test_a_full_block_and_its_window_blocks_lose_their_seals_together() -> None:
    cache = KVCacheManager(30, 2, windows=(3, 3))
    seq = settle(cache, [1, 2, 3, 4, 5])
    assert cache.unseal_after(seq.seal_ids[0] - 1) == [seq]
    assert cache.pool.num_indexed == 0 and cache.pool.num_evicted == 6


def test_windows_are_freed_before_the_full_blocks_that_they_hang_on() -> None:
    cache = KVCacheManager(30, 2, windows=(9, 9))
    seq = settle(cache, [1, 2, 3, 4, 5])
    tables = [ids for ids, _ in seq.tables]
    cache.free(seq)
    assert list(cache.pool.cached()) == [b for ids in reversed(tables) for b in reversed(ids)]
    assert [(t.block_ids, t.num_dropped) for t in seq.windows] == [([], 0)] * 2


def test_a_shared_tail_is_copied_in_all_groups() -> None:
    cache = KVCacheManager(30, 4, num_rows=2, windows=(3, 9))
    parent = settle(cache, list(range(6)), 6)
    child = fork(cache, parent)
    assert [*child.tables] == [*parent.tables]
    assert all(mine.block_ids is not its.block_ids for mine, its in zip(parent.windows, child.windows, strict=True))
    plan, tails = StepPlan(), [ids[1] for ids, _ in parent.tables]
    cache.rows.assign(child, StepPlan(), [])
    assert cache.blocks_needed([(parent, 1), (child, 1)]) == 3
    assert cache.blocks_needed([(parent, 3), (child, 3)]) == 3 + 6
    cache.grow(child, 1, plan)
    new = [ids[1] for ids, _ in child.tables]
    assert plan.copies == [BlockCopy(src, dst) for src, dst in zip(tails, new, strict=True)]
    assert plan.table_writes == [TableWrite(group, 1, (block,)) for group, block in enumerate(new)]
    assert not set(new) & set(tails) and [ids[1] for ids, _ in parent.tables] == tails
    cache.grow(parent, 1, plan)
    assert len(plan.copies) == 3 == cache.num_copied


def test_all_groups_grow_together_and_write_a_line_each() -> None:
    cache = KVCacheManager(30, 2, num_rows=2, windows=(3, 9))
    cache.rows.assign(sequence([1]), StepPlan(), [])
    seq = settle(cache, [1, 2, 3], 2)
    cache.rows.assign(seq, plan := StepPlan(), [])
    assert plan.table_writes == [TableWrite(3 + group, 0, tuple(ids)) for group, (ids, _) in enumerate(seq.tables)]
    plan, used = StepPlan(), cache.pool.num_used
    assert cache.blocks_needed([(seq, 3)]) == 2 * 3
    cache.grow(seq, 3, plan)
    assert cache.pool.num_used == used + 6 and seq.room == 6
    assert plan.table_writes == [TableWrite(3 + group, 1, tuple(ids[1:])) for group, (ids, _) in enumerate(seq.tables)]


def most_held(size: int, window: int, chunk: int, total: int) -> int:
    """The most blocks that a window group holds in a step of a sequence of `total` positions, by trying all steps."""
    return max(
        (start + count - 1) // size - max(0, start - window + 1) // size + 1
        for start in range(total)
        for count in range(1, min(chunk, total - start) + 1)
    )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_a_lone_sequence_needs_a_window_and_a_step_in_each_window_group(size: int, window: int, chunk: int) -> None:
    cache = KVCacheManager(99, size, windows=(window, 2), max_chunk=chunk)
    for total in (1, 2, 5, 40):
        full = -(-total // size)
        needs = cache.blocks_at_max_length(1, total)
        least = full + most_held(size, window, chunk, total) + most_held(size, 2, chunk, total)
        assert needs == least if total == 40 else least <= needs <= 3 * full
        seq = sequence(list(range(total)))
        assert cache.blocks_to_admit(seq, Prefix([], [], 0)) == needs


def test_requests_that_keep_all_need_all_blocks_in_each_group() -> None:
    cache = KVCacheManager(99, 2, windows=(3, 5), max_chunk=2)
    assert cache.blocks_at_max_length(5, 6, drops=False) == 5 * 3
    assert cache.blocks_at_max_length(5, 6, 3, drops=False) == (2 + 3 * 3) * 3
    assert cache.blocks_to_pin(5) == 3 * 3
    assert cache.blocks_to_admit(sequence(list(range(20)), width=2), Prefix([], [], 0)) == 30
    assert KVCacheManager(99, 2, windows=(3,)).blocks_at_max_length(5, 6) == 10  # a chunk of any length


def test_admission_counts_hits_of_all_groups() -> None:
    """Ten blocks, and in the window at most four: a window of 3 and a step of 4."""
    cache = KVCacheManager(60, 2, windows=(3,), max_chunk=4)
    first, late = settle(cache, list(range(7))), sequence([*range(6), *[9] * 14])
    assert cache.blocks_to_admit(late, cache.prefixes.lookup(late)) == 10 + 4 - 3 - 1
    cache.free(first)
    assert cache.blocks_to_admit(late, cache.prefixes.lookup(late)) == 10 + 4


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("windows", [(1,), (3, 5)])
def test_max_output_tokens_is_the_inverse_with_windows(windows: tuple[int, ...], drops: bool) -> None:
    for num_blocks in range(1, 16):
        cache = KVCacheManager(num_blocks, 2, windows=windows, max_chunk=3)
        for prompt in range(1, 12):
            for width in (1,) if drops else (1, 2, 3):
                most = cache.max_output_tokens(prompt, width, drops=drops)
                needs = {m: cache.blocks_at_max_length(prompt, m, width, drops=drops) for m in range(1, 40)}
                fits = [m for m, blocks in needs.items() if blocks <= num_blocks]
                assert max(most, 0) == max(fits, default=0), (num_blocks, prompt, width)


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
