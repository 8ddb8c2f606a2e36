"""Corrupt swapped blocks: their request is recomputed, and so is every request that began with them."""

from __future__ import annotations

from octavo.core import events as ev
from octavo.core.plan import StepResult, TokenLogprobs
from octavo.core.request import Request, Status
from tests.core.lab import RECOMPUTE, SWAP, Lab, Planned, Worlds


def corrupt(lab: Lab, request: Request, index: int = 0) -> int:
    """Flip bits in the host block at this index of its table."""
    block = request.sequences[0].block_ids[index]
    assert block > 0
    lab.oracle.corrupt_block(block, 0)
    return block


def out_and_corrupt(lab: Lab, request: Request, index: int = 0) -> None:
    lab.preempt(request)
    corrupt(lab, request, index)


def test_a_corrupt_block_is_recomputed_and_counted(world: Worlds) -> None:
    lab = world(8, host=8, policy=SWAP)
    request = lab.add("A", [1, 2, 3, 4, 5], 6)
    lab.step()
    out_and_corrupt(lab, request)
    lab.run()
    assert lab.emitted(ev.Corrupt, ev.Recomputed) == [ev.Corrupt("A", 1), ev.Recomputed("A", 1, "corrupt")]
    assert lab.cache.stats().num_corrupt == lab.oracle.counts["blocks corrupt"] == 1


def returning(lab: Lab, request: Request) -> Planned:
    """Complete the plans in flight and return the plan that swaps the request in."""
    while True:
        plan = lab.plan()
        if plan.swap_ins:
            assert request in plan.swapped_requests
            return plan
        lab.land()


def test_tokens_computed_from_a_corrupt_block_are_dropped_in_flight_too(world: Worlds) -> None:
    lab = world(20, host=20, policy=SWAP)
    request = lab.add("A", [1, 2, 3], 9)
    lab.step()
    out_and_corrupt(lab, request)
    known = len(request.sequences[0].token_ids)
    returning(lab, request)
    lab.plan()
    assert request.num_pending == 2
    lab.land()
    assert request.status is Status.WAITING and not request.num_pending and not lab.cache.swap_space.num_used
    assert len(request.sequences[0].token_ids) == known
    lab.plan()  # it resumes while a void result of it is still in flight
    assert request.status is Status.RUNNING and request.num_pending == 1
    lab.land()
    assert len(request.sequences[0].token_ids) == known and request.num_pending == 1


def test_a_request_that_began_with_a_corrupt_block_is_recomputed_too(world: Worlds) -> None:
    """The plan that swaps A's block in seals it again, and B finds it before the corruption is reported."""
    lab = world(20, host=20, policy=SWAP)
    a = lab.add("A", [1, 2, 3, 4, 5], 9)
    c = lab.add("C", [7, 8], 9)
    lab.step()
    out_and_corrupt(lab, a)
    lab.cache.reset_prefix_cache()
    returning(lab, a)
    b = lab.add("B", [1, 2, 3, 4, 6], 5)
    lab.plan()
    assert b.num_cached_tokens == 4 and b.status is c.status is Status.RUNNING
    lab.land()
    assert a.status is b.status is Status.WAITING and c.status is Status.RUNNING
    assert [e.request_id for e in lab.emitted(ev.Corrupt)] == ["A"]  # type: ignore[attr-defined]
    assert [e.request_id for e in lab.emitted(ev.Recomputed)] == ["A", "B"]  # type: ignore[attr-defined]


def test_a_corrupt_block_leaves_the_index() -> None:
    lab = Lab(20, host=20, policy=SWAP)
    a = lab.add("A", [1, 2, 3, 4, 5], 9)
    lab.step()
    out_and_corrupt(lab, a)
    lab.cache.reset_prefix_cache()
    returning(lab, a)
    assert lab.pool.num_indexed == 3
    lab.abort("A")  # its blocks are cached
    lab.land()
    assert lab.pool.num_indexed == 0 and lab.cache.num_corrupt == 1
    assert not lab.emitted(ev.Corrupt)  # there is nothing left to recompute
    b = lab.add("B", [1, 2, 3, 4, 6], 5)
    lab.run()
    assert b.num_cached_tokens == 0


def test_a_request_with_intact_blocks_seals_again_and_continues() -> None:
    lab = Lab(20, host=20, policy=SWAP)
    a = lab.add("A", [1, 2, 3, 4, 5], 9)
    c = lab.add("C", [7, 8, 6], 9)
    lab.step()
    d = lab.add("D", [7, 8, 5], 9)
    lab.step()
    assert d.num_cached_tokens == 2  # its prefix block was sealed before
    out_and_corrupt(lab, a)
    returning(lab, a)
    while lab.flight:
        lab.land()
    assert c.status is Status.RUNNING and c.num_preemptions == 0
    lab.run()
    assert [e.request_id for e in lab.emitted(ev.Recomputed)] == ["A"]  # type: ignore[attr-defined]


def test_a_request_with_intact_blocks_does_not_seal_dropped_blocks(world: Worlds) -> None:
    """C seals a block and drops it from its attention window before A's corrupt block is reported."""
    lab = world(40, 1, host=40, rows=2, policy=SWAP, attention_window=2)
    a, c = lab.add("A", [1, 2, 3], 9), lab.add("C", [7, 8, 6], 12)
    lab.step()
    lab.step()
    out_and_corrupt(lab, a, -1)
    lab.scheduler.num_rows_taken += 1  # as if another request had the row: A is swapped in a step later
    first = lab.scheduler.schedule()
    lab.flight.append((first, lab.oracle.submit(first.plan)))
    lab.scheduler.num_rows_taken -= 1
    plan = lab.plan()
    assert a in plan.swapped_requests and first.sequences == c.sequences
    lab.land()
    lab.plan()
    seq = c.sequences[0]
    given_up = seq.seal_ids[: seq.num_dropped]
    assert given_up[-1] > plan.seal_mark
    lab.land()
    assert a.status is Status.WAITING and c.status is Status.RUNNING
    assert seq.seal_ids[: seq.num_dropped] == given_up and not lab.pool.seal_id[0]


def test_of_two_swapped_in_requests_only_the_corrupt_one_is_recomputed(world: Worlds) -> None:
    lab = world(20, host=20, policy=SWAP)
    a, b = lab.add("A", [1, 2, 3, 4, 5], 9), lab.add("B", [5, 6, 7, 8, 9], 9)
    lab.step()
    out_and_corrupt(lab, b, 0)
    corrupt(lab, b, 1)
    lab.preempt(a)
    plan = returning(lab, a)
    assert b in plan.swapped_requests
    lab.land()
    assert a.status is Status.RUNNING and b.status is Status.WAITING
    assert lab.emitted(ev.Corrupt) == [ev.Corrupt("B", 2)] and lab.cache.num_corrupt == 2


def test_a_corrupt_block_shared_by_samples_counts_once() -> None:
    lab = Lab(30, host=30, policy=SWAP)
    request = lab.add("A", [1, 2, 3, 4, 5], 9, width=3)
    lab.step()
    lab.step()
    out_and_corrupt(lab, request)
    lab.run()
    assert lab.emitted(ev.Corrupt) == [ev.Corrupt("A", 1)]
    assert lab.cache.num_corrupt == 1


def test_a_failed_step_after_a_corrupt_block_discards_results_once(world: Worlds) -> None:
    lab = world(20, host=20, policy=SWAP)
    a = lab.add("A", [1, 2, 3], 9)
    lab.step()
    out_and_corrupt(lab, a)
    returning(lab, a)
    lab.plan()
    lab.land()
    assert a.num_pending == 0
    lab.fail()
    assert a.num_pending == 0


def test_an_error_caused_by_a_corrupt_block_fails_no_request() -> None:
    lab = Lab(20, host=20, policy=SWAP)
    a = lab.add("A", [1, 2, 3], 9)
    lab.step()
    out_and_corrupt(lab, a)
    plan = returning(lab, a)
    result = lab.flight.popleft()[1].result()
    result.errors[plan.sequences.index(a.sequences[0])] = "NaN"
    assert lab.scheduler.update(plan.in_flight, result) == []
    lab.run()
    assert not a.error


def test_drop_removes_every_part_of_a_slices_result() -> None:
    entry = TokenLogprobs(0.0, 1, [], [])
    result = StepResult([[1], [2]], {0: "a", 1: "b"}, {0: [entry], 1: [entry]}, {0: (1, [entry])}, {0: [(1, 1)]})
    result.drop({0})
    assert result == StepResult([(), [2]], {1: "b"}, {1: [entry]}, {})


# -- window groups -----------------------------------------------------------------------------------------------------


def test_a_request_that_began_with_a_corrupt_window_block_is_recomputed_too(world: Worlds) -> None:
    """The full blocks that B finds are intact and older than the swap. The window's block under them is A's."""
    lab = world(40, host=40, policy=SWAP, windows=(3,))
    a = lab.add("A", [1, 2, 3, 4, 5], 9)
    c = lab.add("C", [7, 8], 9)
    lab.step()
    (window,) = a.sequences[0].windows
    old = window.block_ids[1]
    lab.preempt(a)
    lab.pool.unseal(old)
    lab.oracle.corrupt_block(window.block_ids[1], 0)
    plan = returning(lab, a)
    b, new = lab.add("B", [1, 2, 3, 4, 6], 5), window.block_ids[1]
    lab.plan()
    (seq,) = b.sequences
    assert b.num_cached_tokens == 4 and seq.windows[0].block_ids[1] == new
    assert max(lab.pool.seal_id[block] for block in seq.block_ids[:2]) <= plan.seal_mark
    lab.land()
    assert a.status is b.status is Status.WAITING and c.status is Status.RUNNING


def test_an_error_leaves_no_block_that_left_a_window_in_the_index() -> None:
    lab = Lab(40, windows=(4,))
    a = lab.add("A", [1, 2, 3, 4, 0], 20)
    while a.sequences[0].windows[0].num_dropped < 3:
        lab.step()
    assert lab.pool.num_cached >= 3
    lab.plan()
    assert lab.err(a) == ["A"]
    assert lab.pool.num_indexed == 0


def test_a_failed_step_recomputes_a_reader_of_its_window_blocks(world: Worlds) -> None:
    """The full blocks are those of C, from before the failed step; those of the window were computed again in it."""
    lab = world(60, windows=(3,), budget=5, policy=RECOMPUTE)
    c = lab.add("C", [1, 2, 3, 4, 5], 20)
    lab.step()
    for block in c.sequences[0].windows[0].block_ids[:2]:
        lab.pool.unseal(block)
    lab.add("A", [1, 2, 3, 4, 6], 9)
    lab.plan()
    lab.plan()
    b = lab.add("B", [1, 2, 3, 4, 7], 9)
    lab.plan()
    full_seals = [lab.pool.seal_id[block] for block in b.sequences[0].block_ids[:2]]
    assert b.num_cached_tokens == 4 and max(full_seals) <= lab.flight[0][0].seal_mark
    assert sorted(lab.fail()) == ["A", "B", "C"]
