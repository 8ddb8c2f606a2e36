"""The tokens of each expert, in tiles: on the GPU alone, so that graphs may replay it, and in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.experts import Routing
from octavo.kernels.triton.experts.tuning import SCAN_TOKENS, tile_tokens
from octavo.kernels.triton.launch import pdl_options, wait_for_predecessor

PAIRS_PER_LOAD = 2048


@dataclass(frozen=True, slots=True)
class TiledRouting(Routing):
    """A routing, and its pairs of a token and an expert in tiles of one expert each.

    order   [num_tokens * top_k] int32, pairs token * top_k + place: by expert, then by token
    tiles   [tiles, 3] int32: expert, first index into `order`, number of pairs, which may be 0
    tokens  the most pairs of a tile
    """

    order: Tensor
    tiles: Tensor
    tokens: int


def assign(routing: Routing, num_experts: int, tokens: int | None = None) -> TiledRouting:
    """Sort the pairs by expert and cut them into tiles; unless a small batch needs no tiles, or it was done before.

    tokens  the most pairs of a tile, a power of two; the default is `tile_tokens`
    """
    if isinstance(routing, TiledRouting):
        return routing
    experts = routing.experts
    num_tokens, top_k = experts.shape
    if tokens is None:
        tokens = tile_tokens(num_tokens, top_k, num_experts)
        if num_tokens <= SCAN_TOKENS:
            return TiledRouting(experts, routing.weights, experts.view(-1), experts[:0], tokens)
    num_pairs = num_tokens * top_k
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    # An expert's tiles begin at (pairs before) // tokens + expert: at most one of its tiles is empty.
    tiles = torch.empty(num_pairs // tokens + num_experts, 3, dtype=torch.int32, device=experts.device)
    _assign[(num_experts,)](
        experts, order, tiles, num_pairs, TOKENS=tokens, PAIRS=PAIRS_PER_LOAD, num_warps=8, **pdl_options(order.device)
    )
    return TiledRouting(experts, routing.weights, order, tiles, tokens)


@triton.jit(do_not_specialize=["num_pairs"])
def _assign(experts, order, tiles, num_pairs, TOKENS: tl.constexpr, PAIRS: tl.constexpr, USE_PDL: tl.constexpr):
    """One expert: count the pairs before its own, then list its own."""
    wait_for_predecessor(USE_PDL)
    expert = tl.program_id(0)
    index = tl.arange(0, PAIRS)
    before = tl.zeros([PAIRS], tl.int32)
    own = tl.zeros([PAIRS], tl.int32)
    for start in range(0, num_pairs, PAIRS):
        ids = tl.load(experts + start + index, mask=start + index < num_pairs, other=1 << 30)
        before += (ids < expert).to(tl.int32)
        own += (ids == expert).to(tl.int32)
    first = tl.sum(before, 0)
    end = first + tl.sum(own, 0)
    tile = first // TOKENS + expert
    end_tile = end // TOKENS + expert + 1
    for start in range(0, end_tile - tile, PAIRS):
        used = first + (start + index) * TOKENS
        entry = tiles + (tile + start + index) * 3
        valid = start + index < end_tile - tile
        tl.store(entry, expert, mask=valid)
        tl.store(entry + 1, used, mask=valid)
        tl.store(entry + 2, tl.minimum(tl.maximum(end - used, 0), TOKENS), mask=valid)
    for start in range(0, num_pairs, PAIRS):
        ids = tl.load(experts + start + index, mask=start + index < num_pairs, other=1 << 30)
        is_own = (ids == expert).to(tl.int32)
        place = first + tl.cumsum(is_own, 0) - 1
        tl.store(order + place, start + index, mask=is_own == 1)
        first += tl.sum(is_own, 0)
