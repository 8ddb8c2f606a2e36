"""Runs server tests on uvloop, the event loop of `octavo serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")
SETTLE_S = 0.01
"""Time for connections and child processes to close: uvloop cannot close while one is open."""


def run(main: Coroutine[Any, Any, T], limit_s: float | None = 200) -> T:
    """Runs a coroutine and returns its result. Fails after `limit_s`."""

    async def in_time() -> T:
        try:
            return await asyncio.wait_for(main, limit_s)
        finally:
            await asyncio.sleep(SETTLE_S)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(in_time())
