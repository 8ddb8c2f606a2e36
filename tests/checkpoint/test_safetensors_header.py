"""Headers of safetensors files, read without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint.resolve import open_checkpoint
from octavo.checkpoint.safetensors_header import check_headers, read_header
from octavo.errors import CheckpointError

ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
LONG = "x" * 1_000_000


def write(path: Path, *names: str, text: str | None = None) -> None:
    """A file with tensors of four bytes each, or with `text` as its header."""
    entries = [f"{json.dumps(name)}: {json.dumps(ONE)}" for name in names]
    header = ("{" + ", ".join(entries) + "}" if text is None else text).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path / "a.safetensors", "one", "two")
    write(tmp_path / "b.safetensors", "three")
    index(tmp_path, one="a", two="a", three="b")
    return tmp_path


def index(folder: Path, **homes: str) -> None:
    weight_map = {name: f"{home}.safetensors" for name, home in homes.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def rejection(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_headers(open_checkpoint(folder))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 4000
    return message


def test_files_that_agree_with_their_index_pass(model: Path) -> None:
    check_headers(open_checkpoint(model))
    assert list(read_header(model / "a.safetensors")) == ["one", "two"]


def test_tensor_that_the_index_misses_is_named(model: Path) -> None:
    index(model, one="a", three="b")
    assert "two is in a.safetensors, but not in the index" in rejection(model)


def test_tensor_that_only_the_index_has_is_named(model: Path) -> None:
    index(model, one="a", two="a", three="b", four="b")
    assert "four is missing: the index puts it in b.safetensors" in rejection(model)


def test_swapped_shards_are_named(model: Path) -> None:
    index(model, one="b", two="a", three="a")
    message = rejection(model)
    assert "one is in a.safetensors, but the index puts it in b.safetensors" in message
    assert "three is in b.safetensors, but the index puts it in a.safetensors" in message


def test_tensor_in_two_shards_is_named(model: Path) -> None:
    write(model / "b.safetensors", "three", "one")
    assert "one is in two shards, a.safetensors and b.safetensors" in rejection(model)


def test_duplicate_tensor_name_is_rejected(model: Path) -> None:
    write(model / "b.safetensors", "three", "three")
    assert "b.safetensors is cut short or damaged (the key 'three' occurs twice)" in rejection(model)


def test_ten_problems_are_listed(model: Path) -> None:
    write(model / "b.safetensors", "three", *(f"t{i}" for i in range(14)))
    assert "; and 4 more; fetch the model again" in rejection(model)


@pytest.mark.parametrize("names", [[LONG], [LONG, LONG], [LONG + str(i) for i in range(12)]])
def test_huge_tensor_name_gives_a_short_message(model: Path, names: list[str]) -> None:
    write(model / "b.safetensors", "three", *names)
    assert "characters" in rejection(model)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        "nonsense",
        '{"a": 1}',
        '{"a": {}}',
        '{"a": {"data_offsets": []}}',
        '{"a": {"data_offsets": [0, null]}}',
        '{"a": {"data_offsets": [0, 5]}}',
        "[" * 100_000,
        '{"a": ' + "9" * 5000 + "}",
    ],
)
def test_damaged_header_is_one_line(model: Path, text: str) -> None:
    write(model / "b.safetensors", text=text)
    assert "b.safetensors is cut short or damaged" in rejection(model)


@pytest.mark.parametrize("data", [b"1", b"\xff" * 8, struct.pack("<Q", 9) + b"{}"])
def test_truncated_header_is_one_line(model: Path, data: bytes) -> None:
    (model / "b.safetensors").write_bytes(data)
    assert "b.safetensors is cut short or damaged (its header reaches past its end)" in rejection(model)


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}, "one": ONE}
    write(tmp_path / "a", text=json.dumps(entries))
    assert list(read_header(tmp_path / "a")) == ["one"]
