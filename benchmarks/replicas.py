"""Engines behind one router against lone engines with the same share of the machine each: output tokens a second.

    python benchmarks/replicas.py [--model NAME] [--rounds N] [--requests N] [--num N]

Lone engines get every second request each. All engines start anew in each round, by turns, with empty caches. Requests
of --groups share a prefix of --prefix tokens, so that lone engines compute each prefix once each, and a router's
engines need not.
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
from octavo.router.router import ROUTER_POLICIES

Client = EngineClient[Any]


async def tokens_per_second(clients: Sequence[Client], prompts: list[list[int]], max_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    async def complete(client: Client, prompt: list[int]) -> int:
        num = 0
        async for output in client.generate({"prompt_token_ids": prompt}, params):
            num = len(output.outputs[0].token_ids)
        return num

    await asyncio.gather(*[client.start() for client in clients])
    try:
        for client in clients:  # the first steps are slow
            await asyncio.gather(*[complete(client, [7, 8, 9]) for _ in range(2 * len(clients))])
        begin = time.perf_counter()
        work = [complete(clients[i % len(clients)], prompt) for i, prompt in enumerate(prompts)]
        return sum(await asyncio.gather(*work)) / (time.perf_counter() - begin)
    finally:
        for client in clients:
            client.shutdown()


def prompts_of(options: argparse.Namespace, seed: int) -> list[list[int]]:
    rnd = random.Random(seed)
    prefixes = [rnd.choices(range(1000, 20000), k=options.prefix) for _ in range(options.groups)]
    tails = [rnd.choices(range(1000, 20000), k=64) for _ in range(options.requests)]
    return [rnd.choice(prefixes) + tail for tail in tails]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--num", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--prefix", type=int, default=128)
    options = parser.parse_args()
    args = EngineArgs(model=options.model)

    def lone() -> list[Client]:
        return [make_client(args, ProcessTransport(args, placement=place)) for place in placements(options.num)]

    ways: dict[str, Callable[[], list[Client]]] = {"lone engines": lone}
    for policy in ROUTER_POLICIES:
        ways[policy] = lambda policy=policy: [replicas_client(args, options.num, policy)]
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds):
        for name, make in random.Random(number).sample(list(ways.items()), len(ways)):
            speed = asyncio.run(tokens_per_second(make(), prompts_of(options, number), options.max_tokens))
            speeds[name].append(speed)
            print(f"round {number}, {name}: {speed:,.1f} tokens/s", file=sys.stderr, flush=True)
    print("| | tokens/s | ratio |\n|---|--:|--:|")
    for name, values in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(values, speeds["lone engines"], strict=True))
        print(f"| {name} | {statistics.median(values):,.0f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
