"""Time of a routing decision, and memory of the prefix index, on this processor.

    python benchmarks/router.py

A decision: hashing the prompt, looking up its blocks, comparing the replicas, and the calls at the first token and at
the end. Every replica caches the first half of the prompt, which is the slowest case of the lookup. Medians.
"""

from __future__ import annotations

import random
import statistics
import time
import tracemalloc
from collections.abc import Callable

from octavo.router.prefix_index import PrefixIndex
from octavo.router.router import Router

BLOCK_SIZE = 16
PROMPTS = 100, 1_000, 8_000, 32_000
REPLICAS = 1, 10, 100, 1_000
ROUNDS = 15
NUM_ENTRIES = 100_000


def median_us(function: Callable[[int], object]) -> float:
    times = []
    for i in range(ROUNDS):
        begin = time.perf_counter()
        function(i)
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times)


def decide(router: Router, name: str, num_tokens: int, hashes: list[int], among: int) -> None:
    router.route(name, num_tokens, hashes, among)
    router.start(name)
    router.finish(name)


def decision_us(num_tokens: int, num_replicas: int) -> float:
    prompt = [random.randrange(1 << 17) for _ in range(num_tokens)]
    router = Router("affinity", BLOCK_SIZE)
    hashes = router.hashes(prompt)
    for replica in range(num_replicas):
        router.index.store(replica, hashes[: len(hashes) // 2])
    among = (1 << num_replicas) - 1
    return median_us(lambda i: decide(router, str(i), num_tokens, hashes, among))


def hashing_us(num_tokens: int) -> float:
    prompt = [random.randrange(1 << 17) for _ in range(num_tokens)]
    router = Router("affinity", BLOCK_SIZE)
    return median_us(lambda _: router.hashes(prompt))


def bytes_an_entry(num_replicas: int) -> float:
    """Of blocks that one of `num_replicas` caches each."""
    tracemalloc.start()
    index = PrefixIndex()
    for _ in range(NUM_ENTRIES):
        index.store(random.randrange(num_replicas), [random.getrandbits(64)])
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / len(index)


def event_us() -> float:
    index = PrefixIndex()
    hashes = [random.getrandbits(64) for _ in range(NUM_ENTRIES)]
    begin = time.perf_counter()
    for block_hash in hashes:
        index.store(0, (block_hash,))
    for block_hash in hashes:
        index.remove(0, (block_hash,))
    return 1e6 * (time.perf_counter() - begin) / (2 * NUM_ENTRIES)


def main() -> None:
    print("| prompt | hashing, us | " + " | ".join(f"{n:,} replicas, us" for n in REPLICAS) + " |")
    print("|--:" * (2 + len(REPLICAS)) + "|")
    for num_tokens in PROMPTS:
        cells = [f"{decision_us(num_tokens, n):,.0f}" for n in REPLICAS]
        print(f"| {num_tokens:,} | {hashing_us(num_tokens):,.0f} | " + " | ".join(cells) + " |", flush=True)
    sizes = ", ".join(f"{bytes_an_entry(n):.0f} of {n:,} replicas" for n in REPLICAS)
    print(f"\nbytes an entry: {sizes}\none stored or removed block: {event_us():.2f} us")


if __name__ == "__main__":
    main()
