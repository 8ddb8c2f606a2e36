"""Gated DeltaNets against Transformers': ragged batches, with states in shuffled blocks of the pool."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as transformers_model

from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch
from tests.kernels.pool import BOTH, relative_error

WIDTH = 37
"""Numbers of a block: no range begins or ends with a block."""
BATCHES = {  # (query_len, seq_len) of each sequence
    "prompts": [(5, 5), (130, 130), (1, 1), (64, 64)],
    "chunks": [(7, 19), (65, 66), (3, 3)],
    "decoding": [(1, 9), (1, 1), (1, 140)],
    "mixed": [(1, 9), (70, 200), (1, 2), (4, 4), (0, 0), (2, 3)],
}
DTYPES = {torch.float32: 2e-5, torch.float64: 1e-12}


class States:
    """States of sequences in a pool, whose other numbers are NaN. Every second sequence writes where it reads."""

    def __init__(self, slices: list[tuple[int, int]], first: int, size: int, dtype: torch.dtype) -> None:
        columns = cdiv(first + size, WIDTH) + 1
        ids = torch.randperm(2 * len(slices) * columns) + 1
        lens, seq_lens = zip(*slices, strict=True)
        tables = [[1 + s] * 20 for s in range(len(slices))]
        batch = RaggedBatch.from_lists(lens, seq_lens, tables, 16)
        self.reads, self.tables = ids.int().view(2, len(slices), columns)
        self.reads[::2] = self.tables[::2]
        self.batch = replace(batch, state_tables=self.tables, state_reads=self.reads)
        self.pool = torch.full((1 + len(ids), WIDTH), torch.nan, dtype=dtype)
        self.first, self.size = first, size
        self.before = torch.randn(len(slices), size, dtype=dtype)
        for s, (query_len, seq_len) in enumerate(slices):
            if query_len < seq_len:
                self.store(s, self.before[s])
            else:
                self.before[s] = 0

    def store(self, s: int, values: Tensor) -> None:
        self.before[s] = values
        line = self.pool[self.reads[s].long()].flatten()
        line[self.first : self.first + self.size] = values
        self.pool[self.reads[s].long()] = line.view(-1, WIDTH)

    def after(self, s: int) -> Tensor:
        """The state of a sequence; nothing around it was written."""
        written, read = (self.pool[tables[s].long()].flatten() for tables in (self.tables, self.reads))
        own = slice(self.first, self.first + self.size)
        around = torch.cat([written[: own.start], written[own.stop :]])
        assert around.isnan().all()
        kept = torch.nan_to_num(read[own])
        assert torch.equal(self.tables[s], self.reads[s]) or torch.equal(kept, self.before[s]), "it only reads there"
        return written[own]


def ranges(slices: list[tuple[int, int]]) -> list[slice]:
    ends = torch.tensor([0, *(n for n, _ in slices)]).cumsum(0).tolist()
    return [slice(a, b) for a, b in pairwise(ends)]


@BOTH
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slices", BATCHES.values(), ids=BATCHES)
def test_convolution(ops: ModuleType, slices: list[tuple[int, int]], dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    channels, num_tokens = 6, sum(n for n, _ in slices)
    states = States(slices, 40, (size - 1) * channels, dtype)
    x, weight = torch.randn(num_tokens, channels, dtype=dtype), torch.randn(channels, size, dtype=dtype)
    out = ops.causal_conv(x, weight, states.pool, 40, states.batch)
    for s, part in enumerate(ranges(slices)):
        inputs = torch.cat([states.before[s].view(size - 1, channels), x[part]])
        if len(x[part]):
            wanted = torch.nn.functional.conv1d(inputs.T, weight.unsqueeze(1), groups=channels).T
            assert relative_error(out[part], torch.nn.functional.silu(wanted)) < DTYPES[dtype]
            assert torch.equal(states.after(s).view(size - 1, channels), inputs[len(inputs) - size + 1 :])


@BOTH
@pytest.mark.parametrize("heads", [(2, 6), (3, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slices", BATCHES.values(), ids=BATCHES)
def test_recurrence(ops: ModuleType, slices: list[tuple[int, int]], dtype: torch.dtype, heads: tuple[int, int]) -> None:
    torch.manual_seed(len(slices))
    (num_keys, num_values), key_dim, value_dim = heads, 10, 7
    num_tokens = sum(n for n, _ in slices)
    states = States(slices, 5, num_values * key_dim * value_dim, dtype)
    q, k = torch.randn(2, num_tokens, num_keys, key_dim, dtype=dtype)
    v = torch.randn(num_tokens, num_values, value_dim, dtype=dtype)
    decay, beta = -torch.rand(num_tokens, num_values, dtype=dtype) * 3, torch.rand(num_tokens, num_values, dtype=dtype)
    out = ops.gated_delta_rule(q, k, v, decay, beta, states.pool, 5, states.batch)
    assert out.dtype == dtype
    for s, part in enumerate(ranges(slices)):
        if not len(q[part]):
            continue
        wanted, state = transformers_model.torch_recurrent_gated_delta_rule(
            *(x[part].unsqueeze(0).float() for x in (q, k, v, decay, beta)),
            initial_state=states.before[s].view(1, num_values, key_dim, value_dim).float(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        assert relative_error(out[part].float(), wanted[0]) < DTYPES[torch.float32]
        assert relative_error(states.after(s).float(), state.flatten()) < DTYPES[torch.float32]


@pytest.mark.parametrize("slices", BATCHES.values(), ids=BATCHES)
def test_chunks_are_the_recurrence_in_float64(slices: list[tuple[int, int]]) -> None:
    """Also with decays of any size: none at all, and nearly everything at once."""
    from octavo.kernels import reference
    from octavo.kernels.cpu import ops as cpu

    torch.manual_seed(3)
    num_tokens = sum(n for n, _ in slices)
    q, k, v = torch.randn(3, num_tokens, 4, 8, dtype=torch.float64)
    decay = -torch.tensor([0.0, 1e-3, 1.0, 900.0], dtype=torch.float64).expand(num_tokens, 4)
    beta = torch.rand(num_tokens, 4, dtype=torch.float64)
    found = []
    for ops in (reference, cpu):
        torch.manual_seed(4)
        states = States(slices, 3, 4 * 8 * 8, torch.float64)
        out = ops.gated_delta_rule(q, k, v, decay, beta, states.pool, 3, states.batch)
        found.append(torch.cat([out.flatten(), *(states.after(s) for s, (n, _) in enumerate(slices) if n)]))
    assert relative_error(*found) < 1e-12
