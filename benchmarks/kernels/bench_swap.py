"""Blocks to the host and back, beside one plain copy of as many bytes between the same two memories.

    PYTHONPATH=src python benchmarks/kernels/bench_swap.py

GB/s each way, medians of rounds by turns: `plain` is one copy to or from pinned memory, `swap` is `Swapper.move` with
blocks in shuffled order, so that every block is a move of its own. Blocks hold 16 tokens of all layers and heads.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from octavo.runner.swap import Swapper

MODELS = {"Qwen2.5-0.5B": (24, 2, 64), "Qwen3-0.6B": (28, 8, 128), "Llama-3.1-8B": (32, 8, 128)}  # layers, heads, size
BLOCK_SIZE = 16
TOTAL_BYTES = 1 << 30
ROUNDS = 7


def gb_per_s(work: Callable[[], object], num_bytes: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return num_bytes / begin.elapsed_time(end) / 1e6


def main() -> None:
    torch.manual_seed(0)
    for model, (num_layers, num_heads, head_dim) in MODELS.items():
        shape = (num_layers, 2, num_heads, BLOCK_SIZE, head_dim)
        block_bytes = 2 * num_layers * 2 * num_heads * BLOCK_SIZE * head_dim
        num_blocks = TOTAL_BYTES // block_bytes
        kv = torch.randn(num_blocks, *shape, dtype=torch.bfloat16, device="cuda")
        host_kv = torch.empty(num_blocks, *shape, dtype=torch.bfloat16, pin_memory=True)
        swapper, num_bytes = Swapper(kv, host_kv), num_blocks * block_bytes
        pairs = list(zip(torch.randperm(num_blocks).tolist(), torch.randperm(num_blocks).tolist(), strict=True))
        back = [(host, device) for device, host in pairs]
        ways = {
            "plain out": lambda kv=kv, host_kv=host_kv: host_kv.copy_(kv, non_blocking=True),
            "swap out": lambda swapper=swapper, pairs=pairs: swapper.move(pairs, []),
            "plain in": lambda kv=kv, host_kv=host_kv: kv.copy_(host_kv, non_blocking=True),
            "swap in": lambda swapper=swapper, back=back: swapper.move([], back),
        }
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for attempt in range(ROUNDS + 1):
            for way, work in ways.items():
                rate = gb_per_s(work, num_bytes)
                if attempt:
                    rates[way].append(rate)
        found = {way: statistics.median(rate) for way, rate in rates.items()}
        print(
            f"{model}: {num_blocks} blocks of {block_bytes / 1024:.0f} KiB; "
            + ", ".join(f"{way} {rate:.1f} GB/s" for way, rate in found.items())
            + f"; swap over plain {found['swap out'] / found['plain out']:.2f} out,"
            + f" {found['swap in'] / found['plain in']:.2f} in"
        )
        before = kv.clone()
        swapper.move(pairs, [])
        kv.zero_()
        swapper.move([], back)
        assert torch.equal(kv, before)
        del kv, host_kv, before, swapper, ways


if __name__ == "__main__":
    main()
