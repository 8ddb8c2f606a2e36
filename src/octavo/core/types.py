"""The ids that the core hands out, and the names by which other processes know a block.

Inside, a block is known by its place (`BlockId`) and its content by a seal id: a counter, never used twice, so that a
prefix hit is exact by construction. A seal id means nothing in another process. What leaves this one (KV events,
routers, recordings) names content by a chained digest instead: `block_names`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
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


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


def block_names(
    token_ids: Sequence[int],
    block_size: int,
    *,
    salt: bytes = b"",
    parent: bytes | None = None,
    digest: Callable[[bytes], bytes] = _sha256,
) -> Iterator[bytes]:
    """The names of the full blocks of `token_ids`: digest(name of the parent + tokens as little-endian int32).

    The root's name is digest(salt), so that names of different tenants never meet. Blocks that go on behind another
    have that one's name as `parent`. Fixed-width tokens: [1, 23] and [12, 3] differ. `digest` may be any 16-byte or
    longer hash, such as `xxhash.xxh3_128_digest` for speed.
    """
    name = digest(salt) if parent is None else parent
    for end in range(block_size, len(token_ids) + 1, block_size):
        name = digest(name + _int32(token_ids[end - block_size : end]))
        yield name


def _int32(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)
