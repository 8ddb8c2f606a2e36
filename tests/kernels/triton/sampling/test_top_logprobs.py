"""Log-probabilities and top tokens against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.row_state import MAX_LOGPROBS, NUM_LOGPROBS
from octavo.kernels.triton import ops as cuda
from octavo.kernels.triton.sampling.top_logprobs import token_logprobs_as_written
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.sampling.rows import make_state, to_device


@pytest.mark.parametrize("token_logprobs", [cuda.token_logprobs, token_logprobs_as_written])
@pytest.mark.parametrize("num_top", [0, 1, 20, 300, 5003])
def test_token_logprobs_match_the_reference(token_logprobs: Any, num_top: int) -> None:
    """Equal logits are ordered by token id, and -0 equals 0."""
    logits = torch.cat([torch.randn(3, 5003), torch.randn(2, 5003).round(), torch.zeros(1, 5003)])
    logits[5, ::3] = -0.0
    logits[1, 7:90] = -math.inf
    token_ids = torch.tensor([3, 50, 5002, 0, 9, 4000])
    actual = token_logprobs(logits.to(DEVICE), token_ids.to(DEVICE), num_top)
    for x, expected in zip(actual, reference.token_logprobs(logits, token_ids, num_top), strict=True):
        if x.is_floating_point():
            assert torch.allclose(x.cpu(), expected, atol=1e-5)
        else:
            assert torch.equal(x.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "num"), [(2, 2), (1024, 1), (3001, 8), (9003, 64), (300, 300)])
def test_packed_top_logprobs_match_the_reference(vocab: int, num: int, dtype: torch.dtype) -> None:
    """Several splits with equal logits, within a split and across; rows with non-finite logits are marked."""
    logits = 3 * torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[1] = logits[1].round()
    logits[2, :: max(1, vocab // 3)] = 9.0
    logits = logits.to(dtype)
    logits[3, vocab - 1] = math.nan
    logits[4, 0] = math.inf
    expected = reference.packed_top_logprobs(logits, num)
    found = cuda.packed_top_logprobs(logits.to(DEVICE), num).cpu()
    ids = slice(2, 2 + num)
    assert found[:, 1].tolist() == expected[:, 1].tolist() == [1, 1, 1, 0, 0]
    assert torch.equal(found[:3, ids], expected[:3, ids])
    for columns in (slice(0, 1), slice(2 + num, None)):
        values, expected_values = (x[:3, columns].contiguous().view(torch.float32) for x in (found, expected))
        assert torch.allclose(values, expected_values, atol=1e-5)
    assert (found[:, ids] >= 0).all() and (found[:, ids] < vocab).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [20, 2048, 9003])
def test_write_logprobs_matches_the_reference(vocab: int, dtype: torch.dtype) -> None:
    """Only the requested numbers are written, to the next column: none for rows that return no log-probabilities or
    have no token. One row has two samples; some logits are equal, also to the sampled token's."""
    logits = 3 * torch.randn(7, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[1] = logits[1].round()
    logits[2, ::3] = 30.0
    logits[5, 1:] = -0.0
    logits = logits.to(dtype)
    state, num_logprobs = make_state(), (20, 0, 3, 1, -1, 7, -1)
    state.sampling_params[:, NUM_LOGPROBS] = torch.tensor(num_logprobs)
    rows = torch.tensor([0, 1, 5, 2, 4, 0, 3])
    tokens = torch.tensor([4, vocab - 1, 6, 5, 3, vocab // 2, -1])
    step_counter = torch.tensor([1, 3])
    rings = [torch.full((3, 9, 2 + 2 * MAX_LOGPROBS), 77777, dtype=torch.int32) for _ in range(2)]
    reference.write_logprobs(state, rows, logits, tokens, rings[0], step_counter)
    args = [x.to(DEVICE) for x in (rows, logits, tokens)]
    actual = rings[1].to(DEVICE)
    cuda.write_logprobs(to_device(state), *args, actual, step_counter.to(DEVICE))
    found, expected = actual.cpu(), rings[0]
    bits = torch.zeros_like(found, dtype=torch.bool)
    bits[1, :6, 0] = bits[1, :6, 2 + MAX_LOGPROBS :] = True
    assert torch.equal(found[~bits], expected[~bits])
    assert torch.allclose(found[bits].view(torch.float32), expected[bits].view(torch.float32), atol=1e-5)
    num_written = (found != 77777).sum(-1)
    assert (
        num_written[1].tolist() == [42, 2, 16, 8, 0, 42, 0, 0, 0]
        and not num_written[0].any()
        and not num_written[2].any()
    )
    assert found[1, 2, 1] == 1 and found[1, 2, 2:5].tolist() == [0, 3, 6]  # the first of equals


def test_log_probabilities_of_any_number_of_rows_have_the_bits_of_written_ones() -> None:
    logits, tokens = (3 * torch.randn(40, 9003)).to(DEVICE), torch.randint(0, 9003, (40,)).to(DEVICE)
    state, rows = make_state(), torch.zeros(40, dtype=torch.int64)
    state.sampling_params[0, NUM_LOGPROBS] = 5
    ring = torch.zeros(1, 40, 2 + 2 * MAX_LOGPROBS, dtype=torch.int32).to(DEVICE)
    cuda.write_logprobs(to_device(state), rows.to(DEVICE), logits, tokens, ring, rows[:1].to(DEVICE))
    together = token_logprobs_as_written(logits, tokens, 5)
    found = [x.int() if x.dtype == torch.int64 else x.contiguous().view(torch.int32) for x in together]
    first = 2 + MAX_LOGPROBS
    for columns, part in zip((slice(0, 1), slice(1, 2), slice(2, 7), slice(first, first + 5)), found, strict=True):
        assert torch.equal(ring[0, :, columns], part.view(40, -1))
    for i in range(0, 40, 13):
        alone = token_logprobs_as_written(logits[i : i + 1], tokens[i : i + 1], 5)
        assert all(torch.equal(x, y[i : i + 1]) for x, y in zip(alone, together, strict=True))
