"""Decode attention over K and V in float8 and bfloat16 on a GPU: `python benchmarks/kernels/bench_decode.py [--sweep]`.

Llama-3-8B's shape: 32 query heads, 8 K/V heads, head_dim 128. Microseconds of a layer, from replays of a CUDA graph
over several layers, so that a layer's K and V have left the cache. --sweep: the fastest tunings of float8
"""

from __future__ import annotations

import itertools
import sys

import torch
from timing import best_us

from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.decode import decode_attention
from octavo.kernels.triton.attention.decode_schedule import DecodeTuning, decode_tuning

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
CASES = ((1, 32768), (8, 32768), (16, 32768), (64, 8192), (256, 2048))


def case(num_seqs: int, seq_len: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, RaggedBatch]:
    per_seq, num_layers = cdiv(seq_len, BLOCK_SIZE), 4 if num_seqs > 1 else 8
    ids = (torch.randperm(num_seqs * per_seq, device="cpu") + 1).view(num_seqs, per_seq).tolist()
    kv = torch.empty(
        num_seqs * per_seq + 1, num_layers, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype, device="cuda"
    )
    for layer in range(num_layers):
        kv[:, layer] = torch.randn(kv[:, layer].shape, dtype=torch.bfloat16, device="cuda").to(dtype)
    q = torch.randn(num_seqs, NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    lens = [1] * num_seqs, [seq_len] * num_seqs
    return q, kv, RaggedBatch.from_lists(*lens, ids, BLOCK_SIZE, device="cuda")


def layer_us(q: torch.Tensor, kv: torch.Tensor, batch: RaggedBatch, tuning: DecodeTuning | None = None) -> float:
    out, lse = torch.empty_like(q), torch.empty(0, device="cuda")
    scales = torch.full((2, NUM_KV_HEADS), 0.5, device="cuda") if kv.itemsize == 1 else None

    def run() -> None:
        for layer in range(kv.shape[1]):
            decode_attention(
                q, kv[:, layer], batch, out, lse, scale=0.1, window=0, decode_only=True, kv_scales=scales, tuning=tuning
            )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return best_us(graph.replay) / kv.shape[1]


def main() -> None:
    torch.set_grad_enabled(False)
    torch.set_default_device("cuda")  # that `best_us` waits for
    for num_seqs, seq_len in CASES:
        times = {}
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            q, kv, batch = case(num_seqs, seq_len, dtype)
            times[dtype] = layer_us(q, kv, batch)
        plain, small = times.values()
        rate = num_seqs * seq_len * 2 * NUM_KV_HEADS * HEAD_DIM / small / 1e3
        print(
            f"{num_seqs:4} x {seq_len:6}: bf16 {plain:8.1f}, e4m3 {small:8.1f} us, {small / plain:.2f}, {rate:.0f} GB/s"
        )
        if "--sweep" not in sys.argv:
            continue
        found = []
        for tile, warps, stages, programs in itertools.product((32, 64, 128), (1, 2, 4), (2, 3, 4), (2, 4, 6)):
            try:
                us = layer_us(q, kv, batch, DecodeTuning(tile, warps, stages, programs, 1))
            except Exception as error:  # too much shared memory
                print(f"  {tile} {warps} {stages} {programs}: {str(error)[:60]}")
                continue
            found.append((us, tile, warps, stages, programs))
        best = (f"| {us:.1f} {rest}" for us, *rest in sorted(found)[:5])
        print("   default", decode_tuning(q, num_seqs), *best, flush=True)


if __name__ == "__main__":
    main()
