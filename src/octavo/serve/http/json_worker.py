"""Parses large request bodies in a separate process: parsing would block the event loop.

    this process                               the worker (`python -m octavo.serve.http.json_worker`)
    length, body ----------- stdin ----------> json_parser.parse
    msgpack <--------------- stdout ---------- length, [the object] or [code, message, param]

The worker starts with the first large body, restarts if it dies or hangs, and exits when its stdin closes. msgpack is
decoded many times faster than JSON is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import sys
from typing import Any, BinaryIO

import msgspec

from octavo.serve.http import json_parser
from octavo.serve.openai.errors import ApiError, bad_request

logger = logging.getLogger("octavo.serve")

LARGE_BYTES = 64 * 1024
MAX_PARSE_S = 10.0
"""A body that takes longer to parse is refused, and the worker is killed."""
LENGTH = struct.Struct(">I")
LONG_INTEGER = 1
"""The msgpack extension code of an integer of more than 64 bits, in decimal digits."""


class JsonWorker:
    """Parses bodies; large ones in the worker, one at a time. Use it on one event loop, and close it."""

    def __init__(self) -> None:
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._lock = asyncio.Lock()

    async def parse(self, body: bytes) -> dict[str, Any]:
        """The body's JSON object, as `json_parser.parse`. Raises `ApiError`."""
        if len(body) <= LARGE_BYTES:
            return json_parser.parse(body)
        async with self._lock:
            try:
                async with asyncio.timeout(MAX_PARSE_S):
                    reply = await self._request_with_retry(body)
            except TimeoutError:
                await self.close()
                raise bad_request(
                    "invalid_json", f"parsing the body takes more than {MAX_PARSE_S:g} s; send a simpler one"
                ) from None
            except OSError as error:
                logger.error("cannot start the process that parses large bodies: %s", error)
                await self.close()
                text = "the server cannot start a process to parse a large body; try again later"
                raise ApiError(503, "body_reader_unavailable", text, retry_after_s=1) from None
            except BaseException:  # the request was cancelled; half a reply may be in the pipe
                await self.close()
                raise
        parts: list[Any] = await asyncio.to_thread(msgspec.msgpack.decode, reply, ext_hook=_integer)
        if len(parts) != 1:
            raise bad_request(*parts)
        value: dict[str, Any] = parts[0]
        return value

    async def _request_with_retry(self, body: bytes) -> bytes:
        """Retries once: a worker that has died earlier is noticed only when it is used."""
        with contextlib.suppress(ConnectionError):
            return await self._request(body)
        await self.close()
        return await self._request(body)

    async def _request(self, body: bytes) -> bytes:
        """Raises `ConnectionError` if the worker dies."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(_start())
        process = await asyncio.shield(self._starting)  # a cancelled start would leave its pipes open
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None
        if stdin.is_closing():
            raise ConnectionError("the worker has closed its input")
        stdin.write(LENGTH.pack(len(body)))
        stdin.write(body)
        try:
            await stdin.drain()
            (length,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
            return await stdout.readexactly(length)
        except asyncio.IncompleteReadError:
            raise ConnectionError("the worker has died") from None

    async def close(self) -> None:
        starting, self._starting = self._starting, None
        if starting is None:
            return
        with contextlib.suppress(OSError):  # it never started
            process = await asyncio.shield(starting)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            await process.stdout.read()  # unread data would keep the pipe open
            await process.wait()


async def _start() -> asyncio.subprocess.Process:
    command = [sys.executable, *(["-O"] if sys.flags.optimize else []), "-P", "-m", __name__]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the server; uvloop does not support process_group
    )


def parse_to_msgpack(body: bytes) -> bytes:
    try:
        return encode_msgpack([json_parser.parse(body)])
    except ApiError as api_error:
        return msgspec.msgpack.encode([api_error.code, api_error.message, api_error.param])


def encode_msgpack(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:  # msgpack's integers have 64 bits
        return msgspec.msgpack.encode(_with_long_integers(value))


def _with_long_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_long_integers(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_long_integers(part) for part in value]
    if isinstance(value, int) and value.bit_length() >= 64:
        return msgspec.msgpack.Ext(LONG_INTEGER, str(value).encode())
    return value


def _integer(code: int, digits: memoryview) -> int:
    return int(bytes(digits))


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        reply = parse_to_msgpack(requests.read(LENGTH.unpack(head)[0]))
        replies.write(LENGTH.pack(len(reply)) + reply)
        replies.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
