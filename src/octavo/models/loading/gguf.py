"""Reads the tensors of GGUF files, under Transformers' names and in its order of rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import gguf
import numpy as np
import torch
from torch import Tensor

from octavo.checkpoint.resolve import Checkpoint
from octavo.integers import cdiv
from octavo.kernels.group_form import GGUF_FORMS
from octavo.kernels.groups import Groups
from octavo.models.gguf_config import is_beyond
from octavo.models.loading.gguf_groups import read_blocks
from octavo.models.loading.stored_tensor import (
    Reader,
    Rows,
    StoredGroups,
    StoredTensor,
    duplicate,
    half_rotation_rows,
    raise_problems,
)
from octavo.models.registry import find_family
from octavo.models.spec import ModelSpec

GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""llama.cpp's names of the tensors outside of layers -> Transformers' names."""


def _transformers_name(name: str, parts: Mapping[str, str]) -> str:
    """Transformers' name of a GGUF tensor; unknown names are unchanged. parts: `GGUFFormat.parts`."""
    if match := re.fullmatch(r"blk\.(\d+)\.((\w+)(\.weight|\.bias|\.scale|))", name):
        layer, whole, part, kind = match.groups()
        return f"model.layers.{layer}.{parts.get(whole) or parts.get(part, part) + kind}"
    stem, _, kind = name.rpartition(".")
    return f"{GGUF_NAMES[stem]}.{kind}" if stem in GGUF_NAMES else name


def read_gguf(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, StoredTensor]:
    """Tensors of the file, by Transformers' names."""
    reader = checkpoint.gguf
    family = find_family(spec.architecture)
    form = family.gguf
    permuted = {}  # tensors with permuted rows, and their number of heads
    if form.interleaved_qk:
        permuted = {".attn_q.": spec.num_heads, ".attn_k.": spec.num_kv_heads}
    split = form.split(spec)
    has_further = reader.value(f"{reader.value('general.architecture')}.nextn_predict_layers", 0) > 0
    stored: dict[str, StoredTensor] = {}
    problems = []
    for tensor in reader.tensors:
        if has_further and is_beyond(tensor.name, spec.num_layers):
            continue
        heads = next((count for part, count in permuted.items() if part in tensor.name), None)
        order = None if heads is None else half_rotation_rows(int(tensor.shape[-1]), heads)
        whole = family.tensor_name(_transformers_name(tensor.name, form.parts))
        for name, rows in _split(whole, order, tensor, split).items():
            if name in stored:
                problems.append(duplicate(name))
            stored[name] = _stored_tensor(tensor, name, rows, checkpoint.path.name)
    raise_problems(checkpoint, problems)
    return stored


def _split(
    name: str, order: np.ndarray | None, tensor: gguf.ReaderTensor, split: Mapping[str, Mapping[str, tuple[int, ...]]]
) -> dict[str, np.ndarray | None]:
    """The names of a tensor's parts, and the rows of each; or its own. split: as of `GGUFFormat`"""
    match = re.fullmatch(r"(model\.layers\.\d+\.)(.+)(\.weight)", name)
    parts = {} if match is None else split.get(match[2], {})
    if match is None or not parts or sum(map(len, parts.values())) != tensor.shape[-1]:
        return {name: order}  # of a wrong shape, which the comparison with the model reports
    return {f"{match[1]}{part}{match[3]}": np.array(rows) for part, rows in parts.items()}


def _stored_tensor(tensor: gguf.ReaderTensor, name: str, order: np.ndarray | None, file: str) -> StoredTensor:
    """order: the tensor's rows; None: all"""
    kind = tensor.tensor_type
    shape = tuple(int(n) for n in reversed(tensor.shape))  # GGUF lists the fastest dimension first
    read = _dequantised_row_reader(tensor, shape, order)
    groups = None
    if kind.name in GGUF_FORMS:
        groups = StoredGroups(GGUF_FORMS[kind.name], _block_reader(tensor, order))
    if order is not None:
        shape = len(order), *shape[1:]
    stored = StoredTensor(shape, kind.name, _is_supported(kind), read, file, groups=groups)
    change = next((change for end, change in CHANGES.items() if name.endswith(end)), None)
    return stored if change is None else change(stored)


def _logarithm(stored: StoredTensor) -> StoredTensor:
    """A, in the file -exp(A)."""
    return replace(stored, read=lambda rows, columns=None: stored.read(rows).float().neg().log())


def _with_middle_dimension(stored: StoredTensor) -> StoredTensor:
    """[n, 1, size], in the file [n, size]."""
    shape = *stored.shape[:1], 1, *stored.shape[1:]
    return replace(stored, shape=shape, read=lambda rows, columns=None: stored.read(rows).unsqueeze(1), groups=None)


def _as_matrix(stored: StoredTensor) -> StoredTensor:
    """[1, n], in the file [n]."""
    if len(stored.shape) > 1:
        return stored
    shape = 1, *stored.shape
    return replace(stored, shape=shape, read=lambda rows, columns=None: stored.read(...)[None][rows], groups=None)


CHANGES = {
    ".linear_attn.A_log": _logarithm,
    ".linear_attn.conv1d.weight": _with_middle_dimension,
    ".mlp.shared_expert_gate.weight": _as_matrix,
}
"""What llama.cpp changes besides, by the end of Transformers' names."""


@cache
def _is_supported(kind: gguf.GGMLQuantizationType) -> bool:
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _dequantised_row_reader(
    tensor: gguf.ReaderTensor, shape: tuple[int, ...], order: np.ndarray | None
) -> Reader[Tensor]:
    size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][0]

    def read(rows: Rows, columns: range | None = None) -> Tensor:
        data, *others = _blocks(tensor, order, rows, columns), *shape[1:][-1:]
        if columns is not None:
            first = columns.start // size * size
            others = [cdiv(columns.stop, size) * size - first]
        if tensor.tensor_type.name == "MXFP4":  # whose NaN gguf does not know
            decoded = read_blocks("MXFP4", data).dequantised()
        else:
            # As one long row: gguf decodes sixteen rows at a time, and its Python costs more than its arithmetic.
            values = gguf.quants.dequantize(data.reshape(1, -1), tensor.tensor_type)
            decoded = torch.from_numpy(np.require(values, requirements="W").reshape(len(data), *others))
        return decoded if columns is None else decoded[:, columns.start - first : columns.stop - first]

    return read


def _block_reader(tensor: gguf.ReaderTensor, order: np.ndarray | None) -> Reader[Groups]:
    def read(rows: Rows, columns: range | None = None) -> Groups:
        return read_blocks(tensor.tensor_type.name, _blocks(tensor, order, rows, columns))

    return read


def _blocks(tensor: gguf.ReaderTensor, order: np.ndarray | None, rows: Rows, columns: range | None) -> np.ndarray:
    """Rows of a tensor as it is stored, cut to the quantisation blocks that hold the columns."""
    data = tensor.data
    if data.ndim == 3:
        data = data.reshape(-1, data.shape[-1])  # of experts
    if columns is not None:
        size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][0]
        width = data.shape[1] * size // int(tensor.shape[0])  # of a block
        data = data[:, columns.start // size * width : cdiv(columns.stop, size) * width]
    return np.asarray(data[rows if order is None else order[rows]])
