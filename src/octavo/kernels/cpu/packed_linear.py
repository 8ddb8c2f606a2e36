"""Linear layers on the CPU: weights packed in the layout of their fastest matrix product.

Each weight uses the first backend of this table that the machine supports, for bfloat16 and for int8 alike
(`choose_backend`):

    backend             needs                            up to SMALL_BATCH_ROWS rows       more rows
    native and oneDNN   a compiler, and AMX in oneDNN    native.cpp                        oneDNN
    native              a compiler                       native.cpp                        native.cpp
    oneDNN              oneDNN's product for the dtype   oneDNN, padded to these rows      oneDNN
    blocks              nothing                          float32, padded to these rows     float32

Where the processor has no instruction for a dtype, oneDNN falls back to a reference product, a thousand times slower.
So oneDNN is used only where it is known to be fast. float16 always uses blocks: no processor here has instructions
for it.

Up to SMALL_BATCH_ROWS rows, the result of a row has the same bits in every batch: `native.cpp` has one order of
addition, and the other backends always multiply that many rows. All backends but oneDNN's bfloat16 return float32 for
`float32_out`. The logits of an LM head are float32, so there it uses blocks instead (`pack_head`).
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
MatmulBackend = Literal["native and oneDNN", "native", "oneDNN", "blocks"]

SMALL_BATCH_ROWS = 16
"""Rows of x up to which the result of a row does not depend on the other rows. They cost little more than one row: they
are computed while the weights are read. On processors without a matrix unit, `native.cpp` is at least as fast as oneDNN
for more rows, too."""

BLOCK_BYTES = 1 << 20
"""Weights converted to float32 at a time: they stay in the second-level cache until they are multiplied."""


class PackedWeight(Protocol):
    """A weight [num_out, num_in] in the layout of its matrix product."""

    backend: MatmulBackend

    def __call__(self, x: Tensor, bias: Tensor | None, *, float32_out: bool = False) -> Tensor:
        """x @ weight.T + bias; x [num_rows, num_in] -> [num_rows, num_out].

        x has the weight's dtype, or bfloat16 for an int8 weight. The result has that dtype, float32 if `float32_out`.
        """
        ...


class PackedHead(PackedWeight, Protocol):
    """The weight of an LM head: its `float32_out` results are unrounded, and its rows can be read as embeddings."""

    def gather_rows(self, indices: Tensor) -> Tensor:
        """weight[indices], [num_indices, num_in] in x's dtype."""
        ...


class CpuFeatures(NamedTuple):
    """Matrix products that this machine supports.

    native  `native.cpp` is compiled
    onednn  oneDNN has an exact, fast product for the dtype
    amx     oneDNN uses the processor's matrix unit
    """

    native: bool
    onednn: bool
    amx: bool


def choose_backend(machine: CpuFeatures) -> MatmulBackend:
    if machine.native:
        return "native and oneDNN" if machine.amx and machine.onednn else "native"
    return "oneDNN" if machine.onednn else "blocks"


def detect_features(quantization: Quantization | None) -> CpuFeatures:
    has_product = has_onednn_int8 if quantization == "int8" else has_onednn_bfloat16
    return CpuFeatures(native.library() is not None, has_product(), has_amx())


def pack(weight: Tensor, quantization: Quantization | None = None) -> PackedWeight | None:
    """Pack a weight [num_out, num_in]; None where plain torch is as fast."""
    if _is_packed(weight) and _backend_for(weight, quantization) == "oneDNN":
        return OneDNNWeight(*_quantized(weight, quantization))
    return pack_head(weight, quantization)


def pack_head(weight: Tensor, quantization: Quantization | None = None) -> PackedHead | None:
    """Pack the weight of an LM head; None where plain torch is as fast."""
    if not _is_packed(weight):
        return None
    backend = _backend_for(weight, quantization)
    values, scale = _quantized(weight, quantization)
    return BlockwiseWeight(values, scale) if backend in ("oneDNN", "blocks") else TiledWeight(values, scale, backend)


def _is_packed(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)


def _backend_for(weight: Tensor, quantization: Quantization | None) -> MatmulBackend:
    return choose_backend(detect_features(quantization)) if weight.dtype == torch.bfloat16 else "blocks"


def _quantized(weight: Tensor, quantization: Quantization | None) -> tuple[Tensor, Tensor | None]:
    return quantize_weight(weight) if quantization == "int8" else (weight, None)


def embed(table: Tensor, token_ids: Tensor) -> Tensor:
    """table[token_ids], for a table [num_rows, size] that is not packed."""
    if table.dtype == torch.bfloat16 and table.device.type == "cpu" and (library := native.library()) is not None:
        return library.embed(table, None, token_ids.contiguous(), table.shape[1])
    return F.embedding(token_ids, table)


# -- int8 -------------------------------------------------------------------------------------------------------------

# W8A8: weights have a scale for each output, and x is rounded to int8 with a scale for each row. Sums are integers, the
# same in every backend; their conversion to float32 adds errors no larger than bfloat16's rounding.


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [num_out, num_in] -> (int8 of the same shape, scales [num_out] float32), weight = int8 * scale."""
    max_abs = weight.abs().amax(1).float()
    scale = max_abs / 127
    return (weight * (1 / scale.clamp(min=1e-30)).unsqueeze(1)).round_().to(torch.int8), scale


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `native.Library.quantize_rows`."""
    if (library := native.library()) is not None:
        return library.quantize_rows(x.contiguous())
    max_abs = x.abs().amax(1, keepdim=True).float()
    inverse = torch.where(max_abs > 0, torch.tensor(127.0) / max_abs, 0.0)  # not a product with a reciprocal
    return (x * inverse).round_().to(torch.int8), (max_abs / 127).squeeze(1)


# -- backends ---------------------------------------------------------------------------------------------------------


class BlockwiseWeight:
    """A plain weight that is converted to float32 some outputs at a time. x is not rounded."""

    backend: MatmulBackend = "blocks"

    def __init__(self, weight: Tensor, scale: Tensor | None) -> None:
        self.weight = weight
        self.scale = scale

    def __call__(self, x: Tensor, bias: Tensor | None, *, float32_out: bool = False) -> Tensor:
        y = _pad_to_small_batch(self._product, x)
        if self.scale is not None:
            y *= self.scale
        if bias is not None:
            y += bias
        return y if float32_out else y.to(x.dtype)

    def _product(self, x: Tensor) -> Tensor:
        return blockwise_linear(x, self.weight)

    def gather_rows(self, indices: Tensor) -> Tensor:
        rows = self.weight[indices]
        return rows if self.scale is None else (rows * self.scale[indices].unsqueeze(1)).bfloat16()


def blockwise_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32, for any dtypes."""
    y = torch.empty(len(x), len(weight))
    x, block = x.float(), max(1, BLOCK_BYTES // (4 * weight.shape[1]))
    for begin in range(0, len(weight), block):
        y[:, begin : begin + block] = x @ weight[begin : begin + block].float().T
    return y


def _pad_to_small_batch(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply the product to at least SMALL_BATCH_ROWS rows: its order of addition may depend on the number of rows."""
    num_rows = len(x)
    if num_rows >= SMALL_BATCH_ROWS:
        return product(x)
    return product(F.pad(x, (0, 0, 0, SMALL_BATCH_ROWS - num_rows)))[:num_rows]


class OneDNNWeight:
    """A weight that oneDNN multiplies."""

    backend: MatmulBackend = "oneDNN"

    def __init__(self, weight: Tensor, scale: Tensor | None) -> None:
        self.scale = scale
        self.zeros = torch.zeros(len(weight), dtype=torch.int64)
        self.reordered = _reorder(weight)

    def __call__(self, x: Tensor, bias: Tensor | None, *, float32_out: bool = False) -> Tensor:
        if self.scale is None:
            y = _pad_to_small_batch(lambda x: _multiply_bfloat16(x, self.reordered, bias), x)
            return y.float() if float32_out else y
        rounded, x_scale = quantize_rows(x)
        y = _multiply_int8(rounded, self.reordered, self.scale, self.zeros)
        y *= x_scale.unsqueeze(1)
        if bias is not None:
            y += bias
        return y if float32_out else y.to(x.dtype)


class TiledWeight:
    """A weight in the tiles of `native.cpp`. With AMX, oneDNN shares them and multiplies many rows."""

    BFLOAT16_TILES = (32, 64)
    """Outputs of a tile in oneDNN's possible layouts. `make_tiles` uses the last."""
    INT8_TILE = 64

    def __init__(self, weight: Tensor, scale: Tensor | None, backend: MatmulBackend) -> None:
        self.shape = weight.shape
        self.scale = scale
        self.backend: MatmulBackend = "native"
        self.onednn: OneDNNWeight | None = None
        inputs, widths = (2, self.BFLOAT16_TILES) if scale is None else (4, (self.INT8_TILE,))
        if backend == "native and oneDNN":
            self.onednn = OneDNNWeight(weight, scale)
            found = (_tiles_of(self.onednn.reordered, weight, tile, inputs) for tile in widths)
            tiles = next((tiles for tiles in found if tiles is not None), None)
            if tiles is not None:
                self.backend, self.tiles = backend, tiles
                return
            logger.info("unknown oneDNN layout for %s: native code multiplies all its batches", tuple(weight.shape))
            self.onednn = None
        self.tiles = make_tiles(weight, widths[-1], inputs)

    def __call__(self, x: Tensor, bias: Tensor | None, *, float32_out: bool = False) -> Tensor:
        # oneDNN would round a head's float32 logits to bfloat16.
        if self.onednn is not None and len(x) > SMALL_BATCH_ROWS and (self.scale is not None or not float32_out):
            return self.onednn(x, bias, float32_out=float32_out)
        return _library().linear(self.tiles, self.scale, x.contiguous(), bias, self.shape[0], float32_out=float32_out)

    def gather_rows(self, indices: Tensor) -> Tensor:
        return _library().embed(self.tiles, self.scale, indices.contiguous(), self.shape[1])


def _library() -> native.Library:
    library = native.library()
    assert library is not None  # tiles are packed only where it is there
    return library


def make_tiles(weight: Tensor, tile: int, inputs: int) -> Tensor:
    """A weight as tiles of `native.cpp`, padded with zeros -> [num_tiles, padded_in / inputs, tile, inputs]."""
    num_out, num_in = weight.shape
    padded = F.pad(weight, (0, -num_in % inputs, 0, -num_out % tile)).contiguous()
    words = padded.view(torch.int32).view(-1, tile, padded.shape[1] // inputs)
    return words.transpose(1, 2).contiguous().view(weight.dtype).view(len(words), -1, tile, inputs)


def _tiles_of(reordered: Tensor, weight: Tensor, tile: int, inputs: int) -> Tensor | None:
    """View oneDNN's reordered weight as tiles of `make_tiles`; None where its layout differs.

    Compares rows at the ends and in the middle: a layout that has all of these in place cannot have others elsewhere.
    """
    num_out, num_in = weight.shape
    size = torch.ops.mkldnn._nbytes(reordered)
    num_tiles = cdiv(num_out, tile)
    for pad in (inputs, 32, 64):  # inputs are padded to those of one instruction
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
    else:  # tiles for 256 rows serve fewer rows as well
        made = torch.ops.mkldnn._reorder_linear_weight(weight, 256)
    return made


def _multiply_bfloat16(x: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")
    return y


def _multiply_int8(x: Tensor, reordered: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """Multiply int8 x. It is passed as uint8 with zero point 128: only AMX multiplies a signed x."""
    unsigned = x.view(torch.uint8) ^ 128
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        unsigned, 1.0, 128, reordered, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


# -- features of this machine -----------------------------------------------------------------------------------------


def has_fast_bfloat16() -> bool:
    """True if the processor has bfloat16 instructions, so that bfloat16 is faster than float32 and not only smaller."""
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return has_onednn_bfloat16() and bool(has_instructions)


def has_amx() -> bool:
    """True if oneDNN uses the processor's matrix unit."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL"
    allowed = limit.upper() in ("ALL", "DEFAULT") or "AMX" in limit.upper()
    return allowed and bool(torch.cpu._is_amx_tile_supported())


@functools.cache
def has_onednn_bfloat16() -> bool:
    """True if oneDNN reorders bfloat16 weights and multiplies correctly with them."""
    return _succeeds(_try_bfloat16)


@functools.cache
def has_onednn_int8() -> bool:
    """True if oneDNN multiplies int8 correctly. Without VNNI it does not: its sums of two products overflow."""
    return _succeeds(_try_int8)


def _succeeds(product: Callable[[], bool]) -> bool:
    # The product runs in a thread of its own, so that its OpenMP workers end with it. With more workers than cores,
    # those that compute sleep between any two operations, and decoding takes twice as long.
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
    """Multiplies the largest values, whose sums overflow first."""
    weight, x = torch.full((64, 64), 127, dtype=torch.int8), torch.full((32, 64), 127, dtype=torch.int8)
    weight[::3], x[::2] = -127, -127
    scale, zeros = torch.ones(64), torch.zeros(64, dtype=torch.int64)
    y = _multiply_int8(x, _reorder(weight), scale, zeros)
    return torch.equal(y, x.float() @ weight.float().T)
