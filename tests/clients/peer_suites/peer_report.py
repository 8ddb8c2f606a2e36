"""A pytest plugin that skips the cases that cannot pass, and writes each case's outcome to $PEER_REPORT as JSON."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import octavo_server
import pytest

REASONS: list[list[str]] = json.loads(os.environ["PEER_REASONS"])
"""(pattern, outcome, reason)"""
SKIPPED = ("missing", "not applicable")
ROOT = Path(os.environ["PEER_ROOT"])
MAX_MESSAGE_CHARS = 300


def reason_against(case: str) -> tuple[str, str]:
    """The outcome that is known before, and its reason; empty if there is none."""
    found = ((outcome, reason) for pattern, outcome, reason in REASONS if fnmatch.fnmatchcase(case, pattern))
    return next(found, ("", ""))


def write(case: str, outcome: str, message: str = "") -> None:
    message = " ".join(message.split())[:MAX_MESSAGE_CHARS]
    with open(os.environ["PEER_REPORT"], "a") as file:
        file.write(json.dumps({"case": case, "outcome": outcome, "message": message}) + "\n")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    name = str(collection_path.relative_to(ROOT))
    outcome, reason = reason_against(name)
    if outcome in SKIPPED:
        write(name, outcome, reason)
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        outcome, reason = reason_against(item.nodeid)
        if outcome in SKIPPED:
            item.add_marker(pytest.mark.skip(reason=reason), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    if report.outcome == "failed":
        message = str(report.longrepr).strip().splitlines()[-1]
        missing = "No module named" in message or "cannot import name" in message
        write(collector.nodeid, "not applicable" if missing else "failed", message)
        report.outcome = "skipped" if missing else "failed"
        report.longrepr = (collector.nodeid, 0, message)
    elif report.outcome == "skipped":
        write(collector.nodeid, "not applicable", report.longrepr[2].removeprefix("Skipped: "))
    return report


def pytest_runtest_logreport(report: Any) -> None:
    outcome, why = reason_against(report.nodeid)
    if report.outcome == "skipped":
        reason = getattr(report, "wasxfail", None)
        text = f"the suite expects a failure: {reason}" if reason is not None else report.longrepr[2]
        write(report.nodeid, outcome if outcome in SKIPPED else "not applicable", text.removeprefix("Skipped: "))
    elif report.outcome == "failed" and outcome == "differs":
        write(report.nodeid, outcome, why)
    elif report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        place = f"{crash.path.rsplit('/', 1)[-1]}:{crash.lineno} " if crash else ""
        write(report.nodeid, "failed", place + str(crash.message if crash else report.longrepr))
    elif report.when == "call":
        write(report.nodeid, "passed")


def pytest_sessionfinish() -> None:
    octavo_server.stop_all()
