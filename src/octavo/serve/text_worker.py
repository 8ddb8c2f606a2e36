"""Renders chat templates, tokenises and detokenises in worker processes.

The caller determines the size of this work. Templates are pure Python, and the search for special tokens in a long text
is one C call. Both hold the GIL on any thread, and the server could read no connection meanwhile.

    this process                              a worker (`python -m octavo.serve.text_worker FD`)
    length, [job, ...] -------- socket -----> Tokenizer
    msgpack <------------------ socket ------ length, [value] or [error, message, param, code]

There are a few workers, started on demand. A worker that dies or hangs fails its current request and is replaced. A
worker exits when its socket closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import struct
import subprocess
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.errors import UsageError
from octavo.frontend.input_processor import InputProcessor
from octavo.frontend.sigint import ignore_signals
from octavo.serve.openai.errors import ApiError, bad_request
from octavo.text import chat_template
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo.serve")

NUM_WORKERS = max(2, min(4, (os.cpu_count() or 1) // 2))
START_S = 60.0
BASE_S = 10.0
CHARS_PER_S = 100_000
"""Timeout of a job: `BASE_S`, and a second for this many characters or tokens. Then the worker is considered hung."""
MAX_JOBS = 1024
MAX_JOB_BYTES = 64 << 20
"""Limits of waiting and running jobs; further jobs get 429. A single job is always accepted."""
MAX_TEMPLATE_BYTES = 512 << 20
"""Memory that a chat template may use."""
LENGTH = struct.Struct(">I")
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class TextWorkerPool:
    """The workers of one tokenizer. Use it on one event loop, and close it."""

    def __init__(self, tokenizer: Tokenizer, num_workers: int = NUM_WORKERS) -> None:
        self._tokenizer = tokenizer
        self.idle: list[_Worker] = []
        self.workers: set[_Worker] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._slots = asyncio.Semaphore(num_workers)
        self._slow_slots = asyncio.Semaphore(num_workers - 1)  # one worker is reserved for short jobs
        self._num_job_bytes = 0
        self._closed = False
        self._tokenizer_state = b""  # serialised, for new workers

    async def start(self) -> None:
        """Starts a worker, so that the first request need not wait for it."""
        async with self._slots:
            self.idle.append(await self._start_worker())

    async def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text. The spelling of a special token is encoded as text."""
        size = sum(map(len, texts))
        packed: list[bytes] = await self._submit("encode", list(texts), add_special_tokens, size=size)
        return list(map(_unpack, packed))

    async def chat(self, messages: Sequence[dict[str, Any]], template: dict[str, Any]) -> tuple[str, list[int]]:
        """Renders a conversation: its text and token ids. Raises `TemplateError`, or `ApiError` 500 after a timeout."""
        size = sum(len(m["content"]) for m in messages)
        slow = "chat_template" in template
        try:
            text, packed = await self._submit("chat", messages, template, size=size, slow=slow)
        except OverflowError:
            text = "messages, tools or chat_template_kwargs have an integer of more than 64 bits; use a smaller one"
            raise bad_request("integer_out_of_range", text, "messages") from None
        return text, _unpack(packed)

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = await self._submit("decode", _pack(ids), skip_special_tokens, size=len(ids))
        return text

    async def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        texts: list[str] = await self._submit("token_strings", _pack(ids), size=len(ids))
        return texts

    async def word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """See `InputProcessor.encode_bad_words`."""
        ids: list[list[int]] = await self._submit("word_ids", list(words), size=2 * sum(map(len, words)))
        return ids

    async def aclose(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self.workers:
            worker.end()
        self.workers.clear()
        self.idle.clear()

    async def _submit(self, *job: Any, size: int, slow: bool = False) -> Any:
        """Runs a job and returns its result. `slow` and large jobs leave the last worker to others.

        A cancelled caller does not stop the worker: restarting it would cost more than finishing the job.
        """
        body = _encode(job)
        if self._tasks and (len(self._tasks) >= MAX_JOBS or self._num_job_bytes + len(body) > MAX_JOB_BYTES):
            text = f"{len(self._tasks)} requests wait to be tokenised; try again later"
            raise ApiError(429, "queue_full", text, retry_after_s=1)
        task = asyncio.ensure_future(self._run_job(body, BASE_S + size / CHARS_PER_S, slow or size > CHARS_PER_S))
        self._tasks.add(task)
        self._num_job_bytes += len(body)
        task.add_done_callback(functools.partial(self._on_job_done, len(body)))
        return await asyncio.shield(task)

    def _on_job_done(self, num_bytes: int, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._num_job_bytes -= num_bytes
        if not task.cancelled():
            task.exception()  # retrieved, as the caller may have been cancelled

    async def _run_job(self, body: bytes, timeout_s: float, slow: bool) -> Any:
        async with contextlib.AsyncExitStack() as slots:
            if slow:
                await slots.enter_async_context(self._slow_slots)
            await slots.enter_async_context(self._slots)
            worker = self.idle.pop() if self.idle else None
            if worker is not None and not worker.is_alive:
                self._end(worker)
                worker = None
            if worker is None:
                worker = await self._start_worker()
            try:
                async with asyncio.timeout(timeout_s):
                    reply = _decode(await worker.request(body))
            except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
                self._end(worker)
                logger.error("text worker killed: %s", "it hangs" if isinstance(error, TimeoutError) else "it died")
                text = f"a text worker died, or took longer than {timeout_s:.0f} s; send less text"
                raise ApiError(500, "text_timeout", text) from None
            except BaseException:  # half a reply may be in the socket
                self._end(worker)
                raise
            self.idle.append(worker)
        if len(reply) == 1:
            return reply[0]
        raise _error(*reply)

    async def _start_worker(self) -> _Worker:
        if self._closed:
            raise ApiError(503, "shutting_down", "the server is shutting down", retry_after_s=5)
        if not self._tokenizer_state:
            self._tokenizer_state = await asyncio.to_thread(lambda: _encode(self._tokenizer.to_wire()))
        worker = await _Worker.start()
        self.workers.add(worker)
        try:
            async with asyncio.timeout(START_S):
                await worker.request(self._tokenizer_state)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            self._end(worker)
            raise ApiError(503, "text_unavailable", "cannot start a process to tokenise in", retry_after_s=5) from None
        except BaseException:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: _Worker) -> None:
        self.workers.discard(worker)
        worker.end()


class _Worker:
    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls) -> _Worker:
        server_end, worker_end = socket.socketpair()
        with worker_end:
            server_end.setblocking(False)
            options = ["-O"] if sys.flags.optimize else []
            process = subprocess.Popen(
                [sys.executable, *options, "-P", "-m", __spec__.name, str(worker_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[worker_end.fileno()],
                process_group=0,  # Ctrl-C is for the server
            )
        reader, writer = await asyncio.open_connection(sock=server_end)
        return cls(process, reader, writer)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    async def request(self, body: bytes) -> bytes:
        self._writer.write(LENGTH.pack(len(body)))
        self._writer.write(body)
        await self._writer.drain()
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return await self._reader.readexactly(length)

    def end(self) -> None:
        self.process.kill()
        self._writer.close()
        self.process.wait()


def _error(kind: str, message: str, param: str | None, code: str) -> Exception:
    from octavo.engine.process.supervisor import rebuild_error

    if kind == "bug":
        return RuntimeError(message)
    return rebuild_error(kind, message, param, code)


def _pack(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def _unpack(packed: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(packed)
    return ids.tolist()


# -- in the worker process ---------------------------------------------------------------------------------------------


def run_job(tokenizer: Tokenizer, job: str, args: list[Any]) -> Any:
    if job == "chat":
        messages, template = args
        prompt = InputProcessor(tokenizer).chat(messages, **template)
        return prompt["prompt"], _pack(prompt["prompt_token_ids"])
    if job == "encode":
        texts, add_special_tokens = args
        return list(map(_pack, tokenizer.encode_batch(texts, add_special_tokens, parse_special=False)))
    if job == "decode":
        packed, skip_special_tokens = args
        return tokenizer.decode(_unpack(packed), skip_special_tokens)
    if job == "token_strings":
        return [tokenizer.decode([token], False) for token in _unpack(*args)]
    if job == "word_ids":
        return InputProcessor(tokenizer).encode_bad_words(*args)
    raise ValueError(job)


def serve(connection: socket.socket) -> None:
    stream = connection.makefile("rwb")

    def receive() -> Any:
        head = stream.read(LENGTH.size)
        return _decode(stream.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None

    def send(value: Any) -> None:
        body = _encode(value)
        stream.write(LENGTH.pack(len(body)) + body)
        stream.flush()

    if (tokenizer_state := receive()) is None:
        return
    tokenizer = Tokenizer.from_wire(tokenizer_state)
    if sys.platform == "linux":  # others do not limit address space
        chat_template.MAX_RENDER_BYTES = MAX_TEMPLATE_BYTES
    send([None])
    while (job := receive()) is not None:
        try:
            reply: list[Any] = [run_job(tokenizer, job[0], job[1:])]
        except UsageError as error:
            reply = [type(error).__name__, str(error), error.param, error.code]
        except Exception as error:
            reply = ["bug", f"{type(error).__name__}: {error}"[:1000], None, ""]
        send(reply)


if __name__ == "__main__":
    ignore_signals()
    serve(socket.socket(fileno=int(sys.argv[1])))
