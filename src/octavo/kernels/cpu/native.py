"""Compiles `native.cpp` at first use with the machine's compiler, and calls its functions.

Compiling takes some seconds, once a machine. The library is cached under a digest of its source, the compiler and the
processor. Without a compiler, or with OCTAVO_NATIVE=0, `library` returns None and `kernels.cpu` runs on torch alone,
with the same results to rounding. Any other OCTAVO_NATIVE is the compiler's -march: x86-64-v3, for instance, shows the
speed of an older processor.

Matrix products release Python's GIL while they run. Functions of a few microseconds keep it: getting it back may take
longer.
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
from collections.abc import Sequence as Seq
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.checkpoint.catalog import cache_dir
from octavo.kernels.metadata import RaggedBatch, SamplingTensors
from octavo.kernels.reference.experts import ExpertGate, Routing
from octavo.kernels.row_state import DecodeInputs, RowState

logger = logging.getLogger("octavo.native")

SOURCE = Path(__file__).with_suffix(".cpp")
SOURCES = (
    SOURCE,
    *(SOURCE.with_name(f"{name}.h") for name in ("chunks", "experts", "grouped", "recurrent", "step", "team")),
)
FLAGS = (
    *("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
    *("-fopenmp-simd", "-pthread", "-shared", "-fPIC", "-fvisibility=hidden"),
)
COMPILE_S = 300.0  # several processes may share a core

GATES = MappingProxyType({"silu": 0, "gelu": 1, "swiglu": 2})  # as in experts.h
SUFFIXES = MappingProxyType({torch.float32: "f32", torch.bfloat16: "bf16"})
MAX_GROUP_SIZE, MAX_HEAD_DIM, MAX_BLOCK_SIZE = 16, 512, 256  # as in native.cpp


def _struct(name: str, *fields: tuple[Any, str]) -> type[ctypes.Structure]:
    """A struct of native.cpp; fields are pairs of a type and names."""
    return type(name, (ctypes.Structure,), {"_fields_": [(n, kind) for kind, names in fields for n in names.split()]})


POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float
_Linear = _struct(
    "Linear",
    (POINTER, "tiles x bias y"),
    (LONG, "num_rows num_in padded_in num_out y_stride"),
    (INT, "float32_out num_threads"),
)
_Embed = _struct("Embed", (POINTER, "token_ids tiles out"), (LONG, "num_tokens size padded"))
_GatherColumns = _struct("GatherColumns", (POINTER, "x order out"), (LONG, "num_rows size"))
_Grouped = _struct(
    "Grouped",
    (POINTER, "blocks x bias y"),
    (LONG, "num_rows num_in num_out y_stride"),
    (INT, "zero float32_out num_threads"),
)
_PackGroups = _struct(
    "PackGroups",
    (POINTER, "values scales seconds supers super_minima blocks"),
    (LONG, "num_out num_in"),
    (INT, "num_threads"),
)
_EmbedGroups = _struct("EmbedGroups", (POINTER, "token_ids blocks out"), (LONG, "num_tokens size"), (INT, "zero"))
_Route = _struct(
    "Route",
    (POINTER, "logits experts weights"),
    (LONG, "num_tokens num_experts top_k"),
    (INT, "softmax_first renormalise"),
)
_Experts = _struct(
    "Experts",
    (POINTER, "x weight bias experts weights out"),
    (LONG, "num_tokens top_k num_experts num_in num_out"),
    (FLOAT, "alpha limit"),
    (INT, "gate zero num_threads"),
)
_STATES = (POINTER, "pool tables reads query_start seq_lens"), (LONG, "num_seqs first width table_width")
_CausalConv = _struct(
    "CausalConv", *_STATES, (POINTER, "x weight out"), (LONG, "x_stride num_channels size"), (INT, "num_threads")
)
_DeltaRule = _struct(
    "DeltaRule",
    *_STATES,
    (POINTER, "q k v decay beta out"),
    (LONG, "q_stride k_stride v_stride num_heads num_key_heads key_dim value_dim"),
    (INT, "num_threads"),
)
_DeltaGates = _struct(
    "DeltaGates", (POINTER, "a b log_decay step_bias decay beta"), (LONG, "num_tokens num_heads a_stride b_stride")
)
_GatedNorm = _struct(
    "GatedNorm",
    (POINTER, "x weight gate out"),
    (FLOAT, "eps"),
    (LONG, "num_tokens num_heads size gate_stride"),
    (INT, "num_threads"),
)
_SigmoidGate = _struct(
    "SigmoidGate", (POINTER, "x gate out"), (LONG, "num_rows size gate_stride"), (INT, "is_column num_threads")
)
_Norm = _struct(
    "Norm",
    (POINTER, "x residual weight out residual_out"),
    (FLOAT, "eps"),
    (LONG, "num_rows size"),
    (INT, "float32_weight num_threads"),
)
_Gate = _struct("Gate", (POINTER, "gate_up out"), (LONG, "num_rows size"), (INT, "num_threads"))
_Elementwise = _struct(
    "Elementwise",
    (POINTER, "out a b"),
    (LONG, "num_rows size out_stride a_stride b_stride"),
    (FLOAT, "factor"),
)
_RopeWrite = _struct(
    "RopeWrite",
    (POINTER, "positions slots cos_sin"),
    (FLOAT, "eps"),
    (LONG, "num_tokens num_heads num_kv_heads head_dim q_stride k_stride v_stride block_stride block_size"),
    (POINTER, "q k v q_norm k_norm q_out kv_layer"),
    (INT, "float32_norm int8_kv num_threads"),
)
_Attention = _struct(
    "Attention",
    (POINTER, "rows counts seq_lens tables"),
    (FLOAT, "scale"),
    (LONG, "num_seqs table_width window num_kv_heads group head_dim block_size block_stride"),
    (POINTER, "q kv_layer out lse sinks"),
    (INT, "int8_kv num_threads"),
)
_PrepareDecode = _struct(
    "PrepareDecode",
    (POINTER, "rows depths ends"),
    (POINTER, "tables last_token num_computed drafts params done"),
    (POINTER, "live_rows token_ids positions slots window_slots"),
    (POINTER, "seq_lens block_tables window_tables state_tables state_reads"),
    (POINTER, "temperature top_p min_p top_k seed sample_index position"),
    (LONG, "num_lines null_row num_groups num_tables max_blocks state_blocks max_drafts num_columns block_size"),
    (LONG, "window_slots_stride window_tables_stride"),
)
_CommitTokens = _struct(
    "CommitTokens",
    (POINTER, "rows tokens positions step_counter ring last_token num_computed done history params"),
    (LONG, "num_tokens ring_width max_len num_columns"),
)
_Sample = _struct(
    "Sample",
    (POINTER, "logits temperature seed sample_index position token_ids"),
    (LONG, "num_rows size first"),
    (INT, "is_checked num_threads"),
)
_Call = _struct("Call", (POINTER, "function arguments"))


def _states(states: Tensor, first: int, batch: RaggedBatch) -> tuple[int, ...]:
    tables, reads = batch.state_tables, batch.state_reads
    assert tables is not None and reads is not None and batch.seq_lens.is_contiguous()
    assert tables.is_contiguous() and reads.is_contiguous()
    pointers = (x.data_ptr() for x in (states, tables, reads, batch.query_start, batch.seq_lens))
    return *pointers, len(tables), first, states.shape[1], tables.shape[1]


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def make_out(x: Tensor, num_out: int, float32_out: bool, out: Tensor | None) -> Tensor:
    """`out`, or a new tensor for the products of x [num_rows, num_in] bfloat16."""
    if out is not None:
        return out
    return torch.empty(len(x), num_out, dtype=torch.float32 if float32_out else torch.bfloat16)


GROUPED_BLOCKS = MappingProxyType(
    {
        "4_plain": (64, 576),
        "4_minima": (64, 640),
        "4_zeros": (128, 1216),
        "4_wide_zeros": (128, 1088),
        "4_nested": (256, 2368),
        "5_plain": (64, 704),
        "5_minima": (64, 768),
        "5_nested": (256, 2880),
        "6_nested_16": (256, 3392),
        "8_plain": (64, 1088),
        "8_zeros": (128, 2240),
        "4_e2m1": (128, 1088),
    }
)
"""Inputs and bytes of a block of each kind of grouped.h."""


class GroupedWeight(Protocol):
    """A weight in blocks of grouped.h, its shape [num_out, num_in], its zero if it has one for all groups."""

    kind: str
    blocks: Tensor
    shape: tuple[int, int]
    zero: int


class ExpertsWeight(NamedTuple):
    """The weights of all experts for one product.

    memory   [num_experts * num_out, num_in], or blocks of a kind of grouped.h, whole tiles for each expert
    num_out  of an expert
    """

    memory: Tensor
    num_experts: int
    num_out: int
    kind: str = ""
    zero: int = 0


class RecordedCalls:
    """A sequence of native calls that can be replayed. Keeps the tensors that they read and write alive."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._pairs: list[tuple[int, ctypes.Structure]] = []
        self._kept: list[Any] = []
        self._calls: Any = None

    def add(self, address: int, arguments: ctypes.Structure, tensors: tuple[Any, ...]) -> None:
        self._pairs.append((address, arguments))
        self._kept.append(tensors)

    def replay(self) -> None:
        """Repeat all calls on the current contents of the same memory. Releases the GIL. Another recording records
        them in turn."""
        if self._calls is None:
            calls = [_Call(address, ctypes.addressof(arguments)) for address, arguments in self._pairs]
            self._calls = (_Call * len(calls))(*calls)
        self._library.replay(self._calls, len(self._calls))
        if (recording := self._library.recording) is not None:
            recording._pairs += self._pairs
            recording._kept += self._kept


class Library:
    """The compiled functions, called with tensors on the CPU. The callers in `kernels.cpu` check their arguments."""

    instructions: dict[str, str]  # dtype -> the processor's instructions for its products

    def __init__(self, path: Path) -> None:
        without_gil, with_gil = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self._functions: dict[tuple[str, torch.dtype | None], tuple[Any, int]] = {}
        for name in ("linear_bf16_32", "linear_bf16_64"):
            self._functions[name, None] = _function(without_gil, name)
        for name in ("embed_bf16_32", "embed_bf16_64", "embed_plain", "gather_columns"):
            self._functions[name, None] = _function(with_gil, name)
        for kind in GROUPED_BLOCKS:
            for name, opened in (
                ("grouped_linear", without_gil),
                ("experts_in", without_gil),
                ("experts_out", without_gil),
                ("pack_groups", without_gil),
                ("embed_groups", with_gil),
            ):
                self._functions[f"{name}_{kind}", None] = _function(opened, f"{name}_{kind}")
        for name in ("route_tokens", "prepare_decode", "commit_tokens"):
            self._functions[name, None] = _function(with_gil, name)
        self._functions["chunk_attention", torch.bfloat16] = _function(without_gil, "chunk_attention_bf16")
        self._functions["add_bf16", torch.float32] = _function(with_gil, "add_bf16_f32")
        for name in ("experts_in", "experts_out", "causal_conv", "delta_rule", "gated_rms_norm"):
            for dtype, suffix in SUFFIXES.items():
                self._functions[name, dtype] = _function(without_gil, f"{name}_{suffix}")
        for name in (
            "add_rms_norm",
            "silu_mul",
            "gelu_mul",
            *("add", "mul", "div", "copy"),
            "delta_gates",
            "sigmoid_mul",
            "rope_kv_write",
            "decode_attention",
            "sample",
        ):
            for dtype, suffix in SUFFIXES.items():
                self._functions[name, dtype] = _function(with_gil, f"{name}_{suffix}")
        words = (ctypes.c_char_p * 3).in_dll(without_gil, "instructions")
        bfloat16, int8, width = (word.decode() for word in words if word is not None)
        self.instructions = {"bfloat16": f"{bfloat16}, {width}", "int8": f"{int8}, {width}"}
        self.replay = without_gil.replay
        self.replay.argtypes, self.replay.restype = (POINTER, LONG), None
        self._local = threading.local()

    @property
    def recording(self) -> RecordedCalls | None:
        """The recording of this thread's calls; None: there is none."""
        return getattr(self._local, "recording", None)

    @contextlib.contextmanager
    def record(self) -> Iterator[RecordedCalls]:
        """Record this thread's calls inside `with`; they also run."""
        recording = self._local.recording = RecordedCalls(self)
        try:
            yield recording
        finally:
            self._local.recording = None

    def record_elementwise(self, name: str, tensors: tuple[Tensor, ...], strides: Seq[int], factor: float) -> None:
        """Record out = a + b, a * factor, a / factor or a, without computing it.

        name     "add", "add_bf16" for a bfloat16 b and float32, "mul", "div", "copy"
        tensors  out, a and b [num_rows, ...], each row contiguous
        strides  of each, from row to row
        """
        out = tensors[0]
        arguments = _Elementwise(*map(_pointer, tensors), len(out), out[0].numel(), *strides, factor)
        _, address = self._functions[name, out.dtype]
        assert self.recording is not None
        self.recording.add(address, arguments, tensors)

    def _call(self, name: str, dtype: torch.dtype | None, arguments: ctypes.Structure, *tensors: Any) -> None:
        """tensors: all that the arguments point to, to be kept by a recording."""
        function, address = self._functions[name, dtype]
        function(ctypes.byref(arguments))
        if (recording := self.recording) is not None:
            recording.add(address, arguments, tensors)

    def linear(self, tiles: Tensor, x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """out = x @ w.T + bias; x [num_rows, num_in] bfloat16, out [num_rows, num_out] bfloat16 or float32.

        The bits of a row's result do not depend on the other rows.

        tiles  w in tiles of outputs, padded with zeros: [num_tiles, padded_in / 2, 32 or 64, 2] bfloat16
        out    its rows may be further apart
        """
        arguments = _Linear(
            tiles.data_ptr(),
            x.data_ptr(),
            _pointer(bias),
            out.data_ptr(),
            *x.shape,
            tiles.shape[1] * 2,
            out.shape[1],
            out.stride(0),
            out.dtype == torch.float32,
            torch.get_num_threads(),
        )
        self._call(f"linear_bf16_{tiles.shape[2]}", None, arguments, tiles, x, bias, out)
        return out

    def grouped_linear(self, weight: GroupedWeight, x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """The same for a weight in groups."""
        arguments = _Grouped(
            weight.blocks.data_ptr(),
            x.data_ptr(),
            _pointer(bias),
            out.data_ptr(),
            *x.shape,
            out.shape[1],
            out.stride(0),
            weight.zero,
            out.dtype == torch.float32,
            torch.get_num_threads(),
        )
        self._call(f"grouped_linear_{weight.kind}", None, arguments, weight.blocks, x, bias, out)
        return out

    def pack_groups(self, kind: str, values: Tensor, *planes: Tensor | None, blocks: Tensor) -> None:
        """Write a weight's values and scales, minima or zeros, super scales and super minima to blocks of zeros."""
        tensors = [None if plane is None else plane.contiguous() for plane in (values, *planes)]
        num_out, num_in = values.shape
        pointers = map(_pointer, tensors)
        arguments = _PackGroups(*pointers, blocks.data_ptr(), num_out, num_in, torch.get_num_threads())
        self._call(f"pack_groups_{kind}", None, arguments, *tensors, blocks)

    def route(self, logits: Tensor, top_k: int, softmax_first: bool, renormalise: bool) -> Routing:
        """See `reference.route`."""
        num_tokens, num_experts = logits.shape
        weights = torch.empty(num_tokens, top_k)
        experts = torch.empty(num_tokens, top_k, dtype=torch.int32)
        pointers = logits.data_ptr(), experts.data_ptr(), weights.data_ptr()
        arguments = _Route(*pointers, num_tokens, num_experts, top_k, softmax_first, renormalise)
        self._call("route_tokens", None, arguments, logits, experts, weights)
        return Routing(experts, weights)

    def experts_in(
        self, x: Tensor, weight: ExpertsWeight, bias: Tensor | None, routing: Routing, gate: ExpertGate
    ) -> Tensor:
        """See `reference.experts_in`."""
        out = x.new_empty(*routing.experts.shape, weight.num_out // 2)
        self._experts("experts_in", x, weight, bias, routing, out, gate)
        return out

    def experts_out(self, h: Tensor, weight: ExpertsWeight, bias: Tensor | None, routing: Routing) -> Tensor:
        """See `reference.experts_out`."""
        out = h.new_empty(len(h), weight.num_out)
        self._experts("experts_out", h, weight, bias, routing, out, ExpertGate())
        return out

    def _experts(
        self,
        name: str,
        x: Tensor,
        weight: ExpertsWeight,
        bias: Tensor | None,
        routing: Routing,
        out: Tensor,
        gate: ExpertGate,
    ) -> None:
        arguments = _Experts(
            x.data_ptr(),
            weight.memory.data_ptr(),
            _pointer(bias),
            routing.experts.data_ptr(),
            routing.weights.data_ptr(),
            out.data_ptr(),
            *routing.experts.shape,
            weight.num_experts,
            x.shape[-1],
            weight.num_out,
            gate.alpha,
            gate.limit,
            GATES[gate.name],
            weight.zero,
            torch.get_num_threads(),
        )
        called = (f"{name}_{weight.kind}", None) if weight.kind else (name, x.dtype)
        self._call(*called, arguments, x, weight.memory, bias, routing, out)

    def embed(self, table: Tensor, token_ids: Tensor, size: int) -> Tensor:
        """Rows [num_tokens, size] bfloat16 of a weight in tiles, as for `linear`, or of a plain weight."""
        out = torch.empty(len(token_ids), size, dtype=torch.bfloat16)
        padded = size if table.ndim == 2 else table.shape[1] * 2
        name = "embed_plain" if table.ndim == 2 else f"embed_bf16_{table.shape[2]}"
        pointers = token_ids.data_ptr(), table.data_ptr(), out.data_ptr()
        self._call(name, None, _Embed(*pointers, len(token_ids), size, padded), token_ids, table, out)
        return out

    def gather_columns(self, x: Tensor, order: Tensor) -> Tensor:
        """x[:, order] of bfloat16; order [num_in] int32."""
        out = torch.empty_like(x)
        self._call("gather_columns", None, _GatherColumns(*map(_pointer, (x, order, out)), *x.shape), x, order, out)
        return out

    def embed_groups(self, weight: GroupedWeight, token_ids: Tensor) -> Tensor:
        """Rows [num_tokens, num_in] bfloat16 of a weight in groups."""
        out = torch.empty(len(token_ids), weight.shape[1], dtype=torch.bfloat16)
        pointers = token_ids.data_ptr(), weight.blocks.data_ptr(), out.data_ptr()
        arguments = _EmbedGroups(*pointers, *out.shape, weight.zero)
        self._call(f"embed_groups_{weight.kind}", None, arguments, token_ids, weight.blocks, out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(normed, x + residual); without a residual, the second is the first."""
        size = x.shape[-1]
        out = torch.empty_like(x)
        residual_out = out if residual is None else torch.empty_like(x)
        arguments = _Norm(
            x.data_ptr(),
            _pointer(residual),
            weight.data_ptr(),
            out.data_ptr(),
            residual_out.data_ptr(),
            eps,
            x.numel() // size,
            size,
            weight.dtype != x.dtype,
            torch.get_num_threads(),
        )
        self._call("add_rms_norm", x.dtype, arguments, x, residual, weight, out, residual_out)
        return out, residual_out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate("silu_mul", gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate("gelu_mul", gate_up)

    def _gate(self, name: str, gate_up: Tensor) -> Tensor:
        num_tokens, double = gate_up.shape
        out = gate_up.new_empty(num_tokens, double // 2)
        arguments = _Gate(gate_up.data_ptr(), out.data_ptr(), num_tokens, double // 2, torch.get_num_threads())
        self._call(name, gate_up.dtype, arguments, gate_up, out)
        return out

    def causal_conv(self, x: Tensor, weight: Tensor, states: Tensor, first: int, batch: RaggedBatch) -> Tensor:
        """See `reference.causal_conv`; weight float32."""
        (num_channels, size), out = weight.shape, torch.empty(x.shape, dtype=x.dtype)
        arguments = _CausalConv(
            *_states(states, first, batch),
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.stride(0),
            num_channels,
            size,
            torch.get_num_threads(),
        )
        self._call("causal_conv", x.dtype, arguments, x, weight, states, batch, out)
        return out

    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        states: Tensor,
        first: int,
        batch: RaggedBatch,
    ) -> Tensor:
        """See `reference.gated_delta_rule`."""
        out = torch.empty(v.shape, dtype=v.dtype)
        arguments = _DeltaRule(
            *_states(states, first, batch),
            *(x.data_ptr() for x in (q, k, v, decay, beta, out)),
            *(x.stride(0) for x in (q, k, v)),
            v.shape[1],
            *q.shape[1:],
            v.shape[2],
            torch.get_num_threads(),
        )
        self._call("delta_rule", v.dtype, arguments, q, k, v, decay, beta, states, batch, out)
        return out

    def delta_gates(self, a: Tensor, b: Tensor, log_decay: Tensor, step_bias: Tensor) -> tuple[Tensor, Tensor]:
        """See `reference.delta_gates`."""
        decay, beta = torch.empty(2, *a.shape)
        tensors = a, b, log_decay, step_bias, decay, beta
        arguments = _DeltaGates(*map(_pointer, tensors), *a.shape, a.stride(0), b.stride(0))
        self._call("delta_gates", a.dtype, arguments, *tensors)
        return decay, beta

    def gated_rms_norm(self, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        """See `reference.gated_rms_norm`."""
        out = torch.empty(gate.shape, dtype=gate.dtype)
        tensors = x, weight, gate, out
        arguments = _GatedNorm(*map(_pointer, tensors), eps, *x.shape, gate.stride(0), torch.get_num_threads())
        self._call("gated_rms_norm", x.dtype, arguments, *tensors)
        return out

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """See `reference.sigmoid_mul`."""
        out, is_column = torch.empty_like(x), gate.shape[1] < x.shape[1]
        pointers = map(_pointer, (x, gate, out))
        arguments = _SigmoidGate(*pointers, *x.shape, gate.stride(0), is_column, torch.get_num_threads())
        self._call("sigmoid_mul", x.dtype, arguments, x, gate, out)
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
            _pointer(q_norm),
            _pointer(k_norm),
            out.data_ptr(),
            kv_layer.data_ptr(),
            q_norm is not None and q_norm.dtype != q.dtype,
            kv_layer.dtype == torch.int8,
            torch.get_num_threads(),
        )
        tensors = q, k, v, positions, cos_sin, kv_layer, slot_mapping, q_norm, k_norm, out
        self._call("rope_kv_write", q.dtype, arguments, *tensors)
        return out

    def attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        queries: Queries,
        out: Tensor,
        lse: Tensor | None,
        *,
        scale: float,
        window: int,
        sinks: Tensor | None,
    ) -> None:
        """Paged attention of queries, written to their rows of `out`, shaped as q, and of `lse`."""
        num_kv_heads, block_size = kv_layer.shape[2:4]
        arguments = _Attention(
            *queries.pointers,
            scale,
            len(queries.rows),
            queries.block_tables.shape[1],
            window,
            num_kv_heads,
            q.shape[1] // num_kv_heads,
            q.shape[2],
            block_size,
            kv_layer.stride(0),
            q.data_ptr(),
            kv_layer.data_ptr(),
            out.data_ptr(),
            _pointer(lse),
            _pointer(sinks),
            kv_layer.dtype == torch.int8,
            torch.get_num_threads(),
        )
        name = "decode_attention" if queries.counts is None else "chunk_attention"
        self._call(name, q.dtype, arguments, queries, q, kv_layer, out, lse, sinks)

    def prepare_decode(self, state: RowState, inputs: DecodeInputs, block_size: int) -> None:
        """See `reference.prepare_decode_inputs`. Block tables are filled up to the longest sequence."""
        batch, of_rows = inputs.batch, inputs.sampling
        slots, tables = batch.window_slots, batch.window_tables
        assert batch.block_tables.shape[1] == state.max_blocks and batch.block_tables.is_contiguous()
        tensors = (
            *(inputs.rows, inputs.depths, inputs.ends),
            *(state.block_tables, state.last_token, state.num_computed, state.drafts, state.sampling_params),
            *(state.done, inputs.live_rows, inputs.token_ids, batch.positions, batch.slot_mapping, slots),
            *(batch.seq_lens, batch.block_tables, tables, batch.state_tables, batch.state_reads),
            *(of_rows.temperature, of_rows.top_p, of_rows.min_p, of_rows.top_k),
            *(of_rows.seed, of_rows.sample_index, of_rows.position),
        )
        arguments = _PrepareDecode(
            *map(_pointer, tensors),
            len(inputs.rows),
            state.null_row,
            state.num_groups,
            state.num_lines,
            state.max_blocks,
            state.state_blocks,
            state.drafts.shape[1],
            state.sampling_params.shape[1],
            block_size,
            0 if slots is None else slots.stride(0),
            0 if tables is None else tables.stride(0),
        )
        self._call("prepare_decode", None, arguments, *tensors)

    def commit_tokens(
        self, state: RowState, rows: Tensor, tokens: Tensor, positions: Tensor, ring: Tensor, step_counter: Tensor
    ) -> None:
        """See `reference.commit_sampled_tokens`."""
        of_rows = state.last_token, state.num_computed, state.done, state.history, state.sampling_params
        tensors = rows, tokens, positions, step_counter, ring, *of_rows
        widths = ring.stride(0), state.history.shape[1], state.sampling_params.shape[1]
        self._call("commit_tokens", None, _CommitTokens(*map(_pointer, tensors), len(rows), *widths), *tensors)

    def sample(self, logits: Tensor, params: SamplingTensors, first: int = 0, *, is_checked: bool) -> Tensor:
        """Sample as `reference.sample`, without filters -> [num_rows] int64; logits [num_rows, vocab_size].

        first       token of the first column; the result counts from it
        is_checked  as `reference.sample_checked`: -1 for a row with NaN or infinity. Else all temperatures are above 0
        """
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        tensors = logits, params.temperature, params.seed, params.sample_index, params.position, token_ids
        arguments = _Sample(*map(_pointer, tensors), *logits.shape, first, is_checked, torch.get_num_threads())
        self._call("sample", logits.dtype, arguments, *tensors)
        return token_ids


class Queries:
    """The last queries of some sequences of a batch.

    rows          [num_seqs] int64, the row of q of each sequence, or the first one of several
    seq_lens      [num_seqs] int32
    block_tables  [num_seqs, max_blocks] int32
    counts        [num_seqs] int64, queries of each; None: one
    """

    def __init__(self, rows: Tensor, seq_lens: Tensor, block_tables: Tensor, counts: Tensor | None = None) -> None:
        self.rows = rows.contiguous()
        self.counts = counts
        self.seq_lens = seq_lens.contiguous()
        self.block_tables = block_tables.contiguous()
        self.pointers = self.rows.data_ptr(), _pointer(counts), self.seq_lens.data_ptr(), self.block_tables.data_ptr()


def _function(library: ctypes.CDLL, name: str) -> tuple[Any, int]:
    """A function of one pointer argument, and its address."""
    function = getattr(library, name)
    function.argtypes, function.restype = (POINTER,), None
    return function, ctypes.cast(function, POINTER).value or 0


def supports(x: Tensor) -> bool:
    """True if the library has functions for x's dtype and device."""
    return x.dtype in SUFFIXES and x.device.type == "cpu"


def supports_norm_weight(weight: Tensor | None, x: Tensor) -> bool:
    """True if the library supports the dtype of a norm's weight: x's dtype or float32."""
    return weight is None or weight.dtype in (x.dtype, torch.float32)


def supports_heads(q: Tensor, kv_layer: Tensor) -> bool:
    """True if the library supports the sizes and strides of q and of the layer's K and V."""
    num_kv_heads, block_size, width = kv_layer.shape[2:]
    return (
        supports(q)
        and kv_layer.dtype in (q.dtype, torch.int8)
        and q.stride()[1:] == (q.shape[2], 1)
        and kv_layer.stride()[1:] == (num_kv_heads * block_size * width, block_size * width, width, 1)
        and block_size <= MAX_BLOCK_SIZE
        and supports_sizes(q.shape[2], q.shape[1] // num_kv_heads)
    )


def supports_sizes(head_dim: int, group_size: int) -> bool:
    """True if the library supports heads of this size, and so many query heads for each of K and V."""
    return head_dim <= MAX_HEAD_DIM and group_size <= MAX_GROUP_SIZE


def library_for(x: Tensor, *others: Tensor) -> Library | None:
    """The compiled library if it supports these tensors: contiguous, of one dtype."""
    if not supports(x) or not x.is_contiguous():
        return None
    for other in others:
        if other.dtype != x.dtype or not other.is_contiguous():
            return None
    return library()


def library() -> Library | None:
    """The compiled library, or None if it cannot be compiled. The first call compiles it; concurrent calls wait."""
    with _compiling:
        return _load()


_compiling = threading.Lock()


@functools.cache
def _load() -> Library | None:
    march = os.environ.get("OCTAVO_NATIVE") or "native"
    if march == "0":
        logger.info("OCTAVO_NATIVE is 0: the CPU's kernels run on torch alone, several times slower")
        return None
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    if compiler is None:
        logger.warning("no C++ compiler: the CPU's kernels run on torch alone, slower; install g++ or set CXX")
        return None
    try:
        compiled = Library(build(compiler, march))
    except (OSError, subprocess.SubprocessError, AttributeError, ValueError) as error:
        stderr = getattr(error, "stderr", None) or b""
        reason = " ".join(f"{error} {stderr.decode(errors='replace')[:200]}".split())
        logger.warning("native.cpp does not compile: the CPU's kernels run on torch alone, slower: %s", reason)
        return None
    logger.info("native products: %s", "; ".join(f"{dtype} by {how}" for dtype, how in compiled.instructions.items()))
    return compiled


def build(compiler: str, march: str) -> Path:
    """Path of the library for a processor; compiles it if it is not in the cache."""
    path = cache_dir() / "native" / f"{_digest(compiler, march)}.so"
    if not path.exists():
        _compile(compiler, march, path)
    return path


def _digest(compiler: str, march: str) -> str:
    """Digest of the sources, the compiler, its flags and the processor."""
    processor = platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        processor += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    stat = os.stat(compiler)
    sources = (path.read_text() for path in SOURCES)
    parts = (*sources, *FLAGS, march, os.path.realpath(compiler), str(stat.st_mtime_ns), processor)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _compile(compiler: str, march: str, path: Path) -> None:
    """Compile, then move the file into place atomically: several processes may compile at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled = Path(folder) / path.name
        command = [compiler, *FLAGS, f"-march={march}", str(SOURCE), "-o", str(compiled)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
        os.replace(compiled, path)
