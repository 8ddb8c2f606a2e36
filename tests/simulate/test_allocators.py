"""The contiguous baselines: chunks never overlap, and their wasted memory is accounted for."""

from __future__ import annotations

import random

import pytest

from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.integers import cdiv
from octavo.params.sampling_params import SamplingParams
from octavo.simulate.allocators import (
    BatchCache,
    BuddyPool,
    ContiguousCache,
    Estimate,
    maximum,
    next_power_of_two,
    oracle,
    pow2,
    split_of,
)


def request(name: str, num_prompt: int, num_output: int, n: int = 1, **options: object) -> Request:
    params = SamplingParams(n=n, max_tokens=num_output)
    return Request(name, [1] * num_prompt, params, **options)  # type: ignore[arg-type]


def step(scheduler: Scheduler) -> StepPlan:
    step = scheduler.schedule()
    plan = step.plan
    if plan:
        draws = [[7] * plan.num_samples.get(i, count) if count else [] for i, count in enumerate(plan.num_sampled)]
        scheduler.update(step, StepResult(draws))
    return plan


@pytest.mark.parametrize("num_blocks", [1, 13, 64, 983])
def test_chunks_are_aligned_disjoint_and_merge(num_blocks: int) -> None:
    rnd, pool, held = random.Random(num_blocks), BuddyPool(num_blocks), list[list[int]]()
    refused = 0
    for _ in range(3000):
        size = 1 << rnd.randrange(num_blocks.bit_length())
        if rnd.random() < 0.55:
            if pool.fits(size):
                held.append(pool.allocate(size))
                assert len(held[-1]) == size and (held[-1][0] - 1) % size == 0
            else:
                refused += 1
                free = sorted(set(range(1, num_blocks + 1)) - {b for chunk in held for b in chunk})
                starts = [b for b in free if (b - 1) % size == 0 and set(range(b, b + size)) <= set(free)]
                assert not starts, "a chunk was free"
        elif held:
            pool.release(held.pop(rnd.randrange(len(held))))
        blocks = [b for chunk in held for b in chunk]
        assert len(blocks) == len(set(blocks)) == pool.num_used == num_blocks - pool.num_free == pool.num_refs
        assert all(1 <= b <= num_blocks for b in blocks)
    assert refused
    for chunk in held:
        pool.release(chunk)
    largest = 1 << (num_blocks.bit_length() - 1)
    assert pool.num_free == num_blocks and pool.fits(largest) and not pool.fits(2 * largest)


def test_fits_checks_several_chunks_together() -> None:
    pool = BuddyPool(12)  # a chunk of 8 and one of 4
    assert pool.fits(4, 3) and not pool.fits(4, 4) and pool.fits(8) and not pool.fits(8, 2)


@pytest.mark.parametrize(("number", "power"), [(1, 1), (2, 2), (3, 4), (25, 32), (32, 32), (33, 64)])
def test_next_power_of_two(number: int, power: int) -> None:
    assert next_power_of_two(number) == power


@pytest.mark.parametrize(
    ("estimate", "estimated"), [(oracle, 100 + 25), (pow2, 100 + 32), (maximum, 2048)], ids=["oracle", "pow2", "max"]
)
def test_request_reserves_its_estimate(estimate: Estimate, estimated: int) -> None:
    cache = ContiguousCache(983, 16, num_rows=64, estimate=estimate, max_len=2048)
    scheduler = Scheduler(cache)
    scheduler.add(request("a", 100, 25))
    step(scheduler)
    (running,) = scheduler.running
    chunk = next_power_of_two(cdiv(estimated, 16))
    assert len(running.sequences[0].block_ids) == chunk == cache.pool.num_used
    split = cache.split(scheduler.running)
    assert split.tokens == 100 and split.reserved == 25
    assert split.internal == estimated - 125 and split.external == chunk * 16 - estimated
    assert split_of(cache, scheduler.running) == split and sum(split) == 983 * 16
    blocks = running.sequences[0].block_ids
    assert blocks == list(range(blocks[0], blocks[0] + chunk))  # contiguous
    for _ in range(24):
        step(scheduler)
    assert not scheduler.requests and cache.pool.num_used == 0 and cache.split([]).free == 983 * 16


def test_max_batches_seven_requests_of_opt_13b() -> None:
    """Figure 13: 983 blocks hold 7 chunks of 2,048 tokens. The eighth request waits, and none is preempted."""
    cache = ContiguousCache(983, 16, num_rows=64, estimate=maximum, max_len=2048)
    scheduler = Scheduler(cache)
    for i in range(9):
        scheduler.add(request(str(i), 10, 5))
    step(scheduler)
    assert len(scheduler.running) == 7 and scheduler.waiting[0].wait_reason == "blocks"
    while scheduler.requests:
        step(scheduler)
    assert scheduler.num_preemptions == 0 and cache.pool.num_free == 983


def test_each_sample_has_its_own_chunk() -> None:
    cache = ContiguousCache(16, 4, num_rows=8, estimate=oracle, max_len=64)
    scheduler = Scheduler(cache)
    scheduler.add(request("a", 5, 7, n=3))  # chunks of 4 blocks
    scheduler.add(request("b", 5, 7, n=2))
    step(scheduler)
    (running,) = scheduler.running
    assert cache.pool.num_used == 12
    tables = [s.block_ids for s in running.sequences]
    assert len(tables) == 3 and not set(tables[0]) & set(tables[1]) and not set(tables[1]) & set(tables[2])
    assert sum(cache.split(scheduler.running)) == 64
    while scheduler.requests:
        step(scheduler)
    assert cache.pool.num_free == 16 and not cache._spare_chunks


def test_fragmented_chunks_do_not_fit() -> None:
    """8 blocks are free and two chunks of 4 are needed: free are one chunk of 4 and two separate ones of 2."""
    cache = ContiguousCache(16, 4, num_rows=8, estimate=oracle, max_len=64)
    chunks = [cache.buddies.allocate(2) for _ in range(8)]
    for i in (0, 1, 2, 4):
        cache.buddies.release(chunks[i])
    scheduler = Scheduler(cache)
    scheduler.add(request("a", 5, 7, n=2))
    assert cache.pool.num_available == 8
    assert not scheduler.schedule() and scheduler.waiting[0].wait_reason == "blocks"
    cache.buddies.release(chunks[3])
    assert scheduler.schedule()


def test_request_that_ends_before_forking_releases_all_chunks() -> None:
    cache = ContiguousCache(16, 4, num_rows=8, estimate=oracle, max_len=64)
    scheduler = Scheduler(cache)
    scheduler.add(request("a", 5, 7, n=3))
    scheduler.schedule()
    scheduler.abort("a")
    assert cache.pool.num_free == 16 and not cache._spare_chunks and not cache.holders


def test_dropped_beams_hand_over_their_chunks() -> None:
    """Both new beams may come from one parent: the dropped beam's chunk goes to the second."""
    rnd = random.Random(0)
    cache = ContiguousCache(16, 4, num_rows=8, estimate=oracle, max_len=64)
    scheduler = Scheduler(cache)

    def decide(parents: list) -> list:
        return [(rnd.choice(parents)[0], 7) for _ in range(3)]

    scheduler.add(request("a", 5, 9, width=3, num_samples=6, select_beams=decide))
    for _ in range(20):
        step(scheduler)
        for running in scheduler.running:
            tables = [b for s in running.sequences for b in s.block_ids]
            assert len(tables) == len(set(tables)) == 12, tables
    assert not scheduler.requests and cache.pool.num_free == 16 and not cache._spare_chunks and not cache._waiting_beams


def test_batch_is_closed_until_its_last_request_is_done() -> None:
    cache = BatchCache(983, 16, num_rows=64, max_len=2048, batch_size=3)
    scheduler = Scheduler(cache, max_num_batched_tokens=1 << 20)
    for i in range(5):
        scheduler.add(request(str(i), 10, 3 + i))
    running = []
    while scheduler.requests:
        step(scheduler)
        running.append([r.request_id for r in scheduler.running])
    assert cache.batches == [["0", "1", "2"], ["3", "4"]]
    assert running[0] == running[1] == ["0", "1", "2"]
    assert (running[1] == ["0", "1", "2"] and running[3] == ["1", "2"]) or ["2"] in running
    assert not any("2" in now and "3" in now for now in running)


def test_started_batch_admits_no_request() -> None:
    """Even if rows are free."""
    cache = BatchCache(983, 16, num_rows=64, max_len=2048, batch_size=3)
    scheduler = Scheduler(cache, max_num_batched_tokens=1 << 20)
    for name in ("a", "b"):
        scheduler.add(request(name, 10, 4))
    step(scheduler)
    scheduler.add(request("c", 10, 4))
    while scheduler.requests:
        step(scheduler)
    assert cache.batches == [["a", "b"], ["c"]]
