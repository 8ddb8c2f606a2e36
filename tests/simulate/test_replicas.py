"""Replicas behind the router: what it knows and when, and the prefix hits that it keeps of one pooled cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.config import EngineArgs
from octavo.router.router import ROUTER_POLICIES, RouterPolicy
from octavo.simulate.cost import LinearCost
from octavo.simulate.devices import DEVICES
from octavo.simulate.models import MODELS
from octavo.simulate.report import summary
from octavo.simulate.simulation import Fleet, Records, SimConfig, simulate
from octavo.simulate.traces import FIRST_TOKEN, Arrival, read_trace

MOONCAKE = Path(__file__).parents[2].parent / "shared" / "data" / "traces" / "mooncake_conversation.jsonl.gz"
NUM_REPLICAS = 4


def config(cost: LinearCost, num_replicas: int = NUM_REPLICAS, **options: Any) -> SimConfig:
    args = EngineArgs(model="tiny", block_size=16, num_gpu_blocks_override=options.pop("num_blocks", 400))
    return SimConfig(MODELS["opt-13b"], DEVICES["a100-40"], args, num_replicas=num_replicas, cost=cost, **options)


def conversations(num: int = 400, num_users: int = 40) -> list[Arrival]:
    """Users in random order: each comes back with its prefix of 512 tokens and a new question."""
    rng = np.random.default_rng(0)
    users, times = rng.integers(num_users, size=num), np.cumsum(rng.exponential(0.05, size=num))
    return [
        Arrival(float(time_s), ((FIRST_TOKEN + int(user), 512), (FIRST_TOKEN + num_users + i, 64)), 8)
        for i, (user, time_s) in enumerate(zip(users, times, strict=True))
    ]


def results(setup: SimConfig, arrivals: Sequence[Arrival]) -> dict[str, dict[str, Any]]:
    """Summaries by policy, and of one replica with all the blocks, which is as fast as all replicas: "pooled"."""
    found = {policy: summary(simulate(replace(setup, router=policy), arrivals)) for policy in ROUTER_POLICIES}
    args, device, n = setup.resolved(), setup.device, setup.num_replicas
    assert args.max_num_seqs and args.max_num_batched_tokens
    fast = replace(device, bandwidth=n * device.bandwidth, flops=n * device.flops)
    pooled = replace(
        setup.args,
        num_gpu_blocks_override=n * setup.num_blocks(),
        max_num_seqs=n * args.max_num_seqs,
        max_num_batched_tokens=n * args.max_num_batched_tokens,
    )
    return found | {"pooled": summary(simulate(replace(setup, device=fast, args=pooled, num_replicas=1), arrivals))}


def check(found: dict[str, dict[str, Any]]) -> None:
    hits = {name: result["hit_rate"] for name, result in found.items()}
    assert hits["affinity"] >= 0.9 * hits["pooled"]
    assert hits["affinity"] >= 1.5 * hits["round-robin"]
    p99 = {name: result["ttft_s"]["p99"] for name, result in found.items()}
    assert p99["affinity"] <= p99["least-loaded"]


def test_affinity_keeps_the_hits_of_a_pooled_cache() -> None:
    check(results(config(LinearCost(0.01, 0.0003, 0.0)), conversations()))


@pytest.mark.shared
@pytest.mark.skipif(not MOONCAKE.exists(), reason="no ../shared/data/traces")
@pytest.mark.parametrize("rate", [20.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_affinity_keeps_the_hits_of_mooncakes_conversations(rate: float) -> None:
    """Of 830 tokens of a prompt, on caches of 150,000 tokens; 60 a second are more than the replicas can serve."""
    model = MODELS["llama-3.1-8b"]
    setup = SimConfig(model, DEVICES["a100-40"], EngineArgs(model=model.name), num_replicas=NUM_REPLICAS)
    check(results(setup, list(islice(read_trace(MOONCAKE, scale=1 / 16, rate=rate), 2000))))


@pytest.mark.parametrize("policy", ROUTER_POLICIES)
def test_every_request_is_reported_to_the_router(policy: RouterPolicy) -> None:
    arrivals = conversations(60)
    fleet = Fleet(config(LinearCost(0.01, 0.0003, 0.0), router=policy), Records(), token_source=None, interval_s=1.0)
    for i, arrival in enumerate(arrivals):
        fleet.submit(i, arrival)
    fleet.submit(len(arrivals), Arrival(1e6, ((FIRST_TOKEN, 1 << 20),), 8))  # refused, and told to the router
    fleet.submit(len(arrivals) + 1, Arrival(2e6, ((FIRST_TOKEN, 64),), 8))
    router = fleet.router
    assert sum(router.load(i).num_requests for i in range(NUM_REPLICAS)) == 1
    assert sum(router.load(i).num_queued_tokens for i in range(NUM_REPLICAS)) <= 64
    for i, replica in enumerate(fleet.replicas):
        num_known, pool = router.index.num_cached(i), replica.cache.pool
        assert (num_known > 0) == (policy == "affinity") and num_known <= pool.num_cached + pool.num_used


def test_router_does_not_know_the_future() -> None:
    """The second request arrives while a step of half a second runs: the first has not ended for the router."""
    fleet = Fleet(config(LinearCost(0.5, 0.0, 0.0), 2), Records(), token_source=None, interval_s=1.0)
    for i, (time_s, num_requests) in enumerate(((0.0, 1), (0.2, 2), (0.6, 2))):
        fleet.submit(i, Arrival(time_s, ((FIRST_TOKEN, 64),), 1))
        assert sum(fleet.router.load(replica).num_requests for replica in range(2)) == num_requests
    assert fleet.replicas[0].clock.now > 0.6
