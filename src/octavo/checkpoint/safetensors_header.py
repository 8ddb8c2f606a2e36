"""Headers of a checkpoint's safetensors files: the tensors they hold. Needs neither torch nor the weights.

A header is a 64-bit little-endian length, then a JSON object of that many bytes: tensor name -> dtype, shape, offsets.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from octavo.checkpoint.resolve import Checkpoint, join_problems, parse_json, read_json
from octavo.errors import CheckpointError, cut

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
INDEX = "model.safetensors.index.json"


CHUNK_BYTES = 1 << 20


class Place(NamedTuple):
    """The bytes of a tensor in a file, from `start` to `end`."""

    path: Path
    dtype: str
    start: int
    end: int


def find_tensors(checkpoint: Checkpoint) -> dict[str, Place]:
    """The tensors of all files, by their names in them."""
    return {name: place for path in checkpoint.shards for name, place in read_header(path).items()}


def has_equal_bytes(a: Place, b: Place) -> bool:
    """True if two tensors hold the same values in the same dtype."""
    if a.dtype != b.dtype or a.end - a.start != b.end - b.start:
        return False
    with open(a.path, "rb") as first, open(b.path, "rb") as second:
        first.seek(a.start)
        second.seek(b.start)
        for left in range(a.end - a.start, 0, -CHUNK_BYTES):
            count = min(left, CHUNK_BYTES)
            if first.read(count) != second.read(count):
                return False
    return True


def check_headers(checkpoint: Checkpoint) -> None:
    """Compare the files of a safetensors directory with each other and with the index.

    Raises `CheckpointError` with up to ten problems: a damaged header, a tensor in two files or twice in one, a tensor
    that the index assigns to a file without it, or a tensor missing from the index.
    """
    problems: list[str] = []
    file_of_tensor: dict[str, str] = {}  # tensor name -> file name
    for path in checkpoint.shards:
        try:
            names = read_header(path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for name in names:
            if name in file_of_tensor:
                problems.append(f"{cut(name)} is in two shards, {cut(file_of_tensor[name])} and {cut(path.name)}")
            file_of_tensor[name] = path.name
    index = checkpoint.path / INDEX
    if not problems and index.is_file():
        problems += _differences(read_json(index).get("weight_map", {}), file_of_tensor)
    if problems:
        raise CheckpointError(f"{checkpoint.path}: {join_problems(problems)}; fetch the model again")


def _differences(weight_map: dict[str, Any], file_of_tensor: dict[str, str]) -> Iterator[str]:
    for name, file in weight_map.items():
        if name not in file_of_tensor:
            yield f"{cut(name)} is missing: the index puts it in {cut(file)}"
        elif file_of_tensor[name] != file:
            yield f"{cut(name)} is in {cut(file_of_tensor[name])}, but the index puts it in {cut(file)}"
    for name in file_of_tensor.keys() - weight_map.keys():
        yield f"{cut(name)} is in {cut(file_of_tensor[name])}, but not in the index"


def read_header(path: Path) -> dict[str, Place]:
    """The tensors of a file, by name. Raises `CheckpointError`."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError("its header reaches past its end")
            header = parse_json(file.read(length))
            start = 8 + length
            places = {
                name: Place(path, str(tensor["dtype"]), start + int(first), start + int(last))
                for name, tensor in header.items()
                if name != "__metadata__"
                for first, last in [tensor["data_offsets"]]
            }
    except OSError as error:
        raise CheckpointError(f"cannot read {cut(path.name)}: {error.strerror or error}") from None
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError, IndexError) as error:
        reason = cut(error) if isinstance(error, ValueError) else "its header is not a list of tensors"
        raise CheckpointError(f"{cut(path.name)} is cut short or damaged ({reason})") from None
    if not all(start <= place.start <= place.end <= size for place in places.values()):
        raise CheckpointError(f"{cut(path.name)} is cut short or damaged (a tensor reaches past its end)")
    return places
