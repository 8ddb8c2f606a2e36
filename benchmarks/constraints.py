"""Throughput with a JSON schema, penalties or log-probabilities, relative to plain requests in the same engine.

    python benchmarks/constraints.py [MODEL] [--num-requests 32] [--num-tokens 64] [--runs 7]

All requests decode the same number of tokens: the schema's document is longer, so none ends early. All kinds sample
with the same temperature and differ only in the feature. The kinds alternate. Prints one JSON object.
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
        num = args.num_requests
        kinds: dict[str, tuple[int, dict[str, Any]]] = {  # name -> (requests with the feature, their parameters)
            "free": (0, {}),
            "penalties": (num, {"repetition_penalty": 1.1, "presence_penalty": 0.5}),
            "logprobs": (num, {"logprobs": 5}),
            "logprobs of one": (1, {"logprobs": 5}),
            "logprobs of 20": (num, {"logprobs": 20}),
            "json": (num, {"structured_outputs": {"json": SCHEMA}}),
        }
        speeds: dict[str, list[float]] = {name: [] for name in kinds}
        for run in range(-1, args.runs):  # the first warms up
            for name, (num_with, feature) in list(kinds.items())[:: -1 if run % 2 else 1]:
                speed = measure(llm, prompts, args.num_tokens, num_with, feature)
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


def measure(llm: LLM, prompts: list[str], num_tokens: int, num_with: int, feature: dict[str, Any]) -> float:
    """Generated tokens per second, prefill time included. The first `num_with` requests use the feature."""
    params = [
        SamplingParams(
            temperature=0.8, seed=i, max_tokens=num_tokens, ignore_eos=True, **(feature if i < num_with else {})
        )
        for i in range(len(prompts))
    ]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    assert all(len(o.outputs[0].token_ids) == num_tokens for o in outputs)
    if "structured_outputs" in feature:
        assert all(o.outputs[0].text.lstrip().startswith("[") for o in outputs)
    return len(prompts) * num_tokens / seconds


if __name__ == "__main__":
    main()
