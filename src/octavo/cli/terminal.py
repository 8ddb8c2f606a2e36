"""What the commands know about the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

# A model may say anything, escape sequences included; the terminal must not obey it.
_CONTROL = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """`text` without the control characters that a terminal would act on."""
    return text.translate(_CONTROL)


class Interrupt:
    """Whether Ctrl-C was pressed; set by `catch_interrupt`."""

    def __init__(self) -> None:
        self.pressed = False


@contextlib.contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """Within it, the first Ctrl-C only sets a flag, so that no step is torn apart; a second one interrupts."""
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
    """Whether a person types."""
    return sys.stdin.isatty()


def read_line(prompt: str) -> str | None:
    """A line of stdin, with `prompt` and editing on a terminal; None at the end."""
    if not on_terminal():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() its editing and history
    try:
        return input(prompt)
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()  # else the shell's prompt stands behind ours
        raise
