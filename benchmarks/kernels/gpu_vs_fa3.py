"""Paged attention compared with FlashAttention-3 in one run on one GPU: one JSON line for each shape, with the ratio.

FlashAttention-3 is used as vLLM ships it: `vllm.vllm_flash_attn` must be importable (vLLM 0.26 for torch 2.11). Both
read bfloat16 from blocks in shuffled order, both plan on the device beforehand, and both are timed as CUDA graph
replays, in turns. For decode, "hot" calls read one layer's K and V repeatedly, which stay in the L2 cache if they are
small; "cold" calls cycle over layers, as a model does.

    PYTHONPATH=src python benchmarks/kernels/gpu_vs_fa3.py [decode|prefill]
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from statistics import median

import torch
from gpu_check import COLD_BYTES, DEVICE, error_of, graph_us, make_batch
from torch import Tensor
from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

from octavo.integers import cdiv
from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.paged_attention import paged_attention

BLOCK_SIZE = 16
HEADS = [(32, 8, 128), (16, 8, 128), (14, 2, 64), (32, 32, 128)]
MIXED = random.Random(0)
LOADS = {
    "1x1024": [1024],
    "1x8192": [8192],
    "1x65536": [65536],
    "8x1024": [1024] * 8,
    "32x1024": [1024] * 32,
    "64x4096": [4096] * 64,
    "256x1024": [1024] * 256,
    "256 mixed": [MIXED.randint(100, 2048) for _ in range(256)],
    "64 mixed": [MIXED.randint(100, 2048) for _ in range(64)],
}
PEAK_TB_S, PEAK_TFLOP_S = 4.8, 989
"""Peaks of an H200: memory bandwidth, and bfloat16 products."""
PREFILL_HEADS = (32, 8, 128)
PREFILL_LOADS = {  # query lengths, context lengths
    "16x1k": ([1024] * 16, [1024] * 16),
    "8k": ([8192], [8192]),
    "32k": ([32768], [32768]),
    "512 at 7.7k": ([512], [8192]),
    "8x512": ([512] * 8, [512] * 8),
    "4k": ([4096], [4096]),
    "2k at 14k": ([2048], [16384]),
    "16 at 4k": ([16], [4096]),
    "64 at 4k": ([64], [4096]),
    "8 x 64 at 2k": ([64] * 8, [2048] * 8),
    "128 at 4k": ([128], [4096]),
    "32 mixed": (MIXED_QUERIES := [MIXED.randint(16, 1024) for _ in range(32)], [n + 500 for n in MIXED_QUERIES]),
}


def fa3(q: Tensor, keys: Tensor, values: Tensor, batch: RaggedBatch, out: Tensor) -> Callable[[], object]:
    """A call of FlashAttention-3; keys, values [num_blocks + 1, block_size, num_kv_heads, head_dim], as in vLLM."""
    plan = get_scheduler_metadata(
        batch_size=batch.num_seqs,
        max_seqlen_q=batch.max_query_len,
        max_seqlen_k=batch.max_seq_len,
        num_heads_q=q.shape[1],
        num_heads_kv=keys.shape[2],
        headdim=q.shape[2],
        cache_seqlens=batch.seq_lens,
        qkv_dtype=q.dtype,
        cu_seqlens_q=batch.query_start,
        page_size=keys.shape[1],
        causal=True,
    )
    return lambda: flash_attn_varlen_func(
        q=q,
        k=keys,
        v=values,
        max_seqlen_q=batch.max_query_len,
        cu_seqlens_q=batch.query_start,
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
    num_blocks = sum(cdiv(n, BLOCK_SIZE) for n in lens)
    num_bytes = 2 * sum(lens) * kv_heads * head_dim * 2
    layers = min(16, max(1, cdiv(COLD_BYTES, num_bytes)))
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
        "of_peak": round(num_bytes / cold[0] / 1e6 / PEAK_TB_S, 3),
    }


def compare_prefill(load: str, query_lens: list[int], seq_lens: list[int], block_size: int) -> dict[str, object]:
    num_heads, kv_heads, head_dim = PREFILL_HEADS
    num_blocks = sum(cdiv(n, block_size) for n in seq_lens)
    kv = torch.randn(num_blocks + 1, 1, 2, kv_heads, block_size, head_dim, device=DEVICE, dtype=torch.bfloat16)
    batch = make_batch(query_lens, seq_lens, block_size, num_blocks)
    q = torch.randn(sum(query_lens), num_heads, head_dim, device=DEVICE, dtype=torch.bfloat16)
    scale = head_dim**-0.5
    out = torch.empty_like(q)
    keys, values = (kv[:, 0, i].transpose(1, 2).contiguous() for i in (0, 1))
    theirs = fa3(q, keys, values, batch, out)

    def ours() -> Tensor:
        return paged_attention(q, kv[:, 0], batch, scale=scale)

    theirs()
    difference = error_of(ours(), out)
    pairs = sum(n * (s - n) + n * (n + 1) / 2 for n, s in zip(query_lens, seq_lens, strict=True))
    tflop = 4 * num_heads * head_dim * pairs / 1e12
    calls = max(2, min(20, int(1 / tflop)))
    times = [(graph_us([ours] * calls), graph_us([theirs] * calls)) for _ in range(3)]
    us, fa3_us = median(t for t, _ in times), median(t for _, t in times)
    return {
        "load": load,
        "block_size": block_size,
        "difference": round(difference, 5),
        "us": round(us, 1),
        "fa3_us": round(fa3_us, 1),
        "tflop_s": round(tflop / us * 1e6, 1),
        "fa3_tflop_s": round(tflop / fa3_us * 1e6, 1),
        "ratio": round(fa3_us / us, 3),
        "of_peak": round(tflop / us * 1e6 / PEAK_TFLOP_S, 3),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    if "decode" not in sys.argv[1:]:
        for block_size in (16, 64):
            for load, (query_lens, seq_lens) in PREFILL_LOADS.items():
                print(json.dumps(compare_prefill(load, query_lens, seq_lens, block_size)), flush=True)
    if "prefill" not in sys.argv[1:]:
        for heads in HEADS:
            for load, lens in LOADS.items():
                if heads[1] == 32 and len(lens) > 64:
                    continue  # four times the pool, without new information
                print(json.dumps(compare(heads, load, lens)), flush=True)
