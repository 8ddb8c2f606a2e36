"""Writing K and V to their slots, alone and after QK-norm and RoPE (on a GPU, in one launch):
`python benchmarks/kernels/bench_write.py [--device cuda] [--threads N]`."""

from __future__ import annotations

from typing import Any

import torch
from timing import compare, on_gpu, random, start

from octavo.kernels import reference


def main() -> None:
    ops = start(__doc__)
    kv = 0 * random(257, 30, 2, 8 if on_gpu() else 3, 16, 128 if on_gpu() else 64)
    heads, dim = kv.shape[3], kv.shape[5]
    table = reference.rope_table(dim, 4096, 10000.0, device=kv.device)
    norms: dict[str, Any] = {"q_norm": random(dim), "k_norm": random(dim), "eps": 1e-6}
    for n in (1, 20, 512):
        q, k, v = random(n, 4 * heads, dim).split([2 * heads, heads, heads], dim=1)
        slots, positions = torch.randperm(4096)[:n] + 16, torch.arange(n)
        compare(
            f"kv_write {n} tokens",
            lambda k=k, v=v, slots=slots: ops.kv_write(k, v, kv[:, 7], slots),
            lambda k=k, v=v, slots=slots: reference.kv_write(k, v, kv[:, 7], slots),
            num_bytes=2 * (k.numel() + v.numel()) * k.element_size(),
        )
        args = (q, k, v, positions, table, kv[:, 7], slots)
        compare(
            f"norms, rope and kv_write {n} tokens",
            lambda args=args: ops.rope_kv_write(*args, **norms),
            lambda args=args: reference.rope_kv_write(*args, **norms),
        )


if __name__ == "__main__":
    main()
