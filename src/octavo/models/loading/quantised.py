"""Reads rows of quantised weights. Each format of quantised checkpoints is read into one form, `quantization.form`.

The tensors of a module become one tensor, named as that of a checkpoint that is not quantised: `read` computes its
values, and `groups` has its bits where `kernels.groups` has a form for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from octavo.errors import cut
from octavo.integers import cdiv
from octavo.kernels.groups import E2M1, GroupForm, Groups
from octavo.models.family import Family
from octavo.models.loading.stored_tensor import FLOAT_DTYPES, NOT_SERVED, Reader, Rows, StoredGroups, StoredTensor
from octavo.models.quantization.form import WHOLE, Format, Numbers, Parts, QuantisedWeight, TensorError

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The values of the 256 bytes."""
E8M0 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
"""The same of exponents."""


def read_quantised(stored: dict[str, StoredTensor], form: Format, family: Family) -> Iterator[str]:
    """Replace the tensors of each quantised module by its weight; yields a problem for each module that has one.

    Only headers and a shape are read: rows are computed when the weight's are.
    """
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part in form.parts and not name.startswith(NOT_SERVED):
            modules.setdefault(module, {})[part] = tensor
    for module, tensors in modules.items():
        if tensors.keys() == {"weight"} and tensors["weight"].dtype in FLOAT_DTYPES:
            continue
        for part in tensors:
            del stored[f"{module}.{part}"]
        name = f"{module}.weight"
        try:
            weight = form.read(Parts(module, tensors))
        except TensorError as problem:
            yield str(problem)
            continue
        source = weight.values.tensor
        if family.is_interleaved(source.key):
            yield f"{cut(name)} is quantised with its rows in Mistral's own order, which is not supported"
        elif name in stored or ("weight" in tensors and source is not tensors["weight"]):
            yield f"{cut(name)} is there beside {cut(weight.values.name)}"
        else:
            stored[name] = StoredTensor(
                weight.shape, "F32", True, _row_reader(weight), source.file, groups=_stored_groups(weight)
            )


def _row_reader(weight: QuantisedWeight) -> Reader[Tensor]:
    (num_out, num_in), (block_rows, block_columns) = weight.shape, weight.block
    num_groups = weight.num_scales[1]

    def read(rows: Rows, columns: range | None = None) -> Tensor:
        index, columns = torch.arange(num_out)[rows], columns or range(num_in)
        first, last = columns.start, columns.stop
        values = _take(weight.values, index, columns)
        scales = _take_scales(weight, index)
        zeros = None if weight.zeros is None else _take(weight.zeros, index // block_rows, range(num_groups))
        if weight.groups is None and first % block_columns == last % block_columns == 0:
            blocks = values.view(len(values), -1, block_columns)
            own = slice(first // block_columns, last // block_columns)
            if zeros is not None:
                blocks -= zeros[:, own, None]
            blocks *= scales[:, own, None]
            return values
        groups = torch.arange(num_in) // block_columns
        if weight.groups is not None and (given := _groups(weight.groups, num_groups)).any():
            groups = given  # else a writer without an order left zeros, as ExLlamaV2 takes them
        groups = groups[first:last]
        if zeros is not None:
            values -= zeros.index_select(1, groups)
        return values.mul_(scales.index_select(1, groups))

    return read


def _stored_groups(weight: QuantisedWeight) -> StoredGroups | None:
    """The weight with its bits, unless its groups differ in size."""
    (num_out, num_in), (block_rows, block_columns) = weight.shape, weight.block
    values, zeros, size = weight.values, weight.zeros, min(block_columns, num_in)
    is_float8 = values.tensor.dtype == "F8_E4M3"
    is_float = is_float8 or values.is_e2m1
    order: Tensor | None = None
    if num_in % size:
        return None
    if weight.groups is not None and not _is_in_order(weight.groups, size):
        order = _sorted_columns(weight.groups, size)
        if order is None or is_float:
            return None
    if zeros is not None and (is_float or zeros.offset != values.offset or zeros.tensor.dtype not in ("I32", "I8")):
        return None
    # Signed integers are stored without their sign: 128 more.
    zero = 0 if is_float else -values.offset if values.bits else 128
    form = GroupForm(values.bits or 8, size, zero, is_float=is_float, has_zeros=zeros is not None)
    form = form if order is None else replace(form, ordered_in=num_in)

    def unsigned(numbers: Numbers, rows: Tensor, columns: range) -> Tensor:
        taken = _take_stored(numbers, rows, columns)
        return taken.view(torch.uint8) ^ 128 if taken.dtype == torch.int8 else taken.to(torch.uint8)

    def read(rows: Rows, columns: range | None = None) -> Groups:
        index, columns = torch.arange(num_out)[rows], columns or range(num_in)
        own = range(columns.start // size, columns.stop // size)
        taken = _take_stored(values, index, columns) if is_float8 else unsigned(values, index, columns)
        return Groups(
            form,
            values=taken if order is None else taken.index_select(1, order),
            scales=_take_scales(weight, index)[:, own.start : own.stop],
            zeros=None if zeros is None else unsigned(zeros, index // block_rows, own),
            order=order,
        )

    return StoredGroups(form, read)


def _is_in_order(groups: Numbers, size: int) -> bool:
    """True if each column is in the group of its place. A writer without an order may have left zeros."""
    index = groups.tensor.read(WHOLE).long()
    return not index.any() or torch.equal(index, torch.arange(len(index)) // size)


def _sorted_columns(groups: Numbers, size: int) -> Tensor | None:
    """The columns by group, [num_in] int32; None if a group has not just `size`."""
    index, order = groups.tensor.read(WHOLE).long().sort(stable=True)
    return order.int() if torch.equal(index, torch.arange(len(index)) // size) else None


def _take_scales(weight: QuantisedWeight, rows: Tensor) -> Tensor:
    """The scales of rows of the weight, [len(rows), num_groups] float32. Raises `TensorError` for 0 and NaN."""
    scales = _take(weight.scales, rows // weight.block[0], range(weight.num_scales[1]))
    if not scales.isfinite().all() or not scales.all():
        raise TensorError(f"{cut(weight.scales.name)} contains 0, NaN or infinity")
    return scales


def _groups(groups: Numbers, num_groups: int) -> Tensor:
    """The group of each column, [num_in] int64."""
    index = groups.tensor.read(WHOLE).long()
    if index.min() < 0 or index.max() >= num_groups:
        raise TensorError(f"{cut(groups.name)} has groups {int(index.min())} to {int(index.max())}, of {num_groups}")
    return index


def _take(numbers: Numbers, rows: Tensor, columns: range) -> Tensor:
    """A part of a matrix, [len(rows), len(columns)] float32: a new tensor. rows: as `matrix[rows]`, never empty"""
    taken = _take_stored(numbers, rows, columns)
    if taken.dtype == torch.float8_e4m3fn:  # five times as fast as torch's conversion
        return E4M3.index_select(0, taken.contiguous().view(torch.uint8).flatten().int()).view(taken.shape)
    if numbers.is_exponent or numbers.is_e2m1:
        return (E2M1 if numbers.is_e2m1 else E8M0)[taken.int()]
    values = taken.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    return values.add_(numbers.offset) if numbers.offset else values


def _take_stored(numbers: Numbers, rows: Tensor, columns: range) -> Tensor:
    """As `_take`, as they are stored: without offset, integers of words as they are packed."""
    stored = numbers.tensor.read(WHOLE)
    matrix = stored.reshape(-1, 1) if stored.ndim < 2 else stored.T if numbers.is_transposed else stored
    if not numbers.bits:
        return _select(matrix[:, columns.start : columns.stop], rows)
    if numbers.along == 0:
        return _take_along_columns(numbers, matrix[:, columns.start : columns.stop], rows)
    per_word = 8 * matrix.itemsize // numbers.bits
    first = columns.start // per_word
    words = _select(matrix[:, first : cdiv(columns.stop, per_word)], rows)
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # one column is "contiguous" anyhow
    fields = octets if numbers.bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)
    return fields[:, columns.start - first * per_word : columns.stop - first * per_word]


def _take_along_columns(numbers: Numbers, matrix: Tensor, rows: Tensor) -> Tensor:
    """As `_take_stored`, for words of neighbours in a column. All words from the first row's to the last's are read."""
    per_word = 32 // numbers.bits
    first, last = int(rows.min()) // per_word, int(rows.max()) // per_word
    words = matrix[first : last + 1].contiguous()  # [num_words, num_columns]
    if numbers.word_offset:
        words = words + numbers.word_offset
    shifts = numbers.bits * torch.tensor(numbers.places or range(per_word), dtype=torch.int32)
    fields = words[:, None, :] >> shifts[:, None]
    fields &= (1 << numbers.bits) - 1  # after an arithmetic shift
    return _select(fields.flatten(0, 1), rows - per_word * first)


def _select(matrix: Tensor, rows: Tensor) -> Tensor:
    """matrix[rows]; a view if the rows follow each other."""
    first, last = int(rows[0]), int(rows[-1])
    is_range = last - first == len(rows) - 1 and bool((rows.diff() == 1).all())
    return matrix[first : last + 1] if is_range else matrix[rows]
