"""What several answers to one prompt cost, beside as many requests that share nothing; and beams beside samples.

    python benchmarks/decoding.py [--model NAME] [--rounds N]

One prompt of 512 tokens, four answers of 8 tokens and of 64: as one request with n=4, and as four requests with the
prefix cache off. And a beam search of width 4 beside n=4, 64 tokens. The engines take turns; medians of each round's
ratio. Prompt tokens that were computed are counted, not assumed.
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


def measure(llm: LLM, prompt: list[int], how: str, num: int) -> tuple[float, int]:
    """Seconds, and prompt tokens that were computed."""
    ids = {"prompt_token_ids": prompt}
    before = llm.stats().num_tokens_computed
    begin = time.perf_counter()
    if how == "beam":
        params = BeamSearchParams(beam_width=WIDTH, max_tokens=num, ignore_eos=True)
        llm.beam_search(ids, params, use_tqdm=False)
    elif how == "n":
        llm.generate(ids, sampled(num, WIDTH, seed=1), use_tqdm=False)
    else:
        llm.generate([ids] * WIDTH, [sampled(num, 1, seed=i) for i in range(WIDTH)], use_tqdm=False)
    seconds = time.perf_counter() - begin
    return seconds, llm.stats().num_tokens_computed - before - WIDTH * (num - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, which are as fast")
    args = parser.parse_args()
    rng = random.Random(0)
    cases = [("n", 8), ("separate", 8), ("n", 64), ("separate", 64), ("beam", 64)]
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    options = {"max_model_len": 1024, "skip_tokenizer_init": True, "load_format": args.load_format}
    with LLM(args.model, enable_prefix_caching=False, **options) as llm:
        for attempt in range(args.rounds + 1):
            prompt = [rng.randrange(100, 40000) for _ in range(NUM_PROMPT)]
            for how, num in cases if attempt % 2 else reversed(cases):
                took, computed = measure(llm, prompt, how, num)
                if attempt:  # the first warms up
                    seconds[how, num].append(took)
                if attempt == 1:
                    print(f"{how:>9} {num:>3} tokens: {computed} prompt tokens computed")
    for (how, num), times in seconds.items():
        took = statistics.median(times)
        print(f"{how:>9} {num:>3} tokens: {took:.3f} s, {WIDTH * num / took:.1f} tok/s")
    for what, (ours, theirs), goal in (
        ("n=4, 8 tokens, beside four requests", (("n", 8), ("separate", 8)), 2.0),
        ("n=4, 64 tokens, beside four requests", (("n", 64), ("separate", 64)), 1.2),
        ("a beam of 4 beside n=4, 64 tokens", (("beam", 64), ("n", 64)), 0.5),
    ):
        ratio = statistics.median(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))
        print(f"  {what:<40} {ratio:.2f} x  goal {goal:g} x")


if __name__ == "__main__":
    main()
