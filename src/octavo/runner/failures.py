"""Errors of a device: lack of memory, failed steps, a lost device."""

from __future__ import annotations

import traceback

import torch

from octavo.errors import DeviceLostError, StepError, StepMemoryError

OUT_OF_MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""Parts of error messages of torch on a CPU, CUDA's driver and its libraries, which have no error type for this."""
MAX_MESSAGE = 300
"""Characters of an error message: CUDA's go on with advice for debugging, compilers' with source code."""


def step_error(error: BaseException) -> StepError:
    """The `StepError` for an error in a step.

    If memory ran out, the frames of the error are cleared: they keep the step's tensors alive.
    """
    kind = StepMemoryError if is_out_of_memory(error) else StepError
    if kind is StepMemoryError:
        clear_tracebacks(error)
    return kind(f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_MESSAGE]}")


def device_lost(cause: BaseException) -> DeviceLostError:
    """The error that ends the engine, with the first line of CUDA's message: the others are debugging advice."""
    message = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
    return DeviceLostError(f"the GPU no longer answers this process, only a new process can use it: {message}")


def clear_tracebacks(error: BaseException | None) -> None:
    """Drop the local variables in the frames of an error and of its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if the error or one of its causes is a lack of memory: handling one may raise another error."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(message in str(error) for message in OUT_OF_MEMORY_MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False
