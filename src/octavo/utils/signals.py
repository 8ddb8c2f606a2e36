"""Signals of a child process."""

from __future__ import annotations

import signal


def ignore_signals() -> None:
    """For a server's child process: ignore the signals that the server handles, which drains its requests first."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
