"""Chunks of a Gated DeltaNet: decays of any mix, and the inverse of triangles that are far from the identity."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.triton.recurrent.delta_chunks import DeltaInputs
from tests.kernels.pool import relative_error
from tests.kernels.triton.recurrent.cases import DeltaCase

NUM_TOKENS = 150


def check(decay: Tensor, *, alike: float = 1.0, beta: float | None = None) -> None:
    """decay [heads]; alike: how much of a key is not the same for all positions"""
    case = DeltaCase.random(NUM_TOKENS, (1, len(decay)), (12, 6))
    q, k, v, _, betas = case.inputs
    k = k[:1] + alike * (k - k[:1])
    betas = betas if beta is None else torch.full_like(betas, beta)
    case = DeltaCase((q, k, v, decay.expand(NUM_TOKENS, -1), betas))
    slices = [(NUM_TOKENS, NUM_TOKENS + 1)]
    found, wanted = case.states(slices), case.states(slices)
    wide = DeltaCase(tuple(x.double() for x in case.inputs))
    wanted.pool = wanted.pool.double()
    out, expected = case(found), wide(wanted, reference.gated_delta_rule)
    assert relative_error(out, expected) < 2e-5
    assert relative_error(found.after(0), wanted.after(0)) < 2e-5


@pytest.mark.parametrize("alike", [1.0, 1e-3, 0.0])
def test_keys_that_are_alike(alike: float) -> None:
    """Nothing is forgotten and each key is replaced whole: all numbers below the diagonal are nearly one."""
    check(torch.tensor([0.0, -1e-3]), alike=alike, beta=1.0)


def test_decays_of_any_size() -> None:
    check(-torch.tensor([0.0, 1e-3, 1.0, 30.0, 900.0, torch.inf]))


@pytest.mark.parametrize(("dtype", "key_dim", "chunk"), [
    (torch.bfloat16, 128, 64), (torch.bfloat16, 256, 32), (torch.float32, 64, 64), (torch.float32, 128, 32),
    (torch.float32, 1024, 16),
])  # fmt: skip
def test_wide_keys_have_shorter_chunks(dtype: torch.dtype, key_dim: int, chunk: int) -> None:
    case = DeltaCase.random(2, (1, 1), (key_dim, 4), dtype)
    states = case.states([(2, 2)])
    inputs = DeltaInputs(*case.inputs, states.pool, 0, states.batch, case.inputs[2])
    assert inputs.chunk == chunk
