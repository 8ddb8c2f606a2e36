"""Which kernels a GPU runs: the only code that reads its compute capability.

    GPU                 capability   long queries, products of few tokens   dependent launch   shared memory
    A100                8.0          portable, in Triton                    no                 163 KiB
    A10, L4, RTX 4090   8.6, 8.9     portable, in Triton                    no                  99 KiB
    H100, H200          9.0          `*_hopper`, in Gluon: wgmma and TMA    yes                227 KiB
    B200                10.0         portable, in Triton                    yes                227 KiB
    RTX 5090            12.0         portable, in Triton                    yes                 99 KiB

The files `*_hopper.py` are the only ones that need Triton's NVIDIA modules. They are imported where a GPU runs them.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch

logger = logging.getLogger("octavo")
LARGE_SHARED = 227 << 10


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernels of a GPU.

    hopper            the `*_hopper` kernels, for the tensors that they support
    dependent_launch  a kernel may start while its predecessor runs; see `launch`
    shared_bytes      limit of a program's shared memory; tunings with more have fewer stages
    reason            for people: the kernels, and why
    float8            it multiplies matrices of float8_e4m3fn
    """

    hopper: bool
    dependent_launch: bool
    shared_bytes: int
    reason: str
    float8: bool


def choose_kernels(capability: tuple[int, int] | None) -> KernelChoice:
    """The kernels for a compute capability; None: not on a GPU, but in Triton's interpreter."""
    if capability is None:
        return KernelChoice(False, False, LARGE_SHARED, "portable kernels: no GPU", True)
    name = "sm_{}{}".format(*capability)
    if capability == (9, 0):
        return KernelChoice(True, True, LARGE_SHARED, f"Hopper's kernels: {name} has wgmma", True)
    shared = {(8, 0): 163 << 10, (8, 7): 163 << 10}.get(
        capability, LARGE_SHARED if 9 <= capability[0] < 12 else 99 << 10
    )
    portable = f"portable kernels: {name} has no wgmma"
    return KernelChoice(False, capability >= (9, 0), shared, portable, capability >= (8, 9))


@functools.cache
def kernels_for(device: torch.device) -> KernelChoice:
    """`choose_kernels` for a device."""
    choice = choose_kernels(compute_capability(device))
    logger.info("%s: %s", device, choice.reason)
    return choice


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return count_multiprocessors(device)


def count_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # Triton's interpreter: few, so that programs share sequences in small tests, too
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
