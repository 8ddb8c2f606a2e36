"""The scheduling rules in the design's numbering: content of plans, order of requests, and wait reasons."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from octavo.core import events as ev
from octavo.core.in_flight import InFlightStep
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import Slice, StepPlan, StepResult
from octavo.core.policy import Policy, PreemptionMode
from octavo.core.request import Status
from octavo.core.scheduler import Scheduler
from octavo.errors import CapacityError
from octavo.params.sampling_params import SamplingParams
from tests.core.lab import RECOMPUTE, SWAP, Lab, Planned, answer, make, slice_of
from tests.proof import oracle as o
from tests.proof.workloads import World


def names(plan: Planned) -> list[str]:
    return [s.request.request_id for s in plan.sequences]


# -- 5.1: a step -------------------------------------------------------------------------------------------------------


def test_prefill_and_decode_share_a_step() -> None:
    lab = Lab(20)
    lab.add("A", [1, 2, 3], 5)
    lab.step()
    lab.add("B", [4, 5, 6, 7], 5)
    plan = lab.plan()
    assert (names(plan), plan.starts, plan.counts, plan.num_sampled) == (["A", "B"], [3, 0], [1, 4], [1, 1])
    assert list(plan.slices()) == [Slice(0, 3, 1, 1, 1, None), Slice(1, 0, 4, 1, 1, plan.host_tokens[1])]
    assert plan.num_tokens == 5
    lab.run()


def test_a_long_prompt_is_chunked_by_the_budget() -> None:
    lab = Lab(20, budget=4)
    request = lab.add("A", list(range(10)), 3)
    seen = []
    while lab.scheduler.has_work:
        plan = lab.step()
        seen.append((plan.starts[0], plan.counts[0], plan.num_sampled[0]))
    assert seen == [(0, 4, 0), (4, 4, 0), (8, 2, 1), (10, 1, 1), (11, 1, 1)]
    assert request.finished_sequences[0].token_ids[10:].tolist() == answer(list(range(10)), 3)
    lab.at_rest()


def test_decode_goes_on_while_a_prompt_is_chunked() -> None:
    lab = Lab(30, budget=4)
    lab.add("A", [1, 2], 8)
    lab.step()
    lab.add("B", list(range(10)), 2)
    for _ in range(3):
        plan = lab.step()
        assert names(plan) == ["A", "B"] and plan.counts == [1, 3]
    assert lab.scheduler.running[1].sequences[0].num_computed == 9
    lab.run()


def test_the_budget_stops_admission_with_a_reason() -> None:
    lab = Lab(30, budget=4)
    lab.add("A", [1, 2, 3, 4], 2)
    lab.add("B", [4, 5, 6], 2)
    lab.plan()
    assert lab.emitted(ev.Waiting) == [ev.Waiting("B", "budget", 3, 0, 0)]
    lab.run()


def test_rows_bound_a_step_and_a_request_takes_its_width_from_the_start() -> None:
    lab = Lab(40, rows=3)
    lab.add("A", [1, 2], 3, width=2)
    b = lab.add("B", [3, 4], 3, width=2)
    lab.add("C", [5, 6], 3)
    plan = lab.plan()
    assert names(plan) == ["A"]  # C would fit, but B is first
    assert lab.emitted(ev.Waiting) == [ev.Waiting("B", "rows", 2, 1, 0)]
    assert lab.scheduler.num_rows_taken == 2
    lab.run()
    assert b.finished_sequences


def test_a_finished_sample_keeps_its_groups_row() -> None:
    """Rows are released when the request finishes: the width is taken until then."""
    samples = [answer([1, 2], 4, i) for i in (0, 1)]
    stop = next(iter({samples[0][0]} - {samples[1][0]}), samples[0][0])
    lab = Lab(20, rows=2)
    group = lab.add("A", [1, 2], 4, width=2, stop_ids=[stop])
    lab.step()
    if len(group.sequences) == 1:
        assert lab.scheduler.num_rows_taken == 2
    lab.run()
    assert sorted(s.finish_reason for s in group.finished_sequences)[0] in ("length", "stop")
    assert lab.scheduler.num_rows_taken == 0


def test_first_come_first_served_by_default() -> None:
    lab = Lab(40, rows=1)
    for name, priority in (("A", 1), ("B", 0), ("C", -1)):
        lab.add(name, [1, 2], 1, priority=priority)
    lab.run()
    assert lab.finished == ["A", "B", "C"]


def test_by_priority_the_lower_number_goes_first_and_then_the_earlier() -> None:
    lab = Lab(40, rows=1, policy=Policy(by_priority=True))
    for name, priority in (("A", 1), ("B", 0), ("C", -1), ("D", 0)):
        lab.add(name, [1, 2], 1, priority=priority)
    lab.run()
    assert lab.finished == ["C", "B", "D", "A"]


def test_by_priority_the_least_important_request_is_preempted_though_it_arrived_first() -> None:
    lab = Lab(6, policy=Policy(by_priority=True, mode=PreemptionMode.RECOMPUTE))
    lab.add("early", [1, 2, 3, 4], 6, priority=5)
    lab.step()
    lab.add("urgent", [5, 6, 7, 8], 6)
    lab.run()
    assert {e.request_id for e in lab.emitted(ev.Preempted)} == {"early"}
    assert lab.finished == ["urgent", "early"]


def test_swapped_requests_resume_before_new_ones_are_admitted() -> None:
    lab = Lab(6, host=6, policy=SWAP)
    lab.add("A", [1, 2, 3, 4], 6)
    lab.add("B", [5, 6, 7, 8], 6)
    while not lab.scheduler.swapped:
        lab.step()
    small = lab.add("C", [9], 1)
    while lab.scheduler.swapped:
        lab.step()
        assert small.status is Status.WAITING or not lab.scheduler.swapped
    assert lab.reasons("C")[0] == "behind a swapped request"
    lab.run()
    assert lab.finished.index("C") > lab.finished.index("A")


def test_sequences_of_a_request_step_together_or_not_at_all() -> None:
    lab = Lab(40, budget=4, rows=4)
    lab.add("A", [1, 2], 6, width=2)
    lab.add("B", [3, 4], 6, width=2)
    for _ in range(30):
        if not lab.scheduler.has_work:
            break
        plan = lab.step()
        for request in lab.requests.values():
            shares = [s for s in plan.sequences if s.request is request]
            assert len(shares) in (0, 1, 2)
            if len(request.sequences) == 2 and shares:
                assert len(shares) == 2 or not shares[0].num_pending
    lab.at_rest()


def test_a_group_waits_when_the_rest_of_the_budget_is_too_small_for_it() -> None:
    lab = Lab(40, budget=3, rows=4)
    lab.add("A", [1, 2], 6)
    group = lab.add("G", [3], 6, width=3)
    lab.step()  # 2 + 1
    plan = lab.step()
    assert names(plan) == ["A"]  # 2 of 3 are left, and three sequences step together
    while lab.requests["A"].status is not Status.FINISHED:
        assert "G" not in names(lab.step())
    assert len(lab.step().rows) == 3
    lab.run()
    assert len(group.finished_sequences) == 3


def test_a_group_that_only_waits_for_results_takes_no_budget() -> None:
    """All its steps are in flight: the requests after it are planned, however little budget is left."""
    lab = Lab(40, budget=3, rows=6)
    lab.add("A", [1], 6, beam=1)  # waits for its result in every other step
    lab.add("G", [3], 2, width=3)
    lab.add("B", [4], 6)
    lab.step()
    assert names(lab.plan()) == ["A"]
    assert names(lab.plan()) == ["G", "G", "G"]
    lab.land()
    assert names(lab.plan()) == ["A", "B"]
    lab.land()
    lab.run(depth=2)


def test_no_request_is_admitted_past_a_running_group_that_does_not_fit() -> None:
    """Each queue stops at the first request that does not fit, and so do the later queues."""
    lab = Lab(40, budget=3, rows=5)
    lab.add("A", [1, 2], 4)
    group = lab.add("G", [3], 3, width=3)
    lab.step()
    late = lab.add("W", [4], 1)
    assert names(lab.step()) == ["A"]
    assert late.status is Status.WAITING and lab.reasons("W") == ["budget"]
    lab.run()
    assert lab.finished.index("W") > lab.finished.index("A") and group.finished_sequences


def test_a_swapped_group_waits_for_a_budget_that_takes_it_whole() -> None:
    lab = Lab(20, host=20, budget=3, rows=4, policy=SWAP)
    a = lab.add("A", [1, 2], 5)
    group = lab.add("G", [3], 6, width=3)
    lab.step()
    lab.scheduler._preempt(group, group, 0, InFlightStep(plan := StepPlan()))
    lab.oracle.submit(plan)
    lab.plan()
    assert group.status is Status.SWAPPED
    assert lab.emitted(ev.Waiting)[-1] == ev.Waiting("G", "budget", 3, 2, 0)
    lab.land()
    while a.status is not Status.FINISHED:
        lab.step()
    assert lab.plan().swap_ins
    lab.run()


def test_swapped_requests_wait_for_rows() -> None:
    lab = Lab(20, host=20, rows=2, policy=SWAP)
    a = lab.add("A", [1, 2], 5)
    lab.step()
    lab.scheduler._preempt(a, a, 0, InFlightStep(plan := StepPlan()))
    lab.oracle.submit(plan)
    lab.scheduler.num_rows_taken += 2  # as if others ran
    lab.scheduler.schedule()
    assert lab.emitted(ev.Waiting)[-1] == ev.Waiting("A", "rows", 1, 0, 0)
    lab.scheduler.num_rows_taken -= 2
    lab.run()


def test_an_empty_plan_is_false_and_leaves_no_trace() -> None:
    lab = Lab(4)
    plan = lab.plan()
    assert not plan and plan.num_tokens == 0 and lab.scheduler.num_steps == 0 and not lab.emitted(ev.Step)
    lab.add("A", [1], 1)
    lab.plan()
    assert lab.scheduler.has_work and not lab.plan()  # its last token is in flight
    lab.run()
    assert lab.scheduler.num_steps == 1 and not lab.scheduler.has_work


# -- 5.2: giving way ---------------------------------------------------------------------------------------------------


def test_preemption_releases_blocks_and_rows_with_a_step_in_flight() -> None:
    lab = Lab(6, policy=RECOMPUTE)
    lab.add("A", [1, 2, 3, 4], 6)
    b = lab.add("B", [5, 6, 7, 8], 6)
    lab.plan()
    lab.plan()
    while b.status is Status.RUNNING:
        lab.land()
        lab.plan()
    assert lab.flight[0][0].sequences == [*lab.requests["A"].sequences, *b.sequences]
    assert not b.sequences[0].block_ids and b.sequences[0].row < 0
    assert lab.scheduler.num_rows_taken == 1
    lab.run(depth=2)


def test_a_preemption_event_has_its_numbers() -> None:
    lab = Lab(6, policy=RECOMPUTE)
    lab.add("A", [1, 2, 3, 4], 6)
    lab.add("B", [5, 6, 7, 8], 6)
    lab.run()
    assert lab.emitted(ev.Preempted) == [ev.Preempted("B", "recompute", "A", 1, 0, 0, "forced", 3, 6)]
    assert lab.reasons("B")[-1] == "blocks"
    assert lab.scheduler.num_preemptions == 1


def test_several_requests_are_preempted_until_there_is_room() -> None:
    """A group needs three blocks at once; each victim frees one."""
    lab = Lab(8, policy=RECOMPUTE)
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
    lab.run()


def test_a_group_swapped_during_recomputation_continues_after_swap_in() -> None:
    """Half recomputed, then swapped: it is first swapped in as a whole, then recomputed further."""
    lab = Lab(16, host=16, budget=4, caching=False)
    group = lab.add("G", [1, 2, 3, 4, 5], 5, width=3)
    for _ in range(3):
        lab.step()
    assert len(group.sequences[0].token_ids) == 7
    lab.scheduler.policy = RECOMPUTE
    lab.scheduler._preempt(group, group, 0, InFlightStep(StepPlan()))
    lab.step()
    lab.step()
    first, second, _ = group.sequences
    assert first.num_computed == len(first.token_ids) - 1 and not second.num_computed
    lab.scheduler.policy = SWAP
    lab.scheduler._preempt(group, group, 0, InFlightStep(plan := StepPlan()))
    lab.oracle.submit(plan)
    plan = lab.plan()
    assert plan.swap_ins and not plan.rows and group.status is Status.RUNNING
    lab.land()
    lab.run()


def test_a_group_finds_its_own_blocks_in_the_cache_when_it_is_recomputed() -> None:
    lab = Lab(16, policy=RECOMPUTE)
    group = lab.add("G", [1, 2, 3, 4, 5], 6, width=2)
    for _ in range(4):
        lab.step()
    lab.scheduler._preempt(group, group, 0, InFlightStep(StepPlan()))
    plan = lab.plan()
    assert plan.starts[0] >= 4
    assert group.num_cached_tokens == 0  # counted at its first admission alone
    lab.land()
    lab.run()


# -- 5.3: the door -----------------------------------------------------------------------------------------------------


def test_a_default_max_tokens_is_reduced_to_fit_and_a_number_never() -> None:
    lab = Lab(4)
    request = lab.add("default", [1, 2, 3], None)
    assert request.max_tokens == 6 == lab.cache.max_output_tokens(3)
    with pytest.raises(CapacityError, match=r"max_tokens 7, width 1.* pool has 4; max_tokens of at most 6 fits"):
        lab.add("explicit", [1, 2, 3], 7)
    lab.run()
    assert len(request.finished_sequences[0].token_ids) == 9


def test_a_prompt_that_never_fits_is_refused_with_the_numbers() -> None:
    lab = Lab(4)
    lab.add("just fits", list(range(8)), 1)
    for max_tokens in (None, 1):
        with pytest.raises(CapacityError, match=r"needs 5 blocks of 2 tokens .*9 prompt .*shorten the prompt or"):
            lab.add("does not", list(range(9)), max_tokens)
    lab.run()
    assert lab.finished == ["just fits"]


@pytest.mark.parametrize(("rows", "budget"), [(2, 9), (9, 2)])
def test_more_sequences_than_rows_or_budget_are_refused(rows: int, budget: int) -> None:
    lab = Lab(40, rows=rows, budget=budget)
    with pytest.raises(CapacityError, match="decodes 3 sequences together and at most 2 run"):
        lab.add("A", [1, 2], 3, width=3)
    assert not lab.scheduler.has_work and not lab.emitted(ev.Arrived)
    lab.add("B", [1, 2], 3, width=2)
    lab.run()


@pytest.mark.parametrize("caching", [True, False])
def test_an_accepted_request_never_stalls(caching: bool) -> None:
    """Every request that fits by the formula finishes when it runs alone; one more token is refused."""
    tried = 0
    for num_blocks, size, prompt, width in itertools.product((1, 2, 3, 5, 7), (1, 2, 3), range(1, 8), (1, 2, 3)):
        cache = KVCacheManager(num_blocks, size)
        most = cache.max_output_tokens(prompt, width)
        if most < 1 or most > 8:
            continue
        for watermark in (0, 2):
            lab = Lab(num_blocks, size, rows=3, budget=3, watermark=watermark, caching=caching, listen=False)
            lab.add("A", list(range(prompt)), most, width=width)
            with pytest.raises(CapacityError):
                lab.add("B", list(range(prompt)), most + 1, width=width)
            lab.run()
            tried += 1
    assert tried > 150


def test_a_request_id_is_used_once_at_a_time() -> None:
    lab = Lab(4)
    lab.add("A", [1], 1)
    with pytest.raises(AssertionError, match="A"):
        lab.add("A", [1], 1)
    lab.run()
    lab.add("A", [1], 1)
    lab.run()


# -- 5.4: reasons ------------------------------------------------------------------------------------------------------


def test_a_wait_reason_is_emitted_when_it_changes_not_once_per_step() -> None:
    lab = Lab(8)
    lab.add("A", [1, 2, 3, 4, 5, 6, 7], 6)
    lab.add("B", [9] * 9, 2)
    lab.run()
    assert lab.emitted(ev.Waiting) == [ev.Waiting("B", "blocks", 5, 4, 0)]


def test_a_running_request_has_no_wait_reason() -> None:
    lab = Lab(8, rows=1)
    lab.add("A", [1], 1)
    b = lab.add("B", [2], 2)
    lab.step()
    assert b.wait_reason == "rows"
    lab.plan()
    assert b.status is Status.RUNNING and b.wait_reason == ""
    lab.run()


def test_admission_needs_room_for_the_whole_prompt_not_only_its_first_chunk() -> None:
    lab = Lab(8, budget=4)
    lab.add("A", [1, 2, 3], 6)
    b = lab.add("B", list(range(10, 24)), 2)
    lab.step()
    lab.step()
    assert b.status is Status.WAITING and lab.reasons("B")[-1] == "blocks"
    lab.run()


def test_a_wait_for_blocks_has_its_numbers() -> None:
    lab = Lab(8)
    lab.add("gone", [1, 2, 3, 4, 5], 1)
    lab.run()
    assert (lab.pool.num_cached, lab.pool.num_free) == (2, 6)
    lab.add("A", [6] * 9, 4)
    lab.step()
    lab.add("B", [7] * 9, 4)
    lab.plan()
    assert lab.emitted(ev.Waiting)[-1] == ev.Waiting("B", "blocks", 5, 1, 2)
    lab.run()


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


def test_step_events_carry_the_increase_of_every_counter() -> None:
    lab = Lab(6, host=6, policy=SWAP)
    lab.add("A", [1, 2, 3, 4], 6)
    lab.add("B", [1, 2, 7], 3, width=2)
    lab.run()
    lab.add("C", [1, 2, 3, 4, 5, 6, 7, 8, 9], 2)
    lab.run()
    steps = lab.emitted(ev.Step)
    stats = lab.scheduler.stats()
    assert sum(s.hits for s in steps) == stats.num_hits > 0
    assert sum(s.misses for s in steps) == stats.num_misses > 0
    assert sum(s.copied for s in steps) == stats.num_copied > 0
    assert sum(s.swapped_out for s in steps) == stats.num_swapped_out > 0
    assert sum(s.swapped_in for s in steps) == stats.num_swapped_in > 0
    assert sum(s.evicted for s in steps) == stats.num_evicted > 0
    assert all(s.used + s.cached + s.free == 6 for s in steps)
    swapped = lab.emitted(ev.SwappedIn)
    assert [e.num_copied for e in swapped] == [stats.num_swapped_in]


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


# -- 5.5: overlap and windows ------------------------------------------------------------------------------------------


def test_a_decode_slice_has_no_host_tokens() -> None:
    lab = Lab(8)
    request = lab.add("A", [1, 2, 3], 5)
    assert lab.step().host_tokens
    assert lab.plan().host_tokens == {}
    assert lab.plan().host_tokens == {}  # the next one, with that in flight
    assert request.sequences[0].num_pending == 2
    lab.run(depth=2)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_window_ends_with_the_request(depth: int, window: int) -> None:
    lab = Lab(30, window=window)
    lab.add("A", [1, 2, 3], 12)
    sampled = []
    while lab.scheduler.has_work:
        plan = lab.plan() if len(lab.flight) < depth else None
        if plan:
            sampled += plan.num_sampled
        if lab.flight and (not plan or len(lab.flight) >= depth):
            lab.land()
    assert sampled[0] == 1  # an admitted request starts with one token
    assert sum(sampled) == 12 and max(sampled) <= window
    assert len(sampled) == 1 + -(-11 // window)
    lab.at_rest()


def test_a_window_counts_in_the_budget() -> None:
    lab = Lab(40, window=8, budget=10)
    lab.add("A", [1], 30)
    lab.add("B", [2], 30)
    lab.step()
    assert lab.plan().counts == [8, 2]
    lab.land()
    assert lab.plan().counts == [8, 2]
    lab.run()


def test_a_group_shares_the_budget_of_its_windows() -> None:
    lab = Lab(40, window=8, budget=9, rows=3)
    lab.add("G", [1], 20, width=3)
    lab.step()
    assert lab.plan().counts == [3, 3, 3]
    lab.run()


def test_the_decode_window_is_one_while_a_request_could_be_admitted() -> None:
    lab = Lab(40, window=4, budget=6)
    lab.add("A", [1, 2], 20)
    lab.step()
    assert lab.step().num_sampled == [4]
    lab.add("B", list(range(10, 22)), 2)
    assert lab.plan().counts == [1, 5]
    lab.run()


def test_the_decode_window_does_not_shrink_for_requests_that_wait_for_others_to_finish() -> None:
    for rows, reason in ((1, "rows"), (2, "blocks")):
        lab = Lab(14, window=4, rows=rows)  # B needs all 14 at its maximum length
        lab.add("A", [1, 2], 24)
        lab.step()
        lab.add("B", list(range(10, 36)), 3)
        assert lab.step().num_sampled == [1]
        assert lab.emitted(ev.Waiting)
        assert lab.requests["B"].wait_reason == reason
        assert lab.plan().num_sampled == [4]
        lab.run()


def test_the_decode_window_is_one_where_the_host_selects_tokens() -> None:
    lab = Lab(40, window=4)
    request = lab.add("A", [1, 2], 6, beam=2)
    while lab.scheduler.has_work:
        plan = lab.plan()
        assert set(plan.num_sampled) == {1}
        assert not lab.plan(), "nothing is planned while anything of it is pending"
        assert request.num_pending
        lab.land()
    lab.at_rest()


def test_samples_wait_for_their_fork_and_come_from_one_row_of_logits() -> None:
    lab = Lab(40, window=4)
    request = lab.add("A", [1, 2, 3], 9, width=3)
    plan = lab.plan()
    assert plan.num_samples == {0: 3} and plan.num_sampled == [1]
    assert [s.num_samples for s in plan.slices()] == [3]
    assert not lab.plan()
    lab.land()
    assert [s.index for s in request.sequences] == [0, 1, 2] and request.forked and not request.needs_result
    plan = lab.plan()
    assert plan.num_sampled == [4, 4, 4] and plan.num_samples == {} and len(plan.host_tokens) == 3
    lab.run(depth=2)


def test_a_prefill_chunk_samples_nothing() -> None:
    for options in ({"width": 2}, {"beam": 2}):
        lab = Lab(20, budget=2, rows=2)
        lab.add("A", [1, 2, 3], 3, **options)
        assert lab.step().num_samples == {}
        assert lab.step().num_samples == {0: 2}
        lab.run()


@pytest.mark.parametrize("width", [1, 2])
def test_structured_outputs_are_planned_like_others(width: int) -> None:
    """The next pass needs their tokens, which rows hold; only sampling waits for the host's bitmask."""
    lab = Lab(40, window=2)
    request = lab.add("A", [1, 2, 3], 6, width=width, use_structured_output=True)
    assert lab.step().bitmask_slices == [0]
    first, second = lab.plan(), lab.plan()
    every = list(range(width))
    assert first.num_sampled == second.num_sampled == [2] * width
    assert first.bitmask_slices == second.bitmask_slices == every
    assert first.num_bitmask_columns == 2
    assert list(first.host_tokens) == ([] if width == 1 else every) and not second.host_tokens
    assert request.num_pending == 4 * width
    lab.run(depth=2)


def test_every_beam_returns_candidates() -> None:
    lab = Lab(40)
    lab.add("A", [1, 2, 3], 4, beam=2)
    assert lab.step().num_samples == {0: 2}
    assert lab.step().num_samples == {0: 2, 1: 2}
    lab.run()
    assert make("b", [1], 1, width=3, select_beams=o.keep_best(3)).num_samples == 6  # twice its width by default


@pytest.mark.parametrize("stops", [True, False])
def test_a_result_is_cut_at_the_first_stop_token(stops: bool) -> None:
    """The device's own stop test only ends writes early; the host cuts the result."""
    output = answer([1, 2], 8)
    stop = output[3]
    lab = Lab(20, window=8, habits=o.Habits(stops=stops))
    request = lab.add("A", [1, 2], 8, stop_ids=[stop, 777])
    lab.step()
    assert lab.plan().num_sampled == [7]
    assert lab.land() == ["A"]
    (seq,) = request.finished_sequences
    assert seq.token_ids[2:].tolist() == output[: output.index(stop) + 1]
    assert (seq.finish_reason, seq.stop_token) == ("stop", stop)
    lab.at_rest()


def test_stop_ids_of_the_sampling_params_count_too() -> None:
    from octavo.core.request import Request
    from octavo.params.sampling_params import SamplingParams

    request = Request("A", [1], SamplingParams(max_tokens=3, stop_token_ids=[4]), stop_ids=[5])
    assert request.stop_ids == {4, 5} and request.max_tokens == 3
    assert Request("B", [1], SamplingParams(max_tokens=3, n=2), max_tokens=9).max_tokens == 9


def test_a_decode_window_streams_its_columns_as_they_arrive() -> None:
    lab = Lab(20, window=6, habits=o.Habits(splits=True))
    request = lab.add("A", [1, 2], 7)
    lab.step()
    plan = lab.plan()
    (seq,) = request.sequences
    known = []
    for _ in range(3):
        lab.part()
        known.append((len(seq.token_ids), seq.num_pending, len(seq.seal_ids)))
    assert known == [(4, 5, 2), (5, 4, 2), (6, 3, 3)]  # arrived tokens are sealed: the device is past them
    assert plan.num_outstanding == [3] and plan.num_sampled == [6]
    assert lab.land() == ["A"]
    lab.at_rest()


def test_a_stop_token_in_a_partial_result_finishes_the_request() -> None:
    prompt = next([3, i] for i in range(50) if answer([3, i], 3)[2] not in answer([3, i], 2))
    output = answer(prompt, 3)
    stop = output[2]
    lab = Lab(20, window=6, habits=o.Habits(splits=True, stops=False))
    request = lab.add("A", prompt, 7, stop_ids=[stop])
    lab.step()
    lab.plan()
    assert lab.part() == []
    assert lab.part() == ["A"]
    assert lab.part() == []
    assert lab.land() == []
    assert request.finished_sequences[0].token_ids[2:].tolist() == output[:3]
    lab.at_rest()


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


def test_results_arrive_in_the_order_of_the_plans() -> None:
    lab = Lab(20)
    lab.add("A", [1, 2, 3], 8)
    lab.plan()
    second = lab.plan().in_flight
    with pytest.raises(AssertionError, match="in the order"):
        lab.scheduler.update(second, StepResult([[1]]))
    with pytest.raises(AssertionError):
        Scheduler(KVCacheManager(2, 2)).update(second, StepResult([[1]]))


def test_a_beam_search_that_keeps_nothing_finishes() -> None:
    lab = Lab(20)
    request = lab.add("A", [1, 2, 3], 5, width=2, num_samples=2, select_beams=lambda parents: parents[:0])
    lab.plan()
    assert lab.land() == ["A"]
    assert request.status is Status.FINISHED and request.finished_sequences == [] and lab.pool.num_used == 0
    assert lab.emitted(ev.Finished) == [ev.Finished("A", "stop", 1)]  # the last token, which has no continuation


# -- aborts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("status", list(Status))
@pytest.mark.parametrize("options", [{}, {"width": 2}, {"beam": 2}])
def test_abort_in_every_state(status: Status, depth: int, options: dict) -> None:
    """Waiting, running, swapped or finished, with 0 to 2 steps in flight: nothing leaks, and the other request is
    unaffected."""
    lab = Lab(16, host=16, rows=4, policy=SWAP, window=2)
    lab.add("other", [1, 2, 3, 4], 12)
    victim = lab.add("victim", [5, 6, 7], 5, **options)
    lab.step()
    for _ in range(depth):
        lab.plan()
    if status is Status.SWAPPED:
        lab.scheduler._preempt(victim, victim, 0, InFlightStep(plan := StepPlan()))
        lab.oracle.submit(plan)
    elif status is Status.WAITING:
        lab.scheduler.policy = RECOMPUTE
        lab.scheduler._preempt(victim, victim, 0, InFlightStep(StepPlan()))
    elif status is Status.FINISHED:
        while victim.status is not Status.FINISHED:
            lab.land() if lab.flight else lab.plan()
    assert victim.status is status
    ended = len(lab.emitted(ev.Finished))
    lab.abort("victim")
    lab.abort("victim")
    assert victim.status is Status.FINISHED and not victim.sequences
    assert len(lab.emitted(ev.Finished)) == (ended if status is Status.FINISHED else ended + 1)
    if status is not Status.FINISHED:
        assert {s.finish_reason for s in victim.finished_sequences} <= {"abort", "stop", "length"}
    lab.run(depth=max(1, depth))
    assert "other" in lab.finished


def test_abort_returns_the_request() -> None:
    lab = Lab(8)
    request = lab.add("A", [1, 2], 4)
    lab.step()
    assert lab.scheduler.abort("unknown") is None
    assert lab.scheduler.abort("A", "disconnected") is request
    assert lab.emitted(ev.Finished) == [ev.Finished("A", "disconnected", 1)]
    assert request.finished_sequences[0].finish_reason == "disconnected"


# -- faults ------------------------------------------------------------------------------------------------------------


def test_an_error_fails_only_its_request() -> None:
    lab = Lab(20)
    a, b = lab.add("A", [1, 2, 3, 4, 5], 4), lab.add("B", [5, 6, 7, 8, 9], 4)
    lab.plan()
    assert lab.err(a) == ["A"]
    assert a.error == "NaN" and a.finished_sequences[0].finish_reason == "error" and not b.error
    assert len(b.sequences[0].token_ids) == 6
    lab.run()
    again = lab.add("A again", [1, 2, 3, 4, 5], 1)
    lab.run()
    assert again.num_cached_tokens == 0  # its blocks are invalid


def test_an_error_after_the_end_is_ignored() -> None:
    lab = Lab(20)
    a = lab.add("A", [1, 2, 3], 9)
    lab.plan()
    lab.plan()
    assert lab.err(a) == ["A"]
    assert lab.err(a) == []
    lab.at_rest()


def test_an_error_ends_all_samples_of_its_request() -> None:
    lab = Lab(20, host=20, policy=SWAP)
    group, other = lab.add("G", [1, 2, 3], 9, width=3), lab.add("B", [1, 2, 9], 4)
    lab.step()
    lab.plan()
    assert lab.err(group) == ["G"]
    assert len(group.finished_sequences) == 3 and {s.finish_reason for s in group.finished_sequences} == {"error"}
    lab.run()
    assert other.finished_sequences


@pytest.mark.parametrize("policy", [SWAP, RECOMPUTE])
def test_an_error_of_a_preempted_request(policy: Policy) -> None:
    lab = Lab(6, host=6, policy=policy)
    lab.add("A", [1, 2, 3, 4], 6)
    b = lab.add("B", [5, 6, 7, 8], 6)
    while b.status is not (Status.SWAPPED if policy is SWAP else Status.WAITING) or not b.num_pending:
        if len(lab.flight) == 2:
            lab.land()
        lab.plan()
    assert lab.pool.num_cached > 0
    assert lab.err(b) == ["B"]
    assert lab.pool.num_cached == 0
    again = lab.add("B again", [5, 6, 7, 8], 1)
    lab.run(depth=2)
    assert again.num_cached_tokens == 0  # its cached blocks are invalid too


@pytest.mark.parametrize("num_tokens", [4, 5, 8])
@pytest.mark.parametrize("skips", [False, True])
def test_an_error_of_a_preempted_request_leaves_no_block_in_the_index(num_tokens: int, skips: bool) -> None:
    """That includes the last block of a prompt that fills it, though the request's own lookup would not return it."""
    lab = Lab(8, 4, policy=RECOMPUTE)
    params = SamplingParams(max_tokens=None, skip_reading_prefix_cache=skips)
    a = lab.add("A", [1, 2, 3, 4, 0, 1, 2, 3][:num_tokens], 4, sampling_params=params)
    plan = lab.plan()
    lab.scheduler._preempt(a, a, 0, InFlightStep(plan))
    assert lab.pool.num_indexed == num_tokens // 4
    assert lab.err(a) == ["A"]
    assert lab.pool.num_indexed == 0


def test_an_error_leaves_no_dropped_block_in_the_index() -> None:
    lab = Lab(12, attention_window=4)
    a = lab.add("A", [1, 2, 3, 4, 0], 20)
    while a.sequences[0].num_dropped < 3:
        lab.step()
    assert lab.pool.num_cached >= 3
    lab.plan()
    assert lab.err(a) == ["A"]
    assert lab.pool.num_indexed == 0


def test_a_failed_step_removes_its_seals() -> None:
    lab = Lab(20)
    lab.add("A", [1, 2, 3, 4, 5], 4)
    lab.plan()
    assert lab.pool.num_sealed == 2
    assert lab.fail() == ["A"]
    assert lab.pool.num_available == lab.pool.num_free == 20 and lab.pool.num_indexed == 0
    assert lab.emitted(ev.Recomputed) == [ev.Recomputed("A", 0)]
    (seq,) = lab.requests["A"].sequences
    assert (seq.num_pending, seq.num_computed, seq.seal_ids, seq.row) == (0, 0, [], -1)
    assert lab.plan().counts == [5]
    lab.run()


def test_steps_are_smaller_after_an_out_of_memory_step() -> None:
    """Requests that do not fit wait; the first one continues, alone if it must."""
    lab = Lab(60, budget=32, window=4)
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
    lab.run(depth=2)


def test_a_group_beyond_the_limit_runs_in_a_step_of_its_own() -> None:
    lab = Lab(60, budget=32)
    lab.add("A", [4, 5], 9)
    group = lab.add("G", [1, 2, 3], 6, width=3)
    lab.step()
    lab.plan()
    lab.fail(limit=2)
    alone = 0
    while group.status is not Status.FINISHED:
        plan = lab.plan()
        if any(s.request is group for s in plan.sequences) and len(group.sequences) == 3 and len(plan.rows) == 3:
            alone += 1
            assert {s.request for s in plan.sequences} == {group}
        lab.land()
    assert alone and lab.requests["A"].status is Status.FINISHED  # it arrived first
    lab.run()


def test_a_failed_step_keeps_earlier_seals() -> None:
    lab = Lab(20)
    a = lab.add("A", [1, 2, 3, 4, 5], 4)
    lab.step()
    lab.add("B", [6, 7, 8], 4)
    lab.plan()
    assert sorted(lab.fail()) == ["A", "B"]
    plan = lab.plan()
    found = slice_of(plan, a)
    assert found is not None and found.start == 4  # computed by a completed step
    lab.run()


def test_a_failed_step_fails_all_steps_after_it() -> None:
    lab = Lab(20)
    a = lab.add("A", [1, 2, 3], 9)
    lab.plan()
    lab.plan()
    lab.add("B", [4, 5, 6], 3)
    lab.plan()
    assert a.num_pending == 3
    assert sorted(lab.fail()) == ["A", "B"]
    assert a.num_pending == 0 and not lab.scheduler.in_flight
    assert {r.status for r in lab.requests.values()} == {Status.WAITING}
    lab.run(depth=2)


def test_tokens_of_a_failed_decode_window_that_arrived_are_kept() -> None:
    lab = Lab(20, window=6, habits=o.Habits(splits=True))
    request = lab.add("A", [1, 2], 8)
    lab.step()
    lab.plan()
    lab.part()
    lab.part()
    lab.fail()
    (seq,) = request.sequences
    assert (len(seq.token_ids), seq.num_pending) == (5, 0)
    lab.run()


def test_requests_outside_a_failed_step_are_unaffected() -> None:
    lab = Lab(20, budget=3)
    a = lab.add("A", [1, 2, 3], 3)
    lab.step()
    w = lab.add("W", [4, 5], 3, beam=1)
    lab.plan()
    lab.plan()
    lab.abort("A")
    assert lab.fail() == ["W"]
    assert a.status is Status.FINISHED and w.status is Status.WAITING
    lab.run()


def test_a_swap_of_a_failed_step_is_recomputed() -> None:
    """Its copy arrived on neither side."""
    for back in (False, True):
        lab = Lab(6, host=6, policy=SWAP)
        lab.add("A", [1, 2, 3, 4], 6)
        b = lab.add("B", [5, 6, 7, 8], 6)
        for _ in range(3):
            lab.step()
        if not back:
            assert lab.plan().swap_outs
        else:
            lab.step()
            lab.abort("A")
            assert lab.plan().swap_ins
        lab.fail()
        assert b.status is Status.WAITING and not b.shared_on_device
        assert lab.cache.swap_space.num_used == 0
        assert "B" in [e.request_id for e in lab.emitted(ev.Recomputed)]
        lab.run()


def test_a_failed_step_of_a_request_that_was_swapped_since() -> None:
    """B was swapped out with a result in flight, and that step fails: the content on the host is invalid."""
    lab = Lab(6, host=6, policy=SWAP)
    lab.add("A", [1, 2, 3, 4], 6)
    b = lab.add("B", [5, 6, 7, 8], 6)
    for _ in range(3):
        lab.plan()
        if len(lab.flight) > 1:
            lab.land()
    lab.plan()
    assert b.status is Status.SWAPPED and b.num_pending
    lab.land()
    lab.fail()
    assert lab.cache.swap_space.num_used == 0 and b.status is Status.WAITING
    lab.run(depth=2)


def test_a_failed_step_of_a_request_that_was_preempted_since() -> None:
    """B released its blocks with a result in flight, and that step fails: it keeps its place in the queue."""
    lab = Lab(6, policy=RECOMPUTE)
    lab.add("A", [1, 2, 3, 4], 6)
    b = lab.add("B", [5, 6, 7, 8], 6)
    lab.add("C", [1, 3], 2)
    while b.status is not Status.WAITING or not b.num_pending:
        lab.plan()
        if len(lab.flight) > 2:
            lab.land()
    assert set(lab.fail()) == {"A", "B"} and not b.num_pending
    assert [r.request_id for r in lab.scheduler.waiting] == ["A", "B", "C"]
    lab.run(depth=2)


def test_a_request_that_finished_in_a_failed_step_stays_finished() -> None:
    lab = Lab(6, host=6, policy=SWAP)
    lab.add("A", [1, 2, 3, 4], 6)
    b = lab.add("B", [5, 6, 7, 8], 6)
    for _ in range(3):
        lab.step()
    lab.plan()
    lab.abort("B")
    assert lab.fail() == ["A"]
    assert b.status is Status.FINISHED
    lab.run()


def test_a_completed_plan_cannot_fail() -> None:
    lab = Lab(6)
    lab.add("A", [1, 2], 3)
    plan = lab.step()
    with pytest.raises(AssertionError):
        lab.scheduler.fail(plan)


def test_a_prefix_of_a_failed_step_is_recomputed() -> None:
    """A group resumes, finds all but its last tokens in blocks that the step in flight fills, and gets no slice for
    lack of budget. Then that step fails: the group holds invalid blocks, though no failed plan has a slice of it."""
    lab = Lab(20, budget=2, rows=4, policy=Policy(by_priority=True, mode=PreemptionMode.RECOMPUTE))
    group = lab.add("G", [1, 2, 3, 4], 3, width=2)
    lab.step()
    lab.step()
    lab.scheduler._preempt(group, group, 0, InFlightStep(StepPlan()))
    lab.cache.reset_prefix_cache()
    lab.add("X", [1, 2, 3, 4], 6, priority=-1)
    lab.plan()
    lab.plan()
    lab.land()
    plan = lab.plan()
    assert names(plan) == ["X"] and group.status is Status.RUNNING
    assert [s.num_computed for s in group.sequences] == [4, 4]
    assert lab.fail() == ["X", "G"]
    lab.run(depth=2)


# -- 5.6: plans --------------------------------------------------------------------------------------------------------


def test_plans_are_parallel_lists() -> None:
    lab = Lab(30, budget=12)
    lab.add("A", [1, 2, 3], 4)
    lab.add("B", [4, 5, 6], 4, width=2)
    lab.add("C", list(range(20)), 4)
    while lab.scheduler.has_work:
        plan = lab.step()
        sizes = {len(x) for x in (plan.rows, plan.starts, plan.counts, plan.num_sampled, plan.sequences)}
        assert len(sizes) == 1
        assert all(i < len(plan.rows) for i in (*plan.host_tokens, *plan.num_samples))
        assert len(set(plan.rows)) == len(plan.rows)
    lab.at_rest()


def test_a_decode_step_writes_no_table_unless_a_block_is_new() -> None:
    lab = Lab(30, block_size=4)
    lab.add("A", [1, 2, 3], 9)
    writes = []
    while lab.scheduler.has_work:
        writes.append([tuple(w) for w in lab.step().table_writes])
    assert writes == [[(0, 0, (1,))], [], [(0, 1, (2,))], [], [], [], [(0, 2, (3,))], [], []]


def test_step_numbers_and_seal_marks() -> None:
    lab = Lab(30)
    lab.add("A", [1, 2, 3, 4], 4)
    lab.add("B", [5, 6, 7, 8], 4)
    first, second = lab.plan(), lab.plan()
    assert (first.step, second.step) == (0, 1)
    assert (first.seal_mark, second.seal_mark) == (0, 4)
    lab.run(depth=2)


# -- some alone --------------------------------------------------------------------------------------------------------


def test_confined_requests_are_planned_alone() -> None:
    """The others release their blocks, later ones wait, and all continue when no request is confined."""
    lab = Lab(20)
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
    lab.run()


def test_a_confined_request_is_admitted_past_others() -> None:
    """The others arrived first and held all rows and blocks."""
    lab = Lab(6, rows=2)
    lab.add("A", [1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    lab.add("B", [2, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    c = lab.add("C", [3, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    lab.step()
    assert c.status is Status.WAITING
    lab.scheduler.confine([c])
    assert lab.plan().sequences == [c.sequences[0]]
    lab.land()
    lab.scheduler.confine([])
    lab.run()


def test_swapped_requests_release_their_host_blocks_for_a_confined_one() -> None:
    lab = Lab(6, host=6, policy=SWAP)
    a, b = lab.add("A", [1, 2, 3, 4], 6), lab.add("B", [5, 6, 7, 8], 6)
    while b.status is not Status.SWAPPED:
        lab.step()
    lab.scheduler.confine([a])
    assert b.status is Status.WAITING and not lab.cache.swap_space.num_used
    assert lab.step().sequences == [a.sequences[0]]
    lab.scheduler.confine([])
    lab.run()


def test_all_requests_continue_when_the_last_confined_one_finishes() -> None:
    lab = Lab(20)
    a = lab.add("A", [1, 2, 3], 2)
    lab.add("B", [4, 5, 6], 4)
    c = lab.add("C", [4, 5, 7], 4)
    lab.scheduler.confine([a, c])
    lab.abort("C")
    lab.step()
    assert lab.scheduler.confined_to == {a}
    lab.step()
    assert a.status is Status.FINISHED and not lab.scheduler.confined_to
    lab.run()


def test_confined_requests_decode_in_windows_though_others_wait() -> None:
    """The waiting ones cannot be admitted before the confined ones have finished."""
    lab = Lab(20, window=3)
    a = lab.add("A", [1, 2, 3], 9)
    lab.step()
    lab.scheduler.confine([a])
    lab.add("B", [4, 5, 6], 4)
    assert lab.step().counts == [3]
    lab.scheduler.confine([])
    lab.run()


def test_confined_requests_of_several_tenants_share_no_step() -> None:
    """They are admitted by order, regardless of what the others were served."""
    lab = Lab(40, budget=4)
    a = lab.add("A", [1, 2, 3, 4, 5, 6, 7, 8], 2, tenant=1)
    lab.add("B", [2, 2, 3, 4], 2, tenant=2)
    c = lab.add("C", [3, 2, 3, 4], 2, tenant=2)
    lab.scheduler.confine([a, c])
    served = {number: tenant.served for number, tenant in lab.scheduler.tenants.present.items()}
    assert lab.step().sequences == [a.sequences[0]] and lab.step().sequences == [a.sequences[0]]
    assert served == {number: tenant.served for number, tenant in lab.scheduler.tenants.present.items()}
    lab.scheduler.confine([])
    lab.run()


def test_a_corrupt_block_of_a_request_that_waits_for_the_confined() -> None:
    """The corruption is reported after its request released everything: none of its results count, and the confined
    ones continue."""
    lab = Lab(20, host=20, policy=SWAP)
    a, b = lab.add("A", [1, 2, 3, 4, 5], 9), lab.add("B", [7, 8], 9)
    lab.step()
    lab.scheduler._preempt(a, a, 0, InFlightStep(plan := StepPlan(lab.scheduler.num_steps)))
    lab.oracle._run(plan)
    lab.oracle.corrupt_block(a.sequences[0].block_ids[0], 0)
    known = len(a.sequences[0].token_ids)
    assert lab.plan().swap_ins
    lab.scheduler.confine([b])
    lab.land()
    assert lab.cache.num_corrupt == 1 and lab.scheduler.waiting == [a] and lab.scheduler.running == [b]
    assert len(a.sequences[0].token_ids) == known and not a.num_pending
    lab.scheduler.confine([])
    lab.run()
