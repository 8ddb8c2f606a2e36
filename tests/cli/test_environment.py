"""Unknown and misspelt environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli.environment import KNOWN_VARIABLES, check_environment
from octavo.errors import UsageError
from tests.cli.conftest import Call


@pytest.mark.parametrize(
    ("name", "suggestion"),
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
def test_server_refuses_a_misspelt_variable(
    monkeypatch: pytest.MonkeyPatch, call: Call, name: str, suggestion: str
) -> None:
    monkeypatch.setenv(name, "secret-value")
    done = call("serve", "/nonexistent")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert name in done.err and f"did you mean {suggestion}?" in done.err
    assert "secret-value" not in done.err


def test_server_refuses_an_empty_key(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "")
    done = call("serve", "/nonexistent")
    assert (done.code, done.err) == (2, "error: OCTAVO_API_KEY is set, but empty; give a key, or unset it\n")


def test_other_commands_warn_about_a_misspelt_variable(
    monkeypatch: pytest.MonkeyPatch, call: Call, tmp_path: Path
) -> None:
    (tmp_path / "script").write_text("stats\n")
    monkeypatch.setenv("OCTAVO_API_KEYS", "x")
    done = call("blocks", "--script", str(tmp_path / "script"))
    assert done.code == 0
    assert done.err.startswith("warning: OCTAVO_API_KEYS is set") and done.err.count("\n") == 1


def test_help_does_not_check_the_environment(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setenv("OCTAVO_API_KEYS", "x")
    assert call("serve", "--help").err == ""


@pytest.mark.parametrize(
    "name",
    [
        *KNOWN_VARIABLES,
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
def test_known_and_foreign_variables_are_accepted(name: str) -> None:
    assert check_environment({name: "x"}, for_server=True) == []


def test_server_warns_about_an_unknown_variable() -> None:
    (warning,) = check_environment({"OCTAVO_FLAVOUR": "x"}, for_server=True)
    assert warning.startswith("OCTAVO_FLAVOUR is set, but Octavo reads no such variable")


def test_message_for_a_long_name_is_short() -> None:
    with pytest.raises(UsageError) as caught:
        check_environment({"OCTAVO_" + "X_" * 50_000 + "KEY": "x"}, for_server=True)
    assert len(str(caught.value)) < 400
