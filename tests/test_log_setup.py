"""Logging of programs: lines reach the descriptor that was given, and no other."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from octavo.log_setup import QueueHandler


def test_lines_never_reach_another_file_that_takes_the_descriptor(tmp_path: Path) -> None:
    log, other = tmp_path / "log", tmp_path / "other"
    fd = os.open(log, os.O_WRONLY | os.O_CREAT)
    handler = QueueHandler(fd)
    os.close(fd)
    taken = os.open(other, os.O_WRONLY | os.O_CREAT)
    assert taken == fd
    handler.emit(logging.LogRecord("octavo", logging.INFO, "", 0, "first", None, None))
    handler.flush()
    handler.close()
    os.close(taken)
    assert (log.read_text(), other.read_text()) == ("first\n", "")
