"""Admission: what a request waits for, and that one which could never run is refused."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest

from octavo.core import events as ev
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.policy import Policy
from octavo.core.request import Status
from octavo.errors import CapacityError
from octavo.params.sampling_params import SamplingParams
from tests.core.lab import RECOMPUTE, SWAP, Lab, Worlds, crowded, names, slice_of, state_of

# -- Memory 3: lookup --------------------------------------------------------------------------------------------------


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


# -- Scheduling 1: order -----------------------------------------------------------------------------------------------


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


# -- Scheduling 2: preemption ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("options", "most", "needs"), [({}, 14, 12), ({"width": 2}, 4, 14), ({"beam": 1}, 8, 12)], ids=str
)
def test_a_lone_request_needs_a_window_and_a_step_in_its_window_groups(
    world: Worlds, options: dict[str, int], most: int, needs: int
) -> None:
    """A window of 2 and a step of 3 take 3 blocks of 2. Other requests keep all."""
    lab = world(11, windows=(2,), max_chunk=3)
    match = rf"needs {needs} blocks .* the pool has 11; max_tokens of at most {most} fits"
    with pytest.raises(CapacityError, match=match):
        lab.add("A", [1, 2, 3], most + 1, **options)
    assert lab.add("A", [1, 2, 3], None, **options).max_tokens == most


def test_admission_leaves_running_prompts_what_they_still_take(world: Worlds) -> None:
    """A's prompt is computed a chunk a step. B would be admitted meanwhile, only to be preempted."""
    lab = world(15, windows=(2,), max_chunk=2, policy=RECOMPUTE)
    lab.add("A", list(range(12)), 5)
    lab.step()
    lab.add("B", list(range(20, 32)), 5)
    lab.step()
    assert lab.requests["B"].wait_reason == "blocks"
    lab.run()
    assert not lab.scheduler.num_preemptions


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("decode_window", [1, 4])
def test_an_accepted_request_with_windows_never_stalls(depth: int, decode_window: int) -> None:
    tried = 0
    for num_blocks, size, chunk, windows in itertools.product((3, 5, 8), (1, 2), (1, 3), ((1,), (4,), (2, 3))):
        for prompt, width in itertools.product((1, 3, 6), (1, 2)):
            lab = Lab(num_blocks, size, rows=2, windows=windows, max_chunk=chunk, window=decode_window, listen=False)
            most = lab.cache.max_output_tokens(prompt, width, drops=width == 1)
            if 1 <= most <= 8:
                lab.add("A", list(range(prompt)), most, width=width)
                lab.run(depth=depth)
                tried += 1
    assert tried > 40


# -- Scheduling 4: wait reasons and events -----------------------------------------------------------------------------


def test_admission_needs_room_for_the_whole_prompt_not_only_its_first_chunk(world: Worlds) -> None:
    lab = world(8, budget=4)
    lab.add("A", [1, 2, 3], 6)
    b = lab.add("B", list(range(10, 24)), 2)
    lab.step()
    lab.step()
    assert b.status is Status.WAITING and lab.reasons("B")[-1] == "blocks"
