"""Large bodies are read in a process of their own: parsing one would stop the event loop for as long as it takes.

    this process                               the worker (`python -m octavo.serve.body_worker`)
    length, body ----------- stdin ----------> json_body.parse
    msgpack <--------------- stdout ---------- length, [the object] or [code, message, param]

The worker is started with the first large body, started again if it dies or hangs, and ends when its stdin does. What
it sends back is data, in a format that reads many times faster than JSON is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
from typing import Any, BinaryIO

import msgspec

from octavo.serve import json_body
from octavo.serve.problems import Problem, bad

LARGE_BYTES = 256 * 1024
MOST_S = 10.0
"""A body that takes longer is refused, and the worker with it."""
LENGTH = struct.Struct(">I")


class BodyWorker:
    """Reads bodies, one large one at a time. Use it on one event loop, and close it."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def parse(self, body: bytes) -> dict[str, Any]:
        """As `json_body.parse`. Raises `Problem`."""
        if len(body) <= LARGE_BYTES:
            return json_body.parse(body)
        async with self._turn:
            try:
                async with asyncio.timeout(MOST_S):
                    answer = await self._ask(body)
            except (TimeoutError, OSError, asyncio.IncompleteReadError):
                await self.close()
                raise bad("invalid_json", "the body could not be read in time; send a simpler one") from None
            except BaseException:  # whoever asked has gone, and half an answer may be on its way
                await self.close()
                raise
        parts: list[Any] = await asyncio.to_thread(msgspec.msgpack.decode, answer)
        if len(parts) != 1:
            raise bad(*parts)
        value: dict[str, Any] = parts[0]
        return value

    async def _ask(self, body: bytes) -> bytes:
        if self._process is None or self._process.returncode is not None:
            command = [sys.executable, *(["-O"] if sys.flags.optimize else []), "-P", "-m", __name__]
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, process_group=0
            )
        there, back = self._process.stdin, self._process.stdout
        assert there is not None and back is not None
        there.write(LENGTH.pack(len(body)))
        there.write(body)
        await there.drain()
        (length,) = LENGTH.unpack(await back.readexactly(LENGTH.size))
        return await back.readexactly(length)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            if process.stdin is not None:
                process.stdin.close()


def answer_to(body: bytes) -> bytes:
    try:
        return msgspec.msgpack.encode([json_body.parse(body)])
    except Problem as problem:
        return msgspec.msgpack.encode([problem.code, problem.message, problem.param])
    except OverflowError:
        return msgspec.msgpack.encode(["invalid_json", "the body has an integer of more than 64 bits", None])


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        answer = answer_to(requests.read(LENGTH.unpack(head)[0]))
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
