"""Linear layers on the CPU: weights packed in the layout of their fastest matrix product.

Each bfloat16 weight uses the first backend of this table that the machine supports (`choose_backend`):

    backend             needs                            up to SMALL_BATCH_ROWS rows       more rows
    native and oneDNN   a compiler, and AMX in oneDNN    native.cpp                        oneDNN
    native              a compiler                       native.cpp                        native.cpp
    oneDNN              oneDNN's product                 oneDNN, padded to these rows      oneDNN
    blocks              nothing                          float32, padded to these rows     float32

Where the processor has no instruction for bfloat16, oneDNN falls back to a reference product, a thousand times slower.
So oneDNN is used only where it is known to be fast. int8 is native (`grouped_linear`), or uses blocks. float16 always
uses blocks: no processor here has instructions for it.

Up to SMALL_BATCH_ROWS rows, the result of a row has the same bits in every batch: `native.cpp` has one order of
addition, and the other backends always multiply that many rows. All backends but oneDNN return float32 for
`float32_out`. The logits of an LM head are float32, so there it uses blocks instead (`pack_head`).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.cpu import grouped_linear, native
from octavo.kernels.cpu.huge_memory import move_to_huge
from octavo.kernels.groups import Groups, PackedHead, PackedWeight

logger = logging.getLogger("octavo.packed")

MatmulBackend = Literal["native and oneDNN", "native", "oneDNN", "blocks"]

SMALL_BATCH_ROWS = 16
"""Rows of x up to which the result of a row does not depend on the other rows. They cost little more than one row: they
are computed while the weights are read. On processors without a matrix unit, `native.cpp` is at least as fast as oneDNN
for more rows, too."""

BLOCK_BYTES = 1 << 20
"""Weights converted to float32 at a time: they stay in the second-level cache until they are multiplied."""


class CpuFeatures(NamedTuple):
    """Matrix products that this machine supports.

    native  `native.cpp` is compiled
    onednn  oneDNN has a fast product
    amx     oneDNN uses the processor's matrix unit
    """

    native: bool
    onednn: bool
    amx: bool


def choose_backend(machine: CpuFeatures) -> MatmulBackend:
    if machine.native:
        return "native and oneDNN" if machine.amx and machine.onednn else "native"
    return "oneDNN" if machine.onednn else "blocks"


def detect_features() -> CpuFeatures:
    return CpuFeatures(native.library() is not None, has_onednn_bfloat16(), has_amx())


def pack(weight: Tensor, backend: MatmulBackend | None = None) -> PackedWeight | None:
    """Pack a weight [num_out, num_in]; None where plain torch is as fast. backend: of bfloat16, or the fastest"""
    if _is_packed(weight) and (backend or _backend_for(weight)) == "oneDNN":
        return OneDNNWeight(weight)
    return pack_head(weight, backend)


def pack_head(weight: Tensor, backend: MatmulBackend | None = None) -> PackedHead | None:
    """Pack the weight of an LM head; None where plain torch is as fast."""
    if not _is_packed(weight):
        return None
    backend = backend or _backend_for(weight)
    return BlockwiseWeight(weight) if backend in ("oneDNN", "blocks") else TiledWeight(weight, backend)


def pack_groups(groups: Groups) -> PackedHead | None:
    """Pack a quantised weight; None if that would round its scales. Without a compiler, products convert it."""
    return BlockwiseWeight(groups) if native.library() is None else grouped_linear.pack_groups(groups)


def _is_packed(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)


def _backend_for(weight: Tensor) -> MatmulBackend:
    return choose_backend(detect_features()) if weight.dtype == torch.bfloat16 else "blocks"


def embed(table: Tensor, token_ids: Tensor) -> Tensor:
    """table[token_ids], for a table [num_rows, size] that is not packed."""
    if table.dtype == torch.bfloat16 and table.device.type == "cpu" and (library := native.library()) is not None:
        return library.embed(table, token_ids.contiguous(), table.shape[1])
    return F.embedding(token_ids, table)


def gather_columns(x: Tensor, order: Tensor) -> Tensor:
    """x[:, order]; order [num_in] int32."""
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and (library := native.library()) is not None:
        return library.gather_columns(x.contiguous(), order)
    return x.index_select(1, order)


# -- backends ---------------------------------------------------------------------------------------------------------


class BlockwiseWeight:
    """A plain or quantised weight that is converted to float32 some outputs at a time. x is not rounded."""

    backend: MatmulBackend = "blocks"

    def __init__(self, weight: Tensor | Groups) -> None:
        self.weight = weight
        self.nbytes = weight.nbytes if isinstance(weight, Tensor) else sum(plane.nbytes for plane in weight.planes())

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        y = _pad_to_small_batch(lambda x: blockwise_linear(x, self.weight), x)
        if bias is not None:
            y += bias
        return _written(y if float32_out else y.to(x.dtype), out)

    def gather_rows(self, indices: Tensor) -> Tensor:
        if isinstance(self.weight, Tensor):
            return self.weight[indices]
        return self.weight.map(lambda plane: plane[indices]).dequantised().bfloat16()


def blockwise_linear(x: Tensor, weight: Tensor | Groups) -> Tensor:
    """x @ weight.T in float32, for any dtypes."""
    num_out, num_in = weight.shape
    y = torch.empty(len(x), num_out)
    x, block = x.float(), max(1, BLOCK_BYTES // (4 * num_in))
    for begin in range(0, num_out, block):
        end = begin + block
        rows = weight[begin:end].float() if isinstance(weight, Tensor) else weight.rows(begin, end).dequantised()
        y[:, begin:end] = x @ rows.T
    return y


def _written(y: Tensor, out: Tensor | None) -> Tensor:
    return y if out is None else out.copy_(y)


def _pad_to_small_batch(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply the product to at least SMALL_BATCH_ROWS rows: its order of addition may depend on the number of rows."""
    num_rows = len(x)
    if num_rows >= SMALL_BATCH_ROWS:
        return product(x)
    return product(F.pad(x, (0, 0, 0, SMALL_BATCH_ROWS - num_rows)))[:num_rows]


class OneDNNWeight:
    """A weight that oneDNN multiplies."""

    backend: MatmulBackend = "oneDNN"

    def __init__(self, weight: Tensor) -> None:
        self.nbytes = weight.nbytes
        self.reordered = _reorder(weight)

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        y = _pad_to_small_batch(lambda x: _multiply(x, self.reordered, bias), x)
        return _written(y.float() if float32_out else y, out)


class TiledWeight:
    """A weight in the tiles of `native.cpp`. With AMX, oneDNN shares them and multiplies many rows."""

    TILES = (32, 64)
    """Outputs of a tile in oneDNN's possible layouts. `make_tiles` uses the last."""

    def __init__(self, weight: Tensor, backend: MatmulBackend) -> None:
        self.shape = weight.shape
        self.backend: MatmulBackend = "native"
        self.onednn: OneDNNWeight | None = None
        if backend == "native and oneDNN":
            self.onednn = OneDNNWeight(weight)
            found = (_tiles_of(self.onednn.reordered, weight, tile) for tile in self.TILES)
            tiles = next((tiles for tiles in found if tiles is not None), None)
            if tiles is not None:
                self.backend, self.tiles = backend, tiles
                return
            logger.info("unknown oneDNN layout for %s: native code multiplies all its batches", tuple(weight.shape))
            self.onednn = None
        self.tiles = make_tiles(weight, self.TILES[-1])

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        # oneDNN would round a head's float32 logits to bfloat16.
        if self.onednn is not None and len(x) > SMALL_BATCH_ROWS and not float32_out:
            return self.onednn(x, bias, out=out)
        x = x.contiguous()
        return _library().linear(self.tiles, x, bias, native.make_out(x, self.shape[0], float32_out, out))

    def gather_rows(self, indices: Tensor) -> Tensor:
        return _library().embed(self.tiles, indices.contiguous(), self.shape[1])

    @property
    def nbytes(self) -> int:
        return self.tiles.nbytes


def _library() -> native.Library:
    library = native.library()
    assert library is not None  # tiles are packed only where it is there
    return library


def make_tiles(weight: Tensor, tile: int) -> Tensor:
    """A weight as tiles of `native.cpp`, padded with zeros -> [num_tiles, padded_in / 2, tile, 2]."""
    num_out, num_in = weight.shape
    padded = F.pad(weight, (0, -num_in % 2, 0, -num_out % tile)).contiguous()
    words = padded.view(torch.int32).view(-1, tile, padded.shape[1] // 2)
    return move_to_huge(words.transpose(1, 2)).view(weight.dtype).view(len(words), -1, tile, 2)


def _tiles_of(reordered: Tensor, weight: Tensor, tile: int) -> Tensor | None:
    """View oneDNN's reordered weight as tiles of `make_tiles`; None where its layout differs.

    Compares rows at the ends and in the middle: a layout that has all of these in place cannot have others elsewhere.
    """
    num_out, num_in = weight.shape
    size = torch.ops.mkldnn._nbytes(reordered)
    num_tiles = cdiv(num_out, tile)
    for pad in (2, 32, 64):  # inputs are padded to those of one instruction
        padded_in = cdiv(num_in, pad) * pad
        num_numbers = num_tiles * tile * padded_in
        if num_numbers * weight.element_size() > size:
            continue
        memory = (ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(reordered))
        flat = torch.frombuffer(memory, dtype=weight.dtype, count=num_numbers)
        tiles = flat.view(num_tiles, padded_in // 2, tile, 2)
        some = torch.tensor([0, num_out // 3, num_out // 2, num_out - 1])
        if torch.equal(_rows_of(tiles, some, num_in), weight[some]):
            return tiles
    return None


def _rows_of(tiles: Tensor, indices: Tensor, num_in: int) -> Tensor:
    tile = tiles.shape[2]
    return tiles[indices // tile, :, indices % tile].flatten(1)[:, :num_in]


# -- oneDNN -----------------------------------------------------------------------------------------------------------


def _reorder(weight: Tensor) -> Tensor:
    made: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 256)  # tiles for 256 rows serve fewer rows as well
    return made


def _multiply(x: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")
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
    y = _multiply(weight[:4], reordered, None)
    return torch.equal(y, weight[:4]) and torch.ops.mkldnn._nbytes(reordered) >= weight.nbytes
