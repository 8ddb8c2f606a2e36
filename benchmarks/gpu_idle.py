"""How long a GPU does nothing between the steps of a batch that decodes.

    python benchmarks/gpu_idle.py CONFIG_DIR [--batch 256] [--length 256] [--json]

CONFIG_DIR holds a config.json; weights are random. Equal requests decode together, in two runs: one is watched by
CUDA's profiler, which says when each kernel began and ended, the other only timed, since being watched may slow a run
down. A gap between steps is the time without any kernel (copies do not count as work) before the first kernel of a
step, where the one before it was the last of a step.
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


class Ran(NamedTuple):
    """A kernel; us."""

    name: str
    begin: float
    end: float


def gaps_between_steps(kernels: Iterable[Ran]) -> tuple[list[float], float]:
    """us without a kernel before each step that follows on another but the first such, and all the us that these gaps
    and the steps in front of them take."""
    gaps: list[float] = []
    begins: list[float] = []
    busy_until, follows = 0.0, False
    for name, begin, end in sorted(kernels, key=lambda kernel: kernel.begin):
        if follows and name.startswith(FIRST):
            gaps.append(max(0.0, begin - busy_until))
            begins.append(begin)
        if name.startswith((FIRST, LAST)):
            follows = name.startswith(LAST)
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
    alone = run()
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        seconds = run()
        torch.cuda.synchronize()
    kernels = [
        Ran(event.name, event.time_range.start, event.time_range.end)
        for event in watched.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    ]
    gaps, span = gaps_between_steps(kernels)
    if not gaps:
        raise SystemExit("the profiler saw no steps: is CUPTI there?")
    return {
        "model": Path(model).name,
        "batch": batch,
        "steps": len(gaps),
        "step_us": round(span / len(gaps), 1),
        "gap_us": round(statistics.median(gaps), 2),
        "gap_p99_us": round(sorted(gaps)[int(0.99 * (len(gaps) - 1))], 1),
        "idle": round(sum(gaps) / span, 4),
        "s": round(alone, 4),
        "s_watched": round(seconds, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="CONFIG_DIR")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--length", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    row = measure(args.model, args.batch, args.length)
    if args.json:
        print(json.dumps(row))
        return
    print(f"{row['model']}, {row['batch']} sequences, {row['steps']} steps of {row['step_us']:.0f} us")
    print(f"between steps: {row['gap_us']} us (median), {row['gap_p99_us']} us (99 in 100 are shorter)")
    print(f"idle between steps: {row['idle']:.2%}; the run took {row['s_watched']} s watched, {row['s']} s alone")


if __name__ == "__main__":
    main()
