"""Measures the GPU's idle time between decode steps.

    python benchmarks/gpu_idle.py CONFIG_DIR [--batch 256] [--length 256] [--json]

CONFIG_DIR holds a config.json; weights are random. Requests of equal length decode together, in two runs. One runs
under CUDA's profiler, which records the start and end of each kernel. The other is only timed, since the profiler may
slow a run down. A gap is the time without a running kernel between the last kernel of a step and the first kernel of
the next step. Copies do not count as work.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

NUM_PROMPT = 64
FIRST, LAST = (
    "_prepare_decode_inputs",
    "_commit_sampled_tokens",
)  # kernels of a step (kernels/triton/sampling/step_inputs.py)


class Kernel(NamedTuple):
    """A kernel's run. Times in us."""

    name: str
    begin: float
    end: float


def gaps_between_steps(kernels: Iterable[Kernel]) -> tuple[list[float], float]:
    """Return the gap before each step that directly follows another, except the first, and the total time of these gaps
    and the steps before them. All in us."""
    gaps: list[float] = []
    begins: list[float] = []
    busy_until, after_step = 0.0, False
    for name, begin, end in sorted(kernels, key=lambda kernel: kernel.begin):
        if after_step and name.startswith(FIRST):
            gaps.append(max(0.0, begin - busy_until))
            begins.append(begin)
        if name.startswith((FIRST, LAST)):
            after_step = name.startswith(LAST)
        busy_until = max(busy_until, end)
    return gaps[1:], begins[-1] - begins[0] if begins else 0.0


def measure(model: str, batch: int, length: int) -> dict[str, Any]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    import octavo

    rng = random.Random(0)
    vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    prompts = [[rng.randrange(vocab_size // 2) for _ in range(NUM_PROMPT)] for _ in range(batch)]
    llm = octavo.LLM(model, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048)
    params = octavo.SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True, detokenize=False)

    def run() -> float:
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    run()
    unprofiled_s = run()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        profiled_s = run()
        torch.cuda.synchronize()
    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    ]
    gaps, span = gaps_between_steps(kernels)
    if not gaps:
        raise SystemExit("the profiler recorded no steps; check that CUPTI is installed")
    return {
        "model": Path(model).name,
        "batch": batch,
        "steps": len(gaps),
        "step_us": round(span / len(gaps), 1),
        "gap_us": round(statistics.median(gaps), 2),
        "gap_p99_us": round(sorted(gaps)[int(0.99 * (len(gaps) - 1))], 1),
        "idle": round(sum(gaps) / span, 4),
        "s": round(unprofiled_s, 4),
        "s_watched": round(profiled_s, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="CONFIG_DIR")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--length", type=int, default=256, help="output tokens per request")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    row = measure(args.model, args.batch, args.length)
    if args.json:
        print(json.dumps(row))
        return
    print(f"{row['model']}, {row['batch']} sequences, {row['steps']} steps of {row['step_us']:.0f} us")
    print(f"between steps: {row['gap_us']} us (median), {row['gap_p99_us']} us (p99)")
    print(
        f"idle between steps: {row['idle']:.2%}; run time {row['s_watched']} s with the profiler, {row['s']} s without"
    )


if __name__ == "__main__":
    main()
