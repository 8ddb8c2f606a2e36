"""Start-up checks for GPUs; each failure is one line with a remedy."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from octavo.config import DEFAULT_GPU_MEMORY_UTILIZATION, GIB, EngineArgs
from octavo.errors import MemoryBudgetError, ParameterError
from octavo.runner.failures import clear_tracebacks, device_lost, is_out_of_memory
from octavo.runner.memory.budget import SPARE_BYTES, ceil_2, doctor_hint
from octavo.runner.memory.profile import MAX_UTILIZATION, MIN_KV_BYTES, gib

DRIVER = Path("/proc/driver/nvidia/version")
"""Exists if NVIDIA's driver is loaded."""
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}


def find_gpu() -> torch.device:
    """The current GPU. Raises `ParameterError`, in one line, if no GPU can be used."""
    if reason := _init_error():
        raise ParameterError(f"device is cuda, but no GPU can be used: {reason}; use device=cpu", param="device")
    return torch.device("cuda", torch.cuda.current_device())


def unusable_gpu_reason() -> str:
    """Why torch cannot use this machine's GPU. "" without a GPU, with a hidden one, or for a torch without CUDA."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or torch.version.cuda is None or not (DRIVER.exists() or shutil.which("nvidia-smi")):
        return ""
    return _init_error()


def _init_error() -> str:
    """The error of CUDA's initialisation, in one line; "" for none."""
    try:
        cast("Any", torch.cuda.init)()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def check_weights(weight_bytes: int, args: EngineArgs) -> None:
    """Raises `MemoryBudgetError` if the weights do not fit. Called before they are loaded."""
    free, total = _free()
    room = min(free, int(total * (args.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION)))
    if weight_bytes > room:
        needed = weight_bytes + SPARE_BYTES + MIN_KV_BYTES
        if (share := ceil_2(needed / total)) <= MAX_UTILIZATION and needed <= free:
            remedy = f"raise gpu_memory_utilization to {share:g} or more"
        elif args.dtype == "float32" and needed - weight_bytes // 2 <= room:
            remedy = "set dtype to bfloat16, which halves the weights"
        elif share <= MAX_UTILIZATION:
            remedy = f"free {gib(needed - free)} more on the GPU, and set gpu_memory_utilization to {share:g} or more"
        else:
            remedy = "choose a smaller model or dtype"
        raise MemoryBudgetError(
            f"the weights take {gib(weight_bytes)} and the GPU has room for {gib(room)} ({gib(free)} free of "
            f"{gib(total)}); {remedy}; {doctor_hint(args)}"
        )


@contextmanager
def startup_errors(device: torch.device, doing: str, remedy: Callable[[int], str]) -> Iterator[None]:
    """Turns errors of a GPU into one line while an engine starts on it. Errors on a CPU pass unchanged.

    Raises `MemoryBudgetError` if memory runs out: other processes may take memory after the plan was made. Raises
    `DeviceLostError` if the device no longer answers.

    remedy  the remedy for a number of missing bytes; 0: unknown
    """
    try:
        yield
    except RuntimeError as error:
        if device.type != "cuda":
            raise
        if not is_out_of_memory(error):
            try:
                torch.cuda.synchronize()
            except RuntimeError as cause:
                raise device_lost(cause) from error
            raise
        clear_tracebacks(error)
        free, total = _free()
        num_bytes, text = _requested(error)
        raise MemoryBudgetError(
            f"memory ran out while {doing}: {text} failed, with {gib(free)} of the GPU's {gib(total)} free; "
            + remedy(max(0, num_bytes - free))
        ) from None


def _free() -> tuple[int, int]:
    """(free bytes, total bytes) of the GPU. The first call takes some memory itself."""
    try:
        return torch.cuda.mem_get_info()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        text = "other processes use all of the GPU's memory, CUDA cannot start; free some (nvidia-smi lists them)"
        raise MemoryBudgetError(text) from None


def _requested(error: BaseException) -> tuple[int, str]:
    """(bytes, text) of the allocation that failed. Only torch's errors state its size; 0 for others."""
    found = re.search(rf"Tried to allocate ([\d.]+) ({'|'.join(UNITS)})", str(error))
    if found is None:
        return 0, "an allocation"
    return int(float(found[1]) * UNITS[found[2]]), f"an allocation of {found[1]} {found[2]}"
