"""Programmatic dependent launch (PDL): a kernel starts while its predecessor in the stream still runs.

The GPU idles for more than half a microsecond between two kernels of a CUDA graph, and some kernels take little more
than one. From Hopper on, a launch may begin before its predecessor has ended. Such a kernel calls
`wait_for_predecessor`; after the call, it sees all memory that the predecessor wrote. Work before the call is free,
such as fetching weights, which no kernel writes. Every program of the kernel must wait, including those without work: a
kernel that ends before its predecessor lets its own successor start too early.
"""

from __future__ import annotations

import functools
import threading

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.capability import kernels_for

try:
    from triton.language.extra.cuda import gdc_launch_dependents as gdc_launch_dependents
    from triton.language.extra.cuda import gdc_wait as gdc_wait
except ImportError:  # a Triton without NVIDIA's modules; no kernel has USE_PDL there
    gdc_launch_dependents = gdc_wait = None


class DryRun(threading.local):
    """is_on: this thread's kernels are listed and not launched, see `precompile.list_kernels`."""

    is_on = False


dry_run = DryRun()


@functools.cache
def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options for a kernel with the parameter USE_PDL."""
    return {"USE_PDL": True, "launch_pdl": True} if kernels_for(device).dependent_launch else {"USE_PDL": False}


def or_placeholder(placeholder: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """The tensors, with `placeholder` for each None: a kernel needs a pointer even where it never reads through it."""
    return [placeholder if tensor is None else tensor for tensor in tensors]


@triton.jit
def wait_before_successor(USE_PDL: tl.constexpr):
    """Wait for the predecessor, then let the successor start: for a kernel whose successor fills the GPU.

    Started earlier, the successor would take the multiprocessors from the predecessor that this kernel waits for.
    """
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def wait_for_predecessor(USE_PDL: tl.constexpr):
    """Let the successor start, then wait: after this call, the predecessor's writes are visible."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
