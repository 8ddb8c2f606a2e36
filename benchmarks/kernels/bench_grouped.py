"""Products with quantised weights on a GPU, checked, then compared with bfloat16.

    PYTHONPATH=src python benchmarks/kernels/bench_grouped.py [--sweep] [--rows 1,16,256] [--seconds N]

Microseconds, from replays of a CUDA graph over so many weights that none is found in the cache. Shapes are those of
Llama-3-8B: 32 layers and the head. `bf16` is cuBLAS, `ours` the project's own product of small batches, and `e4m3` the
library's float8 product with one scale for each row of x and of the weight, without rounding x. `fp8` keeps x in 16
bits; `fp8 rounded` rounds it, too. So do the library's products, whose times include rounding: `fp8 library` has a
scale for each 128 inputs, `fp8 blocks` for each block of 128 x 128, `fp8 row` for each row. `fp8 tiles` and `fp8 row
tiles` are our own. `int4 cublas N` dequantises N MiB at a time. GB/s up to 64 rows, TFLOP/s for more, and how many
times as fast as bf16.

--sweep    also time many tunings of each product, and print the fastest, from which `grouped_tuning` was chosen
--seconds  stop a sweep after so many
--no-compare  only sweep
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.integers import cdiv
from octavo.kernels.groups import GroupForm, Groups
from octavo.kernels.reference.norms import NormedResidual
from octavo.kernels.triton import precompile
from octavo.kernels.triton.linear import float8_tiles_hopper, tuning
from octavo.kernels.triton.linear.grouped import GroupedWeight, float8_product, multiplies_float8, pack_groups
from octavo.kernels.triton.linear.grouped_kernels import quantise
from octavo.kernels.triton.linear.skinny import make_normed_residual, norm_linear
from octavo.kernels.triton.linear.tuning import GroupedTuning

SHAPES = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
NUM_LAYERS = 32
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048)
FORMS = {
    "int4": GroupForm(4, 128, zero=8),
    "int4 zeros": GroupForm(4, 128, has_zeros=True),
    "int4 g32": GroupForm(4, 32, zero=8),
    "int8": GroupForm(8, 128, zero=128),
    "fp8": GroupForm(8, 128, is_float=True),
}
FP8_ROW, FP8_ROW_TILES = "fp8 row", "fp8 row tiles"
BEYOND_CACHE = 160 << 20
CALLS = 24
Call = Callable[[Any], Any]
DRY: list[bool] = []
"""Not empty: kernels are listed, and none is launched."""


def make_groups(form: GroupForm, num_out: int, num_in: int) -> Groups:
    shape, size = (num_out, num_in // form.group_size), (num_out, num_in)
    if form.is_float:
        values = torch.randn(size, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    else:
        values = torch.randint(0, 1 << form.bits, size, device="cuda", dtype=torch.uint8)
    zeros = torch.randint(0, 1 << form.bits, shape, device="cuda", dtype=torch.uint8) if form.has_zeros else None
    scales = torch.rand(shape, device="cuda") / 64 + 0.001
    if form.is_float and shape[1] > 1:
        scales = scales[::128].repeat_interleave(128, 0)[:num_out].contiguous()  # blocks
    return Groups(form, values, scales if form.is_float else scales.bfloat16(), zeros)


def norm_error(y: Tensor, expected: Tensor) -> float:
    return float((y.float() - expected).norm() / expected.norm())


def product(weight: GroupedWeight, parts: int | None = None, tuned: GroupedTuning | None = None) -> Call:
    """The kernel's product; parts: of x in float8, see `grouped_product`."""

    def run(x: Tensor) -> Tensor:
        y = torch.empty(len(x), weight.num_out, dtype=x.dtype, device=x.device)
        weight._launch(x, None, out=y, parts=parts, tuning=tuned)
        return y

    return run


@functools.cache
def squares(num_tokens: int) -> Tensor:
    return torch.ones(32, num_tokens, device="cuda")


def gated(weight: GroupedWeight, parts: int | None = None, tuned: GroupedTuning | None = None) -> Call:
    """The fused product of a gated MLP's first half, at most 64 rows."""

    def run(x: Tensor) -> Tensor:
        y = torch.empty(len(x), weight.num_out // 2, dtype=x.dtype, device=x.device)
        weight._launch(
            x, None, "silu", out=y, squares=squares(tuning.padded_tokens(len(x))), eps=1e-6, parts=parts, tuning=tuned
        )
        return y

    return run


def by_blocks(weight: GroupedWeight, x: Tensor) -> Tensor:
    """The library's product with random scales for blocks of 128 x 128; num_in a multiple of 512."""
    values, scales = quantise(x, 128)
    planes = weight.planes[:, ::128].T.contiguous().view(torch.float32).T
    kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    rows = weight.words.view(-1, weight.num_in)
    return F.scaled_mm(values, rows.T, scales.T, kinds[0], planes, kinds[1], output_dtype=x.dtype)


def by_library(weight: GroupedWeight, x: Tensor) -> Tensor:
    values, scales = quantise(x, weight.float8_group)
    by_row, words = weight.kind == "row", weight.words.view(-1, weight.num_in)
    planes = weight.planes.view(1, -1) if by_row else weight.planes.view(torch.float32)
    return float8_product(values, words, scales, planes, by_row, x.dtype)[: len(x)]


def by_tiles(weight: GroupedWeight, x: Tensor) -> Tensor:
    """The best tile for so many rows, also where the library is faster."""
    values, scales = quantise(x, weight.float8_group)
    chosen = tuning.float8_tiles_tuning(len(x), False) or tuning.float8_tiles_tuning(len(x), True)
    y = x.new_empty(len(x), weight.num_out)
    float8_tiles_hopper.launch(weight, values, scales, None, chosen, out=y)
    return y


def check() -> bool:
    """Every kernel against float32; the largest errors of each form."""
    good = True
    for name, form in [
        *FORMS.items(),
        ("int8 row", GroupForm(8, 896, zero=128)),
        ("fp8 row", GroupForm(8, 896, is_float=True)),
    ]:
        errors: dict[str, float] = {}
        for num_out, num_in in ((1000, 896), (512, 896)):
            groups = make_groups(form, num_out, num_in)
            weight, wide = pack_groups(groups), groups.dequantised()
            assert weight is not None
            exact = [torch.equal(weight.gather_rows(torch.arange(300, device="cuda")), wide[:300].bfloat16())]
            exact.append(norm_error(weight.dequantised(0, num_out, torch.bfloat16), wide.bfloat16().float()) == 0)
            for rows, dtype in itertools.product((1, 9, 16, 33, 64, 100, 300), (torch.bfloat16, torch.float16)):
                x = torch.randn(rows, num_in, device="cuda").to(dtype)
                expected = x.float() @ wide.T
                results = {
                    f"16 {dtype}"[:12]: product(weight)(x),
                    "cublas": weight._by_cublas(x, None, torch.empty_like(expected, dtype=dtype)),
                }
                if form.is_float:
                    results["widened"], results["e4m3 x"] = product(weight, 0)(x), product(weight, 1)(x)
                    if multiplies_float8(x.device, form.group_size == num_in) and dtype == torch.bfloat16:
                        results["e4m3 library"] = by_library(weight, x)[:, :num_out]
                        results["e4m3 tiles"] = by_tiles(weight, x)
                if rows <= tuning.MAX_SMALL_BATCH_GROUPED and dtype == torch.bfloat16:
                    residual = make_normed_residual(x, torch.ones(num_in, device="cuda", dtype=dtype))
                    normed = residual.x.float() * residual.scale(1e-6)
                    gate, up = (normed @ wide.T).chunk(2, 1)
                    expected_gate, y = F.silu(gate) * up, weight.norm_linear(residual, 1e-6, None, "silu")
                    errors["gate"] = max(errors.get("gate", 0), norm_error(y, expected_gate))
                    stream = make_normed_residual(
                        torch.randn_like(expected).to(dtype), torch.ones(num_out, device="cuda", dtype=dtype)
                    )
                    added = weight.add_linear(stream, x, None, torch.ones(num_out, device="cuda", dtype=dtype))
                    errors["add"] = max(errors.get("add", 0), norm_error(added.x, expected + stream.x.float()))
                for key, y in results.items():
                    errors[key] = max(errors.get(key, 0), norm_error(y, expected))
        right = all(exact) and all(error < (0.035 if "e4m3" in key else 0.006) for key, error in errors.items())
        good &= right
        print(
            f"{'right' if right else 'WRONG':<6}{name:<12}",
            exact,
            {k: f"{e:.1e}" for k, e in errors.items()},
            flush=True,
        )
    x = torch.randn(64, 4096, device="cuda").bfloat16()
    square = pack_groups(make_groups(FORMS["int4"], 4096, 4096))
    assert square is not None
    run = product(square)
    same = [torch.equal(run(x[:n])[:1], run(x[:1])) for n in (2, 17, 64)]
    print("a row has the same bits alone and with 1, 16, 63 others:", same)
    return good


def graph_us(run: Call, weights: list[Any], calls: int = CALLS) -> float:
    """Microseconds of a call."""
    run(weights[0])
    if DRY:
        return 1.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(weights[i % len(weights)])
    best = float("inf")
    for _ in range(4):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3)
    return best / calls


def copies(weight: Any) -> list[Any]:
    """So many weights that they do not fit into the cache; their contents do not matter."""
    num = 1 if DRY else min(CALLS, cdiv(BEYOND_CACHE, weight.nbytes))
    if isinstance(weight, Tensor):
        return [weight] + [weight.clone() for _ in range(num - 1)]
    fields = {name: getattr(weight, name) for name in weight.__dataclass_fields__}
    return [weight] + [
        GroupedWeight(**fields | {"words": weight.words.clone(), "planes": weight.planes.clone()})
        for _ in range(num - 1)
    ]


PIECES = (8, 16, 32, 64)
"""MiB of a dequantised part of a weight."""
FLOAT8_X = ("fp8 rounded", "fp8 library", "fp8 blocks", "fp8 tiles", FP8_ROW, FP8_ROW_TILES)
VARIANTS = ("bf16", "ours", "e4m3", *FORMS, *FLOAT8_X, *(f"int4 cublas {size}" for size in PIECES))


def make_call(name: str, x: Tensor, weight: Any) -> Call | None:
    """A product with such a weight; None where there is none, or where it is of no interest."""
    n = len(x)
    if name == "bf16":
        return lambda w: F.linear(x, w)
    if name == "ours":
        residual = NormedResidual(x, x, torch.ones(32, tuning.padded_tokens(n), device="cuda"))
        few = n <= tuning.max_small_batch_tokens(weight)
        return (lambda w: norm_linear(residual, 1e-6, w)) if few else None
    if name == "e4m3":
        rounded, scale = x.to(torch.float8_e4m3fn), torch.ones(n, 1, device="cuda")
        scales = torch.ones(1, len(weight), device="cuda")
        few = n < 16 or DRY
        return None if few else lambda w: torch._scaled_mm(rounded, w.T, scale, scales, out_dtype=torch.bfloat16)
    if name in FLOAT8_X and n < 16:
        return None
    if name == "fp8 rounded":
        return lambda w: product(w, 1)(x)
    if name == "fp8 blocks":
        return lambda w: by_blocks(w, x)
    if name in FLOAT8_X:
        return lambda w: by_tiles(w, x) if "tiles" in name else by_library(w, x)
    if name.startswith("int4 cublas"):
        y, size = x.new_empty(n, weight.num_out), int(name.split()[-1]) << 20
        return (lambda w: w._by_cublas(x, None, y, size)) if n >= 64 else None
    return lambda w: product(w)(x)


def timings(rows: tuple[int, ...]) -> None:
    totals: dict[tuple[str, int], float] = {}
    for (shape, (num_out, num_in)), name in itertools.product(SHAPES.items(), VARIANTS):
        if shape == "head" and name not in ("bf16", "int4", "fp8"):
            continue
        form = FORMS.get(name, FORMS.get(name.split()[0]))
        form = GroupForm(8, num_in, is_float=True) if FP8_ROW in name else form
        weight: Any
        if form is None:
            weight = torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16)
            weight = weight.to(torch.float8_e4m3fn) if name == "e4m3" else weight
        else:
            weight = pack_groups(make_groups(form, num_out, num_in))
        if name == "bf16":
            base: dict[int, float] = {}
            print(f"\n{shape} {num_out} x {num_in}\n{'':<12}" + "".join(f"{n:>20}" for n in rows), flush=True)
        weights, line = copies(weight), f"{name:<12}"
        for n in rows:
            call = make_call(name, torch.randn(n, num_in, device="cuda").bfloat16(), weight)
            if call is None or (shape == "head" and n > 256):
                line += " " * 20
                continue
            try:
                us = graph_us(call, weights, CALLS if n < 2048 else 6)
            except Exception as error:
                line += f"{type(error).__name__[:19]:>20}"
                continue
            base.setdefault(n, us)
            rate = weight.nbytes / us / 1e3 if n <= 64 else 2 * n * num_out * num_in / us / 1e6
            line += f"{us:>8.1f}{rate:>5.0f}{'G' if n <= 64 else 'T'}{base[n] / us:>5.2f}x"
            key = f"{name} head" if shape == "head" else name
            totals[key, n] = totals.get((key, n), 0) + us * (1 if shape == "head" else NUM_LAYERS) / 1e3
        print(line, flush=True)
        del weights
    print(f"\nms of {NUM_LAYERS} layers, and of the head\n{'':<12}" + "".join(f"{n:>9}" for n in rows))
    for name in dict.fromkeys(name for name, _ in totals):
        print(f"{name:<12}" + "".join(f"{totals[name, n]:>9.3f}" if (name, n) in totals else " " * 9 for n in rows))


def fused(rows: tuple[int, ...]) -> None:
    """The four products of a layer, fused with norms, gate and sums, one after another: ms of all layers."""
    print(f"\nfused products, ms of {NUM_LAYERS} layers\n{'':<12}" + "".join(f"{n:>9}" for n in rows))
    for name, form in FORMS.items():
        layers = []
        for _ in range(4):
            packed = [pack_groups(make_groups(form, *SHAPES[part])) for part in ("qkv", "out", "gate_up", "down")]
            layers.append(packed)
        line, norm = f"{name:<12}", torch.ones(4096, device="cuda").bfloat16()
        for n in rows:
            if n > tuning.MAX_SMALL_BATCH_GROUPED:
                continue
            x = torch.randn(n, 4096, device="cuda").bfloat16() / 64

            def step(layer: Any, x: Tensor = x, norm: Tensor = norm) -> None:
                qkv, out, gate_up, down = layer
                residual = make_normed_residual(x, norm)
                attended = qkv.norm_linear(residual, 1e-6)[:, :4096]
                residual = out.add_linear(residual, attended, None, norm)
                down.add_linear(residual, gate_up.norm_linear(residual, 1e-6, None, "silu"), None, norm)

            line += f"{graph_us(step, layers) * NUM_LAYERS / 1e3:>9.3f}"
        print(line, flush=True)


def tunings(num_out: int, num_in: int, rows: int, parts: int) -> Iterator[GroupedTuning]:
    sizes = {min(tuning.padded_tokens(rows), 64 * times) for times in ((1, 2, 4) if rows > 64 and not parts else (1,))}
    for tokens, splits, stages in itertools.product(sorted(sizes), (1, 2, 4, 8), (2, 3, 4, 5, 6, 8)):
        programs = cdiv(num_out, 128) * cdiv(rows, tokens) * splits
        if num_in < 512 * splits or (splits > 1 and programs > 600) or (programs < 60 and splits < 8):
            continue
        for warps, chunk in itertools.product((4, 8), (32, 64, 128)):
            if parts:
                usual = chunk == 128 and (tokens < 64 or stages <= 5)
            elif tokens <= 64:
                usual = warps == 4 and stages <= 4 and (chunk > 32 if tokens == 16 else chunk == 64)
            else:
                usual = warps == 8 and stages <= 4 and splits <= 2 and chunk <= 64
            if usual:
                yield GroupedTuning(tokens, splits, stages, warps, chunk)


def compile_all(*passes: Callable[[], object]) -> None:
    """Compile in parallel what the passes launch."""
    begin = time.monotonic()
    DRY.append(True)
    with contextlib.redirect_stdout(io.StringIO()):
        lines = precompile.list_kernels(*passes)
    DRY.clear()
    compilers = precompile.CompilerPool(len(os.sched_getaffinity(0)))
    print(
        f"{compilers.compile(lines)} of {len(lines)} kernels compiled in {time.monotonic() - begin:.0f} s", flush=True
    )
    compilers.close()


def sweep(rows: tuple[int, ...], seconds: float) -> None:
    end = time.monotonic() + (1e9 if DRY else seconds)
    kinds = {"fp8": (FORMS["fp8"], 2), "int4": (FORMS["int4"], 0), "fp8 rounded": (FORMS["fp8"], 1)}
    limits = {"fp8": (1, 64), "int4": (1, 256), "fp8 rounded": (128, 256)}
    for (name, (form, parts)), n in itertools.product(kinds.items(), rows):
        if not limits[name][0] <= n <= limits[name][1]:
            continue
        for shape in ("qkv", "out", "gate_up", "down", "gate"):
            if (n > tuning.MAX_SMALL_BATCH_GROUPED) if shape == "gate" else (name == "int4" and n < 64):
                continue
            run = gated if shape == "gate" else product
            num_out, num_in = SHAPES["gate_up" if shape == "gate" else shape]
            packed = pack_groups(make_groups(form, num_out, num_in))
            assert packed is not None
            num_out = num_out // 2 if shape == "gate" else num_out
            weights, x, timed = copies(packed), torch.randn(n, num_in, device="cuda").bfloat16(), []
            default = graph_us(lambda w, x=x, p=parts, run=run: run(w, p)(x), weights, 12)
            for tuned in tunings(num_out, num_in, n, parts):
                if time.monotonic() > end:
                    print("time is over")
                    return
                try:
                    us = graph_us(lambda w, x=x, p=parts, t=tuned, run=run: run(w, p, t)(x), weights, 12)
                    timed.append((us, tuned))
                except Exception as error:
                    print(tuned, repr(error)[:90])
            timed.sort(key=lambda pair: pair[0])
            best = "".join(
                f" | {us:.1f} n{t.tokens} s{t.splits} st{t.stages} w{t.num_warps} c{t.chunk}" for us, t in timed[:5]
            )
            print(f"{n:>5} {name:<11}{shape:<8} default {default:.1f}{best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=ROWS)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--no-compare", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    print(torch.cuda.get_device_name())
    passes: list[Callable[[], object]] = []
    if not args.no_compare:
        passes = [lambda: fused(args.rows), lambda: timings(args.rows)]
    if args.sweep:
        passes.append(lambda: sweep(args.rows, args.seconds))
    compile_all(check, *passes)
    good = check()
    for timed in passes:
        timed()
    print("all right" if good else "SOMETHING IS WRONG")


if __name__ == "__main__":
    main()
