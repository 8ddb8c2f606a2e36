"""Writing K and V by slot: `python benchmarks/kernels/bench_kv_write.py [--threads N]`."""

from __future__ import annotations

import torch
from timing import compare, start

from octavo.kernels import cpu, reference


def main() -> None:
    start(__doc__)
    kv = torch.zeros(257, 30, 2, 3, 16, 64)
    for n in (1, 20, 512):
        k, v = torch.randn(2, n, 3, 64)
        slots = torch.randperm(4096)[:n] + 16
        compare(
            f"kv_write {n} tokens",
            lambda k=k, v=v, slots=slots: cpu.kv_write(k, v, kv[:, 7], slots),
            lambda k=k, v=v, slots=slots: reference.kv_write(k, v, kv[:, 7], slots),
        )


if __name__ == "__main__":
    main()
