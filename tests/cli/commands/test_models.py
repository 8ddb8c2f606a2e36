"""`octavo models`, and how a command gets its LLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.checkpoint import catalog
from octavo.cli.commands.models import load
from octavo.errors import ParameterError
from tests.cli.conftest import Call
from tests.cli.fake_llm import FakeLLM


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """An empty cache, and a catalogue that notes what is fetched and fetches nothing."""
    names: list[str] = []

    def fetch(name: str, progress: catalog.Progress) -> Path:
        progress("downloading", 0, 0)
        progress("unpacking", 1, 2)
        names.append(name)
        return tmp_path / "model.gguf"

    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(catalog, "fetch", fetch)
    return names


def test_the_table_names_every_model_and_whether_it_is_here(call: Call, fetched: list[str], tmp_path: Path) -> None:
    done = call("models")
    assert done.code == 0
    (line,) = [line for line in done.lines if line.startswith("smollm2-135m-instruct")]
    assert line.split()[1:4] == ["98", "MB", "no"]
    assert str(tmp_path / "models") in done.out


def test_fetch_prints_where_the_model_is(call: Call, fetched: list[str], tmp_path: Path) -> None:
    done = call("models", "fetch", "smollm2")
    assert (done.code, done.out) == (0, f"{tmp_path / 'model.gguf'}\n")
    assert fetched == ["smollm2"]


def test_fetch_of_a_name_that_is_not_there(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    done = call("models", "fetch", "smolm")
    assert done.code == 1
    assert "no model 'smolm'; it has smollm2-135m-instruct" in done.err
    assert done.err.count("\n") == 1


def test_a_named_model_is_fetched_first(fake: type[FakeLLM], fetched: list[str]) -> None:
    assert load("smollm2", {"block_size": 8}).engine == {"block_size": 8}  # type: ignore[attr-defined]
    assert fetched == ["smollm2"]


def test_a_mistake_in_an_option_is_found_before_anything_is_fetched(fake: type[FakeLLM], fetched: list[str]) -> None:
    with pytest.raises(ParameterError, match="block_size is 3"):
        load("smollm2", {"block_size": 3})
    assert fetched == []


def test_a_path_is_no_name(
    fake: type[FakeLLM], fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    load("smollm2", {})
    load("some/dir", {})
    assert fetched == []
    (tmp_path / "smollm2" / "config.json").unlink()  # a folder without a model hides no name
    load("smollm2", {})
    assert fetched == ["smollm2"]
