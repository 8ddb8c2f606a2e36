"""Results: tokens go to their sequences, which fork, seal blocks and finish; errors end a request alone."""

from __future__ import annotations

import pytest

from octavo.core import events as ev
from octavo.core.policy import Policy
from octavo.core.request import Status
from octavo.params.sampling_params import SamplingParams
from tests.core.lab import RECOMPUTE, SWAP, Lab, Worlds, answer
from tests.proof import oracle as o

# -- Memory 2: sealing and the index -----------------------------------------------------------------------------------


def test_blocks_filled_by_decoding_are_sealed_too() -> None:
    lab = Lab(16)
    first = lab.add("turn 1", [1, 2, 3], 6)
    lab.run()
    output = first.finished_sequences[0].token_ids.tolist()
    again = lab.add("turn 2", [*output, 0, 0], 1)
    lab.run()
    assert again.num_cached_tokens == 8 // 2 * 2 == (len(output) - 1) // 2 * 2


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


# -- Scheduling 5: overlap and decode windows --------------------------------------------------------------------------


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
