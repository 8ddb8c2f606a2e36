"""Tiles of keys and values in the KV pool: the one place where portable kernels read it. Device functions.

The caller loads the block ids of a tile while it computes the tile before. If they were loaded in the iteration that
uses them, Triton's pipeliner would spend its stages on that indirection, with fewer bytes of K and V in flight.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate_keys(
    block_ids, position, block_stride, head_offset, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Offsets of the keys of some positions [keys] in the pool, for the blocks of these positions."""
    return block_ids.to(tl.int64) * block_stride + head_offset + position % BLOCK_SIZE * HEAD_DIM


@triton.jit
def load_kv_tile(kv, offset, column, value_offset, mask, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Load keys or values [keys, columns] from the offsets of `locate_keys`; columns past HEAD_DIM are 0.

    value_offset  distance from a key to its value; 0 to load keys
    mask          [keys], with MASKED: other rows are not read, but 0
    """
    ptrs = kv + offset[:, None] + column[None, :] + value_offset
    in_head = (column < HEAD_DIM)[None, :]
    if MASKED:
        tile = tl.load(ptrs, mask=mask[:, None] & in_head, other=0.0)
    elif column.shape[0] == HEAD_DIM:
        tile = tl.load(ptrs)
    else:
        tile = tl.load(ptrs, mask=in_head, other=0.0)
    return tile
