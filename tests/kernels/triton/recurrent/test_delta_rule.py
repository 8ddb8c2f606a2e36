"""The recurrence of a Gated DeltaNet against the reference, and bits that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.triton.recurrent.delta_chunks import MAX_CHUNK, STEPS
from tests.kernels.pool import relative_error
from tests.kernels.reference.test_recurrent import BATCHES, WIDTH, States, ranges
from tests.kernels.triton.recurrent.cases import CASES, DeltaCase, Slices

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
LENGTHS: Slices = [
    (STEPS, STEPS),
    (STEPS + 1, 40),
    (MAX_CHUNK + STEPS, 90),
    (MAX_CHUNK + STEPS + 1, MAX_CHUNK + STEPS + 1),
]
SHAPES = {  # heads of Q and V, sizes of their heads
    "groups": ((1, 3), (10, 7)),
    "columns": ((2, 2), (20, 40)),
    "whole rows": ((1, 1), (16, WIDTH)),
    "wide": ((1, 2), (130, 5)),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("name", "dtype"), [*CASES, ("lengths", torch.float32)], ids=str)
def test_recurrence_matches_the_reference(
    name: str, dtype: torch.dtype, shape: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    slices = BATCHES.get(name, LENGTHS)
    case = DeltaCase.random(sum(n for n, _ in slices), *shape, dtype)
    found, wanted = case.states(slices), case.states(slices)
    out, expected = case(found), case(wanted, reference.gated_delta_rule)
    assert out.dtype == dtype and relative_error(out, expected.double()) < TOLERANCE[dtype]
    for s, (count, _) in enumerate(slices):
        if count:
            assert relative_error(found.after(s), wanted.after(s).double()) < 2e-5


@pytest.mark.parametrize("slices", [BATCHES["decoding"], BATCHES["mixed"], LENGTHS], ids=str)
def test_bits_do_not_depend_on_the_batch(slices: Slices) -> None:
    case = DeltaCase.random(sum(n for n, _ in slices), (1, 2), (10, 7))
    together = case.states(slices)
    out = case(together)
    for s, part in enumerate(ranges(slices)):
        if slices[s][0]:
            alone = States([slices[s]], 5, case.state_size, torch.float32)
            if slices[s][0] < slices[s][1]:
                alone.store(0, case.states(slices).before[s])
            assert torch.equal(case.part(part)(alone), out[part])
            assert torch.equal(alone.after(0), together.after(s))


@pytest.mark.parametrize("cuts", [[64], [128, 192], [64, 192, 199], [1, 2, 9, 75], [30]], ids=str)
def test_slices_in_turn(cuts: list[int]) -> None:
    """Cut at multiples of 64, slices give the bits of the whole; cut elsewhere, nearly so."""
    num_tokens = 202
    case = DeltaCase.random(num_tokens, (1, 2), (10, 7))
    whole, parts = case.states([(num_tokens, num_tokens)]), case.states([(num_tokens, num_tokens)])
    expected, outs = case(whole), []
    for begin, end in zip([0, *cuts], [*cuts, num_tokens], strict=True):
        states = case.states([(end - begin, end)])
        states.pool.copy_(parts.pool)
        outs.append(case.part(slice(begin, end))(states))
        parts.pool.copy_(states.pool)
    assert relative_error(torch.cat(outs), expected.double()) < 2e-5
    assert relative_error(parts.after(0), whole.after(0).double()) < 2e-5
    if all(cut % MAX_CHUNK == 0 for cut in cuts):
        assert torch.equal(torch.cat(outs), expected) and torch.equal(parts.after(0), whole.after(0))


def test_more_sequences_than_a_search_reads_at_once() -> None:
    slices = [(70, 70), *[(1, 5)] * 258, (9, 30), (1, 1), (66, 70)]
    case = DeltaCase.random(sum(n for n, _ in slices), (1, 1), (4, 3))
    found, wanted = case.states(slices), case.states(slices)
    out, expected = case(found), case(wanted, reference.gated_delta_rule)
    assert relative_error(out, expected.double()) < 2e-5
    for s in range(len(slices)):
        assert relative_error(found.after(s), wanted.after(s).double()) < 2e-5


def test_a_sequence_that_is_not_finite_spoils_no_other() -> None:
    slices = BATCHES["mixed"]
    case = DeltaCase.random(sum(n for n, _ in slices), (1, 2), (10, 7))
    expected = case(case.states(slices))
    bad, states = ranges(slices)[1], case.states(slices)
    case.inputs[2][bad] = torch.nan
    out = case(states)
    assert bool(out[bad].isnan().all())
    out[bad] = expected[bad]
    assert torch.equal(out, expected)


def test_no_tokens() -> None:
    case = DeltaCase.random(0, (1, 2), (10, 7))
    assert case(case.states([(0, 3)])).shape == (0, 2, 7)
