"""How the scripts here measure: the best of several runs, because other work on a machine only ever adds time. On a GPU
the fast path is replayed from a CUDA graph of several calls, the reference called one by one.
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
"""In a graph."""


def start(doc: str | None, *, devices: Sequence[str] = ("cpu", "cuda")) -> ModuleType:
    """Read `--device cuda` and `--threads N`, fix the seed, and give the fast path: what every script here begins
    with. New tensors are on that device."""
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
    """Of bfloat16 on a GPU, as models are there, else of float32."""
    return torch.randn(shape, dtype=torch.bfloat16 if on_gpu() else torch.float32)


def best_us(run: Run, repeats: int = 20) -> float:
    """Microseconds of the fastest of `repeats` runs, after one that is not counted."""
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
    """Of the fast path, a call."""
    if not on_gpu():
        return best_us(run)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    return best_us(graph.replay) / CALLS


def compare(case: str, fast: Run, slow: Run, *, num_bytes: int = 0) -> None:
    """One line: the fast path, the reference, and, given the bytes it has to move, the fast path's rate."""
    fast_, slow_ = fast_us(fast), best_us(slow, repeats=5)
    rate = f"{num_bytes / fast_ / 1e3:>8.1f} GB/s" if num_bytes else ""
    print(f"{case:40}{fast_:>10.1f}{slow_:>14.1f}{rate}", flush=True)
