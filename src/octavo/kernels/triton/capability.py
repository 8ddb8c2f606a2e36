"""Which kernels a GPU runs: the only code that reads its compute capability.

    GPU                       capability    long queries, products of few tokens   dependent launch
    A100, A10, L4, RTX 4090   8.0 to 8.9    portable, in Triton                    no
    H100, H200                9.0           `*_hopper`, in Gluon: wgmma and TMA    yes
    B200, RTX 5090            10.0, 12.0    portable, in Triton                    yes

The files `*_hopper.py` are the only ones that need Triton's NVIDIA modules. They are imported where a GPU runs them.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch

logger = logging.getLogger("octavo")


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernels of a GPU.

    hopper            the `*_hopper` kernels, for the tensors that they support
    dependent_launch  a kernel may start while its predecessor runs; see `launch`
    reason            for people: the kernels, and why
    """

    hopper: bool
    dependent_launch: bool
    reason: str


def choose_kernels(capability: tuple[int, int] | None) -> KernelChoice:
    """The kernels for a compute capability; None: not on a GPU, but in Triton's interpreter."""
    if capability is None:
        return KernelChoice(False, False, "portable kernels: no GPU")
    name = "sm_{}{}".format(*capability)
    if capability == (9, 0):
        return KernelChoice(True, True, f"Hopper's kernels: {name} has wgmma")
    return KernelChoice(False, capability >= (9, 0), f"portable kernels: {name} has no wgmma")


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
