"""Finds rows whose sequences share a prefix, for cascade attention: compares one block at each power of two."""

from __future__ import annotations

import numpy as np

from octavo.integers import cdiv

MIN_SAVED_BYTES = 100 << 20
"""K and V of a layer that cascade attention must save. It costs 15 us to read a prefix once for several rows and to
merge the results, in which an H200 reads as much from its cache."""
MIN_SAVED_SHARE = 5 / 8
"""Tokens that must be saved in addition, as a share of the tokens that rows read for themselves. Those come from memory
at 4.3 TB/s; meanwhile shared tokens come from the cache at 7 TB/s, so only their excess takes longer."""
FIRST_DEPTH = 256
"""Shortest shared prefix that is considered, in tokens: the shortest one that cascade attention uses."""
MIN_ROWS = 8
"""Fewest rows of a step with cascade attention."""


class SharedPrefixes:
    """Per row, the blocks where the first 256, 512, 1,024, ... tokens of its sequence end.

    Two rows with equal blocks at a depth nearly always share all blocks before it. The device finds the exact shared
    lengths from whole block tables (`RaggedBatch.common_prefix_lens`). The host only orders the rows, and decides if
    cascade attention pays off.

    token_bytes   K and V of one token in one layer
    num_lines     tables of a row, of which only the first, that of the full group, counts
    """

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, token_bytes: int, num_lines: int = 1) -> None:
        self._num_lines = num_lines
        self.min_saved_tokens = cdiv(MIN_SAVED_BYTES, token_bytes)
        self._max_blocks = max_blocks
        max_len = max_blocks * block_size
        self._depths = np.array([FIRST_DEPTH << i for i in range(32) if FIRST_DEPTH << i < max_len], dtype=np.int64)
        self._depth_of = np.full(max_blocks, -1)  # column of the block tables -> index of its depth
        self._depth_of[self._depths // block_size - 1] = np.arange(len(self._depths))
        self._blocks = np.zeros((num_rows + 1, len(self._depths)), dtype=np.int64)

    def update(self, indices: np.ndarray, block_ids: np.ndarray) -> None:
        """Apply a plan's writes to the block tables. See `input_buffers.table_writes` for indices [num]."""
        line, column = np.divmod(indices, self._max_blocks)
        depth = self._depth_of[column]
        found = (depth >= 0) & (line % self._num_lines == 0)
        if found.any():
            self._blocks[line[found] // self._num_lines, depth[found]] = block_ids[found]

    def order(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """An order [num_rows] in which rows with shared prefixes are neighbours; None if they share too few tokens.

        rows, positions  [num_rows] int64, of a decode step. Blocks after a row's position do not count
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
        num_saved = int((same @ np.diff(self._depths, prepend=0)).sum())
        num_read = int(positions.sum()) - num_saved
        return order if num_saved >= self.min_saved_tokens + MIN_SAVED_SHARE * num_read else None
