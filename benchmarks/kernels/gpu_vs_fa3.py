"""Paged decode against FlashAttention-3, the two in one run on one GPU: one JSON line a shape, and their ratio.

FlashAttention-3 is taken as vLLM ships it: `vllm.vllm_flash_attn` must be importable (vLLM 0.26 for torch 2.11). Both
read bfloat16 from blocks of 16 in shuffled order, both plan their split on the device beforehand, and both are timed as
CUDA-graph replays. "hot" calls read the keys and values of one layer again and again, which stay in the L2 cache where
they are few; "cold" ones go round over layers, as a model does.

    PYTHONPATH=src python benchmarks/kernels/gpu_vs_fa3.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import torch
from gpu_check import COLD_BYTES, DEVICE, error_of, graph_us, make_batch
from torch import Tensor
from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

from octavo.kernels.batch import RaggedBatch
from octavo.kernels.paged_attention import paged_attention

BLOCK_SIZE = 16
HEADS = [(32, 8, 128), (16, 8, 128), (14, 2, 64), (32, 32, 128)]
MIXED = random.Random(0)
LOADS = {
    "1x1024": [1024],
    "1x8192": [8192],
    "8x1024": [1024] * 8,
    "32x1024": [1024] * 32,
    "64x4096": [4096] * 64,
    "256x1024": [1024] * 256,
    "256 mixed": [MIXED.randint(100, 2048) for _ in range(256)],
    "64 mixed": [MIXED.randint(100, 2048) for _ in range(64)],
}


def fa3(q: Tensor, keys: Tensor, values: Tensor, batch: RaggedBatch, out: Tensor) -> Callable[[], object]:
    """keys, values [num_blocks + 1, block_size, num_kv_heads, head_dim], contiguous, as vLLM lays them out."""
    starts = torch.arange(batch.num_seqs + 1, device=DEVICE, dtype=torch.int32)
    plan = get_scheduler_metadata(
        batch_size=batch.num_seqs,
        max_seqlen_q=1,
        max_seqlen_k=batch.max_seq_len,
        num_heads_q=q.shape[1],
        num_heads_kv=keys.shape[2],
        headdim=q.shape[2],
        cache_seqlens=batch.seq_lens,
        qkv_dtype=q.dtype,
        cu_seqlens_q=starts,
        page_size=BLOCK_SIZE,
        causal=True,
    )
    return lambda: flash_attn_varlen_func(
        q=q,
        k=keys,
        v=values,
        max_seqlen_q=1,
        cu_seqlens_q=starts,
        max_seqlen_k=batch.max_seq_len,
        seqused_k=batch.seq_lens,
        causal=True,
        block_table=batch.block_tables,
        fa_version=3,
        scheduler_metadata=plan,
        out=out,
    )


def compare(heads: tuple[int, int, int], load: str, lens: list[int]) -> dict[str, object]:
    num_heads, kv_heads, head_dim = heads
    num_blocks = sum(-(-n // BLOCK_SIZE) for n in lens)
    num_bytes = 2 * sum(lens) * kv_heads * head_dim * 2
    layers = min(16, max(1, -(-COLD_BYTES // num_bytes)))
    pool = (num_blocks + 1, layers, 2, kv_heads, BLOCK_SIZE, head_dim)
    kv = torch.randn(pool, device=DEVICE, dtype=torch.bfloat16)
    batch = make_batch([1] * len(lens), lens, BLOCK_SIZE, num_blocks)
    q = torch.randn(len(lens), num_heads, head_dim, device=DEVICE, dtype=torch.bfloat16)
    scale = head_dim**-0.5
    out = torch.empty_like(q)
    theirs = []
    for layer in range(layers):
        keys, values = (kv[:, layer, i].transpose(1, 2).contiguous() for i in (0, 1))
        theirs.append(fa3(q, keys, values, batch, out))

    def ours(layer: int) -> Callable[[], object]:
        return lambda: paged_attention(q, kv[:, layer], batch, scale=scale)

    theirs[0]()
    difference = error_of(ours(0)(), out)  # type: ignore[arg-type]
    num_calls = max(20, layers)
    hot = graph_us([ours(0)] * 20), graph_us([theirs[0]] * 20)
    cold = (
        graph_us([ours(i % layers) for i in range(num_calls)]),
        graph_us([theirs[i % layers] for i in range(num_calls)]),
    )
    return {
        "heads": list(heads),
        "load": load,
        "difference": round(difference, 5),
        "hot_us": round(hot[0], 2),
        "fa3_hot_us": round(hot[1], 2),
        "hot_ratio": round(hot[1] / hot[0], 3),
        "cold_us": round(cold[0], 2),
        "fa3_cold_us": round(cold[1], 2),
        "cold_ratio": round(cold[1] / cold[0], 3),
        "cold_tb_s": round(num_bytes / cold[0] / 1e6, 2),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    for heads in HEADS:
        for load, lens in LOADS.items():
            if heads[1] == 32 and len(lens) > 64:
                continue  # four times the pool, and nothing new
            print(json.dumps(compare(heads, load, lens)), flush=True)
