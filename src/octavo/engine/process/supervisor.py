"""Keeps an engine going in a process of its own: starts it, watches it, and starts it again when it dies or hangs.

    starting ---> running <---> restarting
        |                            |
        +--------> failed <----------+   the first start, or three in a row, came to nothing

A process that dies is noticed at once, because its lifeline breaks. One that hangs is noticed by its silence, or by a
step that takes far longer than such steps do; a step that is slow but not beyond that is never cut off.
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
from octavo.engine.process.ipc import (
    BadMessage,
    Channel,
    CloseEngine,
    EngineFailed,
    Heartbeat,
    Hello,
    Launch,
    Lifeline,
    Ready,
    StepReport,
    endpoint_in,
    read_message,
)
from octavo.engine.stats import Health
from octavo.errors import EngineError, OctavoError

logger = logging.getLogger("octavo.supervisor")

ENGINE_COMMAND = (sys.executable, *(("-O",) if sys.flags.optimize else ()), "-P", "-m", "octavo.frontend.engine_main")
"""-P: what lies in the working directory is not imported."""
MOST_FAILURES = 3
"""Starts in a row that come to nothing before the engine is given up."""
WORKS = 0.1
"""A process that uses more than this share of a core works, though it may not get to say so."""
SOCKET_PATH_CHARS = 90
"""A Unix socket's path has 107 at most; a longer directory for temporary files is not used."""


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """How long to wait for an engine, in seconds.

    silence_s       without a sign of life, and without work
    step_s          in one step, if the steps before do not let expect longer ones
    start_s         without a sign of life while it starts, or works: importing modules and compiling kernels can hold
                    up all of a process's threads
    close_s         that it may take to leave when it is told to
    retry_s         between a start that came to nothing and the next; then twice as long
    """

    silence_s: float = 10.0
    step_s: float = 10.0
    start_s: float = 300.0
    close_s: float = 2.0
    retry_s: float = 0.5


class EngineProcess:
    """One life of an engine, on the running event loop: its process, the channel, and the lifeline.

    on_step   called with each `StepReport` that it sends; on_bad: with each `BadMessage`
    """

    TICK_S = 0.25
    LAST_WORDS_S = 0.05
    """How long to listen after the end for what was said before it."""

    def __init__(
        self,
        command: Sequence[str],
        options: dict[str, Any],
        limits: EngineTimeouts,
        on_step: Callable[[StepReport], None],
        on_bad: Callable[[BadMessage], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._on_step, self._on_bad = on_step, on_bad
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._over = asyncio.Event()
        self._last_words: EngineFailed | None = None
        self.was_killed = False  # from outside: by a person, or by a system that is short of memory
        self._beat, self._beat_at = Heartbeat(phase="starting"), time.monotonic()
        self._cpu_s = 0.0  # that the process had used then
        self._beats = msgspec.msgpack.Decoder(Heartbeat)
        self._lifeline, there = Lifeline.pair()
        with contextlib.ExitStack() as undo, contextlib.closing(there):
            undo.callback(self._lifeline.close)
            # Nobody but this user may enter it, and it is gone as soon as the engine has been there.
            long = len(tempfile.gettempdir()) > SOCKET_PATH_CHARS
            self._directory = tempfile.mkdtemp(prefix="octavo-", dir="/tmp" if long else None)
            undo.callback(self._leave_directory)
            self._channel = Channel(bind=endpoint_in(self._directory))
            undo.callback(self._channel.close)
            self._process = subprocess.Popen(
                [*command, str(there.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                process_group=0,  # Ctrl-C is for this process; and what it starts itself ends with it
            )
            undo.pop_all()
        self._lifeline.send(Launch(endpoint_in(self._directory), options, logs.current_settings()), wait=True)
        self._channel.attach(self._loop, self._take_in)
        self._loop.add_reader(self._lifeline.fileno(), self._listen)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_step_age_s(self) -> float | None:
        waited = self._beat.waited_s
        return None if waited is None else waited + time.monotonic() - self._beat_at

    def send(self, commands: list[msgspec.Raw]) -> None:
        self._channel.send(commands)

    async def ready(self) -> Ready:
        """Wait until it takes requests. Raises what kept it from that."""
        down = asyncio.ensure_future(self.down())
        either: list[asyncio.Future[Any]] = [self._ready, down]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._ready.done():
                return self._ready.result()
            raise self._cause(await down)
        finally:
            down.cancel()

    async def down(self) -> str:
        """Wait until it has died, or must be taken for hung; why, in one line."""
        before = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), self.TICK_S)
                await asyncio.sleep(self.LAST_WORDS_S)
                return await asyncio.to_thread(self._reap)
            now = time.monotonic()
            on_time, before = now - before < 4 * self.TICK_S, now
            # Who was held up himself has not read what was said to him.
            if on_time and (why := self._hangs(now)):
                return why

    def _hangs(self, now: float) -> str:
        limits, beat = self._limits, self._beat
        silence = now - self._beat_at
        if silence > limits.silence_s:
            works = not self._ready.done() or cpu_time_s(self.pid) - self._cpu_s > WORKS * silence
            if not works or silence > limits.start_s:
                return f"it gave no sign of life for {silence:.1f} s"
        allowed = max(limits.step_s, beat.allowed_s)
        if beat.waited_s is not None and beat.waited_s > allowed:
            return f"a step took {beat.waited_s:.1f} s, where at most {allowed:.1f} s were to be expected"
        return ""

    def _cause(self, why: str) -> OctavoError:
        """Why it did not start."""
        if self._last_words is not None:
            return rebuild_error(self._last_words.error, self._last_words.message)
        return EngineError(f"the engine process ended while {self._beat.phase}: {why}")

    def _reap(self) -> str:
        """Wait for the end of a process that has let go of its lifeline; how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            if self._last_words is not None:
                return f"{self._last_words.error}: {self._last_words.message}"
            if code >= 0:
                return f"it left with exit code {code}"
            self.was_killed = code == -signal.SIGKILL
            hint = "; the system may have run out of memory" if self.was_killed else ""
            return f"it was killed by {signal.Signals(-code).name}{hint}"
        return "it closed its lifeline"

    # -- what it says --------------------------------------------------------------------------------------------------

    def _take_in(self, data: bytes) -> None:
        report, bad = read_message(data)
        for message in bad:
            self._on_bad(message)
        if report is None:
            return
        if isinstance(report, StepReport):
            self._on_step(report)
        elif isinstance(report, Hello):
            self._leave_directory()
        elif isinstance(report, EngineFailed):
            self._last_words = report
        elif not self._ready.done():
            self._ready.set_result(report)

    def _listen(self) -> None:
        while (data := self._lifeline.receive(wait=False)) is not None:
            if not data:
                self._loop.remove_reader(self._lifeline.fileno())
                self._over.set()
                return
            try:
                self._beat, self._beat_at = self._beats.decode(data), time.monotonic()
            except Exception as error:
                self._on_bad(BadMessage(f"a beat of {len(data)} bytes", str(error)))
                continue
            self._cpu_s = cpu_time_s(self.pid)

    def _leave_directory(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    # -- the end -------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Tell it to leave, and give it a moment."""
        self._channel.send([CloseEngine()])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._limits.close_s)

    def kill(self) -> None:
        """With whatever it has started. Nothing of it is heard any more. A second call does nothing."""
        if self._lifeline.fileno() >= 0:
            self._loop.remove_reader(self._lifeline.fileno())
            self._lifeline.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._channel.close()
            self._leave_directory()

    def wait(self) -> None:
        """Until a killed one is gone: giving back gigabytes takes its time."""
        self._process.wait()


class Supervisor:
    """One engine after another. All of it happens on the event loop on which `start` is awaited.

    options           of `octavo.config.EngineArgs`
    on_ready, on_down called when an engine has come up, and when it has gone; and whether that may be for what it did
    on_step           called with what an engine tells; on_bad: with what of it cannot be read
    on_failed         called with the root cause, when there will be none any more
    """

    def __init__(
        self,
        options: dict[str, Any],
        *,
        on_ready: Callable[[Ready], None],
        on_step: Callable[[StepReport], None],
        on_bad: Callable[[BadMessage], None],
        on_down: Callable[[bool], None],
        on_failed: Callable[[OctavoError], None],
        command: Sequence[str] = ENGINE_COMMAND,
        limits: EngineTimeouts | None = None,
    ) -> None:
        self._options, self._command, self._limits = options, command, limits or EngineTimeouts()
        self._on_ready, self._on_step, self._on_bad = on_ready, on_step, on_bad
        self._on_down, self._on_failed = on_down, on_failed
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._state: Literal["starting", "running", "restarting", "failed"] = "starting"
        self._since = time.monotonic()
        self._reason = ""
        self._num_restarts = 0

    async def start(self) -> None:
        """Raises the root cause if the first engine does not come up; nothing of it is left then."""
        try:
            await self._come_up()
        except BaseException as error:
            self._enter("failed", str(error))
            raise
        self._task = asyncio.create_task(self._watch(), name="octavo-supervisor")

    def send(self, commands: list[msgspec.Raw]) -> None:
        """To an engine that runs."""
        assert self._process is not None
        self._process.send(commands)

    @property
    def is_up(self) -> bool:
        return self._state == "running"

    @property
    def pid(self) -> int | None:
        """Of the engine that is there."""
        return None if self._process is None else self._process.pid

    def health(self) -> Health:
        age = self._process.last_step_age_s if self._process is not None and self.is_up else None
        return Health(self._state, time.monotonic() - self._since, age, self._num_restarts, self._reason)

    def close(self) -> None:
        """Ends the engine, and waits for that; a second call does nothing. On the event loop, and only briefly."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._state != "failed":
            self._enter("failed", "it was shut down")
        if self._process is not None:
            self._process.leave()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _enter(self, state: Literal["starting", "running", "restarting", "failed"], reason: str) -> None:
        self._state, self._reason, self._since = state, reason, time.monotonic()

    async def _come_up(self) -> None:
        try:
            self._process = EngineProcess(self._command, self._options, self._limits, self._on_step, self._on_bad)
        except OSError as error:
            raise EngineError(f"no process for the engine: {error}; is there room for files and processes?") from error
        try:
            ready = await self._process.ready()
        except BaseException:
            await self._make_sure_it_is_gone()
            raise
        self._enter("running", self._reason)
        self._on_ready(ready)

    async def _make_sure_it_is_gone(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def _watch(self) -> None:
        assert self._process is not None
        while True:
            why = await self._process.down()
            begin = time.monotonic()
            self._enter("restarting", why)
            self._num_restarts += 1
            self._on_down(not self._process.was_killed)
            logger.error("the engine process is started again: %s", why)
            await self._make_sure_it_is_gone()
            for failures in range(1, MOST_FAILURES + 1):
                try:
                    await self._come_up()
                    break
                except OctavoError as error:
                    logger.error("the engine does not come up (%d of %d): %s", failures, MOST_FAILURES, error)
                    if failures == MOST_FAILURES:
                        self._enter("failed", str(error))
                        self._on_failed(error)
                        return
                await asyncio.sleep(self._limits.retry_s * failures)
            logger.warning("the engine runs again, after %.1f s", time.monotonic() - begin)


def rebuild_error(name: str, message: str, param: str | None = None, code: str | None = None) -> OctavoError:
    """An exception that was raised in another process. Of a class that is none of ours, the name is said."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, OctavoError):
        return kind(message, param=param, code=code)
    return EngineError(f"{name}: {message}")


def cpu_time_s(pid: int) -> float:
    """That a process has used, with all its threads; 0 where the system has no /proc to tell."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            numbers = file.read().rpartition(")")[2].split()  # before it stands the command, which may hold anything
    except OSError:
        return 0.0
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")
