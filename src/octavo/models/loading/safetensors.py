"""Reads the tensors of safetensors files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.checkpoint.resolve import Checkpoint
from octavo.checkpoint.safetensors_header import check_headers
from octavo.errors import cut
from octavo.models.loading.stored_tensor import FLOAT_DTYPES, StoredTensor, duplicate, raise_problems
from octavo.models.registry import find_family
from octavo.models.spec import ModelSpec


def read_safetensors(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, StoredTensor]:
    """Tensors of all shards, by Transformers' names. Raises `CheckpointError` for damaged files."""
    family = find_family(spec.architecture)
    stored: dict[str, StoredTensor] = {}
    problems = []
    check_headers(checkpoint)
    for path in checkpoint.shards:
        try:
            shard: Any = safe_open(path, framework="pt", device="cpu")  # maps the file; checks its header and length
        except (SafetensorError, OSError) as e:
            problems.append(f"{cut(path.name)} is cut short or damaged ({cut(e) or type(e).__name__})")
            continue
        for key in list(shard.keys()):
            name = family.tensor_name(key)
            tensor = shard.get_slice(key)
            if name in stored:
                problems.append(duplicate(name))  # an old and a new name
            shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
            read = _row_reader(shard, key, spec.unit_offset_norms and name.endswith("norm.weight"))
            stored[name] = StoredTensor(shape, dtype, dtype in FLOAT_DTYPES, read, path.name)
    raise_problems(checkpoint, problems)
    return stored


def _row_reader(shard: Any, key: str, plus_one: bool) -> Callable[[int, int], Tensor]:
    def read(first: int, last: int) -> Tensor:
        rows: Tensor = shard.get_tensor(key)[first:last]  # get_tensor returns a view of the mapping
        return rows.float() + 1 if plus_one else rows

    return read
