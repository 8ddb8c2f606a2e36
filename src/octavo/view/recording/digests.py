"""Digests of blocks and tokens, in place of the tokens themselves.

Several digests are one `bytes`, `DIGEST_BYTES` each. A block digest covers a full block and the digest before it; a
token digest covers a token, those before it in its block, and the digest of the block before.
"""

from __future__ import annotations

import secrets
from array import array
from hashlib import blake2b

from octavo.core.block_pool import group_of, unpack_key
from octavo.view.recording.format import DIGEST_BYTES


class Digests:
    """Digests under a key of their own, which is never written."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._key = secrets.token_bytes(16)

    def digest(self, before: bytes, data: bytes) -> bytes:
        return blake2b(before + data, digest_size=DIGEST_BYTES, key=self._key).digest()

    def last(self, blocks: bytes, salt: bytes) -> bytes:
        """The last block digest, or what stands before the first block of a request with this salt."""
        return blocks[-DIGEST_BYTES:] or self.digest(b"root", salt)

    def of_salt(self, salt: bytes) -> bytes:
        """b"" stays b""."""
        return self.digest(b"salt", salt) if salt else b""

    def of_blocks(self, tokens: array[int], salt: bytes, known: bytes = b"") -> bytes:
        """Digests of all full blocks; `known` has those of the first ones."""
        size, digests, before = self.block_size, [known], self.last(known, salt)
        for end in range((len(known) // DIGEST_BYTES + 1) * size, len(tokens) + 1, size):
            before = self.digest(before, tokens[end - size : end].tobytes())
            digests.append(before)
        return b"".join(digests)

    def of_tokens(self, before: bytes, tokens: array[int]) -> bytes:
        """Digests of the first tokens of a block; `before` is the digest of the block before it."""
        return b"".join(self.digest(before, b"mark" + tokens[: i + 1].tobytes()) for i in range(len(tokens)))

    def of_beam(self, tokens: array[int], salt: bytes, known: bytes) -> bytes:
        """Digests of all full blocks, and of the tokens after them."""
        blocks = self.of_blocks(tokens, salt, known)
        tail = tokens[len(blocks) // DIGEST_BYTES * self.block_size :]
        return blocks + self.of_tokens(self.last(blocks, salt), tail)

    def of_sealed(
        self, keys: list[bytes | None], seal_ids: array[int], digests: dict[int, bytes]
    ) -> list[tuple[int, int, bytes, bytes]]:
        """For each sealed block the block, the seal id of its parent, the salt if it has none, and the block digest.
        Blocks of window groups and of checkpoints have the second part of their key, one byte, in place of the digest.

        keys      content of each block, as the pool packs it
        digests   seal id -> block digest, for blocks in sequences

        A parent has an older seal than its children, so its digest is known first. If the parent is no longer in the
        pool, a sequence knows its digest. If no sequence does, the child cannot be found again and gets any digest.
        """
        sealed, digests = [], digests.copy()
        for block in sorted((b for b, key in enumerate(keys) if key is not None), key=seal_ids.__getitem__):
            key = keys[block]
            assert key is not None
            parent, tokens = unpack_key(key)
            if group_of(tokens) and not isinstance(parent, bytes):
                sealed.append((block, parent, b"", tokens))
                continue
            if isinstance(parent, bytes):
                salt, before, seal = self.of_salt(parent), self.last(b"", parent), 0
            else:
                before = digests.get(parent) or self.digest(b"lost", parent.to_bytes(8, "little"))
                salt, seal = b"", parent
            digests[seal_ids[block]] = self.digest(before, tokens)
            sealed.append((block, seal, salt, digests[seal_ids[block]]))
        return sealed
