"""Tensors that merge the weights of a layer's experts, cut into the tensors of each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from octavo.kernels.groups import Groups
from octavo.models.family import MergedExperts
from octavo.models.loading.stored_tensor import Reader, Rows, StoredGroups, StoredTensor, duplicate

Part = TypeVar("Part", Tensor, Groups)
MERGED = re.compile(r"(.*\.mlp\.experts\.)(gate_up|gate|up|down)_proj(?:\.(\w+))?")
MAX_EXPERTS = 4096


def split_experts(stored: dict[str, StoredTensor], layout: MergedExperts) -> tuple[dict[str, StoredTensor], list[str]]:
    """`stored` with each tensor of all experts, [num_experts, num_out, ...], as tensors of each expert.

    Readers of a merged weight take rows of [num_experts * num_out, ...]; those of a merged bias the biases of experts.
    Also returns a problem for each projection that is in several tensors.
    """
    split: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for name, tensor in stored.items():
        match = MERGED.fullmatch(name)
        parts = {} if match is None else dict(_parts(match, tensor, layout))
        parts = parts or {name: tensor}
        problems += (duplicate(part) for part in parts if part in split)
        split |= parts
    return split, problems


def is_merged_weight(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 2 and MERGED.fullmatch(name) is not None


def _parts(match: re.Match[str], tensor: StoredTensor, layout: MergedExperts) -> Iterator[tuple[str, StoredTensor]]:
    """Names and tensors of the projections that one tensor merges; none if its shape is no merged tensor's."""
    prefix, roles, kind = match[1], match[2].split("_"), match[3] or "weight"
    if len(tensor.shape) < 2 or tensor.shape[0] > MAX_EXPERTS or not math.prod(tensor.shape):
        return  # a tensor without numbers takes no bytes of a file, and thousands of parts would be cut from each
    is_bias, is_transposed = len(tensor.shape) == 2, layout.transposed and kind == "weight"
    num_experts, num_rows, *others = tensor.shape
    if is_transposed:
        num_rows, others = math.prod(others), [num_rows]
    if num_rows % len(roles):
        return
    size = num_rows // len(roles)
    shape = (size, math.prod(others)) if others else (size,)
    for expert in range(num_experts):
        for i, role in enumerate(roles):
            own = slice(i, num_rows, len(roles)) if layout.interleaved else slice(i * size, (i + 1) * size, 1)
            if is_bias or is_transposed:
                read = _bias_reader(tensor, expert, own) if is_bias else _transposed_reader(tensor, expert, own)
                part = replace(tensor, shape=shape, read=read, groups=None)
            else:
                start = expert * num_rows
                part = rows_of(tensor, slice(start + own.start, start + own.stop, own.step), shape)
            yield f"{prefix}{expert}.{role}_proj.{kind}", part


def rows_of(tensor: StoredTensor, chosen: slice, shape: tuple[int, ...]) -> StoredTensor:
    """Some rows of a tensor, as a tensor."""
    groups = tensor.groups
    if groups is not None:
        groups = StoredGroups(groups.form, _shifted(groups.read, chosen))
    return replace(tensor, shape=shape, read=_shifted(tensor.read, chosen), groups=groups)


def _shifted(read: Reader[Part], chosen: slice) -> Reader[Part]:
    index = range(chosen.start, chosen.stop, chosen.step)

    def read_rows(rows: Rows, columns: range | None = None) -> Part:
        if isinstance(rows, list):
            return read([index[row] for row in rows], columns)
        part = index if rows is ... else index[rows]
        return read(slice(part.start, part.stop, part.step), columns)

    return read_rows


def _bias_reader(tensor: StoredTensor, expert: int, own: slice) -> Reader[Tensor]:
    def read(rows: Rows, columns: range | None = None) -> Tensor:
        return tensor.read(slice(expert, expert + 1))[0][own][rows]

    return read


def _transposed_reader(tensor: StoredTensor, expert: int, own: slice) -> Reader[Tensor]:
    first, num_in = expert * tensor.shape[1], tensor.shape[1]

    def read(rows: Rows, columns: range | None = None) -> Tensor:
        columns = columns or range(num_in)
        return tensor.read(slice(first + columns.start, first + columns.stop)).T[own][rows]

    return read
