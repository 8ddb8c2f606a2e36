"""The products of experts against the reference, and bits that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.reference import ExpertGate, Routing
from octavo.kernels.triton import ops as cuda
from octavo.kernels.triton.experts.assign import assign
from octavo.kernels.triton.experts.expert_products import product_in, product_out
from octavo.kernels.triton.experts.tuning import ExpertTuning
from tests.kernels.pool import relative_error
from tests.kernels.triton.device import DEVICE, DTYPES

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
GATES = [ExpertGate("silu"), ExpertGate("gelu"), ExpertGate("swiglu", alpha=1.5, limit=0.8)]


class Layer:
    """Random weights of one layer."""

    def __init__(self, num_experts: int, hidden: int, inner: int, dtype: torch.dtype = torch.float32) -> None:
        def make(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=DEVICE) * scale).to(dtype)

        self.num_experts, self.hidden, self.dtype = num_experts, hidden, dtype
        self.gate_up = make(num_experts * 2 * inner, hidden, scale=hidden**-0.5)
        self.down = make(num_experts * hidden, inner, scale=inner**-0.5)
        self.biases: tuple[Tensor | None, Tensor | None] = make(len(self.gate_up)), make(len(self.down))

    def tokens(self, num: int) -> Tensor:
        return torch.randn(num, self.hidden, device=DEVICE).to(self.dtype)

    def route(self, num_tokens: int, top_k: int) -> Routing:
        logits = torch.randn(num_tokens, self.num_experts, device=DEVICE)
        return reference.route(logits, top_k, softmax_first=True, renormalise=True)

    def __call__(self, x: Tensor, routing: Routing, kind: ExpertGate = GATES[0]) -> tuple[Tensor, Tensor]:
        h = cuda.experts_in(x, self.gate_up, self.biases[0], routing, self.num_experts, kind)
        return h, cuda.experts_out(h, self.down, self.biases[1], routing, self.num_experts)

    def check(self, num_tokens: int, top_k: int, kind: ExpertGate = GATES[0], routing: Routing | None = None) -> None:
        x, routing = self.tokens(num_tokens), routing or self.route(num_tokens, top_k)
        h, y = self(x, routing, kind)
        assert h.dtype == y.dtype == self.dtype and y.shape == x.shape
        biases = [None if bias is None else bias.double() for bias in self.biases]
        expected = reference.experts_in(x.double(), self.gate_up.double(), biases[0], routing, self.num_experts, kind)
        assert h.shape == expected.shape
        if num_tokens:
            assert relative_error(h, expected) < TOLERANCE[self.dtype]
            expected = reference.experts_out(h.double(), self.down.double(), biases[1], routing, self.num_experts)
            assert relative_error(y, expected) < TOLERANCE[self.dtype]


@pytest.mark.parametrize("kind", GATES, ids=[kind.name for kind in GATES])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 17, 70])
def test_experts_match_the_reference(num_tokens: int, dtype: torch.dtype, kind: ExpertGate) -> None:
    Layer(5, 72, 24, dtype).check(num_tokens, 2, kind)


@pytest.mark.parametrize(("hidden", "inner"), [(40, 20), (128, 96), (72, 130)])
@pytest.mark.parametrize("num_tokens", [3, 70])
def test_sizes_that_end_within_a_tile(hidden: int, inner: int, num_tokens: int) -> None:
    layer = Layer(5, hidden, inner, torch.float16)
    layer.biases = None, None
    layer.check(num_tokens, 2)


@pytest.mark.parametrize("top_k", range(1, 9))
@pytest.mark.parametrize("num_tokens", [2, 66])
def test_any_number_of_experts_a_token(top_k: int, num_tokens: int) -> None:
    Layer(8, 40, 24).check(num_tokens, top_k)


@pytest.mark.parametrize(("num_experts", "num_tokens"), [(1, 1), (1, 70), (128, 1), (128, 17), (128, 65)])
def test_any_number_of_experts(num_experts: int, num_tokens: int) -> None:
    """Most experts have no token; a batch may have more pairs than experts."""
    Layer(num_experts, 40, 24).check(num_tokens, min(num_experts, 8))


@pytest.mark.parametrize("num_tokens", [40, 150])
def test_all_tokens_choose_one_expert(num_tokens: int) -> None:
    experts = torch.full((num_tokens, 1), 3, dtype=torch.int32, device=DEVICE)
    Layer(4, 40, 24).check(num_tokens, 1, routing=Routing(experts, torch.rand(num_tokens, 1, device=DEVICE)))


def test_rows_with_a_stride() -> None:
    layer = Layer(5, 40, 24)
    x, routing = torch.randn(6, 48, device=DEVICE)[:, :40], layer.route(6, 2)
    assert torch.equal(layer(x, routing)[1], layer(x.contiguous(), routing)[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tokens_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """Batches whose programs find their tokens, and others that have tiles, of any size."""
    layer = Layer(3, 104, 40, dtype)
    x, routing = layer.tokens(70), layer.route(70, 2)
    h, y = layer(x, routing)
    for tokens in (slice(0, 1), slice(0, 3), slice(69, 70), slice(10, 40), slice(10, 70)):
        part = layer(x[tokens], Routing(routing.experts[tokens], routing.weights[tokens]))
        assert torch.equal(part[0], h[tokens]) and torch.equal(part[1], y[tokens])
    for tile in (16, 32, 64, 128):
        assert all(map(torch.equal, layer(x, assign(routing, 3, tile)), (h, y)))


def test_a_token_that_is_not_finite_spoils_no_other() -> None:
    layer = Layer(4, 40, 24)
    x, routing = layer.tokens(20), layer.route(20, 2)
    expected = layer(x, routing)[1]
    x[7] = torch.nan
    actual = layer(x, routing)[1]
    assert bool(actual[7].isnan().all())
    actual[7] = expected[7]
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("tuning", [ExpertTuning(16, 32, 4, 2), ExpertTuning(64, 16, 4, 1, tma=True)], ids=str)
def test_other_tunings_match_the_default(tuning: ExpertTuning) -> None:
    layer = Layer(5, 72, 40)
    x, routing = layer.tokens(9), layer.route(9, 2)
    h, y = layer(x, routing)
    other = product_in(x, layer.gate_up, layer.biases[0], routing, 5, GATES[0], tuning)
    assert relative_error(other, h.double()) < TOLERANCE[torch.float32]
    other = product_out(h, layer.down, layer.biases[1], routing, 5, tuning)
    assert relative_error(other, y.double()) < TOLERANCE[torch.float32]
