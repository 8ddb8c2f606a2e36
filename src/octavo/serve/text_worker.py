"""Text work that a caller can size is done in processes of its own: rendering templates, tokenising, detokenising.

A template is pure Python, and a search for special tokens in a long text is one call of C. Either holds the interpreter
of its process for as long as it takes, on whatever thread it runs; no connection would be read meanwhile.

    this process                              a worker (`python -m octavo.serve.text_worker FD`)
    length, [what, ...] ------- socket -----> Tokenizer
    msgpack <------------------ socket ------ length, [value] or [error, message, param, code]

There are a few workers, started as they are needed. One that dies or hangs fails the request that it works on, and the
next request has a new one. A worker ends when its socket does.
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
from octavo.serve.openai.errors import ApiError, bad_request
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo.serve")

NUM_WORKERS = max(2, min(4, (os.cpu_count() or 1) // 2))
START_S = 60.0
BASE_S = 10.0
CHARS_PER_S = 100_000
"""A worker that has not answered after `BASE_S`, and a second for so many characters or tokens, is taken to hang."""
MAX_JOBS = 1024
MAX_JOB_BYTES = 64 << 20
"""Of jobs that wait or run, in all; the next one gets 429. One job alone is always taken."""
LENGTH = struct.Struct(">I")
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class TextWorkerPool:
    """The workers of one tokenizer. Use them on one event loop, and close them."""

    def __init__(self, tokenizer: Tokenizer, num_workers: int = NUM_WORKERS) -> None:
        self._tokenizer = tokenizer
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._turns = asyncio.Semaphore(num_workers)
        self._slow_turns = asyncio.Semaphore(num_workers - 1)  # one is left for what is known to be quick
        self._num_bytes = 0  # of the jobs
        self._closed = False
        self._paper = b""  # what a worker makes its tokenizer of

    async def start(self) -> None:
        """Start the first, so that the first request need not wait for it."""
        async with self._turns:
            self._idle.append(await self._started())

    async def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """The ids of each. Special tokens that are spelled in them are text."""
        size = sum(map(len, texts))
        packed: list[bytes] = await self._ask("encode", list(texts), add_special_tokens, size=size)
        return list(map(_unpack, packed))

    async def chat(self, messages: Sequence[dict[str, Any]], template: dict[str, Any]) -> tuple[str, list[int]]:
        """Renders a conversation: its text and token ids. Raises `TemplateError`, or `ApiError` 500 after a timeout."""
        size = sum(len(m["content"]) for m in messages)
        slow = "chat_template" in template
        try:
            text, packed = await self._ask("chat", messages, template, size=size, slow=slow)
        except OverflowError:
            text = "messages, tools or chat_template_kwargs have an integer of more than 64 bits; write a smaller one"
            raise bad_request("integer_out_of_range", text, "messages") from None
        return text, _unpack(packed)

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        found: str = await self._ask("decode", _pack(ids), skip_special_tokens, size=len(ids))
        return found

    async def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each token's text."""
        found: list[str] = await self._ask("pieces", _pack(ids), size=len(ids))
        return found

    async def word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """As `InputProcessor.encode_bad_words`."""
        found: list[list[int]] = await self._ask("word_ids", list(words), size=2 * sum(map(len, words)))
        return found

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._all:
            worker.end()
        self._all.clear()
        self._idle.clear()

    async def _ask(self, *question: Any, size: int, slow: bool = False) -> Any:
        """Who leaves early leaves the worker to finish: ending it would cost more than what it does. `slow`, as what is
        large is: it must not take the last worker."""
        body = _encode(question)
        if self._tasks and (len(self._tasks) >= MAX_JOBS or self._num_bytes + len(body) > MAX_JOB_BYTES):
            text = f"{len(self._tasks)} requests wait for a process to tokenise in; try again later"
            raise ApiError(429, "queue_full", text, retry_after_s=1)
        task = asyncio.ensure_future(self._answer(body, BASE_S + size / CHARS_PER_S, slow or size > CHARS_PER_S))
        self._tasks.add(task)
        self._num_bytes += len(body)
        task.add_done_callback(functools.partial(self._forget, len(body)))
        return await asyncio.shield(task)

    def _forget(self, num_bytes: int, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._num_bytes -= num_bytes
        if not task.cancelled():
            task.exception()  # its request may have gone

    async def _answer(self, body: bytes, limit_s: float, slow: bool) -> Any:
        async with contextlib.AsyncExitStack() as turns:
            if slow:
                await turns.enter_async_context(self._slow_turns)
            await turns.enter_async_context(self._turns)
            worker = self._idle.pop() if self._idle else None
            if worker is not None and not worker.is_alive:
                self._end(worker)
                worker = None
            if worker is None:
                worker = await self._started()
            try:
                async with asyncio.timeout(limit_s):
                    answer = _decode(await worker.ask(body))
            except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
                self._end(worker)
                logger.error("a text worker is ended: %s", "it hangs" if isinstance(error, TimeoutError) else "it died")
                text = f"a text worker died, or took longer than {limit_s:.0f} s; send less text"
                raise ApiError(500, "text_timeout", text) from None
            except BaseException:  # half an answer may be on its way
                self._end(worker)
                raise
            self._idle.append(worker)
        if len(answer) == 1:
            return answer[0]
        raise _error(*answer)

    async def _started(self) -> _Worker:
        if self._closed:
            raise ApiError(503, "shutting_down", "the server is shutting down", retry_after_s=5)
        if not self._paper:
            self._paper = await asyncio.to_thread(lambda: _encode(self._tokenizer.to_wire()))
        worker = await _Worker.start()
        self._all.add(worker)
        try:
            async with asyncio.timeout(START_S):
                await worker.ask(self._paper)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            self._end(worker)
            raise ApiError(503, "text_unavailable", "no process starts to tokenise in", retry_after_s=5) from None
        except BaseException:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: _Worker) -> None:
        self._all.discard(worker)
        worker.end()


class _Worker:
    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            options = ["-O"] if sys.flags.optimize else []
            process = subprocess.Popen(
                [sys.executable, *options, "-P", "-m", __spec__.name, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the server
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def ask(self, body: bytes) -> bytes:
        self._writer.write(LENGTH.pack(len(body)))
        self._writer.write(body)
        await self._writer.drain()
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return await self._reader.readexactly(length)

    def end(self) -> None:
        self._process.kill()
        self._writer.close()
        self._process.wait()


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


# -- the worker's side -------------------------------------------------------------------------------------------------


def answer_to(tokenizer: Tokenizer, what: str, given: list[Any]) -> Any:
    if what == "chat":
        messages, template = given
        prompt = InputProcessor(tokenizer).chat(messages, **template)
        return prompt["prompt"], _pack(prompt["prompt_token_ids"])
    if what == "encode":
        texts, add_special_tokens = given
        return list(map(_pack, tokenizer.encode_batch(texts, add_special_tokens, parse_special=False)))
    if what == "decode":
        packed, skip_special_tokens = given
        return tokenizer.decode(_unpack(packed), skip_special_tokens)
    if what == "pieces":
        return [tokenizer.decode([token], False) for token in _unpack(*given)]
    if what == "word_ids":
        return InputProcessor(tokenizer).encode_bad_words(*given)
    raise ValueError(what)


def serve(connection: socket.socket) -> None:
    stream = connection.makefile("rwb")

    def told() -> Any:
        head = stream.read(LENGTH.size)
        return _decode(stream.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None

    def tell(value: Any) -> None:
        body = _encode(value)
        stream.write(LENGTH.pack(len(body)) + body)
        stream.flush()

    if (paper := told()) is None:
        return
    tokenizer = Tokenizer.from_wire(paper)
    tell([None])
    while (question := told()) is not None:
        try:
            answer: list[Any] = [answer_to(tokenizer, question[0], question[1:])]
        except UsageError as error:
            answer = [type(error).__name__, str(error), error.param, error.code]
        except Exception as error:
            answer = ["bug", f"{type(error).__name__}: {error}"[:1000], None, ""]
        tell(answer)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
