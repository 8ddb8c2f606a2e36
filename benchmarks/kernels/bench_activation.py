"""SiLU-mul with the MLP size of SmolLM2-135M, on a GPU of Llama-3.1-8B:
`python benchmarks/kernels/bench_activation.py [--device cuda] [--threads N]`."""

from __future__ import annotations

from timing import compare, on_gpu, random, start

from octavo.kernels import reference


def main() -> None:
    ops = start(__doc__)
    width = 14336 if on_gpu() else 1536
    for n in (1, 20, 512):
        x = random(n, 2 * width)
        compare(
            f"silu_mul {n} x {width}",
            lambda x=x: ops.silu_mul(x),
            lambda x=x: reference.silu_mul(x),
            num_bytes=3 * x.nbytes // 2,
        )


if __name__ == "__main__":
    main()
