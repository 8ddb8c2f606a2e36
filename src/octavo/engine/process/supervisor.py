"""Supervisor of the engine process: starts it, watches it, and restarts it when it dies or hangs.

    starting ---> running <---> restarting
        |                            |
        +--------> failed <----------+   the first start failed, or MAX_FAILED_STARTS in a row

A dead process is noticed at once, because its lifeline breaks. A hung one is noticed by missing heartbeats, or by a
step that takes far longer than earlier steps of its size; a slow step within that limit is never interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from octavo import errors
from octavo import log_setup as logs
from octavo.engine.executor import RankPlace
from octavo.engine.process import ipc
from octavo.engine.stats import Health
from octavo.errors import EngineError, OctavoError

logger = logging.getLogger("octavo.supervisor")

ENGINE_COMMAND = (sys.executable, *(("-O",) if sys.flags.optimize else ()), "-P", "-m", "octavo.frontend.engine_main")
"""-P: import nothing from the working directory."""
MAX_FAILED_STARTS = 3
"""Failed restarts in a row after which the engine counts as failed."""
BUSY_CPU_SHARE = 0.1
"""A process that uses more than this share of a core is working, even if it cannot send heartbeats."""
SOCKET_PATH_CHARS = 90
"""Longest usable directory for temporary files: the path of a Unix socket has at most 107 characters."""


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """How long to wait for an engine process, in seconds.

    silence_s       without a heartbeat while the process is idle
    step_s          for one step, unless earlier steps predict a longer one
    start_s         without a heartbeat while the process starts or works: importing modules and compiling kernels can
                    block all its threads
    close_s         for the process to exit when it is closed
    retry_s         between a failed start and the next; grows with each failure
    """

    silence_s: float = 10.0
    step_s: float = 10.0
    start_s: float = 300.0
    close_s: float = 2.0
    retry_s: float = 0.5


class EngineProcess:
    """One run of the engine process, watched on the running event loop: its process, channel and lifeline.

    on_step   called with each `StepReport`; an exception ends the connection
    """

    TICK_S = 0.25
    DRAIN_S = 0.05
    """How long to keep reading after the process has died."""

    def __init__(
        self,
        command: Sequence[str],
        options: dict[str, Any],
        timeouts: EngineTimeouts,
        on_step: Callable[[ipc.StepReport], None],
        placement: ipc.Placement | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeouts = timeouts
        self._on_step = on_step
        self._ready: asyncio.Future[ipc.Ready] = self._loop.create_future()
        self._died = asyncio.Event()
        self._failure: ipc.EngineFailed | None = None
        self._broken = ""  # why the connection ended
        self._heartbeat, self.heartbeat_at = ipc.Heartbeat(phase="starting"), time.monotonic()
        self._cpu_s = 0.0  # CPU time of the process at that heartbeat
        self.lifeline, child_end = ipc.Lifeline.pair()
        with contextlib.ExitStack() as undo, contextlib.closing(child_end):
            undo.callback(self.lifeline.close)
            # Private to this user, and removed as soon as the engine has connected.
            is_long = len(tempfile.gettempdir()) > SOCKET_PATH_CHARS
            self._directory = tempfile.mkdtemp(prefix="octavo-", dir="/tmp" if is_long else None)
            undo.callback(self._remove_directory)
            self.channel = ipc.Channel(bind=ipc.endpoint_in(self._directory))
            undo.callback(self.channel.close)
            self._process = subprocess.Popen(
                [*command, str(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[child_end.fileno()],
                process_group=0,  # Ctrl-C reaches this process only, and `kill` its child processes, too
            )
            undo.pop_all()
        launch = ipc.Launch(ipc.endpoint_in(self._directory), options, logs.current_settings(), placement)
        self.lifeline.send(launch, wait=True)
        self.channel.attach(self._loop, self.receive)
        self._loop.add_reader(self.lifeline.fileno(), self._on_lifeline)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_step_age_s(self) -> float | None:
        waited = self._heartbeat.waited_s
        return None if waited is None else waited + time.monotonic() - self.heartbeat_at

    @property
    def ranks(self) -> tuple[RankPlace, ...]:
        return self._heartbeat.ranks

    @property
    def num_steps(self) -> int:
        """Steps whose results have arrived, as of the last heartbeat."""
        return self._heartbeat.num_steps

    @property
    def step_limit_s(self) -> float:
        """How long the current step may take."""
        return max(self._timeouts.step_s, self._heartbeat.allowed_s)

    def send(self, commands: list[msgspec.Raw]) -> None:
        self.channel.send(commands)

    async def ready(self) -> ipc.Ready:
        """Wait until the engine accepts requests. Raises the error that prevented it."""
        down = asyncio.ensure_future(self.down())
        either: list[asyncio.Future[Any]] = [self._ready, down]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._ready.done():
                return self._ready.result()
            raise self._start_error(await down)
        finally:
            down.cancel()

    async def down(self) -> str:
        """Wait until the process has died or counts as hung; returns the reason in one line."""
        before = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._died.wait(), self.TICK_S)
                await asyncio.sleep(self.DRAIN_S)
                return await asyncio.to_thread(self._reap)
            now = time.monotonic()
            on_time, before = now - before < 4 * self.TICK_S, now
            # If this loop was blocked, heartbeats may be unread.
            if on_time and (why := self._hang_reason(now)):
                return why

    def _hang_reason(self, now: float) -> str:
        timeouts, heartbeat = self._timeouts, self._heartbeat
        if heartbeat.failure:  # of an idle engine; another one ends by itself
            return heartbeat.failure
        silence = now - self.heartbeat_at
        if silence > timeouts.silence_s:
            is_working = not self._ready.done() or cpu_time_s(self.pid) - self._cpu_s > BUSY_CPU_SHARE * silence
            if not is_working or silence > timeouts.start_s:
                return f"it sent no heartbeat for {silence:.1f} s"
        allowed = self.step_limit_s
        if heartbeat.waited_s is not None and heartbeat.waited_s > allowed:
            place = f" ({heartbeat.place})" if heartbeat.place else ""
            return f"a step took {heartbeat.waited_s:.1f} s, and the limit was {allowed:.1f} s{place}"
        return ""

    def _start_error(self, why: str) -> OctavoError:
        """The error of a failed start."""
        if self._failure is not None:
            return rebuild_error(self._failure.error, self._failure.message)
        return EngineError(f"the engine process ended while {self._heartbeat.phase}: {why}")

    def _reap(self) -> str:
        """Wait for a process whose lifeline broke; returns how it ended."""
        if self._broken:
            return self._broken
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            if self._failure is not None:
                return f"{self._failure.error}: {self._failure.message}"
            if code >= 0:
                return f"it exited with code {code}"
            hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
            return f"it was killed by {signal.Signals(-code).name}{hint}"
        return "it closed its lifeline"

    # -- messages ------------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Act on a message of the engine."""
        if self._broken:
            return
        try:
            report = ipc.read_message(data)
            if isinstance(report, ipc.StepReport):
                self._on_step(report)
        except Exception as error:
            logger.debug("the connection to the engine ends", exc_info=error)
            self._broken = f"the connection to it ended: {type(error).__name__}: {error}"
            self._died.set()
            return
        if isinstance(report, ipc.Hello):
            self._remove_directory()
        elif isinstance(report, ipc.EngineFailed):
            self._failure = report
        elif isinstance(report, ipc.Ready) and not self._ready.done():
            self._ready.set_result(report)

    def _on_lifeline(self) -> None:
        while (data := self.lifeline.receive(wait=False)) is not None:
            try:
                if data:
                    self._heartbeat, self.heartbeat_at = ipc.read_heartbeat(data), time.monotonic()
            except ipc.MessageError as error:
                self._broken, data = f"its heartbeat is broken: {error}", b""
            if not data:
                self._loop.remove_reader(self.lifeline.fileno())
                self._died.set()
                return
            self._cpu_s = cpu_time_s(self.pid)

    def _remove_directory(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    # -- shutdown ------------------------------------------------------------------------------------------------------

    def request_exit(self) -> None:
        """Ask the process to exit, and wait up to `close_s`."""
        self.channel.send([ipc.CloseEngine()])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._timeouts.close_s)

    def kill(self) -> None:
        """Kill the process and its children, and read nothing more from it. A second call does nothing."""
        if self.lifeline.fileno() >= 0:
            self._loop.remove_reader(self.lifeline.fileno())
            self.lifeline.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.channel.close()
            self._remove_directory()

    def wait(self) -> None:
        """Wait until a killed process has exited: freeing gigabytes takes time."""
        self._process.wait()


class Supervisor:
    """Runs one engine process after another, on the event loop on which `start` is awaited.

    options    fields of `octavo.config.EngineArgs`
    on_ready   called when an engine has started
    on_down    called when an engine has gone
    on_step    called with each step report; an exception ends the engine
    on_failed  called with the root cause when there will be no further engine
    placement  of each engine; None: the whole machine
    """

    def __init__(
        self,
        options: dict[str, Any],
        *,
        on_ready: Callable[[ipc.Ready], None],
        on_step: Callable[[ipc.StepReport], None],
        on_down: Callable[[], None],
        on_failed: Callable[[OctavoError], None],
        command: Sequence[str] = ENGINE_COMMAND,
        timeouts: EngineTimeouts | None = None,
        placement: ipc.Placement | None = None,
    ) -> None:
        self._options, self._command, self._timeouts = options, command, timeouts or EngineTimeouts()
        self._placement = placement
        self._on_ready, self._on_step = on_ready, on_step
        self._on_down, self._on_failed = on_down, on_failed
        self.process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._state: Literal["starting", "running", "restarting", "failed"] = "starting"
        self._since = time.monotonic()
        self._reason = ""
        self._num_restarts = 0

    async def start(self) -> None:
        """Start the first engine. Raises the root cause if that fails, and leaves nothing running then."""
        try:
            await self._start_process()
        except BaseException as error:
            self._enter("failed", str(error))
            raise
        self._task = asyncio.create_task(self._watch(), name="octavo-supervisor")

    def send(self, commands: list[msgspec.Raw]) -> None:
        """Send commands to the running engine."""
        assert self.process is not None
        self.process.send(commands)

    @property
    def is_up(self) -> bool:
        return self._state == "running"

    @property
    def pid(self) -> int | None:
        """The process id of the current engine."""
        return None if self.process is None else self.process.pid

    def health(self) -> Health:
        age = self.process.last_step_age_s if self.process is not None and self.is_up else None
        ranks = self.process.ranks if self.process is not None and self.is_up else ()
        return Health(self._state, time.monotonic() - self._since, age, self._num_restarts, self._reason, ranks)

    def close(self) -> None:
        """Close the engine process and wait for its exit. Call it on the event loop; a second call does nothing."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._state != "failed":
            self._enter("failed", "it was shut down")
        if self.process is not None:
            self.process.request_exit()
            self.process.kill()
            self.process.wait()
            self.process = None

    def _enter(self, state: Literal["starting", "running", "restarting", "failed"], reason: str) -> None:
        self._state, self._reason, self._since = state, reason, time.monotonic()

    async def _start_process(self) -> None:
        try:
            self.process = EngineProcess(self._command, self._options, self._timeouts, self._on_step, self._placement)
        except OSError as error:
            raise EngineError(
                f"the engine process cannot be started: {error}; check the limits on files and processes"
            ) from error
        try:
            ready = await self.process.ready()
        except BaseException:
            await self._kill_process()
            raise
        self._enter("running", self._reason)
        self._on_ready(ready)

    async def _kill_process(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def _watch(self) -> None:
        assert self.process is not None
        while True:
            why = await self.process.down()
            begin = time.monotonic()
            self._enter("restarting", why)
            self._num_restarts += 1
            self._on_down()
            logger.error("restarting the engine process: %s", why)
            await self._kill_process()
            for failures in range(1, MAX_FAILED_STARTS + 1):
                try:
                    await self._start_process()
                    break
                except OctavoError as error:
                    logger.error("the engine does not start (attempt %d of %d): %s", failures, MAX_FAILED_STARTS, error)
                    if failures == MAX_FAILED_STARTS:
                        self._enter("failed", str(error))
                        self._on_failed(error)
                        return
                await asyncio.sleep(self._timeouts.retry_s * failures)
            logger.warning("the engine runs again after %.1f s", time.monotonic() - begin)


def rebuild_error(name: str, message: str, param: str | None = None, code: str | None = None) -> OctavoError:
    """The exception for an error of another process; an `EngineError` for names outside `octavo.errors`."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, OctavoError):
        return kind(message, param=param, code=code)
    return EngineError(f"{name}: {message}")


def cpu_time_s(pid: int) -> float:
    """CPU seconds that a process has used, with all its threads; 0 on systems without /proc."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            numbers = file.read().rpartition(")")[2].split()  # the command comes before it, and may contain anything
    except OSError:
        return 0.0
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")
