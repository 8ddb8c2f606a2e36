"""Memory that the system maps 2 MB at a time, if it can: reading weights takes up to a fifth less time than by 4 kB."""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading

import torch
from torch import Tensor

HUGE, LINE = 2 << 20, 64  # bytes
CHUNK = 32 << 20
"""Weights below this share mappings, which are freed with the last of their weights."""


def empty_huge(num_bytes: int) -> Tensor:
    """[num_bytes] uint8, at the beginning of a cache line."""
    global _free
    if sys.platform != "linux":
        return torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes >= CHUNK:
        return _map(num_bytes)
    with _sharing:
        if num_bytes > len(_free):
            _free = _map(CHUNK)
        part, _free = _free[:num_bytes], _free[num_bytes + -num_bytes % LINE :]
    return part


_free = torch.empty(0, dtype=torch.uint8)
_sharing = threading.Lock()


def _map(num_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, num_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping
    return whole[-whole.data_ptr() % HUGE :][:num_bytes]


def move_to_huge(tensor: Tensor) -> Tensor:
    """A contiguous copy in such memory."""
    return empty_huge(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)
