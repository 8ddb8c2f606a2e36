"""Layout of the KV cache: the shape and the bytes of its blocks. No other module computes them."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from octavo.errors import ParameterError
from octavo.integers import cdiv

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of an element, by dtype."""
SCALE_BYTES = 2
"""Bytes of the scale at the end of an int8 row: K or V of one head of one token (`kernels.reference.quantize_rows`)."""
MIN_CHUNK = 512
"""Least `max_chunk`: enough positions to use a processor well."""


class LayerGroups(Protocol):
    """Layers of a block, and the window of each window group."""

    @property
    def num_layers(self) -> int: ...

    @property
    def windows(self) -> tuple[int, ...]: ...

    @property
    def places(self) -> tuple[tuple[int, int], ...]: ...


class KVHeads(Protocol):
    """The sizes of a model that its KV cache depends on."""

    @property
    def layer_groups(self) -> LayerGroups:
        """How the layers share blocks. The group of layers without K and V is below 0."""

    @property
    def state_size(self) -> int:
        """float32 numbers of a sequence besides, whatever its length."""

    @property
    def num_kv_heads(self) -> int:
        """K/V heads of a layer."""

    @property
    def head_dim(self) -> int:
        """Size of a K/V head."""

    @property
    def full_kv_heads(self) -> tuple[int, int]:
        """K/V heads of a layer without a sliding window, and their size: the same, or others (Gemma 4)."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """A block holds K and V of `block_size` tokens over the layers of a group; a pool also holds the null block.

    num_layers  of a block
    windows     of each window group; empty: all layers are one group
    full        layers without a window in a block, their K/V heads and the size of these, where they differ from those
                of layers with a window. Then a block of a window group has `num_layers`, and one of all layers both
    state_bytes of a sequence besides, whatever its length, in blocks of its own
    draft   of a draft model, whose K and V are in a pool of their own, with the same block ids. Shapes are without it,
            bytes with it
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    draft: KVCacheSpec | None = None
    windows: tuple[int, ...] = ()
    state_bytes: int = 0
    full: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, model: KVHeads, block_size: int, dtype: str, *, max_len: int = 0) -> KVCacheSpec:
        """max_len: of a sequence. Layers are grouped if it then takes fewer bytes; the last block of a window group may
        lack layers. 0: they are one group

        Raises `ParameterError` for float8 if layers have K/V heads of two sizes.
        """
        groups, state_bytes = model.layer_groups, 4 * model.state_size
        num_layers = sum(group >= 0 for group, _ in groups.places)
        own, full = (model.num_kv_heads, model.head_dim), None
        if model.full_kv_heads != own:
            if dtype.startswith("float8"):
                problem = (
                    f"kv_cache_dtype {dtype} is not supported for K/V heads of two sizes; choose int8, or the dtype"
                )
                raise ParameterError(f"{problem} of the model", param="kv_cache_dtype")
            full = (sum(group == 0 for group, _ in groups.places), *model.full_kv_heads)
            num_layers -= full[0]
        alike = cls(num_layers, *own, block_size, dtype, state_bytes=state_bytes, full=full)
        grouped = replace(alike, num_layers=groups.num_layers, windows=groups.windows)
        uses, used = (kv.blocks_of(max_len, kv.max_chunk) * kv.bytes_per_block for kv in (grouped, alike))
        return grouped if uses < used else alike

    @property
    def max_chunk(self) -> int:
        """Positions of a sequence in a step at most; 0: any number. Window groups hold as many beside the window."""
        return max(MIN_CHUNK, *self.windows) if self.windows else 0

    def blocks_of(self, num_tokens: int, chunk: int = 1) -> int:
        """Blocks that a sequence of this length holds while steps compute `chunk` of its positions."""
        blocks = cdiv(num_tokens, self.block_size)
        in_windows = (1 + cdiv(window + chunk - 2, self.block_size) for window in self.windows)
        return blocks + sum(min(blocks, most) for most in in_windows) + (self.state_blocks if blocks else 0)

    @property
    def state_blocks(self) -> int:
        return cdiv(self.state_bytes, self.bytes_per_block)

    def longest(self, num_blocks: int) -> int:
        """Positions of the longest sequence that this many blocks can hold and compute."""
        if not self.windows and not self.state_bytes:
            return num_blocks * self.block_size
        needs = partial(self.blocks_of, chunk=self.max_chunk)
        return bisect_right(range(1, num_blocks * self.block_size + 1), num_blocks, key=needs)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The layers, K and V, heads, tokens, and a row's elements. Of two sizes: all of a token are one row."""
        if self.full is None:
            return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim + self._scale_size)
        rows = self.full[0] * self._row_size(0), self.num_layers * self._row_size(1)
        return (1, 1, 1, self.block_size, max(rows) if self.windows else sum(rows))

    @property
    def _scale_size(self) -> int:
        return SCALE_BYTES if self.dtype == "int8" else 0

    def _row_size(self, window: int) -> int:
        """Elements of K and V of a token in a layer with this window; 0: without one."""
        num_heads, head_dim = (self.num_kv_heads, self.head_dim) if window or self.full is None else self.full[1:]
        return 2 * num_heads * (head_dim + self._scale_size)

    def layer_bytes(self, window: int) -> int:
        """K and V of a token in a layer with this window; 0: without one."""
        return self._row_size(window) * ITEMSIZE[self.dtype]

    @property
    def num_places(self) -> int:
        """Layers that the blocks of all groups have room for."""
        if self.full is None:
            return self.num_layers * (1 + len(self.windows))
        return self.full[0] + self.num_layers * (len(self.windows) or 1)

    def pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks + 1, *self.block_shape)

    @property
    def bytes_per_block(self) -> int:
        own_bytes = math.prod(self.block_shape) * ITEMSIZE[self.dtype]
        return own_bytes + (self.draft.bytes_per_block if self.draft else 0)

    @property
    def bytes_per_token(self) -> int:
        """Of a token in all layers, as long as it is in every window."""
        return self.bytes_per_block // self.block_size * (1 + len(self.windows))

    def pool_bytes(self, num_blocks: int) -> int:
        return (num_blocks + 1) * self.bytes_per_block

    def num_blocks(self, num_bytes: int) -> int:
        """Usable blocks of a pool of `num_bytes`; negative if not even the null block fits."""
        return num_bytes // self.bytes_per_block - 1
