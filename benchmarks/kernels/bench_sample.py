"""Sampling with SmolLM2's vocabulary; on a GPU with Qwen3's, and also log-probabilities and logits processors:
`python benchmarks/kernels/bench_sample.py [--device cuda] [--threads N]`."""

from __future__ import annotations

from types import ModuleType

import torch
from timing import compare, on_gpu, random, start
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.metadata import SamplingTensors
from octavo.kernels.row_state import (
    LOGIT_BIAS,
    MAX_LOGPROBS,
    MIN_TOKENS,
    NUM_LOGPROBS,
    PENALTIES,
    LogitsProcessorState,
    RowState,
)


def params(num_rows: int, temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0) -> SamplingTensors:
    rows, zeros = list(range(num_rows)), [0] * num_rows
    filters = [top_k] * num_rows, [top_p] * num_rows, [0.0] * num_rows
    device = torch.get_default_device()
    return SamplingTensors.from_lists([temperature] * num_rows, *filters, rows, zeros, rows, device=device)


def main() -> None:
    ops = start(__doc__)
    for num_rows in (1, 32, 256) if on_gpu() else (1, 20):
        logits = random(num_rows, 151936 if on_gpu() else 49152) * 4
        cases = {
            "greedy": params(num_rows, temperature=0.0),
            "all": params(num_rows),
            "top_k 40": params(num_rows, top_k=40),
            "top_p 0.9": params(num_rows, top_p=0.9),
        }
        for name, p in cases.items():
            compare(
                f"{name} x {num_rows}",
                lambda logits=logits, p=p: ops.sample(logits, p),
                lambda logits=logits, p=p: reference.sample(logits, p),
                num_bytes=logits.nbytes,
            )
        compare(
            f"finite_rows x {num_rows}",
            lambda logits=logits: ops.finite_rows(logits),
            lambda logits=logits: reference.finite_rows(logits),
            num_bytes=logits.nbytes,
        )
        if on_gpu():
            compare_row_features(ops, logits)


def compare_row_features(ops: ModuleType, logits: Tensor) -> None:
    """Log-probabilities of no row, one row and all rows; beam candidates; logits processors."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    state, rows = RowState.empty(num_rows, 1, device), torch.arange(num_rows)
    tokens, step_counter = torch.randint(vocab_size, (num_rows,)), torch.tensor([0, 0])
    ring = torch.zeros(1, num_rows, 2 + 2 * MAX_LOGPROBS, dtype=torch.int32, device="cpu", pin_memory=True)
    on_device = ring.to(device)  # for the reference
    for num_asking, num in ((0, -1), (1, 5), (num_rows, 0), (num_rows, 5), (num_rows, MAX_LOGPROBS)):
        state.sampling_params[:, NUM_LOGPROBS] = -1
        state.sampling_params[:num_asking, NUM_LOGPROBS] = num
        compare(
            f"logprobs {num} of {num_asking} of {num_rows} rows",
            lambda: ops.write_logprobs(state, rows, logits, tokens, ring, step_counter),
            lambda: reference.write_logprobs(state, rows, logits, tokens, on_device, step_counter),
        )
    for num in (8, 64):
        compare(
            f"best {num} of {num_rows} rows",
            lambda num=num: ops.packed_top_logprobs(logits, num),
            lambda num=num: reference.packed_top_logprobs(logits, num),
        )
    processors = LogitsProcessorState.empty(num_rows, vocab_size, torch.zeros(num_rows + 1, 64, dtype=torch.int32))
    processors.penalties[:] = torch.tensor([1.1, 0.5, 0.5])
    processors.bias_ids[:] = -1
    processors.bias_ids[:, :4] = torch.arange(4)
    wide, positions = logits.float(), torch.full((num_rows,), 9)
    for name, flags in (
        ("no processors", 0),
        ("penalties", PENALTIES),
        ("biases, min_tokens", LOGIT_BIAS | MIN_TOKENS),
    ):
        processors.enabled[:] = flags
        compare(
            f"{name} x {num_rows}",
            lambda: ops.apply_row_logits_processors(wide, rows, positions, state, processors),
            lambda: reference.apply_row_logits_processors(wide, rows, positions, state, processors),
        )


if __name__ == "__main__":
    main()
