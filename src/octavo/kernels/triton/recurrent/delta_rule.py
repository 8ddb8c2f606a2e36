"""The recurrence of a Gated DeltaNet, in Triton: position by position, or in chunks of positions.

A slice is cut into chunks from its begin on. A last chunk of up to `STEPS` positions, such as a decode token, is
computed by `_delta_steps`, the others before it by `delta_chunks`. So the arithmetic of a chunk depends on its own
length: neither on the batch, nor on where a slice ends that was cut at a multiple of `MAX_CHUNK`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.launch import wait_for_predecessor
from octavo.kernels.triton.recurrent.delta_chunks import (
    EPS,
    STEPS,
    DeltaInputs,
    delta_chunks,
    strip_places,
)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, first: int, batch: RaggedBatch
) -> Tensor:
    """See `reference.gated_delta_rule`."""
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if len(v):
        assert all(x[0].is_contiguous() for x in (q, k, v))
        inputs = DeltaInputs(q, k, v, decay.contiguous(), beta.contiguous(), states, first, batch, out)
        if batch.max_query_len > STEPS:
            delta_chunks(inputs)
        grid = inputs.num_strips * v.shape[1], batch.num_seqs
        _delta_steps[grid](*inputs.of_tokens, *inputs.of_states, **inputs.sizes, num_warps=4)
    return out


@triton.jit(do_not_specialize=["table_stride"])
def _delta_steps(
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
    """STRIP columns of a head's state, through the positions of a slice's last chunk, if these are few."""
    wait_for_predecessor(USE_PDL)
    head = tl.program_id(0) % NUM_HEADS
    sequence = tl.program_id(1)
    end = tl.load(query_start + sequence + 1)
    length = end - tl.load(query_start + sequence)
    count = length % CHUNK
    if (count > 0) & (count <= MOST):
        column = tl.program_id(0) // NUM_HEADS * STRIP + tl.arange(0, STRIP)
        is_column = column < VALUE_DIM
        at, is_state = strip_places(tables + sequence * table_stride, first, head, column, is_column[None, :],
                                    KEY_DIM, KEYS, VALUE_DIM, WIDTH, WHOLE_ROWS)  # fmt: skip
        before = reads + sequence * table_stride
        if length > count:  # positions of this slice that were computed in chunks left a state where this one goes
            before = tables + sequence * table_stride
        source, _ = strip_places(before, first, head, column, is_column[None, :],
                                 KEY_DIM, KEYS, VALUE_DIM, WIDTH, WHOLE_ROWS)  # fmt: skip
        has_state = tl.load(seq_lens + sequence) > count
        state = tl.load(states + source, mask=is_state & has_state, other=0.0)
        row = tl.arange(0, KEYS)
        for step in range(count):
            i = (end - count + step).to(tl.int64)
            ks = _load_head(k + i * k_stride + head // GROUP * KEY_DIM, row, KEY_DIM)
            qs = _load_head(q + i * q_stride + head // GROUP * KEY_DIM, row, KEY_DIM) * SCALE
            vs = tl.load(v + i * v_stride + head * VALUE_DIM + column, mask=is_column, other=0.0).to(tl.float32)
            state *= tl.exp(tl.load(decay + i * NUM_HEADS + head))
            change = (vs - tl.sum(ks[:, None] * state, 0)) * tl.load(beta + i * NUM_HEADS + head)
            state += ks[:, None] * change[None, :]
            outputs = tl.sum(qs[:, None] * state, 0)
            out_ptrs = out + (i * NUM_HEADS + head) * VALUE_DIM + column
            tl.store(out_ptrs, outputs.to(out.dtype.element_ty), mask=is_column)
        tl.store(states + at, state, mask=is_state)


@triton.jit
def _load_head(x, column, KEY_DIM: tl.constexpr):
    """A normalised head of Q or K of one token."""
    values = tl.load(x + column, mask=column < KEY_DIM, other=0.0).to(tl.float32)
    return values * tl.rsqrt(tl.sum(values * values, 0) + EPS)


MOST = tl.constexpr(STEPS)
