"""The engine on its own thread, for readers on event loops: a `Transport` of `octavo.frontend.engine_client`.

    event loops                                          engine thread
    -----------                                          -------------
    submit() -> OutputQueue ------- calls, in order ---> add, abort, ... between two steps
    await queue.get() <-- wake-up --- OutputQueue <----- outputs of a step

The thread blocks while there is no work, and nothing here blocks an event loop. A queue holds at most one output: a
slow reader gets merged outputs and costs no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from octavo.engine.engine import Engine
from octavo.engine.engine_request import EngineRequest
from octavo.engine.output_processor import TextProcessor
from octavo.engine.outputs import RequestOutput, merge_outputs
from octavo.engine.query import GetStats, Query, Unpin
from octavo.engine.stats import Health, StatsSnapshot
from octavo.errors import EngineError, OctavoError, ParameterError
from octavo.params.sampling_params import RequestOutputKind

T = TypeVar("T")


class OutputQueue:
    """The outputs of one request for its reader, on the event loop that created the queue.

    merge   outputs are deltas, so unread ones are merged; otherwise a newer output replaces an unread one
    """

    def __init__(self, request_id: str, *, merge: bool) -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self._merge = merge
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._error: EngineError | None = None

    async def get(self) -> RequestOutput:
        """Wait for the next output. Raises the engine's error once all earlier outputs are read."""
        if asyncio.get_running_loop() is not self.loop:
            raise EngineError("this iterator was started on another event loop; read it there")
        while True:
            with self._lock:
                output, self._output = self._output, None
                if output is not None:
                    return output
                if self._error is not None:
                    raise copy_error(self._error)
                self._ready.clear()
            await self._ready.wait()

    def put(self, output: RequestOutput) -> bool:
        """Add an output from the engine thread. True if the reader must be woken: no unread output was left."""
        with self._lock:
            older, self._output = self._output, output
            if older is not None and self._merge:
                self._output = merge_outputs(older, output)
            return older is None

    def fail(self, error: EngineError) -> None:
        with self._lock:
            self._error = error

    def wake(self) -> None:
        """Wake the reader; call it on the reader's loop."""
        self._ready.set()


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

    text   compiles grammars; None: no request has one
    """

    def __init__(self, engine: Engine, text: TextProcessor | None = None) -> None:
        self._engine = engine
        self._text = text
        self._started_at = time.monotonic()
        self.max_model_len = engine.limits.max_model_len
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.queues: dict[str, OutputQueue] = {}
        self._lock = threading.Lock()  # guards `_queues`, `_error`, and the order of calls and shutdown
        self._error: EngineError | None = None
        self._closing = False
        self.thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self.thread.start()

    @property
    def is_running(self) -> bool:
        return self._error is None

    async def start(self) -> None:
        """The engine accepts requests already."""

    def health(self) -> Health:
        return Health("running" if self.is_running else "failed", time.monotonic() - self._started_at)

    async def submit(self, request: EngineRequest) -> OutputQueue:
        if self._text is not None:
            compiling = self._text.submit_grammar(request.params, request.tenant)
            if compiling is not None:
                try:  # a cancelled caller must not cancel it for others
                    request.grammar = await asyncio.shield(asyncio.wrap_future(compiling))
                finally:
                    self._text.withdraw_grammar(compiling)
        outputs = self.open_queue(request.request_id, merge=request.output_kind is RequestOutputKind.DELTA)
        added: list[str] = []

        def add(engine: Engine) -> None:
            engine.add_request(request)
            added.append(request.request_id)

        try:
            await asyncio.wrap_future(self.call(add))
        except BaseException:
            self.close_stream(outputs)
            if request.pin:  # if the name was taken, `added` is empty, and the other pin stays
                self._call_later(lambda engine: [engine.scheduler.unpin(request_id) for request_id in added])
            raise
        return outputs

    async def abort(self, request_id: str) -> bool:
        return await asyncio.wrap_future(self.call(lambda engine: self._abort(engine, request_id)))

    def discard_pin(self, request_id: str) -> None:
        self._call_later(lambda engine: engine.scheduler.unpin(request_id))

    async def unpin(self, request_id: str) -> int | None:
        return await self.query(Unpin(request_id))

    async def query(self, query: Query[T], /) -> T:
        return await asyncio.wrap_future(self.call(query.answer))

    async def stats(self) -> StatsSnapshot:
        return await self.query(GetStats())

    def call(self, work: Callable[[Engine], T]) -> Future[T]:
        """Call `work` with the engine between two steps; the future has its result or exception."""
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

    def _call_later(self, work: Callable[[Engine], object]) -> None:
        with contextlib.suppress(EngineError):  # a dead engine holds nothing
            self.call(work)

    def open_queue(self, request_id: str, *, merge: bool = False) -> OutputQueue:
        """Create the output queue of a request to be added; call it on a running event loop."""
        outputs = OutputQueue(request_id, merge=merge)
        with self._lock:
            if self._error is not None:
                raise copy_error(self._error)
            if request_id in self.queues:
                raise ParameterError(
                    f"a request {request_id!r} is running already; ids must differ", param="request_id"
                )
            self.queues[request_id] = outputs
        return outputs

    def close_stream(self, outputs: OutputQueue) -> None:
        """Close the queue of a reader that leaves; a running request is aborted before the next step is scheduled."""
        with self._lock:
            if self.queues.get(outputs.request_id) is not outputs:
                return  # the request or the engine has ended
            self._calls.put(lambda: self._abort_unread(outputs))

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
                self._calls.get()()  # blocks while there is no work
                with self._engine.gc_pause:
                    while self._engine.has_work and not self._closing:
                        self._execute_calls()
                        self._deliver(self._engine.step())
        except BaseException as cause:
            if self._engine.recorder is not None:
                self._engine.recorder.dump_last("crash")
            error = EngineError(f"the engine died: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        finally:
            self._shut_down(error)

    def _execute_calls(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            call()

    def _abort(self, engine: Engine, request_id: str) -> bool:
        output = engine.abort(request_id)
        if output is not None:
            self._deliver([output])
        return output is not None

    def _abort_unread(self, outputs: OutputQueue) -> None:
        with self._lock:
            is_open = self.queues.get(outputs.request_id) is outputs
            if is_open:
                del self.queues[outputs.request_id]
        if is_open:
            self._engine.abort(outputs.request_id)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Put outputs into their queues, with one wake-up per event loop."""
        waiting: dict[asyncio.AbstractEventLoop, list[OutputQueue]] = {}
        for output in outputs:
            target = self.queues.get(output.request_id)
            if target is None:
                continue
            if output.finished:
                with self._lock:
                    del self.queues[output.request_id]
            if target.put(output):
                waiting.setdefault(target.loop, []).append(target)
        self._wake(waiting)

    def _wake(self, waiting: dict[asyncio.AbstractEventLoop, list[OutputQueue]]) -> None:
        for loop, queues in waiting.items():
            try:
                loop.call_soon_threadsafe(_wake_all, queues)
            except RuntimeError:  # the loop is closed: its readers will never read
                for unread in queues:
                    self._abort_unread(unread)

    def _shut_down(self, error: EngineError) -> None:
        with self._lock:
            self._error = error
            queues = list(self.queues.values())
            self.queues.clear()
        self._execute_calls()  # each of them raises the error
        waiting: dict[asyncio.AbstractEventLoop, list[OutputQueue]] = {}
        for failed in queues:
            failed.fail(error)
            waiting.setdefault(failed.loop, []).append(failed)
        self._wake(waiting)
        self._engine.close()


def _wake_all(queues: list[OutputQueue]) -> None:
    for woken in queues:
        woken.wake()
