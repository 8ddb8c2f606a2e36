"""Server tests run on the event loop of `octavo serve`."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from tests.serve.event_loop import run

TESTS = Path(__file__).parents[1]
OTHER_LOOPS = re.compile(r"asyncio\.(run|Runner|new_event_loop)\(")


def test_tests_run_on_uvloop() -> None:
    async def kind() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert run(kind()) == "uvloop"


def test_no_server_test_creates_another_loop() -> None:
    files = [*TESTS.glob("serve/**/*.py"), TESTS / "proof" / "reliability.py", TESTS / "view" / "test_page_browser.py"]
    ours = {Path(__file__), TESTS / "serve" / "event_loop.py"}
    assert [str(path) for path in files if path not in ours and OTHER_LOOPS.search(path.read_text())] == []
