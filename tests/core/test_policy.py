"""Preemption: choice of victim and mode, and resumption, in `octavo.core.policy` and in the scheduler."""

from __future__ import annotations

import pytest

from octavo.core import events as ev
from octavo.core.policy import INITIAL_HEADROOM, Policy, PreemptionCosts, PreemptionMode, VictimPolicy
from octavo.core.request import Request
from tests.core.lab import Lab, Worlds, make

RECOMPUTE, SWAP = PreemptionMode.RECOMPUTE, PreemptionMode.SWAP


def _of_several() -> Request:
    request, other = make("g", [1], 2, width=2), make("s", [1], 2)
    for r in (request, other):
        r.begin(0, (0, 0), 2)
    request.sequences.append(other.sequences[0])
    return request


# -- how ---------------------------------------------------------------------------------------------------------------


def test_with_unknown_costs_a_sequence_is_recomputed_and_a_group_swapped() -> None:
    single, group = make("s", [1], 2), _of_several()
    single.begin(0, (0, 0), 2)
    for costs in (PreemptionCosts(), PreemptionCosts(token_s=1.0), PreemptionCosts(move_s=1.0)):
        assert Policy(costs=costs).preemption_mode(single, 1, 1) == (RECOMPUTE, "rule")
        assert Policy(costs=costs).preemption_mode(group, 1, 1) == (SWAP, "rule")


@pytest.mark.parametrize("mode", PreemptionMode)
def test_a_forced_mode_ignores_costs(mode: PreemptionMode) -> None:
    for costs in (
        PreemptionCosts(),
        PreemptionCosts(token_s=1.0, move_s=1e9),
        PreemptionCosts(token_s=1.0, move_s=1e-9),
    ):
        policy = Policy(mode=mode, costs=costs)
        assert policy.preemption_mode(_of_several(), 3, 40) == (mode, "forced")


def test_the_cheaper_preemption_mode_is_used() -> None:
    """Swapping 3 blocks out and in is 6 moves. Of 40 positions a quarter is still cached: 30 are recomputed."""
    costs = PreemptionCosts(token_s=1.0, move_s=4.9, kept=0.25)
    assert costs.swap_s(3) == pytest.approx(29.4) and costs.recompute_s(40) == 30
    policy = Policy(costs=costs)
    for victim in (_of_several(), make("s", [1], 2)):
        costs.move_s = 4.9
        assert policy.preemption_mode(victim, 3, 40) == (SWAP, "cheaper")
        costs.move_s = 5.1
        assert policy.preemption_mode(victim, 3, 40) == (RECOMPUTE, "cheaper")


def test_costs_are_measured_from_steps() -> None:
    costs = PreemptionCosts(move_s=1.0)
    costs.record_step(0, 0.010)
    assert costs.step_s == 0.010 and not costs.known
    costs.record_step(63, 9.0)  # too few positions to measure
    assert not costs.known
    costs.record_step(100, 0.030)
    assert costs.token_s == pytest.approx(0.0002) and costs.known
    costs.record_step(100, 0.130)  # a new value has a weight of 0.2
    assert costs.token_s == pytest.approx(0.0002 + 0.2 * 0.001)
    costs.record_step(0, 0.020)
    assert costs.step_s == pytest.approx(0.012)
    costs.record_step(100, 0.011)  # faster than a step without prefill: ignored
    assert costs.token_s == pytest.approx(0.0004)
    costs.record_return(50, 100)
    costs.record_return(50, 100)
    assert costs.kept == pytest.approx(0.1 + 0.2 * 0.4)


def test_cache_hits_of_resumed_requests_are_measured() -> None:
    lab = Lab(6, policy=Policy(mode=RECOMPUTE))
    lab.add("A", [1, 2, 3, 4], 6)
    lab.add("B", [5, 6, 7, 8], 6)
    lab.run()
    back = [e for e in lab.emitted(ev.Admitted) if e.request_id == "B"][1]
    assert back.num_cached_tokens > 0
    assert lab.scheduler.policy.costs.kept == pytest.approx(0.2 * back.num_cached_tokens / back.num_tokens)


def test_without_host_room_a_victim_is_recomputed_and_the_event_has_the_reason() -> None:
    lab = Lab(6, host=1, policy=Policy(costs=PreemptionCosts(token_s=1.0, move_s=0.1)))
    lab.add("A", [1, 2, 3, 4], 6)
    lab.add("B", [5, 6, 7, 8], 6)
    lab.run()
    assert [(e.how, e.why) for e in lab.emitted(ev.Preempted)] == [("recompute", "no host room")]


def test_private_blocks_exclude_sealed_blocks_of_others(world: Worlds) -> None:
    """Blocks of 2. Both requests begin with 1 2 3 4; B has 9 after them, and soon more."""
    lab = world(20)
    lab.add("A", [1, 2, 3, 4, 5], 4)
    lab.step()
    b = lab.add("B", [1, 2, 3, 4, 9], 4)
    lab.step()
    assert lab.cache.swapping.count_private_blocks(b) == (1, 1)
    lab.abort("A")
    assert lab.cache.swapping.count_private_blocks(b) == (3, 5)


def test_a_block_shared_by_samples_counts_once_as_private(world: Worlds) -> None:
    """Blocks of 2, a prompt of 3: both samples hold the first block, and one of them the copy of the tail."""
    lab = world(20)
    group = lab.add("G", [1, 2, 3], 4, width=2)
    lab.step()
    assert lab.cache.swapping.count_private_blocks(group) == (2, 3)
    lab.step()
    assert lab.cache.swapping.count_private_blocks(group) == (3, 6)


# -- who ---------------------------------------------------------------------------------------------------------------


def _crowd(victims: VictimPolicy, costs: PreemptionCosts | None = None) -> Lab:
    """A grows; B holds little, C more."""
    lab = Lab(8, policy=Policy(mode=RECOMPUTE, victims=victims, costs=costs or PreemptionCosts()))
    lab.add("A", [1, 2, 3, 4], 9)
    lab.add("B", [5], 5)
    lab.add("C", [6, 7, 8, 9], 5)
    lab.run()
    return lab


@pytest.mark.parametrize("costs", [PreemptionCosts(), PreemptionCosts(token_s=1.0, move_s=1.0)])
def test_the_request_that_resumes_fastest_is_preempted(costs: PreemptionCosts) -> None:
    assert _crowd(VictimPolicy.LEAST_LOST, costs).emitted(ev.Preempted)[0].request_id == "B"


def test_among_equals_the_latest_request_is_preempted() -> None:
    lab = Lab(6, policy=Policy(mode=RECOMPUTE, victims=VictimPolicy.LEAST_LOST))
    for name in "ABC":
        lab.add(name, [ord(name)], 8)
    lab.run()
    assert lab.emitted(ev.Preempted)[0].request_id == "C"


@pytest.mark.parametrize("victims", VictimPolicy)
def test_the_first_request_is_never_preempted_for_another(victims: VictimPolicy) -> None:
    lab = Lab(8, policy=Policy(mode=RECOMPUTE, victims=victims))
    for i, (prompt, num) in enumerate([([1], 12), ([2, 3, 4, 5], 9), ([6, 7], 9), ([8], 9)]):
        lab.add(f"r{i}", prompt, num)
    lab.run()
    preempted = lab.emitted(ev.Preempted)
    assert preempted and "r0" not in [e.request_id for e in preempted]
    assert lab.finished[0] == "r0"


@pytest.mark.parametrize(("mode", "least"), [(RECOMPUTE, "few positions"), (SWAP, "few blocks"), (None, "few blocks")])
def test_resume_time_depends_on_the_preemption_mode(mode: PreemptionMode | None, least: str) -> None:
    """Swapping is cheap here, if it is allowed."""
    costs = PreemptionCosts(token_s=1.0, move_s=0.1)
    policy = Policy(mode=mode, victims=VictimPolicy.LEAST_LOST, costs=costs)
    owned = {"few blocks": (2, 4), "few positions": (3, 3), "asker": (1, 1)}
    running = [make(name, [1], 2) for name in ("asker", "few blocks", "few positions")]

    class Swapping:
        def count_private_blocks(self, request: Request) -> tuple[int, int]:
            return owned[request.request_id]

    class Cache:
        swapping = Swapping()

    assert policy.victim(running, running[0], Cache()).request_id == least  # type: ignore[arg-type]
    assert policy.victim(running[:1], running[0], Cache()) is running[0]  # type: ignore[arg-type]


# -- in which order ----------------------------------------------------------------------------------------------------


def test_ageing_bounds_how_often_a_request_is_overtaken() -> None:
    """With an ageing of 3, two steps of priority are worth six arrivals, not seven."""
    policy = Policy(by_priority=True, ageing=3)
    late = make("late", [1], 1, priority=2)
    places = [(policy.order(make(f"r{i}", [1], 1), i), i) for i in range(1, 12)]
    overtaken_by = [i for place, i in places if place < policy.order(late, 0)]
    assert overtaken_by == [1, 2, 3, 4, 5]
    equal = [place for place, i in places if i == 6]
    assert policy.order(late, 0) < equal[0]  # the earlier of two equal keys
    strict = Policy(by_priority=True)
    assert strict.order(late, 0) > strict.order(make("r", [1], 1), 10**9)
    assert Policy(ageing=3).order(late, 0) == (0, 0)


# -- coming back -------------------------------------------------------------------------------------------------------


def test_headroom_doubles_with_each_preemption() -> None:
    request = make("r", [1], 1)
    rooms = []
    for request.num_preemptions in (0, 1, 2, 5, 90):
        rooms.append(Policy().headroom(request))
    assert rooms == [0, INITIAL_HEADROOM, 2 * INITIAL_HEADROOM, 16 * INITIAL_HEADROOM, INITIAL_HEADROOM << 20]


@pytest.mark.parametrize("mode", PreemptionMode)
def test_a_preempted_request_resumes_when_all_can_grow(mode: PreemptionMode) -> None:
    """B would fit again as soon as A releases one block, and A's next block would preempt it."""
    lab = Lab(12, 1, host=12, policy=Policy(mode=mode))
    lab.add("A", [1, 2, 3], 7)
    b = lab.add("B", [5, 6, 7], 9)
    while not lab.emitted(ev.Preempted):
        lab.step()
    lab.run()
    assert b.num_preemptions == 1
    waits = [e for e in lab.emitted(ev.Waiting) if e.request_id == "B" and e.reason == "blocks"]
    left = [e.num_tokens for e in lab.emitted(ev.Finished) if e.request_id == "B"]
    assert left == [9] and waits[0].needs == 7 + 2 * 5, waits
    entered = [e for e in lab.emitted(ev.Admitted, ev.SwappedIn, ev.Finished) if e.request_id in "AB"]
    assert [(type(e).__name__, e.request_id) for e in entered][2:] == [
        ("Finished", "A"),
        ("Admitted" if mode is RECOMPUTE else "SwappedIn", "B"),
        ("Finished", "B"),
    ]


def test_without_running_requests_no_headroom_is_needed(world: Worlds) -> None:
    """Otherwise a request as large as the pool would wait for ever."""
    lab = world(6, 1, policy=Policy(mode=RECOMPUTE))
    request = lab.add("A", [1, 2, 3], 4)
    lab.step()
    lab.preempt(request)


# -- constraints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 3])
def test_every_token_of_a_structured_output_has_a_bitmask(world: Worlds, width: int) -> None:
    """A prompt of 5 in chunks of 2: only the last chunk samples. Decode windows have a bitmask per token."""
    lab = world(40, budget=8, rows=8, window=4)
    lab.add("free", [9] * 6, 3)
    request = lab.add("bound", [1, 2, 3, 4, 5], 3, width=width, use_structured_output=True)
    masks = 0
    while lab.scheduler.has_work:
        plan = lab.plan()
        drawn = [i for i, s in enumerate(plan.sequences) if s.request is request and plan.num_sampled[i]]
        assert plan.bitmask_slices == drawn and plan.num_bitmask_columns == max(
            (plan.num_sampled[i] for i in drawn), default=0
        )
        masks += sum(plan.num_sampled[i] for i in drawn)
        while lab.flight:
            lab.land()
    assert masks == 1 + 2 * width
