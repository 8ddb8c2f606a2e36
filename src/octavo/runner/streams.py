"""What a device does beside what it is told next. A CPU does one thing at a time, and here that is no special case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, cast

import torch


class DeviceEvent(Protocol):
    """A point in a device's work."""

    def query(self) -> bool:
        """Whether it has been reached."""

    def synchronize(self) -> None:
        """Wait until it is."""


class RecordableEvent(DeviceEvent, Protocol):
    """A point that can be moved."""

    def record(self) -> None:
        """From now on it is the point behind all that has been queued on the current stream."""


class CompletedEvent:
    """The event of a device that is done when a call returns."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def record_event(device: torch.device, *, blocking: bool = False) -> RecordableEvent:
    """An event behind all that has been queued on the current stream. A thread that waits for it spins, unless
    `blocking`: then it sleeps."""
    if device.type != "cuda":
        return CompletedEvent()
    event = cast("Any", torch.cuda.Event)(blocking=blocking)
    event.record()
    return cast("RecordableEvent", event)


class SideStream:
    """A second stream. What is queued inside `with` comes after what the device's current stream has been told so far;
    `join` makes that stream wait in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = cast("Any", torch.cuda.Stream)(device) if device.type == "cuda" else None
        self._inside: Any = None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._inside = torch.cuda.stream(self._stream)
            self._inside.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._inside is not None:
            self._inside.__exit__(kind, error, traceback)
            self._inside = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """As `with`, and what is queued inside waits for nothing but what this stream was told before."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
