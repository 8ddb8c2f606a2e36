"""Mixtures of experts of the reference and the CPU, against loops over tokens and their experts in float64."""

from __future__ import annotations

import itertools
import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from octavo.kernels.reference import ExpertGate, Routing
from tests.kernels.pool import BOTH, relative_error

GATES = [ExpertGate("silu"), ExpertGate("gelu"), ExpertGate("swiglu", alpha=1.5, limit=0.8)]
HIDDEN, INNER = 40, 24


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def naive_route(row: list[float], top_k: int, softmax_first: bool, renormalise: bool) -> list[tuple[int, float]]:
    """Ascending pairs of an expert and its weight."""
    chosen = sorted(sorted(range(len(row)), key=lambda e: (-row[e], e))[:top_k])
    total = sum(math.exp(row[e]) for e in (range(len(row)) if softmax_first else chosen))
    weights = [math.exp(row[e]) / total for e in chosen]
    return [(e, w / sum(weights) if renormalise else w) for e, w in zip(chosen, weights, strict=True)]


@BOTH
@pytest.mark.parametrize(("softmax_first", "renormalise"), [(True, True), (True, False), (False, True), (False, False)])
def test_routes(ops: ModuleType, softmax_first: bool, renormalise: bool) -> None:
    logits = torch.randn(50, 12) * 3
    logits[::2] = logits[::2].round()  # ties
    logits[4] = 1.5
    for top_k in range(1, 9):
        routing = ops.route(logits, top_k, softmax_first=softmax_first, renormalise=renormalise)
        assert routing.experts.dtype == torch.int32 and routing.weights.dtype == torch.float32
        for token, row in enumerate(logits.tolist()):
            expected = naive_route(row, top_k, softmax_first, renormalise)
            assert routing.experts[token].tolist() == [expert for expert, _ in expected]
            assert routing.weights[token].tolist() == pytest.approx([weight for _, weight in expected], rel=2e-6)
    assert routing.experts[4].tolist() == list(range(8))  # all logits are equal


@BOTH
@pytest.mark.parametrize("softmax_first", [True, False])
def test_logits_that_are_not_finite(ops: ModuleType, softmax_first: bool) -> None:
    values = [math.nan, math.inf, -math.inf, 0.0, 1.0]
    logits = torch.tensor(list(itertools.product(values, repeat=4)))
    routing = ops.route(logits, 2, softmax_first=softmax_first, renormalise=False)
    assert bool((routing.experts[:, 0] < routing.experts[:, 1]).all())
    assert bool((routing.experts[:, 0] >= 0).all()) and bool((routing.experts[:, 1] < 4).all())
    assert bool(routing.weights[logits.isnan().any(1)].isnan().all())
    assert bool(routing.weights[(logits > -math.inf).all(1) & (logits < math.inf).all(1)].isfinite().all())


def naive_gate(gate: Tensor, up: Tensor, kind: ExpertGate) -> Tensor:
    if kind.name == "silu":
        return gate / (1 + (-gate).exp()) * up
    if kind.name == "gelu":
        return gate * (1 + ((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh()) / 2 * up
    gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    gated: Tensor = (up + 1) * gate / (1 + (-kind.alpha * gate).exp())
    return gated


def naive_in(x: Tensor, weight: Tensor, bias: Tensor, routing: Routing, num_experts: int, kind: ExpertGate) -> Tensor:
    w, b = weight.double().view(num_experts, 2, -1, x.shape[1]), bias.double().view(num_experts, 2, -1)
    out = torch.empty(*routing.experts.shape, w.shape[2], dtype=torch.float64)
    for token, place in itertools.product(*map(range, routing.experts.shape)):
        expert = int(routing.experts[token, place])
        gate, up = w[expert] @ x[token].double() + b[expert]
        out[token, place] = naive_gate(gate, up, kind)
    return out


def naive_out(h: Tensor, weight: Tensor, bias: Tensor, routing: Routing, num_experts: int) -> Tensor:
    w, b = weight.double().view(num_experts, -1, h.shape[2]), bias.double().view(num_experts, -1)
    out = torch.zeros(len(h), w.shape[1], dtype=torch.float64)
    for token, place in itertools.product(*map(range, routing.experts.shape)):
        expert = int(routing.experts[token, place])
        out[token] += float(routing.weights[token, place]) * (w[expert] @ h[token, place].double() + b[expert])
    return out


def check(ops: ModuleType, routing: Routing, num_experts: int, kind: ExpertGate, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    num_tokens, top_k = routing.experts.shape
    x = torch.randn(num_tokens, HIDDEN).to(dtype)
    gate_up, down = torch.randn(num_experts * 2 * INNER, HIDDEN) / 6, torch.randn(num_experts * HIDDEN, INNER) / 5
    gate_up, down = gate_up.to(dtype), down.to(dtype)
    biases = torch.randn(len(gate_up)).to(dtype), torch.randn(len(down)).to(dtype)
    h = ops.experts_in(x, gate_up, biases[0], routing, num_experts, kind)
    out = ops.experts_out(h, down, biases[1], routing, num_experts)
    assert h.shape == (num_tokens, top_k, INNER) and out.shape == x.shape and h.dtype == out.dtype == dtype
    if not num_tokens:
        return
    assert relative_error(h, naive_in(x, gate_up, biases[0], routing, num_experts, kind)) < tolerance
    assert relative_error(out, naive_out(h, down, biases[1], routing, num_experts)) < tolerance
    # without biases
    assert torch.equal(
        ops.experts_in(x, gate_up, None, routing, num_experts, kind),
        ops.experts_in(x, gate_up, torch.zeros_like(biases[0]), routing, num_experts, kind),
    )
    zeros = torch.zeros_like(biases[1])
    plain = ops.experts_out(h, down, None, routing, num_experts)
    assert torch.equal(plain, ops.experts_out(h, down, zeros, routing, num_experts))


@BOTH
@pytest.mark.parametrize("kind", GATES, ids=[kind.name for kind in GATES])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 23])
def test_experts(ops: ModuleType, kind: ExpertGate, dtype: torch.dtype, num_tokens: int) -> None:
    """23 tokens with 2 of 9 experts, the last of which none chooses."""
    logits = torch.randn(num_tokens, 9)
    logits[:, 8] = -100
    check(ops, ops.route(logits, 2, softmax_first=True, renormalise=True), 9, kind, dtype)


@BOTH
@pytest.mark.parametrize("top_k", range(1, 9))
def test_any_number_of_experts_a_token(ops: ModuleType, top_k: int) -> None:
    routing = ops.route(torch.randn(5, 8), top_k, softmax_first=True, renormalise=False)
    check(ops, routing, 8, GATES[0], torch.float32)


@BOTH
def test_all_tokens_choose_one_expert(ops: ModuleType) -> None:
    experts = torch.full((40, 1), 3, dtype=torch.int32)
    check(ops, Routing(experts, torch.rand(40, 1)), 4, GATES[0], torch.float32)
