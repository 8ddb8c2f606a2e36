"""The engine on its own thread, for readers on other threads.

    readers                                        engine thread
    -------                                        -------------
    add(), abort(), call() --- calls, in order --> between two steps
    mailbox(deliveries) <------------------------- once a step

The thread blocks while there is no work.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias, TypeVar

from octavo.engine.engine import Engine
from octavo.engine.engine_request import EngineRequest
from octavo.engine.request_update import RequestUpdate
from octavo.errors import EngineError, OctavoError

T = TypeVar("T")


class Delivery(NamedTuple):
    """What is new of a request, or why nothing more will come."""

    request: EngineRequest
    update: RequestUpdate | EngineError


Mailbox: TypeAlias = Callable[[list[Delivery]], object]
"""Takes deliveries, on the engine's thread. It must not block. It raises `RuntimeError` if its reader is gone."""
E = TypeVar("E", bound=OctavoError)


def copy_error(error: E) -> E:
    """A copy for one more reader: an exception raised by many would collect all their tracebacks."""
    copy = type(error)(str(error), param=error.param, code=error.code)
    copy.__cause__ = error.__cause__
    return copy


class EngineThread:
    """Owns an engine; everything else accesses it through `call`. All methods are thread-safe.

    The engine is dead once a step raises an unexpected error, or the device is lost. Then every reader and every later
    call gets an `EngineError`. It is not restarted.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._started_at = time.monotonic()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._readers: dict[str, tuple[EngineRequest, Mailbox]] = {}  # of the engine's requests; its thread owns them
        # Guards `_error`, and the order of calls and shutdown. Reentrant: the garbage collector may close a reader.
        self._lock = threading.RLock()
        self._error: EngineError | None = None
        self._closing = False
        self.thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self.thread.start()

    @property
    def is_running(self) -> bool:
        return self._error is None

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started_at

    def add(self, requests: Seq[EngineRequest], mailbox: Mailbox) -> Future[None]:
        """Add requests, or none if one is invalid: the future raises the `UsageError` then."""

        def add(engine: Engine) -> None:
            try:
                for request in requests:
                    engine.add_request(request)
                    self._readers[request.request_id] = request, mailbox
            except BaseException:
                self._discard(engine, requests)
                raise

        return self.call(add)

    def discard(self, requests: Iterable[EngineRequest]) -> None:
        """Abort requests whose reader leaves, before the next step is scheduled."""
        self.call_later(lambda engine: self._discard(engine, requests))

    def stop(self, request: EngineRequest, index: int) -> None:
        """Stop one sample at a stop string that the client found in its text."""

        def stop(engine: Engine) -> None:
            if self._is_read(request) and engine.stop(request.request_id, index) is not None:
                del self._readers[request.request_id]

        self.call_later(stop)

    def abort(self, request_id: str) -> Future[bool]:
        """Abort a request; its reader gets a last update. True if the request was running."""

        def abort(engine: Engine) -> bool:
            update = engine.abort(request_id)
            self._deliver([] if update is None else [update])
            return update is not None

        return self.call(abort)

    def call(self, work: Callable[[Engine], T]) -> Future[T]:
        """Call `work` with the engine between two steps; the future has its result or exception.

        Raises `EngineError` if the engine is dead, or if its own thread calls: the result would never come.
        """
        self.check_caller()
        return self._call(work)

    def check_caller(self) -> None:
        """Raises `EngineError` on the engine's own thread, as in a listener to its events."""
        if threading.current_thread() is self.thread:
            raise EngineError("the engine was called during one of its own steps; call it after the step")

    def call_later(self, work: Callable[[Engine], object]) -> None:
        """As `call`, for work without a result; any thread may call, and a dead engine ignores it."""
        with contextlib.suppress(EngineError):
            self._call(work)

    def _call(self, work: Callable[[Engine], T]) -> Future[T]:
        future: Future[T] = Future()

        def execute() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._error is not None:
                future.set_exception(copy_error(self._error))
                return
            try:
                future.set_result(work(self._engine))
            except Exception as error:
                future.set_exception(error)

        with self._lock:
            if self._error is not None:
                raise copy_error(self._error)
            self._calls.put(execute)
        return future

    def close(self) -> None:
        """Shut the engine down after the current step. A second call does nothing."""
        self._closing = True
        self._calls.put(lambda: None)  # wakes the thread
        if threading.current_thread() is not self.thread:
            self.thread.join()

    # -- on the engine thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error = EngineError("the engine is closed; create a new one")
        try:
            while not self._closing:
                call = self._calls.get()  # blocks while there is no work
                with self._engine.gc_pause:
                    call()
                    while self._engine.has_work and not self._closing:
                        self._execute_calls()
                        self._deliver(self._engine.step())
        except EngineError as cause:  # as a lost device
            self._dump()
            error = cause
        except BaseException as cause:
            self._dump()
            error = EngineError(f"the engine died: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        finally:
            self._shut_down(error)

    def _dump(self) -> None:
        if self._engine.recorder is not None:
            self._engine.recorder.dump_last("crash")

    def _execute_calls(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            call()

    def _is_read(self, request: EngineRequest) -> bool:
        """False once it has ended; another request may have its id then."""
        return self._readers.get(request.request_id, (None,))[0] is request

    def _discard(self, engine: Engine, requests: Iterable[EngineRequest]) -> None:
        for request in requests:
            if self._is_read(request):
                del self._readers[request.request_id]
                engine.abort(request.request_id)

    def _deliver(self, updates: list[RequestUpdate]) -> None:
        """One message a mailbox."""
        found: dict[Mailbox, list[Delivery]] = {}
        for update in updates:
            request, mailbox = self._readers[update.request_id]
            found.setdefault(mailbox, []).append(Delivery(request, update))
            if update.finished:
                del self._readers[update.request_id]
        for mailbox, deliveries in found.items():
            try:
                mailbox(deliveries)
            except RuntimeError:
                self._discard(self._engine, [delivery.request for delivery in deliveries])

    def _shut_down(self, error: EngineError) -> None:
        with self._lock:
            self._error = error
        try:
            self._engine.close()
        finally:
            self._execute_calls()  # each of them raises the error
            for request, mailbox in self._readers.values():
                with contextlib.suppress(RuntimeError):
                    mailbox([Delivery(request, copy_error(error))])
            self._readers.clear()
