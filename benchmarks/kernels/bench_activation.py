"""SiLU-mul of SmolLM2-135M's MLP: `python benchmarks/kernels/bench_activation.py [--threads N]`."""

from __future__ import annotations

import torch
from timing import compare, start

from octavo.kernels import cpu, reference


def main() -> None:
    start(__doc__)
    for n in (1, 20, 512):
        x = torch.randn(n, 2 * 1536)
        compare(f"silu_mul {n} x 1536", lambda x=x: cpu.silu_mul(x), lambda x=x: reference.silu_mul(x))


if __name__ == "__main__":
    main()
