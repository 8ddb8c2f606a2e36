"""Launches that overlap on a GPU: a kernel starts while the one before it ends, and waits only where it must.

Between two kernels of a CUDA graph lies more than half a microsecond in which the GPU does nothing, and some of them
take little more than one.
From Hopper on, a launch may begin before its predecessor has ended (programmatic dependent launch): such a kernel first
calls `wait_for_predecessor`, after which all memory is as it would be otherwise, and all that it does before (fetching
weights, which nobody writes) costs nothing. All of its programs wait, also those without work: a kernel that ended
before its predecessor would let its own successor start too early.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def overlapped(device: torch.device) -> dict[str, bool]:
    """What to launch a kernel with that has the parameter OVERLAPPED."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAPPED": False}
    return {"OVERLAPPED": True, "launch_pdl": True}


def given(instead: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Pointers for a kernel to tensors that may not be there: those it never follows, and any will do for them."""
    return [instead if tensor is None else tensor for tensor in tensors]


@triton.jit
def wait_before_successor(OVERLAPPED: tl.constexpr):
    """`wait_for_predecessor` of a kernel whose successor fills the GPU: started while this one waits itself, that would
    take the room of what this one waits for."""
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def wait_for_predecessor(OVERLAPPED: tl.constexpr):
    """Its own successor may start, and wait for this kernel in turn; from here on it may touch what others write."""
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
