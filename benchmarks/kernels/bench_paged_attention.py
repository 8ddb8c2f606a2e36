"""Attention over a paged pool on the CPU: `python benchmarks/kernels/bench_paged_attention.py [--threads N]`.

SmolLM2-135M's shape: 9 query heads, 3 K/V heads, head_dim 64, float32; the bandwidth counts K and V. Calls cycle over
several layers, as in a model, so a layer's K and V have left the caches when it is read again.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from types import ModuleType

import torch
from timing import compare, start

from octavo.integers import cdiv
from octavo.kernels import reference
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.metadata import RaggedBatch

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 9, 3, 64, 16, 8


def case(query_lens: list[int], seq_lens: list[int]) -> tuple[torch.Tensor, torch.Tensor, RaggedBatch]:
    """(q, pool, batch) of sequences with shuffled block ids."""
    num_blocks = [cdiv(n, BLOCK_SIZE) for n in seq_lens]
    ids = iter((torch.randperm(sum(num_blocks)) + 1).tolist())
    tables = [[next(ids) for _ in range(n)] for n in num_blocks]
    kv = torch.randn(sum(num_blocks) + 1, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    q = torch.randn(sum(query_lens), NUM_HEADS, HEAD_DIM)
    return q, kv, RaggedBatch.from_lists(query_lens, seq_lens, tables, BLOCK_SIZE)


def attention(ops: ModuleType, q: torch.Tensor, kv: torch.Tensor, batch: RaggedBatch) -> Callable[[], torch.Tensor]:
    layers = cycle(range(NUM_LAYERS))
    return lambda: ops.paged_attention(q, kv[:, next(layers)], batch, scale=HEAD_DIM**-0.5)


def main() -> None:
    start(__doc__, devices=["cpu"])
    cases = {f"decode {b} x {n}": ([1] * b, [n] * b) for b in (1, 8, 20) for n in (256, 1024)}
    cases["decode 20 ragged 50-1000"] = ([1] * 20, [50 * i for i in range(1, 21)])
    cases["prefill 512"] = ([512], [512])
    cases["prefill 20 x 32"] = ([32] * 20, [32] * 20)
    cases["chunk 512 at 512"] = ([512], [1024])
    cases["64 at 448 with 8 decodes of 512"] = ([64] + [1] * 8, [512] * 9)
    for name, (query_lens, seq_lens) in cases.items():
        q, kv, batch = case(query_lens, seq_lens)
        kv_bytes = 2 * sum(seq_lens) * NUM_KV_HEADS * HEAD_DIM * kv.element_size()
        compare(name, attention(cpu, q, kv, batch), attention(reference, q, kv, batch), num_bytes=kv_bytes)


if __name__ == "__main__":
    main()
