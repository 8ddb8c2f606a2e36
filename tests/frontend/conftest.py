from __future__ import annotations

from functools import partial

import pytest

from tests.engine.models import make_talking_checkpoint
from tests.serve.event_loop import run as run_on
from tests.serve.event_loop import run_async_test

run = partial(run_on, loop_factory=None)
"""Runs a coroutine on the loop of `asyncio.run`, as users of the library do; servers have another loop."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    return run_async_test(pyfuncitem, run)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_talking_checkpoint(tmp_path_factory.mktemp("talking")))
