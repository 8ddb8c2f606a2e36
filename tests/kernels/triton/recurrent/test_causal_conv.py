"""The convolution of recurrent layers against the reference."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.triton import ops as cuda
from octavo.kernels.triton.recurrent.causal_conv import CHANNELS
from tests.kernels.pool import relative_error
from tests.kernels.reference.test_recurrent import BATCHES, States, ranges
from tests.kernels.triton.recurrent.cases import CASES, Slices, run

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def make_states(slices: Slices, first: int, size: int) -> States:
    torch.manual_seed(7)
    return States(slices, first, size, torch.float32)


@pytest.mark.parametrize(("size", "num_channels", "first"), [(1, 6, 40), (2, CHANNELS + 9, 3), (4, 37, 74), (7, 74, 0)])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_convolution_matches_the_reference(
    name: str, dtype: torch.dtype, size: int, num_channels: int, first: int
) -> None:
    """With rows of a state in one block and in several. The new states are the inputs themselves."""
    slices = BATCHES[name]
    num_tokens = sum(n for n, _ in slices)
    x = torch.randn(num_tokens, num_channels + 3).to(dtype)[:, :num_channels]
    inputs = x, torch.randn(num_channels, size)
    found, wanted = (make_states(slices, first, (size - 1) * num_channels) for _ in range(2))
    out, expected = run(cuda.causal_conv, inputs, found), run(reference.causal_conv, inputs, wanted)
    assert out.dtype == dtype and relative_error(out, expected.double()) < TOLERANCE[dtype]
    for s, (count, _) in enumerate(slices):
        if count:
            assert torch.equal(found.after(s), wanted.after(s))


def test_a_tokens_bits_do_not_depend_on_the_batch() -> None:
    """Alone, in a pass of single tokens, and beside a prompt."""
    slices, num_channels, size = [(1, 9), (70, 200), (1, 1), (1, 30)], 37, 4
    x, weight = torch.randn(73, num_channels), torch.randn(num_channels, size)
    together = make_states(slices, 0, (size - 1) * num_channels)
    out = run(cuda.causal_conv, (x, weight), together)
    for chosen in ([0], [3], [0, 2, 3]):
        states = make_states(slices, 0, (size - 1) * num_channels)
        some = States([slices[s] for s in chosen], 0, states.size, torch.float32)
        parts = [ranges(slices)[s] for s in chosen]
        for i, s in enumerate(chosen):
            if slices[s][1] > 1:
                some.store(i, states.before[s])
        found = run(cuda.causal_conv, (torch.cat([x[part] for part in parts]), weight), some)
        assert torch.equal(found, torch.cat([out[part] for part in parts]))
        assert all(torch.equal(some.after(i), together.after(s)) for i, s in enumerate(chosen))


def test_more_sequences_than_a_search_reads_at_once() -> None:
    slices, num_channels, size = [(70, 70), *[(1, 5)] * 258, (2, 30), (1, 1), (66, 70)], 5, 3
    inputs = torch.randn(sum(n for n, _ in slices), num_channels), torch.randn(num_channels, size)
    found, wanted = (make_states(slices, 0, (size - 1) * num_channels) for _ in range(2))
    out, expected = run(cuda.causal_conv, inputs, found), run(reference.causal_conv, inputs, wanted)
    assert relative_error(out, expected.double()) < 2e-6
    assert all(torch.equal(found.after(s), wanted.after(s)) for s in range(len(slices)))


def test_no_tokens() -> None:
    states = make_states([(0, 3)], 0, 12)
    assert run(cuda.causal_conv, (torch.randn(0, 4), torch.randn(4, 4)), states).shape == (0, 4)
