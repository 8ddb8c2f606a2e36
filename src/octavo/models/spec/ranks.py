"""The sizes of one tensor parallel rank of a model: whether a number of ranks can share it, and what each then has.

Imports no torch: memory plans use the same sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from octavo.errors import ParameterError
from octavo.integers import cdiv
from octavo.kernels.group_form import GroupForm

if TYPE_CHECKING:
    from octavo.models.spec import ModelSpec

Spec = TypeVar("Spec", bound="ModelSpec")
ROW_UNIT = 8
"""Rows of the vocabulary of a rank are a multiple: GPUs multiply matrices of such sizes fastest."""


def heads_per_rank(num_heads: int, size: int) -> int:
    """K/V heads of one of `size` ranks. Where ranks are more than heads, several have the same head."""
    return max(num_heads // size, 1)


def rows_per_rank(vocab_size: int, size: int) -> int:
    """Rows of the vocabulary of one of `size` ranks; the last rank may lack some."""
    return vocab_size if size == 1 else cdiv(vocab_size, size * ROW_UNIT) * ROW_UNIT


def check_tensor_parallel(spec: ModelSpec, size: int) -> None:
    """Raise `ParameterError`, which lists the possible sizes, if `size` ranks cannot share a model."""
    if (problem := next(_problems(spec, size), None)) is not None:
        sizes = [n for n in range(1, spec.num_heads + 1) if not any(_problems(spec, n))]
        raise ParameterError(
            f"tensor_parallel_size {size} {problem}; choose a divisor: {', '.join(map(str, sizes))}",
            param="tensor_parallel_size",
        )


def _problems(spec: ModelSpec, size: int) -> Iterator[str]:
    for name, total in spec.split_sizes().items():
        if total % size:
            yield f"does not divide the model's {total} {name}"
    for name, total in spec.shared_sizes().items():
        if total % size and size % total:
            yield f"does not divide the model's {total} {name}, and is no multiple of them"
    if (size - 1) * rows_per_rank(spec.vocab_size, size) >= spec.vocab_size:
        yield f"leaves a rank without any of the model's {spec.vocab_size} tokens"


@lru_cache(maxsize=16)
def spec_of_rank(spec: Spec, size: int) -> Spec:
    """`spec` with the sizes of one of `size` ranks, also those of its quantised weights."""
    check_tensor_parallel(spec, size)
    own = replace(spec, **spec.sizes_of_rank(size), forms=(), vocabulary_forms=())
    counts: dict[GroupForm, int] = {}
    for form, count in spec.forms:
        counts[form] = counts.get(form, 0) + count
    forms = [part for form, count in counts.items() for part in _forms_of_rank(spec, own, form, count)]
    heads = [(form, count * own.vocab_size // spec.vocab_size) for form, count in spec.vocabulary_forms]
    return replace(own, forms=tuple(forms), vocabulary_forms=tuple(heads))


def _forms_of_rank(spec: ModelSpec, own: ModelSpec, form: GroupForm, count: int) -> Iterator[tuple[GroupForm, int]]:
    """A rank's part of `count` weights of a form, which are spread evenly over the layers that the form fits."""
    pairs = [
        (kind.num_layers, linear, own_kind.linears[role])
        for kind, own_kind in zip(spec.layer_kinds, own.layer_kinds, strict=True)
        for role, linear in kind.linears.items()
        if form.of_columns(linear.in_size) == form
    ]
    if any(linear.in_size == form.group_size for _, linear, _ in pairs):  # each row is a group
        pairs = [pair for pair in pairs if pair[1].in_size == form.group_size]
    whole = sum(num_layers * math.prod(linear.shape) for num_layers, linear, _ in pairs)
    for num_layers, _, linear in pairs:
        if (kept := form.of_columns(linear.in_size)) is not None:
            yield kept, count * num_layers * math.prod(linear.shape) // whole
