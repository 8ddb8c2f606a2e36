"""Query tiles, computed on the device."""

from __future__ import annotations

import math
import random

import pytest

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.query_tiles import query_tiles
from tests.kernels.triton.device import on_device


@pytest.mark.parametrize("skip_single", [False, True])
@pytest.mark.parametrize("queries", [4, 21])
def test_tiles_are_ordered_by_keys_and_cover_all_queries(queries: int, skip_single: bool) -> None:
    rnd = random.Random(queries)
    for num_seqs in (1, 2, 7, 40):
        query_lens = [rnd.choice([0, 1, 2, 7, 16, 33]) for _ in range(num_seqs)]
        seq_lens = [n + rnd.choice([0, 3, 16]) for n in query_lens]
        batch = on_device(RaggedBatch.from_lists(query_lens, seq_lens, [[1] * 4] * num_seqs, 16))
        found = query_tiles(batch, queries, 8, sum(query_lens), skip_single=skip_single)
        count, tiles = int(found.count), found.tiles.tolist()
        expected, token = [], 0
        for seq, (n, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            if n > int(skip_single):
                expected += [(seq, token + i, min(queries, n - i), seq_len - n + i) for i in range(0, n, queries)]
            token += n
        expected.sort(key=lambda tile: (-math.ceil((tile[2] + tile[3]) / 8), tile[0], -tile[1]))
        assert [tuple(tile) for tile in tiles[:count]] == expected
        assert all(seq == -1 for seq, *_ in tiles[count:])
