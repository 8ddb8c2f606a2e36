"""Compares the preemption modes `auto`, `recompute` and `swap` on this machine.

    python benchmarks/preemption.py [--model NAME] [--rounds 7] [--block-sizes 8 16 64 256]

Requests have ShareGPT-like lengths, with prompts an eighth and outputs a quarter as long, and share no prefix. The pool
holds 40 % of the blocks that the running requests need. The modes alternate, each in its own engine. Ratios are medians
over the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from octavo import LLM, SamplingParams
from octavo.integers import cdiv
from octavo.simulate import traces

NUM_REQUESTS, MAX_LEN = 24, 512
MODES = ("auto", "recompute", "swap")


def workload(seed: int) -> tuple[list[dict[str, Any]], list[SamplingParams], int]:
    """Prompts, parameters, and the total final length of the sixteen longest sequences."""
    rng = random.Random(seed)
    sampled = traces.sharegpt_like(NUM_REQUESTS, seed=seed)
    lengths = [
        (max(1, int(p) // 8), max(2, int(o) // 4)) for p, o in zip(sampled.prompts, sampled.outputs, strict=True)
    ]
    prompts = [{"prompt_token_ids": [rng.randrange(100, 40000) for _ in range(p)]} for p, _ in lengths]
    params = [SamplingParams(max_tokens=o, temperature=0, ignore_eos=True, detokenize=False) for _, o in lengths]
    return prompts, params, sum(sorted(p + o for p, o in lengths)[-16:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, which give the same speed")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[8, 16, 64, 256])
    args = parser.parse_args()
    prompts, params, demand = workload(1)
    for size in args.block_sizes:
        blocks = max(cdiv(MAX_LEN, size), demand * 4 // 10 // size)
        options: dict[str, Any] = {"num_gpu_blocks_override": blocks, "block_size": size, "max_model_len": MAX_LEN}
        options |= {"max_num_seqs": 16, "skip_tokenizer_init": True, "load_format": args.load_format}
        llms = {mode: LLM(args.model, preemption_mode=mode, **options) for mode in MODES}
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        for attempt in range(args.rounds + 1):
            for mode in MODES if attempt % 2 else reversed(MODES):
                llms[mode].reset_prefix_cache()
                begin = time.perf_counter()
                llms[mode].generate(prompts, params, use_tqdm=False)
                if attempt:  # the first round warms up, and `auto` calibrates
                    seconds[mode].append(time.perf_counter() - begin)
        counts = {m: (llm.stats().num_preemptions, llm.stats().num_swap_preemptions) for m, llm in llms.items()}
        for llm in llms.values():
            llm.close()
        fastest = [min(a, b) for a, b in zip(seconds["recompute"], seconds["swap"], strict=True)]
        ratio = statistics.median(a / b for a, b in zip(seconds["auto"], fastest, strict=True))
        medians = {mode: statistics.median(times) for mode, times in seconds.items()}
        results = ", ".join(
            f"{m} {s:.2f} s ({counts[m][0]} preempted, {counts[m][1]} swapped)" for m, s in medians.items()
        )
        print(f"blocks of {size:>3} ({blocks} of them): {results}; auto / faster mode of each round {ratio:.3f}")


if __name__ == "__main__":
    main()
