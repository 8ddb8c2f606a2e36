"""Several engine processes behind one client: where requests go, and where those of a dead engine go on.

The engines run on the oracle, which checks at every step that resumed requests are right.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from octavo import SamplingParams
from octavo.config import EngineArgs
from octavo.core.cache.kv_stats import KVStats
from octavo.engine.process.supervisor import EngineTimeouts
from octavo.engine.query import GetKVStats
from octavo.engine.stats import sum_kv_stats
from octavo.errors import EngineError, MemoryBudgetError, ParameterError, RequestFailedError
from octavo.frontend.engine_client import EngineClient
from octavo.frontend.replicas import engine_args, offset_endpoint, placements, replicas_client
from octavo.params.sampling_params import RequestOutputKind
from octavo.router.router import RouterPolicy
from tests.engine.process.engines import (
    OPTIONS,
    PARAMS,
    SHORT_TIMEOUTS,
    expected,
    last_of,
    many,
    nothing_left,
    oracle_client,
    oracle_command,
    prompt,
    reference_outputs,
    serving,
    until,
)
from tests.engine.process.engines import own_directory as own_directory

Client = EngineClient[Any]


def oracle_replicas(
    model: str,
    num: int = 2,
    policy: RouterPolicy = "affinity",
    *,
    timeouts: EngineTimeouts | None = None,
    options: dict[str, Any] | None = None,
    **faults: Any,
) -> Client:
    args = EngineArgs(model=model, **(OPTIONS | (options or {})))
    return replicas_client(args, num, policy, command=oracle_command(**faults), timeouts=timeouts)


@contextlib.asynccontextmanager
async def running(client: Client) -> AsyncIterator[Client]:
    """Start a client. On exit no engine may hold a block, and the router no request."""
    with nothing_left():
        async with client:
            yield client
            if client.is_running:
                assert not any(replica.handles for replica in client.transport.replicas)
                stats = await client.kv_stats()
                assert stats.num_used == 0 and stats.num_host_used == 0
                router = client.transport.router
                loads = [router.load(i) for i in range(len(client.transport.replicas))]
                assert all(load.num_requests == load.num_queued_tokens == 0 for load in loads)
                assert not router.index._coming


def kill(client: Client, index: int, number: int = signal.SIGKILL) -> None:
    pid = client.transport.replicas[index].pid
    assert pid is not None
    os.kill(pid, number)


def num_routed(client: Client) -> list[int]:
    return [client.transport.router.load(i).num_routed for i in range(len(client.transport.replicas))]


# -- routing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["affinity", "least-loaded", "round-robin"])
async def test_tokens_are_those_of_one_engine(model: str, policy: RouterPolicy) -> None:
    """Seeds of requests without one, too: they do not depend on the replica."""
    random_params = SamplingParams(max_tokens=20, temperature=1.5)
    async with serving(oracle_client(model)) as single:
        wanted = await many(single, 12, random_params)
    async with running(oracle_replicas(model, policy=policy)) as client:
        assert await many(client, 12, random_params) == wanted
        assert min(num_routed(client)) > 0


async def test_prompt_goes_where_its_prefix_is_cached(model: str) -> None:
    prefix = prompt(1, 100)
    async with running(oracle_replicas(model, 3)) as client:
        router = client.transport.router
        await last_of(client, prefix, PARAMS)
        (home,) = (i for i, num in enumerate(num_routed(client)) if num)
        await until(lambda: router.index.num_cached(home) > 0)  # its events come after the tokens
        for i in range(5):
            output = await last_of(client, [*prefix, i], PARAMS)
            decision = router.decisions[-1]
            assert (decision.replica, decision.chosen.num_hit_tokens) == (home, 100)
            assert output.num_cached_tokens == 100
        held = [await replica.query(GetKVStats()) for replica in client.transport.replicas]
        assert [router.index.num_cached(i) for i in range(3)] == [stats.num_cached for stats in held]
        assert await client.reset_prefix_cache() == sum(stats.num_cached for stats in held)
        await last_of(client, prefix, PARAMS)
        assert router.decisions[-1].chosen.num_hit_tokens == 0


async def test_salts_share_no_prefix(model: str) -> None:
    async with running(oracle_replicas(model)) as client:
        for salt, num_hits in ((b"a", 0), (b"b", 0), (b"a", 100)):
            output = await last_of(client, prompt(1, 103), PARAMS, salt=salt)
            assert client.transport.router.decisions[-1].chosen.num_hit_tokens == num_hits == output.num_cached_tokens


async def test_a_request_id_is_running_once(model: str) -> None:
    async with running(oracle_replicas(model, policy="round-robin", step_s=0.01)) as client:
        stream = client.generate(prompt(1), PARAMS, "x")
        await anext(stream)
        with pytest.raises(ParameterError, match="'x' is running already"):
            await last_of(client, prompt(2), PARAMS, request_id="x")
        assert await client.abort("x") and not await client.abort("y")
        async for output in stream:
            assert output.outputs[0].finish_reason == "abort"


async def test_invalid_request_leaves_no_load(model: str) -> None:
    async with running(oracle_replicas(model)) as client:
        with pytest.raises(Exception, match="token"):
            await last_of(client, [1000], PARAMS)


async def test_pins_are_kept_by_every_replica(model: str) -> None:
    async with running(oracle_replicas(model)) as client:
        await client.pin_prefix(prompt(1, 40), "system")
        held = [await replica.query(GetKVStats()) for replica in client.transport.replicas]
        assert [stats.num_pinned for stats in held] == [10, 10]
        with pytest.raises(ParameterError, match="pinned already"):
            await client.pin_prefix(prompt(2, 40), "system")
        kill(client, 1)
        await until(lambda: client.health().num_restarts == 1)
        assert await client.unpin_prefix("system") == 10
        with pytest.raises(ParameterError, match="system"):
            await client.unpin_prefix("system")


async def test_debug_finds_a_request_on_any_replica(model: str) -> None:
    async with running(oracle_replicas(model, policy="round-robin")) as client:
        for i in range(4):
            await last_of(client, prompt(i), PARAMS, request_id=f"r{i}")
        for i in range(4):
            found = await client.debug_request(f"r{i}")
            assert found is not None and found["status"] == "finished"
        assert await client.debug_request("other") is None


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_requests_of_a_dead_replica_go_on_elsewhere(model: str, number: int) -> None:
    """At once, without waiting for its restart; those of the other replica never notice."""
    timeouts = SHORT_TIMEOUTS if number == signal.SIGSTOP else None
    async with running(oracle_replicas(model, timeouts=timeouts, step_s=0.02, policy="round-robin")) as client:
        replicas, longer = client.transport.replicas, SamplingParams(max_tokens=200, seed=1)
        streams = asyncio.ensure_future(many(client, 8, longer))
        await until(lambda: all(len(r.handles) == 4 and all(h.started for h in r.handles.values()) for r in replicas))
        untouched = list(replicas[1].handles.values())
        kill(client, 0, number)
        seconds = await until(lambda: not replicas[0].handles, 20)
        assert seconds < (1 if number == signal.SIGKILL else 8)
        assert all(handle.num_deaths == 0 for handle in untouched)
        assert client.transport.router.stats.num_moved == 4 and client.health().state == "running"
        assert await streams == expected(8, longer)
        assert replicas[1].health().num_restarts == 0


async def test_nothing_is_lost_or_wrong_while_replicas_die(model: str) -> None:
    """20 deaths and hangs, of either replica or both; streams of deltas repeat nothing."""
    chance, params = random.Random(3), SamplingParams(max_tokens=60, seed=2, output_kind=RequestOutputKind.DELTA)
    timeouts = EngineTimeouts(silence_s=1.5, step_s=1.5, retry_s=0.05)

    async def stream(i: int) -> list[int]:
        received: list[int] = []
        async for output in client.generate(prompt(i), params):
            received += output.outputs[0].token_ids
        return received

    async def callers(first: int) -> None:
        for i in range(first, 400, 8):
            assert [await stream(i)] == reference_outputs(prompt(i), params)
            if num_killed == 20:
                return

    num_killed = 0
    async with running(oracle_replicas(model, timeouts=timeouts, step_s=0.004)) as client:
        work = asyncio.gather(*[callers(i) for i in range(8)])
        while num_killed < 20:
            await asyncio.sleep(chance.uniform(0.02, 0.4))
            index = chance.randrange(2)
            if client.transport.replicas[index].supervisor.is_up:
                kill(client, index, chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
                num_killed += 1
        await asyncio.wait_for(work, 120)
        await until(lambda: all(replica.supervisor.is_up for replica in client.transport.replicas))


async def test_request_that_kills_engines_fails_alone(model: str) -> None:
    """It kills both replicas at most once before it stays with one; the other serves on."""
    poison = 96
    async with running(oracle_replicas(model, step_s=0.005, poison=poison)) as client:
        streams = [asyncio.ensure_future(many(client, 6)) for _ in range(2)]
        with pytest.raises(RequestFailedError, match="engines died"):
            await last_of(client, [1, poison, 2], PARAMS)
        for done in streams:
            assert await done == expected(6)
        assert sorted(r.health().num_restarts for r in client.transport.replicas)[0] <= 1


async def test_others_take_over_when_a_replica_does_not_come_back(model: str, tmp_path: Path) -> None:
    needed = tmp_path / "needed"
    needed.touch()
    timeouts = EngineTimeouts(retry_s=0.01)
    async with running(oracle_replicas(model, step_s=0.01, needs=str(needed), timeouts=timeouts)) as client:
        needed.unlink()
        streams = asyncio.ensure_future(many(client, 8))
        await until(lambda: min(len(replica.handles) for replica in client.transport.replicas) > 0)
        kill(client, 0)
        await until(lambda: not client.transport.replicas[0].is_running)
        assert await streams == expected(8) and client.is_running
        assert client.health().state == "running" and "replica 0" in client.health().reason
        assert await many(client, 4) == expected(4)
        kill(client, 1)
        await until(lambda: not client.is_running)
        with pytest.raises(EngineError):
            await last_of(client, prompt(1), PARAMS)


# -- starting ----------------------------------------------------------------------------------------------------------


async def test_replica_that_does_not_fit_names_the_remedy(model: str) -> None:
    with nothing_left(), pytest.raises(MemoryBudgetError, match=r"replica \d of 2 does not fit: .*data_parallel_size"):
        await oracle_replicas(model, fail_in="loading the model").start()


async def test_replicas_on_different_devices_are_refused(model: str, tmp_path: Path) -> None:
    once = tmp_path / "once"
    once.touch()
    with nothing_left(), pytest.raises(ParameterError, match="fewer GPUs than replicas; lower data_parallel_size"):
        await oracle_replicas(model, device="cuda", once=str(once)).start()


@pytest.mark.parametrize("num", [1, 2, 3, 64])
def test_replicas_share_the_processors_and_the_memory(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 4, 7, 8, 9})
    monkeypatch.setattr("octavo.frontend.replicas.free_memory", lambda: 1000)
    parts = placements(num)
    assert [part.gpu for part in parts] == list(range(num)) and all(part.cpus for part in parts)
    assert sum(part.host_bytes for part in parts) <= 1000
    assert {cpu for part in parts for cpu in part.cpus} == {3, 4, 7, 8, 9}
    assert num > 5 or sum(len(part.cpus) for part in parts) == 5


def test_kv_events_have_an_address_for_each_replica() -> None:
    assert offset_endpoint("tcp://*:5557", 0) == "tcp://*:5557"
    assert offset_endpoint("tcp://127.0.0.1:5557", 2) == "tcp://127.0.0.1:5559"
    assert offset_endpoint("ipc:///run/events", 1) == "ipc:///run/events_dp1"
    config = {"enable_kv_cache_events": True, "replay_endpoint": "tcp://*:6000"}
    events = engine_args(EngineArgs(model="m", kv_events_config=config), 1).kv_events()
    assert (events.endpoint, events.replay_endpoint) == ("tcp://127.0.0.1:5558", "tcp://*:6001")
    assert events.data_parallel_rank == 1
    plain = EngineArgs(model="m")
    assert engine_args(plain, 1) is plain


def test_caches_add_up_as_one() -> None:
    numbers: dict[str, Any] = dict.fromkeys(KVStats.__slots__, 1) | {"block_size": 16, "hit_rate": 0.5}
    total = sum_kv_stats([KVStats(**numbers), KVStats(**(numbers | {"num_hits": 5}))])
    assert (total.num_blocks, total.block_size, total.hit_rate) == (2, 16, 0.75)
