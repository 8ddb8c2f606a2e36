"""`octavo bench`: what reaches the workloads, which have tests of their own."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.bench import attention, core
from tests.cli.conftest import Call


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(attention, "main", lambda *args, **options: calls.append(("attention", args, options)))
    monkeypatch.setattr(core, "main", lambda *args, **options: calls.append(("core", args, options)))
    return calls


def test_core(call: Call, ran: list[Any]) -> None:
    call("bench", "core")
    call("bench", "core", "--json")
    assert ran == [("core", (), {"as_json": False}), ("core", (), {"as_json": True})]


def test_attention_says_only_what_was_given(call: Call, ran: list[Any]) -> None:
    call("bench", "attention")
    call("bench", "attention", "--variant", "ragged", "--lengths", "9,5", "--block_size", "8", "--json")
    assert ran == [
        ("attention", ("all",), {"json": False}),
        ("attention", ("ragged",), {"json": True, "lengths": [9, 5], "block_size": 8}),
    ]


def test_attention_really_runs(call: Call) -> None:
    done = call("bench", "attention", "--variant", "ragged", "--lengths", "5,2", "--max-tokens", "2", "--json")
    assert done.code == 0, done.err
    assert '"variant": "ragged"' in done.lines[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--variant", "ragd"), "did you mean 'ragged'?"),
        (("--lengths", "3,x"), "lengths are '3,x'"),
        (("--lengths", "3,0"), "lengths are [3, 0]"),
        (("--max-tokens", "0"), "max_tokens is 0"),
    ],
)
def test_attention_refuses_what_makes_no_sense(call: Call, args: tuple[str, ...], message: str) -> None:
    done = call("bench", "attention", *args)
    assert done.code == 2
    assert message in done.err


def test_without_a_workload_it_lists_them(call: Call) -> None:
    done = call("bench")
    assert done.code == 0
    assert "attention" in done.out
