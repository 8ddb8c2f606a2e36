"""Engines behind one router against lone engines with the same share of the machine each: output tokens a second.

    python benchmarks/replicas.py [--model NAME] [--rounds N] [--requests N] [--num N]
    python benchmarks/replicas.py --mixed --load-format dummy --model CONFIG_DIR     on two GPUs

Lone engines get every second request each. All engines start anew in each round, by turns, with empty caches. Requests
of --groups share a prefix of --prefix tokens, so that lone engines compute each prefix once each, and a router's
engines need not. --mixed is nano-vllm's load instead, against one engine on one GPU: prompts and outputs of 100 to
1,024 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from octavo import SamplingParams
from octavo.config import EngineArgs
from octavo.frontend.engine_client import EngineClient
from octavo.frontend.process_transport import ProcessTransport, make_client
from octavo.frontend.replicas import placements, replicas_client
from octavo.params.sampling_params import RequestOutputKind
from octavo.router.router import ROUTER_POLICIES

Client = EngineClient[Any]


Work = list[tuple[list[int], int]]
"""Prompts, and the number of tokens that each gets."""


async def tokens_per_second(clients: Sequence[Client], work: Work) -> float:
    async def complete(client: Client, prompt: list[int], num: int) -> int:
        params = SamplingParams(temperature=0.6, seed=1, max_tokens=num, ignore_eos=True, detokenize=False)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        async for output in client.generate({"prompt_token_ids": prompt}, params):
            num = len(output.outputs[0].token_ids)
        return num

    await asyncio.gather(*[client.start() for client in clients])
    try:
        for client in clients:  # the first steps are slow
            await asyncio.gather(*[complete(client, [7, 8, i], 8) for i in range(16)])
        begin = time.perf_counter()
        parts = [complete(clients[i % len(clients)], *part) for i, part in enumerate(work)]
        return sum(await asyncio.gather(*parts)) / (time.perf_counter() - begin)
    finally:
        for client in clients:
            client.shutdown()


def work_of(options: argparse.Namespace, seed: int) -> Work:
    rnd = random.Random(seed)
    if options.mixed:
        sizes = [(rnd.randint(100, 1024), rnd.randint(100, 1024)) for _ in range(options.requests)]
        return [(rnd.choices(range(10_000), k=num_prompt), num) for num_prompt, num in sizes]
    prefixes = [rnd.choices(range(1000, 20000), k=options.prefix) for _ in range(options.groups)]
    tails = [rnd.choices(range(1000, 20000), k=64) for _ in range(options.requests)]
    return [(rnd.choice(prefixes) + tail, options.max_tokens) for tail in tails]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--num", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--prefix", type=int, default=128)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--load-format", default="auto")
    options = parser.parse_args()
    skip = options.load_format == "dummy"
    args = EngineArgs(model=options.model, load_format=options.load_format, skip_tokenizer_init=skip)

    def lone() -> list[Client]:
        if options.mixed:
            return [make_client(args, ProcessTransport(args, placement=placements(1)[0]))]
        return [make_client(args, ProcessTransport(args, placement=place)) for place in placements(options.num)]

    baseline = "one engine" if options.mixed else "lone engines"
    ways: dict[str, Callable[[], list[Client]]] = {baseline: lone}
    for policy in ROUTER_POLICIES[: 1 if options.mixed else None]:
        ways[policy] = lambda policy=policy: [replicas_client(args, options.num, policy)]
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds):
        for name, make in random.Random(number).sample(list(ways.items()), len(ways)):
            speed = asyncio.run(tokens_per_second(make(), work_of(options, number)))
            speeds[name].append(speed)
            print(f"round {number}, {name}: {speed:,.1f} tokens/s", file=sys.stderr, flush=True)
    print("| | tokens/s | ratio |\n|---|--:|--:|")
    for name, values in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(values, speeds[baseline], strict=True))
        print(f"| {name} | {statistics.median(values):,.0f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
