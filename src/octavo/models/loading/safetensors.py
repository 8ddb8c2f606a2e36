"""Reads the tensors of safetensors files."""

from __future__ import annotations

from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.checkpoint.resolve import Checkpoint
from octavo.checkpoint.safetensors_header import check_headers
from octavo.errors import cut
from octavo.models.loading.experts import is_merged_weight
from octavo.models.loading.stored_tensor import (
    FLOAT_DTYPES,
    Reader,
    Rows,
    StoredTensor,
    duplicate,
    half_rotation_rows,
    raise_problems,
)
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
            heads = spec.num_heads if name.endswith("q_proj.weight") else spec.num_kv_heads
            order = half_rotation_rows(shape[0], heads) if len(shape) == 2 and family.is_interleaved(key) else None
            read = _row_reader(
                shard, key, order, plus_one=spec.has_unit_offset(name), is_merged=is_merged_weight(name, shape)
            )
            stored[name] = StoredTensor(shape, dtype, dtype in FLOAT_DTYPES, read, path.name, key)
    raise_problems(checkpoint, problems)
    return stored


def _row_reader(shard: Any, key: str, order: np.ndarray | None, *, plus_one: bool, is_merged: bool) -> Reader[Tensor]:
    def read(rows: Rows, columns: range | None = None) -> Tensor:
        values: Tensor = shard.get_tensor(key)  # a view of the mapping
        if is_merged:
            values = values.flatten(0, 1).flatten(1)
        if columns is not None:
            values = values[:, columns.start : columns.stop]
        values = values[rows if order is None else order[rows]]
        return values.float() + 1 if plus_one else values

    return read
