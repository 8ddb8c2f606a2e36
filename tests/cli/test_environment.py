"""Misspelt environment variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import octavo
from octavo.cli.environment import KNOWN, check_environment
from octavo.errors import UsageError
from tests.cli.conftest import Call

ROOT = Path(octavo.__file__).parent


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OCTAVO_API_KEYS", "OCTAVO_API_KEY"),
        ("OCTAVO_APIKEY", "OCTAVO_API_KEY"),
        ("OCTAVO_KEY", "OCTAVO_API_KEY"),
        ("OCTAVO_TOKEN", "OCTAVO_API_KEY"),
        ("OCTAVO_SERVER_API_KEY", "OCTAVO_API_KEY"),
        ("octavo_api_key", "OCTAVO_API_KEY"),
        ("OKTAVO_API_KEY", "OCTAVO_API_KEY"),
        ("VLLM_API_KYE", "VLLM_API_KEY"),
        ("VLLM_API_KEYS", "VLLM_API_KEY"),
        ("VLLM_API_TOKEN", "VLLM_API_KEY"),
        ("OCTAVO_CAHCE", "OCTAVO_CACHE"),
    ],
)
def test_server_refuses_a_misspelt_variable(monkeypatch: pytest.MonkeyPatch, call: Call, name: str, meant: str) -> None:
    monkeypatch.setenv(name, "secret-value")
    done = call("serve", "/nonexistent")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert name in done.err and f"did you mean {meant}?" in done.err
    assert "secret-value" not in done.err


def test_server_refuses_an_empty_key(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "")
    done = call("serve", "/nonexistent")
    assert (done.code, done.err) == (2, "error: OCTAVO_API_KEY is set, but empty; give a key, or unset it\n")


def test_other_commands_warn_of_a_misspelt_variable(
    monkeypatch: pytest.MonkeyPatch, call: Call, tmp_path: Path
) -> None:
    (tmp_path / "script").write_text("stats\n")
    monkeypatch.setenv("OCTAVO_API_KEYS", "x")
    done = call("blocks", "--script", str(tmp_path / "script"))
    assert done.code == 0
    assert done.err.startswith("warning: OCTAVO_API_KEYS is set") and done.err.count("\n") == 1


def test_help_says_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setenv("OCTAVO_API_KEYS", "x")
    assert call("serve", "--help").err == ""


@pytest.mark.parametrize(
    "name",
    [
        *KNOWN,
        "VLLM_LOGGING_LEVEL",
        "VLLM_CACHE_ROOT",
        "OPENAI_API_KEY",
        "OCTAVO_PORT",
        "OCTAVO_SERVICE_HOST",
        "OCTAVO_SERVICE_PORT_HTTP",
        "OCTAVO_PORT_8000_TCP_ADDR",
        "OCTAVO_API_SERVICE_HOST",
        "OCTAVO_TEST_SERVER",
    ],
)
def test_variables_of_others_are_let_alone(name: str) -> None:
    assert check_environment({name: "x"}, for_server=True) == []


def test_unknown_variable_is_a_warning_to_a_server() -> None:
    (warning,) = check_environment({"OCTAVO_FLAVOUR": "x"}, for_server=True)
    assert warning.startswith("OCTAVO_FLAVOUR is set, but Octavo reads no such variable")


def test_a_long_name_makes_no_long_message() -> None:
    with pytest.raises(UsageError) as caught:
        check_environment({"OCTAVO_" + "X_" * 50_000 + "KEY": "x"}, for_server=True)
    assert len(str(caught.value)) < 400


def test_all_variables_that_the_package_reads_are_known() -> None:
    read = {
        name for file in ROOT.rglob("*.py") for name in re.findall(r'"((?:OCTAVO|VLLM)_[A-Z_]+)"', file.read_text())
    }
    assert {name for name in read if name in KNOWN} == set(KNOWN)
    assert read <= {*KNOWN, "VLLM_API_KEY"}
