"""Norms of SmolLM2-135M's hidden size: `python benchmarks/kernels/bench_norms.py [--threads N]`."""

from __future__ import annotations

import torch
from timing import compare, start

from octavo.kernels import cpu, reference


def main() -> None:
    start(__doc__)
    weight = torch.randn(576)
    for n in (1, 20, 512):
        x, residual = torch.randn(2, n, 576)
        compare(
            f"rms_norm {n} x 576",
            lambda x=x: cpu.rms_norm(x, weight, 1e-5),
            lambda x=x: reference.rms_norm(x, weight, 1e-5),
        )
        compare(
            f"add_rms_norm {n} x 576",
            lambda x=x, residual=residual: cpu.add_rms_norm(x, residual, weight, 1e-5),
            lambda x=x, residual=residual: reference.add_rms_norm(x, residual, weight, 1e-5),
        )


if __name__ == "__main__":
    main()
