"""Gated DeltaNet (arXiv 2412.06464): layers whose memory of a sequence is a state of fixed size.

The states of all these layers are one line of numbers, cut into blocks of the KV pool:

    state     | layer 0: convolution, S | layer 1: convolution, S | layer 2: convolution, S |      |
    blocks    |  state_tables[s, 0]  |  state_tables[s, 1]  |  state_tables[s, 2]  |  state_tables[s, 3]  |

`states` is the pool as such numbers, [num_blocks + 1, numbers of a block], float32 whatever the dtype of K and V. An
operation reads its own range, from `first` on, from the blocks of `state_reads`, and writes it to those of
`state_tables`. They may be the same. A sequence that starts at position 0 has the zero state.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.reference.norms import accumulation_dtype, rms_norm

L2_EPS = 1e-6
"""Added to the squared length of a head of Q and K before it is normalised."""


def causal_conv(x: Tensor, weight: Tensor, states: Tensor, first: int, batch: RaggedBatch) -> Tensor:
    """silu of a causal convolution of each channel with its own kernel -> [num_tokens, num_channels].

    x       [num_tokens, num_channels]
    weight  [num_channels, size], the last column for the token itself. The state is the `size - 1` inputs before the
            next token, [size - 1, num_channels]
    """
    (num_channels, size), query_start = weight.shape, batch.query_start.long()
    dtype, lens = accumulation_dtype(x.dtype), query_start.diff()
    before = read_state(states, batch, first, (size - 1) * num_channels).view(len(lens), size - 1, num_channels)
    sequence = torch.repeat_interleave(torch.arange(len(lens), device=x.device), lens)  # [num_tokens]
    # All inputs: those in a sequence's state, then its tokens, sequence by sequence.
    place = torch.arange(len(x), device=x.device) + (size - 1) * sequence  # of the first input of each token's sum
    inputs = torch.empty(len(x) + (size - 1) * len(lens), num_channels, dtype=dtype, device=x.device)
    column = torch.arange(size - 1, device=x.device)
    begin = query_start[:-1] + (size - 1) * torch.arange(len(lens), device=x.device)
    inputs[begin[:, None] + column] = before.to(dtype)
    inputs[place + size - 1] = x.to(dtype)
    out = torch.zeros(len(x), num_channels, dtype=dtype, device=x.device)
    for tap in range(size):
        out += inputs[place + tap] * weight[:, tap].to(dtype)
    write_state(states, batch, first, inputs[(begin + lens)[:, None] + column].flatten(1))
    return F.silu(out).to(x.dtype)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, first: int, batch: RaggedBatch
) -> Tensor:
    """The recurrence of a Gated DeltaNet, head by head -> o, in v's shape and dtype.

        S <- exp(decay) S;    S <- S + beta k (v - S^T k)^T;    o = S^T q / sqrt(key_dim)

    q, k         [num_tokens, num_key_heads, key_dim]; their heads are normalised first. Each serves
                 num_value_heads / num_key_heads heads of v, which are neighbours
    v            [num_tokens, num_value_heads, value_dim]
    decay, beta  [num_tokens, num_value_heads] in `accumulation_dtype`
    S, the state [num_value_heads, key_dim, value_dim]
    """
    num_heads, key_dim, value_dim = v.shape[1], q.shape[2], v.shape[2]
    q, k = normalised_heads(q, num_heads) / key_dim**0.5, normalised_heads(k, num_heads)
    wide, decay = v.to(q.dtype), decay.exp()
    state = read_state(states, batch, first, num_heads * key_dim * value_dim).to(q.dtype)
    state = state.view(-1, num_heads, key_dim, value_dim)
    out = torch.empty_like(wide)
    lens = batch.query_start.diff()
    order = torch.argsort(lens, descending=True, stable=True)  # the sequences that go on are the first ones
    state, begin = state[order], batch.query_start[order].long()
    for step, num in enumerate((lens > torch.arange(batch.max_query_len, device=v.device)[:, None]).sum(1).tolist()):
        tokens = begin[:num] + step
        out[tokens] = delta_rule_step(q[tokens], k[tokens], wide[tokens], decay[tokens], beta[tokens], state[:num])
    write_state(states, batch, first, state[torch.argsort(order)].flatten(1))
    return out.to(v.dtype)


def delta_gates(a: Tensor, b: Tensor, log_decay: Tensor, step_bias: Tensor) -> tuple[Tensor, Tensor]:
    """decay = -exp(log_decay) softplus(a + step_bias) and beta = sigmoid(b), in `accumulation_dtype`.

    a, b [num_tokens, num_heads]    log_decay, step_bias [num_heads]
    """
    dtype = accumulation_dtype(a.dtype)
    return -log_decay.exp() * F.softplus(a.to(dtype) + step_bias), b.to(dtype).sigmoid()


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """rms_norm of each head, times silu(gate); x [num_tokens, num_heads, size], gate [num_tokens, num_heads * size]."""
    dtype = accumulation_dtype(x.dtype)
    return (rms_norm(x, weight, eps).flatten(1).to(dtype) * F.silu(gate.to(dtype))).to(x.dtype)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate); x [num_tokens, size], gate [num_tokens, size] in x's dtype, or [num_tokens, 1] float32."""
    return x * gate.to(accumulation_dtype(x.dtype)).sigmoid().to(x.dtype)


def delta_rule_step(q: Tensor, k: Tensor, v: Tensor, factor: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One position of sequences, with normalised heads; state [num_seqs, num_heads, key_dim, value_dim] is modified."""
    state *= factor[..., None, None]
    found = (k.unsqueeze(-2) @ state).squeeze(-2)  # [num_seqs, num_heads, value_dim]
    state.addcmul_(k.unsqueeze(-1), (beta.unsqueeze(-1) * (v - found)).unsqueeze(-2))
    return (q.unsqueeze(-2) @ state).squeeze(-2)


def normalised_heads(x: Tensor, num_heads: int) -> Tensor:
    """Heads of length 1, repeated for `num_heads` heads, in `accumulation_dtype`."""
    x = x.to(accumulation_dtype(x.dtype))
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _parts(states: Tensor, first: int, size: int) -> Iterator[tuple[int, slice, slice]]:
    """The range [first, first + size) of a state, block by block: (column of the table, part of the block, of it)."""
    width, done = states.shape[1], 0
    while done < size:
        column, start = divmod(first + done, width)
        num = min(width - start, size - done)
        yield column, slice(start, start + num), slice(done, done + num)
        done += num


def read_state(states: Tensor, batch: RaggedBatch, first: int, size: int) -> Tensor:
    """A range of each sequence's state, [num_seqs, size]."""
    tables = batch.state_reads
    assert tables is not None
    values = states.new_empty(len(tables), size)
    for column, part, own in _parts(states, first, size):
        values[:, own] = states[:, part].index_select(0, tables[:, column])
    begins = batch.seq_lens <= batch.query_start.diff()
    return values.index_fill_(0, begins.nonzero().flatten(), 0.0)


def write_state(states: Tensor, batch: RaggedBatch, first: int, values: Tensor) -> None:
    """Replace it by values [num_seqs, size]."""
    assert batch.state_tables is not None
    for column, part, own in _parts(states, first, values.shape[1]):
        states[:, part].index_copy_(0, batch.state_tables[:, column].long(), values[:, own].to(states.dtype))
