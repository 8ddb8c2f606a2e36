"""Tiles of one expert each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.kernels.reference import Routing
from octavo.kernels.triton.experts import assign as module
from octavo.kernels.triton.experts.assign import TiledRouting, assign
from octavo.kernels.triton.experts.tuning import SCAN_TOKENS, tile_tokens
from tests.kernels.triton.device import DEVICE


def random_routing(num_tokens: int, top_k: int, experts: Tensor) -> Routing:
    """Each token has some of these experts."""
    order = torch.rand(num_tokens, len(experts)).argsort(1)[:, :top_k].sort(1).values
    chosen = experts[order].int().to(DEVICE)
    return Routing(chosen, torch.rand(num_tokens, top_k, device=DEVICE))


def check(routing: Routing, num_experts: int, tokens: int) -> TiledRouting:
    """Every pair is in one tile of its expert, in order; no tile has too many."""
    tiled = assign(routing, num_experts, tokens)
    ids = routing.experts.flatten().cpu()
    order = ids.argsort(stable=True)
    assert torch.equal(tiled.order.cpu().long(), order)
    next_pair = 0
    for expert, first, num in tiled.tiles.tolist():
        assert 0 <= expert < num_experts and 0 <= num <= tokens
        if num:
            assert first == next_pair and bool((ids[order[first : first + num]] == expert).all())
            next_pair += num
    assert next_pair == len(ids)
    return tiled


@pytest.mark.parametrize("pairs_per_load", [64, 2048])
@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("num_tokens", [1, 17, 200])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (5, 2), (12, 8)])
def test_every_pair_is_in_a_tile_of_its_expert(
    num_tokens: int, num_experts: int, top_k: int, tokens: int, pairs_per_load: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAIRS_PER_LOAD", pairs_per_load)
    check(random_routing(num_tokens, top_k, torch.arange(num_experts)), num_experts, tokens)


@pytest.mark.parametrize("used", [[0], [8], [2, 3, 7]])
def test_experts_without_tokens(used: list[int]) -> None:
    check(random_routing(100, 1, torch.tensor(used)), 9, 16)


@pytest.mark.parametrize("per_expert", [15, 16, 17, 32])
def test_tiles_that_are_full_are_followed_by_an_empty_one_at_most(per_expert: int) -> None:
    experts = torch.arange(6).repeat_interleave(per_expert)[:, None].int().to(DEVICE)
    tiled = check(Routing(experts, experts.float()), 6, 16)
    assert int((tiled.tiles[:, 2] == 0).sum()) <= 6


def test_a_small_batch_needs_no_tiles_and_tiles_are_made_once() -> None:
    small = assign(random_routing(SCAN_TOKENS, 2, torch.arange(8)), 8)
    assert len(small.tiles) == 0 and small.tokens == SCAN_TOKENS
    large = assign(random_routing(SCAN_TOKENS + 1, 2, torch.arange(8)), 8)
    assert len(large.tiles) > 0 and assign(large, 8) is large


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 16), (1, 16), (17, 32), (64, 64), (65, 16), (256, 32), (300, 64), (9999, 128)]
)
def test_the_size_of_tiles(num_tokens: int, expected: int) -> None:
    assert tile_tokens(num_tokens, 8, 128) == expected
