"""Preemption: who gives way for blocks, and what becomes of its tokens."""

from __future__ import annotations

import pytest

from octavo.core import events as ev
from octavo.core.policy import Policy
from octavo.core.request import Status
from tests.core.lab import RECOMPUTE, SWAP, Lab, Planned, Worlds, crowded, names, slice_of

# -- Memory 7: forks and copies ----------------------------------------------------------------------------------------


def test_blocks_needed_counts_a_group_as_a_whole() -> None:
    """Two sequences at a block boundary and one free block: the second must not allocate from an empty pool."""
    lab = Lab(6, policy=RECOMPUTE)
    lab.add("A", [1, 2, 3], 3)
    group = lab.add("G", [5, 6, 7, 8], 3, width=2)
    lab.step()
    assert lab.pool.num_available == 2
    lab.pool.allocate()  # one is left
    sequences = [(s, 1) for s in group.sequences]
    assert [lab.cache.blocks_needed([s]) for s in sequences] == [1, 1]
    assert lab.cache.blocks_needed(sequences) == 2
    plan = Planned(lab.scheduler.schedule())
    assert slice_of(plan, group) is None and group.status is Status.WAITING
    assert slice_of(plan, lab.requests["A"]) is not None


# -- Scheduling 2: preemption ------------------------------------------------------------------------------------------


def test_the_victim_is_the_last_running_request(world: Worlds) -> None:
    """A request with a slice in the plan being made must not be preempted: two owners would write its blocks."""
    for policy in (RECOMPUTE, SWAP):
        lab = world(9, host=9, policy=policy)
        for i, name in enumerate("ABC"):
            lab.add(name, [10 * i, 1, 2, 3], 6)
        for _ in range(3):
            lab.step()
        plan = lab.plan()
        assert [e.request_id for e in lab.emitted(ev.Preempted)] == ["C"]
        assert [s.request.request_id for s in plan.sequences] == ["A", "B"]


def test_a_step_that_preempts_admits_no_request(world: Worlds) -> None:
    """A takes a block from B. The swapped group would fit into B's others and waits for the next step."""
    lab = world(6, host=6)  # a single sequence is recomputed, a group is swapped
    lab.add("A", [1, 2, 3, 4], 6)
    lab.add("B", [5, 6, 7, 8], 6)
    group = lab.add("G", [9], 2, width=2)
    lab.step()
    lab.preempt(group)
    group.num_preemptions = 0  # it needs no headroom
    lab.step()
    lab.step()
    assert group.status is Status.SWAPPED and lab.pool.num_available == 0
    plan = lab.step()
    assert names(plan) == ["A"] and not plan.swap_ins and lab.pool.num_available == 2
    assert lab.plan().swap_ins


@pytest.mark.parametrize("policy", [RECOMPUTE, SWAP])
def test_self_preemption_counts_as_preemption(world: Worlds, policy: Policy) -> None:
    """The last request preempts itself. The waiting one would fit now, and still waits."""
    lab = crowded(world, policy)
    a, b = lab.requests.values()
    small = lab.add("small", [9], 1)
    a.sequences[0].max_length = 7  # all of A's positions are planned, so B needs the block
    assert not lab.plan().rows
    assert b.status is not Status.RUNNING and small.status is Status.WAITING
    assert [e.for_request for e in lab.emitted(ev.Preempted)] == ["B"]
    lab.abort("A")


def test_several_requests_are_preempted_until_there_is_room(world: Worlds) -> None:
    """A group needs three blocks at once; each victim frees one."""
    lab = world(8, policy=RECOMPUTE)
    group = lab.add("G", [1, 2], 4, width=3)
    lab.step()
    lab.step()
    assert lab.pool.num_used == 4
    for i in range(4):
        lab.add(f"s{i}", [20 + i], 2)
    lab.step()
    assert lab.pool.num_used == 8
    plan = lab.plan()
    assert [e.request_id for e in lab.emitted(ev.Preempted)] == ["s3", "s2", "s1"]
    assert len([s for s in plan.sequences if s.request is group]) == 3


@pytest.mark.parametrize("policy", [RECOMPUTE, SWAP])
def test_late_results_of_a_preempted_request_are_kept(world: Worlds, policy: Policy) -> None:
    """Its blocks and its row are released at once, with the step in flight."""
    lab = crowded(world, policy, late=1)
    b = lab.requests["B"]
    lab.plan()
    assert b.status in (Status.WAITING, Status.SWAPPED)
    (seq,) = b.sequences
    assert seq.row < 0 and lab.scheduler.num_rows_taken == 1 and bool(seq.block_ids) == (policy is SWAP)
    assert seq in lab.flight[0][0].sequences and (seq.num_pending, len(seq.token_ids)) == (1, 6)
    lab.land()
    assert (seq.num_pending, len(seq.token_ids)) == (0, 7)


# -- Memory 17 to 26: window groups ------------------------------------------------------------------------------------


def test_a_preempted_request_leaves_its_windows_before_it_is_swapped() -> None:
    """What a step in flight held of a window would be too much on return."""
    lab = Lab(40, 2, host=40, windows=(2,), policy=SWAP)
    request = lab.add("A", list(range(12)), 6)
    lab.step()
    (window,) = request.sequences[0].windows
    assert (len(window.block_ids), window.num_dropped) == (6, 0)
    plan = lab.preempt(request)
    assert window.num_dropped == 5 and len(plan.swap_outs) == 6 + 1
    assert lab.emitted(ev.Preempted)[0].num_blocks == 7  # type: ignore[attr-defined]
    lab.run()
    assert lab.cache.swapping.num_swapped_in == 7


def test_a_preempted_group_keeps_its_windows() -> None:
    lab = Lab(40, 2, host=40, windows=(2,), policy=SWAP)
    group = lab.add("G", list(range(12)), 6, width=2)
    lab.step()
    assert len(lab.preempt(group).swap_outs) == 12
    lab.run()
