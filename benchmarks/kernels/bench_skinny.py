"""Linear layers of small batches on a GPU, compared with cuBLAS and separate kernels.

    PYTHONPATH=src python benchmarks/kernels/bench_skinny.py [--products] [--tunings] [--processes N]

Microseconds, from replays of a CUDA graph over so many weights that none is found in the cache. Each line is the four
products of a layer in sequence, with everything around them except attention: `library` is cuBLAS with two
add_rms_norms and the gate's activation, `triton` is `linear.skinny`, `hopper` is `linear.skinny_hopper`.

--products  time each product alone, many calls in sequence. `library` is rms_norm, a product and the activation, or
            only the product where a residual sum follows, which the next norm includes; `ours` uses the default tuning
--tunings   also print the fastest of many tunings in Triton, from which `skinny_tuning` was chosen; N processes
            compile them first
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.triton.activation import silu_mul
from octavo.kernels.triton.linear.skinny import add_linear, make_normed_residual, norm_linear
from octavo.kernels.triton.linear.tuning import (
    SkinnyTuning,
    Tuning,
    skinny_hopper_tuning,
    skinny_tuning,
    supports_hopper,
)
from octavo.kernels.triton.norms import add_rms_norm, rms_norm

NUM_TOKENS = (1, 8, 16, 32)
MORE_TOKENS = (48, 64, 72, 96, 128, 160, 192, 256)  # above 64, used by default for small weights only
CALLS = 40
BEYOND_CACHE = 160 << 20


class Product(NamedTuple):
    model: str
    name: str
    num_out: int
    num_in: int

    @property
    def gated(self) -> bool:
        return self.name == "gate_up"

    @property
    def normed(self) -> bool:
        return self.name in ("qkv", "gate_up")


def layer(model: str, hidden: int, qkv: int, attended: int, inner: int) -> list[Product]:
    return [
        Product(model, "qkv", qkv, hidden),
        Product(model, "out", hidden, attended),
        Product(model, "gate_up", inner, hidden),
        Product(model, "down", hidden, inner),
    ]


PRODUCTS = [
    *layer("Qwen2.5-0.5B", 896, 1152, 896, 4864),
    *layer("Qwen3-0.6B", 1024, 4096, 2048, 3072),
    *layer("Qwen2.5-1.5B", 1536, 2048, 1536, 8960),
    *layer("Llama-3.2-3B", 3072, 5120, 3072, 8192),
    *layer("Llama-3.1-8B", 4096, 6144, 4096, 14336),
]


def tunings(product: Product, num_tokens: int) -> Iterator[SkinnyTuning]:
    tiles = [(16, 128, 2, 4), (16, 256, 2, 3), (32, 128, 2, 4), (32, 256, 4, 3)]
    if num_tokens > 16:
        tiles = [(16, 128, 2, 4), (32, 128, 4, 4), (64, 64, 4, 5), (64, 128, 4, 3), (128, 64, 8, 4)]
    for rows, columns, warps, stages in tiles:
        programs = cdiv(product.num_out, rows)
        for splits in (1,) if product.gated else (1, 2, 4, 8, 16):
            if 100 <= programs * splits <= 1100 and product.num_in // splits >= columns:
                yield SkinnyTuning(rows, columns, splits, warps, stages)


def make_call(product: Product, num_tokens: int, tuning: SkinnyTuning | None) -> Callable[[Tensor], object]:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    x = make(num_tokens, product.num_in)
    if product.normed:
        residual, gate = make_normed_residual(x, make(product.num_in)), "silu" if product.gated else ""
        residual = replace(residual, squares=residual.squares.expand(product.num_in // 32, -1).contiguous() / 32)
        return lambda w: norm_linear(residual, 1e-6, w, gate=gate, tuning=tuning)
    norm = make(product.num_out)
    residual = make_normed_residual(make(num_tokens, product.num_out), norm)
    return lambda w: add_linear(residual, x, w, None, norm, tuning=tuning)


def make_library_call(product: Product, num_tokens: int) -> Callable[[Tensor], object]:
    x = torch.randn(num_tokens, product.num_in, device="cuda").bfloat16()
    norm = torch.ones(product.num_in, device="cuda").bfloat16()
    if product.gated:
        return lambda w: silu_mul(F.linear(rms_norm(x, norm, 1e-6), w))
    return lambda w: F.linear(rms_norm(x, norm, 1e-6) if product.normed else x, w)


def replay_us(run: Callable[[Tensor], object], weights: list[Tensor]) -> float:
    def all_calls() -> None:
        for i in range(CALLS):
            run(weights[i % len(weights)])

    run(weights[0])
    return graph_us(all_calls) / CALLS


def graph_us(calls: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    best = float("inf")
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3)
    return best


def library_layers(layers: list[list[Tensor]], x: Tensor, norm: Tensor) -> None:
    residual = torch.zeros_like(x)
    for qkv, out, gate_up, down in layers:
        x, residual = add_rms_norm(x, residual, norm, 1e-6)
        x, residual = add_rms_norm(F.linear(F.linear(x, qkv)[:, : out.shape[1]], out), residual, norm, 1e-6)
        x = F.linear(silu_mul(F.linear(x, gate_up)), down)


def our_layers(
    layers: list[list[Tensor]], x: Tensor, norm: Tensor, tune: Callable[[int, int, int, bool], Tuning]
) -> None:
    def tuned(weight: Tensor, gated: bool = False) -> Tuning:
        return tune(len(weight) // (2 if gated else 1), weight.shape[1], len(x), gated)

    residual = make_normed_residual(x, norm)
    for qkv, out, gate_up, down in layers:
        projected = norm_linear(residual, 1e-6, qkv, tuning=tuned(qkv))
        residual = add_linear(residual, projected[:, : out.shape[1]], out, None, norm, tuning=tuned(out))
        inner = norm_linear(residual, 1e-6, gate_up, None, "silu", tuning=tuned(gate_up, True))
        residual = add_linear(residual, inner, down, None, norm, tuning=tuned(down))


def compare_layers() -> None:
    print(f"{'':<14}{'tokens':>6}{'library':>9}{'triton':>8}{'hopper':>8}{'TB/s':>7}   us a layer")
    for first in range(0, len(PRODUCTS), 4):
        products = PRODUCTS[first : first + 4]
        num_bytes = sum(weight_of(product).nbytes for product in products)
        layers = [[weight_of(p) for p in products] for _ in range(max(4, 4 * BEYOND_CACHE // num_bytes))]
        norm = torch.ones(products[0].num_in, device="cuda").bfloat16()
        for num_tokens in NUM_TOKENS + MORE_TOKENS:
            x = torch.randn(num_tokens, products[0].num_in, device="cuda").bfloat16()
            variants: list[Callable[[], object] | None] = [partial(library_layers, layers, x, norm), None, None]
            if num_tokens not in MORE_TOKENS:
                variants[1] = partial(our_layers, layers, x, norm, skinny_tuning)
            if supports_hopper(layers[0][0]):
                variants[2] = partial(our_layers, layers, x, norm, skinny_hopper_tuning)
            line, fastest = f"{products[0].model:<14}{num_tokens:>6}", float("inf")
            for variant, width in zip(variants, (9, 8, 8), strict=True):
                if variant is None:
                    line += " " * width
                    continue
                variant()
                us = graph_us(variant) / len(layers)
                line += f"{us:>{width}.1f}"
                fastest = min(fastest, us)
            print(f"{line}{num_bytes / fastest / 1e6:>7.2f}", flush=True)


def weight_of(product: Product) -> Tensor:
    rows = product.num_out * (2 if product.gated else 1)
    return torch.randn(rows, product.num_in, device="cuda").bfloat16()


def compile_share(share: int, of: int) -> None:
    """Run every `of`-th call once, to put its kernels into the cache on disk."""
    jobs = [(p, n, t) for p in PRODUCTS for n in NUM_TOKENS for t in tunings(p, n)]
    for product, num_tokens, tuning in jobs[share::of]:
        try:
            make_call(product, num_tokens, tuning)(weight_of(product))
        except Exception as e:
            print(product, num_tokens, tuning, repr(e)[:100], flush=True)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--tunings", action="store_true")
    parser.add_argument("--processes", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    compare_layers()
    if not (args.products or args.tunings):
        return
    if args.tunings:
        context = multiprocessing.get_context("spawn")
        with context.Pool(args.processes) as pool:
            pool.map(partial(compile_share, of=args.processes), range(args.processes))
    print(f"{'':<14}{'product':<10}{'tokens':>6}{'library':>9}{'ours':>8}{'TB/s':>7}")
    for product in PRODUCTS:
        weights = [weight_of(product)]
        weights += [weight_of(product) for _ in range(min(CALLS, BEYOND_CACHE // weights[0].nbytes))]
        for num_tokens in NUM_TOKENS:
            library = replay_us(make_library_call(product, num_tokens), weights)
            ours = replay_us(make_call(product, num_tokens, None), weights)
            rate = weights[0].nbytes / ours / 1e6
            line = f"{product.model:<14}{product.name:<10}{num_tokens:>6}{library:>9.2f}{ours:>8.2f}{rate:>7.2f}"
            if args.tunings:
                timed = []
                for tuning in tunings(product, num_tokens):
                    try:
                        timed.append((replay_us(make_call(product, num_tokens, tuning), weights), tuning))
                    except Exception as e:
                        print(repr(e)[:100])
                timed.sort(key=lambda pair: pair[0])
                line += "".join(
                    f" | {us:.2f} {t.rows}x{t.columns} s{t.splits} w{t.num_warps} n{t.num_stages}"
                    for us, t in timed[:5]
                )
            print(line, flush=True)


if __name__ == "__main__":
    main()
