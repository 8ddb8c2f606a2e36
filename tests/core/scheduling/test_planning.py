"""Planning of running requests: chunks, decode windows, and the window of blocks that they keep."""

from __future__ import annotations

import pytest

from octavo.core import events as ev
from octavo.core.plan import Slice
from tests.core.lab import Lab, Worlds, answer, names

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
