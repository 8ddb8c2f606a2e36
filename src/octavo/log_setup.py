"""Logging on stderr, as text or JSON, for the server process and the engine process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
from typing import NamedTuple

MAX_LINES = 8192
"""Lines that wait for a slow reader of stderr. Further ones are dropped and counted."""
FLUSH_S = 1.0


class LogSettings(NamedTuple):
    """level    a level's name, such as info
    as_json  one JSON object per line"""

    level: str
    as_json: bool = False


_settings: LogSettings | None = None


def current_settings() -> LogSettings | None:
    """The settings passed to `set_up`, for a child process; None if the program configures logging itself."""
    return _settings


class JsonFormatter(logging.Formatter):
    """Formats a log record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            **(getattr(record, "access", None) or {"message": record.getMessage()}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class QueueHandler(logging.Handler):
    """Writes lines to a file descriptor in a thread of its own. A pipe without a reader blocks only that thread."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._given, self._fd = fd, os.dup(fd)  # another file may take the number of a descriptor that is closed
        self._timeout_s, self._num_dropped = FLUSH_S, 0
        self._dropping = threading.RLock()  # a finalizer may log, too
        self._queue: queue.SimpleQueue[str | threading.Event | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._queue.qsize() < MAX_LINES:
            self._queue.put(f"{self.format(record)}\n")
        else:
            with self._dropping:
                self._num_dropped += 1

    def flush(self) -> None:
        """Wait until the lines are written, at most `FLUSH_S`. If they are not, the process writes no more to the
        descriptor: it would wait for ever."""
        written = threading.Event()
        self._queue.put(written)
        if not written.wait(self._timeout_s):
            self._timeout_s = 0.0
            with contextlib.suppress(OSError):
                if os.path.sameopenfile(self._given, self._fd):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self._given)

    def close(self) -> None:
        """End the thread when the lines before are written."""
        super().close()
        self._queue.put(None)

    def _write(self) -> None:
        entries: list[str | threading.Event | None] = []
        while None not in entries:
            entries = [self._queue.get(), *(self._queue.get() for _ in range(self._queue.qsize()))]
            with self._dropping:
                num_dropped, self._num_dropped = self._num_dropped, 0
            if num_dropped:
                text = "%d log lines were dropped: nobody read them"
                record = logging.LogRecord("octavo", logging.WARNING, "", 0, text, (num_dropped,), None)
                entries.append(f"{self.format(record)}\n")
            data = "".join(entry for entry in entries if isinstance(entry, str)).encode(errors="backslashreplace")
            with contextlib.suppress(OSError):  # a full disk, or a reader that has gone
                while data:
                    data = data[os.write(self._fd, data) :]
            for entry in entries:
                if isinstance(entry, threading.Event):
                    entry.set()
        os.close(self._fd)


def flush() -> None:
    """Write the log lines that wait, before other output or the end of the process."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, QueueHandler):
            handler.flush()


def set_up(settings: LogSettings) -> None:
    """Configure the root logger. Logging never raises and never waits, whatever stderr is."""
    global _settings
    _settings = settings
    handler: logging.Handler
    try:
        handler = QueueHandler(sys.stderr.fileno())
    except OSError:  # a replacement without a file descriptor
        handler = logging.StreamHandler(sys.stderr)
    text = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
    handler.setFormatter(JsonFormatter() if settings.as_json else logging.Formatter(text, "%m-%d %H:%M:%S"))
    logging.raiseExceptions = False
    root = logging.getLogger()
    for old in root.handlers:
        if isinstance(old, QueueHandler):
            old.close()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    for name in ("asyncio", "uvicorn.error"):  # they log every request that is not HTTP
        logging.getLogger(name).setLevel(logging.ERROR)
