"""Types of ids in the core.

A block's content is named by a seal id: a counter that is never used twice, so a prefix hit is exact by construction.
"""

from __future__ import annotations

from typing import TypeAlias

BlockId: TypeAlias = int
"""A block of the device pool, 1 to num_blocks: the same in every layer and on every rank."""
HostBlockId: TypeAlias = int
"""A block of the swap space on the host, 1 to num_host_blocks."""
Row: TypeAlias = int
"""A row of the runner's device tables, held by one running sequence."""
SealId: TypeAlias = int
"""Identifies the content of a sealed block and of all blocks before it. Positive; 0: not sealed."""

NULL_BLOCK: BlockId = 0
"""Never allocated: padding target of the kernels, and sentinel of the LRU links."""
