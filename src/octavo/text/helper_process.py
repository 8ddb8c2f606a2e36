"""Helper processes: programs that do one job at a time for this process, and may take too long, crash, die or hang.

    this process                                   a helper: `python -m MODULE FD`
    length, set-up, then requests ---------------> `serve`
                                  <--------------- length, reply

A job that takes too long or crashes its helper is at fault itself. A helper that is killed, stopped or hangs is not its
job's fault: the job is tried once on another one. Either way the helper is replaced.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEAD = struct.Struct(">I")
START_S = 60.0
"""Time limit for starting a helper on a loaded machine."""
CHECK_S = 0.25
"""How often a working helper is looked at."""
HANG_S = 5.0
"""A helper that has slept for so long in the middle of a job hangs: jobs wait for nothing."""
CRASHES = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE, -signal.SIGXCPU}
"""Exit codes of a helper that its job has crashed: its stack, its memory limit, its CPU time."""


class JobTooLargeError(Exception):
    """The job took more time than its limit, or crashed its helper."""


class HelperLostError(Exception):
    """Helpers cannot be started, or two of them died or hung with the same job."""


class HelperPool:
    """Helpers of one program, started on demand. Thread-safe: each thread has a helper for the time of a call.

    module   the program, which calls `serve`
    quiet    discard what helpers write to stderr
    """

    def __init__(self, module: str, *, quiet: bool = False) -> None:
        self._module, self._quiet = module, quiet
        self._lock = threading.Lock()
        self._closed = False
        self.idle: list[Helper] = []
        self._helpers: set[Helper] = set()

    def call(self, setup: Callable[[], bytes], request: bytes, limit_s: float) -> bytes:
        """Run a job of at most `limit_s` of CPU time and return the reply.

        setup   makes the first message to a new helper, which replies when it is ready

        Raises `JobTooLargeError` or `HelperLostError`.
        """
        for is_last in (False, True):
            helper = self._take(setup)
            try:
                reply = helper.exchange(request, limit_s)
            except HelperLostError:
                self._end(helper)
                if is_last or self._closed:
                    raise
            except BaseException:
                self._end(helper)
                raise
            else:
                self._put(helper)
                return reply
        raise AssertionError

    def start_one(self, setup: Callable[[], bytes]) -> None:
        """Start a helper, so that the first job need not wait for it."""
        self._put(self._take(setup))

    def close(self) -> None:
        """End all helpers: calls in progress raise `HelperLostError`. A second call does nothing."""
        with self._lock:
            self._closed = True
            helpers, self.idle = set(self._helpers), []
        for helper in helpers:
            helper.process.kill()  # a thread that waits for it gets an end of file
        for helper in helpers:
            helper.process.wait()
            helper.end()

    def _take(self, setup: Callable[[], bytes]) -> Helper:
        while True:
            with self._lock:
                helper = self.idle.pop() if self.idle else None
            if helper is None:
                return self._start(setup)
            if helper.process.poll() is None:
                return helper
            self._end(helper)  # for example, ended by the OOM killer

    def _start(self, setup: Callable[[], bytes]) -> Helper:
        try:
            helper = Helper(self._module, quiet=self._quiet)
        except OSError as error:
            raise HelperLostError(str(error)) from error
        with self._lock:
            self._helpers.add(helper)
        try:
            if self._closed:
                raise HelperLostError("the pool is closed")
            helper.exchange(setup(), START_S)
        except JobTooLargeError as error:
            self._end(helper)
            raise HelperLostError(str(error)) from None
        except BaseException:
            self._end(helper)
            raise
        return helper

    def _put(self, helper: Helper) -> None:
        with self._lock:
            if not self._closed:
                self.idle.append(helper)
                return
        self._end(helper)

    def _end(self, helper: Helper) -> None:
        with self._lock:
            self._helpers.discard(helper)
        helper.end()


class Helper:
    """A helper process, and the socket to it."""

    def __init__(self, module: str, *, quiet: bool = False) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            options = ["-O"] if sys.flags.optimize else []
            try:
                self.process = subprocess.Popen(
                    [sys.executable, *options, "-P", "-m", module, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL if quiet else None,
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # Ctrl-C is for the parent
                )
            except OSError:
                self._socket.close()
                raise
        self._socket.settimeout(CHECK_S)

    def exchange(self, request: bytes, limit_s: float) -> bytes:
        """Send a request and return the reply. Raises `JobTooLargeError` or `HelperLostError`."""
        begin = awake = time.monotonic()  # `awake`: when it was last seen at work
        begin_cpu_s = last_cpu_s = -1.0
        unsent = memoryview(HEAD.pack(len(request)) + request)
        reply = bytearray()
        while len(reply) < HEAD.size or len(reply) < HEAD.size + HEAD.unpack_from(reply)[0]:
            try:
                if unsent:
                    unsent = unsent[self._socket.send(unsent) :]
                else:
                    piece = self._socket.recv(1 << 20)
                    if not piece:
                        raise EOFError
                    reply += piece
            except TimeoutError:
                now = time.monotonic()
                state, cpu_s = self._state(now - begin)
                if begin_cpu_s < 0:
                    begin_cpu_s = max(0.0, cpu_s - (now - begin))
                if cpu_s - begin_cpu_s > limit_s:
                    raise JobTooLargeError(f"it takes more than {limit_s:g} s") from None
                if state != "S" or cpu_s > last_cpu_s:
                    awake, last_cpu_s = now, cpu_s
                if state in "Tt" or now - awake > HANG_S:
                    raise HelperLostError("a helper process does not respond") from None
            except (OSError, EOFError):
                code = self.process.wait()
                if code in CRASHES:
                    raise JobTooLargeError("it exceeds the memory limit") from None
                raise HelperLostError(f"a helper process ended with exit code {code}") from None
        return bytes(reply[HEAD.size :])

    def _state(self, took_s: float) -> tuple[str, float]:
        """The state of the process, as in `ps`, and its CPU time. Elsewhere than on Linux: running, and `took_s`."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return "R", took_s
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.kill()
        self._socket.close()
        self.process.wait()


def serve(make: Callable[[bytes], Callable[[bytes], bytes]]) -> None:
    """The main loop of a helper: `make` turns the set-up into the function that does a job."""
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rwb") as stream:

        def receive() -> bytes | None:
            head = stream.read(HEAD.size)
            return stream.read(HEAD.unpack(head)[0]) if len(head) == HEAD.size else None

        def send(reply: bytes) -> None:
            stream.write(HEAD.pack(len(reply)) + reply)
            stream.flush()

        do: Any = None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent has ended
            while (request := receive()) is not None:
                if do is None:
                    do = make(request)
                    send(b"")
                else:
                    send(do(request))
