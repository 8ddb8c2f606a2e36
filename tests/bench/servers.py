"""Scripted servers over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[str]:
    """Yield the address. Each connection runs the script and is then closed."""

    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await script(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        tasks.add(asyncio.ensure_future(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:  # that of a task that was cancelled before it began, too
            writer.close()


async def read_request(reader: asyncio.StreamReader) -> tuple[str, Any]:
    """(method and path, body)."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *headers = head.split("\r\n")
    length = next((int(h.split(":")[1]) for h in headers if h.lower().startswith("content-length:")), 0)
    body = await reader.readexactly(length)
    return first.rsplit(" ", 1)[0], json.loads(body) if body else None


def whole(body: Any, status: str = "200 OK") -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text


def chunked(*pieces: bytes, end: bool = True) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return head + body + (b"0\r\n\r\n" if end else b"")


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def completion(*texts: str, num_prompt: int = 5) -> bytes:
    """A streamed answer with its usage."""
    usage = {"prompt_tokens": num_prompt, "completion_tokens": len(texts)}
    chunks = [event({"choices": [{"text": text, "index": 0, "finish_reason": None}]}) for text in texts]
    return chunked(*chunks, event({"choices": [], "usage": usage}), event(b"[DONE]"))


class Canned:
    """Enough of OpenAI's API for a load: a token is a word. `answer` gives what a completion gets; by default as many
    words as were asked for."""

    def __init__(self, answer: Callable[[dict[str, Any]], Awaitable[bytes]] | None = None) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            path, body = await read_request(reader)
            writer.write(await self.reply(path, body))
            await writer.drain()

    async def reply(self, path: str, body: Any) -> bytes:
        if path == "GET /v1/models":
            return whole({"data": [{"id": "canned"}]})
        if path == "POST /tokenize":
            return whole({"count": len(body["prompt"].split())})
        if body["prompt"] == "Hello":
            return completion("x")
        self.bodies.append(body)
        return await self.answer(body) if self.answer else completion(*[" x"] * body["max_tokens"])
