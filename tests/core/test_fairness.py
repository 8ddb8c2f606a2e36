"""Fairness: tenants share steps, long prefills let short ones pass, and prompts of one call let other requests pass."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from octavo.core import events as ev
from octavo.core.policy import ARRIVALS_PER_INDEX, Policy, PreemptionMode
from octavo.core.request import Status
from octavo.core.scheduling.scheduler_state import PATIENCE_STEPS, TURN_TOKENS
from octavo.core.tenants import Tenant, Tenants, catch_up_shares, water_fill
from tests.core.lab import SWAP, Lab, Planned, Worlds, make
from tests.proof import oracle as o
from tests.proof.workloads import Fairness, run


def long_prompts(longest: int, at_a_time: int = 1) -> Policy:
    return Policy(long_prefill_token_threshold=longest, max_long_partial_prefills=at_a_time)


def slices(plan: Planned) -> dict[str, int]:
    """Positions of each request in a plan."""
    counts: Counter[str] = Counter()
    for seq, count in zip(plan.sequences, plan.counts, strict=True):
        counts[seq.request.request_id] += count
    return dict(counts)


def prompt(length: int, first: int = 0) -> list[int]:
    return [first, *(i % 5 for i in range(length - 1))]


# -- long prompts ------------------------------------------------------------------------------------------------------


def test_a_long_prefill_takes_part_of_a_step(world: Worlds) -> None:
    lab = world(100, budget=16, policy=long_prompts(4))
    lab.add("long", prompt(10), 2)
    assert [slices(lab.step()) for _ in range(3)] == [{"long": 4}, {"long": 4}, {"long": 2}]


def test_a_short_prefill_runs_with_a_long_one(world: Worlds) -> None:
    lab = world(100, budget=16, policy=long_prompts(4))
    lab.add("long", prompt(40), 2)
    lab.step()
    lab.add("short", prompt(4, 1), 1)
    assert slices(lab.step()) == {"long": 4, "short": 4}
    assert lab.finished == ["short"]


def test_the_next_long_prefill_waits_and_short_ones_pass_it() -> None:
    lab = Lab(100, budget=16, policy=long_prompts(4))
    lab.add("long", prompt(9), 1)
    lab.add("next", prompt(8, 1), 1)
    lab.add("short", prompt(3, 2), 1)
    lab.add("later", prompt(9, 3), 1)
    assert slices(lab.step()) == {"long": 4, "short": 3}
    assert lab.emitted(ev.Waiting) == [
        ev.Waiting("next", "long prefill", 8, 0, 0),
        ev.Waiting("later", "long prefill", 9, 0, 0),
    ]
    assert slices(lab.step()) == {"long": 4}
    assert slices(lab.step()) == {"long": 1, "next": 4}  # the first is no longer long: few positions are due
    lab.run()
    assert lab.finished == ["short", "long", "next", "later"]


def test_max_long_partial_prefills_run_at_a_time(world: Worlds) -> None:
    lab = world(100, budget=16, policy=long_prompts(2, at_a_time=2))
    for i in range(3):
        lab.add(f"r{i}", prompt(6, i), 1)
    assert slices(lab.step()) == {"r0": 2, "r1": 2}


def test_short_prefills_count_for_their_tenant_after_a_long_one_that_waits(world: Worlds) -> None:
    lab = world(100, budget=10, policy=long_prompts(4))
    for i, (name, length) in enumerate((("long", 5), ("next", 5), ("short", 3))):
        lab.add(name, prompt(length, i), 1, tenant=1)
    for i in range(3):
        lab.add(f"other {i}", prompt(4, 3 + i), 1, tenant=2)
    assert slices(lab.step()) == {"long": 4, "short": 1, "other 0": 4, "other 1": 1}


def test_a_swapped_in_long_prefill_lets_an_earlier_one_run_first(world: Worlds) -> None:
    """Two requests of a tenant run: one was swapped in during its prefill."""
    lab = world(12, host=12, budget=8, rows=4, policy=Policy(mode=SWAP.mode, long_prefill_token_threshold=4))
    lab.add("A", prompt(12), 4)
    lab.add("B", prompt(8, 1), 4)
    lab.step()
    b = lab.requests["B"]
    assert b.wait_reason == "long prefill"


def test_a_cached_prefix_is_not_due(world: Worlds) -> None:
    lab = world(100, budget=32, policy=long_prompts(4))
    lab.add("first", prompt(12), 1)
    lab.run()
    lab.add("long", prompt(12, 1), 1)
    lab.add("again", prompt(12), 1)
    assert slices(lab.step()) == {"long": 4, "again": 2}


def test_a_lookup_is_made_once_while_a_long_prompt_waits(world: Worlds) -> None:
    lab = world(100, budget=16, policy=long_prompts(2))
    lab.add("long", prompt(12), 1)
    lab.add("next", prompt(12, 1), 1)
    looked: list[str] = []
    lookup = lab.cache.prefixes.lookup
    lab.cache.prefixes.lookup = lambda seq: looked.append(seq.request.request_id) or lookup(seq)  # type: ignore[func-returns-value,method-assign]
    for _ in range(4):
        lab.step()
    assert looked == ["long", "next"]


# -- the prompts of one call -------------------------------------------------------------------------------------------


def test_a_later_request_passes_prompts_of_one_call() -> None:
    lab = Lab(400, budget=4, rows=4)
    for i in range(12):
        lab.add(f"call-{i}", prompt(4, i), 1, index_in_call=i)
    lab.add("neighbour", prompt(4, 20), 1)
    lab.run()
    assert lab.finished[:3] == ["call-0", "neighbour", "call-1"]
    assert sorted(lab.finished[2:], key=lambda n: int(n.split("-")[1])) == [f"call-{i}" for i in range(1, 12)]


def test_prompts_of_a_call_are_overtaken_by_a_bounded_number() -> None:
    last, policy = make("last", [1], 1, index_in_call=2), Policy()
    place = policy.order(last, 5)
    assert policy.order(make("a", [1], 1), 5 + 2 * ARRIVALS_PER_INDEX - 1) < place
    assert policy.order(make("b", [1], 1), 5 + 2 * ARRIVALS_PER_INDEX + 1) > place
    by_priority = Policy(by_priority=True)
    assert by_priority.order(make("c", [1], 1, index_in_call=1), 0) > by_priority.order(make("d", [1], 1), 9)


# -- tenants -----------------------------------------------------------------------------------------------------------


def run_two(seed: int, budget: int, *, longest: int = 0) -> int:
    """Two tenants who always have prompts that wait: how far apart what they are served ever is."""
    rnd, apart = random.Random(seed), 0
    lab = Lab(4000, 4, budget=budget, rows=64, policy=long_prompts(longest), caching=False)
    served: Counter[int] = Counter()
    for i in range(120):
        tenant = i % 2
        size = rnd.randint(1, 12) if tenant else rnd.randint(20, 60)
        for j in range(5 if tenant else 1):
            lab.add(f"{tenant}-{i}-{j}", prompt(size, i), rnd.randint(1, 3), tenant=tenant)
    while all(sum(r.tenant == t for r in lab.scheduler.waiting) > 2 for t in (0, 1)):
        plan = lab.step()
        for seq, count in zip(plan.sequences, plan.counts, strict=True):
            served[seq.request.tenant] += count
        apart = max(apart, abs(served[0] - served[1]))
    assert min(served.values()) > 20 * budget
    lab.run(limit=5000)
    return apart


@pytest.mark.parametrize("budget", [*(pytest.param(n, marks=pytest.mark.proof) for n in (8, 16)), 40])
def test_service_of_two_backlogged_tenants_differs_by_at_most_a_step(budget: int) -> None:
    """One tenant sends few long prompts, the other many short ones."""
    assert max(run_two(seed, budget) for seed in range(3)) <= budget


def test_a_new_tenant_has_its_share_of_the_next_step(world: Worlds) -> None:
    lab = world(400, budget=16, rows=16)
    for i in range(20):
        lab.add(f"crowd-{i}", prompt(30, i), 1, tenant=0)
    lab.step()
    lab.add("one", prompt(6, 30), 1, tenant=1)
    assert slices(lab.step()) == {"crowd-0": 10, "one": 6}
    assert lab.finished == ["one"]


def test_the_less_served_tenant_catches_up(world: Worlds) -> None:
    lab = world(400, budget=8, rows=16)
    lab.add("A", prompt(4), 20, width=4, tenant=0)
    lab.add("B", prompt(2, 1), 2, tenant=1)
    for _ in range(4):
        lab.step()
    assert lab.scheduler.tenants.present.keys() == {0}
    lab.add("b", prompt(40, 2), 1, tenant=1)  # starts level; idle time earns no credit
    lab.add("a", prompt(40, 3), 1, tenant=0)
    assert slices(lab.step()) == {"A": 4, "b": 4}
    assert slices(lab.step()) == {"A": 4, "b": 4}


def test_an_unwanted_share_goes_to_other_tenants(world: Worlds) -> None:
    lab = world(400, budget=16, rows=16)
    lab.add("A", prompt(50), 1, tenant=0)
    lab.step()
    lab.add("B", prompt(2, 1), 1, tenant=1)
    assert slices(lab.step()) == {"A": 14, "B": 2}


def test_a_share_saved_by_cache_hits_goes_to_other_tenants(world: Worlds) -> None:
    """The tenant turns out to want less, so the rest is shared again in the same step."""
    lab = world(400, budget=16, rows=16)
    lab.add("before", prompt(20), 1, tenant=0)
    lab.run()
    lab.add("again", prompt(20), 1, tenant=0)
    for i in range(4):
        lab.add(f"B{i}", prompt(6, i + 1), 1, tenant=1)
    assert slices(lab.step()) == {"again": 2, "B0": 6, "B1": 2, "B2": 6}


def test_a_decode_window_does_not_reduce_shares_of_others(world: Worlds) -> None:
    lab = world(400, budget=8, rows=8, window=8)
    lab.add("A", prompt(10), 20, tenant=0)
    lab.add("B", prompt(30, 1), 1, tenant=1)
    lab.step()
    lab.step()
    assert slices(lab.step()) == {"A": 2, "B": 6}  # the end of the prefill, without a decode window beyond its share


def test_small_requests_pass_one_that_waits_for_blocks_until_they_give_way(world: Worlds) -> None:
    lab = world(10, budget=32, rows=8)
    lab.add("first", prompt(2, 2), 16, tenant=0)
    lab.step()
    lab.add("large", prompt(16, 1), 2, tenant=1)
    for i in range(12):
        lab.add(f"small {i}", prompt(2, 2), 4, tenant=0)
        lab.step()
    assert "large" in lab.finished and lab.reasons("large") == ["blocks"]


def test_a_running_prefill_progresses_though_another_tenant_is_owed_more() -> None:
    """It holds the blocks that the other tenant waits for."""
    lab = Lab(10, budget=4, rows=8)
    lab.add("A", prompt(18), 2, tenant=0)
    lab.step()
    lab.step()
    lab.add("B", prompt(18, 1), 2, tenant=1)
    assert all(lab.step() for _ in range(4))
    lab.run()
    assert lab.finished == ["A", "B"]


def test_position_of_a_running_prefill_without_a_share_is_taken_from_all_shares() -> None:
    lab = Lab(400, budget=9, rows=8)
    for i, name in enumerate("ABC"):
        lab.add(name, prompt(90, i), 1, tenant=i)
    lab.step()
    lab.scheduler.tenants.present[0].served += 100
    lab.add("B2", prompt(90, 3), 1, tenant=1)
    assert slices(lab.step()) == {"A": 1, "B": 4, "C": 4}


def test_a_prefix_in_flight_of_one_tenant_does_not_stop_others(world: Worlds) -> None:
    lab = world(100, budget=32, rows=8)
    lab.add("A0", prompt(8), 1, tenant=0)
    lab.add("A1", prompt(8), 1, tenant=0)
    lab.add("B", prompt(4, 1), 1, tenant=1)
    lab.scheduler.tenants.present[1].served = 50  # so that A1 is tried before B
    assert slices(lab.step()) == {"A0": 8, "B": 4}


def test_with_one_tenant_nothing_is_counted_and_order_is_by_arrival() -> None:
    for number in (0, 7):
        lab = Lab(100, budget=8, rows=3)
        for i in range(9):
            lab.add(f"{i}", prompt(5, i), 1 + i % 3, tenant=number)
        while lab.scheduler.has_work:
            lab.step()
            assert all(tenant.served == 0 for tenant in lab.scheduler.tenants.present.values())
        arrived = [e.request_id for e in lab.emitted(ev.Admitted) if isinstance(e, ev.Admitted)]
        assert arrived == [f"{i}" for i in range(9)]
        assert not lab.scheduler.tenants.present


def test_no_share_is_reserved_for_waiting_requests_while_one_is_swapped() -> None:
    lab = Lab(8, host=8, budget=8, rows=4, policy=Policy(mode=SWAP.mode))
    lab.add("A", prompt(6), 8, tenant=0)
    lab.add("B", prompt(6, 1), 8, tenant=1)
    lab.add("C", prompt(6, 2), 2, tenant=1)
    lab.run()
    assert lab.emitted(ev.SwappedIn) and not lab.scheduler.requests


def test_a_group_that_needs_a_result_takes_no_share(world: Worlds) -> None:
    lab = world(100, budget=8, rows=8)
    lab.add("beams", prompt(4), 4, beam=2, tenant=0)
    lab.step()
    lab.add("B", prompt(20, 1), 1, tenant=1)
    lab.plan()
    assert slices(lab.plan()) == {"B": 8}  # the beams wait for their tokens


# -- sharing, by itself ------------------------------------------------------------------------------------------------


def test_water_fill_raises_the_lowest_first() -> None:
    assert water_fill(10, {1: 9, 2: 9}, {1: 0, 2: 4}) == {1: 7, 2: 3}
    assert water_fill(3, {1: 9, 2: 9}, {1: 0, 2: 4}) == {1: 3, 2: 0}
    assert water_fill(10, {1: 2, 2: 9, 3: 0}, {1: 0, 2: 0, 3: 0}) == {1: 2, 2: 8, 3: 0}
    assert water_fill(7, {1: 9, 2: 9}, {1: 0, 2: 0}) == {1: 4, 2: 3}
    assert water_fill(0, {1: 9}, {1: 0}) == {1: 0}
    assert water_fill(9, {1: 2, 2: 3}, {1: 0, 2: 0}) == {1: 2, 2: 3}


def test_water_fill_is_max_min_fair() -> None:
    """None can have more without a lower one having less."""
    rnd = random.Random(5)
    for _ in range(500):
        names = range(rnd.randint(1, 5))
        amount, wants = rnd.randint(0, 30), {n: rnd.randint(0, 12) for n in names}
        heights = {n: rnd.randint(0, 20) for n in names}
        got = water_fill(amount, wants, heights)
        assert sum(got.values()) == min(amount, sum(wants.values()))
        assert all(0 <= got[n] <= wants[n] for n in names)
        for a in names:
            for b in names:
                if got[a] < wants[a] and got[b] > 0:
                    assert heights[b] + got[b] <= heights[a] + got[a] + 1


def test_the_whole_step_is_shared() -> None:
    tenants = Tenants()
    tenants.present = {1: Tenant(1, 10), 2: Tenant(2, 0)}
    assert tenants.shares(20, {1: 2, 2: 4}, {1: 0, 2: 0}) == {1: 5, 2: 15}
    assert tenants.shares(20, {1: 2, 2: 4}, {1: 0, 2: 12}) == {1: 11, 2: 9}
    assert catch_up_shares(6, tenants.present.values()) == {1: 0, 2: 6}


def test_the_oracle_notices_unfairness() -> None:
    lab = Lab(100, budget=8, rows=8)
    lab.add("A", prompt(20), 1, tenant=0)
    lab.add("B", prompt(20, 1), 1, tenant=1)
    fairness = Fairness(lab.scheduler)
    lab.scheduler.tenants.shares = lambda *_: {0: 7, 1: 1}  # type: ignore[method-assign]
    plan = lab.scheduler.schedule()
    with pytest.raises(o.Invariant, match="unfair"):
        fairness.check(plan, Counter())


def test_a_new_tenant_starts_level_with_the_least_served() -> None:
    tenants = Tenants()
    tenants.present = {1: Tenant(1, 10), 2: Tenant(2, 4)}
    tenants.enter(make("r", [1], 1, tenant=3))
    assert tenants.present[3].served == 4


@pytest.mark.parametrize(
    "seed", [3081, 9202, 13579, 15034], ids=["short after long", "rebuilt group", "starved", "group in flight"]
)
def test_shares_are_level_in_workloads_that_once_failed(seed: int) -> None:
    run(seed)


# -- rows --------------------------------------------------------------------------------------------------------------

WAYS = {
    "recompute": (Policy(mode=PreemptionMode.RECOMPUTE), 0),
    "swap": (Policy(mode=PreemptionMode.SWAP), 200),
    "rule": (Policy(), 200),
}


def rows_of(lab: Lab) -> dict[int, int]:
    return {number: tenant.num_rows for number, tenant in lab.scheduler.tenants.present.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("beam", [0, 8])
def test_a_wide_request_gives_way_to_another_tenant_in_the_next_step(world: Worlds, way: str, beam: int) -> None:
    policy, host = WAYS[way]
    lab = world(200, host=host, rows=8, policy=policy)
    wide = lab.add("wide", prompt(4), 30, tenant=0, **({"beam": beam} if beam else {"width": 8}))
    for _ in range(6):
        lab.step()
    lab.add("four tokens", prompt(3, 1), 4, tenant=1)
    assert slices(lab.step()) == {"four tokens": 3}
    (gave_way,) = lab.emitted(ev.Preempted)
    assert (gave_way.request_id, gave_way.for_request, gave_way.why) == ("wide", "four tokens", "share")
    while "four tokens" not in lab.finished:
        lab.step()
    assert lab.scheduler.num_steps == 6 + 4 and wide.num_preemptions == 0
    lab.step()
    assert wide.status is Status.RUNNING, "back as soon as its rows are free"
    lab.add("again", prompt(3, 2), 4, tenant=1)
    for _ in range(8 + TURN_TOKENS + 5):  # after a recomputation of all sequences and a turn
        lab.step()
    assert "again" in lab.finished


def test_a_request_has_its_turn_before_it_gives_way_again(world: Worlds) -> None:
    lab = world(200, rows=4, policy=Policy(mode=PreemptionMode.RECOMPUTE))
    wide = lab.add("wide", prompt(4), 40, width=4, tenant=0)
    lab.step()
    lengths = []
    for i in range(30):
        lab.add(f"small {i}", prompt(2, 1), 1, tenant=1)
        lab.step()
        if lab.emitted(ev.Preempted)[len(lengths) :]:
            lengths.append(len(wide.sequences[0].token_ids))
    assert len(lengths) > 2 and min(b - a for a, b in pairwise(lengths)) >= TURN_TOKENS


def test_the_tenant_with_most_rows_gives_way_until_both_have_as_many(world: Worlds) -> None:
    lab = world(400, rows=8, budget=64)
    for i in range(8):
        lab.add(f"a{i}", prompt(3, i), 20, tenant=0)
    lab.step()
    for i in range(6):
        lab.add(f"b{i}", prompt(3, 10 + i), 20, tenant=1)
    lab.step()
    assert rows_of(lab) == {0: 7, 1: 1}
    for _ in range(5):
        lab.step()
    assert rows_of(lab) == {0: 4, 1: 4}
    assert [e.request_id for e in lab.emitted(ev.Preempted)] == ["a7", "a6", "a5", "a4"]


def test_the_tenant_with_most_rows_gives_way_to_several_in_one_step(world: Worlds) -> None:
    lab = world(400, rows=8, budget=64)
    for i in range(8):
        lab.add(f"a{i}", prompt(3, i), 20, tenant=int(i > 5))
    lab.step()
    lab.add("c", prompt(3, 20), 20, tenant=2)
    lab.add("d", prompt(3, 21), 20, width=2, tenant=3)
    lab.step()
    assert rows_of(lab) == {0: 3, 1: 2, 2: 1, 3: 2}
    lab.add("e", prompt(3, 22), 2, width=3, tenant=4)
    lab.step()
    assert rows_of(lab) == {0: 3, 1: 2, 2: 1, 3: 2, 4: 0}, "as many as it would have"


def test_the_last_row_of_a_tenant_stays(world: Worlds) -> None:
    lab = world(400, rows=4, budget=64)
    for i in range(4):
        lab.add(f"a{i}", prompt(3, i), 20, tenant=0)
    lab.step()
    for tenant in range(1, 5):
        lab.add(f"b{tenant}", prompt(3, 10 + tenant), 20, tenant=tenant)
    lab.step()
    assert rows_of(lab) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 0}


def test_nobody_gives_way_for_part_of_the_rows(world: Worlds) -> None:
    lab = world(400, rows=8, budget=64)
    for i in range(6):
        lab.add(f"a{i}", prompt(3, i), 20, tenant=0)
    lab.step()
    lab.add("B", prompt(3, 20), 2, width=5, tenant=1)
    lab.step()
    assert rows_of(lab) == {0: 6, 1: 0} and lab.reasons("B") == ["rows"]


def test_a_swapped_request_resumes_past_one_that_waits_for_more_rows(world: Worlds) -> None:
    lab = world(200, host=200, rows=8, policy=Policy(mode=PreemptionMode.SWAP))
    lab.add("wide", prompt(4), 30, width=8, tenant=0)
    for _ in range(3):
        lab.step()
    for tenant in (1, 2):
        lab.add(f"r{tenant}", prompt(3, tenant), 20, tenant=tenant)
    for _ in range(2):
        lab.step()
    lab.preempt(lab.requests["r1"])
    lab.step()
    assert [lab.requests[name].status for name in ("wide", "r1")] == [Status.SWAPPED, Status.RUNNING]


def test_tenants_take_rows_in_turns(world: Worlds) -> None:
    lab = world(200, rows=2, budget=64)
    for i, tenant in enumerate((0, 0, 1, 1)):
        lab.add(f"r{i}", prompt(4, i), 6, tenant=tenant)
    lab.step()
    assert rows_of(lab) == {0: 1, 1: 1}


def test_equal_and_wider_requests_wait_for_their_rows(world: Worlds) -> None:
    lab = world(200, rows=8)
    lab.add("A", prompt(4), 20, width=5, tenant=0)
    lab.step()
    lab.add("B", prompt(4, 1), 2, width=5, tenant=1)
    for _ in range(5):
        lab.step()
    assert not lab.emitted(ev.Preempted) and lab.reasons("B") == ["rows"]


def test_a_request_for_all_rows_gets_them_though_others_always_have_some(world: Worlds) -> None:
    """It lets others pass for a while, then all give way to it, and it has its turn."""
    lab = world(400, rows=4, budget=64)
    lab.add("small", prompt(2), 2, tenant=0)
    lab.step()
    wide = lab.add("wide", prompt(4, 1), TURN_TOKENS, width=4, tenant=1)
    for i in range(2 * PATIENCE_STEPS):
        lab.add(f"small {i}", prompt(2, i % 7), 2, tenant=i % 2 * 2)
        lab.step()
        if wide.status is Status.FINISHED:
            break
    assert wide.status is Status.FINISHED and i > PATIENCE_STEPS and lab.finished[40] == "small 39"


def test_rows_of_requests_in_their_turn_are_kept_for_one_that_waited_long(world: Worlds) -> None:
    """One row becomes free a step, and those who run have their turn to the end: no step frees all rows at once."""
    lab = world(400, rows=4, budget=64)
    for i in range(4):
        lab.add(f"first {i}", prompt(2, i), TURN_TOKENS, tenant=i % 2 * 2)
        lab.step()
    wide = lab.add("wide", prompt(4, 1), 1, width=4, tenant=1)
    for i in range(4):
        lab.add(f"next {i}", prompt(2, i), TURN_TOKENS, tenant=i % 2 * 2)
    for i in range(PATIENCE_STEPS + 4 * TURN_TOKENS):
        lab.add(f"small {i}", prompt(2, i % 7), TURN_TOKENS, tenant=i % 2 * 2)
        lab.step()
    assert wide.status is Status.FINISHED


def test_a_more_urgent_request_does_not_give_way(world: Worlds) -> None:
    lab = world(200, rows=4, policy=Policy(by_priority=True))
    lab.add("urgent", prompt(4), 20, width=4, priority=0, tenant=0)
    lab.step()
    lab.add("later", prompt(4, 1), 2, priority=1, tenant=1)
    lab.step()
    assert not lab.emitted(ev.Preempted)
    lab.add("as urgent", prompt(4, 2), 2, priority=0, tenant=2)
    lab.step()
    assert len(lab.emitted(ev.Preempted)) == 1


def test_one_tenant_never_gives_way_to_itself(world: Worlds) -> None:
    lab = world(200, rows=4)
    lab.add("wide", prompt(4), 20, width=4)
    lab.step()
    lab.add("next", prompt(4, 1), 2)
    for _ in range(5):
        lab.step()
    assert not lab.emitted(ev.Preempted)
