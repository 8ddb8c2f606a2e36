"""Gated DeltaNets on the CPU: slices of one position together, long ones in chunks, by matrix products."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference.norms import accumulation_dtype
from octavo.kernels.reference.recurrent import delta_rule_step, normalised_heads, read_state, write_state

CHUNK = 64
"""Positions that one set of products computes."""


def causal_conv(x: Tensor, weight: Tensor, states: Tensor, first: int, batch: RaggedBatch) -> Tensor:
    """See `reference.causal_conv`. The inputs of a tap follow each other, so nothing is gathered."""
    (num_channels, size), dtype = weight.shape, accumulation_dtype(x.dtype)
    taps, query_start = weight.to(dtype).T, batch.query_start.tolist()
    before = read_state(states, batch, first, (size - 1) * num_channels).to(dtype)
    before = before.view(len(query_start) - 1, size - 1, num_channels)
    if query_start == list(range(len(before) + 1)):  # one position each: [num_seqs, size, num_channels]
        inputs = torch.cat((before, x.to(dtype).unsqueeze(1)), dim=1)
        out, after = torch.zeros_like(inputs[:, 0]), inputs[:, 1:]
        for tap in range(size):
            out.addcmul_(inputs[:, tap], taps[tap])
    else:
        out, after = x.new_zeros(x.shape, dtype=dtype), torch.empty_like(before)
        for sequence, (begin, end) in enumerate(pairwise(query_start)):
            inputs = torch.cat((before[sequence], x[begin:end].to(dtype)))
            for tap in range(size):
                out[begin:end].addcmul_(inputs[tap : tap + end - begin], taps[tap])
            after[sequence] = inputs[end - begin :]
    write_state(states, batch, first, after.flatten(1))
    return F.silu(out).to(x.dtype)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, first: int, batch: RaggedBatch
) -> Tensor:
    """See `reference.gated_delta_rule`. Slices of one position are computed together, longer ones one by one."""
    num_heads, key_dim, value_dim = v.shape[1], q.shape[2], v.shape[2]
    q, k = normalised_heads(q, num_heads) / key_dim**0.5, normalised_heads(k, num_heads)
    wide = v.to(q.dtype)
    state = read_state(states, batch, first, num_heads * key_dim * value_dim).to(q.dtype)
    state = state.view(-1, num_heads, key_dim, value_dim)
    out = torch.empty_like(wide)
    slices = list(enumerate(pairwise(batch.query_start.tolist())))
    single = torch.tensor([sequence for sequence, (begin, end) in slices if end == begin + 1], dtype=torch.int64)
    if len(single) == len(slices):
        out = delta_rule_step(q, k, wide, decay.exp(), beta, state)
    elif len(single):
        tokens, after = batch.query_start[single].long(), state[single]
        out[tokens] = delta_rule_step(q[tokens], k[tokens], wide[tokens], decay[tokens].exp(), beta[tokens], after)
        state[single] = after
    for sequence, (begin, end) in slices:
        for at in range(begin, end if end > begin + 1 else begin, CHUNK):
            part = slice(at, min(at + CHUNK, end))
            heads = [x[part].transpose(0, 1) for x in (q, k, wide, decay, beta)]
            out[part] = _chunk(heads, state[sequence]).transpose(0, 1)
    write_state(states, batch, first, state.flatten(1))
    return out.to(v.dtype)


def _chunk(heads: list[Tensor], state: Tensor) -> Tensor:
    """The positions of a chunk: q, k, v, decay and beta, [num_heads, num_positions, ...]. The state S is modified.

    With G the running sum of the decays, position i adds k_i u_i^T to the state, where

        u_i = beta_i (v_i - exp(G_i) S^T k_i - sum of exp(G_i - G_j) (k_i k_j) u_j over j < i)

    These are the solution of a triangular system (arXiv 2412.06464, section 3.3).
    """
    q, k, v, decay, beta = heads
    total = decay.cumsum(1)
    # [num_heads, i, j]: exp(G_i - G_j) for j <= i
    since = (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril()
    whole = total.exp().unsqueeze(2)
    system = beta.unsqueeze(2) * since * (k @ k.mT)  # its diagonal counts as 1
    added = beta.unsqueeze(2) * (v - whole * (k @ state))
    added = torch.linalg.solve_triangular(system, added, upper=False, unitriangular=True)
    out: Tensor = whole * (q @ state) + (since * (q @ k.mT)) @ added
    state *= whole[:, -1:]
    state += (k * since[:, -1].unsqueeze(2)).mT @ added
    return out
