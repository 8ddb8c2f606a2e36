"""The choice of experts against the reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.triton import ops as cuda
from tests.kernels.triton.device import DEVICE


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (5, 2), (8, 8), (60, 4), (128, 8), (512, 10)])
@pytest.mark.parametrize(("softmax_first", "renormalise"), [(True, True), (True, False), (False, True), (False, False)])
def test_routes_match_the_reference(num_experts: int, top_k: int, softmax_first: bool, renormalise: bool) -> None:
    logits = torch.randn(20, num_experts, device=DEVICE) * 3
    logits[::2] = logits[::2].round()  # ties, of 0.0 and -0.0 as well
    logits[4] = 1.5
    options = {"softmax_first": softmax_first, "renormalise": renormalise}
    actual, expected = cuda.route(logits, top_k, **options), reference.route(logits, top_k, **options)
    assert torch.equal(actual.experts, expected.experts) and actual.experts.dtype == torch.int32
    torch.testing.assert_close(actual.weights, expected.weights, rtol=2e-6, atol=0)
    assert actual.experts[4].tolist() == list(range(top_k))  # all logits are equal


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("softmax_first", [True, False])
def test_logits_that_are_not_finite(softmax_first: bool) -> None:
    """NaN counts as the largest, whatever its sign."""
    values = [math.nan, math.inf, -math.inf, 0.0, 1.0]
    logits = torch.tensor(list(itertools.product(values, repeat=3)), device=DEVICE)
    signs = torch.tensor([1.0, -1.0, 1.0], device=DEVICE)
    logits = torch.where(logits.isnan(), logits.copysign(signs), logits)
    options = {"softmax_first": softmax_first, "renormalise": False}
    # A GPU sorts NaN by their signs.
    actual, expected = cuda.route(logits, 2, **options), reference.route(logits.cpu(), 2, **options)
    assert torch.equal(actual.experts.cpu(), expected.experts)
    torch.testing.assert_close(actual.weights.cpu(), expected.weights, rtol=2e-6, atol=0, equal_nan=True)


def test_a_tokens_experts_and_weights_do_not_depend_on_the_others() -> None:
    logits = torch.randn(70, 128, device=DEVICE)
    together = cuda.route(logits, 8, softmax_first=True, renormalise=True)
    for token in (0, 33, 69):
        alone = cuda.route(logits[token : token + 1], 8, softmax_first=True, renormalise=True)
        assert torch.equal(alone.experts[0], together.experts[token])
        assert torch.equal(alone.weights[0], together.weights[token])


def test_no_tokens() -> None:
    routing = cuda.route(torch.empty(0, 8, device=DEVICE), 2, softmax_first=True, renormalise=True)
    assert routing.experts.shape == routing.weights.shape == (0, 2)
