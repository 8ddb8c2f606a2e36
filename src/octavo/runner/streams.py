"""Events and second streams, of devices that compute at once and of CUDA."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, cast

import torch


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


class Timer(Protocol):
    """Measures how long a device takes for work that is queued between `start` and `stop`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def seconds(self) -> float | None:
        """None while the device has not done the work."""


class CompletedEvent:
    """The event of a device that computes at once: always reached."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class SideStream:
    """A second stream of work. Work queued inside `with` waits for all work queued on the current stream before it.

    `join` makes the current stream wait for this one in turn. On a device that computes at once, none of them waits.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def without_waiting(self) -> AbstractContextManager[Any]:
        """Like `with`, but the work queued inside waits only for earlier work on this side stream."""
        return self

    def join(self) -> None:
        pass


class HostTimer:
    """Of a device that computes within its calls: seconds of this thread."""

    def __init__(self) -> None:
        self._start = self._stop = 0.0

    def start(self) -> None:
        self._start = time.thread_time()

    def stop(self) -> None:
        self._stop = time.thread_time()

    def seconds(self) -> float:
        return self._stop - self._start


class CudaTimer:
    def __init__(self) -> None:
        self._start, self._stop = (cast("Any", torch.cuda.Event)(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        self._start.record()

    def stop(self) -> None:
        self._stop.record()

    def seconds(self) -> float | None:
        return self._start.elapsed_time(self._stop) / 1000 if self._stop.query() else None


class CudaStream(SideStream):
    """A second CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = cast("Any", torch.cuda.Stream)(device)
        self._context: Any = None

    def __enter__(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, traceback)
        self._context = None

    def without_waiting(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
