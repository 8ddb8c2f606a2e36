"""Terminal input and output: control characters, Ctrl-C and line editing."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

# Model output may contain escape sequences, which must not reach the terminal.
_CONTROL = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """`text` without control characters, except for newlines and tabs."""
    return text.translate(_CONTROL)


class Interrupt:
    """Set by `catch_interrupt`: `pressed` is True after a Ctrl-C."""

    def __init__(self) -> None:
        self.pressed = False


@contextlib.contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """In this context the first Ctrl-C only sets a flag, so that it interrupts no step; the second one interrupts."""
    interrupt = Interrupt()

    def press(signum: int, frame: object) -> None:
        if interrupt.pressed:
            raise KeyboardInterrupt
        interrupt.pressed = True

    previous = signal.signal(signal.SIGINT, press)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)


def on_terminal() -> bool:
    """True if stdin is a terminal."""
    return sys.stdin.isatty()


def read_line(prompt: str) -> str | None:
    """Read a line of stdin, on a terminal with `prompt` and editing. Returns None at the end of the input."""
    if not on_terminal():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # adds editing and history to input()
    try:
        return input(prompt)
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()  # the shell's prompt starts on a new line
        raise
