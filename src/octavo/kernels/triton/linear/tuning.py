"""Launch parameters of the linear layers for small batches, and up to how many tokens such a layer is faster."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.triton.capability import kernels_for

MAX_TOKENS = 32
"""The largest number of tokens with a `SkinnyTuning`."""
MAX_TRITON_TOKENS = 24
"""With more tokens, the library's product and separate kernels are faster than the portable kernel."""
LARGE_WEIGHT_BYTES = 128 << 20
"""Larger weights are read at full bandwidth by the library, which is faster with any number of tokens."""
MAX_HOPPER_TOKENS, MAX_HOPPER_TOKENS_SMALL_WEIGHT = 64, 256
"""Up to so many tokens Hopper's kernels are faster than the library; the second for weights of at most
SMALL_WEIGHT_BYTES. Results are correct with any number."""
SMALL_WEIGHT_BYTES = 32 << 20
TILE_TOKENS = 64
NUM_MULTIPROCESSORS = 132
"""Of the GPU that Hopper's tunings are chosen for; results are correct on any."""
QKV_HEAD_DIMS = (64, 128)
"""Head sizes of Hopper's fused QKV projections: a tile's rows are whole heads."""

MAX_SMALL_BATCH_GROUPED = 32
"""Up to so many tokens the fused products of a quantised weight are faster than separate operations."""
MAX_HOPPER_TOKENS_GROUPED = {"int4": 64, "int8": 64, "float8": 32}
"""Up to so many tokens Hopper's kernel for few is the fastest, by format."""
MAX_ROWS_TWO_PARTS = 16
"""Up to so many rows a product with a float8 weight keeps what x has; with more, x is rounded to float8, too."""
MIN_ROWS_CUBLAS = 1024
"""From so many rows on, an integer weight is dequantised for the library's product; on Hopper, it is not."""
MAX_TOKENS_TILES_BY_ROW = 192
"""Up to so many tokens `float8_tiles_hopper` is faster than the library with a scale an output, and from then on with
a scale for each block."""
TILE_INPUTS = 128
"""Inputs of a step of `grouped_tiles_hopper`."""
CUBLAS_WEIGHT_BYTES = 64 << 20
"""Of a dequantised part of a weight, which stays in the GPU's cache until its product."""


@dataclass(frozen=True, slots=True)
class SkinnyTuning:
    """Launch parameters of the portable kernel.

    rows, columns  a program's tile of the weight
    splits         programs that share a row
    """

    rows: int
    columns: int
    splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class HopperTuning:
    """Launch parameters of the Hopper kernels.

    rows       rows of a tile; with a gate, of each half of the weight
    columns    columns of a step
    splits     programs that share a tile
    stages     steps in shared memory
    registers  registers of a thread when a program starts
    """

    rows: int
    columns: int
    splits: int
    stages: int
    registers: int = 128


Tuning = SkinnyTuning | HopperTuning


@dataclass(frozen=True, slots=True)
class GroupedTuning:
    """Launch parameters of a quantised weight's product.

    tokens  of a program
    splits  programs that share a tile
    stages  steps in shared memory
    chunk   inputs of a matrix instruction's operand in registers
    """

    tokens: int
    splits: int
    stages: int
    num_warps: int = 4
    chunk: int = 64


@dataclass(frozen=True, slots=True)
class TilesTuning:
    """Launch parameters of Hopper's product of a quantised weight with many rows.

    rows    outputs of a group of warps, of two: 64 or 128
    tokens  of a tile
    stages  steps in shared memory
    """

    rows: int
    tokens: int
    stages: int


def supports_hopper(weight: Tensor) -> bool:
    """True if Hopper's kernels run the weight: their GPU, bfloat16, and rows of multiples of 16 bytes."""
    return kernels_for(weight.device).hopper and weight.dtype == torch.bfloat16 and weight.shape[1] % 8 == 0


def fuses_qkv(kv_layer: Tensor, kv_scales: Tensor | None) -> bool:
    """True if a QKV projection on Hopper writes such K and V itself."""
    return kv_scales is None and kv_layer.shape[4] in QKV_HEAD_DIMS


def max_small_batch_tokens(weight: Tensor) -> int:
    """`reference.max_small_batch_tokens`."""
    if supports_hopper(weight):
        return MAX_HOPPER_TOKENS_SMALL_WEIGHT if weight.nbytes <= SMALL_WEIGHT_BYTES else MAX_HOPPER_TOKENS
    return MAX_TRITON_TOKENS if weight.nbytes <= LARGE_WEIGHT_BYTES else 0


def padded_tokens(num_tokens: int) -> int:
    """num_tokens, rounded up to whole tiles of TILE_TOKENS or to one smaller tile of at least 16 tokens."""
    if num_tokens > TILE_TOKENS:
        return cdiv(num_tokens, TILE_TOKENS) * TILE_TOKENS
    return max(16, int(triton.next_power_of_2(num_tokens)))


def linear_tuning(weight: Tensor, num_tokens: int, gated: bool) -> Tuning:
    """The tuning of the kernel that runs the weight."""
    num_rows, num_in = weight.shape
    num_out = num_rows // 2 if gated else num_rows
    if supports_hopper(weight):
        return skinny_hopper_tuning(num_out, num_in, num_tokens, gated)
    tuning = skinny_tuning(num_out, num_in, num_tokens, gated)
    stage_bytes = (tuning.rows * (2 if gated else 1) + padded_tokens(num_tokens)) * tuning.columns * weight.itemsize
    max_stages = max(kernels_for(weight.device).shared_bytes // stage_bytes, 1)
    return tuning if tuning.num_stages <= max_stages else replace(tuning, num_stages=max_stages)


def skinny_tuning(num_out: int, num_in: int, num_tokens: int, gated: bool) -> SkinnyTuning:
    """The fastest tuning on an H200 (benchmarks/kernels/bench_skinny.py)."""
    few = num_tokens <= 16
    if gated and num_in > 2048:
        return SkinnyTuning(32, 256, 1, num_warps=4, num_stages=3)
    if gated:
        return SkinnyTuning(32, 128, 1, num_warps=2, num_stages=4) if few else SkinnyTuning(64, 128, 1, 4, 3)
    if few and num_out > 4096:
        return SkinnyTuning(16, 256, 2, num_warps=2, num_stages=3)
    if max(num_out // 2, num_in) <= 1024:
        return SkinnyTuning(16, 128, 1 if num_out > 1024 else 2, num_warps=2, num_stages=4)
    if few:
        splits = max(1, min(512 * 32 // num_out, num_in // 256, 16))
        return SkinnyTuning(32, 256, 1 << (splits.bit_length() - 1), num_warps=4, num_stages=3)
    if num_in <= 1024:
        return SkinnyTuning(32, 128, 2, num_warps=2, num_stages=4)
    return SkinnyTuning(64, 64, 16, num_warps=4, num_stages=5)


def skinny_hopper_tuning(num_out: int, num_in: int, num_tokens: int, gated: bool) -> HopperTuning:
    """The fastest tuning on an H200 (benchmarks/kernels/bench_skinny.py).

    All programs run at once, usually as many as multiprocessors or a few less, so that none starts when others end.
    """
    if num_tokens > TILE_TOKENS:
        return _multi_tile_tuning(num_out, num_in, num_tokens, gated)
    few = num_tokens <= 32
    tiles = cdiv(num_out, 128)
    if tiles > NUM_MULTIPROCESSORS:  # two programs fit into a multiprocessor
        return HopperTuning(128, 64, 1, stages=(3 if few else 2) if gated else (5 if few else 4))
    splits = max(1, min(NUM_MULTIPROCESSORS // tiles, num_in // 128, 16))
    splits = 1 << (splits.bit_length() - 1)
    if few and not gated:
        return HopperTuning(128, 128, splits, stages=4) if num_in // splits >= 512 else HopperTuning(128, 64, splits, 9)
    if few:
        return HopperTuning(128, 64, splits, stages=5)
    if splits == 1:
        return HopperTuning(128, 64, 1, stages=3 if gated else 5)
    # Exchanging the sums of many tokens is slow.
    return HopperTuning(64, 64, splits // 2, stages=5 if gated else 8)


def _multi_tile_tuning(num_out: int, num_in: int, num_tokens: int, gated: bool) -> HopperTuning:
    """Tuning for several tiles of tokens: one program for each multiprocessor, or two if there are more programs."""
    tiles = cdiv(num_out, 64) * cdiv(num_tokens, TILE_TOKENS)
    if tiles > NUM_MULTIPROCESSORS:
        return HopperTuning(64, 64, 1, stages=4 if gated else 6)
    if gated:
        return HopperTuning(64, 128, 1, stages=4, registers=232)
    splits = 1
    while splits < 8 and 2 * splits * tiles <= NUM_MULTIPROCESSORS and num_in >= 256 * splits:
        adds_residual = splits == 1 and num_out <= num_in  # a slow epilogue
        if splits * tiles >= 50 and num_in // splits <= 1600 and not adds_residual:
            break
        splits *= 2
    return HopperTuning(64, 128, splits, max(2, min(7, cdiv(num_in, 128 * splits))), registers=232)


def qkv_tuning(num_heads: int, head_dim: int, num_in: int, num_tokens: int) -> HopperTuning:
    """num_heads: of q, k and v together. As in `skinny_hopper_tuning`, all programs run at once."""
    tiles = num_heads * cdiv(num_tokens, TILE_TOKENS)
    # Exchanging the sums of many tokens is slow.
    max_programs = NUM_MULTIPROCESSORS if num_tokens <= TILE_TOKENS else NUM_MULTIPROCESSORS // 2
    splits = 1
    while splits < 16 and 2 * splits * tiles <= max_programs and num_in >= 256 * splits:
        splits *= 2
    if num_tokens <= 32:
        columns, stages = (128, 4) if num_in // splits >= 512 else (64, 8)
        return HopperTuning(head_dim, columns, splits, stages)
    return HopperTuning(head_dim, 128, splits, max(2, min(4, cdiv(num_in, 128 * splits))), registers=232)


def grouped_tuning(num_out: int, num_in: int, step_inputs: int, num_tokens: int, parts: int) -> GroupedTuning:
    """The fastest tuning on an H200 (benchmarks/kernels/bench_grouped.py --sweep).

    num_out  with a gate, of a half
    parts    of x in float8
    """
    tokens = min(padded_tokens(num_tokens), TILE_TOKENS)
    tiles = cdiv(num_out, 128) * cdiv(num_tokens, tokens)
    max_programs, min_inputs = {16: (3 * NUM_MULTIPROCESSORS, 512), 32: (2 * NUM_MULTIPROCESSORS, 1024)}.get(
        tokens, (NUM_MULTIPROCESSORS * 3 // 2, 1024)
    )
    splits = 1
    while splits < 8 and 2 * splits * tiles <= max_programs and num_in >= 2 * splits * min_inputs:
        splits *= 2
    many = splits * tiles > {16: 2, 32: 1}.get(tokens, 1) * NUM_MULTIPROCESSORS
    stages = (3 if many and splits > 1 else 4) if tokens == 16 else (3 if many else 4) if tokens == 32 else 3 - many
    if parts:
        return GroupedTuning(tokens, splits, 3 if many else 5)
    return GroupedTuning(tokens, splits, min(stages * 256 // step_inputs, 8), chunk=128 if tokens == 16 else 64)


def grouped_hopper_tuning(
    num_out: int, num_in: int, bits: int, scaled_inputs: int, num_tokens: int, gated: bool
) -> HopperTuning:
    """The fastest tuning on an H200 (benchmarks/kernels/bench_grouped.py --sweep), for a quantised weight.

    bits           of a value
    scaled_inputs  of a group, or of a pair of groups
    """
    columns = max(1024 // bits, scaled_inputs)
    tiles, steps = cdiv(num_out, 128), cdiv(num_in, columns)
    splits = max(1, min(NUM_MULTIPROCESSORS // tiles, steps // 2, 16))
    splits = 1 << (splits.bit_length() - 1)
    registers, kib = 104 if num_tokens <= 16 else 168, 200 if gated else 110
    if num_tokens <= 16 and 4 * splits * tiles <= 3 * NUM_MULTIPROCESSORS and steps >= 4 * splits and splits <= 8:
        splits, registers, kib = 2 * splits, 80, 74  # two programs fit into a multiprocessor
    words, planes = 16 * columns * bits, 512 * (columns // scaled_inputs)
    stage_bytes = (words + planes) * (2 if gated else 1) + padded_tokens(num_tokens) * columns * 2
    stages = max(2, min(kib * 1024 // stage_bytes, cdiv(steps, splits)))
    return HopperTuning(128, columns, splits, stages, registers)


def grouped_tiles_tuning(bits: int, scaled_inputs: int, num_tokens: int) -> TilesTuning:
    """The fastest tile on an H200, with as many stages as fit; for an integer weight, see `grouped_hopper_tuning`."""
    rows, tokens = (64, 128) if num_tokens <= 256 else (128, 128)
    if 128 < num_tokens <= 192:
        rows, tokens = 128, 64
    words, planes, xs = 2 * rows * TILE_INPUTS * bits // 8, 8 * rows * cdiv(TILE_INPUTS, scaled_inputs), 256 * tokens
    room = (224 << 10) - 4 * rows * tokens  # the sums, in bfloat16
    return TilesTuning(rows, tokens, room // (words + planes + xs))


def float8_tiles_tuning(num_tokens: int, by_row: bool) -> TilesTuning | None:
    """The fastest tile on an H200 for a float8 weight; None: the library's product is faster.

    by_row  a scale an output; else one for each block of 128 x 128
    """
    if by_row == (num_tokens > MAX_TOKENS_TILES_BY_ROW):
        return None
    rows, tokens = (64, 64 if num_tokens <= 64 else 128) if num_tokens <= 384 else (128, 128)
    stage_bytes = (2 * rows + tokens) * (128 + 4)  # a group's values and its scale
    return TilesTuning(rows, tokens, ((226 << 10) - 256 * rows) // stage_bytes)
