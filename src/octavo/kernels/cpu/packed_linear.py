"""Weights in the layout that the CPU multiplies them fastest in, and who multiplies them.

The first line of this table that a machine has is taken, for bfloat16 and for int8 alike (`choose`):

    way                 needs                               up to FEW_ROWS rows     more rows
    native and oneDNN   a compiler, and AMX in oneDNN       native.cpp              oneDNN
    native              a compiler                          native.cpp              native.cpp
    oneDNN              a product of its own for the dtype  oneDNN, FEW_ROWS rows   oneDNN
    blocks              nothing                             float32, FEW_ROWS rows  float32

oneDNN falls back to a reference product, a thousand times slower, for what a processor has no instruction for. So it
is only used where it is known to have better. float16 is always multiplied in blocks: no processor here has it.

Up to FEW_ROWS rows, a row's result has the same bits alone and among others: `native.cpp` adds in one order, and the
others get so many rows always. All ways but oneDNN's bfloat16 give float32 where `wide` asks for it, so a head, whose
logits are float32, is multiplied in blocks there (`pack_head`).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.cpu import native

logger = logging.getLogger("octavo.packed")

Quantization = Literal["int8"]
Way = Literal["native and oneDNN", "native", "oneDNN", "blocks"]

FEW_ROWS = 16
"""Rows of x up to which a row's result does not depend on the others. So many cost little more than one: they are
computed while the weights are read. On processors without a matrix unit, `native.cpp` is at least as fast as oneDNN
beyond that, too."""

BLOCK_BYTES = 1 << 20
"""Of weights, widened to float32 at a time: they stay in the second-level cache until they are multiplied."""


class Packed(Protocol):
    """A weight [num_out, num_in] that can be multiplied with, and no more be seen."""

    way: Way

    def __call__(self, x: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
        """x @ weight.T + bias, x [num_rows, num_in] in the weight's dtype -> [num_rows, num_out], `wide`: in float32.

        A weight in int8 takes x in bfloat16.
        """
        ...


class Head(Packed, Protocol):
    """One whose `wide` results were never narrower, and whose rows can be read back."""

    def rows(self, indices: Tensor) -> Tensor:
        """weight[indices], [num_indices, num_in] in x's dtype."""
        ...


class Machine(NamedTuple):
    """What there is to multiply with.

    native  compiled code
    oneDNN  a product of oneDNN's for the dtype, which is exact and no reference
    amx     oneDNN uses a matrix unit
    """

    native: bool
    onednn: bool
    amx: bool


def choose(machine: Machine) -> Way:
    if machine.native:
        return "native and oneDNN" if machine.amx and machine.onednn else "native"
    return "oneDNN" if machine.onednn else "blocks"


def this_machine(quantization: Quantization | None) -> Machine:
    has_product = has_int8 if quantization == "int8" else has_bfloat16
    return Machine(native.library() is not None, has_product(), has_amx())


def pack(weight: Tensor, quantization: Quantization | None = None) -> Packed | None:
    """The weight [num_out, num_in] packed; None where plain torch is as fast."""
    if _is_packed(weight) and _way_for(weight, quantization) == "oneDNN":
        return OneDNN(*_quantized(weight, quantization))
    return pack_head(weight, quantization)


def pack_head(weight: Tensor, quantization: Quantization | None = None) -> Head | None:
    """The same of a head."""
    if not _is_packed(weight):
        return None
    way = _way_for(weight, quantization)
    values, scale = _quantized(weight, quantization)
    return Tiled(values, scale, way) if way in ("native", "native and oneDNN") else Blocks(values, scale)


def _is_packed(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)


def _way_for(weight: Tensor, quantization: Quantization | None) -> Way:
    return choose(this_machine(quantization)) if weight.dtype == torch.bfloat16 else "blocks"


def _quantized(weight: Tensor, quantization: Quantization | None) -> tuple[Tensor, Tensor | None]:
    return quantize_weight(weight) if quantization == "int8" else (weight, None)


def embed(table: Tensor, token_ids: Tensor) -> Tensor:
    """table[token_ids], table [num_rows, size] not packed."""
    if table.dtype == torch.bfloat16 and table.device.type == "cpu" and (library := native.library()) is not None:
        return library.embed(table, None, token_ids.contiguous(), table.shape[1])
    return F.embedding(token_ids, table)


def packed_bytes(weight: Tensor, quantization: Quantization | None = None) -> int:
    """What `pack` makes of a weight, in bytes, beside some padding; the weight may be on "meta"."""
    if quantization == "int8" and weight.dtype == torch.bfloat16:
        return weight.numel() + 8 * weight.shape[0]  # a scale, and what oneDNN may keep, for each output
    return weight.nbytes


# -- int8 -------------------------------------------------------------------------------------------------------------

# Weights have a scale for each output; x is rounded to int8 too, with a scale for each row (W8A8). Sums are integers,
# and so the same for everybody; what is made of them in float32 is no worse than bfloat16's last bits.


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 of the same shape, and the scales [num_out] float32 that undo it."""
    most = weight.abs().amax(1).float()
    scale = most / 127
    return (weight * (1 / scale.clamp(min=1e-30)).unsqueeze(1)).round_().to(torch.int8), scale


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `native.Library.quantize_rows`."""
    if (library := native.library()) is not None:
        return library.quantize_rows(x.contiguous())
    most = x.abs().amax(1, keepdim=True).float()
    inverse = torch.where(most > 0, torch.tensor(127.0) / most, 0.0)  # 127 / most would multiply by a reciprocal
    return (x * inverse).round_().to(torch.int8), (most / 127).squeeze(1)


# -- who multiplies ---------------------------------------------------------------------------------------------------


class Blocks:
    """A weight as it is, widened to float32 some outputs at a time. x is not rounded."""

    way: Way = "blocks"

    def __init__(self, weight: Tensor, scale: Tensor | None) -> None:
        self.weight = weight
        self.scale = scale

    def __call__(self, x: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
        y = _on_enough_rows(self._product, x)
        if self.scale is not None:
            y *= self.scale
        if bias is not None:
            y += bias
        return y if wide else y.to(x.dtype)

    def _product(self, x: Tensor) -> Tensor:
        return product_in_blocks(x, self.weight)

    def rows(self, indices: Tensor) -> Tensor:
        rows = self.weight[indices]
        return rows if self.scale is None else (rows * self.scale[indices].unsqueeze(1)).bfloat16()


def product_in_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32, whatever their dtypes."""
    y = torch.empty(len(x), len(weight))
    x, block = x.float(), max(1, BLOCK_BYTES // (4 * weight.shape[1]))
    for begin in range(0, len(weight), block):
        y[:, begin : begin + block] = x @ weight[begin : begin + block].float().T
    return y


def _on_enough_rows(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A library may add in another order for other numbers of rows: few become FEW_ROWS."""
    num_rows = len(x)
    if num_rows >= FEW_ROWS:
        return product(x)
    return product(F.pad(x, (0, 0, 0, FEW_ROWS - num_rows)))[:num_rows]


class OneDNN:
    """oneDNN's products alone."""

    way: Way = "oneDNN"

    def __init__(self, weight: Tensor, scale: Tensor | None) -> None:
        self.scale = scale
        self.zeros = torch.zeros(len(weight), dtype=torch.int64)
        self.reordered = _reorder(weight)

    def __call__(self, x: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
        if self.scale is None:
            y = _on_enough_rows(lambda x: _multiply_bfloat16(x, self.reordered, bias), x)
            return y.float() if wide else y
        rounded, x_scale = quantize_rows(x)
        y = _multiply_int8(rounded, self.reordered, self.scale, self.zeros)
        y *= x_scale.unsqueeze(1)
        if bias is not None:
            y += bias
        return y if wide else y.to(x.dtype)


class Tiled:
    """Tiles that `native.cpp` reads; with AMX they are those of oneDNN, which multiplies many rows by them."""

    BFLOAT16_TILES = (32, 64)
    """Outputs of a tile as oneDNN may lay them out. Our own have the last."""
    INT8_TILE = 64

    def __init__(self, weight: Tensor, scale: Tensor | None, way: Way) -> None:
        self.shape = weight.shape
        self.scale = scale
        self.way: Way = "native"
        self.many: OneDNN | None = None
        inputs, widths = (2, self.BFLOAT16_TILES) if scale is None else (4, (self.INT8_TILE,))
        if way == "native and oneDNN":
            self.many = OneDNN(weight, scale)
            found = (_tiles_of(self.many.reordered, weight, tile, inputs) for tile in widths)
            tiles = next((tiles for tiles in found if tiles is not None), None)
            if tiles is not None:
                self.way, self.tiles = way, tiles
                return
            logger.info("oneDNN has a layout of its own for %s: native code multiplies alone", tuple(weight.shape))
            self.many = None
        self.tiles = make_tiles(weight, widths[-1], inputs)

    def __call__(self, x: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
        # What is wide is a head's: oneDNN would round bfloat16's to bfloat16.
        if self.many is not None and len(x) > FEW_ROWS and (self.scale is not None or not wide):
            return self.many(x, bias, wide=wide)
        return _library().linear(self.tiles, self.scale, x.contiguous(), bias, self.shape[0], wide=wide)

    def rows(self, indices: Tensor) -> Tensor:
        return _library().embed(self.tiles, self.scale, indices.contiguous(), self.shape[1])


def _library() -> native.Library:
    library = native.library()
    assert library is not None  # or nothing would have been packed for it
    return library


def make_tiles(weight: Tensor, tile: int, inputs: int) -> Tensor:
    """[num_tiles, padded_in / inputs, tile, inputs], zeros where there is nothing: what `native.cpp` reads."""
    num_out, num_in = weight.shape
    padded = F.pad(weight, (0, -num_in % inputs, 0, -num_out % tile)).contiguous()
    words = padded.view(torch.int32).view(-1, tile, padded.shape[1] // inputs)
    return words.transpose(1, 2).contiguous().view(weight.dtype).view(len(words), -1, tile, inputs)


def _tiles_of(reordered: Tensor, weight: Tensor, tile: int, inputs: int) -> Tensor | None:
    """A view of a reordered weight, as of `make_tiles`; None where its bytes are not that.

    Rows at the ends and in the middle are compared: a layout that puts all of these where they are expected has no
    freedom left to put the others elsewhere.
    """
    num_out, num_in = weight.shape
    size = torch.ops.mkldnn._nbytes(reordered)
    num_tiles = cdiv(num_out, tile)
    for pad in (inputs, 32, 64):  # inputs are padded to as many as a step of the processor's takes
        padded_in = cdiv(num_in, pad) * pad
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


# -- oneDNN -----------------------------------------------------------------------------------------------------------


def _reorder(weight: Tensor) -> Tensor:
    if weight.dtype == torch.int8:
        made: Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
    else:  # tiles for many rows: they are as good for few
        made = torch.ops.mkldnn._reorder_linear_weight(weight, 256)
    return made


def _multiply_bfloat16(x: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")
    return y


def _multiply_int8(x: Tensor, reordered: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """x int8. It goes without a sign, with 128 as its zero: with a sign, only AMX has a product for it."""
    unsigned = x.view(torch.uint8) ^ 128
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        unsigned, 1.0, 128, reordered, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


# -- what there is on this machine ------------------------------------------------------------------------------------


def fast_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16, so that it is faster than float32 and not only smaller."""
    own = torch.cpu
    return has_bfloat16() and bool(own._is_avx512_bf16_supported() or own._is_amx_tile_supported())


def has_amx() -> bool:
    """Whether oneDNN multiplies in the processor's matrix unit."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL"
    allowed = limit.upper() in ("ALL", "DEFAULT") or "AMX" in limit.upper()
    return allowed and bool(torch.cpu._is_amx_tile_supported())


@functools.cache
def has_bfloat16() -> bool:
    """Whether oneDNN reorders bfloat16 weights, and multiplies with them, and gets it right."""
    return _tried(_try_bfloat16)


@functools.cache
def has_int8() -> bool:
    """The same of int8. Without VNNI it does not: its sums of two products overflow."""
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
    reordered = _reorder(weight)
    y = _multiply_bfloat16(weight[:4], reordered, None)
    return torch.equal(y, weight[:4]) and torch.ops.mkldnn._nbytes(reordered) >= weight.nbytes


def _try_int8() -> bool:
    """At the ends of the range, which is where sums overflow."""
    weight, x = torch.full((64, 64), 127, dtype=torch.int8), torch.full((32, 64), 127, dtype=torch.int8)
    weight[::3], x[::2] = -127, -127
    scale, zeros = torch.ones(64), torch.zeros(64, dtype=torch.int64)
    y = _multiply_int8(x, _reorder(weight), scale, zeros)
    return torch.equal(y, x.float() @ weight.float().T)
