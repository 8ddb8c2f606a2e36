"""Attention over a paged pool on the CPU: `python benchmarks/kernels/bench_paged_attention.py [--threads N]`.

SmolLM2-135M's shape: 9 query heads, 3 K/V heads, head_dim 64, float32. Prints one line a case: the fast path, the
reference, and the rate at which the fast path reads K and V. Calls go round over several layers, as in a model, so
that one layer's K and V are not in the caches when its turn comes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import cycle
from types import ModuleType

import torch
from timing import best_us

from octavo.kernels import cpu, reference
from octavo.kernels.batch import RaggedBatch

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 9, 3, 64, 16, 8


def case(query_lens: list[int], seq_lens: list[int]) -> tuple[torch.Tensor, torch.Tensor, RaggedBatch]:
    """(q, pool, batch) of sequences whose blocks are strewn over the pool."""
    num_blocks = [-(-n // BLOCK_SIZE) for n in seq_lens]
    ids = iter((torch.randperm(sum(num_blocks)) + 1).tolist())
    tables = [[next(ids) for _ in range(n)] for n in num_blocks]
    kv = torch.randn(sum(num_blocks) + 1, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    q = torch.randn(sum(query_lens), NUM_HEADS, HEAD_DIM)
    return q, kv, RaggedBatch.from_lists(query_lens, seq_lens, tables, BLOCK_SIZE)


def attention(ops: ModuleType, q: torch.Tensor, kv: torch.Tensor, batch: RaggedBatch) -> Callable[[], torch.Tensor]:
    layers = cycle(range(NUM_LAYERS))
    return lambda: ops.paged_attention(q, kv[:, next(layers)], batch, scale=HEAD_DIM**-0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    cases = {f"decode {b} x {n}": ([1] * b, [n] * b) for b in (1, 8, 20) for n in (256, 1024)}
    cases["decode 20 ragged 50-1000"] = ([1] * 20, [50 * i for i in range(1, 21)])
    cases["prefill 512"] = ([512], [512])
    cases["prefill 20 x 32"] = ([32] * 20, [32] * 20)
    cases["chunk 512 at 512"] = ([512], [1024])
    cases["mixed: 64 at 448, 8 decodes of 512"] = ([64] + [1] * 8, [512] * 9)
    print(f"{torch.get_num_threads()} threads{'':36}{'cpu us':>10}{'reference us':>14}{'GB/s':>8}")
    for name, (query_lens, seq_lens) in cases.items():
        q, kv, batch = case(query_lens, seq_lens)
        fast = best_us(attention(cpu, q, kv, batch))
        slow = best_us(attention(reference, q, kv, batch), repeats=5)
        kv_bytes = 2 * sum(seq_lens) * NUM_KV_HEADS * HEAD_DIM * kv.element_size()
        print(f"{name:44}{fast:>11.0f}{slow:>14.0f}{kv_bytes / fast / 1e3:>8.1f}")


if __name__ == "__main__":
    main()
