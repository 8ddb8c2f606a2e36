"""KV caches for the kernels' tests: unused slots are NaN, and block ids are shuffled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels import reference
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.metadata import RaggedBatch, SamplingTensors

BOTH = pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
NUM_LAYERS = 2
LAYER = 1


@dataclass
class Case:
    """Inputs of one attention call, and K and V of each sequence without blocks.

    keys, values   [num_kv_heads, seq_len, head_dim] for each sequence
    sinks          see `reference.paged_attention`
    """

    q: Tensor
    kv: Tensor
    batch: RaggedBatch
    tables: list[list[int]]
    keys: list[Tensor]
    values: list[Tensor]
    scale: float
    sinks: Tensor | None = None

    @property
    def kv_layer(self) -> Tensor:
        return self.kv[:, LAYER]

    @property
    def double(self) -> Case:
        return replace(self, q=self.q.double(), kv=self.kv.double())


def make_case(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_kv_heads: int = 2,
    group_size: int = 3,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    int8_kv: bool = False,
    sinks: bool = False,
) -> Case:
    """A batch over a KV cache whose null block, unused blocks, unused slots and other layers are NaN.

    int8_kv: the cache is quantised, and `keys` and `values` are what it holds, in float32
    sinks: of which some take most of the weight, and some almost none
    """
    g = torch.Generator().manual_seed(seed)
    num_blocks = [cdiv(n, block_size) for n in seq_lens]
    pool_blocks = sum(num_blocks) + 3
    ids = iter((torch.randperm(pool_blocks, generator=g) + 1).tolist())
    tables = [[next(ids) for _ in range(n)] for n in num_blocks]
    kv = torch.full((pool_blocks + 1, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    keys, values = [], []
    for table, n in zip(tables, seq_lens, strict=True):
        rows = torch.randn(2, num_kv_heads, n, head_dim, generator=g).to(dtype)
        if int8_kv:
            rows = reference.dequantize_rows(reference.quantize_rows(rows), torch.float32)
        keys.append(rows[0])
        values.append(rows[1])
        for p in range(n):
            kv[table[p // block_size], LAYER, :, :, p % block_size] = rows[:, :, p]
    if int8_kv:
        kv = reference.quantize_rows(kv)
    q = torch.randn(sum(query_lens), num_kv_heads * group_size, head_dim, generator=g).to(dtype)
    batch = RaggedBatch.from_lists(query_lens, seq_lens, tables, block_size)
    num_heads = num_kv_heads * group_size
    each = torch.linspace(-3, 9, num_heads)[torch.randperm(num_heads, generator=g)] if sinks else None
    return Case(q, kv, batch, tables, keys, values, scale=head_dim**-0.5, sinks=each)


def settings_of(
    num_rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: Sequence[int] | None = None,
    sample_index: Sequence[int] | None = None,
    position: Sequence[int] | None = None,
    device: str = "cpu",
) -> SamplingTensors:
    """Parameters with the same filters for all rows; by default, row i has position i."""
    return SamplingTensors.from_lists(
        [temperature] * num_rows,
        [top_k] * num_rows,
        [top_p] * num_rows,
        [min_p] * num_rows,
        seed or [11] * num_rows,
        sample_index or [0] * num_rows,
        position or list(range(num_rows)),
        device=device,
    )


def naive_attention(case: Case, window: int = 0) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64 by the definition: one query and one head at a time, without blocks or batches."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    lse = torch.zeros(case.q.shape[:2], dtype=torch.float64)
    starts = case.batch.query_start.tolist()
    for s, seq_len in enumerate(case.batch.seq_lens.tolist()):
        for row in range(starts[s], starts[s + 1]):
            position = seq_len - (starts[s + 1] - row)
            first = max(0, position - window + 1) if window else 0
            for head in range(case.q.shape[1]):
                kv_head = head * case.keys[s].shape[0] // case.q.shape[1]
                keys = case.keys[s][kv_head, first : position + 1].double()
                values = case.values[s][kv_head, first : position + 1].double()
                scores = keys @ case.q[row, head].double() * case.scale
                if case.sinks is not None:  # one more key, whose value is 0
                    scores = torch.cat((scores, case.sinks[head : head + 1]))
                    values = torch.cat((values, torch.zeros_like(values[:1])))
                out[row, head] = scores.softmax(0) @ values
                lse[row, head] = scores.logsumexp(0)
    return out, lse


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference divided by the largest expected magnitude; NaN if anything is NaN."""
    return float((actual.double() - expected).abs().max() / expected.abs().max())


def norm_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference divided by the expected norm; NaN if anything is NaN."""
    return float((actual.double() - expected).norm() / expected.norm())
