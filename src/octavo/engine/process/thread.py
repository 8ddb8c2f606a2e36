"""An engine on a thread of its own, for readers on event loops.

    event loops                                     the engine's thread
    -----------                                     -------------------
    open() -> OutputQueue --- calls, in order -----------> add, abort, ... between two steps
    await mail.read() <-- wake-up --- OutputQueue <------- the outputs of a step

The thread blocks while there is nothing to do, and nothing here blocks an event loop. A mailbox holds one output at
most: whoever reads slowly gets outputs merged, and costs no memory.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from octavo.engine.engine import Engine
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.errors import EngineError, OctavoError, ParameterError

T = TypeVar("T")


class OutputQueue:
    """What one request has to tell its reader, who waits on the event loop on which the mailbox was made.

    joins   each output tells what is new (deltas), so that two make one; else the newer output replaces the older
    """

    def __init__(self, request_id: str, *, joins: bool) -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self._joins = joins
        self._there = asyncio.Event()
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._error: EngineError | None = None

    async def read(self) -> RequestOutput:
        """The next output, as soon as there is one. What was told before an error comes before it."""
        if asyncio.get_running_loop() is not self.loop:
            raise EngineError("this iterator was begun on another event loop; read it there")
        while True:
            with self._lock:
                output, self._output = self._output, None
                if output is not None:
                    return output
                if self._error is not None:
                    raise again(self._error)
                self._there.clear()
            await self._there.wait()

    def put(self, output: RequestOutput) -> bool:
        """From the engine's thread. Whether the reader has to be woken: not where an older output still lies."""
        with self._lock:
            older, self._output = self._output, output
            if older is not None and self._joins:
                self._output = joined(older, output)
            return older is None

    def fail(self, error: EngineError) -> None:
        with self._lock:
            self._error = error

    def wake(self) -> None:
        """On the reader's loop."""
        self._there.set()


E = TypeVar("E", bound=OctavoError)


def again(error: E) -> E:
    """The same for one more reader: an exception that many raise would gather the tracebacks of all."""
    copy = type(error)(str(error), param=error.param, code=error.code)
    copy.__cause__ = error.__cause__
    return copy


def joined(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    """Two outputs that tell what is new, as one."""
    parts = {c.index: c for c in older.outputs}
    for c in newer.outputs:
        parts[c.index] = _joined(parts[c.index], c) if c.index in parts else c
    prompt_logprobs = older.prompt_logprobs if newer.prompt_logprobs is None else newer.prompt_logprobs
    return replace(newer, outputs=[parts[index] for index in sorted(parts)], prompt_logprobs=prompt_logprobs)


def _joined(older: CompletionOutput, newer: CompletionOutput) -> CompletionOutput:
    both = replace(newer, text=older.text + newer.text, token_ids=[*older.token_ids, *newer.token_ids])
    if older.logprobs is not None and newer.logprobs is not None:
        both.logprobs = [*older.logprobs, *newer.logprobs]
    return both


class EngineThread:
    """Owns an engine: from now on nobody else touches it but through `call`. Safe to use from any thread.

    When a step raises what only a bug or a lost device raises, the engine is dead: every reader gets an `EngineError`,
    and so does whoever asks for anything later.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._mail: dict[str, OutputQueue] = {}
        self._lock = threading.Lock()  # over `_mail`, `_error`, and the order of calls and the end
        self._error: EngineError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="octavo-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._error is None

    def call(self, work: Callable[[Engine], T]) -> Future[T]:
        """Do something with the engine between two steps. Its result, or what it raises."""
        future: Future[T] = Future()

        def carry_out() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._error is not None:
                future.set_exception(again(self._error))
                return
            try:
                future.set_result(work(self._engine))
            except Exception as error:
                future.set_exception(error)

        with self._lock:
            if self._error is not None:
                raise again(self._error)
            self._calls.put(carry_out)
        return future

    def open(self, request_id: str, *, joins: bool = False) -> OutputQueue:
        """The mailbox of a request that is about to be added; on a running event loop."""
        mail = OutputQueue(request_id, joins=joins)
        with self._lock:
            if self._error is not None:
                raise again(self._error)
            if request_id in self._mail:
                raise ParameterError(
                    f"a request {request_id!r} is running already; ids must differ", param="request_id"
                )
            self._mail[request_id] = mail
        return mail

    def leave(self, mail: OutputQueue) -> None:
        """Its reader has gone: the request is aborted, if it still runs, before the next step is planned."""
        with self._lock:
            if self._mail.get(mail.request_id) is not mail:
                return  # it has finished, or the engine has
            self._calls.put(lambda: self._forget(mail))

    def abort(self, request_id: str) -> Future[bool]:
        """End a request; its reader gets what there is of it, as a last output. Whether it was running."""
        return self.call(lambda engine: self._abort(engine, request_id))

    def close(self) -> None:
        """End everything; waits for the step that runs. A second call does nothing."""
        self._closing = True
        self._calls.put(lambda: None)  # wakes it
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- on the engine's thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        error = EngineError("the engine is closed; make a new one")
        try:
            while not self._closing:
                self._calls.get()()  # here it sleeps
                with self._engine.gc_pause:
                    while self._engine.has_work and not self._closing:
                        self._carry_out_calls()
                        self._post(self._engine.step())
        except BaseException as cause:
            if self._engine.recorder is not None:
                self._engine.recorder.dump_last("crash")
            error = EngineError(f"the engine died: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        finally:
            self._end(error)

    def _carry_out_calls(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            call()

    def _abort(self, engine: Engine, request_id: str) -> bool:
        output = engine.abort(request_id)
        if output is not None:
            self._post([output])
        return output is not None

    def _forget(self, mail: OutputQueue) -> None:
        with self._lock:
            mine = self._mail.get(mail.request_id) is mail
            if mine:
                del self._mail[mail.request_id]
        if mine:
            self._engine.abort(mail.request_id)

    def _post(self, outputs: list[RequestOutput]) -> None:
        """One wake-up a loop, however many requests have something to tell."""
        waiting: dict[asyncio.AbstractEventLoop, list[OutputQueue]] = {}
        for output in outputs:
            mail = self._mail.get(output.request_id)
            if mail is None:
                continue
            if output.finished:
                with self._lock:
                    del self._mail[output.request_id]
            if mail.put(output):
                waiting.setdefault(mail.loop, []).append(mail)
        self._wake(waiting)

    def _wake(self, waiting: dict[asyncio.AbstractEventLoop, list[OutputQueue]]) -> None:
        for loop, mails in waiting.items():
            try:
                loop.call_soon_threadsafe(_wake_all, mails)
            except RuntimeError:  # the loop was closed under its readers: nobody will ever read this
                for mail in mails:
                    self._forget(mail)

    def _end(self, error: EngineError) -> None:
        with self._lock:
            self._error = error
            mails = list(self._mail.values())
            self._mail.clear()
        self._carry_out_calls()  # each finds the error
        waiting: dict[asyncio.AbstractEventLoop, list[OutputQueue]] = {}
        for mail in mails:
            mail.fail(error)
            waiting.setdefault(mail.loop, []).append(mail)
        self._wake(waiting)
        self._engine.close()


def _wake_all(mails: list[OutputQueue]) -> None:
    for mail in mails:
        mail.wake()
