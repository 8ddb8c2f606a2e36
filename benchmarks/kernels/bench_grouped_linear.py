"""Matrix products of a decode step on the CPU, with quantised weights kept in their bits and with bfloat16.

The matrices are those of Qwen2.5-0.5B, 24 layers with weights of their own. Each step takes turns with a pass that
only reads the same bytes. Figures are processor time of one thread: the median of the layers' best.

    OMP_NUM_THREADS=1 python benchmarks/kernels/bench_grouped_linear.py --rows 1 16 512
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from octavo.kernels.cpu import native, packed_linear
from octavo.kernels.cpu.grouped_linear import GroupedWeight, pack_groups
from octavo.kernels.groups import SUPER_SIZE, GroupForm, Groups

HIDDEN, INTERMEDIATE = 896, 4864
SHAPES = [(1152, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
FORMS = {
    "Q4_0": GroupForm(4, 32, zero=8),
    "Q4_1": GroupForm(4, 32, has_minima=True),
    "AWQ": GroupForm(4, 128, has_zeros=True),
    "Q4_K": GroupForm(4, 32, has_minima=True, is_nested=True),
    "Q5_0": GroupForm(5, 32, zero=16),
    "Q5_K": GroupForm(5, 32, has_minima=True, is_nested=True),
    "Q6_K": GroupForm(6, 16, zero=32, is_nested=True),
    "Q8_0": GroupForm(8, 32, zero=128),
}


def random_groups(form: GroupForm, num_out: int, num_in: int) -> Groups:
    num_in = -(-num_in // SUPER_SIZE) * SUPER_SIZE if form.is_nested else num_in
    num_groups, num_supers = num_in // form.group_size, num_in // SUPER_SIZE
    values = torch.randint(0, 2**form.bits, (num_out, num_in), dtype=torch.uint8)
    small = torch.full((num_out, num_groups), 0.01, dtype=torch.float16)
    integers = torch.randint(0, 64, (num_out, num_groups), dtype=torch.uint8)
    supers = torch.full((num_out, num_supers), 0.0003, dtype=torch.float16) if form.is_nested else None
    scales = (integers.to(torch.int8) if form.group_size == 16 else integers) if form.is_nested else small
    minima = (integers if form.is_nested else small) if form.has_minima else None
    zeros = torch.randint(0, 16, (num_out, num_groups), dtype=torch.uint8) if form.has_zeros else None
    return Groups(form, values, scales, zeros, minima, supers, supers if form.has_minima else None)


def pack(kind: str, num_out: int, num_in: int) -> packed_linear.PackedWeight:
    if kind == "bfloat16":
        packed = packed_linear.pack(torch.randn(num_out, num_in).bfloat16())
    else:
        packed = pack_groups(random_groups(FORMS[kind], num_out, num_in))
    assert packed is not None
    return packed


def recorded(layer: list[packed_linear.PackedWeight], num_rows: int) -> native.RecordedCalls:
    """The products of a layer, without Python between them."""
    library = native.library()
    assert library is not None
    with library.record() as calls:
        for weight, (_, num_in) in zip(layer, SHAPES, strict=True):
            weight(torch.randn(num_rows, num_in).bfloat16(), None)
    calls.replay()
    return calls


def elapsed(call: Callable[[], object]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    call()
    return clock() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["bfloat16", *FORMS])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each kind and number of rows")
    args = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    for kind in args.kinds:
        weights = [[pack(kind, *shape) for shape in SHAPES] for _ in range(args.layers)]
        memory = [[w.blocks if isinstance(w, GroupedWeight) else w.tiles for w in layer] for layer in weights]
        words = [[m.flatten().view(torch.int64) for m in layer] for layer in memory]
        num_bytes = sum(m.nbytes for layer in memory for m in layer)
        for num_rows in args.rows:
            steps = [recorded(layer, num_rows) for layer in weights]
            best = [[float("inf")] * args.layers for _ in range(2)]
            begin = time.perf_counter()
            while time.perf_counter() - begin < args.seconds:
                for i in range(args.layers):
                    best[0][i] = min(best[0][i], elapsed(lambda layer=words[i]: [m.sum() for m in layer]))
                for i in range(args.layers):
                    best[1][i] = min(best[1][i], elapsed(steps[i].replay))
            reading, product = (statistics.median(times) * args.layers for times in best)
            macs = args.layers * num_rows * sum(num_out * num_in for num_out, num_in in SHAPES)
            speed = f"{num_bytes / product / 1e9:5.1f} GB/s, reading {num_bytes / reading / 1e9:5.1f}"
            print(
                f"{kind:9} {num_rows:4} rows  {product * 1e3:8.2f} ms  {speed}: "
                f"{reading / product:.2f}  {macs / product / 1e9:4.0f} GMAC/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
