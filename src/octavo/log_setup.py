"""Logging on stderr, as text or JSON, for the server process and the engine process."""

from __future__ import annotations

import json
import logging
import sys
from typing import NamedTuple


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


def set_up(settings: LogSettings) -> None:
    """Configure the root logger. A closed or full stderr raises nothing."""
    global _settings
    _settings = settings
    handler = logging.StreamHandler(sys.stderr)
    text = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
    handler.setFormatter(JsonFormatter() if settings.as_json else logging.Formatter(text, "%m-%d %H:%M:%S"))
    logging.raiseExceptions = False
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    for name in ("asyncio", "uvicorn.error"):  # they log every request that is not HTTP
        logging.getLogger(name).setLevel(logging.ERROR)
