"""llama.cpp's quantised blocks as `kernels.groups.Groups`: the same numbers, in planes.

A block has 32 inputs of an output, or 256 (K quants). Its fields follow each other in the file:

    d, m, dmin   float16, the block's scale, minimum, and unit of minima
    sub          12 bytes: 6 bits of each of 8 scales and 8 minima
    e            exponent of the block's scale, as in MXFP4
    qs           low 4 bits, or all 8    qh   the bits above    sc   int8 scales of 16 inputs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.group_form import GGUF_FORMS
from octavo.kernels.groups import Groups

Blocks = NDArray[np.uint8]


class BlockKind(NamedTuple):
    """fields: (name, bytes) of a block    values: fields -> the values of a block's inputs"""

    fields: tuple[tuple[str, int], ...]
    values: Callable[[dict[str, Blocks]], Blocks]


def _nibbles(octets: Blocks, run: int) -> Blocks:
    """Low bits of `run` octets, then their high bits, and so on. octets [num_blocks, n] -> [num_blocks, 2 * n]"""
    runs = octets.reshape(len(octets), -1, 1, run)
    nibbles: Blocks = np.concatenate((runs & 15, runs >> 4), axis=2)
    return nibbles.reshape(len(octets), -1)


def _fields_of_bits(octets: Blocks, bits: int) -> Blocks:
    """The lowest `bits` bits of 32 octets, then the next ones, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs: Blocks = octets.reshape(len(octets), -1, 1, 32) >> shifts & np.uint8((1 << bits) - 1)
    return runs.reshape(len(octets), -1)


def _fifth_bits(octets: Blocks) -> Blocks:
    """A bit of each input, as 16."""
    bits: Blocks = np.unpackbits(octets, axis=1, bitorder="little")
    return bits * np.uint8(16)


_D, _M, _DMIN, _SUB = ("d", 2), ("m", 2), ("dmin", 2), ("sub", 12)
KINDS: dict[str, BlockKind] = {
    "Q4_0": BlockKind((_D, ("qs", 16)), lambda f: _nibbles(f["qs"], 16)),
    "Q4_1": BlockKind((_D, _M, ("qs", 16)), lambda f: _nibbles(f["qs"], 16)),
    "Q5_0": BlockKind((_D, ("qh", 4), ("qs", 16)), lambda f: _nibbles(f["qs"], 16) | _fifth_bits(f["qh"])),
    "Q5_1": BlockKind((_D, _M, ("qh", 4), ("qs", 16)), lambda f: _nibbles(f["qs"], 16) | _fifth_bits(f["qh"])),
    "Q8_0": BlockKind((_D, ("qs", 32)), lambda f: f["qs"] ^ np.uint8(128)),
    "Q4_K": BlockKind((_D, _DMIN, _SUB, ("qs", 128)), lambda f: _nibbles(f["qs"], 32)),
    "Q5_K": BlockKind(
        (_D, _DMIN, _SUB, ("qh", 32), ("qs", 128)),
        lambda f: _nibbles(f["qs"], 32) | _fields_of_bits(f["qh"], 1) * np.uint8(16),
    ),
    "Q6_K": BlockKind(
        (("qs", 128), ("qh", 64), ("sc", 16), _D),
        lambda f: _nibbles(f["qs"], 64) | _fields_of_bits(f["qh"], 2) * np.uint8(16),
    ),
    "MXFP4": BlockKind((("e", 1), ("qs", 16)), lambda f: _nibbles(f["qs"], 16)),
}


def read_blocks(name: str, data: Blocks) -> Groups:
    """Rows of a weight of one of GGUF_FORMS. data [num_rows, bytes of a row]"""
    form, kind, num_rows = GGUF_FORMS[name], KINDS[name], len(data)
    block_bytes = sum(size for _, size in kind.fields)
    blocks = np.ascontiguousarray(data).reshape(-1, block_bytes)
    fields, start = {}, 0
    for name, size in kind.fields:
        fields[name] = np.ascontiguousarray(blocks[:, start : start + size])
        start += size

    def plane(field: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(field.reshape(num_rows, -1))

    values = plane(kind.values(fields))
    if form.is_e2m1:
        return Groups(form, values, plane(fields["e"]).view(torch.float8_e8m0fnu).float())
    d = plane(fields["d"].view(np.float16))
    if not form.is_nested:
        minima = plane(-fields["m"].view(np.float16)) if form.has_minima else None
        return Groups(form, values, d, minima=minima)
    if not form.has_minima:
        return Groups(form, values, plane(fields["sc"].view(np.int8)), super_scales=d)
    scales, minima = (plane(part) for part in _sixes(fields["sub"]))
    return Groups(
        form, values, scales, minima=minima, super_scales=d, super_minima=plane(fields["dmin"].view(np.float16))
    )


def _sixes(sub: Blocks) -> tuple[Blocks, Blocks]:
    """The 8 scales and the 8 minima of blocks, [num_blocks, 8] each.

    The first four of both are whole bytes' low bits; of the others, byte 8 + i has the low halves, and the two highest
    bits of bytes i and 4 + i the rest.
    """
    first, second, halves = sub[:, :4], sub[:, 4:8], sub[:, 8:]
    scales = np.concatenate((first & 63, halves & 15 | first >> 2 & 48), axis=1)
    minima = np.concatenate((second & 63, halves >> 4 | second >> 2 & 48), axis=1)
    return scales, minima
