"""Log lines on stderr: as text or as JSON, in a server's own process and in its engine's alike."""

from __future__ import annotations

import json
import logging
import sys
from typing import NamedTuple


class LogSettings(NamedTuple):
    """level    such as info
    as_json  an object a line"""

    level: str
    as_json: bool = False


_settings: LogSettings | None = None


def current_settings() -> LogSettings | None:
    """What `set_up` was told, for a process that this one starts; None where logs are the program's own affair."""
    return _settings


class JsonFormatter(logging.Formatter):
    """A log line as an object, for machines."""

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
    """A closed or full stderr disturbs nothing."""
    global _settings
    _settings = settings
    handler = logging.StreamHandler(sys.stderr)
    text = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
    handler.setFormatter(JsonFormatter() if settings.as_json else logging.Formatter(text, "%m-%d %H:%M:%S"))
    logging.raiseExceptions = False
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    for name in ("asyncio", "uvicorn.error"):  # they say something of every request that is no HTTP
        logging.getLogger(name).setLevel(logging.ERROR)
