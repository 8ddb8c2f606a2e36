"""vLLM's speculation, to compare with `benchmarks/speculation.py --synthetic` on the same machine: tokens per second.

    python benchmarks/speculation_vllm.py CONFIG_DIR [--drafts K] [--right P] [--batch N ...]    in vLLM's environment

Its n-gram method on the GPU, with random weights. A draft is accepted with the given chance, as there. vLLM's random
weights write one token again and again, so its drafts never lack a match. The last column has the drafts that it
accepted, of those that it computed.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any


def counters(llm: Any) -> dict[str, float]:
    found = ((m.name.rpartition("spec_decode_")[2], getattr(m, "value", 0)) for m in llm.get_metrics())
    return {name: value for name, value in found if name in ("num_draft_tokens", "num_accepted_tokens")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafts", type=int, default=7, help="0: no speculation")
    parser.add_argument("--right", type=float, default=0.9, help="chance of a draft to be right")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from vllm import LLM, SamplingParams

    config: dict[str, Any] | None = None
    if options.drafts:
        config = {"method": "ngram_gpu", "num_speculative_tokens": options.drafts}
        config |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1, "rejection_sample_method": "synthetic"}
        config["synthetic_acceptance_rates"] = [options.right**depth for depth in range(1, options.drafts + 1)]
    common: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096}
    llm = LLM(options.model, **common, speculative_config=config, gpu_memory_utilization=0.85, disable_log_stats=False)
    params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True, detokenize=False)
    print("| sequences | tokens/s | accepted of drafts |\n|--:|--:|--:|")
    for batch in options.batch:
        prompts = [{"prompt_token_ids": random.Random(i).choices(range(1000), k=32) * 16} for i in range(batch)]
        seconds = []
        for _ in range(options.rounds):
            before, begin = counters(llm), time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - begin)
            accepted, drafted = (
                counters(llm).get(f"num_{kind}_tokens", 0) - before.get(f"num_{kind}_tokens", 0)
                for kind in ("accepted", "draft")
            )
        print(f"| {batch} | {batch * 256 / min(seconds):,.0f} | {accepted:.0f} of {drafted:.0f} |", flush=True)


if __name__ == "__main__":
    main()
