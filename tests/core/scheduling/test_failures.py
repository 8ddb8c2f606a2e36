"""Failed steps: what they sealed and planned is taken back, and their requests are computed again."""

from __future__ import annotations

import pytest

from octavo.core import events as ev
from octavo.core.policy import Policy, PreemptionMode
from octavo.core.request import Status
from tests.core.lab import SWAP, Worlds, crowded, names, slice_of
from tests.proof import oracle as o


def test_a_failed_step_removes_its_seals(world: Worlds) -> None:
    lab = world(20)
    lab.add("A", [1, 2, 3, 4, 5], 4)
    lab.plan()
    assert lab.pool.num_sealed == 2
    assert lab.fail() == ["A"]
    assert lab.pool.num_available == lab.pool.num_free == 20 and lab.pool.num_indexed == 0
    assert lab.emitted(ev.Recomputed) == [ev.Recomputed("A", 0)]
    (seq,) = lab.requests["A"].sequences
    assert (seq.num_pending, seq.num_computed, seq.seal_ids, seq.row) == (0, 0, [], -1)
    assert lab.plan().counts == [5]


def test_a_failed_step_keeps_earlier_seals(world: Worlds) -> None:
    lab = world(20)
    a = lab.add("A", [1, 2, 3, 4, 5], 4)
    lab.step()
    lab.add("B", [6, 7, 8], 4)
    lab.plan()
    assert sorted(lab.fail()) == ["A", "B"]
    plan = lab.plan()
    found = slice_of(plan, a)
    assert found is not None and found.start == 4  # computed by a completed step


def test_a_failed_step_fails_all_steps_after_it(world: Worlds) -> None:
    lab = world(20)
    a = lab.add("A", [1, 2, 3], 9)
    lab.plan()
    lab.plan()
    lab.add("B", [4, 5, 6], 3)
    lab.plan()
    assert a.num_pending == 3
    assert sorted(lab.fail()) == ["A", "B"]
    assert a.num_pending == 0 and not lab.scheduler.in_flight
    assert {r.status for r in lab.requests.values()} == {Status.WAITING}


def test_steps_are_smaller_after_an_out_of_memory_step(world: Worlds) -> None:
    """Requests that do not fit wait; the first one continues, alone if it must."""
    lab = world(60, budget=32, window=4)
    group = lab.add("G", [1, 2, 3], 8, width=3)
    lab.add("A", [4, 5, 6, 7], 5)
    lab.step()
    lab.plan()
    assert [step.plan.num_tokens for step, _ in lab.flight] == [3 * 4 + 4]
    assert lab.fail(limit=2) == ["G", "A"]
    assert lab.emitted(ev.Recomputed) == [ev.Recomputed(name, 1, "out of memory", 16, 2) for name in ("G", "A")]
    while group.status is not Status.FINISHED:
        plan = lab.plan()
        assert plan.num_tokens <= 2 or (plan.counts == [1, 1, 1] and {s.request for s in plan.sequences} == {group})
        lab.land()
        if len(plan.rows) == 3 and "B" not in lab.requests:
            lab.add("B", [8, 9], 2)
    assert "budget" in lab.reasons("B")
    assert all(event.free >= 0 for event in lab.emitted(ev.Waiting))  # type: ignore[attr-defined]
    assert sum(event.num_tokens for event in lab.emitted(ev.Step)) > 40  # type: ignore[attr-defined]
    assert max(event.num_tokens for event in lab.emitted(ev.Step)[2:]) == 3  # type: ignore[attr-defined]
    lab.scheduler.max_num_scheduled_tokens = 32


def test_tokens_of_a_failed_decode_window_that_arrived_are_kept(world: Worlds) -> None:
    lab = world(20, window=6, habits=o.Habits(splits=True))
    request = lab.add("A", [1, 2], 8)
    lab.step()
    lab.plan()
    lab.part()
    lab.part()
    lab.fail()
    (seq,) = request.sequences
    assert (len(seq.token_ids), seq.num_pending) == (5, 0)


@pytest.mark.parametrize("back", [False, True])
def test_a_swap_of_a_failed_step_is_recomputed(world: Worlds, back: bool) -> None:
    """Its copy arrived on neither side."""
    lab = crowded(world, SWAP)
    b = lab.requests["B"]
    if back:
        lab.step()
        lab.abort("A")
    plan = lab.plan()
    assert plan.swap_ins if back else plan.swap_outs
    lab.fail()
    assert b.status is Status.WAITING and not b.shared_on_device
    assert lab.cache.swap_space.num_used == 0
    assert "B" in [e.request_id for e in lab.emitted(ev.Recomputed)]


def test_a_request_that_finished_in_a_failed_step_stays_finished(world: Worlds) -> None:
    lab = crowded(world, SWAP)
    lab.plan()
    lab.abort("B")
    assert lab.fail() == ["A"]
    assert lab.requests["B"].status is Status.FINISHED


def test_a_prefix_of_a_failed_step_is_recomputed(world: Worlds) -> None:
    """A group resumes, finds all but its last tokens in blocks that the step in flight fills, and gets no slice for
    lack of budget. Then that step fails: the group holds invalid blocks, though no failed plan has a slice of it."""
    lab = world(20, budget=2, rows=4, policy=Policy(by_priority=True, mode=PreemptionMode.RECOMPUTE))
    group = lab.add("G", [1, 2, 3, 4], 3, width=2)
    lab.step()
    lab.step()
    lab.preempt(group)
    lab.cache.reset_prefix_cache()
    lab.add("X", [1, 2, 3, 4], 6, priority=-1)
    lab.plan()
    lab.plan()
    lab.land()
    plan = lab.plan()
    assert names(plan) == ["X"] and group.status is Status.RUNNING
    assert [s.num_computed for s in group.sequences] == [4, 4]
    assert lab.fail() == ["X", "G"]
