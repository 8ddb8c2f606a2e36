"""Paged against contiguous K and V: memory, and the time of a decode step's attention, as a Markdown table.

    python benchmarks/paged_vs_contiguous.py [--model NAME | --shape HEADS,KV_HEADS,HEAD_DIM,LAYERS] [--device cuda]
                                             [--lengths N ...] [--batch N] [--max-len N] [--block-sizes N ...]

One query of each sequence attends to all its tokens, in every layer. Paged K and V are those of `PagedAttention`; all
sequences grow together, so their blocks alternate in the pool. The columns:

    kernel     the engine's kernel. On a GPU, relative to the same kernel over contiguous memory: one block of --max-len
               tokens for each sequence. On a CPU, whose kernel reads whole blocks, relative to torch
    torch      scaled_dot_product_attention over contiguous K and V, one call for neighbours of equal length
    reference  the loop of `kernels.reference`, relative to the same loop over contiguous K and V; on a CPU only

Times are medians of --rounds. Every round runs everything once, in random order, so that other programs disturb all
alike. Ratios are medians of each round's ratio; milliseconds stand beside them. On a GPU, a step is one CUDA graph,
timed by events.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import groupby
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
    """K and V without blocks.

    kv      per sequence [num_layers, 2, num_kv_heads, seq_len, head_dim]
    stacks  the same for neighbours of equal length: [num_seqs, num_layers, 2, num_kv_heads, seq_len, head_dim]
    """

    def __init__(self, kv: list[Tensor], q: Tensor) -> None:
        self.stacks = [torch.stack(list(equal)) for _, equal in groupby(kv, key=lambda x: x.shape[3])]
        self.kv, self.q = [x for stack in self.stacks for x in stack], q
        self.scale = q.shape[2] ** -0.5

    def torch_step(self) -> Tensor:
        """The query heads that share a K/V head are queries of that head: it is read once for all of them."""
        heads = self.q.view(len(self.q), self.kv[0].shape[2], -1, self.q.shape[2])
        queries = torch.split(heads, [len(stack) for stack in self.stacks])
        for layer in range(len(self.kv[0])):
            out = [
                F.scaled_dot_product_attention(q, kv[:, layer, 0], kv[:, layer, 1])
                for q, kv in zip(queries, self.stacks, strict=True)
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
            device=q.device,
            ops=fast_ops(q.device),
        )
        for start in range(0, max(self.lengths), APPENDED):
            for seq_id, x in enumerate(kv):
                for layer, (k, v) in enumerate(x[:, :, :, start : start + APPENDED].transpose(2, 3)):
                    self.attention.append_kv(seq_id, k, v, layer)
        self.tables = [sequence.block_ids for sequence in self.attention.manager.holders]

    def prepare(self, ops: ModuleType) -> Step:
        batch = RaggedBatch.from_lists(
            [1] * len(self.lengths), self.lengths, self.tables, self.block_size, device=self.q.device
        )
        return partial(self.step, ops, batch)

    def step(self, ops: ModuleType, batch: RaggedBatch) -> Tensor:
        for layer in range(self.attention.kv.shape[1]):
            out: Tensor = ops.paged_attention(self.q, self.attention.kv[:, layer], batch, scale=self.q.shape[2] ** -0.5)
        return out


def fast_ops(device: torch.device) -> ModuleType:
    """The engine's kernels for the device."""
    if device.type == "cpu":
        return cpu
    from octavo.kernels.triton import ops  # only where there is a GPU

    return ops


def as_graph(prepare: Callable[[], Step]) -> Step:
    """A step as one CUDA graph, without the time of its launches."""
    prepare()()  # compiles
    step, graph = prepare(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay(_inputs: Step = step) -> Tensor:  # the graph reads its tensors
        graph.replay()
        return out

    return replay


def milliseconds(step: Step, device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        step()
        return 1000 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def measured(steps: dict[str, Callable[[], Step]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each step in each round; what it prepares is not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    rng = random.Random(0)
    for i in range(rounds + 1):  # the first warms up
        for name in rng.sample(list(steps), len(steps)):
            took = milliseconds(steps[name](), device)
            if i:
                times[name].append(took)
    return times


def make_steps(kv: list[Tensor], q: Tensor, paged: dict[int, Paged]) -> dict[str, Callable[[], Step]]:
    """What is measured, by name."""
    contiguous = Contiguous(kv, q)
    steps: dict[str, Callable[[], Step]] = {"torch": lambda: contiguous.torch_step}
    for size, each in paged.items():
        steps[f"kernel {size}"] = partial(each.prepare, fast_ops(q.device))
    if q.is_cuda:
        steps = {name: cache(partial(as_graph, prepare)) for name, prepare in steps.items()}
    else:
        steps["reference"] = lambda: contiguous.reference_step
        for size, each in paged.items():
            steps[f"reference {size}"] = partial(each.prepare, reference)
    return steps


def check(steps: dict[str, Callable[[], Step]]) -> None:
    """Every step gives the same outputs."""
    expected = steps["torch"]()().clone()
    for prepare in steps.values():
        assert torch.allclose(prepare()(), expected, atol=1e-4 if expected.dtype == torch.float32 else 2e-2)


def rows(
    kv: list[Tensor], q: Tensor, block_sizes: Sequence[int], max_len: int, rounds: int
) -> Iterator[tuple[str, ...]]:
    lengths = [x.shape[3] for x in kv]
    paged = {size: Paged(kv, q, size) for size in (*block_sizes, *([max_len] if q.is_cuda else []))}
    steps = make_steps(kv, q, paged)
    check(steps)
    times = measured(steps, rounds, q.device)
    check(steps)

    def memory(num_slots: int) -> tuple[str, str]:
        num_bytes = num_slots * kv[0][..., :1, :].numel() * q.element_size()
        return f"{num_bytes / 1e6:.1f} MB", f"{100 * (1 - sum(lengths) / num_slots):.1f} %"

    def took(name: str, base: str) -> str:
        if name not in times:
            return ""
        relative = statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))
        return f"{relative:.2f} ({statistics.median(times[name]):.3g} ms)"

    base = f"kernel {max_len}" if q.is_cuda else "torch"
    yield (
        "contiguous, with room for the maximum length",
        *memory(len(lengths) * max_len),
        took(f"kernel {max_len}", base),
        "",
        "",
    )
    yield "contiguous, padded to the longest", *memory(len(lengths) * max(lengths)), "", "", ""
    yield "contiguous, exact lengths", *memory(sum(lengths)), "", took("torch", base), took("reference", "reference")
    for size in block_sizes:
        num_slots = paged[size].attention.stats().num_used * size
        yield (
            f"blocks of {size}",
            *memory(num_slots),
            took(f"kernel {size}", base),
            "",
            took(f"reference {size}", "reference"),
        )


def processor(args: argparse.Namespace) -> str:
    if args.device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(": ")[1] for line in lines if line.startswith("model name")), "an unknown processor")
    return f"{name}, {args.threads} of {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--shape", help="heads, K/V heads, head size and layers, such as 14,2,64,24; replaces --model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 700, 500, 300, 200, 100, 50, 20])
    parser.add_argument("--batch", type=int, default=1, help="sequences of each length")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[2**i for i in range(9)])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
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
    lengths = [n for n in args.lengths for _ in range(args.batch)]
    torch.set_default_device(args.device)
    q = torch.randn(len(lengths), num_heads, head_dim, dtype=dtype)
    kv = [torch.randn(num_layers, 2, num_kv_heads, n, head_dim, dtype=dtype) for n in lengths]
    print(
        f"{args.shape or args.model}: {num_heads} heads, {num_kv_heads} K/V heads of {head_dim}, {num_layers} layers, "
        f"{args.dtype}; {args.batch} x sequences of {', '.join(map(str, args.lengths))} tokens, "
        f"at most {args.max_len}.\n{processor(args)}; medians of {args.rounds} rounds.\n"
    )
    print("| layout | K and V | unused | kernel, time | torch, time | reference, time |")
    print("|---|---:|---:|---:|---:|---:|")
    with torch.inference_mode():
        for row in rows(kv, q, args.block_sizes, args.max_len, args.rounds):
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
