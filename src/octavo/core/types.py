"""Types of ids in the core.

A block's content is named by a seal id: a counter that is never used twice, so a prefix hit is exact by construction.
"""

from __future__ import annotations

from typing import TypeAlias

BlockId: TypeAlias = int
"""A block of the device pool: 1..num_blocks, the same in every layer and on every rank."""
HostBlockId: TypeAlias = int
"""A block of the host tier: 1..num_host_blocks."""
Row: TypeAlias = int
"""A sequence's line in the runner's device tables."""
SealId: TypeAlias = int
"""Names the content of a sealed block and of all before it. Positive; 0 is none."""

NULL_BLOCK: BlockId = 0
"""Never handed out: the kernels' padding target, and the sentinel of the LRU links."""
