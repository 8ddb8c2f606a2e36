"""Layers of two ranks with long batches: sums by NCCL, and sent in parts while products run.

`PYTHONPATH=src python benchmarks/kernels/bench_sent_sums.py`: milliseconds of a layer's products, norms and sums on two
GPUs, launched one by one, of the slowest rank in the best round. Attention and biases are left out.

none   no sums, and in parts: what splitting costs
NCCL   after each product; beside: of a part, while the other part's products run
sent   by copy engines, in parts
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.kernels.bench_reduce import open_reducer

from octavo.kernels.triton import ops
from octavo.kernels.triton.norms import add_rms_norm
from octavo.kernels.triton.peer_memory import MAX_PUSHED_BYTES, PeerReducer

SHAPES = {"Llama-3.1-8B": (4096, 3072, 2048, 7168), "Qwen3-32B": (5120, 5120, 4096, 12800)}
"""Hidden size, and a rank's outputs of QKV, inputs of its output projection, and inner size."""
LAYERS, ROUNDS, EPS = 6, 5, 1e-5
WAYS = (("none", 1), ("none", 2), ("NCCL", 1), ("beside", 2), ("sent", 2))
AHEAD_CYCLES = 4_000_000
"""The GPU waits so long before a round: the host's launches are ahead of it."""


class Layers:
    """A rank's weights, random, and a pass through them."""

    def __init__(self, reducer: PeerReducer, shape: tuple[int, int, int, int]) -> None:
        hidden, qkv, out, inner = shape
        self.reducer, self.out = reducer, out
        sizes = (qkv, hidden), (hidden, out), (2 * inner, hidden), (hidden, inner)
        self.weights = [[0.02 * torch.randn(*size, device="cuda").bfloat16() for size in sizes] for _ in range(LAYERS)]
        self.norm = torch.ones(hidden, device="cuda").bfloat16()

    def run(self, way: str, parts: int, x: torch.Tensor, residual: torch.Tensor) -> list[torch.Tensor]:
        size = -(-len(x) // parts)
        layer_input = [
            self._normed("none", part, before) for part, before in zip(x.split(size), residual.split(size), strict=True)
        ]
        for qkv, out, gate_up, down in self.weights:
            mixed = torch.cat([normed @ qkv.T for normed, _ in layer_input])[:, : self.out].contiguous().split(size)
            sums = [self._begin(way, part @ out.T, slot) for slot, part in enumerate(mixed)]
            after_attention = []
            for slot, (partial, (_, before)) in enumerate(zip(sums, layer_input, strict=True), start=2):
                normed, total = self._normed(way, partial, before)
                partial = self._begin(way, ops.silu_mul(normed @ gate_up.T) @ down.T, slot)
                after_attention.append((partial, total))
            layer_input = [self._normed(way, *pair) for pair in after_attention]
        return [normed for normed, _ in layer_input]

    def _begin(self, way: str, partial: torch.Tensor, slot: int) -> Any:
        if way == "sent":
            return self.reducer.send(partial, slot)
        if way == "beside":
            return partial, dist.all_reduce(partial, async_op=True)
        if way == "NCCL":
            dist.all_reduce(partial)
        return partial

    def _normed(self, way: str, partial: Any, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if way == "sent":
            return partial.add_rms_norm(residual, self.norm, EPS)
        if way == "beside":
            partial, work = partial
            work.wait()
        return add_rms_norm(partial, residual, self.norm, EPS)


def measure(rank: int, store: str) -> None:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2, device_id=device)
    say = print if rank == 0 else lambda *words, **options: None
    reducer = open_reducer(device, MAX_PUSHED_BYTES, sent_bytes=4096 * 10240)
    if reducer is None:
        raise SystemExit("no peer memory: nothing to measure")
    say(f"{torch.cuda.get_device_name()} x 2, torch {torch.__version__}; milliseconds of a layer")
    say(f"{'':14}{'tokens':>7}" + "".join(f"{way + (' / 2' if parts > 1 else ''):>11}" for way, parts in WAYS))
    for name, shape in SHAPES.items():
        layers = Layers(reducer, shape)
        for num_tokens in (2048, 4096, 8192):
            x = 0.1 * torch.randn(num_tokens, shape[0], device=device).bfloat16()
            times = []
            for way, parts in WAYS:
                rounds = torch.empty(ROUNDS, device=device)
                for i in range(-1, ROUNDS):  # the first compiles and warms up
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    torch.cuda.synchronize()
                    dist.barrier()
                    torch.cuda._sleep(AHEAD_CYCLES)
                    begin.record()
                    layers.run(way, parts, x, torch.zeros_like(x))
                    end.record()
                    torch.cuda.synchronize()
                    rounds[max(i, 0)] = begin.elapsed_time(end) / LAYERS
                dist.all_reduce(rounds, dist.ReduceOp.MAX)
                times.append(float(rounds.min()))
            if reducer.buffers.status.item():
                raise RuntimeError(f"rank {rank}, {num_tokens} tokens: a message did not come within the spin limit")
            say(f"{name:14}{num_tokens:7}" + "".join(f"{time:11.3f}" for time in times), flush=True)
    dist.destroy_process_group()


def main() -> None:
    if torch.cuda.device_count() < 2:
        raise SystemExit(f"needs 2 GPUs; there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (f"{folder}/store",), nprocs=2)


if __name__ == "__main__":
    main()
