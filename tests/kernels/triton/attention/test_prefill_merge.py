"""The merge of prefill tiles whose keys are split. tests/gpu also runs it after Hopper's kernel."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.kernels.triton.attention.prefill_merge import merge_parts
from tests.kernels.triton.device import DEVICE, close


@pytest.mark.parametrize("with_sinks", [False, True])
def test_parts_of_a_tile_are_weighted_by_their_lse(with_sinks: bool) -> None:
    """4 programs and 1 tile of queries with 9 tiles of keys give 4 parts; in one, some rows see no key."""
    num_parts, heads, head_dim, num_queries = 4, 2, 40, 3
    tiles = torch.tensor([[0, 1, num_queries, 70]], dtype=torch.int32, device=DEVICE)
    count = torch.ones(1, dtype=torch.int32, device=DEVICE)
    partial = torch.randn(num_parts, 8, 64, device=DEVICE)
    part_lses = torch.randn(num_parts, 8, device=DEVICE)
    part_lses[1, :4] = -1e30
    out, lse = torch.zeros(5, heads, head_dim, device=DEVICE), torch.zeros(5, heads, device=DEVICE)
    sinks = torch.tensor([-1.0, 2.0], device=DEVICE)
    merge_parts[(2, 8)](
        out, lse, sinks, partial, part_lses, tiles, count, num_parts,
        NUM_HEADS=heads, PACKED=heads, HEAD_DIM=head_dim, HEAD_DIM_PADDED=64, KEYS=8, ROWS=8, PARTS_PER_STEP=2,
        WITH_LSE=True, WITH_SINKS=with_sinks,
    )  # fmt: skip
    scores = part_lses.double() * math.log(2)
    if with_sinks:  # row r is head r % 2 of query r // 2
        scores = torch.cat((scores, sinks.double().repeat(4)[None]))
        partial = torch.cat((partial, torch.zeros_like(partial[:1])))
    weights = scores.softmax(0)
    rows = (weights[:, :, None] * partial.double()).sum(0)[: num_queries * heads, :head_dim]
    expected = torch.zeros(5, heads, head_dim, dtype=torch.float64, device=DEVICE)
    expected[1:4] = rows.view(num_queries, heads, head_dim)
    assert close(out, expected)
    total = scores.logsumexp(0)[: num_queries * heads]
    assert close(lse[1:4], total.view(num_queries, heads))
