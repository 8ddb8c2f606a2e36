"""Tokens a second of requests that are held to a JSON schema, have penalties, or ask for log-probabilities, beside
those that are free; in one engine and by turns.

    python benchmarks/constraints.py [MODEL] [--num-requests 32] [--num-tokens 64] [--runs 7]

All requests decode the same number of tokens: the schema's document is longer than that, and nothing ends early. All
kinds draw with noise, so that what differs is what they ask for alone. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from octavo import LLM, SamplingParams

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mail": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.(com|org)$"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "blue", "green"]}, "maxItems": 4},
    },
    "required": ["name", "age", "mail", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 100}
PROMPT = "Write a list of people as JSON, number {}. Each has a name, an age, a mail address and tags."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, which are as fast")
    args = parser.parse_args()
    options = {"max_num_seqs": args.num_requests, "max_model_len": 512, "load_format": args.load_format}
    with LLM(args.model, enable_prefix_caching=False, **options) as llm:
        prompts = [PROMPT.format(i) for i in range(args.num_requests)]
        all_ask = args.num_requests
        kinds: dict[str, tuple[int, dict[str, Any]]] = {  # how many ask for what
            "free": (0, {}),
            "penalties": (all_ask, {"repetition_penalty": 1.1, "presence_penalty": 0.5}),
            "logprobs": (all_ask, {"logprobs": 5}),
            "logprobs of one": (1, {"logprobs": 5}),
            "logprobs of 20": (all_ask, {"logprobs": 20}),
            "json": (all_ask, {"structured_outputs": {"json": SCHEMA}}),
        }
        speeds: dict[str, list[float]] = {name: [] for name in kinds}
        for run in range(-1, args.runs):  # the first warms up
            for name, (num_asking, asked) in list(kinds.items())[:: -1 if run % 2 else 1]:
                speed = measure(llm, prompts, args.num_tokens, num_asking, asked)
                if run >= 0:
                    speeds[name].append(speed)
    ratios = {name: [s / f for s, f in zip(found, speeds["free"], strict=True)] for name, found in speeds.items()}
    print(
        json.dumps(
            {
                "model": args.model,
                "num_requests": args.num_requests,
                "num_tokens": args.num_tokens,
                **{
                    f"{name.replace(' ', '_')}_tokens_per_s": [round(s, 1) for s in found]
                    for name, found in speeds.items()
                },
                "median_ratios": {name: round(statistics.median(r), 3) for name, r in ratios.items()},
            }
        )
    )


def measure(llm: LLM, prompts: list[str], num_tokens: int, num_asking: int, asked: dict[str, Any]) -> float:
    """Tokens a second, over prompts and all; the first `num_asking` requests ask."""
    params = [
        SamplingParams(
            temperature=0.8, seed=i, max_tokens=num_tokens, ignore_eos=True, **(asked if i < num_asking else {})
        )
        for i in range(len(prompts))
    ]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    assert all(len(o.outputs[0].token_ids) == num_tokens for o in outputs)
    if "structured_outputs" in asked:
        assert all(o.outputs[0].text.lstrip().startswith("[") for o in outputs)
    return len(prompts) * num_tokens / seconds


if __name__ == "__main__":
    main()
