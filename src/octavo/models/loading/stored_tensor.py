"""A tensor of a checkpoint's files, as both file formats provide it to the loader."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import EllipsisType
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from octavo.checkpoint.resolve import Checkpoint, join_problems
from octavo.errors import CheckpointError, cut
from octavo.kernels.groups import GroupForm, Groups

FLOAT_DTYPES = ("F32", "F16", "BF16")
"""Supported dtypes of safetensors files."""

NOT_SERVED = (
    *("vision_tower.", "model.vision_tower.", "model.visual.", "multi_modal_projector.", "model.multi_modal_"),
    *("model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
    "mtp.",
)
"""Prefixes of tensors for images and sounds, and for the prediction of several tokens."""

Rows: TypeAlias = slice | list[int] | EllipsisType
T_co = TypeVar("T_co", Tensor, Groups, covariant=True)


class Reader(Protocol[T_co]):
    """(slice or list of rows, or "...": all; range of columns) -> these numbers. Raises `TensorError`.

    columns  None: all, or there are none
    """

    def __call__(self, rows: Rows, columns: range | None = None) -> T_co: ...


class StoredGroups(NamedTuple):
    """A quantised weight in a file, in a form that can be kept. Its reader's columns are whole groups."""

    form: GroupForm
    read: Reader[Groups]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    dtype         the file format's name of it
    is_supported  `read` supports the dtype
    read          gives rows in any float dtype; may be a view of the mapped file. Raises `TensorError` if a quantised
                  weight cannot be computed
    file          name of the file
    key           name of the tensor in a safetensors file
    groups        of a quantised weight, whose values `read` computes; None: no form has it
    """

    shape: tuple[int, ...]
    dtype: str
    is_supported: bool
    read: Reader[Tensor]
    file: str
    key: str = ""
    groups: StoredGroups | None = None


def half_rotation_rows(num_rows: int, num_heads: int) -> np.ndarray | None:
    """Index in the file of each row of a Q or K projection whose rows are interleaved; None for a wrong shape.

    llama.cpp's files of Llama and Mistral's own are for a rotary embedding that pairs neighbouring rows of a head;
    Transformers' pairs rows half a head apart:   in the file   0 3 1 4 2 5   result   0 1 2 3 4 5     (head_dim 6)
    """
    if num_rows % (2 * num_heads):
        return None  # the comparison with the model reports the shape
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def duplicate(name: str) -> str:
    """The problem of two tensors with one name."""
    return f"two tensors are named {cut(name)}"


def raise_problems(checkpoint: Checkpoint, problems: Iterable[str]) -> None:
    """Raise one `CheckpointError` for all problems, if any."""
    problems = list(problems)
    if problems:
        raise CheckpointError(f"{checkpoint.path}: {join_problems(problems)}; fetch the model again")
