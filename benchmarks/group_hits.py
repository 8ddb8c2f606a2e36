"""Prefix hits of agents' sessions in a cache with groups: `python benchmarks/group_hits.py [--sessions 8 ...]`.

The engine's scheduler without a device. Sessions share a system prompt of 2,048 tokens. A turn adds an output of 50 to
400 tokens and 300 to 2,000 tokens in all, to 16,384; 5 % of the turns are sent again. The model has `--layers` layers,
`--full` of them full. The columns are the share of prompt tokens found in a pool of some bytes:

    groups        the layers in groups
    one table     all layers keep all positions, in the same bytes
    full alone    full layers alone, in as many blocks as the groups have: what no windows could miss

A pool is given as a multiple of what the full layers of all sessions take at their ends. With `--state-blocks` the
other layers are recurrent: the first column has states of as many blocks, with the server's marks after the system
prompt and before the last tokens of a prompt (`--unmarked`: none). With `--strips` a session sends back only the second
half of an output: its reasoning is left out.
"""

from __future__ import annotations

import argparse
import random
from array import array
from bisect import insort
from collections.abc import Sequence
from functools import partial
from typing import Any

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.models.spec import group_layers
from octavo.params.sampling_params import SamplingParams

BLOCK_SIZE, SYSTEM, LONGEST, CHUNK, GENERATION_PROMPT = 16, 2048, 16384, 1024, 4


class Session:
    """Its next turn begins at step `at`."""

    def __init__(self, number: int, num_sessions: int, system: array[int], chance: random.Random) -> None:
        self.number, self.chance, self.turn = number, chance, 0
        self.at = chance.randint(0, 12 * num_sessions)
        self.history = system + self.text(chance.randint(100, 600))

    def text(self, num: int) -> array[int]:
        return array("i", (self.chance.randrange(1 << 20) for _ in range(num)))

    def next_turn(self, prompt: array[int], output: Sequence[int], step: int, pause: int) -> bool:
        """Whether there is one. `output` is what is sent back."""
        self.turn += 1
        if self.chance.random() >= 0.05:
            more = self.chance.randint(300, 2000) - len(output)
            self.history = prompt + array("i", output) + self.text(max(20, more))
        self.at = step + self.chance.randint(1, pause)
        return len(self.history) < LONGEST

    def __lt__(self, other: Session) -> bool:
        return self.at < other.at


def share_of_hits(
    cache: KVCacheManager, num_sessions: int, seed: int, *, marked: bool = True, strips: bool = False
) -> float:
    chance = random.Random(seed)
    system = array("i", (chance.randrange(1 << 20) for _ in range(SYSTEM)))
    waiting = sorted(Session(i, num_sessions, system, random.Random(chance.random())) for i in range(num_sessions))
    scheduler = Scheduler(cache, max_num_batched_tokens=8192, decode_window=64)
    running: dict[str, Session] = {}
    step = hits = total = 0
    while waiting or running:
        while waiting and waiting[0].at <= step:
            session = waiting.pop(0)
            name = f"{session.number}.{session.turn}.{step}"
            params = SamplingParams(max_tokens=session.chance.randint(50, 400))
            running[name] = session
            total += len(session.history)
            marks = (SYSTEM, len(session.history) - GENERATION_PROMPT) if marked else ()
            scheduler.add(Request(name, session.history, params, marks=marks))
        planned = scheduler.schedule()
        step += 1
        if not planned:
            continue
        plan = planned.plan
        ends = [start + count for start, count in zip(plan.starts, plan.counts, strict=True)]
        tokens = [
            [hash((seq.request.request_id, end - i)) & 0xFFFFF for i in range(num, 0, -1)]
            for seq, end, num in zip(planned.sequences, ends, plan.num_sampled, strict=True)
        ]
        for request in scheduler.update(planned, StepResult(tokens)):
            session = running.pop(request.request_id)
            hits += max(0, request.num_cached_tokens)
            output = request.finished_sequences[0].output_token_ids
            output = output[len(output) // 2 :] if strips else output
            if session.next_turn(request.prompt_token_ids, output, step, 4 * num_sessions):
                insort(waiting, session)
    return hits / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="*", default=[8])
    parser.add_argument("--layers", type=int, default=62)
    parser.add_argument("--full", type=int, default=10)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--pools", type=float, nargs="*", default=[0.7, 1.2, 2.2])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state-blocks", type=int, default=0)
    parser.add_argument("--interval", type=int, default=1024)
    parser.add_argument("--unmarked", action="store_true")
    parser.add_argument("--strips", action="store_true")
    options = parser.parse_args()
    period = options.layers // options.full
    kinds = [0 if i % period == period - 1 and i < options.full * period else 1 for i in range(options.layers)]
    groups = group_layers(options.layers, [options.window * kind for kind in kinds])
    windows: dict[str, Any] = {"windows": groups.windows, "max_chunk": CHUNK}
    num_layers, what = groups.num_layers, f"{len(groups.windows)} groups with windows of {options.window} tokens"
    if options.state_blocks:
        windows = {"state_blocks": options.state_blocks, "checkpoint_interval": options.interval}
        num_layers, what = options.full, f"states of {options.state_blocks} blocks"
    print(f"{options.full} full layers of {options.layers}, {what}")
    print("| sessions | pool | groups | one table | full alone |\n|--:|--:|--:|--:|--:|")
    for num_sessions in options.sessions:
        for pool in options.pools:
            num_blocks = int(pool * num_sessions * LONGEST // BLOCK_SIZE)
            caches = (
                KVCacheManager(num_blocks, BLOCK_SIZE, num_rows=8, **windows),
                KVCacheManager(num_blocks * num_layers // options.layers, BLOCK_SIZE, num_rows=8),
                KVCacheManager(num_blocks, BLOCK_SIZE, num_rows=8),
            )
            shares = []
            for cache in caches:
                fits = cache.max_output_tokens(LONGEST) > 400
                share = partial(share_of_hits, marked=not options.unmarked, strips=options.strips)
                shares.append(f"{share(cache, num_sessions, options.seed):.3f}" if fits else "too small")
            print(f"| {num_sessions} | {pool:g} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
