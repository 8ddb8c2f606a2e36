"""Compares n=4 with four separate requests, and beam search with n=4.

    python benchmarks/decoding.py [--model NAME] [--rounds N]

A prompt of 512 tokens gets four outputs of 8 or 64 tokens, as one request with n=4 and as four requests, with the
prefix cache off. A beam search of width 4 is compared with n=4 at 64 tokens. Cases alternate, and ratios are medians
over the rounds. The computed prompt tokens are counted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from octavo import LLM, BeamSearchParams, SamplingParams

NUM_PROMPT, WIDTH = 512, 4


def sampled(num: int, n: int, seed: int) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=num, temperature=1.0, seed=seed, ignore_eos=True)


def measure(llm: LLM, prompt: list[int], case: str, num: int) -> tuple[float, int]:
    """Seconds, and the number of prompt tokens computed."""
    ids = {"prompt_token_ids": prompt}
    before = llm.stats().num_tokens_computed
    begin = time.perf_counter()
    if case == "beam":
        params = BeamSearchParams(beam_width=WIDTH, max_tokens=num, ignore_eos=True)
        llm.beam_search(ids, params, use_tqdm=False)
    elif case == "n":
        llm.generate(ids, sampled(num, WIDTH, seed=1), use_tqdm=False)
    else:
        llm.generate([ids] * WIDTH, [sampled(num, 1, seed=i) for i in range(WIDTH)], use_tqdm=False)
    seconds = time.perf_counter() - begin
    return seconds, llm.stats().num_tokens_computed - before - WIDTH * (num - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, which give the same speed")
    args = parser.parse_args()
    rng = random.Random(0)
    cases = [("n", 8), ("separate", 8), ("n", 64), ("separate", 64), ("beam", 64)]
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in cases}
    options = {"max_model_len": 1024, "skip_tokenizer_init": True, "load_format": args.load_format}
    with LLM(args.model, enable_prefix_caching=False, **options) as llm:
        for attempt in range(args.rounds + 1):
            prompt = [rng.randrange(100, 40000) for _ in range(NUM_PROMPT)]
            for case, num in cases if attempt % 2 else reversed(cases):
                took, computed = measure(llm, prompt, case, num)
                if attempt:  # the first round warms up
                    seconds[case, num].append(took)
                if attempt == 1:
                    print(f"{case:>9} {num:>3} tokens: {computed} prompt tokens computed")
    for (case, num), times in seconds.items():
        took = statistics.median(times)
        print(f"{case:>9} {num:>3} tokens: {took:.3f} s, {WIDTH * num / took:.1f} tok/s")
    for comparison, (new, baseline), goal in (
        ("n=4 vs four requests, 8 tokens", (("n", 8), ("separate", 8)), 2.0),
        ("n=4 vs four requests, 64 tokens", (("n", 64), ("separate", 64)), 1.2),
        ("beam search of 4 vs n=4, 64 tokens", (("beam", 64), ("n", 64)), 0.5),
    ):
        ratio = statistics.median(b / a for a, b in zip(seconds[new], seconds[baseline], strict=True))
        print(f"  {comparison:<40} {ratio:.2f} x  goal {goal:g} x")


if __name__ == "__main__":
    main()
