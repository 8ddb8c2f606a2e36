"""Cascade attention: decode of sequences with a shared prefix, which is read once or by each sequence.

    PYTHONPATH=src python benchmarks/kernels/bench_cascade.py [--tune]

Needs a CUDA device. Microseconds for each layer, from replays of a CUDA graph over all layers of a model, with blocks
of 16 in shuffled order: without and with cascade attention, and the speed-up. With --tune, also other tunings.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial

import torch
from gpu_check import DEVICE, error_of, graph_us

from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.cascade import CascadeTuning, cascade_tuning
from octavo.kernels.triton.attention.decode import decode_attention

HEADS = [(14, 2, 64, 24), (16, 8, 128, 28), (32, 8, 128, 32)]
"""Qwen2.5-0.5B, Qwen3-0.6B and Llama-3.1-8B: query heads, K/V heads, head_dim, layers."""
BLOCK_SIZE = 16


@dataclass
class Load:
    """num_groups of `size` sequences; a group shares `common` tokens, and each sequence has `own` further tokens."""

    num_groups: int
    size: int
    common: int
    own: int

    @property
    def seq_lens(self) -> list[int]:
        return [self.common + self.own] * (self.num_groups * self.size)

    def batch(self) -> RaggedBatch:
        num_common, num_own = self.common // BLOCK_SIZE, cdiv(self.own, BLOCK_SIZE)
        ids = iter((torch.randperm(self.num_blocks) + 1).tolist())
        tables, common_prefix_lens = [], []
        for _ in range(self.num_groups):
            shared = [next(ids) for _ in range(num_common)]
            tables += [shared + [next(ids) for _ in range(num_own)] for _ in range(self.size)]
            common_prefix_lens += [0] + [self.common] * (self.size - 1)
        batch = RaggedBatch.from_lists([1] * len(tables), self.seq_lens, tables, BLOCK_SIZE, device=DEVICE)
        return replace(batch, common_prefix_lens=torch.tensor(common_prefix_lens, dtype=torch.int32, device=DEVICE))

    @property
    def num_blocks(self) -> int:
        return self.num_groups * (self.common // BLOCK_SIZE + self.size * cdiv(self.own, BLOCK_SIZE))


LOADS = {
    "256 share 2,048, 64 own": Load(1, 256, 2048, 64),
    "256 share 512, 1,000 own": Load(1, 256, 512, 1000),
    "64 share 2,048, 500 own": Load(1, 64, 2048, 500),
    "16 share 1,024, 200 own": Load(1, 16, 1024, 200),
    "64 x 4 share 512, 64 own": Load(64, 4, 512, 64),
    "8 x 32 share 1,024, 300 own": Load(8, 32, 1024, 300),
    "256 share nothing, 1,000 own": Load(256, 1, 0, 1000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--heads", type=int, choices=range(len(HEADS)), help="time only this model")
    args = parser.parse_args()
    for shape in HEADS if args.heads is None else [HEADS[args.heads]]:
        for name, load in LOADS.items():
            base, us, *others = times(load, *shape, tune=args.tune)
            print(f"{name:30} {'{}/{}x{}'.format(*shape):9} {base:8.1f} {us:8.1f} {base / us:6.2f} ", end="")
            print(*(f"{x:7.1f}" for x in others), flush=True)


def times(load: Load, num_heads: int, kv_heads: int, head_dim: int, num_layers: int, *, tune: bool) -> list[float]:
    """Microseconds without cascade attention, with it, and with other tunings of it."""
    layers = min(num_layers, int(100e9) // (load.num_blocks * kv_heads * BLOCK_SIZE * head_dim * 4))
    pool = (load.num_blocks + 1, layers, 2, kv_heads, BLOCK_SIZE, head_dim)
    kv = torch.randn(pool, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(len(load.seq_lens), num_heads, head_dim, device=DEVICE, dtype=torch.bfloat16)
    lse, shared_batch = q.new_empty(0, dtype=torch.float32), load.batch()
    separate_batch = replace(shared_batch, common_prefix_lens=None)

    def attend(batch: RaggedBatch, tuning: CascadeTuning | None, layer: int, out: torch.Tensor) -> None:
        decode_attention(q, kv[:, layer], batch, out, lse, scale=0.1, window=0, decode_only=True, cascade=tuning)

    def time(batch: RaggedBatch, tuning: CascadeTuning | None = None) -> float:
        batch, out = replace(batch, derived={}), torch.empty_like(q)
        return graph_us([partial(attend, batch, tuning, layer, out) for layer in range(layers)])

    expected, out = (torch.full_like(q, torch.nan) for _ in range(2))
    for layer in (0, layers - 1):
        attend(separate_batch, None, layer, expected)
        attend(shared_batch, None, layer, out)
        assert (error := error_of(out, expected)) < 5e-3, error
    return [
        time(separate_batch),
        time(shared_batch),
        *(time(shared_batch, tuning) for tuning in (variants(cascade_tuning(q)) if tune else ())),
    ]


def variants(tuning: CascadeTuning) -> list[CascadeTuning]:
    return [
        replace(tuning, num_stages=3, programs_per_multiprocessor=1),
        replace(tuning, programs_per_multiprocessor=1),
        replace(tuning, tile=32, programs_per_multiprocessor=3),
        replace(tuning, rows=128, num_warps=8, programs_per_multiprocessor=1),
        replace(tuning, rows=16),
        replace(tuning, min_prefix_len=128),
        replace(tuning, min_prefix_len=512),
    ]


if __name__ == "__main__":
    main()
