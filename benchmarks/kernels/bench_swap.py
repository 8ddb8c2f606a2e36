"""Swaps of KV blocks to the host and back, compared with one plain copy of as many bytes.

    PYTHONPATH=src python benchmarks/kernels/bench_swap.py
    PYTHONPATH=src python benchmarks/kernels/bench_swap.py --sweep      tunings of the kernel

GB/s in each direction, medians over rounds in which the variants take turns: `plain` is one copy to or from pinned
memory, `engine` is one copy for each block, `kernel` is `swap_out` and `swap_in`, `swap` is `KVSwapper.queue`. Blocks
are in shuffled order, so no two are adjacent; each holds 16 tokens of all layers and heads.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.kernels.triton import ops as cuda
from octavo.kernels.triton.kv import swap
from octavo.kernels.triton.kv.swap import SwapTuning
from octavo.runner.kv_swap import KVSwapper

MODELS = {  # layers, K/V heads, head_dim: from small blocks to large ones
    "Qwen2.5-0.5B": (24, 2, 64),
    "Qwen2.5-1.5B": (28, 2, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "Qwen3-0.6B": (28, 8, 128),
    "Llama-3.1-8B": (32, 8, 128),
}
BLOCK_SIZE = 16
TOTAL_BYTES = 1 << 30
ROUNDS = 7
SWEEP = [
    SwapTuning(num_programs, chunk_bytes, num_warps)
    for num_programs in (8, 16, 24, 32, 48, 64)
    for chunk_bytes, num_warps in ((8192, 4), (16384, 4), (16384, 8), (32768, 8), (65536, 16))
]

Variants = Mapping[str, Callable[[], object]]


def gb_per_s(variants: Variants, num_bytes: int, rounds: int = ROUNDS) -> dict[str, float]:
    """The median rate of each variant over rounds in which all take turns, after a warm-up round."""
    rates: dict[str, list[float]] = {variant: [] for variant in variants}
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for attempt in range(rounds + 1):
        for variant, copy in variants.items():
            torch.cuda.synchronize()
            begin.record()
            copy()
            end.record()
            torch.cuda.synchronize()
            if attempt:
                rates[variant].append(num_bytes / begin.elapsed_time(end) / 1e6)
    return {variant: statistics.median(rate) for variant, rate in rates.items()}


def copy_each(source: Tensor, target: Tensor, pairs: list[tuple[int, int]]) -> None:
    for src, dst in pairs:
        target[dst].copy_(source[src], non_blocking=True)


def compare(kv: Tensor, host_kv: Tensor, pairs: list[tuple[int, int]]) -> None:
    back = [(host, device) for device, host in pairs]
    ids = torch.tensor(pairs, device="cuda").T.contiguous()
    swapper, num_bytes = KVSwapper(kv, host_kv, cuda), host_kv.nbytes
    found = gb_per_s(
        {
            "plain out": lambda: host_kv.copy_(kv, non_blocking=True),
            "engine out": lambda: copy_each(kv, host_kv, pairs),
            "kernel out": lambda: cuda.swap_out(kv, host_kv, ids[0], ids[1]),
            "swap out": lambda: swapper.queue(pairs, []),
            "plain in": lambda: kv.copy_(host_kv, non_blocking=True),
            "engine in": lambda: copy_each(host_kv, kv, back),
            "kernel in": lambda: cuda.swap_in(host_kv, kv, ids[1], ids[0]),
            "swap in": lambda: swapper.queue([], back),
        },
        num_bytes,
    )
    for direction in ("out", "in"):
        plain = found[f"plain {direction}"]
        rates = ", ".join(
            f"{variant} {found[f'{variant} {direction}']:.1f} ({found[f'{variant} {direction}'] / plain:.2f})"
            for variant in ("engine", "kernel", "swap")
        )
        print(f"    {direction:<4} plain {plain:.1f} GB/s; {rates}", flush=True)
    before = kv.clone()
    for move_out, move_in in (
        (lambda: swapper.queue(pairs, []), lambda: swapper.queue([], back)),
        (lambda: cuda.swap_out(kv, host_kv, ids[0], ids[1]), lambda: cuda.swap_in(host_kv, kv, ids[1], ids[0])),
    ):
        move_out()
        kv.zero_()
        move_in()
        assert torch.equal(kv, before)


def sweep(kv: Tensor, host_kv: Tensor, pairs: list[tuple[int, int]]) -> None:
    ids = torch.tensor(pairs, device="cuda").T.contiguous()
    plain = gb_per_s(
        {
            "out": lambda: host_kv.copy_(kv, non_blocking=True),
            "in": lambda: kv.copy_(host_kv, non_blocking=True),
        },
        host_kv.nbytes,
        rounds=3,
    )
    print(f"    plain {plain['out']:.1f} GB/s out, {plain['in']:.1f} in")
    for tuning in SWEEP:
        found = gb_per_s(
            {
                "out": lambda tuning=tuning: swap.copy_blocks(kv, host_kv, ids[0], ids[1], tuning),
                "in": lambda tuning=tuning: swap.copy_blocks(host_kv, kv, ids[1], ids[0], tuning),
            },
            host_kv.nbytes,
            rounds=3,
        )
        print(
            f"    {tuning.num_programs:>3} programs of {tuning.num_warps:>2} warps, {tuning.chunk_bytes >> 10:>2} KiB: "
            f"{found['out']:5.1f} GB/s out ({found['out'] / plain['out']:.2f}), "
            f"{found['in']:5.1f} in ({found['in'] / plain['in']:.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    for model, (num_layers, num_heads, head_dim) in list(MODELS.items())[: 1 if args.sweep else None]:
        spec = KVCacheSpec(num_layers, num_heads, head_dim, BLOCK_SIZE, "bfloat16")
        num_blocks = TOTAL_BYTES // spec.bytes_per_block
        kv = torch.randn(num_blocks, *spec.block_shape, dtype=torch.bfloat16, device="cuda")
        host_kv = torch.empty(num_blocks, *spec.block_shape, dtype=torch.bfloat16, pin_memory=True)
        pairs = list(zip(torch.randperm(num_blocks).tolist(), torch.randperm(num_blocks).tolist(), strict=True))
        print(f"{model}: {num_blocks} blocks of {spec.bytes_per_block / 1024:.0f} KiB")
        (sweep if args.sweep else compare)(kv, host_kv, pairs)
        del kv, host_kv


if __name__ == "__main__":
    main()
