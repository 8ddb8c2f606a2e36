"""Fixtures: run a command line in this process, with a fake LLM."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import octavo
from octavo.cli.main import run
from octavo.frontend import preflight
from octavo.params.sampling_params import SamplingParams
from tests.cli.fake_llm import FakeLLM


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


Call = Callable[..., Done]
OCTAVO = [sys.executable, "-m", "octavo.cli.main"]
BUFFERED = os.environ | {"PYTHONUNBUFFERED": ""}
"""The environment with buffered output, as users have it."""


@contextlib.contextmanager
def started(*args: str, **settings: Any) -> Iterator[subprocess.Popen[Any]]:
    """Runs a command line in its own process, which is killed at the end."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([*OCTAVO, *args], env=BUFFERED, **(pipes | settings)) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """`call("generate", "-p", "x")` runs a command line and returns exit code, stdout and stderr."""
    monkeypatch.delenv("OCTAVO_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*args: str) -> Done:
        code = run(args)
        out, err = capfd.readouterr()
        return Done(code, out, err)

    return call


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """Replaces `octavo.LLM` by `FakeLLM`; its instances are in `fake.made`."""
    monkeypatch.setattr(octavo, "LLM", FakeLLM, raising=False)
    monkeypatch.setattr(octavo, "SamplingParams", SamplingParams, raising=False)
    monkeypatch.setattr(preflight, "check_model", lambda args: None)
    monkeypatch.setattr(FakeLLM, "made", [])
    return FakeLLM
