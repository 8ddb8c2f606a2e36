"""`octavo models`, and loading of models by other commands."""

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
    """Names that were fetched: an empty cache, and a catalogue that records names without a download."""
    names: list[str] = []

    def fetch(name: str, progress: catalog.Progress) -> Path:
        progress("downloading", 0, 0)
        progress("unpacking", 1, 2)
        names.append(name)
        return tmp_path / "model.gguf"

    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(catalog, "fetch", fetch)
    return names


def test_table_lists_models_and_whether_they_are_cached(call: Call, fetched: list[str], tmp_path: Path) -> None:
    done = call("models")
    assert done.code == 0
    (line,) = [line for line in done.lines if line.startswith("smollm2-135m-instruct")]
    assert line.split()[1:4] == ["98", "MB", "no"]
    assert str(tmp_path / "models") in done.out
    assert "other names of smollm2-135m-instruct: smollm2, smollm2-135m\n" in done.out
    assert "sizes without weights, for doctor, simulate, plan and view: " in done.out and "llama-3.1-8b" in done.out
    assert call("doctor", "llama-3.1-8b").out.startswith("llama-3.1-8b: LlamaForCausalLM, 8.03 B parameters")


def test_fetch_prints_the_path_of_the_model(call: Call, fetched: list[str], tmp_path: Path) -> None:
    done = call("models", "fetch", "smollm2")
    assert (done.code, done.out) == (0, f"{tmp_path / 'model.gguf'}\n")
    assert fetched == ["smollm2"]


def test_fetch_of_an_unknown_name(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    done = call("models", "fetch", "smolm")
    assert done.code == 1
    assert "no model 'smolm'; it has smollm2-135m-instruct" in done.err
    assert done.err.count("\n") == 1


def test_named_model_is_fetched_before_loading(fake: type[FakeLLM], fetched: list[str]) -> None:
    assert load("smollm2", {"block_size": 8}).engine == {"block_size": 8}  # type: ignore[attr-defined]
    assert fetched == ["smollm2"]


def test_invalid_option_is_refused_before_a_download(fake: type[FakeLLM], fetched: list[str]) -> None:
    with pytest.raises(ParameterError, match="block_size is 3"):
        load("smollm2", {"block_size": 3})
    assert fetched == []


def test_model_directory_takes_precedence_over_a_name(
    fake: type[FakeLLM], fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    load("smollm2", {})
    load("some/dir", {})
    assert fetched == []
    (tmp_path / "smollm2" / "config.json").unlink()  # a directory without a model does not take precedence
    load("smollm2", {})
    assert fetched == ["smollm2"]
