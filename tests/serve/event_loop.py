"""The event loop of every test of the server: uvloop, which is the one that `octavo serve` runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")
SETTLE_S = 0.01
"""For the ends of connections and of children to arrive: uvloop does not close above an open one."""


def run(main: Coroutine[Any, Any, T], limit_s: float | None = 200) -> T:
    """The coroutine's result. One that takes longer than `limit_s` fails."""

    async def in_time() -> T:
        try:
            return await asyncio.wait_for(main, limit_s)
        finally:
            await asyncio.sleep(SETTLE_S)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(in_time())
