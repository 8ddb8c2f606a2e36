"""Mixtures of experts: each token passes through the few gated MLPs that its router chooses (arXiv 1701.06538)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.groups import Groups, PackedExperts
from octavo.kernels.reference.norms import accumulation_dtype


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each token.

    experts  [num_tokens, top_k] int32, ascending in each row
    weights  [num_tokens, top_k] float32, the factors of their outputs
    """

    experts: Tensor
    weights: Tensor


class ExpertGate(NamedTuple):
    """What an expert computes between its two products, from its gate and up.

    silu    silu(gate) * up
    gelu    gelu(gate) * up, gelu by its tanh approximation
    swiglu  (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up within it (gpt-oss)
    """

    name: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0


def route(logits: Tensor, top_k: int, *, softmax_first: bool, renormalise: bool) -> Routing:
    """The top_k experts with the largest logits; of equal logits, the lower id wins.

    logits         [num_tokens, num_experts] float32; NaN counts as the largest, and makes its row's weights NaN
    softmax_first  the weights are a softmax over all experts (Mixtral, Qwen3), not over the chosen (gpt-oss)
    renormalise    they are divided by their sum
    """
    logits = logits.float()
    chosen = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    experts = chosen.sort(dim=-1).values
    own = logits.gather(1, experts)
    weights = (own - (logits if softmax_first else own).logsumexp(-1, keepdim=True)).exp()
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(experts.int(), weights)


def experts_in(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, num_experts: int, gate: ExpertGate
) -> Tensor:
    """gate(x @ w.T + b) by each of a token's experts -> [num_tokens, top_k, inner], rounded once to x's dtype.

    x       [num_tokens, hidden_size]
    weight  [num_experts * 2 * inner, hidden_size]: an expert's rows of gate, then those of up
    bias    [num_experts * 2 * inner]
    """
    weight = weight.view(num_experts, -1, x.shape[1])
    out = x.new_empty(*routing.experts.shape, weight.shape[1] // 2)
    for tokens, places, w, b in _by_expert(routing, weight, bias):
        gate_up = F.linear(x[tokens].to(w.dtype), w, b)
        out[tokens, places] = gated(gate_up, gate).to(x.dtype)
    return out


def experts_out(h: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, num_experts: int) -> Tensor:
    """The sum of weights * (h @ w.T + b) over a token's experts, in their order -> [num_tokens, hidden_size].

    The sum is rounded once, to h's dtype.

    h       [num_tokens, top_k, inner], of `experts_in`
    weight  [num_experts * hidden_size, inner]
    bias    [num_experts * hidden_size]
    """
    weight = weight.view(num_experts, -1, h.shape[2])
    terms = h.new_empty(*routing.experts.shape, weight.shape[1], dtype=accumulation_dtype(h.dtype))
    for tokens, places, w, b in _by_expert(routing, weight, bias):
        terms[tokens, places] = F.linear(h[tokens, places].to(w.dtype), w, b)
    total = torch.zeros_like(terms[:, 0])
    for place in range(terms.shape[1]):
        total += routing.weights[:, place, None] * terms[:, place]
    return total.to(h.dtype)


def pack_experts(groups: Groups, num_experts: int) -> PackedExperts | None:
    """Quantised weights [num_experts * num_out, num_in] in the layout of their products; None if there is none."""
    return None


def _by_expert(
    routing: Routing, weight: Tensor, bias: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Of each expert in use: its tokens, its places in their rows, its weight and bias in `accumulation_dtype`."""
    dtype = accumulation_dtype(weight.dtype)
    biases = None if bias is None else bias.view(len(weight), -1)
    for expert in sorted(set(routing.experts.flatten().tolist())):
        tokens, places = (routing.experts == expert).nonzero(as_tuple=True)
        yield tokens, places, weight[expert].to(dtype), None if biases is None else biases[expert].to(dtype)


def gated(gate_up: Tensor, kind: ExpertGate) -> Tensor:
    """See `ExpertGate`; gate_up [num_tokens, 2 * inner] in `accumulation_dtype` -> [num_tokens, inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if kind.name == "silu":
        return F.silu(gate) * up
    if kind.name == "gelu":
        return F.gelu(gate, approximate="tanh") * up
    assert kind.name == "swiglu", kind
    gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    return (up + 1) * gate * torch.sigmoid(kind.alpha * gate)
