"""Rotary embedding of 9 + 3 heads of 64: `python benchmarks/kernels/bench_rope.py [--threads N]`."""

from __future__ import annotations

import torch
from timing import compare, start

from octavo.kernels import reference
from octavo.kernels.cpu import ops as cpu


def main() -> None:
    start(__doc__, devices=["cpu"])
    table = reference.rope_table(64, 2048, 10000.0)
    for n in (1, 20, 512):
        q, k = torch.randn(n, 15, 64).split([9, 6], dim=1)
        positions = torch.randint(2048, (n,))
        compare(
            f"apply_rope {n} tokens",
            lambda q=q, k=k, positions=positions: cpu.apply_rope(q, k, positions, table),
            lambda q=q, k=k, positions=positions: reference.apply_rope(q, k, positions, table),
        )


if __name__ == "__main__":
    main()
