"""CUDA events, a second stream, and copies that do not wait. On a CPU, events and streams are no-ops."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Returns True once the device has reached this point."""

    def synchronize(self) -> None:
        """Wait until the device reaches this point."""


class RecordableEvent(DeviceEvent, Protocol):
    """An event that can be recorded again."""

    def record(self) -> None:
        """Move the event to the end of all work queued on the current stream."""


class CompletedEvent:
    """The event of a CPU: always reached."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def record_event(device: torch.device, *, blocking: bool = False) -> RecordableEvent:
    """An event after all work queued on the current stream.

    blocking   threads that wait for the event sleep; else they spin
    """
    if device.type != "cuda":
        return CompletedEvent()
    event = cast("Any", torch.cuda.Event)(blocking=blocking)
    event.record()
    return cast("RecordableEvent", event)


class SideStream:
    """A second CUDA stream. Work queued inside `with` waits for all work queued on the current stream before it.

    `join` makes the current stream wait for this one in turn.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = cast("Any", torch.cuda.Stream)(device) if device.type == "cuda" else None
        self._context: Any = None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._context is not None:
            self._context.__exit__(kind, error, traceback)
            self._context = None

    @contextmanager
    def without_waiting(self) -> Iterator[None]:
        """Like `with`, but the work queued inside waits only for earlier work on this side stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to a device. On a GPU the copy is queued without waiting for earlier work."""
    if torch.device(device).type != "cuda":
        return tensor
    if not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def index_tensor(values: Seq[int], device: torch.device | str) -> Tensor:
    return to_device(torch.tensor(values, dtype=torch.int64), device)


def to_lists(tensors: Seq[Tensor]) -> list[list[Any]]:
    """All tensors as lists. Waits for a GPU only once."""
    if not any(tensor.is_cuda for tensor in tensors):
        return [tensor.tolist() for tensor in tensors]
    flat = torch.cat([(t.double().view(torch.int64) if t.is_floating_point() else t.long()).flatten() for t in tensors])
    parts = torch.split(flat.cpu(), [t.numel() for t in tensors])
    return [
        (part.view(torch.float64) if t.is_floating_point() else part).view(t.shape).tolist()
        for t, part in zip(tensors, parts, strict=True)
    ]
