"""Chunks of positions of a Gated DeltaNet, in Triton.

With G the sums of `decay` from a chunk's begin on, D[i, j] = exp(G[i] - G[j]) and q and k normalised, the vectors U
that a chunk adds to S solve one triangular system, and all its positions are computed by matrix products:

    (I + A) U = beta (V - exp(G) K S)    A = beta D K K^T, below the diagonal
    O = exp(G) Q S + (D Q K^T) U         S <- exp(G[-1]) S + (exp(G[-1] - G) K)^T U

`_prepare_chunks` computes what does not depend on S, for all chunks in parallel: (I + A)^-1 beta, D Q K^T up to the
diagonal, and factors of rows, so that the products with S have the numbers of q and k themselves. `_walk_chunks` keeps
some columns of S in registers and goes through the chunks of a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference.recurrent import L2_EPS
from octavo.kernels.triton.launch import pdl_options, wait_for_predecessor
from octavo.kernels.triton.recurrent.layout import count_tiles, find_tile, first_tile, has_whole_rows, max_tiles, places

MAX_CHUNK, STEPS = 64, 8
"""Most positions of a chunk, and of a last chunk that is computed position by position instead."""
KEY_BYTES = 16384
"""Of a chunk's keys, which lie in shared memory with the queries: wide keys have shorter chunks."""
STRIP = 32
"""Columns of a state that a program keeps in registers."""


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """Arguments of `reference.gated_delta_rule`, and its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    states: Tensor
    first: int
    batch: RaggedBatch
    out: Tensor

    @property
    def of_tokens(self) -> tuple[Any, ...]:
        """What the kernels know of q, k and the batch."""
        return self.q, self.k, self.decay, self.beta, self.batch.query_start, self.q.stride(0), self.k.stride(0)

    @property
    def of_states(self) -> tuple[Any, ...]:
        """What they know of v, the states and the output."""
        tables, reads = self.batch.state_tables, self.batch.state_reads
        assert tables is not None and reads is not None and reads.stride() == tables.stride()
        strides = self.v.stride(0), tables.stride(0)
        return self.v, self.states, tables, reads, self.batch.seq_lens, self.out, self.first, *strides

    @property
    def padded_key_dim(self) -> int:
        return max(16, int(triton.next_power_of_2(self.k.shape[2])))

    @property
    def chunk(self) -> int:
        """Positions of a chunk, which divides `MAX_CHUNK`. Keys are multiplied in bfloat16 or in float32."""
        row_bytes = self.padded_key_dim * (2 if self.k.dtype == torch.bfloat16 else 4)
        return max(16, min(MAX_CHUNK, KEY_BYTES // row_bytes))

    @property
    def key_sizes(self) -> dict[str, Any]:
        num_heads, key_dim = self.v.shape[1], self.k.shape[2]
        return {
            "CHUNK": self.chunk,
            "NUM_HEADS": num_heads,
            "GROUP": num_heads // self.q.shape[1],
            "KEY_DIM": key_dim,
            "KEYS": self.padded_key_dim,
            "SCALE": key_dim**-0.5,
            **pdl_options(self.v.device),
        }

    @property
    def sizes(self) -> dict[str, Any]:
        value_dim = self.v.shape[2]
        return self.key_sizes | {
            "VALUE_DIM": value_dim,
            "STRIP": max(16, min(STRIP, triton.next_power_of_2(value_dim))),
            "WIDTH": self.states.shape[1],
            "WHOLE_ROWS": has_whole_rows(self.states, self.first, value_dim),
        }

    @property
    def num_strips(self) -> int:
        return cdiv(self.v.shape[2], STRIP)


def delta_chunks(inputs: DeltaInputs) -> None:
    """Compute all chunks but last ones of at most `STEPS` positions."""
    num_heads, batch = inputs.v.shape[1], inputs.batch
    num_chunks = max_tiles(batch, inputs.chunk, STEPS)
    shape = num_chunks, num_heads, 4, inputs.chunk
    factors = torch.empty(shape, dtype=torch.float32, device=inputs.v.device)
    # One number in float32, or two in bfloat16.
    squares = torch.empty(2, *shape[:2], inputs.chunk**2, dtype=torch.float32, device=inputs.v.device)
    solution, scores = squares.view(torch.bfloat16 if inputs.k.dtype == torch.bfloat16 else torch.float32)
    _prepare_chunks[(num_chunks, num_heads)](
        *inputs.of_tokens, solution, scores, factors, batch.num_seqs, **inputs.key_sizes, num_warps=4
    )
    _walk_chunks[(inputs.num_strips * num_heads, batch.num_seqs)](
        *inputs.of_tokens, *inputs.of_states, solution, scores, factors, **inputs.sizes, num_warps=4, num_stages=1
    )


@triton.jit
def _load_heads(x, token, end, stride, head, KEY_DIM: tl.constexpr, KEYS: tl.constexpr):
    """A head of Q or K of some tokens of a slice, [tokens, KEYS]."""
    column = tl.arange(0, KEYS)
    ptrs = x + token.to(tl.int64)[:, None] * stride + head * KEY_DIM + column[None, :]
    return tl.load(ptrs, mask=(token < end)[:, None] & (column < KEY_DIM)[None, :], other=0.0)


@triton.jit
def _inverse_length(heads):
    wide = heads.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + EPS)


@triton.jit
def _product(a, b):
    """Of a in bfloat16: with the two parts of b, whose rest is below 1e-5 of it. Else in float32."""
    if a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        return tl.dot(a, high) + tl.dot(a, (b - high).to(tl.bfloat16))
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")


@triton.jit
def _store_square(ptr, at, values, CHUNK: tl.constexpr):
    """Store a matrix of a chunk; for products in bfloat16 as the sum of two."""
    high = values.to(ptr.dtype.element_ty)
    tl.store(ptr + at, high)
    if ptr.dtype.element_ty == tl.bfloat16:
        tl.store(ptr + at + CHUNK * CHUNK, (values - high).to(tl.bfloat16))


@triton.jit
def _square_product(ptr, at, b, CHUNK: tl.constexpr):
    """The product of a stored matrix with b. That of both low parts is left out."""
    square = _product(tl.load(ptr + at), b)
    if ptr.dtype.element_ty == tl.bfloat16:
        square += tl.dot(tl.load(ptr + at + CHUNK * CHUNK), b.to(tl.bfloat16))
    return square


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr):
    """(I + lower)^-1 of a matrix that is zero above and on the diagonal.

    The inverses of two neighbouring diagonal blocks, X and Y, give that of both: [[X, 0], [-Y L X, Y]]. As a whole
    matrix: T - T L T, where L is what lies between the blocks.
    """
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -lower, 0.0))  # of blocks of two
    size = 2
    while size < CHUNK:
        is_between = (i // size != j // size) & (i // (2 * size) == j // (2 * size))
        inverse -= _product(inverse, _product(tl.where(is_between, lower, 0.0), inverse))
        size *= 2
    return inverse


@triton.jit(do_not_specialize=["num_seqs"])
def _prepare_chunks(
    q,
    k,
    decay,
    beta,
    query_start,
    q_stride,
    k_stride,
    solution,
    scores,
    factors,
    num_seqs,
    CHUNK: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """A head of V in one chunk: `solution` and `scores` [CHUNK, CHUNK], `factors` [4, CHUNK].

    The factors are exp(G), that of a row of K, that of a row of Q, and exp(G[-1] - G) of a row of K.
    """
    wait_for_predecessor(USE_PDL)
    sequence, chunk = find_tile(query_start, num_seqs, tl.program_id(0), CHUNK, SKIP)
    head = tl.program_id(1)
    if sequence < num_seqs:
        begin = tl.load(query_start + sequence) + chunk * CHUNK
        i = tl.arange(0, CHUNK)
        token = begin + i
        end = tl.load(query_start + sequence + 1)
        ks = _load_heads(k, token, end, k_stride, head // GROUP, KEY_DIM, KEYS)
        qs = _load_heads(q, token, end, q_stride, head // GROUP, KEY_DIM, KEYS)
        k_scale, q_scale = _inverse_length(ks), _inverse_length(qs) * SCALE
        own = (tl.program_id(0) * NUM_HEADS + head).to(tl.int64) * CHUNK
        of_token = token.to(tl.int64) * NUM_HEADS + head
        decays = tl.load(decay + of_token, mask=token < end, other=0.0)
        following = tl.load(decay + of_token + NUM_HEADS, mask=(i + 1 < CHUNK) & (token + 1 < end), other=0.0)
        since = tl.exp(tl.cumsum(decays, 0))
        tl.store(factors + own * 4 + i, since)
        tl.store(factors + own * 4 + CHUNK + i, since * k_scale)
        tl.store(factors + own * 4 + 2 * CHUNK + i, since * q_scale)
        tl.store(factors + own * 4 + 3 * CHUNK + i, tl.exp(tl.cumsum(following, 0, reverse=True)) * k_scale)
        # The decay from j to i as a sum of what lies between: the difference of two large sums is inexact.
        is_below = i[:, None] > i[None, :]
        between = tl.cumsum(tl.where(is_below, decays[:, None], 0.0), 0)
        between = tl.where(i[:, None] >= i[None, :], tl.exp(between), 0.0) * k_scale[None, :]
        PARTS: tl.constexpr = 4 // (scores.dtype.element_ty.primitive_bitwidth // 8)
        square = own * (CHUNK * PARTS) + i[:, None] * CHUNK + i[None, :]
        products = tl.dot(qs, tl.trans(ks), input_precision="tf32x3") * q_scale[:, None] * between
        _store_square(scores, square, products, CHUNK)
        betas = tl.load(beta + of_token, mask=token < end, other=0.0)
        lower = tl.dot(ks, tl.trans(ks), input_precision="tf32x3") * (k_scale * betas)[:, None] * between
        inverse = _inverse(tl.where(is_below, lower, 0.0), CHUNK)
        _store_square(solution, square, inverse * betas[None, :], CHUNK)


@triton.jit(do_not_specialize=["table_stride"])
def _walk_chunks(
    q,
    k,
    decay,
    beta,
    query_start,
    q_stride,
    k_stride,
    v,
    states,
    tables,
    reads,
    seq_lens,
    out,
    first,
    v_stride,
    table_stride,
    solution,
    scores,
    factors,
    CHUNK: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    STRIP: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """STRIP columns of a head's state, through the chunks of one slice."""
    wait_for_predecessor(USE_PDL)
    head = tl.program_id(0) % NUM_HEADS
    sequence = tl.program_id(1)
    begin = tl.load(query_start + sequence)
    end = tl.load(query_start + sequence + 1)
    num_chunks = count_tiles(end - begin, CHUNK, SKIP)
    if num_chunks > 0:
        own = first_tile(query_start, sequence, CHUNK, SKIP).to(tl.int64) * NUM_HEADS + head
        column = tl.program_id(0) // NUM_HEADS * STRIP + tl.arange(0, STRIP)
        is_column = (column < VALUE_DIM)[None, :]
        table = tables + sequence * table_stride
        before = reads + sequence * table_stride
        at, is_state = strip_places(before, first, head, column, is_column, KEY_DIM, KEYS, VALUE_DIM, WIDTH, WHOLE_ROWS)
        has_state = tl.load(seq_lens + sequence) > end - begin
        state = tl.load(states + at, mask=is_state & has_state, other=0.0)
        i = tl.arange(0, CHUNK)
        square = i[:, None] * CHUNK + i[None, :]
        PARTS: tl.constexpr = 4 // (scores.dtype.element_ty.primitive_bitwidth // 8)
        solution += own * (CHUNK * CHUNK * PARTS)
        scores += own * (CHUNK * CHUNK * PARTS)
        factors += own * CHUNK * 4
        for chunk in range(num_chunks):
            token = begin + chunk * CHUNK + i
            mask = (token < end)[:, None] & is_column
            ks = _load_heads(k, token, end, k_stride, head // GROUP, KEY_DIM, KEYS)
            cell = token.to(tl.int64)[:, None] * v_stride + head * VALUE_DIM + column[None, :]
            vs = tl.load(v + cell, mask=mask, other=0.0).to(tl.float32)
            change = vs - _product(ks, state) * tl.load(factors + CHUNK + i)[:, None]
            added = _square_product(solution, square, change, CHUNK)
            qs = _load_heads(q, token, end, q_stride, head // GROUP, KEY_DIM, KEYS)
            outputs = _product(qs, state) * tl.load(factors + 2 * CHUNK + i)[:, None]
            outputs += _square_product(scores, square, added, CHUNK)
            cell = (token.to(tl.int64) * NUM_HEADS + head)[:, None] * VALUE_DIM + column[None, :]
            tl.store(out + cell, outputs.to(out.dtype.element_ty), mask=mask)
            rest = tl.load(factors + 3 * CHUNK + i)
            # Triton 3.6 computes other numbers from a transposed operand in shared memory.
            row = tl.arange(0, KEYS)
            cell = k + token.to(tl.int64)[None, :] * k_stride + head // GROUP * KEY_DIM + row[:, None]
            columns = tl.load(cell, mask=(token < end)[None, :] & (row < KEY_DIM)[:, None], other=0.0)
            state = state * tl.load(factors + CHUNK - 1) + _product(columns, added * rest[:, None])
            solution += NUM_HEADS * CHUNK * CHUNK * PARTS
            scores += NUM_HEADS * CHUNK * CHUNK * PARTS
            factors += NUM_HEADS * CHUNK * 4
        at, is_state = strip_places(table, first, head, column, is_column, KEY_DIM, KEYS, VALUE_DIM, WIDTH, WHOLE_ROWS)
        tl.store(states + at, state, mask=is_state)


@triton.jit
def strip_places(table, first, head, column, is_column, KEY_DIM: tl.constexpr, KEYS: tl.constexpr,
                 VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, WHOLE_ROWS: tl.constexpr):  # fmt: skip
    """`places` of some columns of a head's state, and which of them exist, [KEYS, columns]."""
    row = tl.arange(0, KEYS)
    is_state = (row < KEY_DIM)[:, None] & is_column
    number = first + (head * KEY_DIM + row) * VALUE_DIM
    return places(table, number, column, is_state, WIDTH, WHOLE_ROWS), is_state


SKIP = tl.constexpr(STEPS)
EPS = tl.constexpr(L2_EPS)
