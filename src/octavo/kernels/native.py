"""`native.cpp`, compiled at first use by the machine's own compiler, and how its functions are called.

Compiling takes some seconds, once a machine: the library is kept in the cache folder under a digest of its source, the
compiler and the processor. Where there is no compiler, or OCTAVO_NATIVE=0 is set, `library` gives None and all of
`kernels.cpu` runs on torch alone, with the same results to rounding.

Products release Python's lock while they run, for others to go on meanwhile; what takes a few microseconds does not, as
getting it back may take longer.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from octavo.catalog import cache_dir

logger = logging.getLogger("octavo.native")

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-shared", "-fPIC", "-fvisibility=hidden"),
)
COMPILE_S = 120.0

SUFFIXES = MappingProxyType({torch.float32: "f32", torch.bfloat16: "bf16"})
MOST_GROUP, MOST_HEAD_DIM, MOST_BLOCK = 16, 256, 256  # as in native.cpp


class _Rope(ctypes.Structure):
    _fields_ = (
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_long) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_long) for name in ("q_stride", "k_stride", "v_stride", "block_stride", "block_size")),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_long) for name in ("num_seqs", "table_width", "window", "num_kv_heads", "group")),
        *((name, ctypes.c_long) for name in ("head_dim", "block_size", "block_stride")),
    )


POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "linear_bf16": (POINTER,) * 4 + (INT,) + (LONG,) * 4 + (INT,),
    "linear_int8": (POINTER,) * 6 + (INT,) + (LONG,) * 4 + (INT,),
    "quantize_rows_bf16": (POINTER,) * 3 + (LONG,) * 2 + (INT,),
    "add_rms_norm": (POINTER,) * 3 + (INT, FLOAT) + (POINTER,) * 2 + (LONG,) * 2 + (INT,),
    "silu_mul": (POINTER,) * 2 + (LONG,) * 2 + (INT,),
    "rope_kv_write": (POINTER,) * 6 + (INT,) + (POINTER,) * 2 + (INT,),
    "decode_attention": (POINTER,) * 5 + (INT,),
}


class Library:
    """The compiled functions, called with tensors on the CPU. What they take is checked by `kernels.cpu`, not here."""

    def __init__(self, path: Path) -> None:
        lockless, locked = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self._functions: dict[tuple[str, torch.dtype], Any] = {}
        for name, arguments in ARGUMENTS.items():
            for dtype, suffix in SUFFIXES.items():
                generic = not name.startswith(("linear", "quantize"))
                function = getattr(locked if generic else lockless, f"{name}_{suffix}" if generic else name)
                function.argtypes, function.restype = arguments, None
                self._functions[name, dtype] = function

    def linear(self, tiles: Tensor, x: Tensor, bias: Tensor | None, num_out: int, *, wide: bool) -> Tensor:
        """x @ w.T + bias; x [num_rows, num_in] bfloat16.

        tiles [num_tiles, padded_in / 2, 32, 2] bfloat16: w in tiles of 32 outputs, zeros where there are fewer
        -> [num_rows, num_out], bfloat16, or float32 if `wide`
        """
        num_rows, num_in = x.shape
        y = torch.empty(num_rows, num_out, dtype=torch.float32 if wide else x.dtype)
        self._functions["linear_bf16", x.dtype](
            tiles.data_ptr(),
            x.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            wide,
            num_rows,
            num_in,
            tiles.shape[1] * 2,
            num_out,
            torch.get_num_threads(),
        )
        return y

    def linear_int8(
        self, tiles: Tensor, scale: Tensor, x: Tensor, x_scale: Tensor, bias: Tensor | None, *, wide: bool
    ) -> Tensor:
        """(x * x_scale) @ (w * scale).T + bias; x [num_rows, num_in] int8, x_scale [num_rows], scale [num_out] float32.

        tiles [num_tiles, padded_in / 4, 64, 4] int8: w in tiles of 64 outputs, zeros where there are fewer
        """
        num_rows, num_in = x.shape
        num_out = scale.shape[0]
        y = torch.empty(num_rows, num_out, dtype=torch.float32 if wide else torch.bfloat16)
        self._functions["linear_int8", torch.bfloat16](
            tiles.data_ptr(),
            x.data_ptr(),
            x_scale.data_ptr(),
            scale.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            wide,
            num_rows,
            num_in,
            tiles.shape[1] * 4,
            num_out,
            torch.get_num_threads(),
        )
        return y

    def quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [num_rows, size] bfloat16 -> int8 of the same shape, and the scales [num_rows] float32 that undo it."""
        num_rows, size = x.shape
        out, scale = torch.empty(num_rows, size, dtype=torch.int8), torch.empty(num_rows)
        self._functions["quantize_rows_bf16", x.dtype](
            x.data_ptr(), out.data_ptr(), scale.data_ptr(), num_rows, size, torch.get_num_threads()
        )
        return out, scale

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(normed, stream); without a residual, stream is nothing."""
        size = x.shape[-1]
        out = torch.empty_like(x)
        stream = out if residual is None else torch.empty_like(x)
        self._functions["add_rms_norm", x.dtype](
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            weight.dtype != x.dtype,
            eps,
            out.data_ptr(),
            stream.data_ptr(),
            x.numel() // size,
            size,
            torch.get_num_threads(),
        )
        return out, stream

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        num_tokens, double = gate_up.shape
        out = gate_up.new_empty(num_tokens, double // 2)
        self._functions["silu_mul", gate_up.dtype](
            gate_up.data_ptr(), out.data_ptr(), num_tokens, double // 2, torch.get_num_threads()
        )
        return out

    def rope_kv_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        slot_mapping: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        num_tokens, num_heads, head_dim = q.shape
        out = torch.empty(q.shape, dtype=q.dtype)
        shape = _Rope(
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            cos_sin.data_ptr(),
            eps,
            num_tokens,
            num_heads,
            k.shape[1],
            head_dim,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            kv_layer.stride(0),
            kv_layer.shape[3],
        )
        self._functions["rope_kv_write", q.dtype](
            ctypes.byref(shape),
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            q_norm is not None and q_norm.dtype != q.dtype,
            out.data_ptr(),
            kv_layer.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def decode_attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        rows: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        *,
        scale: float,
        window: int,
    ) -> DecodeAttention:
        """What attends to the keys of one query a sequence, at any layer whose q and kv_layer are like these.

        rows          [num_seqs] int64, each sequence's row of q
        seq_lens      [num_seqs] int32
        block_tables  [num_seqs, max_blocks] int32
        """
        num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
        shape = _Attention(
            rows.data_ptr(),
            seq_lens.data_ptr(),
            block_tables.data_ptr(),
            scale,
            len(rows),
            block_tables.shape[1],
            window,
            num_kv_heads,
            q.shape[1] // num_kv_heads,
            head_dim,
            block_size,
            kv_layer.stride(0),
        )
        return DecodeAttention(self._functions["decode_attention", q.dtype], shape, (rows, seq_lens, block_tables))


class DecodeAttention:
    """A call of `decode_attention` but for the tensors that differ from layer to layer."""

    def __init__(self, function: Any, shape: _Attention, kept: tuple[Tensor, ...]) -> None:
        self._function = function
        self._shape = shape
        self._reference = ctypes.byref(shape)
        self._kept = kept  # what `shape` points to

    def __call__(self, q: Tensor, kv_layer: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """Into each sequence's row of `out` [num_tokens, num_heads, head_dim] and of `lse` [num_tokens, num_heads]."""
        self._function(
            self._reference,
            q.data_ptr(),
            kv_layer.data_ptr(),
            out.data_ptr(),
            None if lse is None else lse.data_ptr(),
            torch.get_num_threads(),
        )


def takes(x: Tensor) -> bool:
    """Whether x is of a kind that the library's functions are compiled for."""
    return x.dtype in SUFFIXES and x.device.type == "cpu"


def takes_weight(weight: Tensor | None, x: Tensor) -> bool:
    """Whether a norm's weight is of x's dtype, or float32."""
    return weight is None or weight.dtype in (x.dtype, torch.float32)


def takes_heads(q: Tensor, kv_layer: Tensor) -> bool:
    """Whether q's heads, and the K and V that they meet, have sizes and strides that the library knows."""
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    return (
        takes(q)
        and kv_layer.dtype == q.dtype
        and q.stride()[1:] == (head_dim, 1)
        and kv_layer.stride()[1:] == (num_kv_heads * block_size * head_dim, block_size * head_dim, head_dim, 1)
        and head_dim <= MOST_HEAD_DIM
        and block_size <= MOST_BLOCK
        and q.shape[1] <= num_kv_heads * MOST_GROUP
    )


@functools.cache
def library() -> Library | None:
    """The compiled library; None where there can be none. The first call of all compiles it."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    if os.environ.get("OCTAVO_NATIVE") == "0" or compiler is None:
        return None
    try:
        path = cache_dir() / "native" / f"{_digest(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        return Library(path)
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        logger.info("kernels.cpu runs without native code: %s", " ".join(str(error).split()))
        return None


def _digest(compiler: str) -> str:
    """Of all that the library depends on: its source, how it is compiled, and for which processor."""
    processor = platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        processor += next((line for line in lines if line.startswith("flags")), "")
    stat = os.stat(compiler)
    parts = (SOURCE.read_text(), *FLAGS, os.path.realpath(compiler), str(stat.st_mtime_ns), processor)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _compile(compiler: str, path: Path) -> None:
    """Into place as a whole, so that nobody loads half a library; several may compile at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        subprocess.run(
            [compiler, *FLAGS, str(SOURCE), "-o", str(made)], check=True, capture_output=True, timeout=COMPILE_S
        )
        os.replace(made, path)
