"""Sampling from SmolLM2's vocabulary: `python benchmarks/kernels/bench_sampling.py [--threads N]`."""

from __future__ import annotations

import torch
from timing import compare, start

from octavo.kernels import cpu, reference
from octavo.kernels.batch import SamplingTensors

VOCAB_SIZE = 49152


def params(num_rows: int, temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0) -> SamplingTensors:
    rows, zeros = list(range(num_rows)), [0] * num_rows
    return SamplingTensors.from_lists(
        [temperature] * num_rows, [top_k] * num_rows, [top_p] * num_rows, [0.0] * num_rows, rows, zeros, rows
    )


def main() -> None:
    start(__doc__)
    for num_rows in (1, 20):
        logits = torch.randn(num_rows, VOCAB_SIZE) * 4
        cases = {
            "greedy": params(num_rows, temperature=0.0),
            "all": params(num_rows),
            "top_k 40": params(num_rows, top_k=40),
            "top_p 0.9": params(num_rows, top_p=0.9),
        }
        for name, p in cases.items():
            compare(
                f"{name} x {num_rows}",
                lambda logits=logits, p=p: cpu.sample(logits, p),
                lambda logits=logits, p=p: reference.sample(logits, p),
            )
        compare(
            f"finite_rows x {num_rows}",
            lambda logits=logits: cpu.finite_rows(logits),
            lambda logits=logits: reference.finite_rows(logits),
        )


if __name__ == "__main__":
    main()
