"""A minimal HTTP client, cheap enough for ten thousand instances."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KEY = "key"


@dataclass(slots=True)
class RawResponse:
    """A response. `head_at`: arrival of the status on the monotonic clock; for a stream, with its first token."""

    status: int
    headers: dict[str, str]
    body: bytes
    head_at: float

    @property
    def events(self) -> list[Any]:
        """The events of a stream; those that are not JSON as text."""
        frames = [f.removeprefix("data: ") for f in self.body.decode().split("\n\n") if f]
        return [json.loads(f) if f.startswith("{") else f for f in frames]

    @property
    def is_whole(self) -> bool:
        """Whether a stream ended normally."""
        return self.body.endswith(b"data: [DONE]\n\n") and self.code is None

    @property
    def code(self) -> str | None:
        """The code of the error that it is or ends with."""
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            errors = [e["error"]["code"] for e in self.events if isinstance(e, dict) and "error" in e]
            return errors[0] if errors else None
        if self.status < 400 or not self.body:
            return None
        return json.loads(self.body)["error"]["code"] if self.body.startswith(b"{") else self.body.decode()

    @property
    def token_ids(self) -> list[list[int]]:
        """Token ids of each choice."""
        if not self.headers.get("content-type", "").startswith("text/event-stream"):
            return [choice["token_ids"] for choice in json.loads(self.body)["choices"]]
        so_far: dict[int, list[int]] = {}
        for event in self.events:
            for choice in event.get("choices", ()) if isinstance(event, dict) else ():
                so_far.setdefault(choice["index"], []).extend(choice["token_ids"])
        return [so_far[index] for index in sorted(so_far)]


class RawClient:
    """One connection with sequential requests. A broken connection raises `OSError`."""

    def __init__(self, port: int, *, key: str = KEY, address: str | None = None) -> None:
        """`address`: of this end of the connection; None: any, which is faster to find."""
        self._port = port
        self._key = key
        self._local = None if address is None else (address, 0)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.idle_since = time.monotonic()

    async def ask(
        self,
        body: Any = None,
        path: str = "/v1/completions",
        *,
        on_head: Callable[[], object] = lambda: None,
        on_data: Callable[[bytes], object] = lambda data: None,
        raw: bytes | None = None,
    ) -> RawResponse:
        """POST `body`, or `raw`; GET without either. `on_head` is called on arrival of the status, `on_data` with each
        part of a stream."""
        content = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None and raw is None else "POST"
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._key}\r\n"
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        try:
            if self._writer is None:
                self._reader, self._writer = await asyncio.open_connection(
                    "127.0.0.1", self._port, local_addr=self._local, limit=1 << 20
                )
            assert self._reader is not None
            self._writer.write(head.encode() + b"\r\n" + content)
            await self._writer.drain()
            return await self._answer(self._reader, on_head, on_data)
        except (asyncio.IncompleteReadError, OSError) as error:
            self.close()
            raise ConnectionError(f"the server hung up: {error}") from None
        except BaseException:
            self.close()
            raise

    async def _answer(
        self, reader: asyncio.StreamReader, on_head: Callable[[], object], on_data: Callable[[bytes], object]
    ) -> RawResponse:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        head_at = time.monotonic()
        on_head()
        pairs = [line.partition(":") for line in lines[1:] if line]
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        if "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:
            parts = []
            while size := int(await reader.readline() or b"-1", 16):
                if size < 0:
                    raise ConnectionError("it ended in the midst of an answer")
                parts.append(await reader.readexactly(size))
                on_data(parts[-1])
                await reader.readexactly(2)
            await reader.readexactly(2)
            body = b"".join(parts)
        self.idle_since = time.monotonic()
        if headers.get("connection") == "close":
            self.close()
        return RawResponse(int(lines[0].split()[1]), headers, body, head_at)

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
        self._reader = self._writer = None


async def request_once(
    port: int, body: Any = None, path: str = "/v1/completions", *, raw: bytes | None = None
) -> RawResponse:
    client = RawClient(port)
    try:
        return await client.ask(body, path, raw=raw)
    finally:
        client.close()
