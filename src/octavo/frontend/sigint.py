"""Ctrl-C, deferred to the end of a step: an interrupt during one would leave the scheduler's state inconsistent."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class DeferredSigint:
    """Context manager that defers Ctrl-C until exit; a second Ctrl-C raises `KeyboardInterrupt` at once.

    It does nothing outside the main thread, or if the program has its own SIGINT handler.
    """

    def __init__(self) -> None:
        self._pressed = False
        self._old_handler: Any = None
        self._installed = False

    def __enter__(self) -> DeferredSigint:
        self._pressed = False
        in_main = threading.current_thread() is threading.main_thread()
        self._installed = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._installed:
            self._old_handler = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._old_handler)
            self._installed = False
        if self._pressed and kind is None:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._pressed:
            raise KeyboardInterrupt
        self._pressed = True


def ignore_signals() -> None:
    """For a server's child process: ignore the signals that the server handles, which drains its requests first."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
