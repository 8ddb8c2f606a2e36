"""Layout of the KV cache: the shape and the bytes of its blocks. No other module computes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by dtype."""


class KVHeads(Protocol):
    """The sizes of a model that its KV cache depends on."""

    @property
    def num_layers(self) -> int:
        """Layers with attention."""

    @property
    def num_kv_heads(self) -> int:
        """K/V heads of a layer."""

    @property
    def head_dim(self) -> int:
        """Size of a K/V head."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """A block holds K and V of `block_size` tokens over all layers; a pool also holds the null block.

    draft   of a draft model, whose K and V are in a pool of their own, with the same block ids. Shapes are without it,
            bytes with it
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    draft: KVCacheSpec | None = None

    @classmethod
    def of(cls, model: KVHeads, block_size: int, dtype: str) -> KVCacheSpec:
        return cls(model.num_layers, model.num_kv_heads, model.head_dim, block_size, dtype)

    @property
    def block_shape(self) -> tuple[int, ...]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    def pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks + 1, *self.block_shape)

    @property
    def bytes_per_block(self) -> int:
        own_bytes = math.prod(self.block_shape) * ITEMSIZE[self.dtype]
        return own_bytes + (self.draft.bytes_per_block if self.draft else 0)

    @property
    def bytes_per_token(self) -> int:
        return self.bytes_per_block // self.block_size

    def pool_bytes(self, num_blocks: int) -> int:
        return (num_blocks + 1) * self.bytes_per_block

    def num_blocks(self, num_bytes: int) -> int:
        """Usable blocks of a pool of `num_bytes`; negative if not even the null block fits."""
        return num_bytes // self.bytes_per_block - 1
