"""GGUF files: reading, and damaged files."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.checkpoint.gguf import open_gguf
from octavo.checkpoint.resolve import open_checkpoint
from octavo.errors import CheckpointError, OctavoError


def test_arrays_equal_those_of_the_library(write_gguf):
    path = write_gguf(
        metadata={
            "x.words": ["", "ä", "漢字", "a" * 300],
            "x.ints": [1, -2, 3],
            "x.floats": [0.5, -1.25],
            "x.flags": [True, False],
        }
    )
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    assert list(ours.fields) == list(theirs.fields)
    for key, field in theirs.fields.items():
        assert ours.fields[key].contents() == field.contents(), key
        assert ours.fields[key].types == field.types
    assert ours.value("x.words") == ["", "ä", "漢字", "a" * 300]
    assert ours.value("x.absent", 7) == 7
    for a, b in zip(ours.tensors, theirs.tensors, strict=True):
        assert a.name == b.name
        assert np.array_equal(a.data, b.data)


@pytest.fixture
def parts(write_gguf):
    """Three parts of a model, the first without tensors, as llama-gguf-split makes them."""
    tensors = [{}, {"a.weight": np.ones((2, 32), np.float32)}, {"b.weight": np.zeros(3, np.float32)}]
    return [
        write_gguf(
            f"model-{number + 1:05}-of-00003.gguf",
            tensors=content,
            metadata={"split.no": number, "split.count": 3, "split.tensors.count": 2},
        )
        for number, content in enumerate(tensors)
    ]


def test_tensors_of_all_parts_are_read(parts):
    tensors = {tensor.name: tensor.data for tensor in open_checkpoint(parts[0]).gguf.tensors}
    assert list(tensors) == ["a.weight", "b.weight"]
    assert (tensors["a.weight"] == 1).all() and (tensors["b.weight"] == 0).all()


def test_incomplete_or_mixed_parts_are_rejected(parts, write_gguf):
    with pytest.raises(CheckpointError, match=r"is part 2; pass the first, model-00001-of-00003\.gguf"):
        open_checkpoint(parts[1])
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.gguf is another part"):
        open_checkpoint(parts[0])
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*model-00003-of-00003\.gguf"):
        open_checkpoint(parts[0])
    with pytest.raises(CheckpointError, match=r"must be named MODEL-00001-of-00003\.gguf"):
        open_checkpoint(write_gguf(metadata={"split.count": 3}))
    with pytest.raises(CheckpointError, match=r"split\.count is '3', it must be of type int"):
        open_checkpoint(write_gguf(metadata={"split.count": "3"}))


def test_truncated_file_is_rejected(write_gguf, tmp_path):
    whole = write_gguf().read_bytes()
    path = tmp_path / "cut.gguf"
    # The file ends in unused padding: damage starts with the last byte of the last tensor.
    for length in [0, 1, 3, 4, 8, 23, *range(24, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def test_wrong_magic_and_version_are_rejected(write_gguf):
    path = write_gguf()
    whole = path.read_bytes()
    for broken in (b"GGML" + whole[4:], whole[:4] + b"\x09\0\0\0" + whole[8:], b"PK\3\4" * 100):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match="not an intact GGUF file"):
            open_checkpoint(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_corrupted_bytes_give_an_octavo_error_or_a_checkpoint(write_gguf, tmp_path, data):
    whole = bytearray(write_gguf().read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 1100))
        whole[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
    path = tmp_path / "changed.gguf"
    path.write_bytes(whole)
    try:
        checkpoint = open_checkpoint(path)
    except OctavoError as e:
        assert "\n" not in str(e)  # noqa: PT017 - either outcome is right
    else:
        for tensor in checkpoint.gguf.tensors:
            assert tensor.data_offset + tensor.n_bytes <= len(whole)
