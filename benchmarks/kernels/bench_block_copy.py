"""Block copies and swaps: `python benchmarks/kernels/bench_block_copy.py [--device cuda] [--threads N]`."""

from __future__ import annotations

import torch
from timing import compare, on_gpu, random, start

from octavo.kernels import reference


def main() -> None:
    ops = start(__doc__)
    kv = 0 * random(257, 30, 2, 3, 16, 64)
    host = torch.zeros(129, *kv.shape[1:], device="cpu")
    for n in (1, 8, 64):
        src, dst = torch.randperm(128)[:n] + 1, torch.randperm(128)[:n] + 129
        num_bytes = n * kv[0].nbytes
        compare(
            f"block_copy {n}",
            lambda src=src, dst=dst: ops.block_copy(kv, src, dst),
            lambda src=src, dst=dst: reference.block_copy(kv, src, dst),
            num_bytes=num_bytes,
        )
        if not on_gpu():  # bench_swap.py times the GPU's swaps
            compare(
                f"swap_out {n}",
                lambda src=src: ops.swap_out(kv, host, src, src),
                lambda src=src: reference.swap_out(kv, host, src, src),
                num_bytes=num_bytes,
            )


if __name__ == "__main__":
    main()
