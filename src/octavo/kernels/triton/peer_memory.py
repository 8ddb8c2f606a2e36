"""Buffers that the GPUs of a host write to one another (CUDA's IPC), and the sums of ranks over them."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton import launch
from octavo.kernels.triton.linear import skinny
from octavo.kernels.triton.linear.tuning import TILE_TOKENS, supports_hopper
from octavo.kernels.triton.norms import add_rms_norm
from octavo.kernels.triton.reduce import (
    NO_LIMIT,
    PAIRED_BYTES,
    PeerBuffers,
    buffer_shapes,
    push_add,
    push_add_norm,
    push_gather,
    push_reduce,
    split_buffer,
)
from octavo.kernels.triton.sent_sums import CopiedSum, CopyEngine

logger = logging.getLogger("octavo")
MAX_PUSHED_BYTES = 8 << 20
"""Larger messages take NCCL; benchmarks/kernels/bench_reduce.py measures where it is faster."""
MIN_SENT_BYTES = 32 << 20
"""A batch whose sums are shorter is not computed in parts: launched one by one, so many kernels may keep the host
busier than the GPU. Graphs of shorter passes may gain, too."""
PART_TOKENS = 128
"""The first of two parts of a batch has a multiple: a tile of products."""
HANDLE_BYTES = 64
DEVICE_TO_DEVICE = 3
LAZY_ENABLE_PEER_ACCESS = 1
NO_HANDLE = bytes(HANDLE_BYTES)

Exchange = Callable[[bytes], list[bytes]]
"""Called by every rank with as many bytes -> those of all ranks. No rank returns before all have called."""


@dataclass(frozen=True, slots=True)
class PeerReducer:
    """Up to some MiB are pushed through peer memory, see `reduce`; the others take NCCL. CUDA graphs capture both.

    Of two ranks, a layer's sums of at least `min_sent_bytes` are sent in parts by copy engines, see `sent_sums`.

    all_reduce_large, all_gather_large  NCCL's
    engine  None: nothing is sent in parts
    """

    buffers: PeerBuffers
    all_reduce_large: Callable[[Tensor], Tensor]
    all_gather_large: Callable[[Tensor], Tensor]
    engine: CopyEngine | None = None
    min_sent_bytes: int = MIN_SENT_BYTES

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in x's memory if that is contiguous: the same bits on all ranks."""
        x = x.contiguous()
        if self.buffers.slots_for(1, x.nbytes):
            return push_reduce(self.buffers, x)
        return self.all_reduce_large(x)

    def add_reduced(self, residual: NormedResidual, partial: Tensor, norm: Tensor) -> NormedResidual:
        """residual + the sum of all ranks' partial [num_tokens, size], with the next norm's weight, norm [size]."""
        if self.buffers.slots_for(len(partial), partial.shape[1] * partial.itemsize):
            return push_add(self.buffers, residual, partial, norm)
        return skinny.make_normed_residual(residual.x + self.all_reduce_large(partial), norm)

    def add_linear(
        self, residual: NormedResidual, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor
    ) -> NormedResidual:
        """`add_reduced` of the product x @ weight.T + bias, on Hopper in one kernel: see `skinny.add_linear`."""
        num_words = len(x) * len(weight) // 2
        if (
            supports_hopper(weight)
            and len(weight) % 2 == 0
            and len(x) <= TILE_TOKENS
            and num_words <= self.buffers.words.capacity
        ):
            return skinny.add_linear(residual, x, weight, bias, norm, peers=self.buffers)
        return self.add_reduced(residual, skinny.few_rows_linear(x, weight, bias), norm)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`reference.add_rms_norm` of the sum of all ranks' x [num_tokens, size], which it may overwrite."""
        x = x.contiguous()
        if self.buffers.blocks.fits(len(x), x.shape[1] * x.itemsize):
            return push_add_norm(self.buffers, x, residual.contiguous(), norm, eps)
        return add_rms_norm(self.all_reduce(x), residual, norm, eps)

    def part_size(self, num_tokens: int, row_bytes: int) -> int:
        """See `RankSums.part_size`."""
        size = _first_part(num_tokens)
        is_sent = self.engine is not None and size < num_tokens and num_tokens * row_bytes >= self.min_sent_bytes
        return size if is_sent and size * row_bytes <= self.buffers.sends.capacity else 0

    def send(self, partial: Tensor, slot: int) -> CopiedSum:
        """See `RankSums.send`."""
        assert self.engine is not None
        return CopiedSum.send(self.buffers, self.engine, partial.contiguous(), slot)

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, m] of each rank -> [n, size * m], rank r's columns from r * m on."""
        x = x.contiguous()
        if self.buffers.slots_for(len(x), x.shape[1] * x.itemsize):
            return push_gather(self.buffers, x)
        return self.all_gather_large(x)


def _first_part(num_tokens: int) -> int:
    return cdiv(num_tokens, 2 * PART_TOKENS) * PART_TOKENS


class PeerCopies:
    """The `CopyEngine` of a GPU whose peers' memory is mapped."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._runtime = _runtime()

    def copy(self, copies: Sequence[tuple[Tensor, int]]) -> Any:
        if launch.dry_run.is_on:
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for tensor, address in copies:
            target, source = ctypes.c_void_p(address), ctypes.c_void_p(tensor.data_ptr())
            size, stream = ctypes.c_size_t(tensor.nbytes), ctypes.c_void_p(self._stream.cuda_stream)
            _check(self._runtime.cudaMemcpyAsync(target, source, size, DEVICE_TO_DEVICE, stream), "cudaMemcpyAsync")
        return self._stream.record_event()

    def wait(self, end: Any) -> None:
        if end is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(end)


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_byte * HANDLE_BYTES),)


def make_reducer(
    rank: int,
    size: int,
    device: torch.device,
    exchange: Exchange,
    all_reduce: Callable[[Tensor], Tensor],
    all_gather: Callable[[Tensor], Tensor],
    max_num_tokens: int,
    row_bytes: int,
) -> PeerReducer | None:
    """A rank's sums; None on every rank if one has no peer memory.

    all_reduce, all_gather  NCCL's    max_num_tokens, row_bytes  see `Communicator.make_tensor_parallel`
    """
    is_sent = size == 2 and max_num_tokens * row_bytes >= MIN_SENT_BYTES
    sent_bytes = _first_part(max_num_tokens) * row_bytes if is_sent else 0
    buffers = open_buffers(rank, size, device, exchange, sent_bytes=sent_bytes)
    if buffers is None:
        return None
    return PeerReducer(buffers, all_reduce, all_gather, PeerCopies(device) if is_sent else None)


def open_buffers(
    rank: int,
    size: int,
    device: torch.device,
    exchange: Exchange,
    max_bytes: int = MAX_PUSHED_BYTES,
    *,
    sent_bytes: int = 0,
    spin_limit: int = NO_LIMIT,
    paired_bytes: int = PAIRED_BYTES,
) -> PeerBuffers | None:
    """Allocate this rank's buffer on the current device, and map the others'. None on every rank if one cannot.

    max_bytes, sent_bytes  see `buffer_shapes`

    The memory is that of the process: no engine frees it.
    """
    shapes = buffer_shapes(size, max_bytes, paired_bytes, sent_bytes)
    mine, handle, problem = _Memory(sum(map(math.prod, shapes))), NO_HANDLE, ""
    try:
        runtime = _runtime()
        handle = mine.allocate(runtime)
        torch.cuda.synchronize(device)  # it is zero before another rank writes
    except (OSError, AttributeError, RuntimeError) as error:
        problem = str(error)
    addresses = []
    for peer, other in enumerate(exchange(handle)):
        if peer == rank:
            addresses.append(mine.address)
        elif other == NO_HANDLE or problem:
            problem = problem or f"rank {peer} has no peer memory"
        else:
            try:
                addresses.append(_open(runtime, other))
            except RuntimeError as error:
                problem = str(error)
    text = problem.encode()[:HANDLE_BYTES].ljust(HANDLE_BYTES, b"\0")
    problems = [other.rstrip(b"\0").decode() for other in exchange(text)]
    if any(problems):
        logger.warning("sums over ranks take NCCL: %s", problem or next(filter(None, problems)))
        return None
    buffer = torch.as_tensor(mine, device=device)
    return split_buffer(rank, buffer, addresses, shapes, spin_limit=spin_limit, paired_bytes=paired_bytes)


class _Memory:
    """Memory of CUDA's allocator and not of torch's, whose blocks are parts of what a handle names."""

    def __init__(self, num_words: int) -> None:
        self.num_words, self.address = num_words, 0

    def allocate(self, runtime: Any) -> bytes:
        """Zeros -> their handle for other processes."""
        num_bytes, pointer, handle = 8 * self.num_words, ctypes.c_void_p(), _Handle()
        _check(runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(num_bytes)), "cudaMalloc")
        _check(runtime.cudaMemset(pointer, 0, ctypes.c_size_t(num_bytes)), "cudaMemset")
        _check(runtime.cudaIpcGetMemHandle(ctypes.byref(handle), pointer), "cudaIpcGetMemHandle")
        self.address = pointer.value or 0
        return bytes(handle.data)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_words,), "typestr": "<i8", "data": (self.address, False), "version": 2}


def _open(runtime: Any, handle: bytes) -> int:
    pointer = ctypes.c_void_p()
    code = runtime.cudaIpcOpenMemHandle(
        ctypes.byref(pointer), _Handle.from_buffer_copy(handle), ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS)
    )
    _check(code, "cudaIpcOpenMemHandle")
    return pointer.value or 0


def _check(code: int, name: str) -> None:
    if code:
        raise RuntimeError(f"{name} returned error {code}")


def _runtime() -> Any:
    """The CUDA runtime that torch has loaded."""
    with open("/proc/self/maps") as maps:
        paths = [line.split()[-1] for line in maps if "libcudart" in line]
    if not paths:
        raise OSError("this process has not loaded libcudart")
    return ctypes.CDLL(paths[0])
