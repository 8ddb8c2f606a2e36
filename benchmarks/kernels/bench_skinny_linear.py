"""Few rows times a weight on a GPU, beside cuBLAS: `PYTHONPATH=src python benchmarks/kernels/bench_skinny_linear.py`.

Microseconds a call, from replays of a CUDA graph of many calls that go round over weights, so that none is found in the
cache. `best` is the fastest of a few tunings, which is what `skinny_tuning` was chosen from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.skinny_linear import SkinnyTuning, skinny_linear

SHAPES = {  # the projections of a layer: num_out, num_in
    "Qwen3-0.6B": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
    "Qwen2.5-0.5B": [(1152, 896), (896, 896), (9728, 896), (896, 4864)],
    "Llama-3.1-8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
}
CALLS = 40
BEYOND_CACHE = 160 << 20


def replay_us(run: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    run(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            run(weights[i % len(weights)])
    best = float("inf")
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / CALLS * 1e3)
    return best


def tunings(num_out: int, num_in: int) -> list[SkinnyTuning]:
    programs = -(-num_out // 16)
    splits = {1, *(max(1, min(num_in // 256, total // programs)) for total in (256, 512, 1024))}
    return [
        SkinnyTuning(16, columns, number, warps, stages)
        for columns, number, warps, stages in itertools.product((128, 256), sorted(splits), (1, 2), (4, 6))
    ]


def main() -> None:
    torch.manual_seed(0)
    print(f"{'':<14}{'weight':>14}{'rows':>6}{'cuBLAS':>9}{'ours':>8}{'best':>8}{'TB/s':>7}  tuning")
    for model, shapes in SHAPES.items():
        for num_out, num_in in shapes:
            count = max(2, min(CALLS, BEYOND_CACHE // (num_out * num_in * 2) + 1))
            weights = [torch.randn(num_out, num_in, device="cuda").bfloat16() for _ in range(count)]
            for num_rows in (1, 4, 16):
                x = torch.randn(num_rows, num_in, device="cuda").bfloat16()
                library = replay_us(lambda w, x=x: F.linear(x, w), weights)
                ours = replay_us(lambda w, x=x: skinny_linear(x, w), weights)
                timed = [
                    (replay_us(lambda w, x=x, t=t: skinny_linear(x, w, tuning=t), weights), t)
                    for t in tunings(num_out, num_in)
                ]
                best, tuning = min(timed, key=lambda pair: pair[0])
                rate = num_out * num_in * 2 / best / 1e6
                said = f"columns {tuning.columns} splits {tuning.splits} warps {tuning.num_warps}"
                print(
                    f"{model:<14}{f'{num_out} x {num_in}':>14}{num_rows:>6}{library:>9.2f}{ours:>8.2f}{best:>8.2f}"
                    f"{rate:>7.2f}  {said} stages {tuning.num_stages}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
