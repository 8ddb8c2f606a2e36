"""Large bodies are read in a process of their own: parsing one would stop the event loop for as long as it takes.

    this process                               the worker (`python -m octavo.serve.http.json_worker`)
    length, body ----------- stdin ----------> json_body.parse
    msgpack <--------------- stdout ---------- length, [the object] or [code, message, param]

The worker is started with the first large body, started again if it dies or hangs, and ends when its stdin does. What
it sends back is data, in a format that reads many times faster than JSON is checked.
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
"""A body that takes longer is refused, and the worker with it."""
LENGTH = struct.Struct(">I")
LONG_INTEGER = 1
"""The extension of msgpack that stands for an integer of more than 64 bits, in decimal."""


class JsonWorker:
    """Reads bodies, one large one at a time. Use it on one event loop, and close it."""

    def __init__(self) -> None:
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._turn = asyncio.Lock()

    async def parse(self, body: bytes) -> dict[str, Any]:
        """As `json_parser.parse`. Raises `ApiError`."""
        if len(body) <= LARGE_BYTES:
            return json_parser.parse(body)
        async with self._turn:
            try:
                async with asyncio.timeout(MAX_PARSE_S):
                    answer = await self._ask_twice(body)
            except TimeoutError:
                await self.close()
                raise bad_request(
                    "invalid_json", f"the body takes more than {MAX_PARSE_S:g} s to read; send a simpler one"
                ) from None
            except OSError as error:
                logger.error("no process to read a large body in: %s", error)
                await self.close()
                text = "the server has no process to read a large body in; try again later"
                raise ApiError(503, "body_reader_unavailable", text, retry_after_s=1) from None
            except BaseException:  # whoever asked has gone, and half an answer may be on its way
                await self.close()
                raise
        parts: list[Any] = await asyncio.to_thread(msgspec.msgpack.decode, answer, ext_hook=_integer)
        if len(parts) != 1:
            raise bad_request(*parts)
        value: dict[str, Any] = parts[0]
        return value

    async def _ask_twice(self, body: bytes) -> bytes:
        """A worker that has died, for whatever reason, is noticed only when it is asked."""
        with contextlib.suppress(ConnectionError):
            return await self._ask(body)
        await self.close()
        return await self._ask(body)

    async def _ask(self, body: bytes) -> bytes:
        """Raises `ConnectionError` if the worker dies meanwhile."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(_start())
        process = await asyncio.shield(self._starting)  # cut off in its midst, a start would leave its pipes open
        there, back = process.stdin, process.stdout
        assert there is not None and back is not None
        if there.is_closing():
            raise ConnectionError("the worker has closed its input")
        there.write(LENGTH.pack(len(body)))
        there.write(body)
        try:
            await there.drain()
            (length,) = LENGTH.unpack(await back.readexactly(LENGTH.size))
            return await back.readexactly(length)
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
            await process.stdout.read()  # half an answer may be there, and keeps the pipe open
            await process.wait()


async def _start() -> asyncio.subprocess.Process:
    command = [sys.executable, *(["-O"] if sys.flags.optimize else []), "-P", "-m", __name__]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the server; uvloop knows no process_group
    )


def parse_to_msgpack(body: bytes) -> bytes:
    try:
        return encoded([json_parser.parse(body)])
    except ApiError as problem:
        return msgspec.msgpack.encode([problem.code, problem.message, problem.param])


def encoded(value: Any) -> bytes:
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


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        answer = parse_to_msgpack(requests.read(LENGTH.unpack(head)[0]))
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
