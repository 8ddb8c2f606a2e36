"""The `octavo` command: runs a command line and reports an error as one line and an exit code.

0  success      1  failure      2  invalid command line      130  interrupted (Ctrl-C)

A traceback is printed only with `--debug` or OCTAVO_DEBUG=1.
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

FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130
DEFAULT_SIGINT_HANDLER = signal.default_int_handler


def main() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the parent process: Python leaves None
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the process ends
    sys.stderr = without_errors(sys.stderr)
    sys.unraisablehook = repeat_interrupt
    if signal.getsignal(signal.SIGINT) is DEFAULT_SIGINT_HANDLER:
        # Replaces the default handler too: asyncio and the engine only take over SIGINT from the default handler.
        setattr(signal, "default_int_handler", handle_sigint)  # noqa: B010 - mypy rejects assignment to a function
        signal.signal(signal.SIGINT, handle_sigint)
    signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    code = run(sys.argv[1:]) or flush()
    if code == INTERRUPTED:
        # Another Ctrl-C while threads are joined ends the process at once, without tracebacks of threads.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


class LossyFile(io.FileIO):
    """A file that discards data that it cannot write."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def without_errors(stderr: Any) -> Any:
    """Wraps stderr so that writing never raises: a full disk must not end a command whose output is elsewhere."""
    try:
        file = LossyFile(stderr.fileno(), "w", closefd=False)
    except OSError:  # a replacement without a file descriptor
        return stderr
    return io.TextIOWrapper(file, encoding=stderr.encoding, errors="backslashreplace", write_through=True)


def handle_sigint(number: int, frame: FrameType | None) -> None:
    """SIGINT handler. It exits at once while torch is being imported: a Python exception in a callback of torch's C++
    code would abort the process, and there is nothing to clean up yet."""
    torch = sys.modules.get("torch")
    if getattr(getattr(torch, "__spec__", None), "_initializing", False):
        os._exit(INTERRUPTED)
    DEFAULT_SIGINT_HANDLER(number, frame)


def repeat_interrupt(unraisable: sys.UnraisableHookArgs) -> None:
    """Unraisable hook that repeats SIGINT after 10 ms. Python drops a KeyboardInterrupt in a weak reference's callback,
    and imports run many of these."""
    if unraisable.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        sys.__unraisablehook__(unraisable)


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code. Errors are printed; the function neither raises nor exits."""
    debug = "--debug" in args or os.environ.get("OCTAVO_DEBUG", "0") not in ("", "0")
    try:
        # Imported here, so that Ctrl-C during imports is handled below.
        from octavo.cli.app import call, warn_of_environment

        warn_of_environment(args)
        code = call([arg for arg in args if arg != "--debug"])
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe (`octavo ... | head`)
        return flush() or FAILED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else FAILED
    except Exception as error:
        from octavo import log_setup as logs

        logs.flush()  # they precede it
        if debug:
            traceback.print_exc()
        message, code = explain(error)
        print(f"error: {message}", file=sys.stderr)
        flush()
        return code


def flush() -> int:
    """Flush stdout. If that fails, discard the rest: Python would try again at exit and print an error."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return 0


def explain(error: Exception) -> tuple[str, int]:
    """An exception's message in one line, and its exit code."""
    from octavo.cli.app import usage_problem
    from octavo.cli.terminal import printable
    from octavo.errors import OctavoError, UsageError, bounded

    if (problem := usage_problem(error)) is not None:
        message, code = problem, USAGE_ERROR
    elif isinstance(error, UsageError):
        message, code = str(error), USAGE_ERROR
    elif isinstance(error, OctavoError):
        message, code = str(error), FAILED
    elif isinstance(error, OSError) and error.strerror:
        name = f": {error.filename}" if error.filename else ""
        message, code = f"{error.strerror}{name}", FAILED
    else:
        kind = type(error).__name__
        message, code = f"{kind}: {error} (a bug in Octavo; --debug prints the traceback)", FAILED
    return bounded(printable(" ".join(message.split()))), code


if __name__ == "__main__":
    main()
