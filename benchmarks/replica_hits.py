"""Policies of the router on a trace, with real engines: prefix hits, and the time to the first token.

    python benchmarks/replica_hits.py TRACE [--requests N] [--rate N] [--blocks N] [--num N] [--rounds N]

TRACE is as for `octavo simulate`, e.g. Mooncake's conversations, whose lengths are divided by 16. Each policy has --num
engines with a share of the processors and --blocks blocks each. The pooled cache is one engine with all processors and
blocks. All engines start anew in each round, by turns, with empty caches. The model is a small Llama with weights from
nowhere, so that its steps are fast: neither hits nor steps depend on the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from octavo import SamplingParams
from octavo.config import EngineArgs
from octavo.frontend.engine_client import EngineClient
from octavo.frontend.process_transport import ProcessTransport, make_client
from octavo.frontend.replicas import placements, replicas_client
from octavo.router.router import ROUTER_POLICIES
from octavo.simulate.traces import Arrival, read_trace

Client = EngineClient[Any]

SCALE = 1 / 16
VOCAB_SIZE = 2048
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Result:
    """The share of the prompts' tokens that were cached, and seconds to the first token."""

    hits: float
    median_s: float
    p99_s: float


async def replay(client: Client, arrivals: Sequence[Arrival]) -> Result:
    """Send each request when it is due. Its time begins then, also if this process is late."""

    async def one(arrival: Arrival, begin: float) -> tuple[int, float]:
        prompt = tokens_of(arrival)
        await asyncio.sleep(begin + arrival.time_s - time.perf_counter())
        params = SamplingParams(temperature=0, max_tokens=arrival.num_output, ignore_eos=True, detokenize=False)
        first_s, num_cached = 0.0, 0
        async for output in client.generate({"prompt_token_ids": prompt}, params):
            first_s = first_s or time.perf_counter() - begin - arrival.time_s
            num_cached = output.num_cached_tokens or 0
        return num_cached, first_s

    await client.start()
    try:
        for number in range(8):  # the first steps are slow
            await one(Arrival(0.0, ((number, 500),), 8), time.perf_counter())
        await client.reset_prefix_cache()
        begin = time.perf_counter() + 1
        found = await asyncio.gather(*[one(arrival, begin) for arrival in arrivals])
    finally:
        client.shutdown()
    firsts = [first_s for _, first_s in found]
    hits = sum(num for num, _ in found) / sum(arrival.num_prompt for arrival in arrivals)
    return Result(hits, statistics.median(firsts), float(np.quantile(firsts, 0.99)))


def tokens_of(arrival: Arrival) -> list[int]:
    """A prompt in the model's vocabulary: a run of the trace has the same tokens wherever it occurs."""
    runs = [random.Random(token).choices(range(VOCAB_SIZE), k=count) for token, count in arrival.runs]
    return [token for run in runs for token in run]


def ways_of(args: EngineArgs, num: int) -> dict[str, Callable[[], Client]]:
    assert args.num_gpu_blocks_override
    all_blocks = replace(args, num_gpu_blocks_override=num * args.num_gpu_blocks_override)
    ways: dict[str, Callable[[], Client]] = {
        "pooled": lambda: make_client(all_blocks, ProcessTransport(all_blocks, placement=placements(1)[0]))
    }
    for policy in ROUTER_POLICIES:
        ways[policy] = lambda policy=policy: replicas_client(args, num, policy)
    return ways


def table(results: dict[str, list[Result]]) -> str:
    """Medians over the rounds, as Markdown."""
    hits = {name: statistics.median(result.hits for result in found) for name, found in results.items()}
    lines = ["| | hits | of pooled | of round robin | first token, median | p99 |", "|---|--:|--:|--:|--:|--:|"]
    for name, found in results.items():
        shares = f"{hits[name] / hits['pooled']:.2f} | {hits[name] / hits['round-robin']:.2f}"
        times = [statistics.median(values) for values in zip(*((r.median_s, r.p99_s) for r in found), strict=True)]
        lines.append(f"| {name} | {hits[name]:.1%} | {shares} | {1e3 * times[0]:,.0f} ms | {1e3 * times[1]:,.0f} ms |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=9.0)
    parser.add_argument("--blocks", type=int, default=3000)
    parser.add_argument("--num", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    arrivals = list(islice(read_trace(options.trace, scale=SCALE, rate=options.rate), options.requests))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        args = EngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            block_size=16,
            num_gpu_blocks_override=options.blocks,
        )
        ways = ways_of(args, options.num)
        results: dict[str, list[Result]] = {name: [] for name in ways}
        for number in range(options.rounds):
            for name, make in random.Random(number).sample(list(ways.items()), len(ways)):
                results[name].append(found := asyncio.run(replay(make(), arrivals)))
                load = os.getloadavg()[0]
                print(f"round {number}, {name}: {found}, load average {load:.1f}", file=sys.stderr, flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
