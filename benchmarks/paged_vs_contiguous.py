"""Paged against contiguous K and V: memory, and the time of a decode step's attention, as a Markdown table.

    python benchmarks/paged_vs_contiguous.py [--model NAME | --shape HEADS,KV_HEADS,HEAD_DIM,LAYERS]
                                             [--lengths N ...] [--max-len N] [--block-sizes N ...] [--clock processor]

One query of each sequence attends to all its tokens, in every layer. Paged K and V are those of `PagedAttention`; all
sequences grow together, so their blocks alternate in the pool. Two kernels read each block size:

    reference  the loop of `kernels.reference`, relative to the same loop over contiguous K and V
    cpu        `kernels.cpu`, relative to torch's scaled_dot_product_attention over contiguous K and V

Times are medians of --rounds. Every round runs everything once, in random order, so that other programs disturb all
alike. Ratios are medians of each round's ratio; milliseconds stand beside them. --clock processor does not count the
time that a core spends on other programs.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.checkpoint.resolve import open_checkpoint
from octavo.frontend.standalone.paged_attention import PagedAttention
from octavo.integers import cdiv
from octavo.kernels import reference
from octavo.kernels.cpu import ops as cpu
from octavo.kernels.metadata import RaggedBatch
from octavo.models.config import read_spec

Step = Callable[[], Tensor]
"""A decode step's attention: the outputs of the last layer."""
APPENDED = 16
"""Tokens of a sequence before the next sequence gets some: few enough that blocks of different sequences alternate."""


class Contiguous:
    """K and V without blocks. kv: per sequence [num_layers, 2, num_kv_heads, seq_len, head_dim]."""

    def __init__(self, kv: list[Tensor], q: Tensor) -> None:
        self.kv, self.q = kv, q
        self.scale = q.shape[2] ** -0.5

    def torch_step(self) -> Tensor:
        """The query heads that share a K/V head are queries of that head: it is read once for all of them."""
        heads = self.q.view(len(self.q), 1, self.kv[0].shape[2], -1, self.q.shape[2])
        for layer in range(len(self.kv[0])):
            out = [
                F.scaled_dot_product_attention(q, kv[layer, :1], kv[layer, 1:])
                for q, kv in zip(heads, self.kv, strict=True)
            ]
        return torch.cat(out).view_as(self.q)

    def reference_step(self) -> Tensor:
        for layer in range(len(self.kv[0])):
            out = []
            for q, kv in zip(self.q, self.kv, strict=True):
                keys, values = kv[layer].float()
                grouped = q.float().view(len(keys), -1, 1, q.shape[1])
                scores = grouped @ keys.transpose(-1, -2).unsqueeze(1) * self.scale
                weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
                out.append((weights @ values.unsqueeze(1)).reshape(q.shape).to(q.dtype))
        return torch.stack(out)


class Paged:
    """The same K and V in blocks of one size."""

    def __init__(self, kv: list[Tensor], q: Tensor, block_size: int) -> None:
        self.q, self.lengths, self.block_size = q, [x.shape[3] for x in kv], block_size
        self.attention = PagedAttention(
            sum(cdiv(n, block_size) for n in self.lengths),
            block_size,
            num_heads=q.shape[1],
            num_kv_heads=kv[0].shape[2],
            head_dim=q.shape[2],
            num_layers=len(kv[0]),
            dtype=q.dtype,
        )
        for start in range(0, max(self.lengths), APPENDED):
            for seq_id, x in enumerate(kv):
                for layer, (k, v) in enumerate(x[:, :, :, start : start + APPENDED].transpose(2, 3)):
                    self.attention.append_kv(seq_id, k, v, layer)
        self.tables = [sequence.block_ids for sequence in self.attention.manager.holders]

    def prepare(self, ops: ModuleType) -> Step:
        batch = RaggedBatch.from_lists([1] * len(self.lengths), self.lengths, self.tables, self.block_size)
        return partial(self.step, ops, batch)

    def step(self, ops: ModuleType, batch: RaggedBatch) -> Tensor:
        for layer in range(self.attention.kv.shape[1]):
            out: Tensor = ops.paged_attention(self.q, self.attention.kv[:, layer], batch, scale=self.q.shape[2] ** -0.5)
        return out


def measured(steps: dict[str, Callable[[], Step]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Milliseconds of each step in each round; what it prepares is not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    rng = random.Random(0)
    for i in range(rounds + 1):  # the first warms up
        for name in rng.sample(list(steps), len(steps)):
            step = steps[name]()
            start = clock()
            step()
            if i:
                times[name].append(1000 * (clock() - start))
    return times


def rows(
    kv: list[Tensor], q: Tensor, block_sizes: Sequence[int], max_len: int, rounds: int, clock: Callable[[], float]
) -> Iterator[tuple[str, ...]]:
    contiguous, lengths = Contiguous(kv, q), [x.shape[3] for x in kv]
    steps: dict[str, Callable[[], Step]] = {
        "torch": lambda: contiguous.torch_step,
        "reference": lambda: contiguous.reference_step,
    }
    paged = {size: Paged(kv, q, size) for size in block_sizes}
    for size, each in paged.items():
        steps[f"reference {size}"] = partial(each.prepare, reference)
        steps[f"cpu {size}"] = partial(each.prepare, cpu)
    expected = contiguous.torch_step()
    for prepare in steps.values():
        assert torch.allclose(prepare()(), expected, atol=1e-4 if q.dtype == torch.float32 else 2e-2)
    times = measured(steps, rounds, clock)

    def ratio(name: str, base: str) -> str:
        relative = statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))
        return f"{relative:.2f} ({statistics.median(times[name]):.1f} ms)"

    def memory(num_slots: int) -> tuple[str, str]:
        num_bytes = num_slots * kv[0][..., :1, :].numel() * q.element_size()
        return f"{num_bytes / 1e6:.1f} MB", f"{100 * (1 - sum(lengths) / num_slots):.1f} %"

    def took(name: str) -> str:
        return f"1 ({statistics.median(times[name]):.1f} ms)"

    yield "contiguous, with room for the maximum length", *memory(len(lengths) * max_len), "", ""
    yield "contiguous, padded to the longest", *memory(len(lengths) * max(lengths)), "", ""
    yield "contiguous, exact lengths", *memory(sum(lengths)), took("reference"), took("torch")
    for size in block_sizes:
        num_slots = paged[size].attention.stats().num_used * size
        yield (
            f"blocks of {size}",
            *memory(num_slots),
            ratio(f"reference {size}", "reference"),
            ratio(f"cpu {size}", "torch"),
        )


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "an unknown processor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--shape", help="heads, K/V heads, head size and layers, such as 14,2,64,24; replaces --model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 700, 500, 300, 200, 100, 50, 20])
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[2**i for i in range(9)])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall")
    args = parser.parse_args()
    if args.shape:
        num_heads, num_kv_heads, head_dim, num_layers = map(int, args.shape.split(","))
    else:
        spec = read_spec(open_checkpoint(args.model, weights=False))
        num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
        head_dim, num_layers = spec.head_dim, spec.num_layers
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    q = torch.randn(len(args.lengths), num_heads, head_dim, dtype=dtype)
    kv = [torch.randn(num_layers, 2, num_kv_heads, n, head_dim, dtype=dtype) for n in args.lengths]
    print(
        f"{args.shape or args.model}: {num_heads} heads, {num_kv_heads} K/V heads of {head_dim}, {num_layers} layers, "
        f"{args.dtype}; sequences of {', '.join(map(str, args.lengths))} tokens, at most {args.max_len}.\n"
        f"{processor()}, {args.threads} of {os.cpu_count()} cores; {args.clock} clock, medians of {args.rounds} "
        "rounds.\n"
    )
    print("| layout | K and V | unused | reference, time | cpu, time |")
    print("|---|---:|---:|---:|---:|")
    with torch.inference_mode():
        clock = time.perf_counter if args.clock == "wall" else time.process_time
        for row in rows(kv, q, args.block_sizes, args.max_len, args.rounds, clock):
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
