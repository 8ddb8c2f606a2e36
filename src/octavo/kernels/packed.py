"""Weights in the layout that the CPU multiplies them fastest in.

oneDNN reorders a weight once into tiles, instead of at every product. The same tiles are what `native.cpp` streams
through when there are only a few rows of x, and a product costs what reading the weight costs: it does that at the
memory's speed, oneDNN at half of it for the small matrices of small models. So there is one copy, read in two ways.

How oneDNN lays tiles out is its own affair, and nothing is assumed: where a weight's tiles hold other bytes than
`native.cpp` expects, all products of it are oneDNN's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels import native

Quantization = Literal["int8"]

FEW_ROWS = {torch.bfloat16: 4, torch.int8: 8}
"""Rows of x up to which a product without the processor's matrix unit costs little more than reading the weight."""


class Packed(Protocol):
    """A weight [num_out, num_in] that can be multiplied with, and no more be seen."""

    @property
    def has_rows(self) -> bool:
        """Whether `rows` works."""
        ...

    def __call__(self, x: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
        """x @ weight.T + bias, x [num_rows, num_in] bfloat16 -> [num_rows, num_out], `wide`: in float32."""
        ...

    def rows(self, indices: Tensor) -> Tensor:
        """weight[indices], [num_indices, num_in] bfloat16."""
        ...


def pack(weight: Tensor, quantization: Quantization | None = None) -> Packed | None:
    """The weight [num_out, num_in] packed; None where plain torch is all there is for its dtype and this machine."""
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return None
    if quantization == "int8":
        return PackedInt8(weight) if has_int8() else None
    return PackedBF16(weight) if has_bfloat16() else None


def embed(table: Tensor, token_ids: Tensor) -> Tensor:
    """table[token_ids], table [num_rows, size] not packed."""
    if table.dtype == torch.bfloat16 and table.device.type == "cpu" and (library := native.library()) is not None:
        return library.embed(table, None, token_ids.contiguous(), table.shape[1])
    return F.embedding(token_ids, table)


def packed_bytes(weight: Tensor, quantization: Quantization | None = None) -> int:
    """What `pack` makes of a weight, in bytes, beside some padding; the weight may be on "meta"."""
    if quantization == "int8" and weight.dtype == torch.bfloat16:
        return weight.numel() + 8 * weight.shape[0]  # a scale, and what oneDNN keeps, for each output
    return weight.nbytes


class PackedBF16:
    """bfloat16 weights as oneDNN reorders them."""

    TILES = (32, 64)
    """Outputs of a tile; on processors with a matrix unit, and on others."""

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        # Tiles for many rows: they are as good for few, and native.cpp reads the fewest itself.
        self.reordered = torch.ops.mkldnn._reorder_linear_weight(weight, 256)
        found = (_tiles_of(self.reordered, weight, tile, 2) for tile in self.TILES)
        self.tiles = next((tiles for tiles in found if tiles is not None), None)

    @property
    def has_rows(self) -> bool:
        return self.tiles is not None

    def __call__(self, x: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
        library = native.library()
        if self.tiles is not None and library is not None and len(x) <= FEW_ROWS[torch.bfloat16]:
            return library.linear(self.tiles, None, x.contiguous(), bias, self.shape[0], wide=wide)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.reordered, bias, "none", [], "")
        return y.float() if wide else y

    def rows(self, indices: Tensor) -> Tensor:
        assert self.tiles is not None
        if (library := native.library()) is not None:
            return library.embed(self.tiles, None, indices.contiguous(), self.shape[1])
        return _rows_of(self.tiles, indices, self.shape[1])


class PackedInt8:
    """int8 weights with a scale for each output; x is rounded to int8 too, with a scale for each row (W8A8).

    A product is exact in integers, or in float32 in `native.cpp`, which rounds it no worse than bfloat16's last bits.
    """

    TILE = 64

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        most = weight.abs().amax(1).float()
        self.scale = most / 127  # [num_out]
        values = (weight * (1 / self.scale.clamp(min=1e-30)).unsqueeze(1)).round_().to(torch.int8)
        self.reordered = torch.ops.onednn.qlinear_prepack(values, None)
        self.zeros = torch.zeros(len(values), dtype=torch.int64)
        self.tiles = _tiles_of(self.reordered, values, self.TILE, 4)

    @property
    def has_rows(self) -> bool:
        return self.tiles is not None

    def __call__(self, x: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
        library = native.library()
        if self.tiles is not None and library is not None and len(x) <= FEW_ROWS[torch.int8]:
            return library.linear(self.tiles, self.scale, x.contiguous(), bias, self.shape[0], wide=wide)
        rounded, x_scale = quantize_rows(x) if library is None else library.quantize_rows(x.contiguous())
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, 0, self.reordered, self.scale, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y *= x_scale.unsqueeze(1)
        if bias is not None:
            y += bias
        return y if wide else y.to(x.dtype)

    def rows(self, indices: Tensor) -> Tensor:
        assert self.tiles is not None
        if (library := native.library()) is not None:
            return library.embed(self.tiles, self.scale, indices.contiguous(), self.shape[1])
        return (_rows_of(self.tiles, indices, self.shape[1]) * self.scale[indices].unsqueeze(1)).bfloat16()


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `native.Library.quantize_rows`."""
    most = x.abs().amax(1, keepdim=True).float()
    inverse = torch.where(most > 0, torch.tensor(127.0) / most, 0.0)  # 127 / most would multiply by a reciprocal
    return (x * inverse).round_().to(torch.int8), (most / 127).squeeze(1)


def _tiles_of(reordered: Tensor, weight: Tensor, tile: int, inputs: int) -> Tensor | None:
    """A view of a reordered weight, [num_tiles, padded_in / inputs, tile, inputs]; None where its bytes are not that.

    Rows at the ends and in the middle are compared: a layout that puts all of these where they are expected has no
    freedom left to put the others elsewhere.
    """
    num_out, num_in = weight.shape
    size = torch.ops.mkldnn._nbytes(reordered)
    num_tiles = -(-num_out // tile)
    for pad in (inputs, 32, 64):  # inputs are padded to as many as a step of the processor's takes
        padded_in = -(-num_in // pad) * pad
        num_numbers = num_tiles * tile * padded_in
        if num_numbers * weight.element_size() > size:
            continue
        memory = (ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(reordered))
        flat = torch.frombuffer(memory, dtype=weight.dtype, count=num_numbers)
        tiles = flat.view(num_tiles, padded_in // inputs, tile, inputs)
        some = torch.tensor([0, num_out // 3, num_out // 2, num_out - 1])
        if torch.equal(_rows_of(tiles, some, num_in), weight[some]):
            return tiles
    return None


def _rows_of(tiles: Tensor, indices: Tensor, num_in: int) -> Tensor:
    tile = tiles.shape[2]
    return tiles[indices // tile, :, indices % tile].flatten(1)[:, :num_in]


# -- what there is on this machine ------------------------------------------------------------------------------------


def fast_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16, so that it is faster than float32 and not only smaller."""
    own = torch.cpu
    return has_bfloat16() and bool(own._is_avx512_bf16_supported() or own._is_amx_tile_supported())


@functools.cache
def has_bfloat16() -> bool:
    """Whether oneDNN reorders bfloat16 weights, and multiplies with them, and gets it right."""
    return _tried(_try_bfloat16)


@functools.cache
def has_int8() -> bool:
    """The same of int8, with x that has a sign."""
    return _tried(_try_int8)


def _tried(product: Callable[[], bool]) -> bool:
    # In a thread that ends, and its OpenMP workers with it: as soon as there are more of them than cores, those that
    # compute go to sleep between any two operations, and decoding takes twice as long.
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(product).result()
        except (RuntimeError, AttributeError):
            return False


def _try_bfloat16() -> bool:
    weight = torch.eye(32, dtype=torch.bfloat16)
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, 4)
    y = torch.ops.mkldnn._linear_pointwise(weight[:4], reordered, None, "none", [], "")
    return torch.equal(y, weight[:4]) and torch.ops.mkldnn._nbytes(reordered) >= weight.nbytes


def _try_int8() -> bool:
    weight = torch.eye(32, dtype=torch.int8)
    one, zero = torch.ones(32), torch.zeros(32, dtype=torch.int64)
    reordered = torch.ops.onednn.qlinear_prepack(weight, None)
    y = torch.ops.onednn.qlinear_pointwise(
        -weight[:4], 1.0, 0, reordered, one, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return torch.equal(y, -weight[:4].float()) and torch.ops.mkldnn._nbytes(reordered) >= weight.nbytes
