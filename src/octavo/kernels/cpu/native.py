"""`native.cpp`, compiled at first use by the machine's own compiler, and how its functions are called.

Compiling takes some seconds, once a machine: the library is kept in the cache folder under a digest of its source, the
compiler and the processor. Where there is no compiler, or OCTAVO_NATIVE=0 is set, `library` gives None and all of
`kernels.cpu` runs on torch alone, with the same results to rounding. Any other OCTAVO_NATIVE is the compiler's -march,
e.g. x86-64-v3, which shows how an older processor fares.

Products release Python's lock while they run, for others to go on meanwhile; what takes a few microseconds does not, as
getting it back may take longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from octavo.checkpoint.catalog import cache_dir

logger = logging.getLogger("octavo.native")

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = (
    *("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
    *("-fopenmp", "-shared", "-fPIC", "-fvisibility=hidden"),
)
COMPILE_S = 120.0

SUFFIXES = MappingProxyType({torch.float32: "f32", torch.bfloat16: "bf16"})
MOST_GROUP, MOST_HEAD_DIM, MOST_BLOCK = 16, 256, 256  # as in native.cpp


def _struct(name: str, *fields: tuple[Any, str]) -> type[ctypes.Structure]:
    """A struct of native.cpp, from its fields' types and names."""
    return type(name, (ctypes.Structure,), {"_fields_": [(n, kind) for kind, names in fields for n in names.split()]})


POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float
_Linear = _struct(
    "Linear",
    (POINTER, "tiles x scale bias y"),
    (LONG, "num_rows num_in padded_in num_out"),
    (INT, "wide_y num_threads"),
)
_Quantize = _struct("Quantize", (POINTER, "x out scale"), (LONG, "num_rows size"), (INT, "num_threads"))
_Embed = _struct("Embed", (POINTER, "token_ids tiles scale out"), (LONG, "num_tokens size padded"))
_Norm = _struct(
    "Norm",
    (POINTER, "x residual weight out stream"),
    (FLOAT, "eps"),
    (LONG, "num_rows size"),
    (INT, "wide_weight num_threads"),
)
_Gate = _struct("Gate", (POINTER, "gate_up out"), (LONG, "num_rows size"), (INT, "num_threads"))
_RopeWrite = _struct(
    "RopeWrite",
    (POINTER, "positions slots cos_sin"),
    (FLOAT, "eps"),
    (LONG, "num_tokens num_heads num_kv_heads head_dim q_stride k_stride v_stride block_stride block_size"),
    (POINTER, "q k v q_norm k_norm q_out kv_layer"),
    (INT, "wide_norm num_threads"),
)
_Attention = _struct(
    "Attention",
    (POINTER, "rows seq_lens tables"),
    (FLOAT, "scale"),
    (LONG, "num_seqs table_width window num_kv_heads group head_dim block_size block_stride"),
    (POINTER, "q kv_layer out lse"),
    (INT, "num_threads"),
)
_Race = _struct("Race", (POINTER, "logits temperature keys token_ids"), (LONG, "num_rows size"), (INT, "num_threads"))
_Call = _struct("Call", (POINTER, "function arguments"))


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _weight(tiles: Tensor) -> str:
    """What native.cpp calls tiles like these: their dtype, and their outputs."""
    return f"{'int8' if tiles.dtype == torch.int8 else 'bf16'}_{tiles.shape[2]}"


class Recording:
    """Calls of native functions in their order, with all that they read and write."""

    def __init__(self, replay: Any) -> None:
        self._replay = replay
        self._pairs: list[tuple[int, ctypes.Structure]] = []
        self._kept: list[Any] = []
        self._calls: Any = None

    def add(self, address: int, arguments: ctypes.Structure, tensors: tuple[Any, ...]) -> None:
        self._pairs.append((address, arguments))
        self._kept.append(tensors)

    def replay(self) -> None:
        """Do it all again, on whatever the same memory holds by now. Python's lock is free meanwhile."""
        if self._calls is None:
            calls = [_Call(address, ctypes.addressof(arguments)) for address, arguments in self._pairs]
            self._calls = (_Call * len(calls))(*calls)
        self._replay(self._calls, len(self._calls))


class Library:
    """The compiled functions, called with tensors on the CPU. What they take is checked by `kernels.cpu`, not here."""

    instructions: dict[str, str]  # what products of each kind are computed with

    def __init__(self, path: Path) -> None:
        unlocking, locked = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self._functions: dict[tuple[str, torch.dtype | None], tuple[Any, int]] = {}
        tiled = [f"{what}_{weight}" for what in ("linear", "embed") for weight in ("bf16_32", "bf16_64", "int8_64")]
        for name in (*tiled, "embed_plain", "quantize_rows"):
            self._functions[name, None] = _function(unlocking if name.startswith("linear") else locked, name)
        for name in ("add_rms_norm", "silu_mul", "rope_kv_write", "decode_attention", "race"):
            for dtype, suffix in SUFFIXES.items():
                self._functions[name, dtype] = _function(locked, f"{name}_{suffix}")
        words = (ctypes.c_char_p * 3).in_dll(unlocking, "instructions")
        bfloat16, int8, width = (word.decode() for word in words if word is not None)
        self.instructions = {"bfloat16": f"{bfloat16}, {width}", "int8": f"{int8}, {width}"}
        self._replay = unlocking.replay
        self._replay.argtypes, self._replay.restype = (POINTER, LONG), None
        self._local = threading.local()

    @contextlib.contextmanager
    def record(self) -> Iterator[Recording]:
        """Write down what this thread calls, while it is called."""
        recording = self._local.recording = Recording(self._replay)
        try:
            yield recording
        finally:
            self._local.recording = None

    def _call(self, name: str, dtype: torch.dtype | None, arguments: ctypes.Structure, *tensors: Any) -> None:
        """tensors: what the arguments point to."""
        function, address = self._functions[name, dtype]
        function(ctypes.byref(arguments))
        recording: Recording | None = getattr(self._local, "recording", None)
        if recording is not None:
            recording.add(address, arguments, tensors)

    def linear(
        self, tiles: Tensor, scale: Tensor | None, x: Tensor, bias: Tensor | None, num_out: int, *, wide: bool
    ) -> Tensor:
        """x @ w.T + bias; x [num_rows, num_in] bfloat16 -> [num_rows, num_out], bfloat16, or float32 if `wide`.

        A row's result does not depend on the other rows, to the last bit.

        tiles  w in tiles of outputs, zeros where there are fewer: [num_tiles, padded_in / 2, 32 or 64, 2] bfloat16, or
               [num_tiles, padded_in / 4, 64, 4] int8
        scale  [num_out] float32, of int8: w is tiles * scale, and each row of x is rounded to int8 first
        """
        num_rows, num_in = x.shape
        y = torch.empty(num_rows, num_out, dtype=torch.float32 if wide else torch.bfloat16)
        arguments = _Linear(
            tiles.data_ptr(),
            x.data_ptr(),
            _at(scale),
            _at(bias),
            y.data_ptr(),
            num_rows,
            num_in,
            tiles.shape[1] * tiles.shape[3],
            num_out,
            wide,
            torch.get_num_threads(),
        )
        self._call(f"linear_{_weight(tiles)}", None, arguments, tiles, scale, x, bias, y)
        return y

    def quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [num_rows, size] bfloat16 -> int8 of the same shape, and the scales [num_rows] float32 that undo it."""
        num_rows, size = x.shape
        out, scale = torch.empty(num_rows, size, dtype=torch.int8), torch.empty(num_rows)
        pointers = x.data_ptr(), out.data_ptr(), scale.data_ptr()
        self._call("quantize_rows", None, _Quantize(*pointers, num_rows, size, torch.get_num_threads()), x, out, scale)
        return out, scale

    def embed(self, table: Tensor, scale: Tensor | None, token_ids: Tensor, size: int) -> Tensor:
        """Rows [num_tokens, size] bfloat16 of a weight in tiles, see `linear`, or of a plain one [num_rows, size]."""
        out = torch.empty(len(token_ids), size, dtype=torch.bfloat16)
        pointers = token_ids.data_ptr(), table.data_ptr(), _at(scale), out.data_ptr()
        padded = size if table.ndim == 2 else table.shape[1] * table.shape[3]
        name = "embed_plain" if table.ndim == 2 else f"embed_{_weight(table)}"
        self._call(name, None, _Embed(*pointers, len(token_ids), size, padded), token_ids, table, scale, out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(normed, stream); without a residual, stream is nothing."""
        size = x.shape[-1]
        out = torch.empty_like(x)
        stream = out if residual is None else torch.empty_like(x)
        arguments = _Norm(
            x.data_ptr(),
            _at(residual),
            weight.data_ptr(),
            out.data_ptr(),
            stream.data_ptr(),
            eps,
            x.numel() // size,
            size,
            weight.dtype != x.dtype,
            torch.get_num_threads(),
        )
        self._call("add_rms_norm", x.dtype, arguments, x, residual, weight, out, stream)
        return out, stream

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        num_tokens, double = gate_up.shape
        out = gate_up.new_empty(num_tokens, double // 2)
        arguments = _Gate(gate_up.data_ptr(), out.data_ptr(), num_tokens, double // 2, torch.get_num_threads())
        self._call("silu_mul", gate_up.dtype, arguments, gate_up, out)
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
        arguments = _RopeWrite(
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
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            _at(q_norm),
            _at(k_norm),
            out.data_ptr(),
            kv_layer.data_ptr(),
            q_norm is not None and q_norm.dtype != q.dtype,
            torch.get_num_threads(),
        )
        tensors = q, k, v, positions, cos_sin, kv_layer, slot_mapping, q_norm, k_norm, out
        self._call("rope_kv_write", q.dtype, arguments, *tensors)
        return out

    def decode_attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        singles: Singles,
        out: Tensor,
        lse: Tensor | None,
        *,
        scale: float,
        window: int,
    ) -> None:
        """Into each single query's row of `out` [num_tokens, num_heads, head_dim] and of `lse`."""
        num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
        arguments = _Attention(
            *singles.pointers,
            scale,
            len(singles.rows),
            singles.block_tables.shape[1],
            window,
            num_kv_heads,
            q.shape[1] // num_kv_heads,
            head_dim,
            block_size,
            kv_layer.stride(0),
            q.data_ptr(),
            kv_layer.data_ptr(),
            out.data_ptr(),
            _at(lse),
            torch.get_num_threads(),
        )
        self._call("decode_attention", q.dtype, arguments, singles, q, kv_layer, out, lse)

    def race(self, logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
        """Draws from softmax(logits / temperature) by noise of those keys -> [num_rows] int64, as `reference.sample`.

        logits [num_rows, vocab_size]; temperature [num_rows] float32, above 0; keys [num_rows] int64.
        """
        num_rows, size = logits.shape
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        pointers = logits.data_ptr(), temperature.data_ptr(), keys.data_ptr(), token_ids.data_ptr()
        arguments = _Race(*pointers, num_rows, size, torch.get_num_threads())
        self._call("race", logits.dtype, arguments, logits, temperature, keys, token_ids)
        return token_ids


class Singles:
    """The sequences of a batch that have one query each.

    rows          [num_seqs] int64, each sequence's row of q
    seq_lens      [num_seqs] int32
    block_tables  [num_seqs, max_blocks] int32
    """

    def __init__(self, rows: Tensor, seq_lens: Tensor, block_tables: Tensor) -> None:
        self.rows = rows.contiguous()
        self.seq_lens = seq_lens.contiguous()
        self.block_tables = block_tables.contiguous()
        self.pointers = self.rows.data_ptr(), self.seq_lens.data_ptr(), self.block_tables.data_ptr()


def _function(library: ctypes.CDLL, name: str) -> tuple[Any, int]:
    """A function that takes one pointer, and its address."""
    function = getattr(library, name)
    function.argtypes, function.restype = (POINTER,), None
    return function, ctypes.cast(function, POINTER).value or 0


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


def library() -> Library | None:
    """The compiled library; None where there can be none. The first call of all compiles it, others wait."""
    with _compiling:
        return _load()


_compiling = threading.Lock()


@functools.cache
def _load() -> Library | None:
    march = os.environ.get("OCTAVO_NATIVE") or "native"
    if march == "0":
        logger.info("OCTAVO_NATIVE is 0: kernels.cpu runs on torch alone, several times slower")
        return None
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    if compiler is None:
        logger.warning("there is no C++ compiler: the CPU computes by torch alone, slower; install g++, or set CXX")
        return None
    try:
        made = Library(build(compiler, march))
    except (OSError, subprocess.SubprocessError, AttributeError, ValueError) as error:
        said = getattr(error, "stderr", None) or b""
        reason = " ".join(f"{error} {said.decode(errors='replace')[:200]}".split())
        logger.warning("the CPU computes by torch alone, slower: native code does not compile: %s", reason)
        return None
    logger.info("native products: %s", "; ".join(f"{dtype} by {how}" for dtype, how in made.instructions.items()))
    return made


def build(compiler: str, march: str) -> Path:
    """The library for a processor, compiled if it is not in the cache."""
    path = cache_dir() / "native" / f"{_digest(compiler, march)}.so"
    if not path.exists():
        _compile(compiler, march, path)
    return path


def _digest(compiler: str, march: str) -> str:
    """Of all that the library depends on: its source, how it is compiled, and for which processor."""
    processor = platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        processor += next((line for line in lines if line.startswith("flags")), "")
    stat = os.stat(compiler)
    parts = (SOURCE.read_text(), *FLAGS, march, os.path.realpath(compiler), str(stat.st_mtime_ns), processor)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _compile(compiler: str, march: str, path: Path) -> None:
    """Into place as a whole, so that nobody loads half a library; several may compile at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *FLAGS, f"-march={march}", str(SOURCE), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
        os.replace(made, path)
