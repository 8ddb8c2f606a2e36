"""Planning of running requests: chunks, decode windows, and the window of blocks that they keep."""

from __future__ import annotations

import pytest

from octavo.core import events as ev
from octavo.core.plan import Slice
from octavo.core.policy import Policy
from octavo.core.request import Request, Status
from tests.core.lab import RECOMPUTE, Lab, Worlds, answer, names

# -- Memory 11: blocks before the sliding window -----------------------------------------------------------------------


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


def test_a_group_drops_no_blocks() -> None:
    """When a group is recomputed, a sequence needs the head of a sibling that has moved beyond it."""
    lab = Lab(80, 2, attention_window=2)
    lab.add("a", [1, 2, 3, 4, 5], 20, width=3)
    lab.add("b", [1, 2, 3, 4, 6], 20, beam=2)
    lab.run()
    assert lab.cache.num_dropped == 0


# -- Memory 17 to 26: window groups ------------------------------------------------------------------------------------


def held_in(request: Request, group: int) -> int:
    table = request.sequences[0].windows[group]
    return len(table.block_ids) - table.num_dropped


@pytest.mark.parametrize("depth", [1, 2])
def test_a_window_group_holds_a_window_and_a_step(depth: int) -> None:
    """While a long prompt is computed, and while a long output is."""
    lab = Lab(80, 2, windows=(5, 2), max_chunk=4, window=3)
    request = lab.add("A", list(range(5)) * 6, 40)
    counts = []
    while lab.scheduler.has_work:
        plan = lab.plan()
        counts += plan.counts
        if request.sequences:
            assert held_in(request, 0) <= 1 + (5 + 4 - 2 + 1) // 2 and held_in(request, 1) <= 1 + (2 + 4 - 2) // 2
        if len(lab.flight) == depth or not plan:
            lab.land()
    assert counts[:8] == [4] * 8 and max(counts[8:]) == 3
    assert lab.cache.num_dropped > 60
    lab.at_rest()


def test_a_step_computes_at_most_max_chunk_positions_of_a_sequence(world: Worlds) -> None:
    """Of a prompt, of a decode window, and of a prompt's end with the window after it."""
    lab = world(60, windows=(5,), max_chunk=3, window=8)
    lab.add("A", list(range(10)), 9)
    seen = []
    while lab.scheduler.has_work:
        plan = lab.step()
        seen.append((plan.counts[0], plan.num_sampled[0]))
    assert seen == [(3, 0), (3, 0), (3, 0), (3, 3), (3, 3), (3, 3)]


def test_as_many_long_prefills_run_as_fill_one_without_windows(world: Worlds) -> None:
    policy = Policy(long_prefill_token_threshold=6, max_long_partial_prefills=1)
    lab = world(200, budget=12, windows=(5,), max_chunk=2, policy=policy)
    for name in "ABCD":
        lab.add(name, [ord(name)] * 30, 1)
    assert lab.step().counts == [2, 2, 2] and lab.requests["D"].wait_reason == "long prefill"


def test_a_chunk_is_bounded_for_a_rebuilt_group_too(world: Worlds) -> None:
    lab = world(60, windows=(5,), max_chunk=3, policy=RECOMPUTE)
    group = lab.add("G", list(range(4)), 9, width=2)
    for _ in range(6):
        lab.step()
    lab.preempt(group)
    lab.cache.reset_prefix_cache()
    counts = [lab.step().counts for _ in range(5)]
    assert all(max(each) <= 3 for each in counts) and [3] in counts


def test_a_decode_needs_blocks_in_all_groups(world: Worlds) -> None:
    """B, the later, gives way when A's next block would take the last one of two groups."""
    lab = world(9, 2, windows=(99,), policy=RECOMPUTE)
    lab.add("A", [1, 2, 3, 4], 4)
    lab.add("B", [5, 6, 7, 8], 4)
    lab.step()
    plan = lab.step()
    assert names(plan) == ["A"] and lab.requests["B"].status is Status.WAITING


def test_a_tenants_share_of_a_step_is_of_chunks(world: Worlds) -> None:
    """A wants no more of a step than it can use: B gets the rest at once."""
    lab = world(200, budget=12, windows=(5,), max_chunk=4)
    lab.add("A", list(range(40)), 1)
    lab.add("B", list(range(50, 90)), 1, tenant=1)
    lab.add("C", list(range(90, 130)), 1, tenant=1)
    plan = lab.plan()
    assert sorted(zip(names(plan), plan.counts, strict=True)) == [("A", 4), ("B", 4), ("C", 4)]
    lab.land()
    plan = lab.plan()
    assert sorted(zip(names(plan), plan.counts, strict=True)) == [("A", 4), ("B", 4), ("C", 4)]


# -- Scheduling 1: order -----------------------------------------------------------------------------------------------


def test_prefill_and_decode_share_a_step(world: Worlds) -> None:
    lab = world(20)
    lab.add("A", [1, 2, 3], 5)
    lab.step()
    lab.add("B", [4, 5, 6, 7], 5)
    plan = lab.plan()
    assert (names(plan), plan.starts, plan.counts, plan.num_sampled) == (["A", "B"], [3, 0], [1, 4], [1, 1])
    assert list(plan.slices()) == [Slice(0, 3, 1, 1, 1, None), Slice(1, 0, 4, 1, 1, plan.host_tokens[1])]
    assert plan.num_tokens == 5


def test_a_long_prompt_is_chunked_by_the_budget(world: Worlds) -> None:
    lab = world(20, budget=4)
    request = lab.add("A", list(range(10)), 3)
    seen = []
    while lab.scheduler.has_work:
        plan = lab.step()
        seen.append((plan.starts[0], plan.counts[0], plan.num_sampled[0]))
    assert seen == [(0, 4, 0), (4, 4, 0), (8, 2, 1), (10, 1, 1), (11, 1, 1)]
    assert request.finished_sequences[0].token_ids[10:].tolist() == answer(list(range(10)), 3)


def test_a_group_that_only_waits_for_results_takes_no_budget(world: Worlds) -> None:
    """All its steps are in flight: the requests after it are planned, however little budget is left."""
    lab = world(40, budget=3, rows=6)
    lab.add("A", [1], 6, beam=1)  # waits for its result in every other step
    lab.add("G", [3], 2, width=3)
    lab.add("B", [4], 6)
    lab.step()
    assert names(lab.plan()) == ["A"]
    assert names(lab.plan()) == ["G", "G", "G"]
    lab.land()
    assert names(lab.plan()) == ["A", "B"]


# -- Scheduling 5: overlap and decode windows --------------------------------------------------------------------------


def test_a_decode_slice_has_no_host_tokens(world: Worlds) -> None:
    lab = world(8)
    request = lab.add("A", [1, 2, 3], 5)
    assert lab.step().host_tokens
    assert lab.plan().host_tokens == {}
    assert lab.plan().host_tokens == {}  # the next one, with that in flight
    assert request.sequences[0].num_pending == 2


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_window_ends_with_the_request(world: Worlds, depth: int, window: int) -> None:
    """An admitted request starts with one token."""
    lab = world(30, window=window)
    lab.add("A", [1, 2, 3], 12)
    lab.run(depth=depth)
    first, *others = [e.num_tokens for e in lab.emitted(ev.Step)]
    assert first == 3 and sum(others) == 11 and max(others) <= window and len(others) == -(-11 // window)


def test_a_window_counts_in_the_budget(world: Worlds) -> None:
    lab = world(40, window=8, budget=10)
    lab.add("A", [1], 30)
    lab.add("B", [2], 30)
    lab.step()
    assert lab.plan().counts == [8, 2]
    lab.land()
    assert lab.plan().counts == [8, 2]


def test_the_decode_window_is_one_while_a_request_could_be_admitted(world: Worlds) -> None:
    lab = world(40, window=4, budget=6)
    lab.add("A", [1, 2], 20)
    lab.step()
    assert lab.step().num_sampled == [4]
    lab.add("B", list(range(10, 22)), 2)
    assert lab.plan().counts == [1, 5]


def test_the_decode_window_does_not_shrink_for_requests_that_wait_for_others_to_finish(world: Worlds) -> None:
    for rows, reason in ((1, "rows"), (2, "blocks")):
        lab = world(14, window=4, rows=rows)  # B needs all 14 at its maximum length
        lab.add("A", [1, 2], 24)
        lab.step()
        lab.add("B", list(range(10, 36)), 3)
        assert lab.step().num_sampled == [1]
        assert lab.emitted(ev.Waiting)
        assert lab.requests["B"].wait_reason == reason
        assert lab.plan().num_sampled == [4]


# -- Scheduling 6 and 8: plans and stream order ------------------------------------------------------------------------


def test_a_decode_step_writes_no_table_unless_a_block_is_new() -> None:
    lab = Lab(30, block_size=4)
    lab.add("A", [1, 2, 3], 9)
    writes = []
    while lab.scheduler.has_work:
        writes.append([tuple(w) for w in lab.step().table_writes])
    assert writes == [[(0, 0, (1,))], [], [(0, 1, (2,))], [], [], [], [(0, 2, (3,))], [], []]
