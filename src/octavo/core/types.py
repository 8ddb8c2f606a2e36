"""Names of blocks and of their content.

Inside the process a block is known by its `BlockId` and its content by a seal id: a counter that is never used twice,
so a prefix hit is exact by construction. It means nothing elsewhere: KV events and routers name content by a chained
digest (`block_hashes`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
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
NEVER = 1 << 62
"""A position that no sequence reaches."""


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    *,
    salt: bytes = b"",
    parent: bytes | None = None,
    digest: Callable[[bytes], bytes] = _sha256,
) -> Iterator[bytes]:
    """Yield the hash of each full block of `token_ids`: digest(hash of the parent + tokens as little-endian int32).

    The root's hash is digest(salt), so tenants with different salts have no hash in common. `parent` is the hash of the
    block before the first one, None at the start of a sequence. Tokens have fixed width, so [1, 23] and [12, 3] differ.
    `digest` may be any hash of 16 bytes or more, such as `xxhash.xxh3_128_digest` for speed.
    """
    block_hash = digest(salt) if parent is None else parent
    for end in range(block_size, len(token_ids) + 1, block_size):
        block_hash = digest(block_hash + _int32(token_ids[end - block_size : end]))
        yield block_hash


def block_key(block_hash: bytes) -> int:
    """The 64 bits of a block's hash that KV events and routers use."""
    return int.from_bytes(block_hash[-8:], "big")


def _int32(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)
