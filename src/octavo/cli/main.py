"""The `octavo` command: runs one, and turns what went wrong into one line and an exit code.

0  done      1  it failed      2  a mistake in the call      130  interrupted (Ctrl-C)

A traceback is shown only with `--debug`, or OCTAVO_DEBUG=1.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
PYTHONS_OWN = signal.default_int_handler


def main() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us: Python leaves nothing there to print to
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process
    sys.stderr = lossy(sys.stderr)
    sys.unraisablehook = press_again
    if signal.getsignal(signal.SIGINT) is PYTHONS_OWN:
        # Its place, too: asyncio, and an engine in a step, take Ctrl-C over where the handler is the default one.
        setattr(signal, "default_int_handler", interrupt)  # noqa: B010 - mypy knows it for a function
        signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    code = run(sys.argv[1:]) or flush()
    if code == INTERRUPTED:
        # Whoever presses Ctrl-C again while threads are being joined wants it to end, not to read about threads.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


class LossyFile(io.FileIO):
    """A file that forgets what it cannot write."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def lossy(stderr: Any) -> Any:
    """stderr without errors. A full disk behind it must not end a command: its work is on stdout, or on a socket."""
    try:
        file = LossyFile(stderr.fileno(), "w", closefd=False)
    except OSError:  # a replacement that is no file
        return stderr
    return io.TextIOWrapper(file, encoding=stderr.encoding, errors="backslashreplace", write_through=True)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C. While torch is being imported there is nothing to put in order yet, and an exception that is raised where
    its C++ calls Python ends in an abort."""
    torch = sys.modules.get("torch")
    if getattr(getattr(torch, "__spec__", None), "_initializing", False):
        os._exit(INTERRUPTED)
    PYTHONS_OWN(number, frame)


def press_again(dropped: sys.UnraisableHookArgs) -> None:
    """Python drops a Ctrl-C that arrives inside a weak reference's callback, and imports have many of these. It comes
    again a moment later, when that is over."""
    if dropped.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        sys.__unraisablehook__(dropped)


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code. Prints, but never raises and never exits."""
    debug = "--debug" in args or os.environ.get("OCTAVO_DEBUG", "0") not in ("", "0")
    try:
        # Imported here, not above: Ctrl-C during imports is answered like Ctrl-C anywhere else.
        from octavo.cli.app import call, warn_of_environment

        warn_of_environment(args)
        code = call([arg for arg in args if arg != "--debug"])
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader has left (`octavo ... | head`)
        return flush() or FAILED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else FAILED
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, code = explain(error)
        print(f"error: {message}", file=sys.stderr)
        flush()
        return code


def flush() -> int:
    """Write out what is left for stdout, or drop it where that fails: Python would try again at exit, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return 0


def explain(error: Exception) -> tuple[str, int]:
    """An exception as one line, and the exit code that goes with it."""
    from octavo.cli.app import usage_problem
    from octavo.cli.terminal import printable
    from octavo.errors import OctavoError, UsageError, bounded

    if (problem := usage_problem(error)) is not None:
        message, code = problem, MISUSED
    elif isinstance(error, UsageError):
        message, code = str(error), MISUSED
    elif isinstance(error, OctavoError):
        message, code = str(error), FAILED
    elif isinstance(error, OSError) and error.strerror:
        name = f": {error.filename}" if error.filename else ""
        message, code = f"{error.strerror}{name}", FAILED
    else:
        kind = type(error).__name__
        message, code = f"{kind}: {error} (a bug of Octavo's; --debug shows where)", FAILED
    return bounded(printable(" ".join(message.split()))), code


if __name__ == "__main__":
    main()
