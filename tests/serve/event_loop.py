"""Runs server tests on uvloop, the event loop of `octavo serve`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
import uvloop

T = TypeVar("T")
SETTLE_S = 0.01
"""Time for connections and child processes to close: uvloop cannot close while one is open."""


def run(
    main: Coroutine[Any, Any, T],
    limit_s: float | None = 200,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop,
) -> T:
    """Runs a coroutine and returns its result. Fails after `limit_s`. `loop_factory` None: asyncio's own loop."""

    async def in_time() -> T:
        try:
            return await asyncio.wait_for(main, limit_s)
        finally:
            await asyncio.sleep(SETTLE_S)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(in_time())


def run_async_test(item: pytest.Function, run: Callable[[Coroutine[Any, Any, None]], None] = run) -> bool | None:
    """Runs `async def test_...`: the body of a conftest.py's `pytest_pyfunc_call`."""
    if not inspect.iscoroutinefunction(item.obj):
        return None
    run(item.obj(**{name: item.funcargs[name] for name in inspect.signature(item.obj).parameters}))
    return True
