"""Slices of a step: what a request computes next, and what of it is in the plan."""

from __future__ import annotations

import pytest

from octavo.core.policy import Policy
from octavo.core.request import Status
from octavo.params.sampling_params import SamplingParams
from tests.core.lab import RECOMPUTE, SWAP, Lab, Worlds, answer, crowded, slice_of
from tests.proof import oracle as o

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


# -- Scheduling 2: preemption ------------------------------------------------------------------------------------------


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


# -- Scheduling 5: overlap and decode windows --------------------------------------------------------------------------


def test_a_group_shares_the_budget_of_its_windows(world: Worlds) -> None:
    lab = world(40, window=8, budget=9, rows=3)
    lab.add("G", [1], 20, width=3)
    lab.step()
    assert lab.plan().counts == [3, 3, 3]


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
