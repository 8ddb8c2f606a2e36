"""Timing for the benchmarks in this folder: the best of several runs, because other load only adds time.

On a GPU, the fast path is replayed from a CUDA graph of several calls; the reference is called directly.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from octavo.kernels.cpu import ops as cpu

Run = Callable[[], object]
CALLS = 20
"""Calls in a graph."""


def start(doc: str | None, *, devices: Sequence[str] = ("cpu", "cuda")) -> ModuleType:
    """Read `--device cuda` and `--threads N`, fix the seed, make the device the default, and return its operations."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=devices, default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
        print(f"{f'{args.threads} threads':40}{'cpu us':>10}{'reference us':>14}")
        return cpu
    from octavo.kernels.triton import ops as cuda

    torch.set_default_device("cuda")
    print(f"{torch.cuda.get_device_name():40}{'cuda us':>10}{'reference us':>14}")
    return cuda


def on_gpu() -> bool:
    return torch.get_default_device().type == "cuda"


def random(*shape: int) -> torch.Tensor:
    """Normal random numbers: bfloat16 on a GPU, as models use there, else float32."""
    return torch.randn(shape, dtype=torch.bfloat16 if on_gpu() else torch.float32)


def best_us(run: Run, repeats: int = 20) -> float:
    """Microseconds of the fastest of `repeats` runs, after a warm-up."""
    run()
    best = float("inf")
    for _ in range(repeats):
        if on_gpu():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if on_gpu():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best * 1e6


def fast_us(run: Run) -> float:
    """Microseconds of one call of the fast path."""
    if not on_gpu():
        return best_us(run)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    return best_us(graph.replay) / CALLS


def compare(case: str, fast: Run, reference: Run, *, num_bytes: int = 0) -> None:
    """Print one line: microseconds of the fast path and of the reference; with num_bytes, the fast path's bandwidth."""
    fast_path_us, reference_us = fast_us(fast), best_us(reference, repeats=5)
    rate = f"{num_bytes / fast_path_us / 1e3:>8.1f} GB/s" if num_bytes else ""
    print(f"{case:40}{fast_path_us:>10.1f}{reference_us:>14.1f}{rate}", flush=True)
