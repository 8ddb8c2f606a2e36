"""Experts of one layer on a GPU, checked against float32, then timed beside torch's grouped products.

    PYTHONPATH=src python benchmarks/kernels/bench_expert_products.py [--sweep] [--tokens 1,16,2048] [--seconds N]

Microseconds a layer, from replays of a CUDA graph that takes turns with several layers' weights, each of which fills
the cache by itself. `route`, `in` and `out` are timed alone, too: route with the tiles of large batches, out with its
sum. `torch` sorts the pairs, gathers rows, and calls `torch._grouped_mm` twice with the gate between; its routing is
given. GB/s are of the distinct experts' bytes, TFLOP/s of the pairs' products. Weights are in bfloat16, then in MXFP4;
torch multiplies those of one dequantised layer.

--sweep    also time other tunings of both products, from which `tile_tokens` and `expert_tuning` were chosen: the
           fastest as tile, rows x columns, warps, stages, and t for TMA. Those of 128 columns compare only: the bits
           of a sum are the same where steps are, and `STEP_COLUMNS` is 64
--seconds  start no more measurements of a sweep after so many
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.groups import GroupForm, Groups
from octavo.kernels.reference import ExpertGate, Routing
from octavo.kernels.reference.experts import gated
from octavo.kernels.triton import ops, precompile
from octavo.kernels.triton.experts.assign import assign
from octavo.kernels.triton.experts.expert_products import GroupedRows, product_in, product_out
from octavo.kernels.triton.experts.grouped_experts import GroupedExperts
from octavo.kernels.triton.experts.tuning import (
    MAX_TILE_TOKENS,
    MIN_TILE_TOKENS,
    SCAN_TOKENS,
    STEP_COLUMNS,
    ExpertTuning,
    expert_tuning,
    tile_tokens,
)

TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 2048, 8192)
LAYERS, REPLAYS = 4, 5
BF16 = torch.bfloat16
MXFP4 = GroupForm(4, 32, is_float=True)


@dataclass
class Model:
    """A layer's sizes, and the weights of several layers."""

    name: str
    hidden: int
    inner: int
    num_experts: int
    top_k: int
    gate: ExpertGate
    biased: bool
    is_mxfp4: bool = False
    layers: list[tuple[Tensor | GroupedRows, Tensor | GroupedRows, Tensor | None, Tensor | None]] = field(
        default_factory=list
    )
    plain: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def allocate(self, num_layers: int) -> None:
        """Random weights, or none for 0."""
        self.layers.clear()
        self.plain.clear()
        up, down = self.num_experts * 2 * self.inner, self.num_experts * self.hidden
        for layer in range(num_layers):
            made = [self._weight(rows, size, layer == 0) for rows, size in ((up, self.hidden), (down, self.inner))]
            biases = [torch.randn(rows, device="cuda").to(BF16) if self.biased else None for rows in (up, down)]
            self.layers.append((made[0][0], made[1][0], biases[0], biases[1]))
            if layer == 0 or not self.is_mxfp4:
                self.plain.append((made[0][1], made[1][1]))

    def _weight(self, rows: int, size: int, is_first: bool) -> tuple[Tensor | GroupedRows, Tensor]:
        """-> the weight, and the same in bfloat16; in MXFP4, that of the first layer alone"""
        if not self.is_mxfp4:
            weight = torch.empty(rows, size, dtype=BF16, device="cuda").normal_(0, size**-0.5)
            return weight, weight
        values = torch.randint(16, (rows, size), dtype=torch.uint8, device="cuda")
        scales = torch.randint(-10, -6, (rows, size // 32), device="cuda").float().exp2()
        groups = Groups(MXFP4, values, scales)
        packed = ops.pack_experts(groups, self.num_experts)
        assert isinstance(packed, GroupedExperts)
        return packed.rows, groups.dequantised().to(BF16) if is_first else torch.empty(0)

    def route(self, logits: Tensor) -> Routing:
        return ops.route(logits, self.top_k, softmax_first=not self.biased, renormalise=not self.biased)

    def experts_in(self, x: Tensor, routing: Routing, layer: int, tuning: ExpertTuning | None = None) -> Tensor:
        weight, _, bias, _ = self.layers[layer]
        return product_in(x, weight, bias, routing, self.num_experts, self.gate, tuning)

    def experts_out(self, h: Tensor, routing: Routing, layer: int, tuning: ExpertTuning | None = None) -> Tensor:
        _, weight, _, bias = self.layers[layer]
        return product_out(h, weight, bias, routing, self.num_experts, tuning)

    def by_torch(self, x: Tensor, routing: Routing, layer: int) -> Tensor:
        up, down = self.plain[layer % len(self.plain)]
        up_bias, down_bias = self.layers[layer][2:]
        experts = routing.experts.flatten()
        order = experts.argsort(stable=True)
        counts = (experts[:, None] == torch.arange(self.num_experts, device=x.device)).sum(0)
        ends, own = counts.cumsum(0).int(), experts[order]
        y = torch._grouped_mm(x[order // self.top_k], up.view(self.num_experts, -1, self.hidden).mT, offs=ends)
        y = y if up_bias is None else y + up_bias.view(self.num_experts, -1)[own]
        h = gated(y, self.gate)
        y = torch._grouped_mm(h, down.view(self.num_experts, -1, self.inner).mT, offs=ends)
        y = y if down_bias is None else y + down_bias.view(self.num_experts, -1)[own]
        pairs = torch.empty_like(y)
        pairs[order] = y
        return (pairs.view(-1, self.top_k, self.hidden) * routing.weights.unsqueeze(2).to(x.dtype)).sum(1)


MODELS = [
    Model("Qwen3-30B-A3B", 2048, 768, 128, 8, ExpertGate("silu"), False),
    Model("gpt-oss-20b", 2880, 2880, 32, 4, ExpertGate("swiglu"), True),
    Model("gpt-oss-20b in MXFP4", 2880, 2880, 32, 4, ExpertGate("swiglu"), True, is_mxfp4=True),
]


@dataclass
class Batch:
    """Tokens, and their logits in each layer."""

    model: Model
    x: Tensor
    logits: list[Tensor]

    @classmethod
    def random(cls, model: Model, num_tokens: int) -> Batch:
        x = torch.randn(num_tokens, model.hidden, device="cuda").to(BF16)
        logits = [torch.randn(num_tokens, model.num_experts, device="cuda") for _ in range(LAYERS)]
        return cls(model, x, logits)

    def layer(self, layer: int) -> Tensor:
        routing = self.model.route(self.logits[layer])
        return self.model.experts_out(self.model.experts_in(self.x, routing, layer), routing, layer)


def graph_us(run: Callable[[int], object], num_tokens: int) -> float:
    """Microseconds of run(layer)."""
    calls = LAYERS * (8 if num_tokens <= 256 else 1)
    for layer in range(LAYERS):
        run(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(i % LAYERS)
    best = float("inf")
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3)
    return best / calls


def norm_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


def check(model: Model, num_tokens: int) -> str:
    """The error of a layer, and whether tokens alone and in halves have the same bits."""
    batch = Batch.random(model, num_tokens)
    x, routing, (up, down) = batch.x, model.route(batch.logits[0]), model.plain[0]
    up_bias, down_bias = model.layers[0][2:]
    y = model.experts_out(model.experts_in(x, routing, 0), routing, 0)
    expected_h = reference.experts_in(x.float(), up, up_bias, routing, model.num_experts, model.gate)
    expected = reference.experts_out(expected_h, down, down_bias, routing, model.num_experts)
    same = True
    for part in (slice(0, 1), slice(num_tokens - 1, num_tokens), slice(0, (num_tokens + 1) // 2)):
        some = Routing(routing.experts[part], routing.weights[part])
        same &= torch.equal(model.experts_out(model.experts_in(x[part], some, 0), some, 0), y[part])
    error = norm_error(y, expected)
    return f"{num_tokens}: {error:.1e}{'' if error < 8e-3 else ' WRONG'}{'' if same else ' OTHER BITS'}"


def timings(model: Model, tokens: tuple[int, ...]) -> None:
    print(f"{'tokens':>6}{'experts':>8}{'route':>8}{'in':>8}{'out':>8}{'layer':>9}{'torch':>9}{'x':>6}{'':>7}rate")
    for n in tokens:
        batch = Batch.random(model, n)
        routings = [model.route(logits) for logits in batch.logits]
        hs = [model.experts_in(batch.x, routing, i) for i, routing in enumerate(routings)]
        parts = [
            graph_us(lambda i, b=batch: model.route(b.logits[i]), n),
            graph_us(lambda i, b=batch, r=routings: model.experts_in(b.x, r[i], i), n),
            graph_us(lambda i, h=hs, r=routings: model.experts_out(h[i], r[i], i), n),
        ]
        us = graph_us(batch.layer, n)
        try:
            torch_us = graph_us(lambda i, b=batch, r=routings: model.by_torch(b.x, r[i], i), n)
            other = f"{torch_us:>9.1f}{torch_us / us:>6.2f}"
        except Exception as error:
            other = f"{type(error).__name__[:14]:>15}"
        used = sum(len(routing.experts.unique()) for routing in routings) / LAYERS
        weight = 3 * model.inner * model.hidden
        num_bytes = MXFP4.num_bytes(weight) if model.is_mxfp4 else 2 * weight
        gb, tflop = used * num_bytes / us / 1e3, 2 * n * model.top_k * weight / us / 1e6
        times = "".join(f"{part:>8.1f}" for part in parts)
        print(f"{n:>6}{used:>8.0f}{times}{us:>9.1f}{other}{gb:>7.0f} GB/s {tflop:.0f} TFLOP/s", flush=True)


# -- a sweep ----------------------------------------------------------------------------------------------------------


def tiles(model: Model, num_tokens: int) -> list[int]:
    """Sizes of tiles: the default, and of large batches its neighbours. 0: the whole batch is a tile."""
    if num_tokens <= SCAN_TOKENS:
        return [0, 16] if num_tokens > 16 else [0]
    default = tile_tokens(num_tokens, model.top_k, model.num_experts)
    return [size for size in (default, default // 2, default * 2) if MIN_TILE_TOKENS <= size <= MAX_TILE_TOKENS]


def tunings(tile: int, gated: bool) -> Iterator[ExpertTuning]:
    halves = 2 if gated else 1
    for rows, columns, warps, stages, tma in itertools.product(
        (64, 128, 256), (64, 128), (4, 8), (3, 4, 6), (False, True)
    ):
        registers = halves * rows * tile / warps / 32
        stage_bytes = (halves * rows + tile) * columns * 2
        usual = 40 << 10 <= stages * stage_bytes <= 216 << 10 and registers <= 128 and halves * rows <= 256
        if usual and warps == (8 if halves * rows * tile > 8192 else 4):
            yield ExpertTuning(rows, columns, warps, stages, tma)


def describe(tile: int, tuning: ExpertTuning) -> str:
    tma = "t" if tuning.tma else ""
    return f"{tile or 'scan'} {tuning.rows}x{tuning.columns} w{tuning.num_warps} s{tuning.num_stages}{tma}"


def sweep_cases(model: Model, num_tokens: int) -> Iterator[tuple[str, str, Callable[[int], object]]]:
    """(product, tuning, call)."""
    batch = Batch.random(model, num_tokens)
    plain = [model.route(logits) for logits in batch.logits]
    hs = [torch.randn(num_tokens, model.top_k, model.inner, device="cuda").to(BF16) for _ in range(LAYERS)]
    for tile in tiles(model, num_tokens):
        routings = [assign(Routing(r.experts, r.weights), model.num_experts, tile or None) for r in plain]
        tokens = routings[0].tokens
        for gated_product in (True, False):
            default = expert_tuning(batch.x, tokens, gated_product)
            for tuning in dict.fromkeys((default, *tunings(tokens, gated_product))):
                if model.is_mxfp4 and (tuning.columns != STEP_COLUMNS or tuning.tma):
                    continue
                call: Callable[[int], object]
                if gated_product:
                    call = lambda i, t=tuning, r=routings: model.experts_in(batch.x, r[i], i, t)  # noqa: E731
                else:
                    call = lambda i, t=tuning, r=routings: model.experts_out(hs[i], r[i], i, t)  # noqa: E731
                yield "in" if gated_product else "out", describe(tile, tuning), call


def sweep(model: Model, tokens: tuple[int, ...], end: float) -> None:
    """The five fastest of each product and number of tokens."""
    for n in tokens:
        timed: dict[str, list[tuple[float, str]]] = {"in": [], "out": []}
        for product, name, call in sweep_cases(model, n):
            if time.monotonic() > end:
                print("time is over")
                return
            try:
                timed[product].append((graph_us(call, n), name))
            except Exception as error:
                print(n, product, name, repr(error)[:80])
        for product, results in timed.items():
            first = results[0] if results else (0.0, "")
            best = "".join(f" | {us:.1f} {name}" for us, name in sorted(results)[:5])
            print(f"{n:>6} {product:<4} default {first[0]:.1f} {first[1]}{best}", flush=True)


def compile_all(*passes: Callable[[], object]) -> None:
    """Compile in parallel what the passes launch."""
    begin = time.monotonic()
    lines = precompile.list_kernels(*passes)
    compilers = precompile.CompilerPool(len(os.sched_getaffinity(0)))
    num = compilers.compile(lines)
    compilers.close()
    print(f"{num} of {len(lines)} kernels compiled in {time.monotonic() - begin:.0f} s", flush=True)


def launch_all(model: Model, tokens: tuple[int, ...], with_sweep: bool) -> None:
    for n in tokens:
        Batch.random(model, n).layer(0)
        if with_sweep:
            for _, _, call in sweep_cases(model, n):
                call(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tokens", type=lambda text: tuple(map(int, text.split(","))), default=TOKENS)
    parser.add_argument("--seconds", type=float, default=300)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    end = time.monotonic() + args.seconds
    for model in MODELS:
        model.allocate(1)
        compile_all(partial(launch_all, model, args.tokens, args.sweep))
        model.allocate(LAYERS)
        print(f"\n{model.name}; errors:", *(check(model, n) for n in (1, 3, 64, 65, 300, 2000)), flush=True)
        timings(model, args.tokens)
    for model, share in zip(MODELS, (0.33, 0.5, 1.0), strict=True) if args.sweep else ():
        print(f"\n{model.name}, sweep")
        sweep(model, args.tokens, time.monotonic() + (end - time.monotonic()) * share)


if __name__ == "__main__":
    main()
