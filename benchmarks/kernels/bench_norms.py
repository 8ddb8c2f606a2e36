"""RMS norms with the hidden size of SmolLM2-135M, on a GPU of Llama-3.1-8B:
`python benchmarks/kernels/bench_norms.py [--device cuda] [--threads N]`."""

from __future__ import annotations

from timing import compare, on_gpu, random, start

from octavo.kernels import reference


def main() -> None:
    ops = start(__doc__)
    size = 4096 if on_gpu() else 576
    weight = random(size)
    for n in (1, 20, 512):
        x, residual = random(2, n, size)
        compare(
            f"rms_norm {n} x {size}",
            lambda x=x: ops.rms_norm(x, weight, 1e-5),
            lambda x=x: reference.rms_norm(x, weight, 1e-5),
            num_bytes=2 * x.nbytes,
        )
        compare(
            f"add_rms_norm {n} x {size}",
            lambda x=x, residual=residual: ops.add_rms_norm(x, residual, weight, 1e-5),
            lambda x=x, residual=residual: reference.add_rms_norm(x, residual, weight, 1e-5),
            num_bytes=4 * x.nbytes,
        )


if __name__ == "__main__":
    main()
