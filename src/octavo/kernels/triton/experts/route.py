"""The choice of each token's experts, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.experts import Routing
from octavo.kernels.triton.experts.assign import assign
from octavo.kernels.triton.launch import pdl_options, wait_for_predecessor

TAKEN = tl.constexpr(-(1 << 31))
"""Below the keys of all numbers."""


def route(logits: Tensor, top_k: int, *, softmax_first: bool, renormalise: bool) -> Routing:
    """`reference.route`, and the tiles of the experts' products."""
    num_tokens, num_experts = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    experts = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route[(num_tokens,)](
            logits,
            experts,
            weights,
            logits.stride(0),
            num_experts,
            TOP_K=top_k,
            EXPERTS=triton.next_power_of_2(num_experts),
            SOFTMAX_FIRST=softmax_first,
            RENORMALISE=renormalise,
            num_warps=1,
            **pdl_options(logits.device),
        )
    return assign(Routing(experts, weights), num_experts)


@triton.jit
def _route(
    logits,
    experts,
    weights,
    stride,
    num_experts,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SOFTMAX_FIRST: tl.constexpr,
    RENORMALISE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One token, in one warp, which has instructions for the largest and the smallest of its integers."""
    wait_for_predecessor(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    valid = expert < num_experts
    own = tl.load(logits + token * stride + expert, mask=valid, other=-float("inf")).to(tl.float32)
    # Keys in the order of the numbers: 0.0 and -0.0 are equal, NaN is the largest.
    bits = tl.where(own == 0.0, 0.0, own).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = tl.where(own != own, 0x7FFFFFFF, keys)
    keys = tl.where(valid, keys, TAKEN)
    for _ in tl.static_range(TOP_K):
        largest = tl.max(keys, 0)
        chosen = tl.min(tl.where(keys == largest, expert, EXPERTS), 0)
        keys = tl.where(expert == chosen, TAKEN, keys)
    is_chosen = valid & (keys == TAKEN)
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    among = valid if SOFTMAX_FIRST else is_chosen
    largest = tl.max(tl.where(among, own, -float("inf")), 0)
    largest = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
    total = tl.sum(tl.where(among, tl.exp(own - largest), 0.0), 0)
    weight = tl.exp(own - (largest + tl.log(total)))
    if RENORMALISE:
        weight = weight / tl.sum(tl.where(is_chosen, weight, 0.0), 0)
    tl.store(experts + token * TOP_K + place, expert, mask=is_chosen)
    tl.store(weights + token * TOP_K + place, weight, mask=is_chosen)
