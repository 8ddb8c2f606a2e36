"""Random inputs of the recurrent operations, whose states lie in a pool that is NaN elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.kernels.triton import ops as cuda
from tests.kernels.reference.test_recurrent import BATCHES, States
from tests.kernels.triton.device import DEVICE, DTYPES, on_device

Slices = list[tuple[int, int]]
"""(query_len, seq_len) of each sequence."""
CASES = [(name, torch.float32) for name in BATCHES] + [("mixed", dtype) for dtype in DTYPES[1:]]
"""Of `BATCHES`, with each dtype: an interpreter has no time for all."""
DECAYS = [0.0, 1e-3, 1.0, 900.0]
FIRST = 5


def run(operation: Callable[..., Tensor], inputs: tuple[Tensor, ...], states: States) -> Tensor:
    """The output of an operation on the kernels' device; the pool is written in place."""
    tables, reads = states.tables.to(DEVICE), states.reads.to(DEVICE)
    pool, batch = states.pool.to(DEVICE), replace(on_device(states.batch), state_tables=tables, state_reads=reads)
    out = operation(*(x.to(DEVICE) for x in inputs), pool, states.first, batch)
    states.pool.copy_(pool)
    return out.cpu()


@dataclass
class DeltaCase:
    """Inputs of `gated_delta_rule`: q, k, v, decay, beta. A head's decays are mixed, from none at all to everything."""

    inputs: tuple[Tensor, ...]

    @classmethod
    def random(
        cls, num_tokens: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype = torch.float32
    ) -> DeltaCase:
        q, k = torch.randn(2, num_tokens, heads[0], dims[0])
        k = k + torch.randn(heads[0], dims[0])  # neighbours are alike
        v = torch.randn(num_tokens, heads[1], dims[1])
        decay = -torch.tensor(DECAYS)[torch.randint(4, (num_tokens, heads[1]))] * torch.rand(num_tokens, heads[1])
        decay *= torch.rand(num_tokens, heads[1]) < 0.3
        decay[:, 0] = -900.0
        return cls((q.to(dtype), k.to(dtype), v.to(dtype), decay, torch.rand(num_tokens, heads[1])))

    @property
    def state_size(self) -> int:
        _, k, v, *_ = self.inputs
        return v.shape[1] * k.shape[2] * v.shape[2]

    def states(self, slices: Slices) -> States:
        """The same for the same slices."""
        torch.manual_seed(9)
        return States(slices, FIRST, self.state_size, torch.float32)

    def part(self, tokens: slice) -> DeltaCase:
        return DeltaCase(tuple(x[tokens] for x in self.inputs))

    def __call__(self, states: States, operation: Callable[..., Tensor] = cuda.gated_delta_rule) -> Tensor:
        return run(operation, self.inputs, states)
