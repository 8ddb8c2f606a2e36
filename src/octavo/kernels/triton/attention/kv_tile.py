"""Tiles of keys and values in the KV pool: the one place where portable kernels read it. Device functions.

The caller loads the block ids of a tile while it computes the tile before. If they were loaded in the iteration that
uses them, Triton's pipeliner would spend its stages on that indirection, with fewer bytes of K and V in flight.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Two pairs of float8 -> two lower numbers and two upper ones in float16.
SPLIT_E4M3 = tl.constexpr("""{
.reg .b32 t;
.reg .b16 h;
prmt.b32 t, $2, 0, 0x4420;
cvt.u16.u32 h, t;
cvt.rn.f16x2.e4m3x2 $0, h;
prmt.b32 t, $2, 0, 0x4431;
cvt.u16.u32 h, t;
cvt.rn.f16x2.e4m3x2 $1, h;
}""")
SPLIT_E5M2 = tl.constexpr("""{
prmt.b32 $0, $2, 0, 0x2404;
and.b32 $1, $2, 0xFF00FF00;
}""")


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


@triton.jit
def split_pairs(pairs, KV_DTYPE: tl.constexpr, DTYPE: tl.constexpr):
    """Two numbers of KV_DTYPE, float8, in each 16 bits -> the lower ones and the upper ones in DTYPE."""
    if tl.float16 == DTYPE and not INTERPRETED:
        ASM: tl.constexpr = SPLIT_E5M2 if tl.float8e5 == KV_DTYPE else SPLIT_E4M3
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [pairs], (tl.float16, tl.float16), True, 2)
    else:
        lower, upper = pairs.to(tl.uint8), (pairs >> 8).to(tl.uint8)
        return lower.to(KV_DTYPE, bitcast=True).to(DTYPE), upper.to(KV_DTYPE, bitcast=True).to(DTYPE)
