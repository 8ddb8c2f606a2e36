"""Resolving a model's name or path to a checkpoint, and the errors on the way."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors
import pytest

from octavo.checkpoint.resolve import MAX_PROBLEMS, Checkpoint, catalog, open_checkpoint
from octavo.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError


@pytest.fixture(autouse=True)
def _no_network(tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network in tests")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


def assert_rejected(model, error, *words, **kwargs):
    """Asserts an error of one line that contains `words` -> the message."""
    with pytest.raises(error) as caught:
        open_checkpoint(model, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def test_directory_is_opened(model_dir):
    checkpoint = open_checkpoint(model_dir)
    assert checkpoint.format == "safetensors"
    assert checkpoint.config["vocab_size"] == 362
    assert checkpoint.generation_config == {"eos_token_id": [2, 0]}
    assert checkpoint.shards == (model_dir / "model.safetensors",)
    assert open_checkpoint(str(model_dir)) == checkpoint
    with pytest.raises(CheckpointError, match="not a GGUF"):
        _ = checkpoint.gguf


def test_gguf_file_is_opened(write_gguf):
    checkpoint = open_checkpoint(write_gguf())
    assert checkpoint.format == "gguf"
    assert checkpoint.gguf.value("llama.embedding_length") == 16
    assert checkpoint.gguf is checkpoint.gguf


def test_directory_without_a_model_does_not_shadow_a_catalogue_name(write_gguf, monkeypatch, tmp_path):
    path = write_gguf()
    monkeypatch.setattr(catalog, "fetch", lambda name: path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert open_checkpoint("smollm2").path == path
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError):  # a model's directory, if a bad one
        open_checkpoint("smollm2")


def test_catalogue_name_is_downloaded(write_gguf, monkeypatch):
    path, asked = write_gguf(), []
    monkeypatch.setattr(catalog, "fetch", lambda name: asked.append(name) or path)
    assert open_checkpoint("SmolLM2-135M-Instruct").path == path
    assert asked == ["SmolLM2-135M-Instruct"]
    assert_rejected("smollm2", ModelNotFoundError, "octavo models fetch", download=False)


def test_directory_precedes_a_catalogue_name(model_dir, monkeypatch):
    monkeypatch.chdir(model_dir.parent)
    model_dir.rename("smollm2")
    assert open_checkpoint("smollm2").format == "safetensors"


def test_hub_repository_is_downloaded(model_dir, monkeypatch):
    calls = []

    def snapshot(name, *, revision, allow_patterns, ignore_patterns, local_files_only):
        calls.append((name, revision, local_files_only))
        assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in allow_patterns)
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not here")
        return str(model_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert open_checkpoint("org/name", revision="v1").path == model_dir
    assert calls == [("org/name", "v1", True), ("org/name", "v1", False)]
    assert_rejected("org/name", ModelNotFoundError, "run `hf download org/name`", download=False)


def test_cached_hub_repository_needs_no_network(model_dir, monkeypatch):
    def snapshot(name, *, local_files_only, **_):
        assert local_files_only
        return str(model_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert open_checkpoint("org/name").path == model_dir


def test_interrupted_download_is_resumed(model_dir, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.mkdir()
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, *, local_files_only, **_: str(broken if local_files_only else model_dir),
    )
    assert open_checkpoint("org/name").path == model_dir


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (huggingface_hub.errors.LocalEntryNotFoundError("x"), "cannot be reached"),
        (huggingface_hub.errors.OfflineModeIsEnabled("x"), "HF_HUB_OFFLINE"),
        (huggingface_hub.errors.HFValidationError("x"), "not a legal"),
        (OSError(errno.ENOSPC, "x"), "HF_HOME"),
        (RuntimeError("two\nlines"), "RuntimeError; check the network"),
    ],
)
def test_hub_errors_have_a_reason(monkeypatch, error, words):
    def snapshot(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert_rejected("org/name", ModelNotFoundError, "org/name", words)


def test_unusable_hub_repository_is_reported(model_dir, monkeypatch):
    (model_dir / "config.json").write_text("{")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(model_dir))
    assert_rejected("org/name", CheckpointError, "config.json")
    assert_rejected("org/name", CheckpointError, "config.json", download=False)


def test_unknown_name_is_reported(tmp_path):
    assert_rejected("org/name", ModelNotFoundError, "hub cannot be reached")
    assert_rejected("smollm2-135m-instuct", ModelNotFoundError, "did you mean 'smollm2-135m-instruct'?")
    assert_rejected(tmp_path / "smollm2-135", ModelNotFoundError, "smollm2-135")
    assert_rejected(str(tmp_path / "nothing.gguf"), ModelNotFoundError, "nothing.gguf")
    assert_rejected("https://huggingface.co/org/name", ModelNotFoundError, '"org/name"')
    assert_rejected("../x/../y", ModelNotFoundError)
    assert_rejected("", ModelNotFoundError)
    assert_rejected("a\0b", ModelNotFoundError)
    assert_rejected("x" * 5000, ModelNotFoundError)


def test_unusable_paths_are_reported(tmp_path, model_dir):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert_rejected(loop, ModelNotFoundError, "loop of symbolic links")
    (tmp_path / "dangling").symlink_to("gone")
    assert_rejected(tmp_path / "dangling", ModelNotFoundError, "gone")
    assert_rejected(model_dir / "config.json", UnsupportedModelError, "not a .gguf")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_rejected(empty, ModelNotFoundError, "config.json")
    (empty / "x.gguf").touch()
    assert_rejected(empty, ModelNotFoundError, str(empty / "x.gguf"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_missing_permission_is_reported(model_dir):
    model_dir.chmod(0)
    try:
        assert_rejected(model_dir, ModelNotFoundError, "permission denied")
        assert_rejected(model_dir / "config.json", ModelNotFoundError, "permission denied")
    finally:
        model_dir.chmod(0o755)


def test_permission_error_of_the_system_is_reported(model_dir, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert_rejected(model_dir, ModelNotFoundError, "permission denied")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "model.ckpt", "model.pkl"])
def test_pickles_are_rejected(model_dir, name):
    (model_dir / "model.safetensors").unlink()
    (model_dir / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert_rejected(model_dir, UnsupportedModelError, "safetensors or GGUF only", "docs/models.md")
    assert_rejected(model_dir / name, UnsupportedModelError, "safetensors or GGUF only", "docs/models.md")


@pytest.mark.parametrize("text", ["{", "[]", "null", "", "\xff", "[" * 100_000])
def test_config_json_must_be_an_object(model_dir, text):
    (model_dir / "config.json").write_bytes(text.encode("latin-1"))
    assert_rejected(model_dir, CheckpointError, "config.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_duplicate_key_is_rejected_in_every_file(model_dir, name):
    (model_dir / name).write_text('{"a": {"b": 1, "b": 2}}')
    assert_rejected(model_dir, CheckpointError, name, "the key 'b' occurs twice")
    (model_dir / name).write_text(json.dumps("k" * 1_000_000).join(["{", ': 1, "c": 2, ', ": 2}"]))
    assert len(assert_rejected(model_dir, CheckpointError, "occurs twice")) < 500


def test_huge_json_file_is_not_read(model_dir):
    with open(model_dir / "config.json", "wb") as file:
        file.truncate(1 << 30)  # sparse
    assert_rejected(model_dir, CheckpointError, "1,073,741,824 bytes")


def write_index(folder: Path, *names: object) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(names)}})
    )


def test_shards_are_those_of_the_index(model_dir):
    for name in ("a.safetensors", "b.safetensors", "consolidated.safetensors"):
        (model_dir / name).write_bytes(b"x")
    write_index(model_dir, "b.safetensors", "a.safetensors", "b.safetensors")
    assert [p.name for p in open_checkpoint(model_dir).shards] == ["a.safetensors", "b.safetensors"]


def test_without_an_index_model_safetensors_is_the_model(model_dir):
    (model_dir / "adapter.safetensors").write_bytes(b"x")
    assert open_checkpoint(model_dir).shards == (model_dir / "model.safetensors",)


def test_shards_may_be_links_out_of_the_directory(model_dir, tmp_path):
    (tmp_path / "blob").write_bytes(b"x")
    (model_dir / "a.safetensors").symlink_to("../blob")  # as in the hub's cache
    write_index(model_dir, "a.safetensors")
    assert len(open_checkpoint(model_dir).shards) == 1


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd.safetensors",
        "../model.safetensors",
        "a/../../x.safetensors",
        "..\\x.safetensors",
        "C:\\x.safetensors",
        7,
    ],
)
def test_shards_outside_the_directory_are_rejected(model_dir, name):
    (model_dir.parent / "model.safetensors").write_bytes(b"x")
    write_index(model_dir, name)
    assert_rejected(model_dir, CheckpointError, "inside the directory")


def test_missing_shards_are_listed_up_to_ten(model_dir):
    (model_dir / "empty.safetensors").touch()
    write_index(model_dir, "empty.safetensors", *(f"s{i:02}.safetensors" for i in range(14)))
    message = assert_rejected(
        model_dir, CheckpointError, "empty.safetensors is empty", "and 5 more", "fetch the model again"
    )
    assert message.count("is missing") == MAX_PROBLEMS - 1


def test_missing_weights_are_reported(model_dir):
    (model_dir / "model.safetensors").rename(model_dir / "model-00001-of-00002.safetensors")
    assert len(open_checkpoint(model_dir).shards) == 1  # one file, whatever its name
    (model_dir / "model-00002-of-00002.safetensors").write_bytes(b"x")
    assert_rejected(model_dir, CheckpointError, "index.json")
    write_index(model_dir)
    assert_rejected(model_dir, CheckpointError, "weight_map")
    for file in model_dir.glob("*.safetensors*"):
        file.unlink()
    assert_rejected(model_dir, CheckpointError, "no weights")


def test_imports_neither_torch_nor_the_hub():
    heavy = "{'torch', 'huggingface_hub', 'gguf', 'numpy'}"
    code = f"import sys, octavo.checkpoint.resolve, octavo.checkpoint.catalog; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_checkpoint_is_a_value():
    assert Checkpoint(Path("m"), "safetensors", {"a": 1}) == Checkpoint(Path("m"), "safetensors", {"a": 1}, {}, ())
