"""Pinned prompts: requests begin with their blocks, the partial tail included by copy-on-write."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core import events as ev
from octavo.core.plan import BlockCopy
from octavo.core.policy import Policy
from octavo.core.request import Request, Status
from octavo.errors import CapacityError
from octavo.params.sampling_params import SamplingParams
from tests.core.lab import RECOMPUTE, SWAP, Lab, Worlds


def pinned(lab: Lab, name: str, prompt: list[int], **options: Any) -> Request:
    """Compute a pin while there is no other request."""
    request = lab.add(name, prompt, 1, pin=True, **options)
    while request.status is not Status.FINISHED:
        lab.step()
    return request


@pytest.mark.parametrize("caching", [True, False])
def test_pinned_prefix_is_not_recomputed(world: Worlds, caching: bool) -> None:
    """Blocks of 4 and a pin of 6 tokens: one full block and half of a second."""
    lab = world(20, 4, caching=caching)
    pin = pinned(lab, "P", [1, 2, 3, 4, 5, 6])
    blocks = lab.cache.pins["P"].block_ids[:]
    request = lab.add("A", [1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
    plan = lab.step()
    assert (plan.starts, plan.counts) == ([6], [3]) and request.num_cached_tokens == 6
    seq = request.sequences[0]
    assert plan.copies == [BlockCopy(blocks[1], seq.block_ids[1])]
    assert seq.block_ids[0] == blocks[0] and blocks == lab.cache.pins["P"].block_ids
    assert lab.cache.stats().num_pinned == 2 and lab.cache.stats().num_hit_tokens == 6
    while lab.scheduler.has_work:
        lab.step()
    assert pin.finished_sequences[0].output_token_ids and lab.pool.num_used == 2


def test_the_longest_pin_with_the_same_salt_is_used(world: Worlds) -> None:
    lab = world(40, 4)
    pinned(lab, "short", [1, 2, 3, 4, 5])
    pinned(lab, "long", [1, 2, 3, 4, 5, 6, 7])
    pinned(lab, "between", [1, 2, 3, 4, 5, 6])
    pinned(lab, "theirs", [1, 2, 3, 4, 5, 6, 7, 8, 9], salt=b"tenant")
    pinned(lab, "other", [9, 2, 3, 4, 5, 6, 7, 8])
    pinned(lab, "parts", [1, 2, 3, 4, 5, 6, 0, 8, 9, 10, 11])
    request = lab.add("A", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 1)
    plan = lab.step()
    assert plan.starts == [7] and request.num_cached_tokens == 7


def test_index_hits_are_preferred_to_a_pin_of_equal_length(world: Worlds) -> None:
    lab = world(40, 4)
    pinned(lab, "P", [1, 2, 3, 4, 5])
    lab.add("A", [1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    lab.step()
    request = lab.add("B", [1, 2, 3, 4, 5, 6, 7, 8, 10], 1)
    plan = lab.step()
    assert plan.starts == [8] and not plan.copies and request.num_cached_tokens == 8


@pytest.mark.parametrize(("num", "start", "num_copies"), [(5, 4, 0), (6, 5, 1), (7, 6, 1), (8, 4, 0), (4, 0, 0)])
def test_a_prompt_equal_to_the_pin_computes_only_its_last_token(
    world: Worlds, num: int, start: int, num_copies: int
) -> None:
    lab = world(20, 4, caching=False)
    pinned(lab, "P", list(range(1, num + 1)))
    lab.add("A", list(range(1, num + 1)), 6)
    plan = lab.step()
    assert plan.starts == [start] and len(plan.copies) == num_copies


@pytest.mark.parametrize(("parts_at", "start", "num_copies"), [(2, 0, 0), (4, 4, 0), (6, 4, 0), (8, 8, 0), (9, 9, 1)])
def test_a_prompt_that_differs_from_a_pin_reuses_the_common_part(
    world: Worlds, parts_at: int, start: int, num_copies: int
) -> None:
    """Blocks of 4, a pin of 10 tokens. A difference within the tail copies the tail; within a full block, the prefix
    ends before that block."""
    lab = world(20, 4, caching=False)
    pin = list(range(1, 11))
    pinned(lab, "P", pin)
    lab.add("A", [*pin[:parts_at], 30, 31, 32], 3)
    plan = lab.step()
    assert plan.starts == [start] and len(plan.copies) == num_copies


def test_skip_reading_prefix_cache_ignores_pins(world: Worlds) -> None:
    lab = world(20, 4)
    pinned(lab, "P", [1, 2, 3, 4, 5, 6])
    params = SamplingParams(max_tokens=None, skip_reading_prefix_cache=True)
    lab.add("A", [1, 2, 3, 4, 5, 6, 7], 1, sampling_params=params)
    assert lab.step().starts == [0]


def test_a_pin_survives_cache_eviction(world: Worlds) -> None:
    lab = world(12, 2)
    pinned(lab, "P", [1, 2, 3, 4, 5])
    blocks = lab.cache.pins["P"].block_ids[:]
    for i in range(4):
        lab.add(f"big{i}", [20 + i] * 12, 7)
        while lab.scheduler.has_work:
            lab.step()
    lab.cache.reset_prefix_cache()
    assert lab.cache.pins["P"].block_ids == blocks and all(lab.pool.refs[b] == 1 for b in blocks)
    request = lab.add("A", [1, 2, 3, 4, 5, 6], 1)
    assert lab.step().starts == [5] and request.num_cached_tokens == 5


def test_the_copy_of_a_pins_tail_is_counted_at_admission(world: Worlds) -> None:
    """Of 7 blocks of 4, the pin has 2 and another request 4. The last one is just enough for the copy."""
    lab = world(7, 4, caching=False, policy=RECOMPUTE)
    pinned(lab, "P", [1, 2, 3, 4, 5, 6])
    lab.add("other", [9] * 14, 2)
    lab.step()
    fits = lab.add("fits", [1, 2, 3, 4, 5, 6, 7, 8], 1)
    too_long = lab.add("too long", [1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    plan = lab.plan()
    assert fits.status is Status.RUNNING and too_long.status is Status.WAITING and len(plan.copies) == 1
    assert lab.reasons("too long") == ["blocks"]


def test_no_request_is_admitted_without_room_for_the_copy(world: Worlds) -> None:
    lab = world(6, 4, caching=False, policy=RECOMPUTE)
    pinned(lab, "P", [1, 2, 3, 4, 5, 6])
    lab.add("other", [9] * 14, 2)
    lab.step()
    request = lab.add("A", [1, 2, 3, 4, 5, 6, 7, 8], 1)
    lab.plan()
    assert request.status is Status.WAITING and lab.emitted(ev.Waiting)[-1] == ev.Waiting("A", "blocks", 1, 0, 0)


def test_pins_take_at_most_half_of_the_pool(world: Worlds) -> None:
    lab = world(10, 2)
    pinned(lab, "P", [1, 2, 3])
    with pytest.raises(CapacityError, match=r"8 tokens to pin take 4 blocks, 2 are pinned, .* half .* 10 .* unpin"):
        lab.add("Q", [5] * 8, 1, pin=True)
    assert lab.cache.num_pinned == 2
    pinned(lab, "R", [5] * 6)
    assert lab.cache.num_pinned == 5


def test_a_pins_blocks_are_reserved_when_it_is_added(world: Worlds) -> None:
    lab = world(10, 2)
    lab.add("P", [1] * 6, 1, pin=True)
    with pytest.raises(CapacityError, match=r"needs 8 blocks .* the pool has 7, besides 3 pinned ones; max_tokens of"):
        lab.add("A", [2] * 8, 9)
    with pytest.raises(CapacityError, match="at most half"):
        lab.add("Q", [1] * 6, 1, pin=True)
    lab.abort("P")
    assert lab.cache.num_pinned == 0 and not lab.cache.pins
    lab.add("A", [2] * 8, 9)


def test_a_pin_is_refused_if_an_earlier_request_might_no_longer_fit(world: Worlds) -> None:
    lab = world(10, 2)
    lab.add("A", [2] * 8, 9)
    with pytest.raises(CapacityError, match=r"may need up to 8 blocks, and with 3 more pinned 7 are left"):
        lab.add("P", [1] * 6, 1, pin=True)
    pin = lab.add("Q", [1] * 4, 1, pin=True)
    while lab.scheduler.has_work:
        lab.step()
    assert pin.request_id in lab.cache.pins and lab.finished == ["Q", "A"]


def test_unpinning_does_not_affect_requests_that_began_with_the_pin(world: Worlds) -> None:
    lab = world(20, 2)
    pinned(lab, "P", [1, 2, 3, 4])
    lab.add("A", [1, 2, 3, 4, 5], 4)
    lab.step()
    assert lab.scheduler.unpin("P") == 2 and lab.scheduler.unpin("P") is None
    assert lab.emitted(ev.Pinned, ev.Unpinned) == [ev.Pinned("P", 4, 2), ev.Unpinned("P", 2)]


@pytest.mark.parametrize("policy", [RECOMPUTE, SWAP])
def test_a_pin_preempted_before_its_result_is_recomputed(world: Worlds, policy: Policy) -> None:
    """Its token is in flight when its blocks are released: a token without blocks is no pin."""
    lab = world(20, 2, host=20, policy=policy)
    pin = lab.add("P", [1, 2, 3, 4, 5], 1, pin=True)
    lab.plan()
    lab.preempt(pin)
    lab.land()
    assert pin.status is Status.WAITING and pin.sequences[0].num_pending == 0
    while lab.scheduler.has_work:
        lab.step()
    assert lab.cache.pins["P"].num_computed == 5 and lab.finished == ["P"]


@pytest.mark.parametrize("when", ["before", "in flight"])
def test_a_request_that_ends_early_leaves_no_pin(world: Worlds, when: str) -> None:
    lab = world(20, 2)
    pin = lab.add("P", [1, 2, 3, 4, 5], 1, pin=True)
    if when == "in flight":
        lab.plan()
    lab.scheduler.stop(pin.sequences[0], "abort")
    assert not lab.cache.pins and lab.cache.num_pinned == 0


def test_a_pin_whose_step_fails_is_recomputed(world: Worlds) -> None:
    lab = world(20, 2)
    lab.add("P", [1, 2, 3, 4, 5], 1, pin=True)
    lab.plan()
    assert lab.fail() == ["P"]
    while lab.scheduler.has_work:
        lab.step()
    assert lab.cache.pins["P"].num_computed == 5


def test_a_pin_keeps_blocks_out_of_the_attention_window(world: Worlds) -> None:
    lab = world(20, 2, attention_window=3, budget=2)
    pinned(lab, "P", list(range(1, 10)))
    assert lab.cache.pins["P"].num_dropped == 0 and all(lab.cache.pins["P"].block_ids)
    lab.add("A", [*range(1, 10), 20], 3)


def test_samples_share_a_pin_and_its_tail_is_copied_once_for_each_but_never_for_the_pin(world: Worlds) -> None:
    lab = world(40, 4)
    pinned(lab, "P", [1, 2, 3, 4, 5, 6])
    blocks = lab.cache.pins["P"].block_ids[:]
    lab.add("G", [1, 2, 3, 4, 5, 6, 7], 6, width=3)
    copies = []
    while lab.scheduler.has_work:
        copies += lab.step().copies
    assert len(copies) == 1 + 2 and blocks == lab.cache.pins["P"].block_ids


def test_unsealed_blocks_of_a_pin_are_swapped_with_a_request_that_shares_them(world: Worlds) -> None:
    """Without a seal a later swap-in cannot tell whether the block is still the same: the pin may be gone by then."""
    lab = world(12, 2, host=12, caching=False, policy=SWAP)
    pinned(lab, "P", [1, 2, 3, 4])
    lab.add("old", [9, 8, 7], 15)
    young = lab.add("young", [1, 2, 3, 4, 5], 12)
    while young.status is not Status.SWAPPED:
        lab.step()
    assert young.num_cached_tokens == 4 and not young.shared_on_device
    assert lab.scheduler.unpin("P")


# -- window groups -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_a_pin_keeps_and_gives_the_blocks_of_all_groups(world: Worlds, caching: bool) -> None:
    lab = world(40, 4, windows=(3, 9), caching=caching)
    pinned(lab, "P", [1, 2, 3, 4, 5, 6])
    (pin,) = lab.cache.pins.values()
    assert all(all(ids) for ids, _ in pin.tables) and lab.cache.num_pinned == 6 == lab.pool.num_used
    request = lab.add("A", [1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
    plan = lab.step()
    assert plan.starts == [6] and request.num_cached_tokens == 6
    (seq,) = request.sequences
    assert plan.copies == [
        BlockCopy(theirs[1], own[1]) for (theirs, _), (own, _) in zip(pin.tables, seq.tables, strict=True)
    ]
    assert [table.block_ids[0] for table in seq.windows] == [0, pin.windows[1].block_ids[0]]
    assert lab.scheduler.unpin("P") == 6 and lab.cache.num_pinned == 0


def test_the_copies_of_a_pins_tail_are_counted_at_admission_in_all_groups(world: Worlds) -> None:
    """Of 10 blocks of 4, the pin has 4 and another request 4. A needs a copy of the tail in both groups."""
    for num_blocks, status in ((10, Status.RUNNING), (9, Status.WAITING)):
        lab = world(num_blocks, 4, windows=(9,), caching=False, policy=RECOMPUTE)
        pinned(lab, "P", [1, 2, 3, 4, 5, 6])
        lab.add("other", [9] * 6, 2)
        lab.step()
        fits = lab.add("fits", [1, 2, 3, 4, 5, 6, 7, 8], 1)
        lab.plan()
        assert fits.status is status


def test_a_pin_that_lacks_the_window_of_a_query_is_not_used(world: Worlds) -> None:
    """The pin began with a hit at 8 positions, so it never had what a query at 4 or 6 attends to."""
    lab = world(40, windows=(5,))
    lab.add("old", [1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    lab.step()
    pinned(lab, "P", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    lab.cache.reset_prefix_cache()
    assert lab.cache.pins["P"].windows[0].block_ids[:2] == [0, 0]
    for parts_at, start in ((9, 9), (8, 8), (6, 0), (4, 0)):
        lab.add(f"A{parts_at}", [*range(1, 1 + parts_at), 30, 31], 1)
        assert lab.step().starts == [start], parts_at
        lab.cache.reset_prefix_cache()


def test_a_group_that_begins_with_a_pin_is_recomputed_with_its_windows(world: Worlds) -> None:
    """The samples begin with whole blocks of the first one, which may not begin within the pin's tail."""
    lab = world(60, 4, windows=(4,), policy=RECOMPUTE)
    pinned(lab, "P", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    group = lab.add("G", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 6, width=3)
    assert lab.step().starts == [10]
    lab.step()
    lab.preempt(group)
    lab.cache.reset_prefix_cache()
    assert lab.step().starts == [8]


def test_pins_and_requests_are_refused_by_the_blocks_of_all_groups(world: Worlds) -> None:
    lab = world(20, windows=(3,), max_chunk=2)
    with pytest.raises(CapacityError, match=r"11 tokens to pin take 12 blocks, 0 are pinned, .* half .* 20"):
        lab.add("P", [1] * 11, 1, pin=True)
    request = lab.add("A", [2] * 10, 13)  # 11 blocks, and 3 of a window
    with pytest.raises(CapacityError, match=r"may need up to 14 blocks, and with 8 more pinned 12 are left"):
        lab.add("P", [1] * 8, 1, pin=True)
    lab.add("Q", [1] * 6, 1, pin=True)
    assert lab.cache.num_pinned == 6 and request.max_tokens == 13
    lab.abort("Q")
    assert lab.cache.num_pinned == 0


def test_a_pin_is_refused_beside_samples_that_keep_all_blocks_of_all_groups(world: Worlds) -> None:
    lab = world(20, windows=(3,), max_chunk=2)
    lab.add("G", [2] * 4, 7, width=2)  # 2 shared and 2 x 3 own blocks, in both groups
    with pytest.raises(CapacityError, match=r"may need up to 16 blocks, and with 6 more pinned 14 are left"):
        lab.add("P", [1] * 6, 1, pin=True)
