"""Rules of docs/memory.md that the scheduler keeps, each in the smallest world that goes wrong without it.

Every world runs over the oracle, so that a rule broken in another way than the assertions expect still shows.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from typing import Any

import pytest

from octavo.core import events as ev
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import Slice, StepPlan, StepResult
from octavo.core.policy import Policy, PreemptionMode
from octavo.core.request import Status
from octavo.errors import CapacityError
from octavo.params.sampling_params import SamplingParams
from tests.core.lab import RECOMPUTE, SWAP, Lab, Planned, Worlds, answer, slice_of, state_of
from tests.proof import oracle as o
from tests.proof.workloads import World

LAZY = o.Habits(eager=False)


def crowded(world: Worlds, policy: Policy, *, steps: int = 3, late: int = 0, **options: int) -> Lab:
    """A and B fill a pool of 6 blocks in three steps; in the fourth A needs one more, and B, the later, gives way.

    `late` of those steps are still in flight when this returns.
    """
    lab = world(6, host=6, policy=policy, **options)
    lab.add("A", [1, 2, 3, 4], 6)
    lab.add("B", [5, 6, 7, 8], 6)
    for _ in range(steps):
        lab.plan()
        if len(lab.flight) > late:
            lab.land()
    return lab


def names(plan: Planned) -> list[str]:
    return [s.request.request_id for s in plan.sequences]


# -- Memory 2: sealing and the index -----------------------------------------------------------------------------------


def test_blocks_filled_by_decoding_are_sealed_too() -> None:
    lab = Lab(16)
    first = lab.add("turn 1", [1, 2, 3], 6)
    lab.run()
    output = first.finished_sequences[0].token_ids.tolist()
    again = lab.add("turn 2", [*output, 0, 0], 1)
    lab.run()
    assert again.num_cached_tokens == 8 // 2 * 2 == (len(output) - 1) // 2 * 2


# -- Memory 3: lookup --------------------------------------------------------------------------------------------------


def test_a_plan_finds_no_blocks_that_it_computes(world: Worlds) -> None:
    """Slices run in any order, so a slice must not read what another one of its plan computes."""
    lab = world(8, habits=o.Habits(shuffles=True))
    first, second = lab.add("first", [1, 2, 3, 4], 2), lab.add("second", [1, 2, 3, 4, 0], 2)
    plan = lab.plan()
    assert plan.sequences == first.sequences
    assert lab.reasons("second") == ["prefix in flight"]
    plan = lab.plan()  # found from the next plan on, though the first has no result yet
    assert slice_of(plan, second) is not None and second.num_cached_tokens == 4
    assert second.sequences[0].block_ids[:2] == first.sequences[0].block_ids[:2]


def test_a_system_prompt_shared_by_eight_is_computed_once(world: Worlds) -> None:
    lab = world(40)
    system = [7, 7, 6, 6, 5, 5]
    requests = [lab.add(f"r{i}", [*system, i], 2) for i in range(8)]
    plan = lab.step()
    assert plan.counts == [7]
    assert lab.reasons("r1") == ["prefix in flight"]
    plan = lab.step()
    assert [s.num_positions for s in plan.slices()] == [1] * 8
    assert [r.num_cached_tokens for r in requests] == [0] + [6] * 7


def test_a_long_prefix_in_flight_is_waited_for_chunk_by_chunk(world: Worlds) -> None:
    """The second of two equal prompts waits for the whole prefix instead of computing the rest in parallel."""
    lab = world(20, budget=5)
    prompt = list(range(10, 22))
    lab.add("first", prompt, 1)
    second = lab.add("second", [*prompt, 1], 1)
    lab.plan()
    while not second.sequences[0].num_computed:
        assert lab.plan()
    assert second.num_cached_tokens == 12


def test_prefix_in_flight_compares_tokens_and_salt(world: Worlds) -> None:
    lab = world(16)
    lab.add("first", [1, 2, 3, 4], 1)
    lab.add("other tokens", [1, 3, 3, 4], 1)
    lab.add("other tenant", [1, 2, 3, 4], 1, salt=b"x")
    lab.add("too short to share", [1, 2], 1)
    assert len(lab.plan().rows) == 4


@pytest.mark.parametrize("asks", [{"prompt_logprobs": 0}, {"skip_reading_prefix_cache": True}])
def test_skip_reading_prefix_cache_computes_the_whole_prompt(world: Worlds, asks: dict[str, Any]) -> None:
    """It does not wait for an equal prompt in flight either."""
    lab = world(40, 2)
    lab.add("before", [1, 2, 3, 4, 5, 6, 7], 2)
    lab.run()
    lab.add("a", [1, 2, 3, 4, 5, 6, 7], 2, sampling_params=SamplingParams(max_tokens=None, **asks))
    lab.add("b", [9, 9, 9, 9], 2)
    lab.add("c", [9, 9, 9, 9], 2, sampling_params=SamplingParams(max_tokens=None, **asks))
    plan = lab.plan()
    assert [(s.start, s.num_positions) for s in plan.slices()] == [(0, 7), (0, 4), (0, 4)]


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


# -- Memory 5: admission -----------------------------------------------------------------------------------------------


def test_a_waiting_request_changes_no_state(world: Worlds) -> None:
    lab = world(5)
    a, b = lab.add("A", [1, 2, 3, 4, 5, 6, 7], 1), lab.add("B", [1, 2, 9, 9, 9, 9], 3)
    lab.plan()
    before = state_of(lab.cache, *a.sequences, *b.sequences)
    assert not lab.plan() and lab.reasons("B") == ["prefix in flight", "blocks"]
    assert state_of(lab.cache, *a.sequences, *b.sequences) == before


def test_a_requests_lookup_is_counted_once(world: Worlds) -> None:
    """Only the first admission counts, not the one after a preemption."""
    lab = crowded(world, RECOMPUTE)
    lab.run()
    stats = lab.cache.stats()
    assert lab.scheduler.num_preemptions == 1
    assert (stats.num_hits, stats.num_misses, stats.num_queried_tokens) == (0, 4, 8)


def test_no_watermark_without_running_requests(world: Worlds) -> None:
    """A request as large as the pool would wait for ever."""
    lab = world(4, watermark=2)
    lab.add("A", [1, 2, 3, 4, 5, 6], 3)
    lab.run()
    lab = world(4, watermark=2, host=4, policy=SWAP)
    request = lab.add("A", [1, 2, 3, 4, 5, 6], 3)
    lab.step()
    lab.preempt(request)
    assert request.status is Status.SWAPPED


def test_the_watermark_is_left_for_running_requests(world: Worlds) -> None:
    for watermark, comes in ((3, True), (4, False)):
        lab = world(8, watermark=watermark)
        lab.add("A", [1, 2, 3, 4], 4)
        b = lab.add("B", [5, 6, 7, 8, 9], 2)
        lab.plan()
        assert (b.status is Status.RUNNING) == comes
        if not comes:  # 6 are free, 4 of them reserved by the watermark
            assert lab.emitted(ev.Waiting) == [ev.Waiting("B", "blocks", 3, 2, 0)]


def test_the_watermark_applies_to_swap_in_too() -> None:
    for watermark, comes in ((1, True), (2, False)):
        lab = Lab(8, host=8, watermark=watermark, policy=SWAP)
        lab.add("A", [1, 2, 3, 4], 8)
        b = lab.add("B", [5, 6], 2)
        lab.step()
        lab.preempt(b)
        lab.scheduler.schedule()  # of 5 free blocks B needs 2, and 2 more as headroom
        assert (b.status is Status.RUNNING) == comes


# -- Memory 7: forks and copies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "status"), [(SWAP, Status.SWAPPED), (RECOMPUTE, Status.WAITING)])
def test_a_fork_happens_in_the_tier_where_the_request_is(world: Worlds, policy: Policy, status: Status) -> None:
    """A beam's step returns after its group was swapped out: references to unrelated device blocks must not change."""
    lab = world(5, host=5, policy=policy)
    lab.add("A", [1, 2, 3, 4], 4)
    beam = lab.add("beam", [5, 6, 7], 3, beam=2)
    lab.plan()
    lab.plan()
    assert beam.status is Status.RUNNING and beam.num_pending == 1
    while beam.status is Status.RUNNING:
        assert lab.plan()
    assert beam.status is status and beam.num_pending == 1
    device = lab.pool.refs[:]
    lab.land()
    assert len(beam.sequences) == 2
    assert lab.pool.refs == device
    if status is Status.SWAPPED:
        host = lab.cache.swap_space
        assert [host.refs[b] for b in beam.sequences[0].block_ids] == [2, 2]


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


# -- Memory 9: swapping ------------------------------------------------------------------------------------------------


def test_a_swapped_request_that_lost_a_block_reports_a_new_wait_reason(world: Worlds) -> None:
    """It waited for blocks to be swapped in, and now waits for blocks to be recomputed."""
    lab = world(9, host=9, policy=SWAP)
    lab.add("A", [1, 2, 3, 4], 6)
    lab.add("C", [7, 8], 9)
    lab.step()
    b = lab.add("B", [1, 2, 5, 6], 6)
    while not (b.status is Status.SWAPPED and b.wait_reason == "blocks"):
        lab.step()
    output = len(lab.reasons("B"))
    lab.abort("A")
    lab.cache.reset_prefix_cache()
    lab.plan()
    assert lab.emitted(ev.SwapLost) == [ev.SwapLost("B")] and b.status is Status.WAITING
    assert not b.shared_on_device and lab.cache.swap_space.num_used == 0
    assert lab.reasons("B")[output:] == ["blocks"]


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


# -- Memory 13: non-finite numbers -------------------------------------------------------------------------------------


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


def test_an_error_after_the_end_is_ignored(world: Worlds) -> None:
    lab = world(20)
    a = lab.add("A", [1, 2, 3], 9)
    lab.plan()
    lab.plan()
    assert lab.err(a) == ["A"]
    assert lab.err(a) == []


def test_an_error_ends_all_samples_of_its_request() -> None:
    lab = Lab(20, host=20, policy=SWAP)
    group, other = lab.add("G", [1, 2, 3], 9, width=3), lab.add("B", [1, 2, 9], 4)
    lab.step()
    lab.plan()
    assert lab.err(group) == ["G"]
    assert len(group.finished_sequences) == 3 and {s.finish_reason for s in group.finished_sequences} == {"error"}
    lab.run()
    assert other.finished_sequences


@pytest.mark.parametrize("num_tokens", [4, 5, 8])
@pytest.mark.parametrize("skips", [False, True])
def test_an_error_of_a_preempted_request_leaves_no_block_in_the_index(num_tokens: int, skips: bool) -> None:
    """That includes the last block of a prompt that fills it, though the request's own lookup would not return it."""
    lab = Lab(8, 4, policy=RECOMPUTE)
    params = SamplingParams(max_tokens=None, skip_reading_prefix_cache=skips)
    a = lab.add("A", [1, 2, 3, 4, 0, 1, 2, 3][:num_tokens], 4, sampling_params=params)
    lab.plan()
    lab.preempt(a)
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


@pytest.mark.parametrize(("by_priority", "order"), [(False, "ABCD"), (True, "CBDA")])
def test_requests_run_in_order_of_arrival_or_by_priority(by_priority: bool, order: str) -> None:
    """The lower number goes first, then the earlier request."""
    lab = Lab(40, rows=1, policy=Policy(by_priority=by_priority))
    for name, priority in (("A", 1), ("B", 0), ("C", -1), ("D", 0)):
        lab.add(name, [1, 2], 1, priority=priority)
    lab.run()
    assert lab.finished == list(order)


def test_swapped_requests_resume_before_new_ones_are_admitted(world: Worlds) -> None:
    lab = crowded(world, SWAP)
    small = lab.add("C", [9], 1)
    lab.step()
    while lab.scheduler.swapped:
        assert small.status is Status.WAITING
        lab.step()
    assert lab.reasons("C")[0] == "behind a swapped request"
    lab.run()
    assert lab.finished.index("C") > lab.finished.index("A")


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


def test_no_request_is_admitted_past_a_running_group_that_does_not_fit() -> None:
    """Sequences of a request step together. Each queue stops at the first request that does not fit, and so do the
    later queues."""
    lab = Lab(40, budget=3, rows=5)
    lab.add("A", [1, 2], 4)
    lab.add("G", [3], 3, width=3)
    lab.step()
    late = lab.add("W", [4], 1)
    assert names(lab.step()) == ["A"]  # 2 of 3 are left
    assert late.status is Status.WAITING and lab.reasons("W") == ["budget"]
    while lab.requests["A"].status is not Status.FINISHED:
        assert names(lab.step()) == ["A"]
    assert names(lab.step()) == ["G"] * 3
    lab.run()
    assert lab.finished == ["A", "G", "W"]


def test_a_swapped_group_waits_for_a_budget_that_takes_it_whole(world: Worlds) -> None:
    lab = world(20, host=20, budget=3, rows=4, policy=SWAP)
    a, group = lab.add("A", [1, 2], 5), lab.add("G", [3], 6, width=3)
    lab.step()
    lab.preempt(group)
    lab.step()
    assert lab.emitted(ev.Waiting)[-1] == ev.Waiting("G", "budget", 3, 2, 0)
    while a.status is not Status.FINISHED:
        assert not lab.step().swap_ins
    assert lab.plan().swap_ins


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


@pytest.mark.parametrize("policy", [RECOMPUTE, SWAP])
def test_a_preempted_request_resumes_only_without_pending_tokens(world: Worlds, policy: Policy) -> None:
    """Otherwise its last token is unknown: it would continue without it and sample that position twice."""
    lab = crowded(world, policy, late=1)
    lab.plan()
    lab.abort("A")
    plan = lab.plan()
    assert lab.requests["B"].sequences[0] not in plan.sequences
    assert lab.reasons("B")[-1] == "in flight"
    lab.land()
    assert slice_of(lab.plan(), lab.requests["B"]) is not None


def test_a_group_is_recomputed_one_sequence_at_a_time_from_its_sibling(world: Worlds) -> None:
    """A pool of 10 and three samples over a prompt of 6 blocks: 6 + 3 fit where they forked, 3 x 7 never fit."""
    lab = world(10, block_size=2, policy=RECOMPUTE, caching=False)
    prompt = list(range(10, 22))
    group = lab.add("G", prompt, 3, width=3)
    lab.step()
    lab.step()
    assert lab.pool.num_used == 9
    lab.preempt(group)
    assert lab.pool.num_used == 0
    counts = []
    for _ in range(3):
        plan = lab.step()
        counts.append(plan.counts)
    assert counts[0] == [13] and counts[1] == [1] and counts[2] == [1]  # all but the last token of each
    assert lab.pool.num_used == 9


def test_a_sibling_is_recomputed_only_if_there_is_room() -> None:
    """Admission counts the first sequence. All of it is cached, so its sibling is next at once and needs two blocks
    that were not counted, while one is left. The group is admitted and waits for its next step."""
    lab = Lab(20, policy=RECOMPUTE)
    lab.add("A", [9, 9, 9], 20)
    parting = next([1, 2, 3, i] for i in range(50) if answer([1, 2, 3, i], 1, 0) != answer([1, 2, 3, i], 1, 1))
    group = lab.add("G", parting, 6, width=2)
    for _ in range(5):
        lab.step()
    first, second = group.sequences
    own, pool = second.block_ids[2:], lab.pool
    assert len(first.token_ids) == 9 and not set(own) & set(first.block_ids)
    lab.preempt(group)
    group.num_preemptions = 0  # it needs no headroom
    for block in own:
        pool.unseal(block)
    while pool.num_available > 5:
        pool.allocate()
    plan = lab.scheduler.schedule()
    assert group.status is Status.RUNNING and first.num_computed == 8 and second.num_computed == 4
    assert [s.request.request_id for s in plan.sequences] == ["A"] and pool.num_available == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_group_swapped_during_recomputation_continues_after_swap_in(world: Worlds, fails: bool) -> None:
    """Half recomputed, then swapped: it is first swapped in as a whole, then recomputed further. If that step fails,
    it is recomputed from its start, though it has no slice in it."""
    lab = world(16, host=16, budget=4, caching=False)
    group = lab.add("G", [1, 2, 3, 4, 5], 5, width=3)
    for _ in range(3):
        lab.step()
    lab.preempt(group, RECOMPUTE)
    lab.step()
    lab.step()
    first, second, _ = group.sequences
    assert first.num_computed == len(first.token_ids) - 1 == 6 and not second.num_computed
    lab.preempt(group, SWAP)
    plan = lab.plan()
    assert plan.swap_ins and not plan.rows and group.status is Status.RUNNING
    if fails:
        assert lab.fail() == ["G"]


# -- Scheduling 3: admission control -----------------------------------------------------------------------------------


def test_a_default_max_tokens_is_reduced_to_fit() -> None:
    lab = Lab(4)
    request = lab.add("default", [1, 2, 3], None)
    assert request.max_tokens == 6 == lab.cache.max_output_tokens(3)
    lab.run()
    assert len(request.finished_sequences[0].token_ids) == 9


@pytest.mark.parametrize(
    ("options", "fits", "refused", "message"),
    [
        ({}, (12, 3, 3), (12, 5, 4), r"needs 14 blocks of 2 tokens .* pool has 10; max_tokens of at most 3"),
        ({}, (3, 18, 1), (3, 19, 1), r"max_tokens 19, width 1.* pool has 10; max_tokens of at most 18 fits"),
        ({}, (20, 1, 1), (21, None, 1), r"needs 11 blocks of 2 tokens .*21 prompt .*shorten the prompt or"),
        ({"rows": 2}, (2, 3, 2), (2, 3, 3), "decodes 3 sequences together and at most 2 run"),
        ({"budget": 2}, (2, 3, 2), (2, 3, 3), "decodes 3 sequences together and at most 2 run"),
    ],
)
def test_a_request_that_could_never_run_is_refused_with_the_numbers(
    world: Worlds, options: dict[str, int], fits: tuple[int, int, int], refused: tuple[int, Any, int], message: str
) -> None:
    """Each request is (prompt tokens, max_tokens, width). The one that fits shares 6 blocks and has 3 x 1 own."""
    lab = world(10, **options)
    for (num_prompt, max_tokens, width), error in ((refused, message), (fits, "")):
        with pytest.raises(CapacityError, match=error) if error else contextlib.nullcontext():
            lab.add("A", list(range(num_prompt)), max_tokens, width=width)
        assert lab.scheduler.has_work == (not error) and len(lab.emitted(ev.Arrived)) == (not error)


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


# -- Scheduling 4: wait reasons and events -----------------------------------------------------------------------------


def test_a_running_request_has_no_wait_reason(world: Worlds) -> None:
    lab = world(8, rows=1)
    lab.add("A", [1], 1)
    b = lab.add("B", [2], 2)
    lab.step()
    assert b.wait_reason == "rows"
    lab.plan()
    assert b.status is Status.RUNNING and b.wait_reason == ""


def test_admission_needs_room_for_the_whole_prompt_not_only_its_first_chunk(world: Worlds) -> None:
    lab = world(8, budget=4)
    lab.add("A", [1, 2, 3], 6)
    b = lab.add("B", list(range(10, 24)), 2)
    lab.step()
    lab.step()
    assert b.status is Status.WAITING and lab.reasons("B")[-1] == "blocks"


def test_a_wait_reason_is_emitted_with_its_numbers_when_it_changes_not_once_per_step(world: Worlds) -> None:
    lab = world(8)
    lab.add("gone", [1, 2, 3, 4, 5], 1)
    lab.run()
    assert (lab.pool.num_cached, lab.pool.num_free) == (2, 6)
    lab.add("A", [6] * 9, 4)
    lab.add("B", [7] * 9, 4)
    lab.run()
    assert lab.emitted(ev.Waiting) == [ev.Waiting("B", "blocks", 5, 1, 2)]


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


def test_a_group_shares_the_budget_of_its_windows(world: Worlds) -> None:
    lab = world(40, window=8, budget=9, rows=3)
    lab.add("G", [1], 20, width=3)
    lab.step()
    assert lab.plan().counts == [3, 3, 3]


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


def test_the_decode_window_is_one_where_the_host_selects_tokens(world: Worlds) -> None:
    lab = world(40, window=4)
    request = lab.add("A", [1, 2], 6, beam=2)
    while lab.scheduler.has_work:
        plan = lab.plan()
        assert set(plan.num_sampled) == {1}
        assert not lab.plan(), "nothing is planned while anything of it is pending"
        assert request.num_pending
        lab.land()


def test_samples_wait_for_their_fork_and_come_from_one_row_of_logits(world: Worlds) -> None:
    lab = world(40, window=4)
    request = lab.add("A", [1, 2, 3], 9, width=3)
    plan = lab.plan()
    assert plan.num_samples == {0: 3} and plan.num_sampled == [1]
    assert [s.num_samples for s in plan.slices()] == [3]
    assert not lab.plan()
    lab.land()
    assert [s.index for s in request.sequences] == [0, 1, 2] and request.forked and not request.needs_result
    plan = lab.plan()
    assert plan.num_sampled == [4, 4, 4] and plan.num_samples == {} and len(plan.host_tokens) == 3


def test_a_prefill_chunk_samples_nothing(world: Worlds) -> None:
    for options in ({"width": 2}, {"beam": 2}):
        lab = world(20, budget=2, rows=2)
        lab.add("A", [1, 2, 3], 3, **options)
        assert lab.step().num_samples == {}
        assert lab.step().num_samples == {0: 2}


@pytest.mark.parametrize("stops", [True, False])
def test_a_result_is_cut_at_the_first_stop_token(world: Worlds, stops: bool) -> None:
    """The device's own stop test only ends writes early; the host cuts the result."""
    output = answer([1, 2], 8)
    stop = output[3]
    lab = world(20, window=8, habits=o.Habits(stops=stops))
    request = lab.add("A", [1, 2], 8, stop_ids=[stop, 777])
    lab.step()
    assert lab.plan().num_sampled == [7]
    assert lab.land() == ["A"]
    (seq,) = request.finished_sequences
    assert seq.token_ids[2:].tolist() == output[: output.index(stop) + 1]
    assert (seq.finish_reason, seq.stop_token) == ("stop", stop)


def test_a_decode_window_streams_its_columns_as_they_arrive(world: Worlds) -> None:
    lab = world(20, window=6, habits=o.Habits(splits=True))
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


@pytest.mark.parametrize("stops", [True, False])
def test_results_go_to_the_sequence_of_the_plan(stops: bool) -> None:
    """A finishes while its next step is in flight, its row goes to B, and then A's extra tokens arrive."""
    stop = answer([1, 2], 1)[0]
    lab = Lab(8, rows=1, habits=o.Habits(stops=stops))
    a = lab.add("A", [1, 2], 5, stop_ids=[stop])
    b = lab.add("B", [3, 4], 5)
    lab.plan()
    lab.plan()
    assert lab.land() == ["A"]
    lab.plan()
    (seq,) = b.sequences
    assert seq.row == 0 and seq.num_pending == 1
    assert lab.land() == []  # A's
    assert seq.num_pending == 1 and len(seq.token_ids) == 2
    lab.run(depth=2)
    assert a.finished_sequences[0].token_ids.tolist() == [1, 2, stop]


def test_a_beam_search_that_keeps_nothing_finishes() -> None:
    lab = Lab(20)
    request = lab.add("A", [1, 2, 3], 5, width=2, num_samples=2, select_beams=lambda parents: parents[:0])
    lab.plan()
    assert lab.land() == ["A"]
    assert request.status is Status.FINISHED and request.finished_sequences == [] and lab.pool.num_used == 0
    assert lab.emitted(ev.Finished) == [ev.Finished("A", "stop", 1)]  # the last token, which has no continuation


def test_the_first_slice_on_a_new_row_has_host_tokens(world: Worlds) -> None:
    """A new row still holds the last token and the done flag of its previous owner."""
    stop = answer([1, 2], 1)[0]
    lab = world(8, rows=1, habits=o.Habits(stops=True))
    lab.add("A", [1, 2], 5, stop_ids=[stop])
    lab.step()
    b = lab.add("B", [3, 4], 3)
    plan = lab.plan()
    found = slice_of(plan, b)
    assert found is not None and found.row == 0
    assert found.token_ids is not None and found.token_ids.tolist() == [3, 4]


@pytest.mark.parametrize("policy", [RECOMPUTE, SWAP])
def test_after_preemption_a_row_no_longer_holds_the_last_token(world: Worlds, policy: Policy) -> None:
    """B's row passes to C and back, so the slice that resumes B must have its token."""
    lab = crowded(world, policy)
    b = lab.requests["B"]
    lab.plan()
    (seq,) = b.sequences
    assert seq.row == -1 and not seq.row_has_last
    lab.abort("A")
    lab.land()
    plan = lab.plan()
    found = slice_of(plan, b)
    assert found is not None and found.token_ids is not None
    assert plan.row_setups[0].row == found.row and plan.table_writes[0].start == 0


def test_a_row_setup_has_the_seed_and_sample_index(world: Worlds) -> None:
    lab = world(16)
    request = lab.add("A", [1, 2, 3], 4, seed=99, stop_ids=[777], width=2)
    (setup,) = lab.step().row_setups
    assert (setup.row, setup.seed, setup.sample_index, setup.stop_ids) == (0, 99, 0, frozenset({777}))
    assert setup.sampling_params is request.sampling_params
    (setup,) = lab.step().row_setups  # the sibling's, after the fork
    assert (setup.row, setup.seed, setup.sample_index) == (1, 99, 1)


def test_a_row_setup_has_token_ids_if_sampling_needs_history(world: Worlds) -> None:
    lab = world(20, 2)
    params = SamplingParams(max_tokens=None, repetition_penalty=1.5)
    request = lab.add("a", [1, 2, 3], 8, sampling_params=params, width=2)
    lab.add("b", [5, 5, 5], 8)
    setup, other = lab.step().row_setups
    assert setup.token_ids is not None and setup.token_ids.tolist() == [1, 2, 3] and setup.num_prompt == 3
    assert other.token_ids is None and other.num_prompt == 3
    (child,) = lab.plan().row_setups
    known = request.sequences[1].token_ids.tolist()
    assert child.token_ids is not None and child.token_ids.tolist() == known and child.num_prompt == 3 < len(known)
    lab.land()
    assert setup.token_ids.tolist() == [1, 2, 3] and child.token_ids.tolist() == known  # a plan's own


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


# -- Failed steps ------------------------------------------------------------------------------------------------------


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


def test_a_decode_step_writes_no_table_unless_a_block_is_new() -> None:
    lab = Lab(30, block_size=4)
    lab.add("A", [1, 2, 3], 9)
    writes = []
    while lab.scheduler.has_work:
        writes.append([tuple(w) for w in lab.step().table_writes])
    assert writes == [[(0, 0, (1,))], [], [(0, 1, (2,))], [], [], [], [(0, 2, (3,))], [], []]


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
    assert lab.cache.num_swapped_out == lab.cache.num_swapped_in == 3


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
