"""Rules of docs/memory.md that the scheduler keeps, each in the smallest world that goes wrong without it.

Every world runs over the oracle, so that a rule broken in another way than the assertions expect still shows.
"""

from __future__ import annotations

from collections import Counter

import pytest

from octavo.core import events as ev
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Status
from tests.core.lab import RECOMPUTE, SWAP, Lab, Worlds, crowded, slice_of
from tests.proof import oracle as o
from tests.proof.workloads import World

LAZY = o.Habits(eager=False)


# -- Memory 4: release and eviction ------------------------------------------------------------------------------------


def test_an_eviction_event_has_its_reason(world: Worlds) -> None:
    lab = world(4)
    for name, prompt, num in (("A", [1, 2, 3, 4, 5], 2), ("B", [6, 7], 1), ("C", [8, 9, 10, 11], 1)):
        assert lab.emitted(ev.Evicted) == []
        lab.add(name, prompt, num)
        lab.run()
    lab.pool.unseal(next(lab.pool.cached()))
    lab.cache.reset_prefix_cache()
    evicted = [(e.why, e.num_cached) for e in lab.emitted(ev.Evicted)]
    assert evicted == [("room", 3), ("room", 2), ("void", 3), ("reset", 2), ("reset", 1), ("reset", 0)]


# -- Memory 8: freeing -------------------------------------------------------------------------------------------------


def test_block_events_agree_with_the_pool(world: Worlds) -> None:
    """Replaying the events gives the reference counts and the states."""
    lab = world(6, host=6)
    lab.add("A", [1, 2, 3, 4], 6)
    lab.add("B", [5, 6, 7], 3, width=2)
    lab.run()
    refs: Counter[int] = Counter()
    for e in lab.emitted(ev.Allocated, ev.Shared, ev.Released):
        refs[e.block_id] += -1 if isinstance(e, ev.Released) else 1
        assert refs[e.block_id] == (1 if isinstance(e, ev.Allocated) else e.refs)
        assert not isinstance(e, ev.Released) or not e.cached or not e.refs
    assert not refs.total() and len(lab.emitted(ev.Copied)) == lab.cache.num_copied > 0
    sealed, evicted = ([e.seal_id for e in lab.emitted(kind)] for kind in (ev.Sealed, ev.Evicted))
    assert len(sealed) == lab.pool.num_sealed and len(evicted) == lab.pool.num_evicted and {*evicted} <= {*sealed}


# -- Memory 10: waste --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 16])
def test_unfilled_slots_are_fewer_than_a_block_per_sequence(world: Worlds, size: int) -> None:
    lab = world(80, block_size=size)
    for i in range(4):
        lab.add(f"r{i}", [i] * (3 + i), 12)
    while lab.scheduler.has_work:
        lab.step()
        held = [s.room - s.num_computed for r in lab.scheduler.running for s in r.sequences]
        assert lab.cache.stats().num_unfilled_slots == sum(held) <= len(held) * (size - 1)


# -- Scheduling 1: order -----------------------------------------------------------------------------------------------


def test_an_empty_plan_is_false_and_leaves_no_trace() -> None:
    lab = Lab(4)
    plan = lab.plan()
    assert not plan and plan.num_tokens == 0 and lab.scheduler.num_steps == 0 and not lab.emitted(ev.Step)
    lab.add("A", [1], 1)
    lab.plan()
    assert lab.scheduler.has_work and not lab.plan()  # its last token is in flight
    lab.run()
    assert lab.scheduler.num_steps == 1 and not lab.scheduler.has_work


def test_a_plan_with_only_swaps_is_submitted(world: Worlds) -> None:
    """A waits for its last result; B needs a block and preempts itself. The step has no slice, but moves B's blocks."""
    lab = world(5, host=5, policy=SWAP)
    lab.add("A", [1, 2, 3, 4], 2)
    lab.add("B", [5, 6, 7], 5)
    lab.plan()
    lab.land()
    lab.plan()
    plan = lab.plan()
    assert not plan.rows and plan.swap_outs and plan
    assert lab.requests["B"].status is Status.SWAPPED
    assert lab.emitted(ev.Preempted) == [ev.Preempted("B", "swap", "B", 1, 0, 0, "forced", 2, 4)]
    assert lab.scheduler.in_flight[-1] is plan.in_flight


# -- Scheduling 4: wait reasons and events -----------------------------------------------------------------------------


def test_events_of_a_requests_life() -> None:
    lab = Lab(8)
    lab.add("A", [1, 2, 3], 2, priority=3)
    lab.run()
    kinds = (ev.Arrived, ev.Admitted, ev.Finished, ev.Step)
    assert lab.emitted(*kinds) == [
        ev.Arrived("A", 3, 2, 1, 3),
        ev.Admitted("A", 0, 3),
        ev.Step(0, 1, 3, 1, 0, 0, 2, 0, 6, 0, 2, 0, 0, 0, 0, 1),
        ev.Step(1, 1, 1, 1, 0, 0, 2, 0, 6, 0, 0, 0, 0, 0, 0, 0),
        ev.Finished("A", "length", 2),
    ]


def test_step_events_carry_the_increase_of_every_counter(world: Worlds) -> None:
    lab = world(6, host=6, policy=SWAP)
    lab.add("A", [1, 2, 3, 4], 6)
    lab.add("B", [1, 2, 7], 3, width=2)
    lab.run()
    lab.add("C", [1, 2, 3, 4, 5, 6, 7, 8, 9], 2)
    lab.run()
    steps, stats = lab.emitted(ev.Step), lab.scheduler.stats()
    for counter in ("hits", "misses", "copied", "swapped_out", "swapped_in", "evicted"):
        assert sum(getattr(s, counter) for s in steps) == getattr(stats, f"num_{counter}") > 0
    assert all(s.used + s.cached + s.free == 6 for s in steps)
    assert [e.num_copied for e in lab.emitted(ev.SwappedIn)] == [stats.num_swapped_in]


def test_listeners_change_no_plan() -> None:
    """A recorded run must be equal to an unrecorded one."""

    def plans(seed: int, listen: bool) -> list[tuple]:
        world = World(seed, Counter(), listen=listen)
        seen: list[tuple] = []
        inner = world.oracle.submit

        def submit(plan: StepPlan) -> object:
            seen.append((plan.rows, plan.starts, plan.counts, plan.table_writes, plan.swap_outs, plan.swap_ins))
            return inner(plan)

        world.oracle.submit = submit  # type: ignore[assignment]
        world.run()
        return seen

    for seed in (18, 22, 33, 51, 52, 59):
        assert plans(seed, True) == plans(seed, False)


# -- Scheduling 5: overlap and decode windows --------------------------------------------------------------------------


def test_stop_finishes_a_sequence_that_met_a_stop_string() -> None:
    lab = Lab(20)
    request = lab.add("A", [1, 2, 3], 8, width=2)
    lab.step()
    first, second = request.sequences
    assert lab.scheduler.stop(first) is False
    assert request.sequences == [second] and first.finish_reason == "stop" and not first.block_ids
    assert lab.scheduler.stop(first) is False  # no effect the second time
    lab.step()
    assert lab.scheduler.stop(second, "stop") is True
    assert request.status is Status.FINISHED and request.finished_sequences == [first, second]
    assert [len(s.token_ids) for s in request.finished_sequences] == [4, 5]
    assert lab.pool.num_used == 0 and lab.cache.rows.num_free == 8


def test_results_arrive_in_the_order_of_the_plans(world: Worlds) -> None:
    lab = world(20)
    lab.add("A", [1, 2, 3], 8)
    lab.plan()
    with pytest.raises(AssertionError, match="in the order"):
        lab.scheduler.update(lab.plan().in_flight, StepResult([[1]]))


# -- Aborts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("status", list(Status))
@pytest.mark.parametrize("options", [{}, {"width": 2}, {"beam": 2}])
def test_abort_in_every_state(world: Worlds, status: Status, depth: int, options: dict) -> None:
    """Waiting, running, swapped or finished, with 0 to 2 steps in flight: nothing leaks, and the other request is
    unaffected."""
    lab = world(16, host=16, rows=4, policy=SWAP, window=2)
    lab.add("other", [1, 2, 3, 4], 12)
    victim = lab.add("victim", [5, 6, 7], 5, **options)
    lab.step()
    for _ in range(depth):
        lab.plan()
    if status in (Status.SWAPPED, Status.WAITING):
        lab.preempt(victim, SWAP if status is Status.SWAPPED else RECOMPUTE)
    while status is Status.FINISHED is not victim.status:
        lab.land() if lab.flight else lab.plan()
    assert victim.status is status
    lives, ended = status is not Status.FINISHED, len(lab.emitted(ev.Finished))
    assert lab.scheduler.abort("victim", "disconnected") is (victim if lives else None)
    assert lab.scheduler.abort("victim") is None
    assert victim.status is Status.FINISHED and not victim.sequences
    assert len(lab.emitted(ev.Finished)) == ended + lives
    assert lives == any(s.finish_reason == "disconnected" for s in victim.finished_sequences)


# -- Confined requests -------------------------------------------------------------------------------------------------


def test_confined_requests_are_planned_alone(world: Worlds) -> None:
    """The others release their blocks, later ones wait, and all continue when no request is confined."""
    lab = world(20)
    a, b = lab.add("A", [1, 2, 3], 6), lab.add("B", [4, 5, 6], 6)
    lab.step()
    lab.plan()
    lab.scheduler.confine([b])
    assert lab.scheduler.running == [b] and lab.scheduler.waiting == [a] and not a.sequences[0].block_ids
    assert lab.emitted(ev.Recomputed) == [ev.Recomputed("A", 2, "confined")]
    lab.land()  # results in flight of the others count
    assert len(a.sequences[0].token_ids) == 5
    lab.add("C", [7, 8], 3)
    for _ in range(2):
        assert lab.step().sequences == [b.sequences[0]]
    lab.scheduler.confine([])
    assert {seq.request.request_id for seq in lab.step().sequences} == {"A", "B", "C"}


def test_a_confined_request_is_admitted_past_others(world: Worlds) -> None:
    """The others arrived first and held all rows and blocks."""
    lab = world(6, rows=2)
    lab.add("A", [1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    lab.add("B", [2, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    c = lab.add("C", [3, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    lab.step()
    assert c.status is Status.WAITING
    lab.scheduler.confine([c])
    assert lab.plan().sequences == [c.sequences[0]]
    lab.land()
    lab.scheduler.confine([])


def test_swapped_requests_release_their_host_blocks_for_a_confined_one(world: Worlds) -> None:
    lab = crowded(world, SWAP)
    lab.step()
    a, b = lab.requests["A"], lab.requests["B"]
    assert b.status is Status.SWAPPED
    lab.scheduler.confine([a])
    assert b.status is Status.WAITING and not lab.cache.swap_space.num_used
    assert lab.step().sequences == [a.sequences[0]]
    lab.scheduler.confine([])


def test_all_requests_continue_when_the_last_confined_one_finishes(world: Worlds) -> None:
    lab = world(20)
    a = lab.add("A", [1, 2, 3], 2)
    lab.add("B", [4, 5, 6], 4)
    c = lab.add("C", [4, 5, 7], 4)
    lab.scheduler.confine([a, c])
    lab.abort("C")
    lab.step()
    assert lab.scheduler.confined_to == {a}
    lab.step()
    assert a.status is Status.FINISHED and not lab.scheduler.confined_to


def test_confined_requests_decode_in_windows_though_others_wait(world: Worlds) -> None:
    """The waiting ones cannot be admitted before the confined ones have finished."""
    lab = world(20, window=3)
    a = lab.add("A", [1, 2, 3], 9)
    lab.step()
    lab.scheduler.confine([a])
    lab.add("B", [4, 5, 6], 4)
    assert lab.step().counts == [3]
    lab.scheduler.confine([])


def test_confined_requests_of_several_tenants_share_no_step(world: Worlds) -> None:
    """They are admitted by order, regardless of what the others were served."""
    lab = world(40, budget=4)
    a = lab.add("A", [1, 2, 3, 4, 5, 6, 7, 8], 2, tenant=1)
    lab.add("B", [2, 2, 3, 4], 2, tenant=2)
    c = lab.add("C", [3, 2, 3, 4], 2, tenant=2)
    lab.scheduler.confine([a, c])
    served = {number: tenant.served for number, tenant in lab.scheduler.tenants.present.items()}
    assert lab.step().sequences == [a.sequences[0]] and lab.step().sequences == [a.sequences[0]]
    assert served == {number: tenant.served for number, tenant in lab.scheduler.tenants.present.items()}
    lab.scheduler.confine([])


# -- Scheduling 6 and 8: plans and stream order ------------------------------------------------------------------------


def test_a_plan_aliases_no_live_state(world: Worlds) -> None:
    """The device may read a plan late."""
    lab = world(16, habits=LAZY)
    request = lab.add("A", [1, 2, 3], 8, width=2)
    plan = lab.plan()
    before = [list(w.block_ids) for w in plan.table_writes], list(plan.host_tokens[0])
    lab.land()
    lab.plan()
    (seq, _) = request.sequences
    seq.block_ids[0], kept = 99, seq.block_ids[0]
    assert ([list(w.block_ids) for w in plan.table_writes], list(plan.host_tokens[0])) == before
    assert all(isinstance(w.block_ids, tuple) for w in plan.table_writes)
    seq.block_ids[0] = kept


def test_table_writes_are_applied_in_stream_order(world: Worlds) -> None:
    """A is aborted in flight, and C takes its row with blocks that hold a prefix. If the device's table changed at
    once, A's step would write into them."""
    lab = world(12, rows=1, habits=LAZY)
    lab.add("P", [1, 2, 3, 4, 0], 1)
    lab.run()
    lab.add("A", [5, 6, 7, 8], 4)
    lab.plan()
    lab.abort("A")
    c = lab.add("C", [1, 2, 3, 4, 1], 2)
    lab.plan()
    assert c.num_cached_tokens == 4


def test_swaps_out_come_before_slices(world: Worlds) -> None:
    """An older request of the same plan takes the victim's block and writes it."""
    lab = crowded(world, SWAP)
    plan = lab.plan()
    taken = {b for w in plan.table_writes for b in w.block_ids}
    assert taken & {s.src for s in plan.swap_outs}
    assert slice_of(plan, lab.requests["A"]) is not None
    lab.run()
    assert lab.cache.swapping.num_swapped_out == lab.cache.swapping.num_swapped_in == 3


def test_swaps_in_come_before_copies(world: Worlds) -> None:
    """A needs a block when G, two samples that share a partial tail, has just forked: G is swapped out whole. It is
    swapped in with the shared tail and copies it in the same plan."""
    lab = world(4, host=4, policy=SWAP)
    lab.add("A", [1, 2, 3, 4], 2)
    group = lab.add("G", [5, 6, 7], 2, width=2)
    lab.step()
    assert len(lab.plan().swap_outs) == 2 and group.status is Status.SWAPPED  # each once, though each has two owners
    host = lab.cache.swap_space
    assert [host.refs[b] for b in (1, 2)] == [2, 2] and host.num_used == 2
    lab.land()
    plan = lab.plan()
    assert len(plan.swap_ins) == 2 and len(plan.copies) == 1 and host.num_used == 0
    assert plan.copies[0].src in {s.dst for s in plan.swap_ins}
