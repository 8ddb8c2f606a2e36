"""Block hashes: how a block's content is named outside this process.

Inside the process a block is known by its `BlockId` and its content by a seal id. Seal ids come from a counter and mean
nothing elsewhere. KV events, routers and recordings name content by a chained digest instead.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256


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
