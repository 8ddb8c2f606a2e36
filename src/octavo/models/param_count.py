"""Number of parameters and bytes of a model, computed from its spec without torch.

A test compares the counts with the tensors of `decoder` and `gpt` and with `linear`'s packed weights, for every family.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from octavo.models.spec import DecoderSpec, GPTSpec, ModelSpec


class MatrixShape(NamedTuple):
    """`copies` weights [num_out, num_in], with or without a bias."""

    num_out: int
    num_in: int
    bias: bool
    copies: int


def matrices(spec: ModelSpec) -> Iterator[MatrixShape]:
    """The matrices of all layers, without embeddings and head."""
    hidden, inner, layers = spec.hidden_size, spec.intermediate_size, spec.num_layers
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if isinstance(spec, DecoderSpec):
        yield MatrixShape(q_size + 2 * kv_size, hidden, spec.qkv_bias, layers)
        yield MatrixShape(hidden, q_size, spec.o_bias, layers)
        yield MatrixShape(2 * inner, hidden, spec.mlp_bias, layers)
        yield MatrixShape(hidden, inner, spec.mlp_bias, layers)
    else:
        assert isinstance(spec, GPTSpec)
        for num_out, num_in in ((3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)):
            yield MatrixShape(num_out, num_in, spec.bias, layers)


def num_params(spec: ModelSpec) -> int:
    """Number of parameters; a tied head counts once."""
    dense = sum(m.copies * (m.num_out * m.num_in + m.bias * m.num_out) for m in matrices(spec))
    return dense + _num_in_vocabulary(spec) + _num_in_norms(spec) + _num_other(spec)


def weight_bytes(spec: ModelSpec, itemsize: int, *, int8: bool = False) -> int:
    """Bytes of the weights in a dtype of `itemsize` bytes; int8: matrices quantised to int8, on a CPU."""
    norm_itemsize = 4 if spec.unit_offset_norms else itemsize
    total = num_params(spec) * itemsize + _num_in_norms(spec) * (norm_itemsize - itemsize)
    if int8:  # and 8 bytes an output: a scale, and what oneDNN may keep
        packed = [(m.num_out, m.num_in, m.copies) for m in matrices(spec)]
        packed.append((spec.vocab_size, _embedding_size(spec), 1))
        total -= sum(copies * num_out * (num_in * (itemsize - 1) - 8) for num_out, num_in, copies in packed)
    return total


def _embedding_size(spec: ModelSpec) -> int:
    return spec.embedding_size if isinstance(spec, GPTSpec) else spec.hidden_size


def _num_in_vocabulary(spec: ModelSpec) -> int:
    return spec.vocab_size * _embedding_size(spec) * (1 if spec.tie_word_embeddings else 2)


def _num_in_norms(spec: ModelSpec) -> int:
    if isinstance(spec, DecoderSpec):
        per_layer = (2 + len(spec.names.post_norms)) * spec.hidden_size + 2 * spec.qk_norm * spec.head_dim
        return spec.num_layers * per_layer + spec.hidden_size
    assert isinstance(spec, GPTSpec)
    return spec.norm_weights * 2 * spec.hidden_size * (2 * spec.num_layers + spec.final_norm)


def _num_other(spec: ModelSpec) -> int:
    """Learned positions, and the projections between embedding_size and hidden_size."""
    if not isinstance(spec, GPTSpec):
        return 0
    positions = (spec.max_position_embeddings + spec.position_offset) * spec.hidden_size
    return positions + 2 * spec.hidden_size * spec.embedding_size * (spec.embedding_size != spec.hidden_size)
