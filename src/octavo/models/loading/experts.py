"""Tensors that merge the weights of a layer's experts, cut into the tensors of each."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from octavo.kernels.groups import Groups
from octavo.models.loading.stored_tensor import Reader, Rows, StoredGroups, StoredTensor

Part = TypeVar("Part", Tensor, Groups)
MERGED = re.compile(r"(.*\.mlp\.experts\.)(gate_up|gate|up|down)_proj(?:\.weight)?")


def split_experts(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """`stored` with each tensor of all experts, [num_experts, num_out, num_in], as tensors [num_out, num_in].

    Readers of such a tensor take rows of [num_experts * num_out, num_in]. "gate_up" has the gate's rows first.
    """
    split: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        match = MERGED.fullmatch(name)
        if match is None or len(tensor.shape) != 3:
            split[name] = tensor
            continue
        prefix, part = match.groups()
        parts = part.split("_")
        num_experts, num_rows, num_in = tensor.shape
        size = num_rows // len(parts)
        for i in range(num_experts):
            for j, role in enumerate(parts):
                first = i * num_rows + j * size
                split[f"{prefix}{i}.{role}_proj.weight"] = rows_of(tensor, first, (size, num_in))
    return split


def is_merged(name: str) -> bool:
    return MERGED.fullmatch(name) is not None


def rows_of(tensor: StoredTensor, first: int, shape: tuple[int, int]) -> StoredTensor:
    """Some rows of a tensor, from `first` on, as a tensor."""
    groups = tensor.groups
    if groups is not None:
        groups = StoredGroups(groups.form, _shifted(groups.read, first, shape[0]))
    return replace(tensor, shape=shape, read=_shifted(tensor.read, first, shape[0]), groups=groups)


def _shifted(read: Reader[Part], first: int, num_rows: int) -> Reader[Part]:
    def read_rows(rows: Rows, columns: range | None = None) -> Part:
        rows = slice(0, num_rows) if rows is ... else rows
        if isinstance(rows, slice):
            return read(slice(first + rows.start, first + rows.stop), columns)
        return read([first + row for row in rows], columns)

    return read_rows
