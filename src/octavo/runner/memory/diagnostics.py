"""What can be in the way of an engine that starts on a GPU: each said in one line, with what would help."""

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
from octavo.runner.executor import clear_tracebacks, device_lost, is_out_of_memory
from octavo.runner.memory.budget import ceil_2, doctor_hint
from octavo.runner.memory.profile import MAX_UTILIZATION, MIN_KV_BYTES, SPARE_BYTES, gib

DRIVER = Path("/proc/driver/nvidia/version")
"""There where NVIDIA's driver is loaded."""
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}


def find_gpu() -> torch.device:
    """The first GPU. Raises `ParameterError`, in one line, where none can be used."""
    if reason := _why_not():
        raise ParameterError(f"device is cuda, and there is none: {reason}; use device=cpu", param="device")
    return torch.device("cuda", torch.cuda.current_device())


def unusable_gpu_reason() -> str:
    """Why torch, built for CUDA, cannot use the GPU that this machine seems to have; "" where nobody would wonder."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or torch.version.cuda is None or not (DRIVER.exists() or shutil.which("nvidia-smi")):
        return ""
    return _why_not()


def _why_not() -> str:
    try:
        cast("Any", torch.cuda.init)()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def check_weights(weight_bytes: int, args: EngineArgs) -> None:
    """Raises `MemoryBudgetError` before anything is loaded where not even the weights fit."""
    free, total = _free()
    room = min(free, int(total * (args.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION)))
    if weight_bytes > room:
        needed = weight_bytes + SPARE_BYTES + MIN_KV_BYTES
        if (share := ceil_2(needed / total)) <= MAX_UTILIZATION and needed <= free:
            remedy = f"raise gpu_memory_utilization to {share:g} at least"
        elif args.dtype == "float32" and needed - weight_bytes // 2 <= room:
            remedy = "set dtype to bfloat16, which halves that"
        elif share <= MAX_UTILIZATION:
            remedy = f"free {gib(needed - free)} more on the GPU, and let gpu_memory_utilization be {share:g} at least"
        else:
            remedy = "choose a smaller model or a dtype of fewer bytes"
        raise MemoryBudgetError(
            f"the weights take {gib(weight_bytes)} and the GPU has room for {gib(room)} ({gib(free)} free of "
            f"{gib(total)}); {remedy}; {doctor_hint(args)}"
        )


@contextmanager
def startup_errors(device: torch.device, doing: str, remedy: Callable[[int], str]) -> Iterator[None]:
    """What a GPU answers while an engine starts on it, in one line. Raises `MemoryBudgetError` where memory runs out,
    whatever the plan said (others may have taken some), and `DeviceLostError` where the device answers no more. What a
    CPU raises is left as it is.

    remedy  what would help, by how many bytes were wanting; 0: nobody said
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
        wanted, said = _wanted(error)
        raise MemoryBudgetError(
            f"memory ran out while {doing}: it took {said}, and {gib(free)} of the GPU's {gib(total)} are free; "
            + remedy(max(0, wanted - free))
        ) from None


def _free() -> tuple[int, int]:
    """(bytes that are free, bytes) of the GPU. Asking takes some of it the first time."""
    try:
        return torch.cuda.mem_get_info()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        text = "others have all of the GPU's memory, not even CUDA itself finds room; free some, nvidia-smi shows whose"
        raise MemoryBudgetError(text) from None


def _wanted(error: BaseException) -> tuple[int, str]:
    """(bytes, in words) that an allocation asked for, as torch says it. Others do not."""
    found = re.search(rf"Tried to allocate ([\d.]+) ({'|'.join(UNITS)})", str(error))
    return (int(float(found[1]) * UNITS[found[2]]), f"{found[1]} {found[2]}") if found else (0, "more than there is")
