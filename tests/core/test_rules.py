"""The subtle rules: one test each, with the smallest world that goes wrong without it.

Every world here runs over the oracle, so that a rule broken in another way than the assertions expect still shows.
"""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core import events as ev
from octavo.core.in_flight import InFlightStep
from octavo.core.plan import StepPlan
from octavo.core.policy import Policy, PreemptionMode
from octavo.core.request import Request, Sequence, Status
from octavo.errors import CapacityError
from octavo.params.sampling_params import SamplingParams
from tests.core.lab import RECOMPUTE, SWAP, Lab, Planned, answer, sequence, slice_of
from tests.proof import oracle as o

LAZY = o.Habits(eager=False)


def crowded(policy: Policy, *, steps: int = 3, late: int = 0, **options: object) -> Lab:
    """A and B fill a pool of 6 blocks in three steps; in the fourth A needs one more, and B, the later, gives way.

    `late` of those steps are still in flight when this returns.
    """
    lab = Lab(6, host=6, policy=policy, **options)  # type: ignore[arg-type]
    lab.add("A", [1, 2, 3, 4], 6)
    lab.add("B", [5, 6, 7, 8], 6)
    for _ in range(steps):
        lab.plan()
        if len(lab.flight) > late:
            lab.land()
    return lab


def throw_out(lab: Lab, request: Request) -> StepPlan:
    """Preempt a request between two steps."""
    plan = StepPlan()
    lab.scheduler._preempt(request, request, 0, InFlightStep(plan))
    lab.oracle.submit(plan)
    return plan


# -- prefixes ----------------------------------------------------------------------------------------------------------


def test_a_plan_finds_no_blocks_that_it_computes() -> None:
    """Slices run in any order, so a slice must not read what another one of its plan computes."""
    lab = Lab(8, habits=o.Habits(shuffles=True))
    first, second = lab.add("first", [1, 2, 3, 4], 2), lab.add("second", [1, 2, 3, 4, 0], 2)
    plan = lab.plan()
    assert plan.sequences == first.sequences
    assert lab.reasons("second") == ["prefix in flight"]
    plan = lab.plan()  # found from the next plan on, though the first has no result yet
    assert slice_of(plan, second) is not None and second.num_cached_tokens == 4
    assert second.sequences[0].block_ids[:2] == first.sequences[0].block_ids[:2]
    lab.run()


def test_a_system_prompt_shared_by_eight_is_computed_once() -> None:
    lab = Lab(40)
    system = [7, 7, 6, 6, 5, 5]
    requests = [lab.add(f"r{i}", [*system, i], 2) for i in range(8)]
    plan = lab.step()
    assert plan.counts == [7]
    assert lab.reasons("r1") == ["prefix in flight"]
    plan = lab.step()
    assert [s.num_positions for s in plan.slices()] == [1] * 8
    assert [r.num_cached_tokens for r in requests] == [0] + [6] * 7
    lab.run()


def test_a_long_prefix_in_flight_is_waited_for_chunk_by_chunk() -> None:
    """The second of two equal prompts waits for the whole prefix instead of computing the rest in parallel."""
    lab = Lab(20, budget=5)
    prompt = list(range(10, 22))
    lab.add("first", prompt, 1)
    second = lab.add("second", [*prompt, 1], 1)
    lab.plan()
    while not second.sequences[0].num_computed:
        assert lab.plan()
    assert second.num_cached_tokens == 12
    lab.run()


def test_prefix_in_flight_compares_tokens_and_salt() -> None:
    lab = Lab(16)
    lab.add("first", [1, 2, 3, 4], 1)
    lab.add("other tokens", [1, 3, 3, 4], 1)
    lab.add("other tenant", [1, 2, 3, 4], 1, salt=b"x")
    lab.add("too short to share", [1, 2], 1)
    assert len(lab.plan().rows) == 4
    lab.run()


def test_a_stop_token_is_never_sealed() -> None:
    """Step k returns the stop token of position p while step k+1, in flight, covers p. The device may never have
    written it. The chat's next turn begins with all of this output, the stop token included."""
    stop = next(t for t in answer([1], 6)[1:])
    lab = Lab(16, block_size=1, habits=o.Habits(stops=True))
    turn = lab.add("turn 1", [1], 6, stop_ids=[stop])
    lab.run(depth=2)
    tokens = turn.finished_sequences[0].token_ids.tolist()
    assert tokens[-1] == stop
    following = lab.add("turn 2", [*tokens, 3], 2)
    lab.run(depth=2)
    assert following.num_cached_tokens == len(tokens) - 1


def test_only_known_tokens_are_sealed() -> None:
    """`num_computed` is ahead of the tokens that the host knows by a decode window and a step in flight."""
    lab = Lab(16, window=6)
    request = lab.add("A", [1, 2, 3, 4], 20)
    lab.plan()
    lab.plan()
    (seq,) = request.sequences
    assert (seq.num_computed, len(seq.token_ids)) == (10, 4)
    assert len(seq.seal_ids) == 2 and lab.pool.num_sealed == 2
    lab.run(depth=2)


def test_a_block_is_found_only_after_its_own_parent() -> None:
    """Equal tokens after another prefix are other content."""
    lab = Lab(16)
    lab.add("A", [1, 1, 2, 2, 0], 1)
    lab.run()
    other = lab.add("B", [3, 3, 2, 2, 0], 1)
    lab.run()
    assert other.num_cached_tokens == 0


def test_different_salts_share_no_blocks() -> None:
    lab = Lab(16)
    lab.add("ours", [1, 1, 2, 2, 0], 1, salt=b"us")
    lab.run()
    theirs, ours = lab.add("theirs", [1, 1, 2, 2, 0], 1), lab.add("ours again", [1, 1, 2, 2, 0], 1, salt=b"us")
    lab.run()
    assert (theirs.num_cached_tokens, ours.num_cached_tokens) == (0, 4)


# -- results, rows and steps in flight ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize("policy", [RECOMPUTE, SWAP])
def test_late_results_of_a_preempted_request_are_kept(policy: Policy) -> None:
    lab = crowded(policy, late=1)
    b = lab.requests["B"]
    lab.plan()
    assert b.status in (Status.WAITING, Status.SWAPPED)
    (seq,) = b.sequences
    assert (seq.num_pending, len(seq.token_ids)) == (1, 6)
    lab.land()
    assert (seq.num_pending, len(seq.token_ids)) == (0, 7)
    lab.run(depth=2)


@pytest.mark.parametrize("policy", [RECOMPUTE, SWAP])
def test_a_preempted_request_resumes_only_without_pending_tokens(policy: Policy) -> None:
    """Otherwise its last token is unknown: it would continue without it and sample that position twice."""
    lab = crowded(policy, late=1)
    lab.plan()
    lab.abort("A")
    plan = lab.plan()
    assert lab.requests["B"].sequences[0] not in plan.sequences
    assert lab.reasons("B")[-1] == "in flight"
    lab.land()
    assert slice_of(lab.plan(), lab.requests["B"]) is not None
    lab.run(depth=2)


@pytest.mark.parametrize("policy", [RECOMPUTE, SWAP])
def test_a_window_in_flight_is_kept_when_its_request_is_preempted(policy: Policy) -> None:
    lab = crowded(policy, steps=2, late=1, window=2)
    b = lab.requests["B"]
    while b.status is Status.RUNNING:
        lab.plan()
    (seq,) = b.sequences
    assert b.num_pending == 2
    num_sealed = len(seq.seal_ids)
    lab.land()
    assert b.num_pending == 0 and b.status is not Status.RUNNING
    assert len(seq.token_ids) // 2 > num_sealed == len(seq.seal_ids)  # nothing is sealed that is not on the device
    lab.run(depth=2)


def test_the_first_slice_on_a_new_row_has_host_tokens() -> None:
    """A new row still holds the last token and the done flag of its previous owner."""
    stop = answer([1, 2], 1)[0]
    lab = Lab(8, rows=1, habits=o.Habits(stops=True))
    lab.add("A", [1, 2], 5, stop_ids=[stop])
    lab.step()
    b = lab.add("B", [3, 4], 3)
    plan = lab.plan()
    found = slice_of(plan, b)
    assert found is not None and found.row == 0
    assert found.token_ids is not None and found.token_ids.tolist() == [3, 4]
    lab.run()


@pytest.mark.parametrize("policy", [RECOMPUTE, SWAP])
def test_after_preemption_a_row_no_longer_holds_the_last_token(policy: Policy) -> None:
    """B's row passes to C and back, so the slice that resumes B must have its token."""
    lab = crowded(policy)
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
    lab.run()


def test_a_row_setup_has_the_seed_and_sample_index() -> None:
    lab = Lab(16)
    request = lab.add("A", [1, 2, 3], 4, seed=99, stop_ids=[777], width=2)
    (setup,) = lab.step().row_setups
    assert (setup.row, setup.seed, setup.sample_index, setup.stop_ids) == (0, 99, 0, frozenset({777}))
    assert setup.sampling_params is request.sampling_params
    (setup,) = lab.step().row_setups  # the sibling's, after the fork
    assert (setup.row, setup.seed, setup.sample_index) == (1, 99, 1)
    lab.run()


def test_table_writes_are_applied_in_stream_order() -> None:
    """A is aborted in flight, and C takes its row with blocks that hold a prefix. If the device's table changed at
    once, A's step would write into them."""
    lab = Lab(12, rows=1, habits=LAZY)
    lab.add("P", [1, 2, 3, 4, 0], 1)
    lab.run()
    lab.add("A", [5, 6, 7, 8], 4)
    lab.plan()
    lab.abort("A")
    c = lab.add("C", [1, 2, 3, 4, 1], 2)
    lab.plan()
    assert c.num_cached_tokens == 4
    lab.run(depth=2)


def test_a_row_setup_has_token_ids_if_sampling_needs_history() -> None:
    lab = Lab(20, 2)
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
    lab.run()


@pytest.mark.parametrize("asks", [{"prompt_logprobs": 0}, {"skip_reading_prefix_cache": True}])
def test_skip_reading_prefix_cache_computes_the_whole_prompt(asks: dict[str, Any]) -> None:
    """It does not wait for an equal prompt in flight either."""
    lab = Lab(40, 2)
    lab.add("before", [1, 2, 3, 4, 5, 6, 7], 2)
    lab.run()
    lab.add("a", [1, 2, 3, 4, 5, 6, 7], 2, sampling_params=SamplingParams(max_tokens=None, **asks))
    lab.add("b", [9, 9, 9, 9], 2)
    lab.add("c", [9, 9, 9, 9], 2, sampling_params=SamplingParams(max_tokens=None, **asks))
    plan = lab.plan()
    assert [(s.start, s.num_positions) for s in plan.slices()] == [(0, 7), (0, 4), (0, 4)]
    lab.land()
    lab.run()


def test_a_plan_aliases_no_live_state() -> None:
    """The device may read a plan late."""
    lab = Lab(16, habits=LAZY)
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
    lab.run()


# -- copies and swaps --------------------------------------------------------------------------------------------------


def test_swaps_out_come_before_slices() -> None:
    """An older request of the same plan takes the victim's block and writes it."""
    lab = crowded(SWAP)
    plan = lab.plan()
    taken = {b for w in plan.table_writes for b in w.block_ids}
    assert taken & {s.src for s in plan.swap_outs}
    assert slice_of(plan, lab.requests["A"]) is not None
    lab.run()
    assert lab.cache.num_swapped_out == lab.cache.num_swapped_in == 3


def swapped_after_its_fork() -> Lab:
    """A needs a block when G, two samples that share a partial tail, has just forked: G is swapped out whole."""
    lab = Lab(4, host=4, policy=SWAP)
    lab.add("A", [1, 2, 3, 4], 2)
    group = lab.add("G", [5, 6, 7], 2, width=2)
    lab.step()
    plan = lab.plan()
    assert group.status is Status.SWAPPED
    assert len(plan.swap_outs) == 2  # each block once, though each has two owners
    return lab


def test_swaps_in_come_before_copies() -> None:
    """A group is swapped in with a shared tail and copies it in the same plan."""
    lab = swapped_after_its_fork()
    host = lab.cache.swap_space
    assert [host.refs[b] for b in (1, 2)] == [2, 2] and host.num_used == 2
    lab.land()
    plan = lab.plan()
    assert len(plan.swap_ins) == 2 and len(plan.copies) == 1
    assert plan.copies[0].src in {s.dst for s in plan.swap_ins}
    assert host.num_used == 0
    lab.run()


def test_a_plan_with_only_swaps_is_submitted() -> None:
    """A waits for its last result; B needs a block and preempts itself. The step has no slice, but moves B's blocks."""
    lab = Lab(5, host=5, policy=SWAP)
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
    lab.run(depth=2)


def swapped_with_shared_block(num_blocks: int = 8) -> tuple[Lab, Sequence, Sequence]:
    """Two sequences over one sealed block; the second is swapped out and shares that block on the device."""
    lab = Lab(num_blocks, host=num_blocks, listen=False)
    cache = lab.cache
    first, second = sequence([1, 2, 9]), sequence([1, 2, 3])
    for seq in (first, second):
        cache.attach(seq, cache.lookup(seq))
        cache.grow(seq, 3 - seq.num_computed, StepPlan())
        seq.num_computed = 3
        cache.seal(seq)
        seq.request.status = Status.RUNNING
    assert first.block_ids[0] == second.block_ids[0] == 1
    plan = StepPlan()
    assert cache.swap_out(second.request, plan)
    second.request.status = Status.SWAPPED
    assert len(plan.swap_outs) == 1 and second.block_ids == [-1, 1]
    assert second.request.shared_on_device == {1: lab.pool.seal_id[1]}
    return lab, first, second


def test_blocks_shared_on_device_are_not_referenced() -> None:
    lab, first, _ = swapped_with_shared_block()
    assert lab.pool.refs[1] == 1
    lab.cache.free(first)
    assert lab.pool.num_used == 0 and list(lab.pool.cached()) == [1]


def test_blocks_shared_on_device_are_referenced_before_allocation() -> None:
    """Their last owner finished, so the block is the oldest cached one. Allocating first would evict it for the same
    request."""
    lab, first, second = swapped_with_shared_block(3)
    cache, pool = lab.cache, lab.pool
    cache.free(first)
    assert pool.num_available == 3
    found = cache.find_swap_in_blocks(second.request)
    assert found is not None and found.num_needed == 2
    younger = pool.allocate()
    pool.seal(younger, (99, b"younger"))
    pool.release(younger)
    while pool.num_free:
        pool.allocate()
    assert list(pool.cached()) == [1, younger]
    plan = StepPlan()
    cache.swap_in(second.request, found, plan)
    assert second.block_ids == [1, younger] and pool.seal_id[1] and len(plan.swap_ins) == 1
    assert len(second.seal_ids) == 1 and not second.request.shared_on_device


def test_blocks_shared_on_device_without_users_are_counted() -> None:
    lab, first, second = swapped_with_shared_block()
    found = lab.cache.find_swap_in_blocks(second.request)
    assert found is not None and found.num_needed == 1  # the first still owns it
    lab.cache.free(first)
    found = lab.cache.find_swap_in_blocks(second.request)
    assert found is not None and found.num_needed == 2
    assert found.shared_on_device == [1] and found.host_ids == [1]


def test_blocks_shared_on_device_are_verified_by_seal_id() -> None:
    """The block was evicted and holds the same tokens under another seal id, or other tokens: it is lost."""
    lab, first, second = swapped_with_shared_block()
    cache, pool = lab.cache, lab.pool
    key = pool.key_of(1)
    assert key is not None
    cache.free(first)
    cache.reset_prefix_cache()
    assert cache.find_swap_in_blocks(second.request) is None
    block = pool.allocate()
    assert block == 1
    pool.seal(block, (key[0], b"others"))
    assert cache.find_swap_in_blocks(second.request) is None


def test_a_swapped_request_that_lost_a_block_is_recomputed() -> None:
    """A shares a sealed block with B. B is swapped, A finishes, and the block is evicted before B resumes."""
    lab = Lab(6, host=6, policy=SWAP)
    lab.add("A", [1, 2, 3, 4], 6)
    lab.step()
    b = lab.add("B", [1, 2, 5, 6], 6)
    while b.status is not Status.SWAPPED:
        lab.step()
    assert len(b.shared_on_device) == 1 and b.sequences[0].block_ids[0] < 0
    lab.abort("A")
    assert lab.cache.reset_prefix_cache() > 0
    assert b.status is Status.SWAPPED
    lab.plan()
    assert lab.emitted(ev.SwapLost) == [ev.SwapLost("B")]
    assert b.status is Status.RUNNING and not b.shared_on_device and lab.cache.swap_space.num_used == 0
    lab.run()


def test_a_swapped_request_that_lost_a_block_reports_a_new_wait_reason() -> None:
    """It waited for blocks to be swapped in, and now waits for blocks to be recomputed."""
    lab = Lab(9, host=9, policy=SWAP)
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
    assert lab.emitted(ev.SwapLost) and b.status is Status.WAITING
    assert lab.reasons("B")[output:] == ["blocks"]
    lab.run()


def test_blocks_shared_only_within_a_group_are_swapped_with_it() -> None:
    """Only owners outside the request keep a sealed block on the device."""
    lab = Lab(12, host=12, policy=SWAP)
    group = lab.add("G", [1, 2, 3, 4, 5], 4, width=3)
    lab.step()
    plan = throw_out(lab, group)
    assert not group.shared_on_device and len(plan.swap_outs) == 3
    assert all(s.block_ids == [1, 2, 3] for s in group.sequences)
    lab.abort("G")
    lab.at_rest()


def test_swapped_in_blocks_are_sealed_again() -> None:
    lab = crowded(SWAP)
    b = lab.requests["B"]
    lab.step()
    lab.abort("A")
    lab.cache.reset_prefix_cache()
    lab.step()
    (seq,) = b.sequences
    assert len(seq.seal_ids) == seq.num_computed // 2 == 3
    assert all(lab.pool.seal_id[x] for x in seq.block_ids[:3])
    lab.run()


def test_without_host_room_a_victim_is_recomputed() -> None:
    lab = Lab(6, host=2, policy=SWAP)
    lab.add("A", [1, 2, 3, 4], 6)
    lab.add("B", [5, 6, 7, 8], 6)
    lab.run()
    assert [e.how for e in lab.emitted(ev.Preempted)] == ["recompute"]
    assert lab.cache.num_swapped_out == 0


@pytest.mark.parametrize(("policy", "status"), [(SWAP, Status.SWAPPED), (RECOMPUTE, Status.WAITING)])
def test_a_fork_happens_in_the_tier_where_the_request_is(policy: Policy, status: Status) -> None:
    """A beam's step returns after its group was swapped out: references to unrelated device blocks must not change."""
    lab = Lab(5, host=5, policy=policy)
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
    lab.run(depth=2)


def test_selected_beams_fork_before_the_others_are_released() -> None:
    """Both survivors come from the last beam. If the others were released in between, its blocks would be lost."""
    kept = []

    def last_twice(parents: list) -> list:
        live = [seq for seq, _ in parents]
        kept.append([s.index for s in live])
        return [(live[-1], 1), (live[-1], 2)]

    lab = Lab(12)
    request = lab.add("beam", [1, 2, 3], 5, width=2, num_samples=2, select_beams=last_twice)
    lab.step()
    lab.step()
    first, second = request.sequences
    assert kept == [[0], [0, 1]]
    assert first.block_ids == second.block_ids and lab.pool.refs[first.block_ids[-1]] == 2
    assert first.token_ids.tolist()[-2:] == [2, 1] and second.token_ids.tolist()[-2:] == [2, 2]
    while lab.scheduler.has_work:
        lab.step()
    assert lab.pool.num_used == 0
    assert {s.finish_reason for s in request.finished_sequences} == {"length"}


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


def test_a_group_is_recomputed_one_sequence_at_a_time_from_its_sibling() -> None:
    """A pool of 10 and three samples over a prompt of 6 blocks: 6 + 3 fit where they forked, 3 x 7 never fit."""
    lab = Lab(10, block_size=2, policy=RECOMPUTE, caching=False)
    prompt = list(range(10, 22))
    group = lab.add("G", prompt, 3, width=3)
    lab.step()
    lab.step()
    assert lab.pool.num_used == 9
    throw_out(lab, group)
    assert lab.pool.num_used == 0
    counts = []
    for _ in range(3):
        plan = lab.step()
        counts.append(plan.counts)
    assert counts[0] == [13] and counts[1] == [1] and counts[2] == [1]  # all but the last token of each
    assert lab.pool.num_used == 9
    lab.run()


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
    throw_out(lab, group)
    group.num_preemptions = 0  # it needs no headroom
    for block in own:
        pool.unseal(block)
    while pool.num_available > 5:
        pool.allocate()
    plan = lab.scheduler.schedule()
    assert group.status is Status.RUNNING and first.num_computed == 8 and second.num_computed == 4
    assert [s.request.request_id for s in plan.sequences] == ["A"] and pool.num_available == 1


def test_a_recomputed_sibling_shares_directly_where_an_equal_block_is_canonical() -> None:
    """An equal block elsewhere owns the index entry: a lookup would return that one, or nothing."""
    lab = Lab(12, policy=RECOMPUTE)
    group = lab.add("G", [1, 2, 3, 4, 5], 3, width=2)
    lab.step()
    throw_out(lab, group)
    lab.cache.reset_prefix_cache()
    lab.step()
    lab.step()
    a, b = group.sequences
    assert a.block_ids[:2] == b.block_ids[:2]
    assert [lab.pool.refs[x] for x in a.block_ids[:2]] == [2, 2]
    lab.run()


# -- the door, the line and giving way ---------------------------------------------------------------------------------


def test_capacity_counts_the_width() -> None:
    lab = Lab(10)
    lab.add("fits", list(range(12)), 3, width=3)  # 6 + 3 x 1
    with pytest.raises(CapacityError, match=r"needs 14 blocks of 2 tokens .* pool has 10; max_tokens of at most 3"):
        lab.add("does not", list(range(12)), 5, width=4)
    assert list(lab.scheduler.requests) == ["fits"]
    lab.run()


def test_no_watermark_without_running_requests() -> None:
    """A request as large as the pool would wait for ever."""
    lab = Lab(4, watermark=2)
    lab.add("A", [1, 2, 3, 4, 5, 6], 3)
    lab.run()
    lab = Lab(4, watermark=2, host=4, policy=SWAP)
    request = lab.add("A", [1, 2, 3, 4, 5, 6], 3)
    lab.step()
    throw_out(lab, request)
    assert request.status is Status.SWAPPED
    lab.run()


def test_the_watermark_is_left_for_running_requests() -> None:
    for watermark, comes in ((3, True), (4, False)):
        lab = Lab(8, watermark=watermark)
        lab.add("A", [1, 2, 3, 4], 4)
        b = lab.add("B", [5, 6, 7, 8, 9], 2)
        lab.plan()
        assert (b.status is Status.RUNNING) == comes
        if not comes:  # 6 are free, 4 of them reserved by the watermark
            assert lab.emitted(ev.Waiting) == [ev.Waiting("B", "blocks", 3, 2, 0)]
        lab.run()


def test_the_watermark_applies_to_swap_in_too() -> None:
    for watermark, comes in ((1, True), (2, False)):
        lab = Lab(8, host=8, watermark=watermark, policy=SWAP)
        lab.add("A", [1, 2, 3, 4], 8)
        b = lab.add("B", [5, 6], 2)
        lab.step()
        throw_out(lab, b)
        lab.scheduler.schedule()  # of 5 free blocks B needs 2, and 2 more as headroom
        assert (b.status is Status.RUNNING) == comes


def test_the_victim_is_the_last_running_request() -> None:
    """A request with a slice in the plan being made must not be preempted: two owners would write its blocks."""
    for policy in (RECOMPUTE, SWAP):
        lab = Lab(9, host=9, policy=policy)
        for i, name in enumerate("ABC"):
            lab.add(name, [10 * i, 1, 2, 3], 6)
        for _ in range(3):
            lab.step()
        plan = lab.plan()
        assert [e.request_id for e in lab.emitted(ev.Preempted)] == ["C"]
        assert [s.request.request_id for s in plan.sequences] == ["A", "B"]
        lab.run()


def test_a_step_that_preempts_admits_no_request() -> None:
    """B needs a block and preempts itself. The swapped group would fit into B's blocks and waits for the next step."""
    lab = Lab(6, host=6)  # a single sequence is recomputed, a group is swapped
    a = lab.add("A", [1, 2, 3, 4], 6)
    b = lab.add("B", [5, 6, 7, 8], 6)
    group = lab.add("G", [9], 2, width=2)
    lab.step()
    throw_out(lab, group)
    lab.step()
    lab.step()
    assert group.status is Status.SWAPPED and lab.pool.num_available == 0
    a.sequences[0].max_length = 7  # all its positions are planned, so B needs the block
    plan = lab.plan()
    assert b.status is Status.WAITING and lab.pool.num_available == 3
    assert group.status is Status.SWAPPED and not plan
    lab.abort("A")
    assert lab.plan().swap_ins and group.status is Status.RUNNING
    lab.run()


@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_self_preemption_counts_as_preemption(mode: PreemptionMode) -> None:
    """The last request preempts itself. The waiting one would fit now, and still waits."""
    lab = Lab(6, host=6, policy=Policy(mode=mode))
    lab.add("A", [1, 2, 3, 4], 6)
    b = lab.add("B", [5, 6, 7, 8], 6)
    for _ in range(3):
        lab.step()
    small = lab.add("small", [9], 1)
    lab.scheduler.running[0].sequences[0].max_length = 7  # all of A's positions are planned, so B needs the block
    plan = lab.plan()
    assert b.status is not Status.RUNNING and small.status is Status.WAITING
    assert not plan.rows
    assert [e.for_request for e in lab.emitted(ev.Preempted)] == ["B"]
    if mode is PreemptionMode.SWAP:
        assert lab.reasons("small") == ["behind a swapped request"]
