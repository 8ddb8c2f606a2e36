"""The event loop of every test of the server: uvloop, which is the one that `octavo serve` runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], limit_s: float | None = 200) -> T:
    """The coroutine's result. One that takes longer than `limit_s` fails."""

    async def in_time() -> T:
        return await asyncio.wait_for(main, limit_s)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(in_time())
