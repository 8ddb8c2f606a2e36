"""Ctrl-C, taken between two steps: in the middle of one it would tear what the core is writing."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class DeferredSigint:
    """While it is entered, Ctrl-C is noted, and raised on leaving; pressed again before that, it is raised at once.

    Leaves signals alone outside the main thread, and where the program has a handler of its own.
    """

    def __init__(self) -> None:
        self._pressed = False
        self._before: Any = None
        self._mine = False

    def __enter__(self) -> DeferredSigint:
        self._pressed = False
        in_main = threading.current_thread() is threading.main_thread()
        self._mine = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._mine:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._mine:
            signal.signal(signal.SIGINT, self._before)
            self._mine = False
        if self._pressed and kind is None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pressed:
            raise KeyboardInterrupt
        self._pressed = True
