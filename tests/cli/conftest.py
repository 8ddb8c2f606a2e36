"""Fixtures: run a command line in this process, with a fake LLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
