"""Which rows begin with the same blocks, as far as the host looks: at one block in each power of two."""

from __future__ import annotations

import numpy as np

from octavo.integers import cdiv

MIN_SAVED_BYTES = 100 << 20
"""Of K and V of a layer that must be saved: an H200 takes as much from its cache in the 15 us that it costs to read
something once for several, and bring it back to each."""
MIN_SAVED_SHARE = 5 / 8
"""Of what all read for themselves, which must be saved besides. While that comes from memory, at 4.3 TB/s, what is
common comes from the cache, at 7 TB/s: only what there is more of takes longer."""
FIRST_DEPTH = 256
"""Tokens that rows must have in common to be looked at: `CascadeTuning.least`."""
MIN_ROWS = 8
"""Rows of a step, below which attention does not read anything once for several."""


class SharedPrefixes:
    """The blocks that rows have where the first 256, 512, 1,024, ... tokens of their sequences end.

    Two rows with the same one there nearly always have the same ones up to there. How much two neighbours really have
    in common is found on the device, by looking at whole tables (`RaggedBatch.common_prefix_lens`): here it is only
    decided whether that is worth the while, and who stands beside whom.

    token_bytes   of K and V of one token in one layer
    """

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, token_bytes: int) -> None:
        self.least_tokens = cdiv(MIN_SAVED_BYTES, token_bytes)
        self._max_blocks = max_blocks
        longest = max_blocks * block_size
        self._depths = np.array([FIRST_DEPTH << i for i in range(32) if FIRST_DEPTH << i < longest], dtype=np.int64)
        self._depth_of = np.full(max_blocks, -1)  # a column of the tables -> which depth it is
        self._depth_of[self._depths // block_size - 1] = np.arange(len(self._depths))
        self._blocks = np.zeros((num_rows + 1, len(self._depths)), dtype=np.int64)

    def note(self, places: np.ndarray, block_ids: np.ndarray) -> None:
        """Of what a plan writes to the tables; places [num] are flat, see `cuda_runner.table_writes`."""
        depth = self._depth_of[places % self._max_blocks]
        here = depth >= 0
        if here.any():
            self._blocks[places[here] // self._max_blocks, depth[here]] = block_ids[here]

    def order(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """An order [num_rows] in which those that begin alike are neighbours; None where too few tokens are common.

        rows, positions  [num_rows] int64, of a decode step; what lies behind a row's position does not count
        """
        if not self._depths.size or len(rows) < MIN_ROWS:
            return None
        first = np.sort(self._blocks[rows, 0])
        if not (first[1:] == first[:-1]).any():
            return None
        blocks = np.where(positions[:, None] > self._depths, self._blocks[rows], 0)
        order = np.lexsort(blocks.T[::-1])  # by the first depth, then by the next
        blocks = blocks[order]
        same = np.cumprod((blocks[1:] == blocks[:-1]) & (blocks[1:] > 0), axis=1)
        saved = int((same @ np.diff(self._depths, prepend=0)).sum())
        own = int(positions.sum()) - saved
        return order if saved >= self.least_tokens + MIN_SAVED_SHARE * own else None
