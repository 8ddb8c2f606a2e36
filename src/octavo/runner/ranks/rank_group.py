"""The processes of a model's tensor parallel ranks, as rank 0 sees them and as the others do.

    rank 0, the engine                                      rank 1, 2, ...
    ------------------                                      --------------
    RankLaunch ---------------- lifeline ----------------->
               <--------------- lifeline ------------------  RankStarted; RankFailed at the end
    plans, bitmasks ----------- ring --------------------->
               <--------------- status board ------------->  where each rank is

A group lives and dies as one. When a rank ends, rank 0 notices at its lifeline, and when rank 0 does, so do the others.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from octavo import log_setup as logs
from octavo.engine.process.heartbeat import NUM_WARM_UP_STEPS, WARM_UP_S
from octavo.engine.process.ipc import Lifeline
from octavo.engine.process.supervisor import rebuild_error
from octavo.errors import DeviceLostError, EngineError, OctavoError
from octavo.runner.ranks.communicator import CONNECT_TIMEOUT_S, Communicator
from octavo.runner.ranks.plan_ring import PlanReader, PlanRing, PlanWriter, RingError
from octavo.runner.ranks.shared_memory import SharedMemory, make_file
from octavo.runner.ranks.status_board import PLAN, Standstill, StatusBoard

RANK_COMMAND = (sys.executable, *(("-O",) if sys.flags.optimize else ()), "-P", "-m", "octavo.frontend.ranks.rank_main")
REASON_S = 0.5
"""How long a failed collective waits for the news of the rank that made it fail."""
EXIT_S = 5.0
"""How long a rank may take to exit when it is asked to."""
HANG_S = 60.0
"""How long no rank may move while some wait for others; in the first plans, which compile kernels, WARM_UP_S."""
WATCH_S = 0.25


class RankLaunch(msgspec.Struct, array_like=True):
    """The first message to a rank.

    options     fields of `octavo.config.EngineArgs`
    fds         inherited descriptors: of the shared memory, of the file through which ranks find each other, of the
                pipe that wakes the rank
    num_threads of torch
    logs        see `engine.process.ipc.Launch`
    """

    rank: int
    size: int
    options: dict[str, Any]
    fds: tuple[int, int, int]
    num_threads: int
    logs: logs.LogSettings | None = None


class RankStarted(msgspec.Struct, array_like=True, tag="started"):
    """The rank has read its options and will connect."""


class RankEnded(msgspec.Struct, array_like=True, tag="ended"):
    """The rank has computed all plans, and exits."""


class RankFailed(msgspec.Struct, array_like=True, tag="failed"):
    """The last message of a failing rank: the name of an exception, and its text."""

    error: str
    message: str


_LAUNCH = msgspec.msgpack.Decoder(RankLaunch)
Message = RankStarted | RankEnded | RankFailed
_MESSAGE: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def make_shared(fd: int, rank: int, size: int, *, create: bool) -> tuple[SharedMemory, StatusBoard, PlanRing]:
    """What all ranks map: the board, then the ring."""
    first = StatusBoard.num_bytes(size)
    memory = SharedMemory(fd, first + PlanRing.num_bytes(size - 1) if create else None)
    return memory, StatusBoard(memory, rank, size), PlanRing(memory, size - 1, first)


class _Child:
    """The process of a rank, its lifeline, and the writing end of the pipe that wakes it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lifeline, self.far_end = Lifeline.pair()
        self.far_wake, self.wake = os.pipe()
        os.set_blocking(self.wake, False)
        self.process: subprocess.Popen[bytes] | None = None
        self.failure: RankFailed | None = None
        self.started = self.ended = False

    def start(self, command: Sequence[str], fds: Sequence[int]) -> None:
        pass_fds = [self.far_end.fileno(), self.far_wake, *fds]
        command = [*command, str(self.far_end.fileno())]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=pass_fds)
        self.close_far_end()

    def close_far_end(self) -> None:
        if self.far_wake >= 0:
            self.far_end.close()
            os.close(self.far_wake)
            self.far_wake = -1

    def ending(self) -> str:
        """How it ended, or that it did not."""
        if self.failure is not None:
            return f"failed: {self.failure.error}: {self.failure.message}"
        assert self.process is not None
        try:
            code = self.process.wait(REASON_S)
        except subprocess.TimeoutExpired:
            return "closed its lifeline"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def end(self, deadline: float) -> None:
        """Wait for its exit until the deadline, then kill it."""
        self.close_far_end()
        if self.process is not None:
            try:
                self.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        os.close(self.wake)


class RankGroup:
    """Rank 0's end: starts the other ranks, gives them plans, and notices when one ends.

    options  fields of `octavo.config.EngineArgs`, as every rank gets them
    command  starts a rank

    failure  why the group has ended, in one line; "" while it lives
    """

    rank = 0

    def __init__(self, size: int, options: Mapping[str, Any], command: Sequence[str] = RANK_COMMAND) -> None:
        self.size = size
        self.failure = ""
        self._cause: OctavoError | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._num_threads_before = torch.get_num_threads()
        self.num_threads = max(1, min(self._num_threads_before, num_cores() // size))
        self.communicator: Communicator | None = None
        self._memory_fd, self._store_fd = make_file(), make_file()
        self._memory, self.board, self._ring = make_shared(self._memory_fd, 0, size, create=True)
        self._children = [_Child(rank) for rank in range(1, size)]
        self._writer = PlanWriter(self._ring, [child.wake for child in self._children], self.check)
        self._wake_watcher, self._watcher_wakes = os.pipe()
        launches = [
            RankLaunch(
                child.rank,
                size,
                dict(options),
                (self._memory_fd, self._store_fd, child.far_wake),
                self.num_threads,
                logs.current_settings(),
            )
            for child in self._children
        ]
        started: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
        # The kernel takes the thread that starts a process for its parent. This one lives as long as the group.
        args = (command, launches, started)
        self._watcher = threading.Thread(target=self._watch, args=args, name="octavo-ranks", daemon=True)
        self._watcher.start()
        if (error := started.get()) is not None:
            self.close()
            raise EngineError(f"the processes of ranks cannot be started: {error}") from error

    # -- start ---------------------------------------------------------------------------------------------------------

    def connect(self, device: torch.device) -> Communicator:
        """Wait for all ranks and connect them. Raises the error of a rank that does not start."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        with self._changed:
            while not self.failure and not all(child.started for child in self._children):
                if not self._changed.wait(deadline - time.monotonic()):
                    late = next(child.rank for child in self._children if not child.started)
                    raise EngineError(f"rank {late} could not reach the others within {CONNECT_TIMEOUT_S} s")
        with self.start_errors():
            self.check()
            torch.set_num_threads(self.num_threads)
            self.communicator = Communicator(self.board, 0, self.size, self._store_fd, device)
            self.check()  # a rank that ended before: `fail` had nothing to abort
        return self.communicator

    @contextmanager
    def start_errors(self) -> Iterator[None]:
        """Raises the error of the rank that failed in place of this rank's, which is that it is gone."""
        try:
            yield
        except (RuntimeError, EngineError) as error:
            if self.wait_for_failure() and self._cause is not None:
                raise self._cause from error
            raise

    # -- plans ---------------------------------------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """Send a message to all other ranks. Raises `DeviceLostError` if the group has ended."""
        try:
            self.check()
            self._writer.send(message)
        except RingError as error:
            self.fail(str(error))
            self.check()

    def check(self) -> None:
        """Raises `DeviceLostError` if the group has ended."""
        if self.failure:
            raise DeviceLostError(self.failure)

    def wait_for_failure(self) -> bool:
        """After an error that the end of another rank may have caused: wait for its news. False: all live."""
        deadline = time.monotonic() + REASON_S
        with self._changed:
            while not self.failure and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
        return bool(self.failure)

    def fail(self, why: str) -> None:
        """End the group, whose first failure counts.

        The failure is known before collectives are aborted: no result of theirs passes for a right one.
        """
        with self._changed:
            if self.failure:
                return
            self.failure = f"the tensor parallel ranks end: {why} ({self.board})"
            self._changed.notify_all()
        for child in self._children:
            if child.process is not None and child.process.poll() is None:
                child.process.kill()
        if self.communicator is not None:
            self.communicator.abort()

    # -- the watching thread -------------------------------------------------------------------------------------------

    def _watch(
        self,
        command: Sequence[str],
        launches: Sequence[RankLaunch],
        started: queue.SimpleQueue[OSError | None],
    ) -> None:
        try:
            for child, launch in zip(self._children, launches, strict=True):
                child.start(command, launch.fds[:2])
                child.lifeline.send(launch, wait=True)
        except OSError as error:
            started.put(error)
            return
        started.put(None)
        poll = select.poll()
        by_fd = {child.lifeline.fileno(): child for child in self._children}
        for fd in (*by_fd, self._wake_watcher):
            poll.register(fd, select.POLLIN)
        standstill = Standstill(self.board)
        while not self._closing:
            if not (ready := poll.poll(1000 * WATCH_S)):
                self._end_if_stuck(standstill)
            for fd, _ in ready:
                if self._closing:
                    return
                if fd not in by_fd or self._read(child := by_fd[fd]):
                    continue
                if not child.ended:
                    self._end(child)
                    return
                poll.unregister(fd)

    def _end_if_stuck(self, standstill: Standstill) -> None:
        """A supervisor's step limit mostly comes earlier. Before the first plan, others may load their weights."""
        seconds, num_plans = standstill.tick(WATCH_S), self.board.numbers[PLAN]
        if num_plans and seconds > (HANG_S if num_plans > NUM_WARM_UP_STEPS else WARM_UP_S):
            place = self.board.place(standstill.rank)
            self.fail(f"rank {standstill.rank} hangs: it stands at {place} for {seconds:.0f} s, and others wait")

    def _read(self, child: _Child) -> bool:
        """Read a message of a rank. Returns False if it is gone, or fails: its exit may wait for its GPU."""
        if not (data := child.lifeline.receive()):
            return False
        message = _MESSAGE.decode(data)
        with self._changed:
            if isinstance(message, RankFailed):
                child.failure = message
            else:
                child.started, child.ended = True, isinstance(message, RankEnded)
            self._changed.notify_all()
        return child.failure is None

    def _end(self, child: _Child) -> None:
        if (failure := child.failure) is not None:
            self._cause = rebuild_error(failure.error, f"rank {child.rank}: {failure.message}")
        else:
            self._cause = EngineError(f"rank {child.rank} {child.ending()} while it started")
        self.fail(f"rank {child.rank} {child.ending()}, at {self.board.place(child.rank)}")

    def close(self) -> None:
        """End all ranks and free what they share. A second call does nothing.

        On Linux they end with the watching thread, which started them.
        """
        if self._closing:
            return
        self._closing = True
        os.write(self._watcher_wakes, b"\0")
        self._watcher.join(EXIT_S)
        deadline = time.monotonic() + (0.0 if self.failure else EXIT_S)
        for child in self._children:
            child.lifeline.close()
        for child in self._children:
            child.end(deadline)
        if self._watcher.is_alive():  # NCCL waits for the graphs of a lost device
            return
        if self.communicator is not None:
            self.communicator.close()
            torch.set_num_threads(self._num_threads_before)
        for fd in (self._memory_fd, self._store_fd, self._wake_watcher, self._watcher_wakes):
            os.close(fd)
        self._ring.release()
        self.board.release()
        self._memory.close()


class RankMember:
    """The end of another rank.

    on_end  called on a thread when rank 0 is gone
    """

    def __init__(self, lifeline: Lifeline, on_end: Callable[[], None]) -> None:
        self._lifeline = lifeline
        if not (data := lifeline.receive()):
            on_end()
        self.launch = launch = _LAUNCH.decode(data or b"")
        self.rank, self.size = launch.rank, launch.size
        memory_fd, self._store_fd, wake = launch.fds
        self._memory, self.board, ring = make_shared(memory_fd, self.rank, self.size, create=False)
        self.reader = PlanReader(ring, self.rank, wake)
        threading.Thread(target=self._watch, args=(on_end,), name="octavo-lifeline", daemon=True).start()

    def _watch(self, on_end: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            while self._lifeline.receive():
                pass
        on_end()

    def connect(self, device: torch.device) -> Communicator:
        """Connect with the other ranks."""
        self._lifeline.send(RankStarted(), wait=True)
        torch.set_num_threads(self.launch.num_threads)
        return Communicator(self.board, self.rank, self.size, self._store_fd, device)

    @contextmanager
    def start_errors(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Tell rank 0 that this rank has computed all plans."""
        with contextlib.suppress(OSError):
            self._lifeline.send(RankEnded(), wait=True)

    def fail(self, error: BaseException) -> None:
        """Tell rank 0 why this rank ends."""
        text = " ".join(str(error).split())[:500] or type(error).__name__
        with contextlib.suppress(OSError):
            self._lifeline.send(RankFailed(type(error).__name__, text), wait=True)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
